"""When a watcher was not there, as far as its own waits tell, and what timers are owed for that.

A container was paused, a virtual machine moved, a process stopped. Those that are watched were stopped as well,
perhaps, and that time was not theirs: a deadline is put off by it. Only a wait that ended too late tells of it: what a
watcher did itself meanwhile, however slowly, held up nobody else. A pause that lay within a wait cannot be seen, so a
watcher of timers waits in parts, see `part`. Pure rules; who waits, measures.
"""

from __future__ import annotations

BRIEFLY = 0.05
"""Seconds by which any wait may end too late on a busy machine."""

LONG = 0.5
"""Seconds by which no wait of a process that may run ends too late."""

_PARTS = 8
_KEPT = 256  # pauses that are told apart


def part(seconds: float) -> float:
    """How long a watcher waits at a time, whose next deadline is ``seconds`` away: an eighth of that.

    That is the most that a pause which nobody has seen can take from a timer. (And eight times a minute, say, is no
    polling: there is nothing to wait for where no timer runs.)

    >>> part(60), part(0.1)
    (7.5, 0.05)
    """
    return max(BRIEFLY, seconds / _PARTS)


class Pauses:
    """The times in which a watcher was not there. All moments are in seconds, monotonic.

    >>> pauses = Pauses()
    >>> pauses.note(10.0, 12.0, 12.01), pauses.note(20.0, 22.0, 22.5), pauses.note(30.0, 32.0, 40.0)
    (None, None, None)
    >>> pauses.lost(0.0), pauses.lost(22.25), pauses.lost(35.0), pauses.lost(50.0)
    (10.5, 10.25, 5.0, 0)
    """

    def __init__(self) -> None:
        self._all: list[tuple[float, float, float]] = []  # since when, until when, and how many seconds of that

    def note(self, began: float, planned: float, ended: float) -> None:
        """A wait ``began``, was to end as ``planned`` at the latest, and has ``ended``.

        If that was a little late, that little counts: it may be a busy machine. If it was late by more than `LONG`, we
        were stopped, and nobody knows since when: the whole wait counts.
        """
        late = ended - planned
        if late > BRIEFLY:
            since = began if late > LONG else planned
            self._all.append((since, ended, ended - since))
            if len(self._all) > _KEPT:
                self._join(ended)

    def _join(self, now: float) -> None:
        """Make one of two that lie close together, for how long ago they were: no timer is to lose the first ones."""
        pairs = list(zip(self._all, self._all[1:], strict=False))
        spans = [(second[1] - first[0]) / (now - first[0]) for first, second in pairs]
        where = spans.index(min(spans))
        first, second = pairs[where]
        self._all[where : where + 2] = [(first[0], second[1], first[2] + second[2])]

    def owed(self, since: float, began: float, ended: float) -> float:
        """How many seconds a timer is owed that was set at a moment, and of which nobody was told before now.

        If that was in our last wait (it ``began``, and has ``ended``), it should have ended the wait at once.
        """
        unheard = ended - since if since >= began else 0.0
        return max(self.lost(since), unheard if unheard > BRIEFLY else 0.0)

    def __bool__(self) -> bool:
        return bool(self._all)

    def lost(self, since: float) -> float:
        """How many seconds since a moment were nobody's."""
        return sum(min(seconds, ended - max(began, since)) for began, ended, seconds in self._all if ended > since)
