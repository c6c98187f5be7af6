"""One growing file, read as it is written. Owns the place in it, and in those that rotation has set aside."""

from __future__ import annotations

import errno
import os
import stat

from phalanx._core.lines import settled

TAIL_LINES = 20
"""Lines that are shown of a failed rank."""

_LAST_BYTES = 16 * 1024  # in which they are looked for


class Follower:
    """Reads a file from its beginning, or from ``offset``, to where it ends now, again and again.

    A file that is cut short (``: > file``) is read from its beginning again. One that is rotated (see `rotate`) is
    followed through ``path.1``, ``path.2``, …, the oldest first, into ``path`` itself.

    Args:
        path: The file. It need not exist yet.
        rotates: Whether to look for rotated ones.
    """

    __slots__ = ("_aside", "_aside_bytes", "_number", "fd", "offset", "path", "rotates")

    def __init__(self, path: str, *, rotates: bool = False, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.fd = -1
        self.rotates = rotates
        self._aside = self._aside_bytes = 0
        self._number = 1  # what the file that is being read is called once it is set aside

    def open(self) -> None:
        """Open the file, if it is not open. Raises OSError."""
        if self.fd >= 0:
            return
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would wait for its writer
        set_aside = f"{self.path}.{self._number}"
        if self.rotates and os.path.exists(set_aside):
            self.fd = os.open(set_aside, flags)
            return
        self.fd = os.open(self.path, flags)
        if self.rotates and os.path.exists(set_aside):  # just now: what we have opened may be the next one
            os.close(self.fd)
            self.fd = os.open(set_aside, flags)

    def close(self) -> None:
        """Give the descriptor back; `open` goes on at the same place. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self, buffer: bytearray | memoryview) -> int:
        """Read what comes next into ``buffer``. Returns how much; 0 at the end, for now. Raises OSError."""
        self.open()
        while True:
            count = os.preadv(self.fd, [buffer], self.offset)
            if count:
                self.offset += count
                return count
            if self._is_over(self._number):
                # Nobody has written to it since it was set aside: but perhaps between our look at it and that.
                count = os.preadv(self.fd, [buffer], self.offset)
                if count:
                    self.offset += count
                    return count
                self.close()
                self._number += 1
                self.offset = 0
                self.open()
            elif os.fstat(self.fd).st_size < self.offset:
                self.offset = 0
            else:
                return 0

    def left(self) -> int:
        """Bytes that are not read yet. Raises OSError."""
        self.open()
        left = max(0, os.fstat(self.fd).st_size - self.offset)
        return left + sum(os.stat(path).st_size for path in self._following())

    def lines_left(self, limit: int) -> tuple[int, int, bool]:
        """Lines that are not read yet, in ``limit`` bytes; the bytes in which they are; whether there are more.

        The last counts with or without its end. Loses the place. Raises OSError.
        """
        buffer = bytearray(1 << 20)
        lines = read = 0
        last = ord("\n")
        while read < limit and (count := self.read(buffer)):
            lines += buffer.count(b"\n", 0, count)
            last = buffer[count - 1]
            read += count
        beyond = read >= limit and self.left() > 0
        return lines + (last != ord("\n") and not beyond), read, beyond

    def size(self) -> int:
        """Bytes that have been written so far, in the file and in those set aside. Raises OSError."""
        while True:
            newest = os.stat(self.path).st_size
            if not self._is_over(self._aside + 1):
                return self._aside_bytes + newest
            self._aside += 1
            self._aside_bytes += os.stat(f"{self.path}.{self._aside}").st_size  # it grows no more

    def _is_over(self, number: int) -> bool:
        """Whether the file of a number is set aside: it has its new name, and has lost its old one, which is last."""
        path = f"{self.path}.{number}"
        return self.rotates and os.path.exists(path) and not os.path.samefile(path, self.path)

    def _following(self) -> list[str]:
        """The files that come after the one that is being read."""
        if not self.rotates:
            return []
        rotated = aside(self.path)[self._number - 1 :]
        return [*rotated[1:], self.path] if rotated else []


def aside(path: str) -> list[str]:
    """The files that rotation has set aside, oldest first."""
    found: list[str] = []
    while os.path.exists(f"{path}.{len(found) + 1}"):
        found.append(f"{path}.{len(found) + 1}")
    return found


def last_lines(path: str, *, rotates: bool = False) -> bytes:
    """The last 20 lines of a file, and of those that were set aside, whole."""
    data, cut = b"", False
    for name in (path, *reversed(aside(path) if rotates else [])):
        most = _LAST_BYTES - len(data)
        try:
            size, end = _end_of(name, most)
        except OSError:  # removed, or no regular file: a pipe, say, in a layout of the user's own
            continue
        data = end + data
        cut = size > most
        if cut or data.count(b"\n") > TAIL_LINES:
            break
    if not data:
        return b""
    lines = settled(data.rstrip(b"\n")).split(b"\n")
    if cut and len(lines) > 1:  # the first of them may have been cut
        del lines[0]
    return b"\n".join(lines[-TAIL_LINES:]) + b"\n"


def _end_of(path: str, most: int) -> tuple[int, bytes]:
    """The size of a regular file, and its last bytes. O_NONBLOCK: to open a FIFO would wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return found.st_size, os.pread(fd, most, max(0, found.st_size - most))
    finally:
        os.close(fd)
