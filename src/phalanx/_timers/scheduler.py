"""Looks at a `Timetable` when there is something to see: at the next deadline, or when somebody rings; never else.

Owns when to look, and which expired timers are new. What is to be done about them, its owner knows.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._base.suspension import SLACK
from phalanx._timers.timetable import NEVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from phalanx._base.deadlines import Deadline
    from phalanx._base.loop import Loop
    from phalanx._timers.timetable import Key, Timer, Timetable
else:
    from _collections import deque  # the C half, which the keeper has sooner

MOST = 64
"""The most timers that are handed over in one turn of the loop: others have their turn before the next ones."""

_TURNS = 8


class Lookout:
    """Calls ``expired`` with timers whose deadline is over, each once. Everything happens in the loop's thread.

    A deadline is put off by the time in which we were not there, see `away`.

    Args:
        table: What to look at.
        loop: What waits.
        expired: Called with one timer or more, `MOST` at the most. It may `rearm` them.
        seen: Called with timers in slots that were not in use before, `MOST` at the most.
    """

    def __init__(
        self,
        table: Timetable,
        loop: Loop,
        expired: Callable[[list[Timer]], None],
        seen: Callable[[list[Timer]], None] = lambda _timers: None,
    ) -> None:
        self._table = table
        self._loop = loop
        self._expired = expired
        self._seen = seen
        self._later: dict[Key, int] = {}  # of expired timers that have not been cleared: when they count again
        self._again: dict[Key, int] = {}  # and their deadlines, where somebody else has set them anew
        self._new: deque[Key] = deque()  # to be handed over to `seen`
        self._due: deque[Key] = deque()  # to be handed over to `expired`
        self._busy = False  # whether there are more of them than one turn takes
        self._next: Deadline | None = None
        self._planned = NEVER  # when that is, in nanoseconds

    def open(self) -> None:
        """Begin."""
        self._loop.watch(self._table.fileno(), self._rung)
        self._look()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._loop.forget(self._table.fileno())
        self._new.clear()
        self._due.clear()
        self._busy = False
        if self._next is not None:
            self._next.cancel()

    def rearm(self, timer: Timer, moment: int) -> None:
        """Have an expired timer expire again at ``moment`` (ns), should it not be cleared until then."""
        self._again[timer.seat, timer.slot, timer.deadline] = moment
        self._put_off((timer.seat, timer.slot, timer.deadline), moment)

    def _put_off(self, key: Key, moment: int) -> None:
        self._later[key] = moment
        if moment < self._planned:
            self._plan(max(moment, clock.now_ns()))

    def _rung(self, _events: int) -> None:
        self._table.hear()
        self._look()

    def _plan(self, moment: int) -> None:
        """Look at ``moment``, and not before, unless somebody rings."""
        if self._next is not None:
            self._next.cancel()
        self._next = None if moment == NEVER else self._loop.at(moment / clock.NS, self._look)
        self._loop.watch_for_pauses(moment / clock.NS if moment != NEVER else 0.0)
        self._planned = moment

    def _look(self) -> None:
        if self._busy:  # then once all has been handed over; that comes late because of us, and of nobody else
            self._plan(NEVER)
            return
        now = clock.now_ns()
        planned = self._planned
        due, then = self._table.look(now)
        for turn in range(_TURNS):
            self._later = {key: self._later[key] for key in due if key in self._later}
            self._again = {key: moment for key, moment in self._again.items() if key in self._later}
            then = min([then, *(moment for moment in self._later.values() if moment > now)])
            self._table.publish(then)
            now = clock.now_ns()
            due, again = self._table.look(now)
            if again >= then:
                break
            then = again if turn + 1 < _TURNS else now  # who sets ever earlier deadlines must not keep us here
        self._plan(then)
        fresh = [key for key in due if self._later.get(key, 0) <= now]
        fresh = [key for key in fresh if not self._spared(key, planned, now)]
        self._later.update(dict.fromkeys(fresh, NEVER))
        self._new.extend(self._table.news())
        self._due.extend(sorted(fresh, key=_deadline))
        self._hand_over()

    def _spared(self, key: Key, planned: int, now: int) -> bool:
        """Whether a timer that has expired gets more time, because we were not there. ``planned`` is this look."""
        loop, deadline = self._loop, self._again.get(key, key[2])
        in_vain = key[2] < planned and loop.waited_until - loop.waited_from > SLACK
        timer = self._table.read(key) if loop.pauses or in_vain else None
        if timer is None:
            return False
        set_at = (deadline - timer.span) / clock.NS
        if not timer.slot and deadline == key[2]:  # a heartbeat, which a long block may have put off
            set_at = min(set_at, self._table.last_beat(timer.seat) / clock.NS)
        lost = loop.pauses.lost(set_at)
        if in_vain:  # it was set for a moment before this look, so it has rung
            lost = loop.pauses.owed(set_at, loop.waited_from, loop.waited_until)
        until = deadline + int(lost * clock.NS)
        if until > now:
            self._put_off(key, until)
        return until > now

    def _hand_over(self) -> None:
        """Tell of some timers; of the others in the next turn. After several turns there may be others to see."""
        for keys, take in ((self._new, self._seen), (self._due, self._expired)):
            some = (self._table.read(keys.popleft()) for _ in range(min(len(keys), MOST)))
            timers = [timer for timer in some if timer is not None]
            if timers:
                take(timers)
        again, self._busy = self._busy, bool(self._new or self._due)
        if self._busy:
            self._loop.call(self._hand_over)
        elif again:
            self._look()


def _deadline(key: Key) -> int:
    return key[2]
