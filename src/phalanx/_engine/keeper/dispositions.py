"""Signal dispositions of a forked worker: as a new interpreter has them, plus what preloaded modules have set.

Runs in the keeper's forks, and in the fork server. posix_spawn(3) resets the dispositions of what is executed.
"""

from __future__ import annotations

import errno

from phalanx._base import linux
from phalanx._engine.keeper.start_process import ignored_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms

_IGNORED = ("PIPE", "XFSZ")  # by every Python: a write returns an errno instead


def set_default_signals() -> None:
    """Set every disposition to SIG_DFL."""
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except OSError as error:  # those that the C library keeps for itself
                if error.errno != errno.EINVAL:
                    raise


def set_python_signals() -> None:
    """Set the dispositions that a new Python interpreter has."""
    set_default_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _IGNORED:
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)


class Handlers:
    """Notes the signal handlers that imported modules set, and sets them again in forks. A context around the imports.

    A handler is noted as Python has it, and as the kernel has it (sigaction(2)): Python does not know of those that C
    code has set, as `faulthandler` does.
    """

    def __init__(self) -> None:
        self.mask: set[int] = set()
        self._set: dict[int, tuple[Any, bytes]] = {}

    def __enter__(self) -> None:
        """Set the dispositions and the mask that a worker has which imports by itself."""
        for number in ignored_signals():
            if number not in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._set = _handlers()

    def __exit__(self, *_error: object) -> None:
        before = self._set
        self._set = {number: found for number, found in _handlers().items() if found != before.get(number)}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for number, (handler, _action) in self._set.items():  # no code but ours runs here, and in keepers, after this
            if callable(handler):
                signal.signal(number, signal.SIG_DFL)

    def set(self) -> None:
        """Set the handlers of the modules, in a fork that has the dispositions of a new interpreter."""
        for number, (handler, action) in self._set.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            linux.set_sigaction(number, action)


preloaded = Handlers()
"""Those of the fork server's modules; in any other process, none."""


def _handlers() -> dict[int, tuple[Any, bytes]]:
    handlers: dict[int, tuple[Any, bytes]] = {}
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP):
            try:
                handlers[number] = signal.getsignal(number), linux.sigaction(number)
            except OSError:  # those that the C library keeps for itself
                continue
    return handlers
