"""Log files without a name, for a group that is started ahead: nobody sees them, and nothing of them stays behind.

Such a file gets its name when the group is released; the kernel frees one that never does, also when this process is
killed.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from phalanx._logs.layout import LogsDest


class UnnamedLogs:
    """The files of one group, open (O_TMPFILE, open(2)). A context that closes them.

    Args:
        logs: What their names will be.
        folder: A folder of the same file system.

    Raises:
        OSError: The file system has no such files (NFS), or there is no descriptor left.
    """

    def __init__(self, logs: LogsDest, folder: str) -> None:
        self._open: dict[str, int] = {}  # descriptor by path
        self._logs = logs
        paths = {path for path in (*logs.stdouts.values(), *logs.stderrs.values()) if path not in ("", os.devnull)}
        try:
            for path in sorted(paths):
                # As `files.opened_log` opens one that is there.
                self._open[path] = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> dict[str, int]:
        """The open files by the names that they will have."""
        return dict(self._open)

    def name(self) -> None:
        """Give the files their names, in folders that are there by now. Raises OSError, with some named."""
        for path, fd in self._open.items():
            # linkat(2) follows the link of /proc only if it is given a folder's descriptor, which an absolute path
            # makes meaningless; without one, Python calls link(2).
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)

    def close(self) -> None:
        """Close the files. Those without a name are gone then, once no process has them. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
