"""Computes how long a process that watches timers was suspended, and by how much their deadlines move for that.

A container is paused, a virtual machine migrated, a process stopped. The watched processes may have been stopped as
well, and could not use that time: their deadlines move by it. A suspension shows as a wait that ended too late; time
that the watcher spends on its own work, however slowly, stops no other process and does not count. A suspension within
a wait cannot be seen, so a watcher of timers waits in slices, see `wait_slice`. Pure: the caller measures its waits.
"""

from __future__ import annotations

SLACK = 0.05
"""Seconds by which a wait may end late on a busy machine."""

LONG = 0.5
"""Seconds by which a wait ends late only if the process was suspended."""

_PARTS = 8
_KEPT = 256  # pauses that are kept apart


def wait_slice(seconds: float) -> float:
    """Return how long a watcher waits at a time when its next deadline is ``seconds`` away: an eighth of that.

    That is the most that an unseen suspension can take from a timer. It is no polling: where no timer runs, nothing
    waits in slices.

    >>> wait_slice(60), wait_slice(0.1)
    (7.5, 0.05)
    """
    return max(SLACK, seconds / _PARTS)


class Pauses:
    """The times in which a watcher was suspended. All moments are in seconds, monotonic.

    >>> pauses = Pauses()
    >>> pauses.note(10.0, 12.0, 12.01), pauses.note(20.0, 22.0, 22.5), pauses.note(30.0, 32.0, 40.0)
    (None, None, None)
    >>> pauses.lost(0.0), pauses.lost(22.25), pauses.lost(35.0), pauses.lost(50.0)
    (10.5, 10.25, 5.0, 0)
    """

    def __init__(self) -> None:
        self._all: list[tuple[float, float, float]] = []  # since when, until when, and how many seconds of that

    def note(self, began: float, planned: float, ended: float) -> None:
        """Note a wait that ``began``, was to end as ``planned`` at the latest, and has ``ended``.

        If it was late by more than `SLACK`, the delay counts: the machine may be busy. If it was late by more than
        `LONG`, the process was suspended at an unknown moment: the whole wait counts.
        """
        late = ended - planned
        if late > SLACK:
            since = began if late > LONG else planned
            self._all.append((since, ended, ended - since))
            if len(self._all) > _KEPT:
                self._join(ended)

    def _join(self, now: float) -> None:
        """Merge the two neighbours that lie closest for their age: no pause is dropped, for timers that are old."""
        pairs = list(zip(self._all, self._all[1:], strict=False))
        spans = [(second[1] - first[0]) / (now - first[0]) for first, second in pairs]
        where = spans.index(min(spans))
        first, second = pairs[where]
        self._all[where : where + 2] = [(first[0], second[1], first[2] + second[2])]

    def owed(self, since: float, began: float, ended: float) -> float:
        """Return by how many seconds a timer moves that was set at ``since`` and is first seen now.

        If it was set in the last wait (which ``began``, and has ``ended``), it should have ended that wait at once.
        """
        delay = ended - since if since >= began else 0.0
        return max(self.lost(since), delay if delay > SLACK else 0.0)

    def __bool__(self) -> bool:
        return bool(self._all)

    def lost(self, since: float) -> float:
        """Return for how many seconds after ``since`` the watcher was suspended."""
        return sum(min(seconds, ended - max(began, since)) for began, ended, seconds in self._all if ended > since)
