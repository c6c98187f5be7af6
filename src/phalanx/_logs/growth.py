"""How a log grows, as looks at it tell. Owns what is remembered of it from one look to the next."""

from __future__ import annotations

import os

from phalanx._logs.rotated import MODULO, NEWEST, held, identity, numbers, open_numbered


class Growth:
    """The sizes of a log, at each look.

    Args:
        path: The file.
        rotates: Whether there are files that were set aside.
    """

    __slots__ = ("_changed", "_file", "_next", "_size", "path", "rotates")

    def __init__(self, path: str, *, rotates: bool = False) -> None:
        self.path = path
        self.rotates = rotates
        self._file: tuple[int, int] | None = None  # the newest file, at the last look
        self._changed = 0  # when a name appeared beside it, or went, by then
        self._size = 0  # and its size then
        self._next = 1  # the lowest number that it can get

    def look(self) -> list[tuple[int, int]]:
        """The numbers and sizes of the files that were set aside since the last look, and of the newest (`NEWEST`).

        Of a log that is rotated, the first look tells so, by a file of no bytes that has the number 0. Raises OSError.
        """
        newest = os.stat(self.path)
        if not self.rotates:
            return [(NEWEST, newest.st_size)]
        sizes = []
        file = identity(newest)
        changed = os.stat(os.path.dirname(self.path) or os.curdir).st_mtime_ns
        if self._file is None:
            sizes.append((0, 0))
        # An inode is used again: after two rotations and a removal, what is the newest file may have the old one's.
        if file != self._file or changed != self._changed or newest.st_size < self._size:
            sizes += self._set_aside(file)
        self._file, self._changed, self._size = file, changed, newest.st_size
        return [*sizes, (NEWEST, newest.st_size)]

    def _set_aside(self, newest: tuple[int, int]) -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = []
        known = self._file  # until it is found under its number
        before = None
        for number in numbers(self.path):
            if number < self._next:
                continue
            try:
                file, size, packed = self._one(number)
            except OSError:  # removed just now
                continue
            if file == newest:  # it has both names, for a moment; or was set aside since we looked at it
                break
            if known is not None and file != known and not (packed and number == self._next):
                sizes.append((self._next, self._size))  # that one was removed
                self._size = 0
            known = None
            self._next = number + 1
            if file == before:  # a rotation that was tried twice
                continue
            before = file
            if packed and self._size >= MODULO:
                size += (self._size - size + MODULO - 1) // MODULO * MODULO
            sizes.append((number, size))
            self._size = 0
        if known not in (None, newest):
            sizes.append((self._next, self._size))
            self._next += 1
        return sizes

    def _one(self, number: int) -> tuple[tuple[int, int], int, bool]:
        fd, packed = open_numbered(self.path, number)
        try:
            return identity(os.fstat(fd)), held(fd, packed=packed), packed
        finally:
            os.close(fd)
