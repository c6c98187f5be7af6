"""Log files of bounded size. Owns their rotation, on a line boundary; runs in the keeper.

A worker that writes to a file itself cannot be made to write to another one, and to cut the file behind its back loses
what it writes between the copy and the cut. So with a bound, and only then, the worker has a pipe, and the keeper fills
the files: ``path`` is always the newest, ``path.1`` the oldest, and the name of a file that was set aside never
changes. What a worker has written before it dies is in the pipe, and is read, though the launcher may be gone; only if
the keeper itself is killed, what is in the pipe at that moment (64 KiB at most) is lost.
"""

from __future__ import annotations

import os

_CHUNK = 256 * 1024
_MODE_FILE = 0o666  # the umask is the caller's


class Rotator:
    """Fills a file from a pipe, and begins a new one before it grows beyond ``limit`` bytes.

    No line is split: what has begun in a file ends there, though it should be longer than the limit.
    """

    def __init__(self, path: str, limit: int) -> None:
        """Open the file, for more at its end. Raises OSError."""
        self._path = path
        self._limit = limit
        self._number = 1
        while os.path.exists(f"{path}.{self._number}"):
            self._number += 1
        self._file = _open(path)
        self._size = os.fstat(self._file).st_size
        self._mid_line = self._size > 0 and _last_byte(path, self._size) != b"\n"
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)

    def drain(self) -> bool:
        """Write what is in the pipe to the file. Returns whether more may come. Raises OSError: the disk is full."""
        while True:
            try:
                data = os.read(self.reader, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._write(data)

    def descriptors(self) -> list[int]:
        """All that is open."""
        return [fd for fd in (self._file, self.reader, self.writer) if fd >= 0]

    def close_writer(self) -> None:
        """The worker has its end of the pipe; ours would keep it from ending."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Give all descriptors back. A worker that still writes gets EPIPE."""
        for fd in self.descriptors():
            os.close(fd)
        self._file = self.reader = self.writer = -1

    def _write(self, data: bytes) -> None:
        while data:
            cut = self._cut(data)
            if cut:
                self._append(data[:cut])
            if cut < len(data):
                self._rotate()
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
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def _rotate(self) -> None:
        """Set the file aside. Under its name there is always one: a follower finds the old or the new."""
        fresh = f"{self._path}.new"
        file = _open(fresh)
        os.link(self._path, f"{self._path}.{self._number}")
        os.replace(fresh, self._path)
        os.close(self._file)
        self._file, self._size, self._mid_line = file, 0, False
        self._number += 1


def _last_byte(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), 1, size - 1)


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE_FILE)
