"""One growing file, read as it is written. Owns the place in it, and in those that rotation has set aside."""

from __future__ import annotations

import os

from phalanx._base.files import OWN_LINKS, UnfitError, opened
from phalanx._logs.lines import settled
from phalanx._logs.rotated import (
    NEWEST,
    PACKED,
    Packed,
    aside,
    at_or_after,
    held,
    identity,
    last_bytes,
    numbers,
    open_numbered,
    size_of,
)

TAIL_LINES = 20
"""Lines that are shown of a failed rank."""

_LAST_BYTES = 16 * 1024  # in which they are looked for


class Follower:
    """Reads a file from its beginning, or from ``offset``, to where it ends now, again and again.

    A file that is cut short (``: > file``) is read from its beginning again. One that is rotated (see `set_aside`) is
    followed through those that were set aside, the oldest first, into ``path`` itself. Those that are removed, or have
    been, are passed over.

    Args:
        path: The file. It need not exist yet. What is no regular file raises `UnfitError` once it is opened.
        rotates: Whether to look for rotated ones.
        links: Which links are followed at its end, see `files`.
    """

    __slots__ = ("_at_least", "_file", "_links", "_packed", "fd", "number", "offset", "path", "rotates")

    def __init__(self, path: str, *, rotates: bool = False, offset: int = 0, links: int = OWN_LINKS) -> None:
        self.path = path
        self._links = links
        self.offset = offset
        self.fd = -1
        self.rotates = rotates
        self.number = NEWEST
        """What the file that is open is called (see `set_aside`)."""
        self._at_least = 1  # the lowest number that the file that is being read has, or will have
        self._file: tuple[int, int] | None = None  # which it is, once it has been open
        self._packed: Packed | None = None

    def open(self) -> None:
        """Open the file, if it is not open. Raises OSError."""
        if self.fd >= 0:
            return
        if not self.rotates:
            self.fd = opened(self.path, links=self._links)
            return
        if self._file is not None and not self._open_again():
            self.go_to(self._at_least)  # it is gone: what comes after it is next
        while self.fd < 0:
            self._open_next()
        self._file = identity(os.fstat(self.fd))

    def close(self) -> None:
        """Give the descriptor back; `open` goes on at the same place. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def go_to(self, number: int) -> None:
        """Have the file of a number come next, from its beginning; or the first after it."""
        self.close()
        self._at_least = number
        self._file = self._packed = None
        self.offset = 0

    def read(self, buffer: bytearray | memoryview, last: int = NEWEST) -> int:
        """Read what comes next into ``buffer``, of files up to the number ``last``.

        Returns how much; 0 at the end, for now. Raises OSError.
        """
        while True:
            count = self.read_here(buffer) if last == NEWEST or self._is_at_most(last) else 0
            # Nobody has written to it since it was set aside: but perhaps between our look at it and that.
            if count or self.number > last or not self._is_over() or (count := self.read_here(buffer)):
                return count
            self.go_to(self._own_number() + 1)

    def read_here(self, buffer: bytearray | memoryview) -> int:
        """Read what comes next of the file that is open. Returns how much; 0 at its end, for now. Raises OSError."""
        self.open()
        while True:
            if self._packed is not None:
                count = self._packed.read(self.fd, buffer, self.offset)
            else:
                count = os.preadv(self.fd, [buffer], self.offset)
            self.offset += count
            if count or self._packed is not None or os.fstat(self.fd).st_size >= self.offset:
                return count
            self.offset = 0

    def left(self) -> int:
        """Bytes that are not read yet. Raises OSError."""
        self.open()
        return max(0, self.held() - self.offset) + sum(size_of(path) for path in self._following())

    def held(self) -> int:
        """Bytes of the file that is open, uncompressed (if it is compressed, modulo 4 GiB). Raises OSError."""
        return held(self.fd, packed=self._packed is not None)

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

    def _is_at_most(self, last: int) -> bool:
        self.open()
        return self.number <= last

    def _open_next(self) -> None:
        """Open the first file that is there, of those that may come. Raises OSError. It may have to be called again."""
        self._packed = None
        self.number = at_or_after(self.path, self._at_least)
        if self.number == NEWEST:
            self.fd = opened(self.path, links=self._links)
            newer = at_or_after(self.path, self._at_least)
            if newer != NEWEST:  # just now: what we have opened may be the next one
                self.close()
            return
        try:
            self.fd, packed = open_numbered(self.path, self.number)
        except FileNotFoundError:  # removed just now
            self._at_least = self.number + 1
        else:
            self._at_least = self.number
            self._packed = Packed() if packed else None

    def _open_again(self) -> bool:
        """Open what was being read, under the name that it has by now. Returns whether it is there."""
        # By its number first: a file that was compressed, or removed, may have left its inode to a newer one.
        if self._packed is None:
            if self.number == NEWEST and at_or_after(self.path, self._at_least) == NEWEST and self._open_if_it(NEWEST):
                return True
            if self._open_if_it(self._at_least):
                return True
        try:  # compressed, before or by now: it is the same to us
            self.fd = opened(f"{self.path}.{self._at_least}{PACKED}", links=self._links)
        except (FileNotFoundError, UnfitError):
            pass
        else:
            self.number = self._at_least
            self._packed = self._packed or Packed()
            return True
        if self._packed is None:
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
        """Whether nothing comes any more of the file that is open: it is set aside, and has lost its old name."""
        if not self.rotates:
            return False
        try:
            return identity(os.stat(self.path)) != self._file
        except FileNotFoundError:  # of a rotation that renames, the new one is on its way
            return self.number != NEWEST

    def _own_number(self) -> int:
        """The number of the file that is open and over; one below all that come if it has none, for it was removed."""
        number = self.number
        if number == NEWEST and self._is_at(self._at_least):  # mostly; a folder can be long
            number = self._at_least
        elif number == NEWEST:
            number = self._at_least - 1
            changed = os.fstat(self.fd).st_mtime_ns
            for other, name in numbers(self.path).items():
                if other < self._at_least:
                    continue
                packed = name.endswith(PACKED)
                try:
                    found = os.stat(name)
                except OSError:  # compressed just now; or removed
                    try:
                        found, packed = os.stat(f"{name}{PACKED}"), True
                    except OSError:
                        continue
                if (found.st_mtime_ns == changed or other == self._at_least) if packed else self._is_same(found):
                    number = other
                    break
        while self._is_at(number + 1):  # the same once more: a rotation that could not be ended, and was tried again
            number += 1
        return number

    def _is_same(self, found: os.stat_result) -> bool:
        return identity(found) == self._file

    def _is_at(self, number: int) -> bool:
        try:
            return self._is_same(os.stat(f"{self.path}.{number}"))
        except OSError:
            return False

    def _following(self) -> list[str]:
        """The files that come after the one that is open."""
        if not self._is_over():
            return []
        own = self._own_number()
        return [*(name for number, name in numbers(self.path).items() if number > own), self.path]


def last_lines(path: str, *, rotates: bool = False) -> bytes:
    """The last 20 lines of a file, and of those that were set aside, whole."""
    data, cut = b"", False
    for name in (path, *reversed(aside(path) if rotates else [])):
        most = _LAST_BYTES - len(data)
        try:
            size, end = last_bytes(name, most)
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
