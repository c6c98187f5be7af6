"""The base class of timer servers: what a server provides, and how it is started and stopped.

What a running server does, and when, is in `_watchdog`. Servers of this package and of others derive from this.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from phalanx.timer._requests import RequestQueue, TimerRequest
    from phalanx.timer._watchdog import Watchdog


class TimerServer(ABC):
    """Watches the timers of a host's workers, in a thread of its own, and reaps those that are late.

    The thread sleeps in ``request_queue.get`` until the earliest deadline of any request, or until a request comes,
    so a worker is reaped when its time is over, whatever ``max_interval`` is. At expiry the server logs
    (logger ``phalanx.timer``), calls `_reap_worker`, and then `clear_timers` for those that were reaped. A worker
    that could not be reaped keeps its timers, and is tried again after a second, then two, four and so on, at least
    every ``max_interval``. An exception in one of the methods is logged, and the server continues.

    If a ``get`` takes longer than its timeout, this process was stopped, and perhaps its workers with it. So deadlines
    are put off: by the excess if that is 0.05 to 0.5 s, else by the whole wait. A queue of `multiprocessing` is asked
    in parts of the time to the next deadline, because a pause in the middle of a wait is not seen. Another queue is
    asked once, and may be slow each time; so that counts once for each timer, and for at most the time that the timer
    had when it was received.

    Deadlines are on CLOCK_MONOTONIC: a request is converted as it comes out of the queue, so that `register_timers`
    gets requests whose ``expiration_time`` is comparable to the ``deadline`` of `get_expired_timers`, and
    a step of the wall clock changes nothing. (A release stays negative.)

    A subclass provides the four abstract methods; all are called in the server's thread.

    Args:
        request_queue: Where requests come from.
        max_interval: Seconds (> 0) that one wait in the queue may take at the most.
        daemon: Whether the interpreter may exit while the server runs.

    Raises:
        ValueError: ``max_interval`` is not more than 0.
    """

    def __init__(
        self,
        request_queue: RequestQueue,
        max_interval: float,
        daemon: bool = True,  # noqa: FBT001, FBT002 - the historical signature, by position
    ) -> None:
        super().__init__()
        if not max_interval > 0 or math.isnan(max_interval):
            msg = f"max_interval: expected more than 0 seconds, got {max_interval!r}"
            raise ValueError(msg)
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take over ``timer_requests``: note timers that were taken, forget those that were released.

        They are in order: a later one replaces an earlier one on the same scope. The list is empty when the server has
        woken for another reason.
        """

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of the workers in ``worker_ids``."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Find the timers whose ``expiration_time`` is ``deadline`` or earlier, by worker. It forgets none."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End the worker ``worker_id``. Return whether it has ended, now or before.

        If it raises, that is logged and the worker counts as reaped.
        """

    def start(self) -> None:
        """Start to watch. Without effect on a server that runs.

        Raises:
            OSError: No descriptor or no thread is left.
        """
        from phalanx.timer._watchdog import Watchdog

        if self._watchdog is not None:
            return
        watchdog = Watchdog(self, self._request_queue, self._max_interval, daemon=self._daemon)
        watchdog.start()
        self._watchdog = watchdog

    def stop(self) -> None:
        """Stop watching, and wait until the thread has ended. Idempotent; afterwards `start` works again.

        With the queues of this package that is at once. Another `RequestQueue` cannot be woken: the thread ends when
        its ``get`` returns, after ``max_interval`` at the latest. One that has not ended 5 s after that is logged,
        and not waited for any longer. In a fork of the server's process nothing happens: no server runs there.
        """
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _abandon(self) -> None:
        """In a fork of the process that started it: forget the watchdog, whose thread is not here."""
        self._watchdog = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
