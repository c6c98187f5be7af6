"""Timers expire here: looks at a `TimerTable` at the next deadline, or when a client writes to its bell; never else.

Owns when to look, which expired timers are new, and how long a deadline is postponed after the watching process itself
was stopped. A group's keeper has one; what follows there is decided by `escalation`.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._base.loop import SLACK
from phalanx._timers.layout import NEVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from phalanx._base.loop import Deadline, Loop
    from phalanx._timers.table import TimerTable
    from phalanx._timers.timer import Key, Timer
else:
    from _collections import deque  # the C half, which the keeper has sooner

MOST = 64
"""The most timers that are passed on in one turn of the loop: other callbacks have their turn before the next ones."""

_TURNS = 8


class TimerScheduler:
    """Calls ``expired`` with the timers whose deadline is over, each once, in the loop's thread.

    A deadline is postponed by the time in which this process could not run, see `suspension`.

    Args:
        table: The table to look at.
        loop: The loop that waits.
        expired: Called with one to `MOST` timers. It may `rearm` them.
        seen: Called with one to `MOST` timers in slots that were not in use before.
    """

    def __init__(
        self,
        table: TimerTable,
        loop: Loop,
        expired: Callable[[list[Timer]], None],
        seen: Callable[[list[Timer]], None] = lambda _timers: None,
    ) -> None:
        self._table = table
        self._loop = loop
        self._expired = expired
        self._seen = seen
        self._later: dict[Key, int] = {}  # of expired timers that are still set: when they expire again
        self._rearmed: dict[Key, int] = {}  # the deadlines that `rearm` has given them
        self._new: deque[Key] = deque()  # to be passed to `seen`
        self._due: deque[Key] = deque()  # to be passed to `expired`
        self._busy = False  # whether one turn does not take all of them
        self._next: Deadline | None = None
        self._planned = NEVER  # the moment of the next look, in nanoseconds

    def open(self) -> None:
        """Start to look."""
        self._loop.watch(self._table.fileno(), self._on_bell)
        self._look()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._loop.forget(self._table.fileno())
        self._new.clear()
        self._due.clear()
        self._busy = False
        if self._next is not None:
            self._next.cancel()

    def rearm(self, timer: Timer, moment: int) -> None:
        """Have an expired timer expire again at ``moment`` (nanoseconds), unless it is disarmed before."""
        self._rearmed[timer.seat, timer.slot, timer.deadline] = moment
        self._postpone((timer.seat, timer.slot, timer.deadline), moment)

    def _postpone(self, key: Key, moment: int) -> None:
        self._later[key] = moment
        if moment < self._planned:
            self._plan(max(moment, clock.now_ns()))

    def _on_bell(self, _events: int) -> None:
        self._table.clear_bell()
        self._look()

    def _plan(self, moment: int) -> None:
        """Look at ``moment``, and not before, unless the bell is written to."""
        if self._next is not None:
            self._next.cancel()
        self._next = None if moment == NEVER else self._loop.at(moment / clock.NS, self._look)
        self._loop.watch_for_pauses(moment / clock.NS if moment != NEVER else 0.0)
        self._planned = moment

    def _look(self) -> None:
        if self._busy:  # the next look comes once all is passed on: that delay is ours, and postpones no deadline
            self._plan(NEVER)
            return
        now = clock.now_ns()
        planned = self._planned
        due, then = self._table.look(now)
        for turn in range(_TURNS):
            self._later = {key: self._later[key] for key in due if key in self._later}
            self._rearmed = {key: moment for key, moment in self._rearmed.items() if key in self._later}
            then = min([then, *(moment for moment in self._later.values() if moment > now)])
            self._table.publish(then)
            now = clock.now_ns()
            due, earliest = self._table.look(now)
            if earliest >= then:
                break
            # A client that sets ever earlier deadlines must not keep this loop going.
            then = earliest if turn + 1 < _TURNS else now
        self._plan(then)
        fresh = [key for key in due if self._later.get(key, 0) <= now]
        fresh = [key for key in fresh if not self._postponed_by_pause(key, planned, now)]
        self._later.update(dict.fromkeys(fresh, NEVER))
        self._new.extend(self._table.newly_armed())
        self._due.extend(sorted(fresh, key=_deadline))
        self._pass_on()

    def _postponed_by_pause(self, key: Key, planned: int, now: int) -> bool:
        """Postpone an expired timer by the time in which this process could not run. Returns whether it did.

        Args:
            key: The timer.
            planned: When this look was to be.
            now: When it was.
        """
        loop, deadline = self._loop, self._rearmed.get(key, key[2])
        unseen = key[2] < planned and loop.waited_until - loop.waited_from > SLACK
        timer = self._table.read(key) if loop.pauses or unseen else None
        if timer is None:
            return False
        set_at = (deadline - timer.span) / clock.NS
        if not timer.slot and deadline == key[2]:  # a heartbeat, which a long block may have extended
            set_at = min(set_at, self._table.last_beat(timer.seat) / clock.NS)
        lost = loop.pauses.lost(set_at)
        if unseen:  # its deadline was before this look was planned, so its client has written to the bell
            lost = loop.pauses.owed(set_at, loop.waited_from, loop.waited_until)
        until = deadline + int(lost * clock.NS)
        if until > now:
            self._postpone(key, until)
        return until > now

    def _pass_on(self) -> None:
        """Pass on some timers, and the others in the next turn. Look again once several turns have passed."""
        for keys, take in ((self._new, self._seen), (self._due, self._expired)):
            some = (self._table.read(keys.popleft()) for _ in range(min(len(keys), MOST)))
            timers = [timer for timer in some if timer is not None]
            if timers:
                take(timers)
        before, self._busy = self._busy, bool(self._new or self._due)
        if self._busy:
            self._loop.call(self._pass_on)
        elif before:
            self._look()


def _deadline(key: Key) -> int:
    return key[2]
