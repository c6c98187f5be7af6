"""The page with the stop flag of a group that gives notice: the launcher makes it, the keeper writes, workers read.

It is a memfd of the launcher, as the table of timers is: a worker opens it as /proc/PID/fd/N, so one that never asks
inherits nothing. The worker's end is `worker.stop_flag`, and the offsets are in `protocol`.
"""

from __future__ import annotations

import errno
import fcntl
import os

from phalanx._engine.protocol import STOP_FLAG, STOP_PAGE, STOP_PAGE_ENV


class StopFlag:
    """One group's. Raises OSError.

    Args:
        number: The signal by which the workers have notice.
        seconds: From the notice to the death signal.

    Attributes:
        fd: The descriptor of the page; -1: closed.
    """

    def __init__(self, number: int, seconds: float) -> None:
        self.number = number
        self.seconds = seconds
        self.fd = -1
        try:
            self.fd = os.memfd_create("phalanx-stop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            content = STOP_PAGE.ljust(STOP_FLAG + 1, b"\0")
            if os.pwrite(self.fd, content, 0) < len(content):  # RLIMIT_FSIZE, which the keeper has, too
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))  # noqa: TRY301 - worded below, as the others
            # A process that has it open could shorten it otherwise, and a read of the flag would raise SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"the notice of a stop cannot be prepared: {error.strerror}") from error

    def environment(self) -> dict[str, str]:
        """Return the variable by which workers find the page."""
        return {STOP_PAGE_ENV: f"{os.getpid()}:{self.fd}"}

    def close(self) -> None:
        """Close the page. Workers that have asked once still see the flag. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
