"""Log files of bounded size. Owns their rotation, on a line boundary, and the process that does it.

A worker that writes to a file itself cannot be made to write to another one, and to cut the file behind its back loses
what it writes between the copy and the cut. So with a bound, and only then, the worker has a pipe, and the group's log
writer fills the files: ``path`` is always the newest, ``path.1`` the oldest, and the name of a file that was set aside
never changes, unless it is compressed (see `set_aside`).

The log writer is a process of its own, a fork of the keeper: a worker that writes without end, or a disk that does not
answer, must hold up nobody who supervises. It needs nobody: what a worker has written before it dies is in the pipe,
and is read, though launcher, keeper and guard may be gone; and it ends when every pipe has come to its end. Only if it
is killed itself, what it has in hand (256 KiB) and what is in the pipes (64 KiB each) is lost.
"""

from __future__ import annotations

import errno
import os

from phalanx._base import channels, files, linux
from phalanx._base.loop import WRITE, Loop
from phalanx._logs.rotated import PACKED, numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from phalanx._engine.rotation.compress import Compressor
    from phalanx._logs.rotated import Bounds

_CHUNK = 256 * 1024
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_FAILED = 255


class Rotator:
    """Fills a file from a pipe, and begins a new one before it grows beyond the limit.

    No line is split: what has begun in a file ends there, though it should be longer than the limit. A file that cannot
    be set aside goes on: a log that is too long is better than a worker that ends for it.

    Args:
        path: The file's path.
        bounds: See `Bounds`. Files that an earlier run has set aside count as well.
        file, reader: The file, open for more at its end, and the pipe's end: the rotator's from now on.
        compressor: What compresses files that were set aside, if they are to be.
    """

    def __init__(self, path: str, bounds: Bounds, file: int, reader: int, compressor: Compressor | None = None) -> None:
        self._path = path
        self._limit, self._keep, _compress = bounds
        self._compressor = compressor
        self._file, self.reader = file, reader
        os.set_blocking(reader, False)
        self._aside = dict.fromkeys(numbers(path))  # that are kept, the oldest first
        self._number = max(self._aside, default=0) + 1
        self._size = os.fstat(file).st_size
        self._mid_line = self._size > 0 and _last_byte(path, self._size) != b"\n"

    def turn(self) -> int:
        """Write one chunk of what is in the pipe to the file. Raises OSError: the disk is full.

        Returns how many bytes; 0 when there are none for now, -1 when the pipe has come to its end.
        """
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return 0
        self._write(data)
        return len(data) or -1

    def close(self) -> None:
        """Give all descriptors back. A worker that still writes gets EPIPE. Idempotent."""
        for fd in (self._file, self.reader):
            if fd >= 0:
                os.close(fd)
        self._file = self.reader = -1

    def _write(self, data: bytes) -> None:
        while data:
            cut = self._cut(data)
            if cut:
                self._append(data[:cut])
            if cut < len(data):
                try:
                    self._rotate()
                except OSError:  # no descriptor, no folder: the file grows by another ``limit`` before the next try
                    self._size = 0
            data = data[cut:]

    def _cut(self, data: bytes) -> int:
        """How much of ``data`` still goes into this file."""
        room = self._limit - self._size
        if len(data) <= room:
            return len(data)
        cut = data.rfind(b"\n", 0, max(room, 0)) + 1
        if cut or (self._size and not self._mid_line):
            return cut
        return data.find(b"\n") + 1 or len(data)  # the first line that is to end here, wherever it ends

    def _append(self, data: bytes) -> None:
        self._mid_line = not data.endswith(b"\n")
        self._size += len(data)
        files.write_all(self._file, data)

    def _rotate(self) -> None:
        """Set the file aside. Under its name there is always one: a follower finds the old or the new.

        Where the file system has no hard links (FAT, many of FUSE), it is renamed, and for a moment there is none.
        """
        fresh = f"{self._path}.new"
        file = files.opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._set_aside()
            os.replace(fresh, self._path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._size, self._mid_line = file, 0, False
        number, self._number = self._number, self._number + 1
        self._aside[number] = None
        self._remove_oldest()
        if self._compressor is not None:
            aside = self._aside
            self._compressor.add(f"{self._path}.{number}", lambda: number in aside)

    def _remove_oldest(self) -> None:
        while self._keep and len(self._aside) > self._keep:
            oldest = next(iter(self._aside))
            del self._aside[oldest]  # first: it may be compressed just now
            for name in (f"{self._path}.{oldest}", f"{self._path}.{oldest}{PACKED}"):
                try:
                    os.unlink(name)
                except OSError:  # the other of the two; or somebody has removed it already
                    pass

    def _set_aside(self) -> None:
        while True:
            aside = f"{self._path}.{self._number}"
            try:
                os.link(self._path, aside, follow_symlinks=False)
            except FileExistsError:  # somebody else's
                self._number += 1
                continue
            except OSError as error:
                if error.errno not in _NO_LINKS or os.path.exists(aside):
                    raise
                os.rename(self._path, aside)
            return


class LogWriter:
    """The keeper's end of its log writer, which is forked here.

    The process writes its pid into ``notes``, a pipe, before anything else: who is to kill what else is here must spare
    it. Its exit code is 0; the errno of a write that was refused, for then something is missing in a file; or 255 when
    it could not go on. Raises OSError.

    Args:
        loop: What waits for room in the socket to it.
        notes: The pipe.
    """

    def __init__(self, loop: Loop, notes: int) -> None:
        ours, theirs = channels.pair()
        try:
            self.pid = os.fork()
        except BaseException:
            ours.close()
            theirs.close()
            raise
        if self.pid == 0:
            _serve(channels.Channel(theirs), notes)
        theirs.close()
        self._channel = channels.Channel(ours)
        self._loop = loop
        self._watched = self._told = False

    def descriptors(self) -> list[int]:
        """All that is open here."""
        return self._channel.descriptors()

    def add(self, path: str, bounds: Bounds, file: int, reader: int) -> None:
        """Have it fill one more file. The descriptors stay the caller's."""
        self._send(("add", path, bounds), (file, reader))

    def finish(self) -> None:
        """Tell it that nobody is left to write into its pipes: it takes what is in them, and ends. Idempotent."""
        if not self._told:
            self._told = True
            self._send(("finish",))
            if not self._watched:
                self._channel.close()

    def _send(self, message: channels.Message, fds: Sequence[int] = ()) -> None:
        try:
            sent = self._channel.send(message, fds)
        except channels.Closed:  # it has ended, of which SIGCHLD tells
            return
        if not sent and not self._watched:
            self._watched = True
            self._loop.watch(self._channel.fileno(), self._on_room, WRITE)

    def _on_room(self, _events: int) -> None:
        try:
            if not self._channel.flush():
                return
        except channels.Closed:
            pass
        self._loop.forget(self._channel.fileno())
        self._watched = False
        if self._told:
            self._channel.close()


def _serve(channel: channels.Channel, notes: int) -> NoReturn:
    """Be the log writer."""
    code = _FAILED
    try:
        try:
            os.write(notes, b"%d " % os.getpid())
        except BrokenPipeError:  # the guard has gone
            pass
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # it may outlive the launcher, whose readers wait for the end of its output
            os.dup2(null, fd)
        linux.close_all_but([channel.fileno()])
        code = _Writer(Loop(), channel).run()
    finally:
        os._exit(code)


class _Writer:
    """The log writer at work."""

    def __init__(self, loop: Loop, channel: channels.Channel) -> None:
        self._loop = loop
        self._channel = channel
        self._open: list[Rotator] = []
        self._told = False  # whether no file will be added
        self._refused = 0
        self._compressor: Compressor | None = None

    def run(self) -> int:
        """Fill the files until every pipe has come to its end; or, told so, with what is in them.

        Returns 0, or the errno of the first write that was refused.
        """
        self._loop.watch(self._channel.fileno(), self._on_channel)
        while self._open or not self._told:
            self._loop.once()
        if self._compressor is not None:
            self._compressor.stop()
        return self._refused

    def _on_channel(self, _events: int) -> None:
        try:
            received = self._channel.receive()
        except channels.Truncated:  # whoever has the pipe's other end gets EPIPE
            self._refused = errno.EMFILE
            return
        except channels.Closed:  # the keeper was killed: somebody may write yet
            self._told = True
            self._loop.forget(self._channel.fileno())
            return
        if received is None:
            return
        message: tuple[Any, ...] = received[0]
        if message[0] == "add":
            self._add(*message[1:], *received[1])
        else:
            self._finish()

    def _add(self, path: Any, bounds: Any, file: int, reader: int) -> None:
        if bounds[2] and self._compressor is None:
            from phalanx._engine.rotation.compress import Compressor

            self._compressor = Compressor()
        try:
            rotator = Rotator(path, bounds, file, reader, self._compressor)
        except OSError as error:
            self._refused = self._refused or error.errno or errno.EIO
            os.close(file)
            os.close(reader)
            return
        self._open.append(rotator)
        self._loop.watch(rotator.reader, lambda _events: self._fill(rotator))

    def _fill(self, rotator: Rotator) -> None:
        """Write one chunk: then others have their turn."""
        self._turn(rotator)

    def _turn(self, rotator: Rotator) -> bool:
        """Write one chunk of one file. Returns whether there was any."""
        try:
            count = rotator.turn()
        except OSError as error:  # the worker sees EPIPE from now on, as it would see ENOSPC by itself
            self._refused = self._refused or error.errno or errno.EIO
            count = -1
        if count < 0:
            self._loop.forget(rotator.reader)
            rotator.close()
            self._open.remove(rotator)
        return count > 0

    def _finish(self) -> None:
        self._told = True
        self._loop.forget(self._channel.fileno())
        for rotator in list(self._open):
            while self._turn(rotator):
                pass
        self._open.clear()


def _last_byte(path: str, size: int) -> bytes:
    return files.read(path, 1, size - 1, links=files.OWN_LINKS)
