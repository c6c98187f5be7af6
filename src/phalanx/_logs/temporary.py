"""The temporary folders of groups that have no log folder: how they are made, known again, and removed.

Owns their names (``phalanx_`` and a random part, in the folder for temporary files), and the marker in each, which says
for which process it was made.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

from phalanx._base import clock, files, interrupts, procfs

PREFIX = "phalanx_"
"""What their names begin with."""

MARKER = ".phalanx"
"""The file that each has: the pid of its process, when that started, the machine's name, its boot, and the pid
namespace; a line each."""

_NAME = re.compile(PREFIX + r"[a-z0-9_]{8}")  # as mkdtemp makes it
_LONGEST = 1024  # bytes of a marker


def make() -> str:
    """Make a temporary folder for this process, and return its path. Raises OSError."""
    import tempfile

    folder = tempfile.mkdtemp(prefix=PREFIX)
    mark(folder)
    return folder


def mark(folder: str) -> None:
    """Write the marker of this process into a new temporary folder."""
    with contextlib.suppress(OSError):  # a full disk: the folder is one that `left_in` does not find
        own = procfs.Stat(os.getpid())
        host = os.uname().nodename
        lines = (str(own.pid), str(own.start), host, procfs.boot_id(), procfs.pid_namespace())
        with interrupts.deferred():  # else what a signal raises could leave the descriptor open
            fd = os.open(os.path.join(folder, MARKER), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                files.write_all(fd, "\n".join(lines).encode())
            finally:
                os.close(fd)


def remove_empty(folder: str) -> None:
    """Remove a folder that `make` has made, if nothing but its marker is in it. Raises OSError."""
    if os.listdir(folder) == [MARKER]:
        os.unlink(os.path.join(folder, MARKER))
    os.rmdir(folder)


def left_in(root: str) -> Iterator[str]:
    """Yield the temporary folders in ``root`` that are ours, and whose process has ended."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        yield from [entry.path for entry in entries if _NAME.fullmatch(entry.name) and is_left(entry.path)]


def is_left(folder: str) -> bool:
    """Whether a folder is one that `make` has made for a process of this user, and that process has ended.

    Of a process of another machine, or of another container, it is not known. Of one from before this machine's last
    boot it is, unless something in the folder itself has changed since.
    """
    try:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        text = files.read(os.path.join(folder, MARKER), _LONGEST, owners=(os.geteuid(),))
        pid, start, host, boot, namespace = text.decode().split("\n")
        if host != os.uname().nodename:
            return False
        if (boot, namespace) != (procfs.boot_id(), procfs.pid_namespace()):
            return boot != procfs.boot_id() and max(found.st_mtime, found.st_ctime) < clock.booted()
        return not procfs.lives(int(pid), int(start))
    except (OSError, ValueError):
        return False
