"""Creates, takes over and opens the named pipe between timer clients and their server.

A write of up to PIPE_BUF (4096) bytes to a pipe is atomic (pipe(7)): lines of that length never mix, however many
workers write. A server holds the FIFO open for reading and writing, so it never sees the end of file when the last
client closes it. Its lock is flock(2)'s, which the kernel releases when the process ends. A FIFO that a killed server
left is taken over as it is, so clients that hold it open continue, and what they had written is still read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat

from phalanx._base import clock, linux

LINE_LIMIT = select.PIPE_BUF
"""The most bytes of a line, its newline included."""

_SIZE = 1 << 20  # the default of fs.pipe-max-size
_MODE = 0o600
_IN_OPEN = 0x20
_RETRY = 0.05  # seconds


class PipeRefusedError(OSError):
    """The pipe cannot be at this path: what is there is not ours, or another server serves it (``is_served``)."""

    is_served = False


def create(path: str) -> tuple[int, bool]:
    """Create the FIFO, or take over the one that a server before left there.

    Returns:
        A locked descriptor that reads and writes without blocking, and whether the FIFO was taken over: the first line
        may lack its beginning then, which the server before had read. The lock lasts as long as it is open.

    Raises:
        PipeRefusedError: There is another kind of file, or another user's, or a live server has it.
        OSError: The FIFO cannot be created.
    """
    while True:
        found = False
        try:
            os.mkfifo(path, _MODE)
        except FileExistsError:
            found = True
        fd = _take_over(path)
        if fd is not None:
            return fd, found


def _take_over(path: str) -> int | None:
    """Open and lock what is there; None if it was removed or replaced meanwhile."""
    try:
        # Checked before it is opened: to open a device can have effects.
        _examine(path, os.lstat(path))
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    try:
        mine = os.fstat(fd)
        _examine(path, mine)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another timer server serves this pipe: stop it, or choose another path"
            refused = PipeRefusedError(message, path)
            refused.is_served = True
            raise refused from None
        if not is_at(path, mine):  # its server removed it between our opening and our locking
            os.close(fd)
            return None
        _enlarge(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _examine(path: str, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise PipeRefusedError("it is a symbolic link: anyone who can write there could lead the pipe elsewhere", path)
    if not stat.S_ISFIFO(found.st_mode):
        raise PipeRefusedError("it exists and is not a named pipe: remove it, or choose another path", path)
    if found.st_uid != os.geteuid():
        raise PipeRefusedError(f"it belongs to another user (uid {found.st_uid})", path)
    if stat.S_IMODE(found.st_mode) & ~_MODE:
        mode = stat.S_IMODE(found.st_mode)
        raise PipeRefusedError(f"others may use it (mode {mode:04o}, expected 0600): remove it", path)


def is_at(path: str, mine: os.stat_result) -> bool:
    """Whether ``path`` still leads to the file that ``mine`` describes."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _enlarge(fd: int) -> None:
    size = _SIZE
    while size > LINE_LIMIT:  # EPERM beyond fs.pipe-max-size, or when the user's pipes hold too much already
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
        except OSError:
            size //= 2
        else:
            return


def open_for_writing(path: str, patience: float) -> int:
    """Open a server's FIFO, and wait up to ``patience`` seconds for a server to be there.

    Raises:
        BrokenPipeError: There was none all that time.
        OSError: The FIFO cannot be opened for another reason.
    """
    deadline = clock.now() + patience
    fd = _attempt(path)
    if fd is not None:
        return fd
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        notify = -1
        with contextlib.suppress(OSError):  # a server creates the FIFO, or opens the one that is there: both are events
            notify = linux.inotify()
            stack.callback(os.close, notify)
            poll.register(notify, select.POLLIN)
        while True:
            notified = _listen(notify, path)
            fd = _attempt(path)  # after the watch was set, so what happens from now on is an event
            if fd is not None:
                return fd
            left = deadline - clock.now()
            if left <= 0:
                break
            # Inotify instances are few (fs.inotify.max_user_instances: 128 for all processes of a user), and another
            # program may have taken them all. Nothing else reports that a FIFO is created: then, and only then, the
            # path is polled, for as long as a server is waited for.
            if poll.poll((left if notified else min(left, _RETRY)) * 1000):
                os.read(notify, 65536)
    raise BrokenPipeError(
        errno.EPIPE,
        f"no timer server has served this pipe for {patience:g} s: start FileTimerServer with this path before the"
        " workers, and keep it running (or start it again) as long as they take timers",
        path,
    )


def _listen(notify: int, path: str) -> bool:
    """Have ``notify`` (-1: none) report a server. Returns whether it will; False if no watch is left."""
    try:
        linux.inotify_add(notify, os.path.dirname(path) or os.curdir, linux.IN_CREATE | linux.IN_MOVED_TO)
    except OSError:  # or its folder is not there yet
        return False
    try:
        linux.inotify_add(notify, path, _IN_OPEN)
    except FileNotFoundError:  # the folder's watch reports when it is created
        return True
    except OSError:
        return False
    return True


def _attempt(path: str) -> int | None:
    """Open the FIFO if a server is at its other end; None if not."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENXIO):  # ENXIO: nobody has it open for reading
            return None
        raise
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise PipeRefusedError("it is not a named pipe", path)
