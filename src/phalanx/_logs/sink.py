"""Writes to a descriptor, a file or a stream object, in order and without blocking. Owns the bytes that wait.

A write that may block is done by a thread of the sink's, a piece at a time: to a stream object of the host's, or to a
terminal of another user.
"""

from __future__ import annotations

import codecs
import errno
import os
import select
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from phalanx._base import clock, linux
from phalanx._base.files import opened_log
from phalanx._base.loop import WRITE, Loop
from phalanx._base.threads import SerialExecutor

TURN = 256 * 1024
"""Bytes of one file that a sink takes at a time, at most."""

_FIRST_TURN = 16 * 1024  # until a sink has proved fast: a slow one should show every rank, not megabytes of one
_TURNS = 4  # that may wait in a sink before its files are not read on
_SLOW = 0.1  # seconds for which a sink is blocked before it counts as slow
_CLOSE_WAIT = 0.1  # seconds that `close` waits for the thread's write

_VECTOR = 64  # buffers in one writev(2)
_NO_READER = (errno.EPIPE, errno.EIO)  # EIO: a terminal that has been hung up


class Sink:
    """A descriptor, the path of a file (created, or appended to), or an object with ``write`` (a notebook's stdout).

    A descriptor is written to without blocking, and without changing its flags for its other users
    (`linux.open_nonblocking`). If that is not possible, and for an object, a thread writes, which may take any time,
    also beyond `close`.

    Several users may share a sink: all but the one that made it call `retain`, and each calls `close`.

    Args:
        target: The descriptor, path or object.
        own: Whether the last `close` closes the descriptor.
    """

    def __init__(self, target: int | Any, *, own: bool = False) -> None:
        self._target = target
        self._own = own
        self._references = 1
        self._lock = allocate_lock()
        self._fd = -1
        self._pollable = self._watched = False
        self._writer: SerialExecutor | None = None  # the thread that writes, if a write may block
        self._most = TURN  # bytes that it gets at a time
        self._piece: object = None  # the bytes that it is writing
        self._waiting: deque[memoryview] = deque()
        self._owners: deque[object] = deque()
        self._size = 0
        self._loop: Loop | None = None
        self._users: dict[Callable[[], None], None] = {}
        self.turn = _FIRST_TURN
        """Bytes of one file that it should get next."""
        self._blocked_since = 0.0
        self.blocked = False  # whether bytes wait for the reader to make room
        self.broken = False
        self.has_no_reader = False
        """Whether it is broken because the reader has closed, or the terminal was hung up."""
        self.refusal: BaseException | None = None  # the error that broke it, unless the reader has closed: a full disk
        self.written = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.mid_line = False  # whether the last written byte was not a line feed

    def retain(self) -> bool:
        """Add a user, who has to call `close`. Returns False if the sink has been closed already. Any thread."""
        with self._lock:
            if self._references:
                self._references += 1
            return self._references > 0

    def open(self, loop: Loop, on_room: Callable[[], None]) -> None:
        """Open it for a user. ``on_room`` is called when there is room after there was none, or all is written."""
        first, self._users[on_room] = not self._users, None
        if not first:
            return
        self._loop, self.broken, self.has_no_reader, self.refusal = loop, False, False, None
        if isinstance(self._target, str):
            self._fd = opened_log(self._target)
            return
        if not isinstance(self._target, int):
            self._writer = self._writer or SerialExecutor("phalanx-write")
            return
        self._fd, most = linux.open_nonblocking(self._target)
        if most < TURN:
            self._most = most
            self._writer = self._writer or SerialExecutor("phalanx-write")
        try:
            loop.watch(self._fd, self._writable, 0)
            self._pollable = True
        except PermissionError:  # regular files, /dev/null and their like are always ready
            pass

    @property
    def fd(self) -> int:
        """The descriptor that it writes to; -1 if it is not open, or writes to an object."""
        return self._fd

    @property
    def path(self) -> str:
        """The path of the file; "" if it writes to something else."""
        return self._target if isinstance(self._target, str) else ""

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._waiting

    @property
    def shared(self) -> bool:
        """Whether more than one user has it open."""
        return len(self._users) > 1

    def holds(self, owners: Container[object]) -> bool:
        """Whether bytes wait to be written; if the sink is shared, bytes of ``owners``."""
        return bool(self._waiting) and (not self.shared or any(owner in owners for owner in self._owners))

    def write(self, buffers: tuple[bytes | memoryview, ...], owner: object = None) -> None:
        """Queue bytes for the next `flush`. A broken sink drops them: the log files have them.

        ``owner`` is the source of the lines, for `pending` and `holds`.
        """
        if self.broken:
            return
        for data in buffers:
            if data:
                self._waiting.append(memoryview(data))
                self._owners.append(owner)
                self._size += len(data)

    def flush(self) -> None:
        """Write the queued bytes as far as there is room; the rest is written when there is room again."""
        if self._waiting and not self.blocked:
            self._push()

    def pending(self) -> dict[object, int]:
        """Return how many line ends wait to be written, by owner."""
        lines: dict[object, int] = {}
        for data, owner in zip(self._waiting, self._owners, strict=True):
            lines[owner] = lines.get(owner, 0) + bytes(data).count(b"\n")
        return lines

    def make_room(self) -> bool:
        """Whether more may be queued, if necessary after a `flush`."""
        if self.blocked and clock.now() - self._blocked_since > _SLOW:
            self.turn = _FIRST_TURN
        if self._size >= self.turn * _TURNS:
            self.flush()
        return self._size < self.turn * _TURNS

    def give_up(self) -> None:
        """Drop the queued bytes. Writes a line end in their place, if the last line lacks one and there is room."""
        if self._writer is None and self.mid_line and not self.broken and self._ready():
            with suppress(OSError):
                os.write(self._fd, b"\n")
        self._break()

    def close(self, on_room: Callable[[], None] | None = None) -> None:
        """End a user's use, with the ``on_room`` that it passed to `open`, if any. The last closes the descriptors."""
        if on_room is not None:
            self._users.pop(on_room, None)
            if not self._users:  # a user that has not opened it yet opens it anew
                self._shut()
        with self._lock:
            self._references = max(0, self._references - 1)
            if self._references:
                return
        self._shut()
        if self._own:
            os.close(self._target)
            self._own = False

    def _shut(self) -> None:
        self._break()
        fd, self._fd = self._fd, -1
        writer = self._writer
        writing = writer is not None and not writer.drain(_CLOSE_WAIT)
        if fd >= 0 and not (writing and writer is not None and writer.submit(partial(os.close, fd))):
            os.close(fd)

    def _call_users(self) -> None:
        for on_room in list(self._users):
            on_room()

    def _writable(self, events: int) -> None:
        if events & (select.EPOLLERR | select.EPOLLHUP):  # reported whether asked for or not, for ever
            self.has_no_reader = True
            self._break()
            self._call_users()
            return
        self._go_on()

    def _go_on(self) -> None:
        """Write, and call the users if there is room again, or all is written."""
        was_full = self._size >= self.turn * _TURNS
        self._push()
        if (was_full and self._size < self.turn * _TURNS) or self.idle:
            self._call_users()

    def _push(self) -> None:
        if self._writer is None:
            self._write()
        elif self._piece is None and self._waiting and (self._fd < 0 or self._ready()):
            self._write_aside(self._writer)
        if not self._waiting:
            self.turn = min(TURN, self.turn * 2)
        self._arm()

    def _write(self) -> None:
        while self._waiting:
            try:
                count = os.writev(self._fd, [self._waiting[index] for index in range(min(_VECTOR, len(self._waiting)))])
            except BlockingIOError:
                return
            except OSError as error:
                self._refuse(error)
                return
            self._drop(count)

    def _write_aside(self, writer: SerialExecutor) -> None:
        """Have the thread write a piece, which stays queued until that is done."""
        piece = bytearray()
        for data in self._waiting:
            piece += data[: self._most - len(piece)]
            if len(piece) == self._most:
                break
        target, decoder = self._target if self._fd < 0 else self._fd, self._decoder
        assert self._loop is not None
        call, answer, self._piece = self._loop.call, partial(self._on_written, piece), piece

        def write() -> None:
            call(partial(answer, *_written(target, piece, decoder)))

        if not writer.submit(write):  # no thread can be started
            write()

    def _on_written(self, piece: object, count: int, error: BaseException | None) -> None:
        if piece is not self._piece:  # it was dropped meanwhile
            return
        self._piece = None
        if error is not None:
            self._refuse(error)
        self._drop(count)
        self._go_on()

    def _drop(self, count: int) -> None:
        """Remove the first ``count`` bytes, which are written, from the queue."""
        waiting = self._waiting
        count = min(count, self._size)
        self._size -= count
        self.written += count
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

    def _arm(self) -> None:
        blocked = bool(self._waiting)
        if blocked != self.blocked:
            self.blocked, self._blocked_since = blocked, clock.now()
        wanted = blocked and self._piece is None
        if self._pollable and wanted != self._watched:
            assert self._loop is not None
            self._watched = wanted
            self._loop.change(self._fd, WRITE if wanted else 0)

    def _refuse(self, error: BaseException) -> None:
        self.has_no_reader = isinstance(error, OSError) and error.errno in _NO_READER
        if not self.has_no_reader:
            self.refusal = error
        self._break()

    def _break(self) -> None:
        self.broken, self.blocked, self._piece = True, False, None
        self._waiting.clear()
        self._owners.clear()
        self._size = 0
        if self._pollable:
            assert self._loop is not None
            self._pollable = self._watched = False
            self._loop.forget(self._fd)


def _written(target: Any, data: bytearray, decoder: codecs.IncrementalDecoder) -> tuple[int, BaseException | None]:
    """Write to a descriptor or an object, which may block. Returns the number of bytes, and what it raised."""
    try:
        if isinstance(target, int):
            with suppress(BlockingIOError):  # another user has made it non-blocking: poll(2) waits for room
                return os.write(target, data), None
            return 0, None
        target.write(decoder.decode(data))
        target.flush()
    except BaseException as error:  # noqa: BLE001 - the host's own object: its troubles must not end the group
        return 0, error
    return len(data), None


MOST_OF_A_LINE = 16 << 20
"""Bytes of a line that are kept. A sparse file of terabytes is one line of zeros, and takes no space on disk."""


class TailSink(Sink):
    """A sink that writes nothing, and keeps the last ``count`` lines (>= 0).

    A line of more than `MOST_OF_A_LINE` bytes is cut; a note in its place says how many bytes are missing.
    """

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self._count = count
        self._lines: deque[tuple[bytes, object]] = deque(maxlen=count)
        self._unfinished: list[bytes] = []
        self._held = self._cut = 0  # bytes of it that are kept, and that are cut
        self._owner: object = None

    def write(self, buffers: tuple[bytes | memoryview, ...], owner: object = None) -> None:
        """See `Sink.write`."""
        block = b"".join(buffers)
        end = block.rfind(b"\n") + 1
        if end:
            whole = block[: end - 1]
            if self._unfinished:
                first, newline, others = whole.partition(b"\n")
                self._hold(first)
                whole = self._taken() + newline + others
            # Split from the right, as often as lines are kept: the others cost nothing.
            self._lines.extend((line, owner) for line in whole.rsplit(b"\n", self._count)[-self._count :])
        if block[end:]:
            self._hold(block[end:])
            self._owner = owner

    def _hold(self, block: bytes) -> None:
        kept = block[: MOST_OF_A_LINE - self._held]
        self._cut += len(block) - len(kept)
        if kept:
            self._unfinished.append(kept)
            self._held += len(kept)

    def _taken(self) -> bytes:
        """Return what is kept of the unfinished line, and keep it no longer."""
        cut = b" ... %d bytes cut ..." % self._cut if self._cut else b""
        line = b"".join((*self._unfinished, cut))
        self._unfinished.clear()
        self._held = self._cut = 0
        return line

    def taken(self) -> Iterator[tuple[bytes, object]]:
        """Yield the kept lines with their owners, an unfinished one last, and keep them no longer."""
        while self._lines:
            line, owner = self._lines.popleft()
            yield line + b"\n", owner
        if self._unfinished:
            yield self._taken(), self._owner
