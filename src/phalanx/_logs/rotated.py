"""The rotated files of a log: their names, and how they are read, compressed or not.

The N-th rotated file of a log ``path`` is ``path.N``, and once it is compressed ``path.N.gz`` (gzip, RFC 1952). A
compressed file is complete as soon as it has its name, and keeps the time of its last change; after that the plain one
is removed. Numbers begin at 1 and rise; any of them may be missing, because old files are removed. ``path`` itself is
newer than all of them. A file with a date for a number (``path.20261120``) is not counted, and only regular files are.
"""

from __future__ import annotations

import errno
import os

from phalanx._base import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Bounds = tuple[int, int, bool]
"""How a log is rotated: at how many bytes (0: never), how many rotated files are kept (0: all), and whether they are
compressed."""

MODULO = 1 << 32
"""A compressed file stores its uncompressed size modulo this (RFC 1952)."""

NEWEST = 1 << 62
"""The number of ``path`` itself, above all others."""

GZIP_SUFFIX = ".gz"
"""The end of a compressed file's name."""

_CHUNK = 64 * 1024
_DIGITS = 7  # of a number, at most; dates have more

MOST_NUMBER = 10**_DIGITS - 1
"""The highest number."""

_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL)  # also a link to itself, a socket, a FIFO
_MOST_DECOMPRESSED = 256 << 20  # bytes that are decompressed for the last ones: some 1 s
_SIZE = 4  # bytes at the end of a gzip file: what it holds, modulo `MODULO`


def numbers(path: str) -> dict[int, str]:
    """Return the rotated files of a log by number, the oldest first."""
    folder, name = os.path.split(path)
    found: dict[int, str] = {}
    try:
        entries = os.listdir(folder or os.curdir)
    except OSError:
        return found
    start = len(name) + 1
    for entry in entries:
        if entry.startswith(name) and entry[start - 1 : start] == ".":
            digits = entry[start:].removesuffix(GZIP_SUFFIX)
            if digits.isascii() and digits.isdecimal() and digits[0] != "0" and len(digits) <= _DIGITS:
                number, compressed = int(digits), entry.endswith(GZIP_SUFFIX)
                if not compressed or number not in found:
                    found[number] = f"{path}.{digits}{GZIP_SUFFIX * compressed}"
    return dict(sorted(found.items()))


def rotated_files(path: str) -> list[str]:
    """Return the paths of the rotated files of a log, the oldest first."""
    return list(numbers(path).values())


def at_or_after(path: str, number: int) -> int:
    """Return the lowest number of a rotated file that is ``number`` or above; `NEWEST` if there is none."""
    if exists(path, number):  # the usual case; a folder can be long to list
        return number
    return next((other for other in numbers(path) if other >= number), NEWEST)


def exists(path: str, number: int) -> bool:
    """Whether the rotated file of a number exists, plain or compressed."""
    return os.path.exists(f"{path}.{number}") or os.path.exists(f"{path}.{number}{GZIP_SUFFIX}")


def open_numbered(path: str, number: int) -> tuple[int, bool]:
    """Open the rotated file of a number. Returns the descriptor, and whether it is compressed.

    Raises OSError; FileNotFoundError also if something other than a regular file has its name.
    """
    for name, compressed in ((f"{path}.{number}", False), (f"{path}.{number}{GZIP_SUFFIX}", True)):
        try:
            return files.opened(name, links=files.OWN_LINKS), compressed
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{path}.{number}")


def identity(found: os.stat_result) -> tuple[int, int]:
    """Return the device and the inode: they are the same for two names of one file."""
    return found.st_dev, found.st_ino


def content_size_of(name: str) -> int:
    """Return the uncompressed size of a file: see `content_size`. Raises OSError."""
    fd = files.opened(name, links=files.OWN_LINKS)
    try:
        return content_size(fd, compressed=name.endswith(GZIP_SUFFIX))
    finally:
        os.close(fd)


def content_size(fd: int, *, compressed: bool) -> int:
    """Return the uncompressed size of an open file (modulo 4 GiB, if it is ``compressed``). Raises OSError."""
    size = os.fstat(fd).st_size
    return int.from_bytes(os.pread(fd, _SIZE, max(0, size - _SIZE)), "little") if compressed else size


def last_bytes(name: str, most: int) -> tuple[int, bytes]:
    """Return the uncompressed size of a regular file, and its last bytes. Raises OSError.

    A compressed file is read from its beginning. One of more than 256 MiB, uncompressed, raises OSError (EFBIG).
    """
    fd = files.opened(name, links=files.OWN_LINKS)
    try:
        found = os.fstat(fd)
        if not name.endswith(GZIP_SUFFIX):
            return found.st_size, os.pread(fd, most, max(0, found.st_size - most))
        compressed, buffer, end, size = GzipReader(), bytearray(4 * _CHUNK), b"", 0
        while count := compressed.read_at(fd, buffer, size):
            size += count
            if size > _MOST_DECOMPRESSED:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            end = (end + buffer[:count])[-most:] if most else b""
        return size, end
    finally:
        os.close(fd)


class GzipReader:
    """Reads a gzip file from its beginning to its end, through any descriptor of it.

    A damaged file ends where the damage begins.
    """

    def __init__(self) -> None:
        from gzip import GzipFile

        self._fd = -1
        self._taken = 0  # bytes read from it
        self._content: Any = GzipFile(fileobj=self)
        self._given = 0  # uncompressed bytes

    def read_at(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:
        """Read from an uncompressed ``offset`` on. Returns the number of bytes; 0 at the end. Raises OSError.

        A lower offset than before makes it read from the beginning again.
        """
        from gzip import BadGzipFile
        from zlib import error

        self._fd = fd
        try:
            if offset != self._given:
                self._content.seek(offset)
            count = int(self._content.readinto1(buffer))  # one read, so that none is lost that comes before a damage
        except (EOFError, BadGzipFile, error):
            return 0
        self._given = offset + count
        return count

    def read(self, most: int) -> bytes:
        """Read compressed bytes, for `gzip`."""
        data = os.pread(self._fd, most, self._taken)
        self._taken += len(data)
        return data

    def seek(self, offset: int) -> None:
        """Go to the beginning, for `gzip`."""
        self._taken = offset
