"""Looks at a `Timetable` when there is something to see: at the next deadline, or when somebody rings; never else.

Owns when to look, and which expired timers are new. What is to be done about them, its owner knows.
"""

from __future__ import annotations

from phalanx._core import clock
from phalanx._core.timetable import LATE, NEVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._core.deadlines import Deadline
    from phalanx._core.loop import Loop
    from phalanx._core.timetable import Timer, Timetable

Key = tuple[int, int, int]


class Lookout:
    """Calls ``expired`` with timers whose deadline is over, each once. Everything happens in the loop's thread.

    A look that comes more than a second late is of somebody who has been stopped: a container that was paused, a
    virtual machine that was moved. Those that are watched were stopped as well, perhaps, and were left no time
    to be in time. So what has expired meanwhile may take its span once more.

    Args:
        table: What to look at.
        loop: What waits.
        expired: Called with one timer or more. It may `rearm` them.
        seen: Called with timers in slots that were not in use before.
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
        self._next: Deadline | None = None
        self._planned = NEVER  # when that is, in nanoseconds

    def open(self) -> None:
        """Begin."""
        self._loop.watch(self._table.fileno(), self._rung)
        self._look()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._loop.forget(self._table.fileno())
        if self._next is not None:
            self._next.cancel()

    def rearm(self, timer: Timer, moment: int) -> None:
        """Have an expired timer expire again at ``moment`` (ns), should it not be cleared until then."""
        self._later[_key(timer)] = moment
        self._loop.call(self._look)

    def _rung(self, _events: int) -> None:
        self._table.hear()
        self._look()

    def _look(self) -> None:
        now = clock.now_ns()
        away = now - self._planned > LATE
        due, then = self._table.look(now)
        while True:
            over = {_key(timer) for timer in due}
            self._later = {key: moment for key, moment in self._later.items() if key in over}
            then = min([then, *(moment for moment in self._later.values() if moment > now)])
            self._table.publish(then)
            now = clock.now_ns()
            due, again = self._table.look(now)
            if again >= then:
                break
            then = again
        if self._next is not None:
            self._next.cancel()
        self._next = None if then == NEVER else self._loop.at(then / clock.NS, self._look)
        self._planned = then
        new = self._table.news()
        if new:
            self._seen(new)
        fresh = [timer for timer in due if self._later.get(_key(timer), 0) <= now]
        if away:
            for timer in fresh:
                if _key(timer) not in self._later:
                    self.rearm(timer, now + timer.span)
            fresh = [timer for timer in fresh if self._later.get(_key(timer), 0) <= now]
        if fresh:
            self._later.update((_key(timer), NEVER) for timer in fresh)
            self._expired(fresh)


def _key(timer: Timer) -> Key:
    return timer.seat, timer.slot, timer.deadline
