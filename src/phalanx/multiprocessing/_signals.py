"""Signals to the launcher while a group is open. Owns the handlers: installs, shares among groups, restores."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

SIGNALS_ENV = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

_open: set[object] = set()  # the groups that are open: what a set does is one step, for threads and for signal handlers
_replaced: dict[int, Any] = {}
_holding = False
_held: list[int] = []


class SignalException(Exception):  # noqa: N818 - torch's name
    """Raised in the main thread when a signal arrives while a group is open. ``sigval`` is the signal."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg, sigval)
        self.sigval = sigval

    def __str__(self) -> str:
        return str(self.args[0])


def signals_to_handle() -> list[signal.Signals]:
    """The signals named by ``TORCHELASTIC_SIGNALS_TO_HANDLE`` (comma separated), or SIGTERM, SIGINT, SIGHUP, SIGQUIT.

    Raises ValueError for a name that is no signal, or one that cannot be handled.
    """
    wanted: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in os.environ.get(SIGNALS_ENV, _DEFAULT).split(","))):
        try:
            number = signal.Signals[name]
        except KeyError:
            msg = f"{SIGNALS_ENV}: {name!r} is not the name of a signal (like SIGTERM)"
            raise ValueError(msg) from None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            msg = f"{SIGNALS_ENV}: {name} cannot be handled by any process"
            raise ValueError(msg)
        wanted.append(number)
    return wanted


def acquire(owner: object) -> None:
    """Raise SignalException on signals from now on, for ``owner``; on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return
    wanted = signals_to_handle()
    if not _open:
        restore()  # those of a group that another thread closed
        for number in wanted:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup, or a shell's `&`: ignored it stays
                _replaced[number] = before
                signal.signal(number, _raise)
    _open.add(owner)


def release(owner: object) -> None:
    """Undo the `acquire` of ``owner``, if there was one; the last one restores the handlers. Idempotent.

    Python lets only the main thread set handlers. Released by another thread, they stay until the main thread comes by,
    and meanwhile pass each signal to the handler that was there before.
    """
    _open.discard(owner)
    if threading.current_thread() is threading.main_thread():
        restore()


@contextmanager
def hold() -> Iterator[None]:
    """Have a signal that arrives meanwhile raise at the end: not between a fork and the noting of its pid."""
    global _holding  # noqa: PLW0603 - signal handlers are the process's
    if threading.current_thread() is not threading.main_thread():  # where no handler runs
        yield
        return
    _holding = True
    try:
        yield
    finally:
        _holding = False
        if _held:
            number = _held[0]
            _held.clear()
            _raise(number, None)


@contextmanager
def postpone() -> Iterator[None]:
    """Have a SIGINT that arrives meanwhile do what it does at the end: for a group that leaves signals to its host."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
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
    for number, handler in list(_replaced.items()):
        if signal.getsignal(number) is _raise:  # else the user has set one since: it stays
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        # Not before: `_raise` looks here for what it stands for. It may have restored, too, if it ran just now.
        _replaced.pop(number, None)


def _raise(number: int, frame: FrameType | None) -> None:
    if _holding:
        _held.append(number)
        return
    if _open:
        name = signal.Signals(number).name
        msg = f"Process {os.getpid()} got signal: {number} ({name})"
        raise SignalException(msg, sigval=signal.Signals(number))
    before = _replaced.get(number)
    restore()
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.raise_signal(number)
