"""One timer that is set, as the watcher of a table reads it: what a `TimerTable` returns."""

from __future__ import annotations

from phalanx._base.frozen import Value

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

    __slots__ = ("seat", "slot", "deadline", "span", "thread", "scope", "location", "step")  # noqa: RUF023 - as the arguments

    seat: int
    slot: int
    deadline: int
    span: int
    thread: int
    scope: str
    location: str
    step: int

    def __init__(
        self, seat: int, slot: int, deadline: int, span: int, thread: int, scope: str, location: str, step: int = 0
    ) -> None:
        self._store(
            seat=seat, slot=slot, deadline=deadline, span=span, thread=thread, scope=scope, location=location, step=step
        )
