"""Records when a server's thread last worked, to tell one that waits from one that hangs."""

from __future__ import annotations

import logging

from phalanx._base import clock

_log = logging.getLogger("phalanx.timer")


class Progress:
    """Whether a thread works or waits, and since when it works.

    >>> progress = Progress()
    >>> progress.waits = True
    >>> with progress.working():
    ...     progress.waits, progress.seconds_at_work() >= 0
    (False, True)
    >>> progress.waits, progress.seconds_at_work()
    (True, 0.0)
    """

    def __init__(self) -> None:
        self.waits = False
        self._began = clock.now()

    def seconds_at_work(self) -> float:
        """Return for how long the thread has worked without a break; 0.0 if it waits."""
        return 0.0 if self.waits else clock.now() - self._began

    def working(self) -> _Working:
        """Return a context in which the thread works. An exception that escapes is logged, and goes no further."""
        self._began = clock.now()
        return _Working(self)


class _Working:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._outer = progress.waits

    def __enter__(self) -> None:
        self._progress.waits = False

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        self._progress.waits = self._outer
        if isinstance(error, Exception):
            _log.error("timer server: a mistake of its own", exc_info=error)
            return True
        return False
