"""One log file of bounded size: filled from a worker's pipe, and rotated on a line boundary."""

from __future__ import annotations

import errno
import os

from phalanx._base import files
from phalanx._logs.rotated import GZIP_SUFFIX, numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._engine.rotation.compress import Compressor
    from phalanx._logs.rotated import Bounds

_CHUNK = 256 * 1024
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


class Rotator:
    """Fills a log file from a pipe, and rotates the file before it grows beyond the limit.

    No line is split: a line ends in the file in which it began, even if it is longer than the limit. A file that cannot
    be rotated goes on to grow: a log that is too long is better than a worker that fails for it.

    Args:
        path: The file's path.
        bounds: When the file is rotated, and which rotated files are kept: see `Bounds`. Those of earlier runs count.
        file, reader: The file, open with O_APPEND, and the read end of the pipe. The rotator closes both.
        compressor: Compresses the rotated files; None: they stay as they are.
    """

    def __init__(self, path: str, bounds: Bounds, file: int, reader: int, compressor: Compressor | None = None) -> None:
        self._path = path
        self._limit, self._keep, _compress = bounds
        self._compressor = compressor
        self._file, self.reader = file, reader
        os.set_blocking(reader, False)
        self._kept = dict.fromkeys(numbers(path))  # the numbers of the rotated files, the oldest first
        self._number = max(self._kept, default=0) + 1
        self._size = os.fstat(file).st_size
        self._mid_line = self._size > 0 and _last_byte(path, self._size) != b"\n"
        self._torn = False  # whether the file may end within a line whose rest is lost
        self.refused = 0
        """The errno of the latest write that failed: the disk is full. What it was to write is lost."""

    def turn(self) -> int:
        """Read one chunk from the pipe, and write it to the file, or drop what the file does not take. Raises OSError.

        Returns the number of bytes; 0 if the pipe is empty, -1 at EOF.
        """
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return 0
        try:
            self._write(b"\n" + data if self._torn and data else data)
            self._torn = False
        except OSError as error:
            self.refused = error.errno or errno.EIO
            self._size = os.fstat(self._file).st_size
            self._torn = self._mid_line = self._size > 0
        return len(data) or -1

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
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
                except OSError:  # no descriptor, no folder: try again after another ``limit`` bytes
                    self._size = 0
            data = data[cut:]

    def _cut(self, data: bytes) -> int:
        """Return how many bytes of ``data`` still go into this file."""
        room = self._limit - self._size
        if len(data) <= room:
            return len(data)
        cut = data.rfind(b"\n", 0, max(room, 0)) + 1
        if cut or (self._size and not self._mid_line):
            return cut
        return data.find(b"\n") + 1 or len(data)  # up to the end of the line that began in this file

    def _append(self, data: bytes) -> None:
        self._mid_line = not data.endswith(b"\n")
        self._size += len(data)
        files.write_all(self._file, data)

    def _rotate(self) -> None:
        """Rotate the file. ``path`` always exists meanwhile: a follower finds the old file or the new one.

        On a file system without hard links (FAT, many of FUSE), it is renamed, and for a moment ``path`` is missing.
        """
        fresh = f"{self._path}.new"
        file = files.opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._give_number()
            os.replace(fresh, self._path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._size, self._mid_line = file, 0, False
        number, self._number = self._number, self._number + 1
        self._kept[number] = None
        self._remove_oldest()
        if self._compressor is not None:
            kept = self._kept
            self._compressor.add(f"{self._path}.{number}", lambda: number in kept)

    def _remove_oldest(self) -> None:
        while self._keep and len(self._kept) > self._keep:
            oldest = next(iter(self._kept))
            del self._kept[oldest]  # first: the compressor asks whether it is still wanted
            for name in (f"{self._path}.{oldest}", f"{self._path}.{oldest}{GZIP_SUFFIX}"):
                try:
                    os.unlink(name)
                except OSError:  # only one of the two exists; or somebody has removed it already
                    pass

    def _give_number(self) -> None:
        """Link the file under its number, or rename it. Raises OSError."""
        while True:
            numbered = f"{self._path}.{self._number}"
            try:
                os.link(self._path, numbered, follow_symlinks=False)
            except FileExistsError:  # somebody else's file
                self._number += 1
                continue
            except OSError as error:
                if error.errno not in _NO_LINKS or os.path.exists(numbered):
                    raise
                os.rename(self._path, numbered)
            return


def _last_byte(path: str, size: int) -> bytes:
    return files.read(path, 1, size - 1, links=files.OWN_LINKS)
