"""One expired timer: whose it is, and what is to be said of it. A value that keeper and launcher share."""

from __future__ import annotations

from phalanx._base import clock
from phalanx._timers.timetable import Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Hang:
    """An expired timer of one rank.

    Args:
        rank: The local rank.
        pid: The process that set the timer.
        own: Whether that is the worker, and not a process below it.
        timer: The timer.
    """

    __slots__ = ("own", "pid", "rank", "timer")

    def __init__(self, rank: int, pid: int, own: bool, timer: Timer) -> None:  # noqa: FBT001 - positional, as in `told`
        self.rank = rank
        self.pid = pid
        self.own = own
        self.timer = timer

    @classmethod
    def of(cls, told: tuple[Any, ...]) -> Hang:
        """What `told` was made of."""
        rank, pid, own, *timer = told
        return cls(rank, pid, own, Timer(*timer))

    @property
    def told(self) -> tuple[Any, ...]:
        """As plain values, for a message."""
        timer = self.timer
        moments = (timer.deadline, timer.span, timer.thread)
        return (self.rank, self.pid, self.own, timer.seat, timer.slot, *moments, timer.scope, timer.place, timer.step)

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What tells it from every other."""
        return self.rank, self.timer.seat, self.timer.slot, self.timer.deadline

    def late(self, moment: int) -> float:
        """Seconds beyond the deadline at a moment (CLOCK_MONOTONIC, nanoseconds)."""
        return (moment - self.timer.deadline) / clock.NS

    @property
    def what(self) -> str:
        """What was not done in time, in words."""
        timer = self.timer
        span = f"within {timer.span / clock.NS:g} s" if timer.span > 0 else "in time"
        who = "" if self.own else f", in process {self.pid} below the worker"
        if not timer.slot:
            return f"no heartbeat for {timer.span / clock.NS:g} s (the last at step {timer.step}){who}"
        if timer.scope:
            place = f" ({timer.place})" if timer.place else ""
            return f"{timer.scope!r}{place} was not left {span}{who}"
        return f"the block at {timer.place} was not left {span}{who}"
