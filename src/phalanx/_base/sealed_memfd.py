"""Makes files in memory that several processes read, and seals them: then no process can change content or size.

Owns the seals (fcntl(2), "File Sealing"). They belong to the file, not to a descriptor: every process that has the file
open is bound by them.
"""

from __future__ import annotations

import errno
import fcntl
import os

_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10  # linux/fcntl.h; fcntl lacks the last one
_BLOCK = 512  # bytes: the unit of st_blocks, on every file system


def new(name: str) -> int:
    """Make a file in memory that can be sealed, close-on-exec. ``name`` is shown in /proc. Raises OSError."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int) -> None:
    """Make content and size of a file from `new` unchangeable. Raises OSError (EBUSY: it is mapped for writing).

    Before Linux 6.7 this seal also refuses MAP_SHARED for reading: see `seal_for_maps`.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _WRITE | _SEAL)


def seal_for_maps(fd: int) -> None:
    """As `seal`, for a file that other processes will map for reading with MAP_SHARED (F_SEAL_FUTURE_WRITE, Linux 5.1).

    A mapping for writing that exists by now stays writable: there must be none.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _FUTURE_WRITE | _SEAL)


def read(fd: int, limit: int) -> bytes:
    """Read all of a file that another process has sealed by `seal`, if it has at most ``limit`` bytes.

    Never blocks. Raises ValueError, with the reason, for any other kind of file, for one that is not sealed, is longer,
    or has holes: holes cost the sender nothing, and would cost us memory. Raises OSError, MemoryError.
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
