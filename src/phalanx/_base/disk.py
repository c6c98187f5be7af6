"""Disks that take no more: which errors mean that, in words; and whether a folder has room."""

from __future__ import annotations

import errno
import os

from phalanx._base import files

ROOM = 64 << 10
"""Bytes that a folder must take, so that a run's logs are kept in it."""

_HINTS = {
    errno.ENOSPC: "",
    errno.EDQUOT: "see quota(1)",
    errno.EFBIG: "the limit on the size of a file: see ulimit -f",
    errno.EROFS: "",
    errno.EIO: "see dmesg(1)",
}
"""The errors of a write by which a disk, or a limit on it, takes no more; each with what to look at."""

_FEW = 10_000  # inodes


def is_full(number: int | None) -> bool:
    """Whether the errno of a write means that the disk, or a limit on it, takes no more."""
    return number in _HINTS


def explain(number: int, path: str) -> str:
    """Describe an errno of `is_full`, with the file or folder, and where its file system is mounted.

    >>> explain(errno.EFBIG, "/logs/0")
    'File too large (the limit on the size of a file: see ulimit -f): /logs/0'
    """
    hint = _inodes(path) if number == errno.ENOSPC else _HINTS[number]
    text = f"{os.strerror(number)}{f' ({hint})' if hint else ''}: {path}"
    return text if number == errno.EFBIG else f"{text}, on the disk at {_mount_point(path)}"


def in_words(error: OSError, path: str) -> str:
    """Describe an error of `path`: by `explain`, if it means that a disk takes no more."""
    return explain(error.errno, path) if error.errno is not None and is_full(error.errno) else str(error)


def check(folder: str, inodes: int = 0) -> None:
    """Raise OSError, by which `explain` is possible, if a folder does not take `ROOM` bytes, or so many files.

    It is found out by writing: quotas and limits are in no other answer.
    """
    import tempfile

    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        files.write_all(file.fileno(), bytes(ROOM))
    found = os.statvfs(folder)
    if found.f_files and found.f_favail < inodes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)


def shortage(folder: str) -> int:
    """Return the errno with which a write to a folder would fail, as far as the disk says it; 0: none, or not known.

    A file system without a size (ramfs, some of FUSE) says nothing. Root may use the blocks that are kept for root.
    Nothing is written: that would wait for a disk that does not answer (fsfreeze(8)). Of a quota this knows nothing.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    if found.f_flag & os.ST_RDONLY:
        return errno.EROFS
    free, inodes = found.f_bavail, found.f_favail
    if os.geteuid() == files.ROOT:
        free, inodes = found.f_bfree, found.f_ffree
    is_full = (found.f_blocks and free * found.f_frsize < ROOM) or (found.f_files and not inodes)
    return errno.ENOSPC if is_full else 0


def _inodes(path: str) -> str:
    """How many inodes are free, where a disk has room otherwise, and files cannot be made; else ""."""
    try:
        found = os.statvfs(path)
    except OSError:
        return ""
    # btrfs, which makes inodes as it needs them, counts none.
    is_short = found.f_files and found.f_favail < _FEW and found.f_bavail * found.f_frsize >= ROOM
    return f"{found.f_favail} inodes are free: see df -i" if is_short else ""


def _mount_point(path: str) -> str:
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path
