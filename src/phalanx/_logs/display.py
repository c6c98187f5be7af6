"""The one thread of this process that shows lines, for all groups.

Owns that thread, and which outputs groups share: two groups that wrote to one terminal separately would cut each
other's lines. Showing may take long, and may fail: no supervisor waits for it. Knows nothing of processes.
"""

from __future__ import annotations

import os
from _thread import RLock
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from phalanx._base import clock, unpatched
from phalanx._base.loop import Loop
from phalanx._base.stderr import mention
from phalanx._base.threads import Latch
from phalanx._logs.pump import Pump
from phalanx._logs.terminal import PlainOutput

REACTION = 5.0
"""Seconds in which the display has to react, from the end of a group on. After that it is abandoned: a write to a
stream object of the host's does not return, say, or a disk does not answer."""

# Reentrant: the thread that holds it may run a signal handler or a `__del__`, which starts or closes a group.
_lock = RLock()
_outputs: WeakValueDictionary[object, PlainOutput] = WeakValueDictionary()
_current: _DisplayThread | None = None


def shared_output(key: object, make: Callable[[], PlainOutput]) -> PlainOutput:
    """Return the one output for a target, which all groups share. ``key`` identifies the target; ``make`` opens it.

    The caller has to close its sink.
    """
    with _lock:
        output = _outputs.get(key)
        if output is None or not output.sink.retain():
            output = _outputs[key] = make()
        return output


def show(pump: Pump) -> GroupDisplay:
    """Have the display run a pump. Raises RuntimeError: no thread can be started."""
    global _current  # noqa: PLW0603 - one thread for the process
    with _lock:
        if _current is None:
            _current = _DisplayThread()
        return _current.join(pump)


def _forget() -> None:
    """Reset in a fork of the host: it has no thread, and another thread may have held the lock."""
    global _lock, _current
    _lock, _current = RLock(), None
    _outputs.clear()


os.register_at_fork(after_in_child=_forget)


class _DisplayThread:
    """A thread and its loop, as long as there are groups to be shown."""

    def __init__(self) -> None:
        self.loop = Loop()
        self._shown: set[GroupDisplay] = set()
        self._thread = unpatched.thread(target=self._run, name="phalanx-display")
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def join(self, pump: Pump) -> GroupDisplay:
        shown = GroupDisplay(self, pump)
        self._shown.add(shown)
        return shown

    def leave(self, shown: GroupDisplay, *, stuck: bool) -> None:
        """Remove a group. The last one ends the thread; one that is ``stuck`` abandons it."""
        global _current  # noqa: PLW0603 - one thread for the process
        self._shown.discard(shown)
        # The lock may be held by a thread whose signal handler waits for us: then the display stays, for others.
        if not _lock.acquire(timeout=REACTION):
            return
        try:
            over = not self._shown
            if (over or stuck) and _current is self:
                _current = None
            if stuck:
                _outputs.clear()
        finally:
            _lock.release()
        if over:
            self.loop.call(self.loop.stop)
            self._thread.join(0 if stuck else REACTION)

    def _run(self) -> None:
        try:
            self.loop.run()
        finally:
            self.loop.close()


class GroupDisplay:
    """One group's pump on the display. Methods may be called from any thread; all but `close` return at once."""

    def __init__(self, display: _DisplayThread, pump: Pump) -> None:
        self._display = display
        self._pump = pump
        self._loop: Any = _Guarded(display.loop, self._fail)  # a `Loop`, as far as a pump uses it
        self._failed = False
        self._finished: Callable[[], None] | None = None
        self._answered = True
        self._silent = False

    @property
    def longest(self) -> float:
        """Seconds that `finish` takes at most, if no write blocks."""
        return self._pump.longest

    def open(self) -> None:
        """Begin to follow the files."""
        self._call(lambda: self._pump.open(self._loop))

    def takes_messages(self) -> bool:
        """Whether there is a view for lines of ours."""
        return not self._failed and self._pump.shows_messages

    def say(self, text: str) -> None:
        """Show a line of ours."""
        self._call(lambda: self._pump.show_message(text))

    def reveal(self, rank: int) -> None:
        """Show the last lines of the hidden streams of a local rank that failed."""
        self._call(lambda: self._pump.reveal(rank))

    def finish(self, done: Callable[[], None]) -> None:
        """Show what is left, then call ``done`` in the display's thread, in bounded time."""

        def finish() -> None:
            self._finished = done
            if self._failed:
                self._finish()
            else:
                self._loop.run(lambda: self._pump.finish(self._finish))

        self._display.loop.call(finish)

    def wait(self, shown: Latch) -> None:
        """Wait, after `finish`, until ``shown`` opens, the display does not answer, or it takes too long."""
        until = clock.now() + self.longest
        while self.answers() and (left := until - clock.now()) > 0:
            if shown.wait(min(left, REACTION)):
                break

    def answers(self) -> bool:
        """Whether the display's thread has run everything that was queued up to the last call of this."""

        def answer() -> None:
            self._answered = True

        if not self._answered:
            self._silent = True
            return False
        self._answered = False
        self._display.loop.call(answer)
        return True

    def close(self) -> None:
        """Close every descriptor of the pump. Returns when that is done, after `REACTION` seconds at most."""
        closed = Latch()

        def close() -> None:
            self._failed = True  # what is asked of it later, when another group's lines are shown, has no effect
            try:
                self._pump.close()
            finally:
                closed.open()

        self._display.loop.call(partial(self._loop.run, close))
        in_time = closed.wait(0 if self._silent else REACTION)
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
        """End this group's display after an error, and report it once. The group itself goes on."""
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
    """A `Loop` for one of several users: an exception in its callbacks ends that user, and not the loop."""

    def __init__(self, loop: Loop, failed: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._failed = failed

    def run(self, action: Callable[..., None], *args: Any) -> None:
        """Call ``action``; pass an exception to ``failed``."""
        try:
            action(*args)
        except BaseException as error:  # noqa: BLE001 - see above: a SystemExit of a stream object's, even
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the loop's to which callbacks are passed that `run` calls."""
        method = getattr(self._loop, name)
        return lambda *args: method(*[partial(self.run, each) if callable(each) else each for each in args])
