"""Where lines go in the end. Owns writing in order without ever blocking, and what waits for a slow reader."""

from __future__ import annotations

import codecs
import errno
import os
import select
import sys
from _thread import allocate_lock
from collections import deque
from contextlib import suppress

from phalanx._core import clock, linux
from phalanx._core.loop import WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from typing import Any

    from phalanx._core.loop import Loop

TURN = 256 * 1024
"""Bytes of one file that a sink takes at a time, at most."""

_FIRST_TURN = 16 * 1024  # until it has shown that it is fast; a slow one is to show every rank, not megabytes of one
_TURNS = 4  # that may wait for a sink before the files that feed it are left alone
_SLOW = 0.1  # seconds without an end of what waits

_ATOMIC = select.PIPE_BUF  # poll(2) promises room for this much in a writable pipe
_VECTOR = 64  # buffers in one writev(2)
_NO_READER = (errno.EPIPE, errno.EIO)  # the second of a terminal that has been hung up


class Sink:
    """A descriptor, the path of a file (created, or appended to), or an object with ``write`` (a notebook's stdout).

    A descriptor is written to without blocking, and without its other users noticing (`linux.open_unblocking`). With
    ``own`` it is the sink's, to be closed with it. Several may share a sink, each of which is to `hold` it, but for who
    has made it, and to `close` it.
    """

    def __init__(self, target: int | Any, *, own: bool = False) -> None:
        self._target = target
        self._own = own
        self._holders = 1
        self._lock = allocate_lock()
        self._fd = -1
        self._limit = sys.maxsize
        self._pollable = False
        self._waiting: deque[memoryview] = deque()
        self._owners: deque[object] = deque()
        self._size = 0
        self._loop: Loop | None = None
        self._users: dict[Callable[[], None], None] = {}
        self.turn = _FIRST_TURN
        """Bytes of one file that it is to be given next."""
        self._blocked_since = 0.0
        self.blocked = False  # whether the reader has to make room first
        self.broken = False
        self.refusal: BaseException | None = None  # why it is broken, though somebody reads: a full disk
        self.written = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.mid_line = False  # whether what was written last was not the end of a line

    def hold(self) -> bool:
        """One more is to `close` this. Returns whether that is possible: False when it has been closed. Any thread."""
        with self._lock:
            if self._holders:
                self._holders += 1
            return self._holders > 0

    def open(self, loop: Loop, on_room: Callable[[], None]) -> None:
        """Get ready. ``on_room`` is called when there is room again after there was none, and when all is out."""
        first, self._users[on_room] = not self._users, None
        if not first:
            return
        self._loop, self.broken, self.refusal = loop, False, None
        if isinstance(self._target, str):
            self._fd = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            return
        if not isinstance(self._target, int):
            return
        self._fd, self._limit = linux.open_unblocking(self._target)
        try:
            loop.watch(self._fd, self._writable, 0)
            self._pollable = True
        except PermissionError:  # regular files, /dev/null and their like are always ready
            pass

    @property
    def path(self) -> str:
        """That of the file, if it was given one."""
        return self._target if isinstance(self._target, str) else ""

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._waiting

    @property
    def shared(self) -> bool:
        """Whether more than one has it open."""
        return len(self._users) > 1

    def holds(self, owners: Container[object]) -> bool:
        """Whether anything waits to be written that concerns ``owners``: if others use this too, theirs alone."""
        return bool(self._waiting) and (not self.shared or any(owner in owners for owner in self._owners))

    def write(self, buffers: tuple[bytes | memoryview, ...], owner: object = None) -> None:
        """Take what is to be written at the next `flush`. What a broken sink is given is dropped: it is in the files.

        ``owner`` is whose lines these are, for `pending`.
        """
        if self.broken:
            return
        if self._fd < 0:
            self._write_object(b"".join(buffers))
            return
        for data in buffers:
            if data:
                self._waiting.append(memoryview(data))
                self._owners.append(owner)
                self._size += len(data)

    def flush(self) -> None:
        """Write, as far as there is room; the rest when there is."""
        if self._waiting and not self.blocked:
            self._push()

    def pending(self) -> dict[object, int]:
        """How many ends of lines wait to be written, by owner."""
        lines: dict[object, int] = {}
        for data, owner in zip(self._waiting, self._owners, strict=True):
            lines[owner] = lines.get(owner, 0) + bytes(data).count(b"\n")
        return lines

    def make_room(self) -> bool:
        """Whether more may be written, if need be after a `flush`."""
        if self.blocked and clock.now() - self._blocked_since > _SLOW:
            self.turn = _FIRST_TURN
        if self._size >= self.turn * _TURNS:
            self.flush()
        return self._size < self.turn * _TURNS

    def give_up(self) -> None:
        """Forget what waits to be written, in favour of a last line end if one is missing."""
        if self._fd >= 0 and self.mid_line and not self.broken and self._ready():
            with suppress(OSError):
                os.write(self._fd, b"\n")
        self._break()

    def close(self, on_room: Callable[[], None] | None = None) -> None:
        """End the use of who has opened it with ``on_room``, or was to; the last one gives the descriptors back."""
        if on_room is not None:
            self._users.pop(on_room, None)
            if not self._users:  # who holds it may open it yet, and does so anew
                self._shut()
        with self._lock:
            self._holders = max(0, self._holders - 1)
            if self._holders:
                return
        self._shut()
        if self._own:
            os.close(self._target)
            self._own = False

    def _shut(self) -> None:
        self._break()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _call_users(self) -> None:
        for on_room in list(self._users):
            on_room()

    def _writable(self, events: int) -> None:
        if events & (select.EPOLLERR | select.EPOLLHUP):  # reported whether asked for or not, for ever
            self._break()
            self._call_users()
            return
        was_full = self._size >= self.turn * _TURNS
        self._push()
        if (was_full and self._size < self.turn * _TURNS) or self.idle:
            self._call_users()

    def _push(self) -> None:
        while self._waiting:
            if self._pollable and self._limit <= _ATOMIC and not self._ready():
                break
            try:
                count = self._write()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in _NO_READER:
                    self.refusal = error
                self._break()
                return
            self._size -= count
            self.written += count
            self._drop(count)
        if not self._waiting:
            self.turn = min(TURN, self.turn * 2)
        self._arm(bool(self._waiting))

    def _write(self) -> int:
        if self._limit <= _ATOMIC:
            return os.write(self._fd, self._waiting[0][: self._limit])
        return os.writev(self._fd, [self._waiting[index] for index in range(min(_VECTOR, len(self._waiting)))])

    def _drop(self, count: int) -> None:
        """Forget the first ``count`` bytes, which are written."""
        waiting = self._waiting
        while count:
            first = waiting[0]
            if count < len(first):
                waiting[0] = first[count:]
                self.mid_line = first[count - 1] != ord("\n")
                return
            count -= len(first)
            self.mid_line = first[-1] != ord("\n")
            waiting.popleft()
            self._owners.popleft()

    def _ready(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0))

    def _arm(self, wanted: bool) -> None:  # noqa: FBT001 - a state, not an option
        if wanted != self.blocked and self._pollable:
            assert self._loop is not None
            self.blocked = wanted
            self._blocked_since = clock.now()
            self._loop.change(self._fd, WRITE if wanted else 0)

    def _break(self) -> None:
        self.broken, self.blocked = True, False
        self._waiting.clear()
        self._owners.clear()
        self._size = 0
        if self._pollable:
            assert self._loop is not None
            self._pollable = False
            self._loop.forget(self._fd)

    def _write_object(self, data: bytes) -> None:
        try:
            target: Any = self._target
            target.write(self._decoder.decode(data))
            target.flush()
        except BaseException as error:  # noqa: BLE001 - the host's own object: its troubles must not end the group
            self.refusal = error
            self.broken = True
        self.written += len(data)
        self.mid_line = not data.endswith(b"\n")
