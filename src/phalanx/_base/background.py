"""Calls functions one after another on a background thread, so that no caller waits for them.

Owns that thread, which starts with the first call and ends after the last.
"""

from __future__ import annotations

from _thread import RLock
from collections import deque
from contextlib import suppress

from phalanx._base import interrupts, unpatched
from phalanx._base.latch import Latch

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


class SerialExecutor:
    """A queue of calls, and the thread that makes them.

    Args:
        name: The thread's name.
        most: How many calls may wait. Those beyond are dropped, and counted.

    >>> executor = SerialExecutor("phalanx-example")
    >>> executor.submit(lambda: print("done")), executor.drain(5)
    done
    (True, True)
    """

    def __init__(self, name: str, most: int = 100_000) -> None:
        self._name = name
        self._most = most
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = RLock()  # a signal handler, or a `__del__`, may submit while its own thread does
        self._over: Latch | None = None  # opened at the end of the thread that runs
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """How many calls were dropped."""

    def submit(self, action: Callable[[], object]) -> bool:
        """Have ``action`` called after those before it. What it raises is logged.

        Returns False when it will not be called: too many wait, or no thread can be started.
        """
        with interrupts.deferred():
            return self._submit(action)

    def _submit(self, action: Callable[[], object]) -> bool:
        with self._lock:
            if len(self._calls) >= self._most:
                self.dropped += 1
                return False
            self._calls.append(action)
            if self._over is not None:
                return True
            over = self._over = Latch()
        thread = unpatched.thread(target=self._run, args=(over,), name=self._name)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: at the interpreter's end, or at a limit
            with self._lock:
                self._calls.clear()
                self._over = None
            return False
        self._thread = thread
        return True

    @property
    def pending(self) -> int:
        """How many calls have not begun."""
        return len(self._calls)

    def drain(self, seconds: float) -> bool:
        """Wait until all calls have returned, for at most ``seconds``. Returns whether they have."""
        over, thread = self._over, self._thread
        if over is not None and not over.wait(seconds):
            return False
        if thread is not None and not unpatched.is_current(thread):
            thread.join(1)  # it has nothing left to do
        return True

    def _run(self, over: Latch) -> None:
        """Make the calls. After the last the thread ends; the next `submit` starts another."""
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
                    with suppress(BaseException):  # no descriptor is left to import it; a handler of the host's raises
                        from logging import getLogger

                        getLogger("phalanx").exception("%s", self._name)
        finally:
            over.open()
