"""`LocalTimerClient`: sends timer requests through a `multiprocessing` queue.

Requests are written in the queue's own format, but not by its ``put``: if a worker is killed while the thread of
``put`` holds the queue's lock, no other worker can ever send. Here a worker writes by itself, without lock or thread: a
write of at most PIPE_BUF bytes is atomic (pipe(7)), and a request is shorter. The pipe is opened anew through /proc,
because O_NONBLOCK belongs to the open file, which other processes share.
"""

from __future__ import annotations

import os
import pickle
import select
from struct import Struct

from phalanx._base import clock
from phalanx.timer._requests import PipeTimerClient, TimerRequest, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HEAD = Struct("!i")  # what multiprocessing.connection puts before each message: its length
_LONGEST_SCOPE = 900  # characters; with four bytes each a request fits into one write


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
        if len(data) + _HEAD.size > select.PIPE_BUF:
            msg = f"a timer request of {len(data)} bytes is too long: use a shorter scope"
            raise ValueError(msg)
        # The queue counts its messages by this semaphore: so its own `get` and `qsize` work.
        semaphore = getattr(self._mp_queue, "_sem", None)
        if semaphore is not None and not semaphore.acquire(False) and not semaphore.acquire(True, self._patience):
            raise self._full()
        try:
            self._write(_HEAD.pack(len(data)) + data, self._patience)
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
