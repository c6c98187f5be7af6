"""The import of what ``--preload`` names while a machine waits for its part in a job, so that its workers are forks.

Owns the wait for that import, on a thread of its own. The process that imports is `Warm`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx._base import interrupts
from phalanx._base.threads import SerialExecutor
from phalanx._group.warm import Warm
from phalanx.multiprocessing import PreloadError

_MOST = 1e6  # seconds that poll(2) can wait
_END = 5.0  # seconds for the thread to end once the process has, which takes none


class Preloading:
    """The import of some modules, which nobody has to wait for.

    Args:
        warm: What imports them; `close` closes it.
        seconds: After how many seconds an import has failed.
    """

    def __init__(self, warm: Warm, seconds: float) -> None:
        self.modules = ", ".join(warm.preload)
        """What is imported."""
        self._warm = warm
        self._seconds = min(seconds, _MOST)
        self._executor = SerialExecutor("phalanx-preload")
        self._error: PreloadError | None = None
        self._is_under_way = self._is_closed = False

    def begin(self, changed: Callable[[], None]) -> None:
        """Begin to import; anew where it has failed, or the process has gone since. Else nothing happens.

        ``changed``: called when it has ended, so or so, by another thread. Raises OSError: nothing can be started.
        """
        if self._is_under_way or self._warm.is_ready:
            return
        with interrupts.deferred():
            self._error = None
            self._warm.begin()
            self._is_under_way = True
            if not self._executor.submit(lambda: self._wait(changed)):
                self._is_under_way = False
                raise OSError("no thread can be started")

    def is_ready(self) -> bool:
        """Whether all is imported; False: it is under way. Raises PreloadError: it cannot be."""
        if self._is_under_way:
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """End the import, and the process. It may be called again."""
        self._is_closed = True
        self._warm.close()
        self._executor.drain(_END)

    def _wait(self, changed: Callable[[], None]) -> None:
        try:
            self._warm.wait(self._seconds)
        except PreloadError as error:
            self._error = error
        except RuntimeError:  # it was closed before this thread came to it
            pass
        finally:
            self._is_under_way = False
            if not self._is_closed:
                changed()
