"""Reads one log file: as it grows, through its rotated files; and its last lines. Owns the offset in them."""

from __future__ import annotations

import os

from phalanx._base.files import OWN_LINKS, UnfitError, opened
from phalanx._logs.lines import settled
from phalanx._logs.rotated import (
    GZIP_SUFFIX,
    NEWEST,
    GzipReader,
    at_or_after,
    content_size,
    content_size_of,
    identity,
    last_bytes,
    numbers,
    open_numbered,
    rotated_files,
)


class Follower:
    """Reads a file from its beginning to where it ends now, again and again.

    A file that is cut short (``: > file``) is read from its beginning again. A log that is rotated (see `rotated`) is
    read through its rotated files, the oldest first, into ``path`` itself. Removed files are skipped.

    Args:
        path: The file. It need not exist yet. `open` raises `UnfitError` for what is no regular file.
        rotates: Whether to look for rotated files.
        links: Which symbolic links ``path`` may be, see `files`.
    """

    __slots__ = ("_at_least", "_file", "_gzip", "_links", "fd", "number", "offset", "path", "rotates")

    def __init__(self, path: str, *, rotates: bool = False, links: int = OWN_LINKS) -> None:
        self.path = path
        self._links = links
        self.offset = 0
        self.fd = -1
        self.rotates = rotates
        self.number = NEWEST
        """The number of the open file (see `rotated`)."""
        self._at_least = 1  # the lowest number that the file being read has, or can get
        self._file: tuple[int, int] | None = None  # its device and inode, once it has been open
        self._gzip: GzipReader | None = None

    def open(self) -> None:
        """Open the file that is to be read next, if it is not open. Raises OSError."""
        if self.fd >= 0:
            return
        if not self.rotates:
            self.fd = opened(self.path, links=self._links)
            return
        if self._file is not None and not self._open_again():
            self.go_to(self._at_least)  # it was removed: go on with the file after it
        while self.fd < 0:
            self._open_next()
        self._file = identity(os.fstat(self.fd))

    def close(self) -> None:
        """Close the descriptor; `open` goes on at the same offset. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def go_to(self, number: int) -> None:
        """Go on at the beginning of the file of a number, or of the first after it."""
        self.close()
        self._at_least = number
        self._file = self._gzip = None
        self.offset = 0

    def read(self, buffer: bytearray | memoryview, last: int = NEWEST) -> int:
        """Read the next bytes into ``buffer``, of files up to the number ``last``.

        Returns how many; 0 at the end, for now. Raises OSError.
        """
        while True:
            self.open()
            count = self.read_here(buffer) if self.number <= last else 0
            # A rotated file gets no more bytes; but some may have been written between our read and its rotation.
            if count or self.number > last or not self._is_over() or (count := self.read_here(buffer)):
                return count
            self.go_to(self._own_number() + 1)

    def read_here(self, buffer: bytearray | memoryview) -> int:
        """Read the next bytes of the open file. Returns how many; 0 at its end, for now. Raises OSError."""
        self.open()
        while True:
            if self._gzip is not None:
                count = self._gzip.read_at(self.fd, buffer, self.offset)
            else:
                count = os.preadv(self.fd, [buffer], self.offset)
            self.offset += count
            if count or self._gzip is not None or os.fstat(self.fd).st_size >= self.offset:
                return count
            self.offset = 0

    def skip(self, count: int) -> int:
        """Move on by ``count`` bytes of the open file, or to its end. Returns by how many. Raises OSError.

        A compressed file is read for that; of another one nothing is.
        """
        self.open()
        if self._gzip is None:
            skipped = max(0, min(count, os.fstat(self.fd).st_size - self.offset))
            self.offset += skipped
            return skipped
        scratch, left = bytearray(64 * 1024), max(0, count)
        while left and (read := self.read_here(memoryview(scratch)[:left])):
            left -= read
        return max(0, count) - left

    def left(self) -> int:
        """Return the number of bytes that are not read yet. Raises OSError."""
        self.open()
        following: list[str] = []
        if self._is_over():
            own = self._own_number()
            following = [*(name for number, name in numbers(self.path).items() if number > own), self.path]
        return max(0, self.content_size() - self.offset) + sum(map(content_size_of, following))

    def content_size(self) -> int:
        """Return the uncompressed size of the open file (modulo 4 GiB, if it is compressed). Raises OSError."""
        return content_size(self.fd, compressed=self._gzip is not None)

    def lines_left(self, limit: int) -> tuple[int, int, bool]:
        """Count the lines that are not read yet, in at most ``limit`` bytes. It reads them: the offset moves.

        Returns the number of lines (the last counts with or without its end), their bytes, and whether there are more.
        Raises OSError.
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

    def _open_next(self) -> None:
        """Open the first existing file from `_at_least` on. Raises OSError. If a rotation interferes, call it again."""
        self._gzip = None
        self.number = at_or_after(self.path, self._at_least)
        if self.number == NEWEST:
            self.fd = opened(self.path, links=self._links)
            newer = at_or_after(self.path, self._at_least)
            if newer != NEWEST:  # rotated just now: what we have opened may be the file after that
                self.close()
            return
        try:
            self.fd, compressed = open_numbered(self.path, self.number)
        except FileNotFoundError:  # removed just now
            self._at_least = self.number + 1
        else:
            self._at_least = self.number
            self._gzip = GzipReader() if compressed else None

    def _open_again(self) -> bool:
        """Open the file that was being read, under its present name. Returns whether it still exists."""
        # By its number first: the inode of a file that was compressed, or removed, may be that of a newer file.
        if self._gzip is None:
            if self.number == NEWEST and at_or_after(self.path, self._at_least) == NEWEST and self._open_if_it(NEWEST):
                return True
            if self._open_if_it(self._at_least):
                return True
        try:  # compressed, before or meanwhile: the content is the same
            self.fd = opened(f"{self.path}.{self._at_least}{GZIP_SUFFIX}", links=self._links)
        except (FileNotFoundError, UnfitError):
            pass
        else:
            self.number = self._at_least
            self._gzip = self._gzip or GzipReader()
            return True
        if self._gzip is None:
            for number in numbers(self.path):
                if number > self._at_least and self._open_if_it(number):
                    self._at_least = number
                    return True
        return False

    def _open_if_it(self, number: int) -> bool:
        name = self.path if number == NEWEST else f"{self.path}.{number}"
        try:
            fd = opened(name, links=self._links)
        except (FileNotFoundError, UnfitError):
            return False
        if identity(os.fstat(fd)) != self._file:
            os.close(fd)
            return False
        self.fd, self.number = fd, number
        return True

    def _is_over(self) -> bool:
        """Whether the open file grows no more: it was rotated, and ``path`` is another file."""
        if not self.rotates:
            return False
        try:
            return identity(os.stat(self.path)) != self._file
        except FileNotFoundError:  # a rotation that renames will create the new file
            return self.number != NEWEST

    def _own_number(self) -> int:
        """Return the number of the open file, which was rotated; if it was removed, one below all that follow."""
        number = self.number
        if number == NEWEST and self._is_at(self._at_least):  # the usual case; a folder can be long to list
            number = self._at_least
        elif number == NEWEST:
            number = self._at_least - 1
            changed = os.fstat(self.fd).st_mtime_ns
            for other, name in numbers(self.path).items():
                if other < self._at_least:
                    continue
                compressed = name.endswith(GZIP_SUFFIX)
                try:
                    found = os.stat(name)
                except OSError:  # compressed just now, or removed
                    try:
                        found, compressed = os.stat(f"{name}{GZIP_SUFFIX}"), True
                    except OSError:
                        continue
                if (found.st_mtime_ns == changed or other == self._at_least) if compressed else self._is_same(found):
                    number = other
                    break
        while self._is_at(number + 1):  # a second link to it: a rotation that failed half-way, and was repeated
            number += 1
        return number

    def _is_same(self, found: os.stat_result) -> bool:
        return identity(found) == self._file

    def _is_at(self, number: int) -> bool:
        try:
            return self._is_same(os.stat(f"{self.path}.{number}"))
        except OSError:
            return False


TAIL_LINES = 20
"""Lines that are shown of a failed rank."""

_LAST_BYTES = 16 * 1024  # in which they are looked for


def last_text(path: str, *, rotates: bool) -> str:
    """Return what `last_lines` does as text, without the last line end."""
    data = last_lines(path, rotates=rotates)
    return "\n".join(data.decode("utf-8", "backslashreplace").rstrip().splitlines()[-TAIL_LINES:])


def last_lines(path: str, *, rotates: bool = False) -> bytes:
    """Return the last 20 lines of a log, and of its rotated files if it ``rotates``: whole lines."""
    data, cut = b"", False
    for name in (path, *reversed(rotated_files(path) if rotates else [])):
        most = _LAST_BYTES - len(data)
        try:
            size, end = last_bytes(name, most)
        except OSError:  # removed, or no regular file: a pipe, say, in a user's layout
            continue
        data = end + data
        cut = size > most
        if cut or data.count(b"\n") > TAIL_LINES:
            break
    if not data:
        return b""
    lines = settled(data.rstrip(b"\n")).split(b"\n")
    if cut and len(lines) > 1:  # the first of them may lack its beginning
        del lines[0]
    return b"\n".join(lines[-TAIL_LINES:]) + b"\n"
