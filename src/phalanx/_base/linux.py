"""Makes the calls that Linux has and Python lacks. Owns those kernel interfaces, which it probes by trying them.

What /proc and cgroup files hold is read by `procfs`. Scripts' workers load this file by its path, in Python 3.8 too.
"""

from __future__ import annotations

import errno
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Iterable
    from typing import Any
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1
IN_MODIFY, IN_ATTRIB, IN_MOVED_TO, IN_CREATE, IN_MOVE_SELF, IN_Q_OVERFLOW = 0x2, 0x4, 0x80, 0x100, 0x800, 0x4000
SIGKILL = 9

_FILE_NAMES = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


def text_of(name: bytes) -> str:
    """Decode a file name (os.fsdecode)."""
    return name.decode(*_FILE_NAMES)


def path_of(error: OSError) -> str:
    """Return the path in an OSError; "" if it has none."""
    name = error.filename or ""
    return text_of(name) if isinstance(name, bytes) else str(name)


def _libc(name: str, *args: object) -> int:
    """Call a function of the C library that takes ints and bytes and returns an int, -1 for an error."""
    try:  # the C half of ctypes imports 3 ms faster than the whole, of the 10 ms in which a keeper starts
        from _ctypes import call_function, dlopen, dlsym

        library: str = None  # type: ignore[assignment]  # dlopen(3) takes NULL for the program itself; typeshed does not
        return int(call_function(dlsym(dlopen(library, os.RTLD_NOW), name), args))
    except ImportError:  # an interpreter with other names
        import ctypes

        return int(getattr(ctypes.CDLL(None), name)(*args))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    if _libc("prctl", option, value, 0, 0, 0) != 0:
        # Those that are used here fail where they are forbidden. The name goes where a path goes, into every error.
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), f"prctl({option}, {value})")


_SIGACTION = 256  # bytes: more than struct sigaction has in any C library


def sigaction(number: int) -> bytes:
    """Read the action on a signal, as a struct sigaction (sigaction(2)): also a handler that C code has set."""
    buffer = _buffer(_SIGACTION)
    if _libc("sigaction", number, None, buffer) != 0:
        raise OSError(errno.EINVAL, f"sigaction({number})")
    return bytes(buffer)


_chars: list[Any] = []  # c_char without `ctypes` (see `_libc`), made once: each class would stay in memory


def _buffer(size: int) -> Any:
    """Make a buffer for the C library to write to."""
    if not _chars:
        try:
            from _ctypes import _SimpleCData
        except ImportError:
            from ctypes import _SimpleCData
        _chars.append(type("Char", (_SimpleCData,), {"_type_": "c"}))
    return (_chars[0] * size)()


def set_sigaction(number: int, action: bytes) -> None:
    """Set the action that `sigaction` has returned. Raises OSError."""
    if _libc("sigaction", number, action, None) != 0:
        raise OSError(errno.EINVAL, f"sigaction({number})")


_SIGSET = 128  # bytes: as many as sigset_t has in any C library


def signalfd(number: int) -> int:
    """Make a descriptor that is readable while the signal ``number``, which is blocked, is pending. Raises OSError.

    signalfd(2): each read takes what is pending. Non-blocking, close-on-exec.
    """
    wanted = (1 << number - 1).to_bytes(8, sys.byteorder).ljust(_SIGSET, b"\0")
    fd = _libc("signalfd", -1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)  # SFD_* are these
    if fd < 0:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))  # raises the likeliest cause: EMFILE, ENFILE
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), "signalfd(2)")
    return fd


def pidfd_open(pid: int) -> int:
    """Return a descriptor, close-on-exec, that stands for a process (man 2 of that name).

    Raises:
        OSError: EMFILE, ENFILE; EINVAL or ENOENT for the id of a thread that is no process; ESRCH: there is none. EPERM
            or ENOSYS: it is to be had for no process here; the text says what to do about it.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise OSError(error.errno, _NO_PIDFD) from None
        raise


_NO_PIDFD = (
    "pidfd_open(2) is refused here, without which no process can be signalled safely: Phalanx needs Linux 5.9 or "
    "later, and in a container a seccomp profile that allows it (that of Docker does since 20.10)"
)


def handler_of(action: bytes) -> int:
    """Return the address of a handler; or 0 (SIG_DFL), 1 (SIG_IGN). It is the first field on every machine."""
    return int.from_bytes(action[:8], sys.byteorder)


def become_subreaper() -> None:
    """Make orphaned descendants our children rather than init's (PR_SET_CHILD_SUBREAPER(2const)). Raises OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = SIGKILL) -> None:
    """Have the kernel signal us when the thread of ``parent`` that forked us ends; at once if it has already."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended between our fork and the prctl, and no signal would come
        os.kill(os.getpid(), number)


def allow_ptrace() -> None:
    """Let every process of our user trace this one (PR_SET_PTRACER), also where Yama allows it to ancestors only.

    kernel.yama.ptrace_scope = 1 refuses ptrace(2) to siblings, and py-spy needs it.
    """
    try:
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)
    except OSError:  # there is no Yama, which would restrict it
        return


def occupy_standard_descriptors() -> list[int]:
    """Open /dev/null on each of 0, 1, 2 that is closed, so that no socket gets that number. The caller closes them.

    Where all are open, nothing is opened: a signal that raises could leave that behind.
    """
    opened: list[int] = []
    while not all(map(_is_open, range(3))):
        fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        if fd > 2:  # noqa: PLR2004 - the number of stderr; another thread has been quicker
            os.close(fd)
        else:
            opened.append(fd)
    return opened


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError as error:
        return error.errno != errno.EBADF
    return True


def close_all_but(wanted: Iterable[int]) -> None:
    """Close every descriptor but 0, 1, 2 and ``wanted``.

    A fork that kept the write end of a pipe would keep its reader from ever getting EOF.
    """
    kept = {0, 1, 2, *wanted}
    try:
        fds: Iterable[int] = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # /proc is not mounted, or shows other processes
        fds = range(os.sysconf("SC_OPEN_MAX"))
    for fd in fds:
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:  # EBADF: not open, as the descriptor of the listing itself
                pass


def inotify() -> int:
    """Make an inotify descriptor, non-blocking, close-on-exec. Raises OSError."""
    fd = _libc("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(
            errno.EMFILE, "too many inotify instances or open files (fs.inotify.max_user_instances, ulimit -n)"
        )
    return fd


def inotify_add(fd: int, path: str, mask: int = IN_MODIFY) -> int:
    """Watch ``path``; returns the watch descriptor that events carry. Raises OSError."""
    for _ in range(2):  # a file that is missing at first may exist when stat(2) looks: then once more
        watch = _libc("inotify_add_watch", fd, path.encode(*_FILE_NAMES), mask)
        if watch >= 0:
            return watch
        os.stat(path)  # raises the likeliest cause: there is no such file
    raise OSError(errno.ENOSPC, "no inotify watch to be had (fs.inotify.max_user_watches)", path)


_STATFS = 512  # bytes: more than struct statfs has anywhere
_OF_NETWORKS = {  # the magic numbers of statfs(2) and linux/magic.h, and of those that are not in the kernel's tree
    0x6969: "nfs", 0x517B: "smb", 0xFE534D42: "smb2", 0xFF534D42: "cifs", 0x5346414F: "afs", 0x6B414653: "afs",
    0x73757245: "coda", 0x564C: "ncp", 0x01021997: "9p", 0x00C36400: "ceph", 0x0BD00BD0: "lustre", 0x47504653: "gpfs",
    0x7461636F: "ocfs2", 0x01161970: "gfs2", 0x19830326: "beegfs", 0xAAD7AAEA: "panfs", 0x20030528: "orangefs",
    0x65735546: "fuse",  # sshfs, glusterfs and most others in user space
}  # fmt: skip


def is_network_filesystem(path: str) -> bool:
    """Whether a file may be on another machine's disk: inotify reports only this machine's writes. False if unknown."""
    buffer = _buffer(_STATFS)
    if _libc("statfs", path.encode(*_FILE_NAMES), buffer) != 0:
        return False
    # Its first field, f_type, is a long; the numbers have 32 bits, and some a sign.
    return int.from_bytes(bytes(buffer)[:8], sys.byteorder) & 0xFFFFFFFF in _OF_NETWORKS


def inotify_remove(fd: int, watch: int) -> None:
    """Remove a watch. One that the kernel has removed already is ignored."""
    _libc("inotify_rm_watch", fd, watch)


def flush_stdio() -> None:
    """Flush the streams of the C library (fflush(3))."""
    _libc("fflush", None)


_WALL = 0x40000000  # __WALL of waitid(2): also children whose end sends no SIGCHLD


def children_among(pids: Iterable[int]) -> list[int]:
    """Select the pids that are children of ours, exited or not, by waitid(2): /proc is not needed."""
    found, options = [], os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL
    wait, kind = os.waitid, os.P_PID
    for pid in pids:
        try:
            wait(kind, pid, options)
        except ChildProcessError:
            continue
        found.append(pid)
    return found


def open_nonblocking(fd: int) -> tuple[int, int]:
    """Open the file of ``fd`` for writing without blocking. Returns a new descriptor, and the most bytes per write.

    Other processes use a console too: O_NONBLOCK on its open file would break them. So it is opened again through
    /proc, which makes an open file of our own. A regular file never blocks, and is duplicated, with the offset that it
    shares. A file that cannot be opened again (a socket, a terminal of another user) is duplicated as well: it takes
    `select.PIPE_BUF` bytes without blocking whenever poll(2) reports it writable. Raises OSError.
    """
    most = 1 << 30
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            return os.open(f"/proc/self/fd/{fd}", flags), most
        except OSError:
            most = 4096  # PIPE_BUF
    return os.dup(fd), most


def map_name(name: str) -> None:
    """Map a page that /proc/PID/maps shows as ``name``, for us and our forks, until an exec. Raises OSError."""
    fd = os.memfd_create(name)
    try:
        # Not by `mmap`, which keeps a descriptor: PROT_NONE, MAP_PRIVATE. The page is never touched.
        if _libc("mmap", None, 1, 0, 2, fd, 0) == -1:
            raise OSError(errno.ENOMEM, "mmap", name)
    finally:
        os.close(fd)


# --- files in memory that several processes read, and their seals (fcntl(2), "File Sealing"), which belong to the file
# and not to a descriptor: every process that has the file open is bound by them.

_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10  # linux/fcntl.h; fcntl lacks the last one
_BLOCK = 512  # bytes: the unit of st_blocks, on every file system


def memory_file(name: str) -> int:
    """Make a file in memory that can be sealed, close-on-exec. ``name`` is shown in /proc. Raises OSError."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int) -> None:
    """Make content and size of a `memory_file` unchangeable. Raises OSError (EBUSY: it is mapped for writing).

    Before Linux 6.7 this seal also refuses MAP_SHARED for reading: see `seal_for_maps`.
    """
    import fcntl  # here and below: no keeper needs it

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _WRITE | _SEAL)


def seal_for_maps(fd: int) -> None:
    """As `seal`, for a file that other processes will map for reading with MAP_SHARED (F_SEAL_FUTURE_WRITE, Linux 5.1).

    A mapping for writing that exists by now stays writable: there must be none.
    """
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _FUTURE_WRITE | _SEAL)


def read_sealed(fd: int, limit: int) -> bytes:
    """Read all of a file that another process has sealed by `seal`, if it has at most ``limit`` bytes.

    Never blocks. Raises ValueError, with the reason, for any other kind of file, for one that is not sealed, is longer,
    or has holes: holes cost the sender nothing, and would cost us memory. Raises OSError, MemoryError.
    """
    import fcntl

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


# --- pipes whose reader may be gone


def write_to_pipe(fd: int, data: bytes) -> int:
    """As os.write(), but a pipe without a reader raises BrokenPipeError, and the process receives no SIGPIPE.

    The interpreter ignores the signal; a program may have restored the default (so that its output ends quietly in
    `head`), or have a handler of its own, and neither is meant for a pipe of ours. MSG_NOSIGNAL works on sockets alone.
    """
    if signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN:
        return os.write(fd, data)
    # The kernel sends it to the thread that wrote: it is blocked there during the write, and taken by sigtimedwait(2)
    # if it is pending then. The mask is read first: a handler of another signal may raise from the call that sets it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))
        was_pending = signal.SIGPIPE in signal.sigpending()
        try:
            return os.write(fd, data)
        except BrokenPipeError:
            if not was_pending:
                signal.sigtimedwait((signal.SIGPIPE,), 0)
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reader_is_gone(fd: int) -> bool:
    """Whether a descriptor is a pipe or a socket that nobody can read from any more."""
    import select

    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLERR for _fd, events in poll.poll(0))
