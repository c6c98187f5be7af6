"""A timer that is set, as the watcher of a table reads it; and an expired one of a rank, described in words."""

from __future__ import annotations

from phalanx._base import clock
from phalanx._base.frozen import Value
from phalanx._timers.layout import BREAKPOINT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


Key = tuple[int, int, int]
"""What identifies a timer that is set: its seat, its slot (0: the heartbeat) and its deadline."""


class Timer(Value):
    """A timer that is set, as the watcher reads it. Times are nanoseconds of CLOCK_MONOTONIC.

    Args:
        seat: The number of its seat.
        slot: Its slot; 0: the heartbeat of the seat.
        deadline: When it expires.
        span: The time that it had in all.
        thread: The id of the thread that is in the block; 0: unknown.
        scope: Its name; empty: it has none.
        location: The line of code of the block, as ``FILE:LINE``; may be empty.
        step: Of a heartbeat: the step that it reported.
    """

    seat: int
    slot: int
    deadline: int
    span: int
    thread: int
    scope: str
    location: str
    step: int = 0


class StepTimes(Value):
    """How long the latest steps of one rank took. Times are nanoseconds.

    Args:
        at: When the last step was reported, on CLOCK_MONOTONIC.
        count: How many steps were timed so far.
        times: How long the latest ones took, the shortest first.

    >>> StepTimes(5, 4, (10**9, 2 * 10**9, 3 * 10**9, 6 * 10**9)).summary()
    {'min': 1.0, 'median': 2.5, 'max': 6.0, 'mean': 3.0, 'count': 4}
    """

    at: int
    count: int
    times: tuple[int, ...]

    def summary(self) -> dict[str, float] | None:
        """Return the shortest, the median, the longest and the mean in seconds, and the count; None: there is none."""
        times = self.times
        if not times:
            return None
        half = len(times) // 2
        figures = {
            "min": times[0], "median": (times[half] + times[~half]) / 2, "max": times[-1],
            "mean": sum(times) / len(times),
        }  # fmt: skip
        return {name: round(figure / clock.NS, 9) for name, figure in figures.items()} | {"count": self.count}


class RankSigns(Value):
    """The signs of life of one rank, as its table of timers has them.

    Args:
        beat: When the last heartbeat was sent (nanoseconds of CLOCK_MONOTONIC); None: none was.
        step: The highest step above 0 that was reported; None: none was.
        breakpoint: Where a process of the rank stands at a breakpoint, as ``FILE:LINE``; None: nowhere.
        steps: How long its latest steps took; None: none was reported.
        limit: When its next heartbeat is late (nanoseconds, likewise); None: none is expected.
    """

    beat: int | None
    step: int | None
    breakpoint: str | None
    steps: StepTimes | None = None
    limit: int | None = None


class Hang(Value):
    """An expired timer of one rank. Keeper and launcher exchange it as a tuple.

    Args:
        rank: The local rank.
        pid: The process that set the timer.
        is_worker: Whether that is the worker itself, and not a process below it.
        timer: The timer.
    """

    rank: int
    pid: int
    is_worker: bool
    timer: Timer

    @classmethod
    def from_tuple(cls, values: tuple[Any, ...]) -> Hang:
        """Make a hang of what `to_tuple` returned."""
        rank, pid, is_worker, *timer = values
        return cls(rank, pid, is_worker, Timer(*timer))

    def to_tuple(self) -> tuple[Any, ...]:
        """Return plain values, for a message."""
        return self.rank, self.pid, self.is_worker, *self.timer.__getstate__().values()

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What distinguishes it from every other."""
        return self.rank, self.timer.seat, self.timer.slot, self.timer.deadline

    def overdue(self, moment: int) -> float:
        """Return the seconds from the deadline to a moment (CLOCK_MONOTONIC, nanoseconds)."""
        return (moment - self.timer.deadline) / clock.NS

    @property
    def message(self) -> str:
        """The message of the failure of a process that hangs."""
        return f"Hang: {self.description}"

    @property
    def description(self) -> str:
        """What was not done in time, in words."""
        timer = self.timer
        span = f"within {timer.span / clock.NS:g} s" if timer.span > 0 else "in time"
        process = "" if self.is_worker else f", in process {self.pid} below the worker"
        if not timer.slot:
            return f"no heartbeat for {timer.span / clock.NS:g} s (the last at step {timer.step}){process}"
        if timer.scope == BREAKPOINT:
            return f"breakpoint at {timer.location}: nobody attached in {timer.span / clock.NS:g} s{process}"
        if timer.scope:
            location = f" ({timer.location})" if timer.location else ""
            return f"{timer.scope!r}{location} was not left {span}{process}"
        return f"the block at {timer.location} was not left {span}{process}"
