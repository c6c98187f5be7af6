"""Bytes to lines to sinks: follows the workers' log files and shows them, whole lines at a time.

Owns the following of files (inotify), the cutting into lines, the prefixes, and writing without ever blocking. A worker
writes to its file and is never held up: the file is the buffer, and a slow console only falls behind. Runs on the
group's loop; knows nothing of processes.
"""

from __future__ import annotations

import os
import select
import sys
from collections import deque

from phalanx._core import clock, linux
from phalanx._core.loop import WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from phalanx._core.deadlines import Deadline
    from phalanx._core.loop import Loop

CHUNK = 256 * 1024
"""Bytes read from a file at a time."""

BACKLOG = 1 << 20
"""Bytes that may wait for a sink before the files that feed it are left alone."""

DRAIN = 5.0
"""Seconds without any progress after which the end of a group stops waiting for a console that does not read."""

_ATOMIC = select.PIPE_BUF  # poll(2) promises room for this much in a writable pipe


class Sink:
    """Where lines go: a descriptor, or an object with ``write`` (a notebook's, a test's stand-in for stdout).

    A descriptor is written to without blocking, and without its other users noticing (`linux.open_unblocking`).
    """

    def __init__(self, target: int | Any) -> None:
        self._target = target
        self._fd = -1
        self._limit = sys.maxsize
        self._pollable = False
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._loop: Loop | None = None
        self._on_room: Callable[[], None] = lambda: None
        self._armed = False
        self.broken = False
        self.line_of: Follower | None = None  # whose line stands unfinished at the end
        self.written = 0

    def open(self, loop: Loop, on_room: Callable[[], None]) -> None:
        """Get ready; ``on_room`` is called when there is room again after there was none."""
        self._loop, self._on_room = loop, on_room
        if not isinstance(self._target, int):
            return
        self._fd, self._limit = linux.open_unblocking(self._target)
        try:
            loop.watch(self._fd, self._writable, 0)
            self._pollable = True
        except PermissionError:  # regular files, /dev/null and their like are always ready
            pass

    def room(self) -> bool:
        """Whether more may be written."""
        return self._size < BACKLOG

    @property
    def pending(self) -> int:
        """Bytes that wait to be written."""
        return self._size

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._waiting

    def write(self, data: bytes) -> None:
        """Write, or keep until there is room. What a broken sink is given is dropped: it is in the files."""
        if self.broken or not data:
            return
        if self._fd < 0:
            self._write_object(data)
            return
        self._waiting.append(memoryview(data))
        self._size += len(data)
        if not self._armed:
            self._push()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            assert self._loop is not None
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1
        self.broken = True

    def _writable(self, events: int) -> None:
        if events & (select.EPOLLERR | select.EPOLLHUP):  # reported whether asked for or not, for ever
            self._break()
            self._on_room()
            return
        was_full = not self.room()
        self._push()
        if (was_full and self.room()) or self.idle:
            self._on_room()

    def _push(self) -> None:
        while self._waiting:
            data = self._waiting[0]
            if self._pollable and self._limit <= _ATOMIC and not self._ready():
                break
            try:
                count = os.write(self._fd, data[: self._limit])
            except BlockingIOError:
                break
            except OSError:  # nobody reads any more (EPIPE, EIO after a hangup), or the disk is full
                self._break()
                return
            self._size -= count
            self.written += count
            if count == len(data):
                self._waiting.popleft()
            else:
                self._waiting[0] = data[count:]
        self._arm(bool(self._waiting))

    def _ready(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0))

    def _arm(self, wanted: bool) -> None:  # noqa: FBT001 - a state, not an option
        if wanted != self._armed and self._pollable:
            assert self._loop is not None
            self._armed = wanted
            self._loop.change(self._fd, WRITE if wanted else 0)

    def _break(self) -> None:
        self.broken = True
        self._waiting.clear()
        self._size = 0
        if self._pollable:
            assert self._loop is not None
            self._pollable = False
            self._loop.forget(self._fd)

    def _write_object(self, data: bytes) -> None:
        try:
            target: Any = self._target
            target.write(data.decode("utf-8", "replace"))
            target.flush()
        except Exception:  # noqa: BLE001 - the host's own object: its troubles must not end the group
            self.broken = True
        self.written += len(data)


class Follower:
    """One file on its way to one sink."""

    def __init__(self, path: str, prefix: bytes, sink: Sink) -> None:
        self.path = path
        self.prefix = prefix
        self.sink = sink
        self.fd = -1
        self.offset = 0
        self._partial = b""

    def open(self) -> None:
        """Open the file. Raises OSError."""
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def unread(self) -> int:
        """Bytes in the file that were not shown."""
        return max(0, os.fstat(self.fd).st_size - self.offset) + len(self._partial)

    def step(self) -> bool:
        """Read one chunk and show the whole lines in it. Returns whether there may be more."""
        data = os.pread(self.fd, CHUNK, self.offset)
        if not data:
            return False
        self.offset += len(data)
        end = data.rfind(b"\n") + 1
        if not end:
            self._partial += data
            if len(self._partial) > CHUNK:
                self._flush_partial()
            return len(data) == CHUNK
        lines = self._partial + data[:end]
        self._partial = data[end:]
        if self.sink.line_of is self:  # its beginning has been shown
            first, _, lines = lines.partition(b"\n")
            self.sink.write(first + b"\n")
            self.sink.line_of = None
        if lines:
            self._break_foreign_line()
            body = lines[:-1].replace(b"\n", b"\n" + self.prefix) if self.prefix else lines[:-1]
            self.sink.write(self.prefix + body + b"\n")
        return len(data) == CHUNK

    def finish(self) -> None:
        """Show the last line, though nobody ended it."""
        if self._partial or self.sink.line_of is self:
            self._flush_partial()
            self.sink.write(b"\n")
            self.sink.line_of = None

    def _flush_partial(self) -> None:
        """Show the beginning of a line that is too long to be held: the sink is this file's until the line ends."""
        if self.sink.line_of is not self:
            self._break_foreign_line()
            self.sink.write(self.prefix)
            self.sink.line_of = self
        self.sink.write(self._partial)
        self._partial = b""

    def _break_foreign_line(self) -> None:
        if self.sink.line_of is not None and self.sink.line_of is not self:
            self.sink.write(b"\n")
            self.sink.line_of = None


class Pump:
    """All that a group shows on its sinks. Lives on the group's loop, and on no thread of its own."""

    def __init__(self, followers: Iterable[Follower]) -> None:
        self._followers = list(followers)
        self._sinks = list(dict.fromkeys(follower.sink for follower in self._followers))
        self._watches: dict[int, Follower] = {}
        self._dirty: deque[Follower] = deque()
        self._notify = -1
        self._loop: Loop | None = None
        self._finished: Callable[[], None] | None = None
        self._deadline: Deadline | None = None
        self._progress = 0

    def open(self, loop: Loop) -> None:
        """Start to follow. Raises OSError, with nothing left open."""
        self._loop = loop
        try:
            self._notify = linux.inotify()
            for sink in self._sinks:
                sink.open(loop, self._run)
            for follower in self._followers:
                follower.open()
                self._watches[linux.inotify_add(self._notify, follower.path)] = follower
            loop.watch(self._notify, self._on_change)
        except OSError:
            self.close()
            raise
        self._dirty.extend(self._followers)
        loop.call(self._run)

    def finish(self, done: Callable[[], None]) -> None:
        """Show what is still in the files, then call ``done``; a sink that takes nothing for `DRAIN` s is left."""
        if self._loop is None:  # never opened: the group did not come to start
            done()
            return
        self._finished = done
        self._dirty.clear()
        self._dirty.extend(follower for follower in self._followers if follower.fd >= 0)
        self._watch_progress()
        self._run()

    def close(self) -> None:
        """Give every descriptor back. Idempotent."""
        for follower in self._followers:
            follower.close()
        for sink in self._sinks:
            sink.close()
        if self._notify >= 0:
            assert self._loop is not None
            self._loop.forget(self._notify)
            os.close(self._notify)
            self._notify = -1

    def _on_change(self, _events: int) -> None:
        # struct inotify_event: int wd; uint32_t mask, cookie, len; no name follows for a watched file (inotify(7)).
        try:
            events = memoryview(os.read(self._notify, 65536)).cast("i")
        except BlockingIOError:
            return
        for watch in dict.fromkeys(events[::4].tolist()):
            follower = self._watches.get(watch)
            if follower is None:  # -1: the queue overflowed, and any file may have changed
                self._dirty.extend(self._followers)
            else:
                self._dirty.append(follower)
        self._run()

    def _run(self) -> None:
        """Serve one chunk of each changed file in turn, as long as their sinks have room; then let the loop breathe."""
        assert self._loop is not None
        stuck: list[Follower] = []
        again: dict[Follower, None] = {}
        for follower in dict.fromkeys(self._dirty):
            owner = follower.sink.line_of
            if follower.fd < 0 or follower.sink.broken:
                continue
            if not follower.sink.room() or (owner not in (None, follower) and owner in self._dirty):
                stuck.append(follower)
            elif follower.step():
                again[follower] = None
        self._dirty.clear()
        self._dirty.extend([*again, *stuck])
        if again or any(follower.sink.room() for follower in stuck):
            self._loop.call(self._run)
        elif self._finished is not None and not stuck:
            self._end()

    def _end(self) -> None:
        for follower in self._followers:
            if follower.fd >= 0:
                follower.finish()
        if all(sink.idle for sink in self._sinks) and self._finished is not None:
            finished, self._finished = self._finished, None
            if self._deadline is not None:
                self._deadline.cancel()
            finished()

    def _watch_progress(self) -> None:
        assert self._loop is not None
        self._deadline = self._loop.at(clock.now() + DRAIN, self._look_at_progress)
        self._progress = sum(sink.written for sink in self._sinks)

    def _look_at_progress(self) -> None:
        if self._finished is None:
            return
        if sum(sink.written for sink in self._sinks) > self._progress:
            self._watch_progress()
            return
        self._say_what_is_missing()
        finished, self._finished = self._finished, None
        finished()

    def _say_what_is_missing(self) -> None:
        for follower in self._followers:
            if follower.fd >= 0 and (count := follower.unread()):
                text = f"phalanx: the console did not read; {count:,} more bytes in {follower.path}\n"
                _try_write(2, text.encode())
        for sink in self._sinks:
            if sink.pending:
                text = f"phalanx: the console did not read; {sink.pending:,} bytes are in the log files only\n"
                _try_write(2, text.encode())


def _try_write(fd: int, data: bytes) -> None:
    """Write a short text if that is possible now. It may be stderr that is stuck."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    try:
        if any(events & select.POLLOUT for _fd, events in poll.poll(0)):
            os.write(fd, data[:_ATOMIC])
    except OSError:
        pass
