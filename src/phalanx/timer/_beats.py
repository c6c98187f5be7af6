"""Heartbeats: `beat`, `progress` and `rest`."""

from __future__ import annotations

import os

from phalanx._timers.layout import SEAT_BEAT, SEAT_REST, SEAT_STEP
from phalanx.timer import _routing
from phalanx.timer._routing import NobodyWatchesError, find_seat, take_group_seat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from phalanx._timers.client import Seat

_seat: Seat | None = None  # where heartbeats go, once one was sent
_rests: list[rest] = []  # the blocks of that kind that are entered


def beat() -> None:
    """Say that this rank is alive: call it once per step of the training loop. It costs a quarter of a microsecond.

    With ``--hang-timeout TIME`` (`TimerSpecs.hang_timeout`), a rank whose last beat is older is hung. The first
    beat arms it, so a start may take its time. An `expires` block in any process of the rank extends it, and the end of
    the block counts as a beat. After the last step, call `rest`. In a process that is in no such group, it does
    nothing. If the group's table cannot be opened, it says so once on stderr, and does nothing.
    """
    progress()


def progress(step: int = 0) -> None:
    """`beat`, and say which step this is: reports name the last one.

    Args:
        step: A number of 64 bits, as you count.
    """
    global _seat  # noqa: PLW0603 - one for the process
    seat = _seat
    if seat is None:
        if _routing.nobody_watches:
            return
        try:
            seat = _seat = find_seat() or take_group_seat()
        except NobodyWatchesError:
            _routing.nobody_watches = True
            return
        except (RuntimeError, ValueError) as error:  # a program that beats asked for nothing, and must not fail of it
            _routing.nobody_watches = True
            from phalanx._base import std_streams

            std_streams.write_stderr(f"phalanx: heartbeats of process {os.getpid()} are not watched: {error}\n")
            return
    seat.beat(step)
    if seat is not _seat:  # another thread has configured another client meanwhile
        seat.give_up_beats()


class rest:  # noqa: N801 - used as a verb, as `expires` is
    """Suspend this process's heartbeat until its next `beat`: what comes now may take any time.

    It is for an evaluation, an upload, or what runs after the last step. It covers the processes below this one as well
    (loaders that are idle meanwhile), but neither its parents nor its siblings. `expires` blocks are still watched.

    It is also a context manager, which can be used again. When the block is left, and heartbeats ran before, it beats
    once, with the last step; of several blocks at once, the last one does.

    At the end of a worker's program (its function has returned, its script is at its end, or either has called
    ``sys.exit(0)``) the heartbeat is suspended by itself, so exit handlers and threads may take their time. After a
    failure it is not.

    In a process that is in no group, it does nothing. It never raises.

    >>> with rest():
    ...     pass
    """

    __slots__ = ("ran",)

    ran: bool
    """Whether the end of this block beats."""

    def __init__(self) -> None:
        self.ran = False
        with _routing.lock:
            seat = _seat_for_beats()
            if seat is not None:
                self.ran = seat.rest()

    def __enter__(self) -> Self:
        with _routing.lock:
            seat = _seat_for_beats()
            if seat is not None:
                self.ran |= seat.rest()  # it may have been left before, or a heartbeat has come
            _rests.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _routing.lock:
            if not any(one is self for one in _rests):  # a fork of the process that entered it
                return
            _rests.remove(self)
            ran, self.ran = self.ran, False
            if ran and _rests:
                _rests[-1].ran = True  # the process still rests
            elif ran and _seat is not None:
                _seat.beat(_seat.words[SEAT_STEP])


def _seat_for_beats() -> Seat | None:
    """Return where heartbeats go, or would go; None if none are expected."""
    global _seat  # noqa: PLW0603 - as above
    if _seat is None and not _routing.nobody_watches:
        try:
            _seat = find_seat() or take_group_seat()
        except Exception:  # noqa: BLE001 - `beat` would report it; a client of the user's may raise anything
            return None
    return _seat


def move_beats() -> None:
    """Continue running heartbeats at the client that was just configured. The seat before expects none any more."""
    global _seat  # noqa: PLW0603 - as above
    with _routing.lock:
        before = _seat
        if before is None:
            return
        try:
            seat = find_seat() or take_group_seat()
        except (RuntimeError, ValueError):  # there is no other seat
            return
        if seat is before:
            return
        step = before.words[SEAT_STEP]
        if before.words[SEAT_BEAT] and not before.words[SEAT_REST]:
            seat.beat(step)
        else:
            seat.rest()
        _seat = seat
        before.give_up_beats()


def _start_anew() -> None:
    """After a fork, in the child: forget the parent's heartbeats."""
    global _seat  # noqa: PLW0603 - as above
    _seat = None
    _rests.clear()


os.register_at_fork(after_in_child=_start_anew)
