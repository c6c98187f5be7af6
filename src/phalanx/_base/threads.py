"""Threads: a gate at which they wait for each other, and one that makes the calls of others in their order."""

from __future__ import annotations

import os
from _thread import RLock, allocate_lock
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import chain

from phalanx._base import clock, interrupts, unpatched

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


class Latch:
    """A one-way gate between threads: closed at first, then open for ever.

    Unlike `threading.Event` it holds no lock while it waits, so an exception that a signal handler raises in the
    waiting thread (SignalException, KeyboardInterrupt) can never leave it locked; and a signal at any moment
    of the wait runs its handler at once.

    >>> gate = Latch()
    >>> gate.wait(0)
    False
    >>> gate.open(); gate.wait()
    True
    """

    def __init__(self) -> None:
        self._open = False
        self._waiters: deque[Callable[[], None]] = deque()
        self._actions: deque[Callable[[], None]] = deque()
        self._calling = allocate_lock()  # held by the thread that calls an action; nobody waits for it

    def __bool__(self) -> bool:
        return self._open

    def open(self) -> None:
        """Wake all threads that wait, and let later ones through. Idempotent."""
        self._open = True
        self._call()
        while True:
            try:
                wake = self._waiters.popleft()
            except IndexError:  # not checked before: a thread that gives up waiting removes its entry meanwhile
                return
            wake()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action``, which must not raise, once the latch opens, in that thread; at once if it is open.

        Actions are called one after the other, in the order in which they were given: while a thread calls one, it
        calls those that come meanwhile as well.

        >>> gate = Latch()
        >>> gate.then(lambda: print("opened")); gate.open()
        opened
        >>> gate.then(lambda: print("at once"))
        at once
        """
        self._actions.append(action)
        if self._open:  # since the append: `open` may have missed the action, or may be calling it
            self._call()

    def _call(self) -> None:
        """Call the actions; none, if another thread is at it, or this one further up."""
        while self._actions:
            with interrupts.deferred():  # an exception must not leave the lock taken
                if not self._calling.acquire(blocking=False):
                    return  # who has it looks again after the release
                try:
                    try:
                        action = self._actions.popleft()
                    except IndexError:  # the other thread has called it, or it was forgotten
                        return
                    action()
                finally:
                    self._calling.release()

    def forget(self, action: Callable[[], None]) -> None:
        """Do not call ``action`` any more, which was given to `then`. It may be being called just now.

        >>> gate, action = Latch(), lambda: print("opened")
        >>> gate.then(action); gate.forget(action); gate.open(); gate.forget(action)
        """
        with suppress(ValueError):
            self._actions.remove(action)

    def wait(self, timeout: float = -1) -> bool:
        """Wait until open, for at most ``timeout`` seconds (< 0: without limit). Returns whether it is open."""
        if self._open or timeout == 0:
            return self._open
        pipe = _Pipe()
        bell: _Pipe | _Lock = pipe
        try:
            if not pipe.take_wakeup_fd():  # another thread, where no handler runs; or no descriptor is left
                bell = _Lock()
            self._waiters.append(bell.ring)
            if not bool(self):  # else it was opened between the first look and the append, and no wake-up may come
                bell.wait(timeout, self)
        finally:
            try:
                pipe.leave()
            finally:  # a handler may have raised in the midst of it
                pipe.leave()
            if not self._open:  # else repeated waits with a timeout would leave an entry each
                with suppress(ValueError):  # `open` was faster
                    self._waiters.remove(bell.ring)
        return self._open


class _Lock:
    """Waits on a thread other than the main one."""

    def __init__(self) -> None:
        self._lock = unpatched.module("_thread").allocate_lock()
        self._lock.acquire()
        self.ring = self._lock.release

    def wait(self, timeout: float, _latch: Latch) -> None:
        # A lock waits at most TIMEOUT_MAX (292 years); more is the same as for ever.
        self._lock.acquire(timeout=min(timeout, 1e8) if timeout > 0 else -1)


class _Pipe:
    """Waits on the main thread.

    A signal that arrives just before a thread blocks on a lock does not end the wait: the interpreter has noted it, and
    runs the handler once the lock is acquired, which may be hours later. It also writes a byte to the wakeup descriptor
    (signal.set_wakeup_fd), which poll(2) reports.

    Handlers run between any two instructions of ours, and an exception of theirs ends the method there (in a `__del__`
    it would even be swallowed). So whatever is opened is stored by the same call into C that opens it, and released by
    another such call.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []  # to read, to write
        self._before: list[int] = []  # the wakeup descriptor that ours replaces
        self._closing = map(os.close, self._fds)  # closes both when it is run to its end; a second run does nothing
        # Between a look at the descriptor and the write its number could become another file's. Reentrant, for a signal
        # handler that opens the latch while its own thread leaves.
        self._gate = RLock()
        self._left = False

    def take_wakeup_fd(self) -> bool:
        """Open the pipe, and make it the wakeup descriptor. Returns False where that is not possible."""
        import signal

        replace = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
        with suppress(OSError, ValueError):
            self._fds.extend(chain.from_iterable(map(os.pipe2, (os.O_CLOEXEC | os.O_NONBLOCK,))))
            self._before.extend(map(replace, self._fds[1:]))
        if not self._before:
            self.leave()
        return not self._left

    def ring(self) -> None:
        with self._gate, suppress(BlockingIOError):  # full of signals: it is readable already
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
                self._drain()

    def leave(self) -> None:
        """Restore the former wakeup descriptor, and write to it the signals that came meanwhile. Idempotent."""
        import signal

        if self._before and not self._left:
            signal.set_wakeup_fd(self._before[0])
            self._drain()
        with self._gate:
            self._left = True
            any(self._closing)

    def _drain(self) -> None:
        """Read what is in the pipe, and pass signal numbers on to the former wakeup descriptor."""
        try:
            signals = os.read(self._fds[0], 4096).replace(b"\0", b"")
        except BlockingIOError:
            return
        if signals and self._before[0] >= 0:
            with suppress(OSError):  # full, which wakes as well; or closed
                os.write(self._before[0], signals)


class SerialExecutor:
    """A queue of calls, and the thread that makes them.

    Args:
        name: The thread's name.
        most: How many calls may wait. Those beyond are dropped.

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

    def submit(self, action: Callable[[], object]) -> bool:
        """Have ``action`` called after those before it. What it raises is logged.

        Returns False when it will not be called: too many wait, or no thread can be started.
        """
        with interrupts.deferred():
            return self._submit(action)

    def _submit(self, action: Callable[[], object]) -> bool:
        with self._lock:
            if len(self._calls) >= self._most:
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
