"""Timer requests: what a request is, how a client sends one, and where a server takes them out.

The contract for pairs of client and server, those of this package and those of others; and the client that sends its
requests through a `multiprocessing` queue. What a server does with them is in `_server`. A worker that uses a client
imports this, so it imports little itself.
"""

from __future__ import annotations

import os
import pickle
import select
from abc import ABC, abstractmethod
from struct import Struct

from phalanx._base import clock, linux, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, SupportsIndex

HEAD = Struct("!i")
"""What `multiprocessing.connection` puts before each message: its length."""

_LONGEST_SCOPE = 900  # characters; with four bytes each a request fits into one write

SHORT_SCOPE = 320
"""Characters that a scope may have with any client: each takes at most 12 bytes of JSON."""


class TimerRequest:
    """A request of a worker: to take a timer on a scope, or to release it.

    Requests are equal if their three public fields are. They can be pickled, and must not be changed.

    Args:
        worker_id: The worker: whatever client and server know it by; hashable.
        scope_id: What the timer is for. A worker has one timer per scope: a second request replaces the first.
        expiration_time: When it expires, Unix time in seconds. Negative: the timer is released.

    >>> TimerRequest(4242, "all_reduce", 1795184205.5)
    TimerRequest(worker_id=4242, scope_id='all_reduce', expiration_time=1795184205.5)
    >>> TimerRequest(4242, "all_reduce", -1) == TimerRequest(4242, "all_reduce", -1)
    True
    """

    __slots__ = ("_born", "_deadline", "_taken", "expiration_time", "scope_id", "worker_id")

    # What the clients of this package add to the original's fields. It is sent along, and is no part of equality.
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
    """The worker's end: sends the server the timers that this process sets and releases.

    `expires` calls it, in any thread, and never with one scope twice before its release. An error
    that ``acquire`` raises keeps the block from being entered.
    """

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer on ``scope_id``, or move it, to ``expiration_time`` (Unix time, seconds)."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Release the timer on ``scope_id``. One that is not set is ignored."""


class PipeTimerClient(TimerClient):
    """A client that writes each request to a pipe, in one piece. For any thread, and after a fork; can be pickled."""

    def __init__(self) -> None:
        # The pipe, by pid: in a fork the inherited number may be another file's by now (a daemon closes all and opens
        # others), so the fork opens the pipe itself. A dict, as setdefault is one step for all threads.
        self._fds: dict[int, int] = {}
        self._me = 0, 0  # our pid, and our start time

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_fds", "_me")}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a subclass, too: what it has beside goes along
        self.__dict__.update(state, _fds={}, _me=(0, 0))

    def __del__(self) -> None:
        self._close()

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`. Raises as `acquire` does."""
        self._send(scope_id, -1, None)

    @abstractmethod
    def _send(self, scope: str, expiration: float, deadline: float | None) -> None:
        """Send a request. ``deadline``: the expiration on CLOCK_MONOTONIC; None: it is a release."""

    @abstractmethod
    def _open(self) -> int:
        """Open the pipe, without blocking."""

    @abstractmethod
    def _full(self) -> TimeoutError:
        """Return the error of a pipe that has been full for too long."""

    def _stamp(self, request: TimerRequest, deadline: float | None) -> None:
        """Note what only our own clients know."""
        if self._me[0] != request.worker_id:
            self._me = request.worker_id, procfs.Stat(request.worker_id).start
        request._deadline, request._born, request._taken = deadline, self._me[1], clock.now()  # noqa: SLF001 - of this package

    def _fd(self) -> int:
        """Return the pipe, which is opened if need be."""
        fd = self._fds.get(os.getpid(), -1)
        if fd < 0:
            fresh = self._open()
            fd = self._fds.setdefault(os.getpid(), fresh)
            if fd != fresh:  # another thread was faster
                os.close(fresh)
        return fd

    def _write(self, data: bytes, patience: float) -> None:
        """Write to the pipe. Raises what `_full` returns, if it is full for so many seconds; OSError."""
        fd, end = self._fd(), None
        while True:
            try:
                linux.write_to_pipe(fd, data)
            except BlockingIOError:
                now = clock.now()
                end = now + patience if end is None else end
                if now >= end:
                    raise self._full() from None
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll((end - now) * 1000)
            else:
                return

    def _close(self) -> None:
        fd = self.__dict__.get("_fds", {}).pop(os.getpid(), -1)
        if fd >= 0:
            os.close(fd)


def shortened(scope: str) -> str:
    """Shorten a scope whose name is too long to be sent: to its two ends, for the reader, and a checksum of the whole.

    >>> shortened("x" * 9999) == shortened("x" * 9999), shortened("x" * 9999) == shortened("x" * 9998)
    (True, False)
    >>> len(shortened("x" * 9999)) <= SHORT_SCOPE
    True
    """
    import zlib

    checksum = zlib.crc32(scope.encode("utf-8", "surrogatepass"))
    return f"{scope[:100]}... ({checksum:08x}) ...{scope[-200:]}"


class LocalTimerClient(PipeTimerClient):
    """Sets timers at the `LocalTimerServer` at the other end of a queue. For any thread, and after a fork.

    A request is one write to the queue's pipe. If the server reads nothing and the pipe is full, the
    worker waits for ``patience``, and then gets an error.

    Args:
        mp_queue: The server's queue, handed to the worker as an argument.
        patience: Seconds.

    Raises:
        TimeoutError: From `acquire` and `release`: the queue was full for ``patience``.
    """

    # Requests are in the queue's own format, but not written by its ``put``: if a worker is killed while the thread of
    # ``put`` holds the queue's lock, no other worker can ever send. Here a worker writes by itself, without lock or
    # thread: a write of at most PIPE_BUF bytes is atomic (pipe(7)), and a request is shorter. The pipe is opened anew
    # through /proc, because O_NONBLOCK belongs to the open file, which other processes share.

    def __init__(self, mp_queue: Any, *, patience: float = 10.0) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        self._patience = patience

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`. A negative time releases."""
        if expiration_time < 0:
            self.release(scope_id)
        else:
            self._send(scope_id, expiration_time, clock.from_wall(expiration_time))

    def _send(self, scope: str, expiration: float, deadline: float | None) -> None:
        request = TimerRequest(os.getpid(), scope if len(scope) <= _LONGEST_SCOPE else shortened(scope), expiration)
        self._stamp(request, deadline)
        self._send_request(request)

    def _send_request(self, request: TimerRequest) -> None:
        """Write a request to the pipe."""
        if getattr(self._mp_queue, "_writer", None) is None:  # another kind: a manager's proxy, a queue of threads
            self._put(request)
            return
        data = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        if len(data) + HEAD.size > select.PIPE_BUF:
            msg = f"a timer request of {len(data)} bytes is too long: use a shorter scope"
            raise ValueError(msg)
        # The queue counts its messages by this semaphore: so its own `get` and `qsize` work.
        semaphore = getattr(self._mp_queue, "_sem", None)
        if semaphore is not None and not semaphore.acquire(False) and not semaphore.acquire(True, self._patience):
            raise self._full()
        try:
            self._write(HEAD.pack(len(data)) + data, self._patience)
        except BaseException:
            if semaphore is not None:
                semaphore.release()
            raise

    def _open(self) -> int:
        path = f"/proc/self/fd/{int(self._mp_queue._writer.fileno())}"  # noqa: SLF001 - see above
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _put(self, request: TimerRequest) -> None:
        from queue import Full

        try:
            self._mp_queue.put(request, True, self._patience)
        except Full:
            raise self._full() from None

    def _full(self) -> TimeoutError:
        return TimeoutError(
            f"the timer server has taken nothing out of its queue, which is full, for {self._patience:g} s: was it "
            "started (LocalTimerServer.start), on this very queue, and is its process still running?"
        )


class RequestQueue(ABC):
    """The queue in which the requests of all workers arrive. One server takes them out, in its thread.

    The server takes ``max(1, queue.size())`` requests at a time: so it gets the first one as soon as it is there, and
    many in few calls. An exception is logged, and the queue is read again a little later.
    """

    @abstractmethod
    def size(self) -> int:
        """Return how many requests are there now, at least. 0 and 1 will do where they cannot be counted."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take up to ``size`` requests out, in the order in which they came.

        Returns once there are ``size`` of them, or after ``timeout`` seconds (>= 0) with those that are there, perhaps
        none. Negative expirations are releases; the others are Unix time.
        """
