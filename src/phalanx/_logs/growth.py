"""Finds out how a log has grown between two looks at its files, through rotations."""

from __future__ import annotations

import os

from phalanx._logs.rotated import MODULO, NEWEST, content_size, identity, numbers, open_numbered


class Growth:
    """Remembers a log's files from one look to the next.

    Args:
        path: The file.
        rotates: Whether the log is rotated.
    """

    __slots__ = ("_changed", "_file", "_next", "_size", "path", "rotates")

    def __init__(self, path: str, *, rotates: bool = False) -> None:
        self.path = path
        self.rotates = rotates
        self._file: tuple[int, int] | None = None  # the newest file, at the last look
        self._changed = 0  # the mtime of its folder, at the last look
        self._size = 0  # its size, at the last look
        self._next = 1  # the lowest number that it can get when it is rotated

    def look(self) -> list[tuple[int, int]]:
        """Return number and size of each file that was rotated since the last look, and of the newest (`NEWEST`).

        The first look at a log that is rotated returns a file of 0 bytes with the number 0, too. Raises OSError.
        """
        newest = os.stat(self.path)
        if not self.rotates:
            return [(NEWEST, newest.st_size)]
        sizes = []
        file = identity(newest)
        changed = os.stat(os.path.dirname(self.path) or os.curdir).st_mtime_ns
        if self._file is None:
            sizes.append((0, 0))
        # Inodes are reused: after two rotations and a removal, the newest file may have the inode of the old one.
        if file != self._file or changed != self._changed or newest.st_size < self._size:
            sizes += self._rotated_since(file)
        self._file, self._changed, self._size = file, changed, newest.st_size
        return [*sizes, (NEWEST, newest.st_size)]

    def _rotated_since(self, newest: tuple[int, int]) -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = []
        known = self._file  # None once it is found under its number
        before = None
        for number in numbers(self.path):
            if number < self._next:
                continue
            try:
                file, size, compressed = self._one(number)
            except OSError:  # removed just now
                continue
            if file == newest:  # it has both names, for a moment; or was rotated since we looked at it
                break
            if known is not None and file != known and not (compressed and number == self._next):
                sizes.append((self._next, self._size))  # the known file was removed
                self._size = 0
            known = None
            self._next = number + 1
            if file == before:  # a second link to it: a rotation that was repeated
                continue
            before = file
            if compressed and self._size >= MODULO:
                size += (self._size - size + MODULO - 1) // MODULO * MODULO
            sizes.append((number, size))
            self._size = 0
        if known not in (None, newest):
            sizes.append((self._next, self._size))
            self._next += 1
        return sizes

    def _one(self, number: int) -> tuple[tuple[int, int], int, bool]:
        fd, compressed = open_numbered(self.path, number)
        try:
            return identity(os.fstat(fd)), content_size(fd, compressed=compressed), compressed
        finally:
            os.close(fd)
