"""The files that rotation has set aside. Owns their names, and reading them, compressed or not.

Of a log ``path``, the file that was set aside as the N-th is ``path.N``, and once it is compressed ``path.N.gz`` (gzip,
RFC 1952). That one is whole as soon as it has its name, it keeps the time of its last change, and only then is the
plain one removed. Numbers begin at 1 and rise; any of them may be missing, for old files are removed. What stands in
``path`` itself is newer than all of them. What has a date for a number (``path.20261120``) is none of them, nor is what
is no regular file.
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
"""Of the size that a compressed file tells."""

NEWEST = 1 << 62
"""What stands for the number of ``path`` itself: it is above all others."""

PACKED = ".gz"
"""What the name of a compressed file ends in."""

_CHUNK = 64 * 1024
_DIGITS = 7  # of a number; dates have more

MOST_NUMBER = 10**_DIGITS - 1
"""The highest number."""

_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL)  # a link to itself, a socket, a FIFO
_MOST_UNPACKED = 256 << 20  # bytes that are unpacked to get at the last ones: some 1 s
_SIZE = 4  # bytes at the end of a gzip file: what it holds, modulo `MODULO`


def numbers(path: str) -> dict[int, str]:
    """The files that were set aside, the oldest first: each number and the file's path."""
    folder, name = os.path.split(path)
    found: dict[int, str] = {}
    try:
        entries = os.listdir(folder or os.curdir)
    except OSError:
        return found
    start = len(name) + 1
    for entry in entries:
        if entry.startswith(name) and entry[start - 1 : start] == ".":
            digits = entry[start:].removesuffix(PACKED)
            if digits.isascii() and digits.isdecimal() and digits[0] != "0" and len(digits) <= _DIGITS:
                number, packed = int(digits), entry.endswith(PACKED)
                if not packed or number not in found:
                    found[number] = f"{path}.{digits}{PACKED * packed}"
    return dict(sorted(found.items()))


def aside(path: str) -> list[str]:
    """The files that rotation has set aside, oldest first."""
    return list(numbers(path).values())


def at_or_after(path: str, number: int) -> int:
    """The lowest number of a file that was set aside, ``number`` or above; `NEWEST` if there is none."""
    if is_there(path, number):  # mostly; a folder can be long
        return number
    return next((other for other in numbers(path) if other >= number), NEWEST)


def is_there(path: str, number: int) -> bool:
    """Whether a number's file is there, plain or compressed."""
    return os.path.exists(f"{path}.{number}") or os.path.exists(f"{path}.{number}{PACKED}")


def open_numbered(path: str, number: int) -> tuple[int, bool]:
    """Open a number's file. Returns the descriptor, and whether it is compressed.

    Raises OSError: FileNotFoundError also where something else has its name.
    """
    for name, packed in ((f"{path}.{number}", False), (f"{path}.{number}{PACKED}", True)):
        try:
            return files.opened(name, links=files.OWN_LINKS), packed
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise  # else compressed, perhaps just now
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{path}.{number}")


def identity(found: os.stat_result) -> tuple[int, int]:
    """What is the same for two names of one file."""
    return found.st_dev, found.st_ino


def size_of(name: str) -> int:
    """The bytes that a file holds, uncompressed: see `held`. Raises OSError."""
    fd = files.opened(name, links=files.OWN_LINKS)
    try:
        return held(fd, packed=name.endswith(PACKED))
    finally:
        os.close(fd)


def held(fd: int, *, packed: bool) -> int:
    """The bytes that an open file holds, uncompressed (if it is ``packed``, modulo 4 GiB). Raises OSError."""
    size = os.fstat(fd).st_size
    return int.from_bytes(os.pread(fd, _SIZE, max(0, size - _SIZE)), "little") if packed else size


def last_bytes(name: str, most: int) -> tuple[int, bytes]:
    """The size of a regular file, and its last bytes, uncompressed. Raises OSError.

    A compressed one is read from its beginning: there is no other way to its end. One that holds more than 256 MiB
    raises OSError (EFBIG).
    """
    fd = files.opened(name, links=files.OWN_LINKS)
    try:
        found = os.fstat(fd)
        if not name.endswith(PACKED):
            return found.st_size, os.pread(fd, most, max(0, found.st_size - most))
        packed, buffer, end, size = Packed(), bytearray(4 * _CHUNK), b"", 0
        while count := packed.read(fd, buffer, size):
            size += count
            if size > _MOST_UNPACKED:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            end = (end + buffer[:count])[-most:] if most else b""
        return size, end
    finally:
        os.close(fd)


class Packed:
    """The place in a gzip file that is read from its beginning to its end, through any descriptor of it.

    It takes about 50 KB. What is damaged ends there.
    """

    def __init__(self) -> None:
        self._unpack = _unpacking()
        self._taken = 0  # bytes of the file
        self._given = 0  # bytes of what it holds
        self._input = b""

    def read(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:
        """Read what stands from ``offset`` (uncompressed) on. Returns how much; 0 at the end. Raises OSError.

        Offsets only rise, or it is read from its beginning again.
        """
        if offset < self._given:
            self._unpack, self._taken, self._given, self._input = _unpacking(), 0, 0, b""
        while True:
            most = min(len(buffer), offset - self._given or len(buffer))
            data = self._more(fd, most)
            behind = self._given < offset
            self._given += len(data)
            if not data or not behind:
                buffer[: len(data)] = data
                return len(data)

    def _more(self, fd: int, most: int) -> bytes:
        import zlib

        while True:
            if self._unpack.eof:  # another member, as gzip(1) has them; or zeros, or nothing
                self._input = self._unpack.unused_data
                self._unpack = _unpacking()
            fresh = not self._input and not self._unpack.unconsumed_tail
            data = self._unpack.unconsumed_tail or self._input
            self._input = b""
            if fresh:
                data = os.pread(fd, _CHUNK, self._taken)
                self._taken += len(data)
            try:
                got: bytes = self._unpack.decompress(data, most)
            except zlib.error:
                return b""
            if got or (fresh and not data):
                return got


def _unpacking() -> Any:
    import zlib

    return zlib.decompressobj(wbits=31)  # 15, the largest window; and 16, for gzip's head and tail
