"""Sends timer requests through a queue of `multiprocessing`, and receives them.

Owns both ends of the pipe in such a queue.

Requests are written and read in the queue's own format, but not by its ``put`` and ``get``. If a worker is killed while
the thread of ``put`` holds the queue's lock, no other worker can ever send; and ``get`` waits without bound for the
rest of a message whose writer was killed. Here a worker writes by itself, without lock or thread: a write of at most
PIPE_BUF bytes is atomic (pipe(7)), and a request is shorter. And the reader never waits within a message. Each end is
opened anew through /proc, because O_NONBLOCK belongs to the open file, which other processes share.
"""

from __future__ import annotations

import os
import pickle
import select
from _thread import allocate_lock
from collections import deque
from contextlib import ExitStack
from struct import Struct

from phalanx._base import clock, linux
from phalanx._base.loop import wait_promptly
from phalanx.timer._requests import RequestQueue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from phalanx.timer._requests import TimerRequest

_HEAD = Struct("!i")  # what multiprocessing.connection puts before each message: its length
_LONGEST = 1 << 20  # bytes of a message: no request is longer
_CHUNK = 1 << 16
_LONGEST_WAIT = 2e6  # seconds: epoll_wait(2) counts milliseconds in an int


def _descriptor(queue: Any, end: str) -> int | None:
    """Return the pipe of a `multiprocessing` queue; None for another kind: a manager's proxy, a queue of threads."""
    connection = getattr(queue, end, None)
    return None if connection is None else int(connection.fileno())


class Outbox:
    """The end of a queue that sends requests. Threads, and forks, may use one at the same time.

    Args:
        queue: A queue of `multiprocessing`, or any with ``put(item, block, timeout)``.
        patience: Seconds to wait for a full queue.
    """

    def __init__(self, queue: Any, patience: float) -> None:
        self._queue = queue
        self._patience = patience
        self._semaphore: Any = getattr(queue, "_sem", None)
        # One; more only if threads have opened it at the same time. A lock could be held for ever in a child that was
        # forked at that moment.
        self._fds: list[int] = []

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def send(self, request: TimerRequest) -> None:
        """Write a request to the pipe.

        Raises:
            TimeoutError: The queue was full for ``patience`` seconds.
            ValueError: The request is too long.
        """
        if not self._fds and not self._open():
            self._put(request)
            return
        data = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        if len(data) + _HEAD.size > select.PIPE_BUF:
            msg = f"a timer request of {len(data)} bytes is too long: use a shorter scope"
            raise ValueError(msg)
        # The queue counts its messages by this semaphore: so its own `get` and `qsize` work.
        semaphore = self._semaphore
        if semaphore is not None and not semaphore.acquire(False) and not semaphore.acquire(True, self._patience):
            raise self._full()
        try:
            self._write(_HEAD.pack(len(data)) + data)
        except BaseException:
            if semaphore is not None:
                semaphore.release()
            raise

    def _write(self, message: bytes) -> None:
        end = 0.0
        while True:
            try:
                linux.write_to_pipe(self._fds[0], message)
            except BlockingIOError:
                end = end or clock.now() + self._patience
                poll = select.poll()
                poll.register(self._fds[0], select.POLLOUT)
                if not poll.poll(max(0.0, end - clock.now()) * 1000):
                    raise self._full() from None
            else:
                return

    def _open(self) -> bool:
        fd = _descriptor(self._queue, "_writer")
        if fd is None:
            return False
        self._fds.append(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        return True

    def _put(self, request: TimerRequest) -> None:
        from queue import Full

        try:
            self._queue.put(request, True, self._patience)
        except Full:
            raise self._full() from None

    def _full(self) -> TimeoutError:
        return TimeoutError(
            f"the timer server has taken nothing out of its queue, which is full, for {self._patience:g} s: was it "
            "started (LocalTimerServer.start), on this very queue, and is its process still running?"
        )


class MultiprocessingRequestQueue(RequestQueue):
    """A `RequestQueue` that receives requests from a `multiprocessing` queue.

    ``Queue``, ``JoinableQueue`` and ``SimpleQueue`` are waited for with epoll(7). Any other with ``qsize``, ``get`` and
    ``put``, as a manager's, is used by these; None in it only wakes the server. Only one server
    may read a queue.

    Args:
        mp_queue: The queue.

    >>> import multiprocessing
    >>> from phalanx.timer import TimerRequest
    >>> queue = multiprocessing.get_context("spawn").SimpleQueue()
    >>> queue.put(TimerRequest(4242, "all_reduce", -1))
    >>> requests = MultiprocessingRequestQueue(queue)
    >>> requests.size(), requests.get(2, timeout=0)
    (1, [TimerRequest(worker_id=4242, scope_id='all_reduce', expiration_time=-1)])
    """

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue
        self._came: deque[Any] = deque()
        self._pipe: _Pipe | None = None

    def size(self) -> int:
        """Return how many requests are there now."""
        pipe = self._ready()
        if pipe is None:
            return int(self._mp_queue.qsize())
        self._came.extend(pipe.read())
        return len(self._came)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """See `RequestQueue.get`. Returns early when it is woken, or when a watched descriptor is readable."""
        end = clock.now() + timeout
        pipe = self._ready()
        if pipe is None:
            return list(self._others(size, end))
        came = self._came
        came.extend(pipe.read())
        while len(came) < size:
            left = end - clock.now()
            if left <= 0 or pipe.wait(left):
                break
            came.extend(pipe.read())
        return [came.popleft() for _ in range(min(size, len(came)))]

    def watch(self, fd: int) -> None:
        """Have `get` return once when ``fd`` becomes readable; `readable` then returns it."""
        pipe = self._ready()
        if pipe is not None:
            pipe.watch(fd)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; to be called before it is closed."""
        if self._pipe is not None:
            self._pipe.forget(fd)

    def readable(self) -> list[int]:
        """Return the watched descriptors that have become readable since the last call. They are no longer watched."""
        return [] if self._pipe is None else self._pipe.take_readable()

    def _ready(self) -> _Pipe | None:
        if self._pipe is None:
            fd = _descriptor(self._mp_queue, "_reader")
            if fd is not None:
                self._pipe = _Pipe(fd, getattr(self._mp_queue, "_sem", None))
        return self._pipe

    _open = _ready  # type: ignore[assignment]  # what it returns is of no use to a server

    def _wake(self) -> None:
        if self._pipe is not None:
            self._pipe.wake()
        elif _descriptor(self._mp_queue, "_reader") is None:
            self._mp_queue.put(None)

    def _close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _abandon(self) -> None:
        if self._pipe is not None:
            self._pipe.let_go()
            self._pipe = None

    @property
    def _punctual(self) -> bool:
        return self._pipe is not None

    def _others(self, size: int, end: float) -> Iterator[Any]:
        from queue import Empty

        for _ in range(size):
            try:
                request = self._mp_queue.get(True, max(0.0, end - clock.now()))
            except Empty:
                return
            if request is None:
                return
            yield request


class _Pipe:
    """The end of a queue that receives requests, with an eventfd that wakes it, and other descriptors to watch."""

    _bell = -1

    def __init__(self, fd: int, semaphore: Any) -> None:
        self._semaphore = semaphore
        self._buffer = bytearray()
        self._readable: list[int] = []
        # Between a check of the bell and the write, its number could become another file's.
        self._gate = allocate_lock()
        with ExitStack() as stack:
            self._epoll = stack.enter_context(select.epoll())
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, self._fd)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.pop_all()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        with self._gate:
            self.let_go()

    def let_go(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            self._epoll.close()
            os.close(self._fd)
            os.close(bell)

    def wake(self) -> None:
        with self._gate:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def watch(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def forget(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except (OSError, ValueError):  # readable before, and so forgotten already; or closed
            return

    def take_readable(self) -> list[int]:
        found, self._readable = self._readable, []
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for a request, for at most ``seconds``. Returns whether the bell or a watched descriptor was ready."""
        other = False
        seconds = min(seconds, _LONGEST_WAIT)
        for fd, events in wait_promptly(self._epoll, seconds):
            if fd == self._bell:
                os.eventfd_read(fd)
                other = True
            elif fd != self._fd:
                self._epoll.unregister(fd)
                self._readable.append(fd)
                other = True
            elif not events & select.EPOLLIN:  # no writer is left: epoll would report that again and again
                self._epoll.unregister(fd)
        return other

    def read(self) -> Iterator[Any]:
        """Yield all complete messages, unpickled. What cannot be read is logged and skipped."""
        buffer = self._buffer
        while True:
            try:
                chunk = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                chunk = b""
            buffer += chunk
            yield from self._messages()
            if len(chunk) < _CHUNK:
                return

    def _messages(self) -> Iterator[Any]:
        buffer, start = self._buffer, 0
        while len(buffer) - start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(buffer, start)
            if not 0 <= length <= _LONGEST:
                # The rest of a long message whose writer was killed. The next message most likely begins where the next
                # read does.
                self._complain("a message of %d bytes in the queue of timer requests: its contents are lost", length)
                start = len(buffer)
                break
            end = start + _HEAD.size + length
            if end > len(buffer):
                break
            data = bytes(memoryview(buffer)[start + _HEAD.size : end])
            start = end
            self._release_semaphore()
            try:
                yield pickle.loads(data)
            except Exception as error:  # noqa: BLE001 - unpickling runs the code of others
                self._complain("what is in the queue of timer requests cannot be unpickled, skipped: %s", str(error))
        del buffer[:start]

    def _release_semaphore(self) -> None:
        if self._semaphore is not None:
            try:
                self._semaphore.release()
            except ValueError:  # its writer wrote without acquiring it, and was killed
                return

    @staticmethod
    def _complain(text: str, detail: object) -> None:
        from phalanx.timer.debug_info_logging import logger

        logger().error(text, detail)
