"""Signals to the launcher while a group is open. Owns the handlers: installs, shares among groups, restores."""

from __future__ import annotations

import os
import signal
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

SIGNALS_ENV = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

_open = 0  # groups that are open
_replaced: dict[int, Any] = {}


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


def acquire() -> bool:
    """Raise SignalException on signals from now on; on the main thread only. Returns whether this was done."""
    global _open  # noqa: PLW0603 - signal handlers are the process's, and so is the count of those who want them
    if threading.current_thread() is not threading.main_thread():
        return False
    wanted = signals_to_handle()
    if not _open:
        restore()  # those of a group that another thread closed
        for number in wanted:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's `&`: ignored it stays
                _replaced[number] = signal.signal(number, _raise)
    _open += 1
    return True


def release() -> None:
    """Undo one `acquire`; the last one restores the handlers.

    Python lets only the main thread set handlers. Released by another thread, they stay until the main thread comes by,
    and meanwhile pass each signal to the handler that was there before.
    """
    global _open  # noqa: PLW0603 - as above
    _open -= 1
    tidy()


def tidy() -> None:
    """`restore`, if this is the thread that may."""
    if threading.current_thread() is threading.main_thread():
        restore()


def restore() -> None:
    """Put the handlers back if no group is open; on the main thread."""
    if _open:
        return
    while _replaced:
        number, handler = _replaced.popitem()
        if signal.getsignal(number) is _raise:  # else the user has set one since: it stays
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _raise(number: int, frame: FrameType | None) -> None:
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
