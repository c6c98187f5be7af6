"""Handles signals to the launcher while a group is open: installs handlers, shares them among groups, restores them.

A handler is restored as the kernel had it (sigaction(2)): Python does not know of those that C code has set, as
`faulthandler` does. A fork of the host has the handlers that the host had before.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from functools import partial

from phalanx._base import clock, interrupts, linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType
    from typing import Any

SIGNALS_ENV = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_APART = 0.3
"""Seconds within which signals are one request. A closing terminal sends SIGHUP twice (the shell, then the kernel), and
`timeout` sends SIGTERM to the process and to its group: the second must not be taken for the one that kills."""

_open: set[object] = set()  # the groups that are open: what a set does is one step, for threads and for signal handlers
_replaced: dict[int, tuple[Any, bytes | None]] = {}  # what Python had; what the kernel had, if that was something else
_known: dict[int, tuple[Any, bytes | None]] = {}  # the same, for good
_pending: list[int] = []  # the signal whose exception was raised, and has not left a wait of ours
_raised = [-_APART]  # when a signal has raised last
_chosen: tuple[signal.Signals, ...] | None = None  # by a caller; None: see the environment


class SignalException(Exception):  # noqa: N818 - torch's name
    """Raised in the main thread when a signal arrives while a group is open.

    Signals within 0.3 s of one that has raised it are the same request, and raise nothing.

    Attributes:
        sigval: The signal, a `signal.Signals`.
    """

    __module__ = "phalanx.multiprocessing"

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg, sigval)
        self.sigval = sigval

    def __str__(self) -> str:
        return str(self.args[0])


def signals_to_handle() -> list[signal.Signals]:
    """The signals named by ``TORCHELASTIC_SIGNALS_TO_HANDLE`` (comma separated), or SIGTERM, SIGINT, SIGHUP, SIGQUIT.

    Raises ValueError for a name that is no signal, or one that cannot be handled.
    """
    if _chosen is not None:
        return list(_chosen)
    wanted: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in os.environ.get(SIGNALS_ENV, DEFAULT).split(","))):
        try:
            number = signal.Signals[name]
        except KeyError:
            raise ValueError(f"{SIGNALS_ENV}: {name!r} is not the name of a signal (like SIGTERM)") from None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{SIGNALS_ENV}: {name} cannot be handled by any process")
        wanted.append(number)
    return wanted


@contextmanager
def choosing(wanted: Iterable[signal.Signals]) -> Iterator[None]:
    """Have `signals_to_handle` return these, in place of what the environment says; on the main thread only."""
    global _chosen  # noqa: PLW0603 - handlers are the process's
    if threading.current_thread() is not threading.main_thread():  # where none is set
        yield
        return
    before, _chosen = _chosen, tuple(wanted)
    try:
        yield
    finally:
        _chosen = before


def acquire(owner: object) -> None:
    """Raise SignalException on signals from now on, for ``owner``; on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return
    wanted = signals_to_handle()
    if not _open:
        _raised[:] = [-_APART]
        restore()  # those of a group that another thread closed
        for number in wanted:
            _replace(number)
    _open.add(owner)


def _replace(number: int) -> None:
    before, action = signal.getsignal(number), linux.sigaction(number)
    handler = linux.handler_of(action)
    if handler == signal.SIG_IGN:  # by nohup, a shell's `&`, a library: it stays ignored
        return
    if before is _raise:  # another handler had replaced ours, and ours was put back since
        _replaced[number] = _known[number]
        return
    _replaced[number] = before, None
    signal.signal(number, _raise)
    # The address that the kernel jumps to for every Python handler: that of a signal that has been replaced.
    pythons = next((linux.handler_of(linux.sigaction(each)) for each in _replaced), 0)
    known = before == signal.SIG_DFL if handler == signal.SIG_DFL else callable(before) and handler == pythons
    if not known:
        _replaced[number] = before, action
    _known[number] = _replaced[number]


def _forget() -> None:
    """Restore the handlers in a fork of the host: no group is open in it."""
    interrupts.reset()
    _open.clear()
    _pending.clear()
    restore()


def release(owner: object) -> None:
    """Undo the `acquire` of ``owner``, if there was one; the last one restores the handlers. Idempotent.

    Python lets only the main thread set handlers. Released by another thread, they stay until the main thread calls
    this, and meanwhile pass each signal to the handler that was there before.
    """
    _open.discard(owner)
    if not _open:
        _pending.clear()
    if threading.current_thread() is threading.main_thread():
        restore()


def ignore() -> None:
    """Ignore the signals that are handled, from now on: the end is known, and this process leaves."""
    if threading.current_thread() is threading.main_thread():
        for number in signals_to_handle():
            signal.signal(number, signal.SIG_IGN)


def handles(number: int) -> bool:
    """Whether a signal raises SignalException now: a group is open, and no other handler has taken its place."""
    return bool(_open) and signal.getsignal(number) is _raise


@contextmanager
def delivering() -> Iterator[None]:
    """Wrap a wait. It raises again an exception that was swallowed (``except Exception``) since it was raised."""
    if threading.current_thread() is not threading.main_thread():  # where no handler runs
        yield
        return
    try:
        if _pending and _open:
            _raise(_pending[0], None)
        yield
    except SignalException:
        _pending.clear()
        raise


def forget_raised() -> None:
    """Do not raise again an exception that was raised: its receiver acts on it. On the main thread."""
    if threading.current_thread() is threading.main_thread():
        _pending.clear()


def shortened(close: Callable[[float], object], seconds: float) -> None:
    """Call ``close`` with the seconds that it may take; once more, with none, if a signal has come."""
    while True:
        try:
            with delivering():
                close(seconds)
        except SignalException:
            forget_raised()
            seconds = 0.0
        else:
            return


@contextmanager
def postpone() -> Iterator[None]:
    """Defer SIGINT to the end of the block: for a group that leaves signals to its host."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []
    owner = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            came.append(number)
        else:  # a fork made by another thread: its SIGINT is not deferred
            signal.signal(signal.SIGINT, before)
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def restore() -> None:
    """Put the handlers back if no group is open; on the main thread."""
    if _open:
        return
    for number, (handler, action) in list(_replaced.items()):
        # Else the host has set one since: it stays. So does one that C code has set, which Python does not know.
        if signal.getsignal(number) is _raise and linux.handler_of(linux.sigaction(number)) > signal.SIG_IGN:
            with suppress(OSError):
                _put_back(number, handler, action)
        # Not before: `_raise` looks up here which handler it replaced. It may have restored it just now.
        _replaced.pop(number, None)


def _put_back(number: int, handler: Any, action: bytes | None) -> None:
    signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if action is not None:
        linux.set_sigaction(number, action)


def _raise_late(number: int) -> None:
    with delivering():
        _raise(number, None)


def _raise(number: int, frame: FrameType | None) -> None:
    if _open and frame is not None and clock.now() - _raised[0] < _APART:
        return
    if interrupts.defer(partial(_raise_late, number)):
        return
    if _open:
        _raised[:] = [clock.now()]
        _pending[:] = [number]
        name = signal.Signals(number).name
        raise SignalException(f"Process {os.getpid()} got signal: {number} ({name})", sigval=signal.Signals(number))
    before, action = _known.get(number, (signal.SIG_DFL, None))
    restore()
    current = signal.getsignal(number)
    if current is _raise:  # another handler had replaced ours, and ours was put back since
        _put_back(number, before, action)
    if callable(before) and action is None:
        before(number, frame)
    elif before != signal.SIG_IGN or action is not None:
        _put_back(number, before, action)
        signal.raise_signal(number)
        if callable(current) and current is not _raise:  # it has called ours, as the one before it
            signal.signal(number, current)


os.register_at_fork(after_in_child=_forget)
