"""Ctrl-C for a command that others read from. Owns SIGINT while the command runs."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable
from typing import Self

_SI_KERNEL = 0x80  # sigaction(2): the terminal has sent it, not a process


class Interrupts:
    """Calls ``stop`` when SIGINT comes, in a thread of its own. A context manager, of the main thread.

    A Ctrl-C goes to all processes of a pipeline. Where stdout is a pipe its reader decides: most end by it, and then
    nobody reads any more; a pager does not, and goes on to show what there is, and what comes. So a SIGINT of the
    terminal's does nothing there; one that a process has sent always counts.

    SIGINT that is ignored (a shell's background) stays so.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._thread: threading.Thread | None = None
        self._over = False

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # threads that start from now on inherit that
            self._thread = threading.Thread(target=self._wait, name="phalanx-interrupts", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and thread.ident is not None:
            self._over = True
            signal.pthread_kill(thread.ident, signal.SIGINT)
            thread.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _wait(self) -> None:
        while True:
            found = signal.sigwaitinfo({signal.SIGINT})
            if self._over:
                return
            if not (found.si_code == _SI_KERNEL and _piped()):
                self._stop()


def _piped() -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(1).st_mode)
    except OSError:  # closed
        return False
