"""Where the requests of a timer server come from: the pipe in a queue of `multiprocessing`, or a named pipe.

Owns the reader's end of both: how it waits, how it is woken, what it makes of the bytes. What their writers do is in
`_requests` and `_file_client`.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from phalanx._base import clock, unpatched
from phalanx._base.loop import wait_promptly
from phalanx.timer._file_client import LINE_LIMIT, FileTimerRequest, create_pipe, is_at
from phalanx.timer._requests import HEAD, RequestQueue, TimerRequest
from phalanx.timer._server import Complaints
from phalanx.timer.debug_info_logging import logger

_LONGEST = 1 << 20  # bytes of a message: no request is longer
_CHUNK = 1 << 16  # bytes at a time: few enough that no deadline waits for long
_LONGEST_WAIT = 2e6  # seconds: epoll_wait(2) counts milliseconds in an int


class PipeRequestQueue(RequestQueue):
    """A `RequestQueue` that reads a pipe, and waits for it with epoll(7), for a bell (eventfd(2)) and for others."""

    _fd = _bell = -1  # both are open, or neither
    _epoll: Any

    def __init__(self) -> None:
        self._came: deque[Any] = deque()
        self._readable: list[int] = []
        # Between a check of the bell and the write, its number could become another file's.
        self._gate = unpatched.module("_thread").allocate_lock()

    def __del__(self) -> None:
        self._abandon()

    def size(self) -> int:
        """Return how many requests are there now, at least."""
        if self._is_open():
            self._came.extend(self.parse(self._read()))
        return len(self._came)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """See `RequestQueue.get`. Returns early when it is woken, or when a watched descriptor is readable."""
        end = clock.now() + timeout
        came = self._came
        while self._is_open() and len(came) < size:
            left = end - clock.now()
            if left <= 0 or self._wait(left):
                break
            came.extend(self.parse(self._read()))
        return [came.popleft() for _ in range(min(size, len(came)))]

    def watch(self, fd: int) -> None:
        """Have `get` return once when ``fd`` becomes readable; `readable` then returns it."""
        if self._is_open():
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; to be called before it is closed."""
        if self._bell >= 0:
            with suppress(OSError, ValueError):  # readable before, and so forgotten already; or closed
                self._epoll.unregister(fd)

    def readable(self) -> list[int]:
        """Return the watched descriptors that have become readable since the last call. They are no longer watched."""
        found, self._readable = self._readable, []
        return found

    def parse(self, data: bytes) -> Iterable[Any]:
        """Return the requests that are complete now."""
        raise NotImplementedError

    def _is_open(self) -> bool:
        """Whether there is a pipe. It is opened, if it can be."""
        return self._bell >= 0

    def _attach(self, fd: int) -> None:
        """Read a pipe that is open without blocking. It is taken over."""
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            self._epoll = stack.enter_context(unpatched.module("select").epoll())
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.pop_all()
        self._fd, self._bell, self._readable = fd, bell, []
        self._epoll.register(fd, select.EPOLLIN)
        self._epoll.register(bell, select.EPOLLIN)

    def _wait(self, seconds: float) -> bool:
        """Wait for a request, for at most ``seconds``. Returns whether the bell or a watched descriptor was ready."""
        other = False
        for fd, events in wait_promptly(self._epoll, min(seconds, _LONGEST_WAIT)):
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

    def _read(self) -> bytes:
        """Read once. Returns what is there, perhaps nothing."""
        try:
            return os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return b""

    def _wake(self) -> None:
        with self._gate:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _close(self) -> None:
        with self._gate:
            self._abandon()

    def _abandon(self) -> None:
        (fd, self._fd), (bell, self._bell) = (self._fd, -1), (self._bell, -1)
        if bell >= 0:
            self._epoll.close()
            os.close(fd)
            os.close(bell)

    @property
    def _punctual(self) -> bool:
        return self._bell >= 0


class MultiprocessingRequestQueue(PipeRequestQueue):
    """A `RequestQueue` that receives requests from a `multiprocessing` queue.

    ``Queue``, ``JoinableQueue`` and ``SimpleQueue`` are read by their pipe, in the queue's own format, but not by its
    ``get``, which waits without bound for the rest of a message whose writer was killed. The pipe is opened anew
    through /proc, because O_NONBLOCK belongs to the open file, which other processes share. Any other queue with
    ``qsize``, ``get`` and ``put``, as a manager's, is used by these; None in it only wakes the server. Only one server
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
        super().__init__()
        self._mp_queue = mp_queue
        self._pipe: Any = getattr(mp_queue, "_reader", None)  # None: a manager's proxy, a queue of threads
        self._semaphore: Any = getattr(mp_queue, "_sem", None)
        self._buffer = bytearray()

    def size(self) -> int:
        """See `PipeRequestQueue.size`."""
        return int(self._mp_queue.qsize()) if self._pipe is None else super().size()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """See `PipeRequestQueue.get`."""
        return list(self._others(size, clock.now() + timeout)) if self._pipe is None else super().get(size, timeout)

    def _is_open(self) -> bool:
        if self._bell < 0 and self._pipe is not None:
            path = f"/proc/self/fd/{int(self._pipe.fileno())}"
            self._attach(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        return self._bell >= 0

    _open = _is_open

    def _wake(self) -> None:
        if self._pipe is None:
            self._mp_queue.put(None)
        else:
            super()._wake()

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

    def parse(self, data: bytes) -> Iterator[Any]:
        """Yield all complete messages, unpickled. What cannot be read is logged and skipped."""
        buffer, start = self._buffer, 0
        buffer += data
        while len(buffer) - start >= HEAD.size:
            (length,) = HEAD.unpack_from(buffer, start)
            if not 0 <= length <= _LONGEST:
                # The rest of a long message whose writer was killed. The next message most likely begins where the next
                # read does.
                logger().error("a message of %d bytes in the queue of timer requests: its contents are lost", length)
                start = len(buffer)
                break
            end = start + HEAD.size + length
            if end > len(buffer):
                break
            data = bytes(memoryview(buffer)[start + HEAD.size : end])
            start = end
            if self._semaphore is not None:
                with suppress(ValueError):  # its writer wrote without acquiring it, and was killed
                    self._semaphore.release()
            try:
                yield pickle.loads(data)
            except Exception as error:  # noqa: BLE001 - unpickling runs the code of others
                logger().error("what is in the queue of timer requests cannot be unpickled, skipped: %s", str(error))
        del buffer[:start]


class FifoRequestQueue(PipeRequestQueue):
    """A `RequestQueue` that makes a named pipe, and reads lines of JSON from it, see `_file_client`.

    Args:
        path: Where the pipe shall be.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._start_anew(mid_line=False)

    def _start_anew(self, *, mid_line: bool) -> None:
        """Begin to parse. ``mid_line``: the first line may lack its beginning, which a server before has read."""
        self._came.clear()
        self._lines, self._mid_line, self._complaints = Lines(), mid_line, Complaints()

    def _open(self) -> None:
        fd, taken_over = create_pipe(self._path)
        self._start_anew(mid_line=taken_over)
        try:
            self._attach(fd)
        except BaseException:  # no descriptor is left
            os.unlink(self._path)
            raise

    def _close(self) -> None:
        if self._bell >= 0:
            if is_at(self._path, os.fstat(self._fd)):
                os.unlink(self._path)
            # Closing is not enough: a child that C code forked may hold the descriptor, and the lock with it.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            super()._close()
            self._complaints.flush()

    def parse(self, data: bytes) -> list[FileTimerRequest]:
        """Return the requests whose lines are complete now, in order. Damaged and long lines are logged and skipped."""
        oversized = self._lines.oversized
        requests = [request for line in self._lines.feed(data) if (request := self._read_line(line)) is not None]
        if self._lines.oversized > oversized:
            self._complaints.say("timer pipe: a line of more than %d bytes was skipped", LINE_LIMIT)
        return requests

    def _read_line(self, line: bytes) -> FileTimerRequest | None:
        mid_line, self._mid_line = self._mid_line, False
        try:
            return FileTimerRequest.from_json(line) if line else None
        except ValueError as exc:
            if not mid_line:  # else a request to the server before, whose timers are lost anyway
                self._complaints.say("timer pipe: a damaged line was skipped: %s: %r", exc, line[:120])
            return None


class Lines:
    r"""Cuts any stream of bytes into lines, in bounded memory.

    >>> lines = Lines()
    >>> lines.feed(b'one\ntw'), lines.feed(b'o\n'), lines.feed(b'x' * 9999), lines.feed(b'x\nthree\n')
    ([b'one'], [b'two'], [], [b'three'])
    >>> lines.oversized
    1
    """

    def __init__(self) -> None:
        self.oversized = 0
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now. Those over `LINE_LIMIT` bytes are counted, and left out."""
        if not data:
            return []
        whole = (self._rest + data).split(b"\n")
        self._rest = whole.pop()
        if whole and self._skipping:
            del whole[0]
            self._skipping = False
        lines = [line for line in whole if len(line) < LINE_LIMIT]
        self.oversized += len(whole) - len(lines)
        if len(self._rest) >= LINE_LIMIT:
            self.oversized += not self._skipping
            self._skipping, self._rest = True, b""
        elif self._skipping:
            self._rest = b""
        return lines
