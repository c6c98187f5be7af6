"""What people see: the process's one thread that shows lines, for all groups that have any.

Owns that thread, and which consoles groups share: two groups on one terminal are two writers otherwise, who cut each
other's lines. What is shown here may take its time, and may fail: nobody who supervises waits for it. Knows nothing of
processes.
"""

from __future__ import annotations

import os
import threading
from _thread import RLock
from functools import partial
from weakref import WeakValueDictionary

from phalanx._base.latch import Latch
from phalanx._base.loop import READ, Loop
from phalanx._base.stderr import mention

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx._base.deadlines import Deadline
    from phalanx._logs.pump import Pump
    from phalanx._logs.terminal import Paper

PATIENCE = 5.0
"""Seconds in which the display has to turn to what it is asked from the end of a group on. It is left alone if it does
not: a stream of the host's does not return, say, or a disk does not answer."""

# Reentrant: a signal handler, or a `__del__`, of the thread that holds it may start a group, or close one.
_lock = RLock()
_surfaces: WeakValueDictionary[object, Paper] = WeakValueDictionary()
_current: _Display | None = None
_hooked = False


def shared(place: object, make: Callable[[], Paper]) -> Paper:
    """The surface of a console, for all groups that have lines there. ``place`` is what is the same for one reader.

    Its sink is held, or made, for the caller, who is to close it.
    """
    _hook()
    with _lock:
        surface = _surfaces.get(place)
        if surface is None or not surface.sink.hold():
            surface = _surfaces[place] = make()
        return surface


def show(pump: Pump) -> Shown:
    """Have the display show what a pump has, once it is opened. Raises RuntimeError: there can be no thread."""
    global _current  # noqa: PLW0603 - one thread for the process
    _hook()
    with _lock:
        if _current is None:
            _current = _Display()
        return _current.join(pump)


def _hook() -> None:
    global _hooked  # noqa: PLW0603 - hooks are the process's
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In a fork of the host: the thread is not there, and the lock may be another thread's."""
    global _lock, _current
    _lock, _current = RLock(), None
    _surfaces.clear()


class _Display:
    """A thread and its loop, for as long as there is anything to be shown."""

    def __init__(self) -> None:
        self.loop = Loop()
        self._shown: set[Shown] = set()
        self._thread = threading.Thread(target=self._run, name="phalanx-display", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def join(self, pump: Pump) -> Shown:
        shown = Shown(self, pump)
        self._shown.add(shown)
        return shown

    def leave(self, shown: Shown, *, stuck: bool) -> None:
        """One has come to its end. The last one takes the thread along; one that is ``stuck`` leaves it to itself."""
        global _current  # noqa: PLW0603 - one thread for the process
        self._shown.discard(shown)
        # The thread that holds it may be in a signal handler, which waits for us: then this thread stays for others.
        if not _lock.acquire(timeout=PATIENCE):
            return
        try:
            over = not self._shown
            if (over or stuck) and _current is self:
                _current = None
            if stuck:
                _surfaces.clear()
        finally:
            _lock.release()
        if over:
            self.loop.call(self.loop.stop)
            self._thread.join(0 if stuck else PATIENCE)

    def _run(self) -> None:
        try:
            self.loop.run()
        finally:
            self.loop.close()


class Shown:
    """One group's lines on the display. Methods may be called from any thread, and return at once, but for `close`."""

    def __init__(self, display: _Display, pump: Pump) -> None:
        self._display = display
        self._pump = pump
        self._loop: Any = _Guarded(display.loop, self._fail)  # a `Loop`, as far as a pump uses it
        self._failed = False
        self._finished: Callable[[], None] | None = None
        self._answered = True
        self._silent = False

    @property
    def longest(self) -> float:
        """Seconds that `finish` may take, when all goes as it should."""
        return self._pump.longest

    def open(self) -> None:
        """Begin to show."""
        self._call(lambda: self._pump.open(self._loop))

    def say(self, text: str) -> bool:
        """Show a line of ours. Returns whether that is possible."""
        if self._failed or not self._pump.speaks:
            return False
        self._call(lambda: self._pump.say(text))
        return True

    def reveal(self, rank: int) -> None:
        """A local rank has failed: show the last lines of its streams that are hidden."""
        self._call(lambda: self._pump.reveal(rank))

    def finish(self, done: Callable[[], None]) -> None:
        """Show what is left, and call ``done``, in bounded time, in the display's thread."""

        def finish() -> None:
            self._finished = done
            if self._failed:
                self._finish()
            else:
                self._loop.run(lambda: self._pump.finish(self._finish))

        self._display.loop.call(finish)

    def answers(self) -> bool:
        """Whether the display has turned to all that it was asked up to the last call of this."""

        def answer() -> None:
            self._answered = True

        if not self._answered:
            self._silent = True
            return False
        self._answered = False
        self._display.loop.call(answer)
        return True

    def close(self) -> None:
        """Give every descriptor back. Returns when that is done, or takes too long."""
        closed = Latch()

        def close() -> None:
            try:
                self._pump.close()
            finally:
                closed.open()

        self._display.loop.call(partial(self._loop.run, close))
        in_time = closed.wait(0 if self._silent else PATIENCE)
        if not in_time:
            mention("phalanx: what shows the lines does not return; it is left alone, the log files have everything")
        self._display.leave(self, stuck=not in_time)

    def _call(self, action: Callable[[], None]) -> None:
        def call() -> None:
            if not self._failed:
                self._loop.run(action)

        self._display.loop.call(call)

    def _finish(self) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            finished()

    def _fail(self, error: BaseException) -> None:
        """The display of this group has failed: it ends, which is said once, and nothing else does."""
        if self._failed:
            return
        self._failed = True
        mention(f"phalanx: what is shown ends here, the log files have everything: {type(error).__name__}: {error}")
        try:
            self._pump.close()
        except BaseException as more:  # noqa: BLE001 - it has failed already
            mention(f"phalanx: {more!r}")
        self._finish()


class _Guarded:
    """A loop for one of those who share it: what its callbacks raise ends that one, and nobody else."""

    def __init__(self, loop: Loop, failed: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._failed = failed

    def run(self, action: Callable[[], None]) -> None:
        """Call ``action``, which may raise."""
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - see above: a SystemExit of a stream object's, even
            self._failed(error)

    def watch(self, fd: int, callback: Callable[[int], None], events: int = READ) -> None:
        """See `Loop.watch`."""
        self._loop.watch(fd, lambda ready: self.run(lambda: callback(ready)), events)

    def at(self, moment: float, action: Callable[[], None]) -> Deadline:
        """See `Loop.at`."""
        return self._loop.at(moment, lambda: self.run(action))

    def after(self, seconds: float, action: Callable[[], None]) -> Deadline:
        """See `Loop.after`."""
        return self._loop.after(seconds, lambda: self.run(action))

    def call(self, action: Callable[[], None]) -> None:
        """See `Loop.call`."""
        self._loop.call(lambda: self.run(action))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
