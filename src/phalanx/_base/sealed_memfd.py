"""Files in memory that several processes read: once sealed, nobody can change what is in them, or their size.

Owns the seals (fcntl(2), "File Sealing"), which belong to the file and not to a descriptor: whoever has the file, under
any of its names, is bound by them. Knows nothing of what is in a file.
"""

from __future__ import annotations

import errno
import fcntl
import os

_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10  # linux/fcntl.h; fcntl lacks the last one
_BLOCK = 512  # bytes: the unit of st_blocks, on every file system


def new(name: str) -> int:
    """A file in memory that can be sealed, close-on-exec. ``name`` is shown in /proc. Raises OSError."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int) -> None:
    """Keep the content and the size of a file from `new` as they are, for ever. Raises OSError: EBUSY, it is mapped.

    That the file cannot be written to keeps it from being mapped to be read (MAP_SHARED) before Linux 6.7: see
    `seal_for_maps`.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _WRITE | _SEAL)


def seal_for_maps(fd: int) -> None:
    """As `seal`, of a file that others are going to map with MAP_SHARED, to read it (F_SEAL_FUTURE_WRITE, Linux 5.1).

    Nobody may have it mapped to write to it by now.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _FUTURE_WRITE | _SEAL)


def read(fd: int, limit: int) -> bytes:
    """All that is in a file that another process has sealed by `seal`, if that is at most ``limit`` bytes.

    Never waits for anybody. Raises ValueError, which says what it is, for any other kind of file, for one that is not
    sealed, is longer, or has holes: those cost who sent it nothing, and would cost us their size. Raises OSError,
    MemoryError.
    """
    try:  # first: this asks no file system, whose answer may take as long as it likes
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # the latter, of one that was opened with O_PATH
            raise
        raise ValueError("its descriptor is of no file in memory") from None
    if seals & (_SHRINK | _GROW | _WRITE) != _SHRINK | _GROW | _WRITE:
        raise ValueError("its file in memory is not sealed")
    found = os.fstat(fd)
    if found.st_size > limit:
        raise ValueError(f"it has {found.st_size} bytes; at most {limit} can be taken")
    if found.st_blocks * _BLOCK < found.st_size:
        raise ValueError(f"its file in memory has {found.st_size} bytes, and holes")
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()
