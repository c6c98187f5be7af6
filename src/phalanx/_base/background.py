"""Calls functions one after another on a thread of their own, so that nobody waits for them.

Owns that thread, which starts with the first call. Knows nothing of what is called.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections import deque
from contextlib import suppress

from phalanx._base import interrupts
from phalanx._base.latch import Latch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Aside:
    """A queue of calls, and the thread that makes them.

    Args:
        name: The thread's.
        most: How many may wait; what comes then is dropped, and counted.

    >>> aside = Aside("phalanx-example")
    >>> aside.call(lambda: print("done")), aside.finish(5)
    done
    (True, True)
    """

    def __init__(self, name: str, most: int = 100_000) -> None:
        self._name = name
        self._most = most
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = allocate_lock()
        self._over: Latch | None = None  # of the thread that runs
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """How many calls there was no room for."""

    def call(self, action: Callable[[], None]) -> bool:
        """Have ``action`` called after those before it. Returns whether it will be. What it raises is logged."""
        with interrupts.whole():
            return self._call(action)

    def _call(self, action: Callable[[], None]) -> bool:
        with self._lock:
            if len(self._calls) >= self._most:
                self.dropped += 1
                return False
            self._calls.append(action)
            if self._over is not None:
                return True
            over = self._over = Latch()
        thread = threading.Thread(target=self._run, args=(over,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: at the interpreter's end, or at a limit
            with self._lock:
                self._calls.clear()
                self._over = None
            return False
        self._thread = thread
        return True

    @property
    def waiting(self) -> int:
        """How many calls wait for their turn."""
        return len(self._calls)

    def finish(self, seconds: float) -> bool:
        """Wait until all has been called, for at most ``seconds``. Returns whether it has."""
        over, thread = self._over, self._thread
        if over is not None and not over.wait(seconds):
            return False
        if thread is not None and thread is not threading.current_thread():
            thread.join(1)  # it has nothing left to do
        return True

    def _run(self, over: Latch) -> None:
        """Make the calls; with the last one the thread ends, and the next call starts another."""
        try:
            while True:
                with self._lock:
                    if not self._calls:
                        self._over = None
                        return
                    action = self._calls.popleft()
                try:
                    action()
                except BaseException:
                    with suppress(Exception):  # no descriptor to import it, or a handler that fails
                        from logging import getLogger

                        getLogger("phalanx").exception("%s", self._name)
        finally:
            over.open()
