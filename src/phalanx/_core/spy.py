"""Frames of C code, through py-spy, where it is installed. Owns one py-spy at work; knows not why anyone is asked."""

from __future__ import annotations

import os
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

_LIMIT = 4 << 20  # bytes of its text


class Spy:
    """py-spy at work on one process, if it is installed."""

    def __init__(self, pid: int) -> None:
        self.done = True
        self.pidfd = self._out = -1
        self._popen: subprocess.Popen[bytes] | None = None
        path = shutil.which("py-spy") or shutil.which(os.path.join(os.path.dirname(sys.executable), "py-spy"))
        if path is None:
            return
        import subprocess

        try:
            self._out = os.memfd_create("py-spy")
            quiet = subprocess.DEVNULL
            command = [path, "dump", "--native", "--pid", str(pid)]
            self._popen = subprocess.Popen(command, stdin=quiet, stdout=self._out, stderr=quiet)
            self.pidfd = os.pidfd_open(self._popen.pid)
            self.done = False
        except OSError:
            self.close()

    def end(self) -> None:
        """It has exited."""
        assert self._popen is not None
        self._popen.wait()
        self.done = True

    def text(self) -> str:
        """What it has found, if it has ended well."""
        if self._popen is None or not self.done or self._popen.returncode != 0:
            return ""
        return os.pread(self._out, _LIMIT, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """End it, wherever it is: the kernel lets go of whom it traces."""
        if self._popen is not None and self._popen.returncode is None:
            self._popen.kill()
            self._popen.wait()
        for fd in (self.pidfd, self._out):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self._out = -1
        self.done = True
