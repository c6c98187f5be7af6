"""The page with the stop flag of a group that gives notice: the launcher makes it, the keeper writes, workers read.

It is a memfd of the launcher, as the table of timers is: a worker opens it as /proc/PID/fd/N, so one that never asks
inherits nothing. A worker maps the page at its first call of `should_stop`. Forks of a worker share the mapping;
programs that it executes find the page by the environment, as it did. The offsets are in `protocol`.
"""

from __future__ import annotations

import errno
import fcntl
import os

from phalanx._engine.protocol import STOP_FLAG, STOP_PAGE, STOP_PAGE_ENV

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


_NONE = bytes(STOP_FLAG + 1)  # the page of a process in no group that gives notice

_page: Sequence[int] | None = None  # None: not looked for yet
_found: dict[str, Sequence[int]] = {}  # by address: a fork of a worker, or of a launcher, may have another one


class StopFlag:
    """One group's. Raises OSError. ``fd`` is the descriptor of the page; -1: closed."""

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


def should_stop() -> bool:
    """Whether this worker is to save and end, for a stop of its group is planned. It costs a tenth of a microsecond.

    It is True in every worker, and in processes below it, from the notice of a planned stop on
    (``phalanx run --notice USR1:60``, ``notice=`` of a group), and once the launcher was killed, if there is an orphan
    grace. It stays True. After a failure of another rank it is not. In a process that is in no group that gives notice,
    it is False.

    After the first call in a process it makes no system call. It may be called in any thread, and in a signal handler.
    It never raises; if the page cannot be opened, it says so once on stderr, and returns False.
    """
    page = _page
    if page is None:
        page = _open()
    return page[STOP_FLAG] != 0


def _open() -> Sequence[int]:
    """Map the page, if there is one."""
    global _page  # noqa: PLW0603 - one for the process
    address = os.environ.get(STOP_PAGE_ENV, "")
    page = _found.get(address)
    if page is None:
        page = _NONE
        if address:
            try:
                page = _map(address)
            except (OSError, ValueError) as error:
                from phalanx._base import std_streams

                text = getattr(error, "strerror", None) or error
                said = f"process {os.getpid()} cannot see whether it should stop: {STOP_PAGE_ENV}={address}: {text}"
                std_streams.write_stderr(f"phalanx: {said}\n")
        _found[address] = page
    _page = page
    return page


def _map(address: str) -> Sequence[int]:
    """Map the page at ``PID:DESCRIPTOR``. Raises OSError, ValueError.

    Not by `mmap.mmap`: that keeps a descriptor, and closes its number in the end, which may be another file's by then
    in a program that closes all descriptors.
    """
    import ctypes
    import mmap

    pid, number = (int(part) for part in address.split(":"))
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.pread(fd, len(STOP_PAGE), 0) != STOP_PAGE:  # the launcher is gone, and its pid another's
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        library = ctypes.CDLL(None, use_errno=True)
        function = library.mmap
        function.restype = ctypes.c_void_p
        function.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            ctypes.c_long,
        )
        start = function(None, len(_NONE), mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)
    return memoryview((ctypes.c_ubyte * len(_NONE)).from_address(start)).cast("B")


def _start_anew() -> None:
    """After a fork, in the child: look into the environment again, which may be a worker's by now."""
    global _page  # noqa: PLW0603 - as above
    _page = None


os.register_at_fork(after_in_child=_start_anew)
