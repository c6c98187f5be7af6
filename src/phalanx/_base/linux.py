"""Every call that Linux has and Python lacks, and the reading of /proc and cgroup files. Probed by trying.

Owns kernel interfaces; knows nothing of groups or workers.
"""

from __future__ import annotations

import errno
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Iterable, Iterator
    from typing import Any
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1
IN_MODIFY, IN_ATTRIB, IN_MOVED_TO, IN_CREATE, IN_MOVE_SELF, IN_Q_OVERFLOW = 0x2, 0x4, 0x80, 0x100, 0x800, 0x4000
IN_MOVED_FROM, IN_DELETE = 0x40, 0x200
SIGKILL = 9

_PF_EXITING, _PF_DUMPCORE = 0x4, 0x200
_OOM_TOGETHER = 1.0  # seconds in which the ends of OOM-killed processes are told after the kernel's count has risen


_FILE_NAMES = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


def text_of(name: bytes) -> str:
    """Decode a name as the file system has it (os.fsdecode)."""
    return name.decode(*_FILE_NAMES)


def file_of(error: OSError) -> str:
    """The name of the file that an error is of; empty if it is of none."""
    name = error.filename or ""
    return text_of(name) if isinstance(name, bytes) else str(name)


def _libc(name: str, *args: object) -> int:
    """Call a function of the C library that takes ints and bytes and returns an int, -1 for an error."""
    try:  # the C half of ctypes is all that this needs, and 3 ms sooner there than the whole: the keeper starts in 10
        from _ctypes import call_function, dlopen, dlsym

        library: str = None  # type: ignore[assignment]  # dlopen(3) takes NULL for the program itself; typeshed does not
        return int(call_function(dlsym(dlopen(library, os.RTLD_NOW), name), args))
    except ImportError:  # an interpreter that names them otherwise
        import ctypes

        return int(getattr(ctypes.CDLL(None), name)(*args))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    if _libc("prctl", option, value, 0, 0, 0) != 0:
        raise OSError(errno.EINVAL, f"prctl({option}, {value})")


_SIGACTION = 256  # bytes: more than struct sigaction has in any C library


def sigaction(number: int) -> bytes:
    """What the kernel does on a signal, as a struct sigaction (sigaction(2)): also a handler that C code has set."""
    buffer = _buffer(_SIGACTION)
    if _libc("sigaction", number, None, buffer) != 0:
        raise OSError(errno.EINVAL, f"sigaction({number})")
    return bytes(buffer)


_chars: list[Any] = []  # c_char without `ctypes` (see `_libc`), made once: a class is more than a call leaves behind


def _buffer(size: int) -> Any:
    """Bytes for the C library to write to."""
    if not _chars:
        try:
            from _ctypes import _SimpleCData
        except ImportError:
            from ctypes import _SimpleCData
        _chars.append(type("Char", (_SimpleCData,), {"_type_": "c"}))
    return (_chars[0] * size)()


def set_sigaction(number: int, action: bytes) -> None:
    """Restore what `sigaction` has returned."""
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
        raise OSError(errno.EMFILE, "no signalfd is to be had (open files: ulimit -n)")
    return fd


def handler_of(action: bytes) -> int:
    """The address of a handler; or 0 (SIG_DFL), 1 (SIG_IGN). It is the first field everywhere."""
    return int.from_bytes(action[:8], sys.byteorder)


def become_subreaper() -> None:
    """Let the orphans among all descendants become our children, not init's (PR_SET_CHILD_SUBREAPER(2const))."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill us when the thread of ``parent`` that forked us ends; at once if it has already."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:  # it died between our fork and the arming: nobody will tell us any more
        os.kill(os.getpid(), SIGKILL)


def allow_reading() -> None:
    """Let every process of our user read our memory, also where Yama restricts that to who has started us.

    That is what ptrace(2) asks for, kernel.yama.ptrace_scope = 1 refuses to siblings, and py-spy needs.
    """
    try:
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)
    except OSError:  # there is no Yama, which would restrict it
        return


def occupy_standard_descriptors() -> list[int]:
    """Open /dev/null on each of 0, 1, 2 that is closed, lest a socket lands there. The caller closes them."""
    opened = []
    while (fd := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) <= 2:  # noqa: PLR2004 - the number of stderr
        opened.append(fd)
    os.close(fd)
    return opened


def inotify() -> int:
    """Make a descriptor for inotify events, non-blocking, close-on-exec. Raises OSError."""
    fd = _libc("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(
            errno.EMFILE, "too many inotify instances or open files (fs.inotify.max_user_instances, ulimit -n)"
        )
    return fd


def inotify_add(fd: int, path: str, mask: int = IN_MODIFY) -> int:
    """Watch ``path``; returns the watch descriptor that events carry. Raises OSError."""
    for _ in range(2):  # what was not there at first may be there when it is looked at: then once more
        watch = _libc("inotify_add_watch", fd, path.encode(*_FILE_NAMES), mask)
        if watch >= 0:
            return watch
        os.stat(path)  # the likeliest cause speaks for itself
    raise OSError(errno.ENOSPC, "no inotify watch to be had (fs.inotify.max_user_watches)", path)


_STATFS = 512  # bytes: more than struct statfs has anywhere
_OF_NETWORKS = {  # the magic numbers of statfs(2) and linux/magic.h, and of those that are not in the kernel's tree
    0x6969: "nfs", 0x517B: "smb", 0xFE534D42: "smb2", 0xFF534D42: "cifs", 0x5346414F: "afs", 0x6B414653: "afs",
    0x73757245: "coda", 0x564C: "ncp", 0x01021997: "9p", 0x00C36400: "ceph", 0x0BD00BD0: "lustre", 0x47504653: "gpfs",
    0x7461636F: "ocfs2", 0x01161970: "gfs2", 0x19830326: "beegfs", 0xAAD7AAEA: "panfs", 0x20030528: "orangefs",
    0x65735546: "fuse",  # sshfs, glusterfs and most others in user space
}  # fmt: skip


def is_of_network(path: str) -> bool:
    """Whether a file may be on another machine's disk: then inotify tells only what this one does. False if unknown."""
    buffer = _buffer(_STATFS)
    if _libc("statfs", path.encode(*_FILE_NAMES), buffer) != 0:
        return False
    # Its first field, f_type, is a long; the numbers have 32 bits, and some a sign.
    return int.from_bytes(bytes(buffer)[:8], sys.byteorder) & 0xFFFFFFFF in _OF_NETWORKS


def inotify_remove(fd: int, watch: int) -> None:
    """Watch no longer. One that the kernel has removed already is ignored."""
    _libc("inotify_rm_watch", fd, watch)


def flush_stdio() -> None:
    """Write what the C library holds in the buffers of its streams (fflush(3))."""
    _libc("fflush", None)


class Stat:
    """The fields of /proc/PID/stat (proc_pid_stat(5)) that identify a process and its place."""

    __slots__ = ("comm", "flags", "group", "parent", "pid", "session", "start", "state")

    def __init__(self, pid: int) -> None:
        """Read them.

        Raises ProcessLookupError when there is no such process, or none that may be seen (hidepid, proc(5));
        PermissionError when it may not be looked at.
        """
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                text = file.read()
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from None
        head, _, tail = text.rpartition(b")")  # a name may hold anything, parentheses too
        fields = tail.split()
        self.pid = pid
        self.comm = text_of(head.partition(b"(")[2])
        self.state = fields[0].decode()
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.flags = int(fields[6])
        self.start = int(fields[19])


def children(pid: int) -> list[int]:
    """The live and zombie children of ``pid``, from the kernel's own list, or by a look at every process."""
    try:
        found = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += [int(child) for child in file.read().split()]
        return found  # noqa: TRY300 - the reading as a whole may fail
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or no such process
        return [stat.pid for stat in processes() if stat.parent == pid]


_shown: list[tuple[int, int]] = []  # this process, and the device of the /proc that has shown it
_WALL = 0x40000000  # __WALL of waitid(2): also children whose end sends no SIGCHLD


def children_among(pids: Iterable[int]) -> list[int]:
    """Those of these that are children of ours, reapable or not. It needs no /proc, and names nobody else's."""
    found, options = [], os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL
    wait, kind = os.waitid, os.P_PID
    for pid in pids:
        try:
            wait(kind, pid, options)
        except ChildProcessError:
            continue
        found.append(pid)
    return found


def is_shown() -> bool:
    """Whether /proc shows this process, by the number that it has here: it may be empty, or another namespace's.

    It costs 2 µs when it has been asked before: a file system keeps its number, and each namespace's /proc is another.
    """
    pid = os.getpid()
    try:
        device = os.stat("/proc/self").st_dev
    except OSError:
        return False
    if _shown == [(pid, device)]:
        return True
    text = contents("/proc/self/status")
    for field in (b"\nNSpid:", b"\nPid:"):  # of namespaces one in another, each has its own number
        numbers = text.partition(field)[2].partition(b"\n")[0].split()
        if numbers:
            _shown[:] = [(pid, device)] if numbers == [b"%d" % pid] else []
            return bool(_shown)
    return False


def below(pids: list[int], most: int) -> dict[int, int]:
    """The processes below ``pids`` that the kernel's own lists name, ``most`` of them: by pid, who is the parent."""
    found: dict[int, int] = {}
    parents = list(pids)
    while parents and len(found) < most:
        parent = parents.pop(0)
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:  # gone
            continue
        for task in tasks:
            fresh = [int(word) for word in contents(f"/proc/{parent}/task/{task}/children").split()]
            found.update(dict.fromkeys(fresh, parent))
            parents += fresh
    return found


def kill(pid: int, parent: int) -> None:
    """SIGKILL a process that is not our child, if ``parent`` is its parent: then it is who it was."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # gone, or no descriptor is left
        return
    try:
        if Stat(pid).parent == parent:
            signal.pidfd_send_signal(fd, SIGKILL)
    except OSError:
        pass
    finally:
        os.close(fd)


def processes() -> Iterator[Stat]:
    """Every process that /proc shows."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield Stat(int(name))
            except (ProcessLookupError, PermissionError):
                continue


def open_unblocking(fd: int) -> tuple[int, int]:
    """Open for writing, without ever blocking, what ``fd`` writes to: a new descriptor, and the most bytes per write.

    A console is not ours alone: to set O_NONBLOCK on it would break its other users, and so it is opened anew through
    /proc, where the flag is our own. A regular file never blocks, and keeps the offset that it shares. What cannot be
    opened (a socket, a terminal of another user) takes `select.PIPE_BUF` bytes whenever poll(2) calls it writable.
    Raises OSError.
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
    """Map a page under ``name`` that /proc/PID/maps shows of us and our forks, until an exec. Raises OSError."""
    fd = os.memfd_create(name)
    try:
        # By hand, because `mmap` keeps a descriptor: PROT_NONE, MAP_PRIVATE. The page is never touched.
        if _libc("mmap", None, 1, 0, 2, fd, 0) == -1:
            raise OSError(errno.ENOMEM, "mmap", name)
    finally:
        os.close(fd)


def available_memory() -> int:
    """The bytes of memory that can be had without swapping, as the kernel estimates it (proc(5)); all, if unknown."""
    for line in contents("/proc/meminfo", 1 << 14).splitlines():
        if line.startswith(b"MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def contents(path: str, most: int = -1) -> bytes:
    """What a file of /proc says, ``most`` bytes of it; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


def environ(pid: int) -> list[bytes]:
    """List what ``pid`` was exec'ed with (b"NAME=value"), or nothing when that cannot be read."""
    return [entry for entry in contents(f"/proc/{pid}/environ").split(b"\0") if entry]


def signal_mask(pid: int | str, name: bytes) -> int:
    """One of the sets of signals in /proc/PID/status (b"SigIgn", b"SigCgt", ...); 0 when it cannot be read."""
    try:
        return int(contents(f"/proc/{pid}/status").partition(b"\n" + name + b":")[2][:17], 16)
    except ValueError:
        return 0


def umask() -> int:
    """Read this process's umask from /proc: the system call could tell it only by setting another one for a moment."""
    text = contents("/proc/self/status").partition(b"\nUmask:")[2][:6]
    return int(text, 8) if text.strip() else 0o022


def is_exiting(pid: int) -> bool:
    """Whether a process is on its way out, reaped or not: exiting, or dumping core (PF_* of the kernel's sched.h)."""
    try:
        return bool(Stat(pid).flags & (_PF_EXITING | _PF_DUMPCORE))
    except OSError:
        return False


def find_oom_counter() -> tuple[str, int]:
    """Find the file that counts OOM kills in this process's memory cgroup, and its count; ("", 0) if there is none.

    v2: ``oom_kill`` of memory.events; v1: ``oom_kill`` of memory.oom_control (cgroups(7), and the kernel's
    admin-guide/cgroup-v2). Both rise before the victim is sent its SIGKILL.
    """
    for _point, folder in cgroups("memory"):
        for path in (f"{folder}/memory.events", f"{folder}/memory.oom_control"):
            count = oom_kills(path)
            if count is not None:
                return path, count
    return "", 0


class OomKills:
    """Tells which ends the kernel's count of OOM kills explains. ``path`` and ``count``: see `find_oom_counter`."""

    def __init__(self, path: str, count: int) -> None:
        self._path = path
        self._count = count
        self._said: list[str] = []
        self._until = 0.0

    def explain(self, now: float) -> str:
        """What the kernel says of an OOM kill just now; "" when it says nothing. A rise by two explains two ends."""
        count = oom_kills(self._path) if self._path else None
        if count is not None and count > self._count:
            said = f"OOM kill: oom_kill in {self._path} rose from {self._count} to {count}"
            self._said = [said] * (count - self._count)
            self._until = now + _OOM_TOGETHER
            self._count = count
        if now > self._until:  # a grandchild's, which no later end may claim
            self._said = []
        return self._said.pop() if self._said else ""


def oom_kills(path: str) -> int | None:
    """The count in a file that `find_oom_counter` found; None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            for line in file:
                key, _, value = line.partition(b" ")
                if key == b"oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def cgroups(controller: str) -> Iterator[tuple[str, str]]:
    """The folders of this process's cgroup that may hold ``controller``'s files, each after its mount point.

    Several, because in a container without a cgroup namespace the path is the host's, and the mount is already ours.
    """
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return
    for mount in mounts:
        # A line: 36 35 98:0 /root /mount/point options optional-fields... - type source superoptions.
        dash = mount.index("-")
        kind, options, point = mount[dash + 1], mount[dash + 3].split(","), mount[4]
        for _number, controllers, path in groups:
            unified = kind == "cgroup2" and controllers == ""
            if unified or (kind == "cgroup" and controller in options and controller in controllers.split(",")):
                yield point, f"{point}{path.rstrip('/')}"
                yield point, point


def has_capability(number: int) -> bool:
    """Whether this process has a capability (capabilities(7)), in its own user namespace at least."""
    try:
        with open("/proc/self/status") as file:
            return any(line.startswith("CapEff:") and int(line[7:], 16) >> number & 1 for line in file)
    except (OSError, ValueError):
        return False
