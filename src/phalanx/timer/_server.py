"""The contract between timer clients and timer servers, and between them and those who write a pair of their own.

Owns what a request is, and what each side must provide. What a server does with it, and when, is `_watchdog`'s. It
refuses to know how requests travel, and what a worker is. A worker that takes a timer imports this: it costs nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self, SupportsIndex

    from phalanx.timer._watchdog import Watchdog


SHORT_SCOPE = 320
"""Characters, each at most 12 bytes of JSON: so many any client can send."""


class TimerRequest:
    """A request of a worker: to take a timer on a scope, or to release it.

    Requests are equal if their three public fields are. They can be pickled, and must not be changed.

    Args:
        worker_id: Who asks: whatever client and server know the worker by; hashable.
        scope_id: What the timer is for. A worker has one timer per scope: a second request replaces the first.
        expiration_time: When it expires, Unix time in seconds. Negative: the timer is released.

    >>> TimerRequest(4242, "all_reduce", 1795184205.5)
    TimerRequest(worker_id=4242, scope_id='all_reduce', expiration_time=1795184205.5)
    >>> TimerRequest(4242, "all_reduce", -1) == TimerRequest(4242, "all_reduce", -1)
    True
    """

    __slots__ = ("_born", "_deadline", "_taken", "expiration_time", "scope_id", "worker_id")

    # What the clients of this package know beyond the original's fields; it travels along and is no part of equality.
    _born: int | None  # the start time of the process that is `worker_id`, as /proc/PID/stat has it
    _deadline: float | None  # the expiration on CLOCK_MONOTONIC, which no step of the wall clock moves
    _taken: float | None  # when it was made, on the same clock

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time
        self._deadline = self._born = self._taken = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # Every timer costs its worker two of these; the general way, through the slots, takes half as long again.
        if type(self) is TimerRequest:
            more = self._deadline, self._born, self._taken
            return _request, (self.worker_id, self.scope_id, self.expiration_time, *more)
        return super().__reduce_ex__(protocol)

    def _key(self) -> tuple[Any, str, float]:
        return self.worker_id, self.scope_id, self.expiration_time

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, TimerRequest) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        worker, scope, expiration = self._key()
        return f"{type(self).__name__}(worker_id={worker!r}, scope_id={scope!r}, expiration_time={expiration!r})"


def _request(worker: Any, scope: str, expiration: float, *more: Any) -> TimerRequest:
    request = TimerRequest(worker, scope, expiration)
    request._deadline, request._born, request._taken = more  # noqa: SLF001 - this is its constructor, too
    return request


class TimerClient(ABC):
    """The worker's end: tells the server of the timers that this process takes.

    `expires` calls it, in any thread, and never with one scope twice before its release. An error
    that ``acquire`` raises keeps the block from being entered.

    The clients of this package have shorter ways for `expires`. A subclass that overrides ``acquire`` or ``release``,
    or an object on which one is set before its first timer, is asked as any other client is.
    """

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Take a timer on ``scope_id``, or move it, to ``expiration_time`` (Unix time, seconds)."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Give the timer on ``scope_id`` back. One that is not held is ignored."""


def shortened(scope: str) -> str:
    """A scope whose name is too long to be sent: its ends, for the reader, and a checksum of the whole.

    >>> shortened("x" * 9999) == shortened("x" * 9999), shortened("x" * 9999) == shortened("x" * 9998)
    (True, False)
    >>> len(shortened("x" * 9999)) <= SHORT_SCOPE
    True
    """
    import zlib

    checksum = zlib.crc32(scope.encode("utf-8", "surrogatepass"))
    return f"{scope[:100]}... ({checksum:08x}) ...{scope[-200:]}"


class RequestQueue(ABC):
    """Where the requests of all workers arrive. One server takes them out, in its thread.

    The server asks for ``max(1, queue.size())`` requests at a time: so it has the first one as soon as it is there, and
    a flood in few turns. An exception is logged, and the queue is asked again a little later.
    """

    @abstractmethod
    def size(self) -> int:
        """How many requests are there now, at least. 0 and 1 will do where nobody can count them."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take up to ``size`` requests out, in the order in which they came.

        Returns when there are ``size`` of them, or after ``timeout`` seconds (>= 0) with those that are there, perhaps
        none. Negative expirations are releases; the others are Unix time.
        """

    def _open(self) -> None:  # noqa: B027 - a hook: most queues have nothing to do here
        """Get ready: the server starts."""

    def _wake(self) -> None:  # noqa: B027 - a hook: most queues have no way
        """Let a `get` that waits in another thread return early, if there is a way: the server stops."""

    def _close(self) -> None:  # noqa: B027 - a hook: most queues have nothing to do here
        """Give back what `_open` took."""

    def _abandon(self) -> None:  # noqa: B027 - a hook: most queues have nothing to do here
        """`_close` in a fork of the server's process, where another thread may have been within any method."""

    @property
    def _punctual(self) -> bool:
        """Whether a `get` that takes more than its timeout can only mean that this process did not run."""
        return False


class TimerServer(ABC):
    """Watches the timers of a host's workers, in a thread of its own, and reaps those that are late.

    The thread sleeps in ``request_queue.get`` until the earliest deadline of any request, or until a request comes,
    so a worker is reaped when its time is over, whatever ``max_interval`` is. At expiry the server logs
    (logger ``phalanx.timer``), calls `_reap_worker`, and then `clear_timers` for those that were reaped. A worker
    that could not be reaped keeps its timers, and is tried again after a second, then two, four and so on, at least
    every ``max_interval``. An exception in one of the methods is logged; the server goes on.

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
        """Start to watch. One that runs already goes on.

        Raises:
            OSError: No descriptor, or no thread, is to be had.
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
        its ``get`` returns, after ``max_interval`` at the latest. One that is still at it 5 s after that is logged,
        and not waited for any longer. In a fork of the server's process nothing happens: no server runs there.
        """
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _abandon(self) -> None:
        """In a fork of the process that started it: no server runs here."""
        self._watchdog = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
