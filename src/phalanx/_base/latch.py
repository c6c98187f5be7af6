"""How threads wait for each other, and the main thread for signals as well. Knows nothing of what is waited for."""

from __future__ import annotations

import os
from _thread import RLock, allocate_lock
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import chain

from phalanx._base import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Latch:
    """A one-way gate between threads: closed, then open for ever.

    Unlike `threading.Event` it holds no lock while it waits, so an exception that a signal handler raises in the
    waiting thread (SignalException, KeyboardInterrupt) can never leave it locked; and no signal can come too late to
    end the wait.

    >>> gate = Latch()
    >>> gate.wait(0)
    False
    >>> gate.open(); gate.wait()
    True
    """

    def __init__(self) -> None:
        self._open = False
        self._waiters: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        return self._open

    def open(self) -> None:
        """Let everybody through, now and later. Idempotent."""
        self._open = True
        while True:
            try:
                wake = self._waiters.popleft()
            except IndexError:  # not asked before: who gives up waiting takes its own away meanwhile
                return
            wake()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action``, which must not raise, once when open: in the thread that opens, or here if it is already.

        >>> gate = Latch()
        >>> gate.then(lambda: print("opened")); gate.open()
        opened
        >>> gate.then(lambda: print("at once"))
        at once
        """
        self._waiters.append(action)
        if self._open:  # perhaps between two looks, and nobody comes any more; or somebody does, and is faster
            with suppress(ValueError):
                self._waiters.remove(action)
                action()

    def wait(self, timeout: float = -1) -> bool:
        """Wait until open, for at most ``timeout`` seconds (< 0: without limit). Returns whether it is open."""
        if self._open or timeout == 0:
            return self._open
        pipe = _Pipe()
        bell: _Pipe | _Lock = pipe
        try:
            if not pipe.answer_signals():  # not the main thread, where no handler runs; or no descriptor is left
                bell = _Lock()
            self._waiters.append(bell.ring)
            if not bool(self):  # else opened between the first look and the append: nobody may come to wake us
                bell.wait(timeout, self)
        finally:
            try:
                pipe.leave()
            finally:  # a handler may have raised in the midst of it
                pipe.leave()
            if not self._open:  # who asks again and again for a week must not be remembered each time
                with suppress(ValueError):  # `open` was faster
                    self._waiters.remove(bell.ring)
        return self._open


class _Lock:
    """How other threads wait."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self.ring = self._lock.release

    def wait(self, timeout: float, _latch: Latch) -> None:
        # A lock waits at most TIMEOUT_MAX (292 years); more is the same as for ever.
        self._lock.acquire(timeout=min(timeout, 1e8) if timeout > 0 else -1)


class _Pipe:
    """How the main thread waits.

    A signal that arrives just before a thread blocks on a lock does not end the wait: the interpreter has noted it, and
    runs the handler once the lock is there, hours later perhaps. It also writes a byte to the wakeup descriptor, which
    poll(2) cannot miss.

    Handlers run between any two instructions of ours, and what they raise ends us there (in a `__del__` it would even
    be lost). So whatever is taken is noted by the same call into C that takes it, and given back by another.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []  # to read, to write
        self._before: list[int] = []  # the wakeup descriptor that ours replaces
        self._closing = map(os.close, self._fds)  # done by whoever runs it to its end; after that, nothing
        # Between a look at the descriptor and the write its number could become another file's. Reentrant, for a signal
        # handler that opens the latch while its own thread leaves.
        self._gate = RLock()
        self._left = False

    def answer_signals(self) -> bool:
        """Get ready, and have signals ring as well. Returns whether that is possible: on the main thread."""
        import signal

        replace = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
        with suppress(OSError, ValueError):
            self._fds.extend(chain.from_iterable(map(os.pipe2, (os.O_CLOEXEC | os.O_NONBLOCK,))))
            self._before.extend(map(replace, self._fds[1:]))
        if not self._before:
            self.leave()
        return not self._left

    def ring(self) -> None:
        with self._gate, suppress(BlockingIOError):  # full of signals: it rings already
            if not self._left:
                os.write(self._fds[1], b"\0")

    def wait(self, timeout: float, latch: Latch) -> None:
        import select

        poll = select.poll()
        poll.register(self._fds[0], select.POLLIN)
        end = clock.now() + timeout
        while not latch:
            left = end - clock.now() if timeout > 0 else None
            if left is not None and left <= 0:
                return
            # poll(2) counts milliseconds in an int: beyond 24 days it waits in several turns.
            if poll.poll(None if left is None else min(left, 2e6) * 1000):
                self._hear()

    def leave(self) -> None:
        """Give the wakeup descriptor back to whom it belonged, with the signals that came meanwhile. Idempotent."""
        import signal

        if self._before and not self._left:
            signal.set_wakeup_fd(self._before[0])
            self._hear()
        with self._gate:
            self._left = True
            any(self._closing)

    def _hear(self) -> None:
        try:
            signals = os.read(self._fds[0], 4096).replace(b"\0", b"")
        except BlockingIOError:
            return
        if signals and self._before[0] >= 0:
            with suppress(OSError):  # full, which wakes as well; or closed
                os.write(self._before[0], signals)
