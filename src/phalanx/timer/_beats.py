"""What a worker does for its group: heartbeats (`beat`, `progress`, `rest`), and on which signal it shows its stacks.

Heartbeats go to this process's seat at the table of its group. Timers of `expires` go there, too, unless a client is
configured.
"""

from __future__ import annotations

import os
from _thread import RLock

from phalanx._timers.client import Seat
from phalanx._timers.layout import SEAT_STEP, TIMERS_ENV

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self, SupportsIndex

lock = RLock()
"""Held while the state of this module and of its users changes. Reentrant: a signal handler may take a timer."""

seat: Seat | None = None
"""This process's seat at the table of its group, once `take_seat` has taken it."""

_nobody_watches = False  # heartbeats are dropped: this process is in no group that has a table
_rests: list[rest] = []  # the blocks of that kind that are entered


class NobodyWatchesError(RuntimeError):
    """A timer was taken in a process whose timers nobody watches."""

    __module__ = "phalanx.timer"  # as people know it, in tracebacks and pickles


def beat() -> None:
    """Say that this rank is alive: call it once per step of the training loop. It costs a quarter of a microsecond.

    With ``--hang-timeout TIME`` (`TimerSpecs.hang_timeout`), a rank whose last beat is older is hung. The first
    beat arms it, so a start may take its time. An `expires` block in any process of the rank extends it, and the end of
    the block counts as a beat. After the last step, call `rest`. In a process that is in no such group, it does
    nothing. If the group's table cannot be opened, it says so once on stderr, and does nothing.
    """
    progress()


def progress(step: int = 0) -> None:
    """`beat`, and say which step is done: reports name the last one.

    The time from one step to the next is kept, of the latest 32: ``phalanx status`` shows it, and finds ranks that are
    slow. A jump of several steps counts as so many equal ones. Time in `waiting` and in `rest` does not count. After a
    step that is lower than the last one (an epoch begins), and after a `rest` that this call ends, the time begins
    anew.

    Args:
        step: A number of 64 bits, as you count; above 0 it is timed.
    """
    global _nobody_watches  # noqa: PLW0603 - one for the process
    own = seat
    if own is None:
        if _nobody_watches:
            return
        try:
            own = take_seat()
        except NobodyWatchesError:
            _nobody_watches = True
            return
        except (RuntimeError, ValueError) as error:  # a program that beats asked for nothing, and must not fail of it
            _nobody_watches = True
            from phalanx._base import std_streams

            std_streams.write_stderr(f"phalanx: heartbeats of process {os.getpid()} are not watched: {error}\n")
            return
    own.beat(step)


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
        with lock:
            own = _seat_for_beats()
            if own is not None:
                self.ran = own.rest()

    def __enter__(self) -> Self:
        with lock:
            own = _seat_for_beats()
            if own is not None:
                self.ran |= own.rest()  # it may have been left before, or a heartbeat has come
            _rests.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with lock:
            if not any(one is self for one in _rests):  # a fork of the process that entered it
                return
            _rests.remove(self)
            ran, self.ran = self.ran, False
            if ran and _rests:
                _rests[-1].ran = True  # the process still rests
            elif ran and seat is not None:
                seat.beat(seat.words[SEAT_STEP])


class waiting:  # noqa: N801 - used as a verb, as `rest` is
    """Take the time in this block out of the step: here the rank waits for the others, as in a collective.

    All ranks wait for the slowest one there, so all would take equally long without it. The heartbeat is expected as
    before. Blocks may be nested, entered by several threads, and used again: together they count from the entry of the
    first one to the exit of the last one. A fork begins outside of them.

    In a process that is in no group, or that has reported no step, it does nothing. It never raises.

    >>> with waiting():
    ...     pass
    """

    __slots__ = ("_entered",)

    def __init__(self) -> None:
        self._entered: list[Seat | None] = []

    def __enter__(self) -> Self:
        with lock:
            own = seat
            self._entered.append(own)
            if own is not None:
                own.wait()
        return self

    def __exit__(self, *_: object) -> None:
        with lock:
            own = self._entered.pop() if self._entered else None
            if own is not None:  # after a fork, in the child, it is the parent's, and detached
                own.end_wait()


def _seat_for_beats() -> Seat | None:
    """Return where heartbeats go, or would go; None if none are expected."""
    if seat is None and not _nobody_watches:
        try:
            return take_seat()
        except Exception:  # noqa: BLE001 - a program that rests must not fail of it, and `beat` reports it
            return None
    return seat


def take_seat() -> Seat:
    """Take a seat at the table of this process's group, once. Raises NobodyWatchesError, RuntimeError, ValueError."""
    global seat  # noqa: PLW0603 - as above
    address = os.environ.get(TIMERS_ENV)
    if not address:
        raise NobodyWatchesError(
            "nobody watches timers: call phalanx.timer.configure(client) first, or run under `phalanx run`, or in a "
            "group that was started with timers=TimerSpecs()"
        )
    with lock:
        if seat is None:
            try:
                seat = Seat(address)
            except OSError as error:
                raise RuntimeError(error.strerror) from error
            _offer_stacks()
        return seat


def _offer_stacks() -> None:
    """Have this process show its stacks on a signal, unless it does: it may be one below the worker (`sh run.sh`)."""
    from phalanx._base import linux
    from phalanx._evidence.error_file import ERROR_FILE_ENV
    from phalanx._evidence.stack_signals import offer_stacks, offers_stacks

    path = os.environ.get(ERROR_FILE_ENV)
    if path and not offers_stacks(path):
        offer_stacks(path)
        linux.allow_ptrace()


def move_stack_signal(number: SupportsIndex) -> None:
    """Have this worker show its stack on another signal, or on none.

    A Python worker that cannot be read from outside is asked by SIGRTMIN+18 (52) to append the stack of its main thread
    to ``error.json.stacks`` in its log directory; one that is about to be killed, by SIGRTMIN+19 (53), to append those
    of all threads. Code that needs the first signal for itself moves it out of its way first. From outside,
    ``PHALANX_STACK_SIGNAL=N`` does the same for a whole group. The signal that is left has its default disposition
    again, but for a handler that was put on it with `signal.signal` meanwhile: that one stays. The second signal is
    left alone where it has a handler or is ignored.

    Args:
        number: The signal, whatever it does now: a handler that is there is replaced. 0: show no stacks, on the
            second one neither. Nobody is asked on another one than SIGUSR1, SIGUSR2 and the real-time signals, unless
            ``PHALANX_STACK_SIGNAL`` named it when the process was executed.

    Raises:
        ValueError: There is no such signal, or it cannot be caught (SIGKILL, SIGSTOP), or it is one that ends a process
            for a fault (SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL): its stack is kept anyway.
        RuntimeError: This process has no ``TORCHELASTIC_ERROR_FILE``, so there is no place for stacks; or that place
            cannot be written to.

    >>> move_stack_signal(9)
    Traceback (most recent call last):
    ValueError: signal 9 cannot be caught, or is taken: expected 0, or the number of another signal
    """
    from operator import index

    from phalanx._evidence.error_file import ERROR_FILE_ENV
    from phalanx._evidence.stack_signals import can_show_stacks, offer_stacks, stacks_path

    number = index(number)
    if not can_show_stacks(number):
        msg = f"signal {number} cannot be caught, or is taken: expected 0, or the number of another signal"
        raise ValueError(msg)
    path = os.environ.get(ERROR_FILE_ENV)
    if not path:
        msg = f"there is no place for stacks: this process has no {ERROR_FILE_ENV}, so it is no worker"
        raise RuntimeError(msg)
    if not offer_stacks(path, number) and number:
        msg = f"stacks cannot be shown on signal {number}: {stacks_path(path)} cannot be written"
        raise RuntimeError(msg)


def _start_anew() -> None:
    """After a fork, in the child: forget the parent's seat and heartbeats. The child takes a seat of its own."""
    global _nobody_watches, lock, seat  # noqa: PLW0603 - as above
    lock = RLock()
    seat = None
    _nobody_watches = False
    _rests.clear()


os.register_at_fork(after_in_child=_start_anew)
