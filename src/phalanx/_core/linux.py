"""Every call that Linux has and Python lacks, and the reading of /proc and cgroup files. Probed by trying.

Owns kernel interfaces; knows nothing of groups or workers.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
IN_MODIFY, IN_ATTRIB, IN_MOVED_TO, IN_CREATE, IN_Q_OVERFLOW = 0x2, 0x4, 0x80, 0x100, 0x4000
SIGKILL = 9


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


def become_subreaper() -> None:
    """Let the orphans among all descendants become our children, not init's (PR_SET_CHILD_SUBREAPER(2const))."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill us when the thread of ``parent`` that forked us ends; at once if it has already."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:  # it died between our fork and the arming: nobody will tell us any more
        os.kill(os.getpid(), SIGKILL)


def occupy_standard_descriptors() -> list[int]:
    """Open /dev/null on each of 0, 1, 2 that is closed, lest a socket lands there. The caller closes them."""
    opened = []
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:  # noqa: PLR2004 - the number of stderr
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
        watch = _libc("inotify_add_watch", fd, os.fsencode(path), mask)
        if watch >= 0:
            return watch
        os.stat(path)  # the likeliest cause speaks for itself
    raise OSError(errno.ENOSPC, "no inotify watch to be had (fs.inotify.max_user_watches)", path)


def inotify_remove(fd: int, watch: int) -> None:
    """Watch no longer. One that the kernel has removed already is ignored."""
    _libc("inotify_rm_watch", fd, watch)


def flush_stdio() -> None:
    """Write what the C library holds in the buffers of its streams (fflush(3))."""
    _libc("fflush", None)


class Stat:
    """The fields of /proc/PID/stat (proc_pid_stat(5)) that identify a process and its place."""

    __slots__ = ("comm", "group", "parent", "pid", "session", "start", "state")

    def __init__(self, pid: int) -> None:
        """Read them. Raises ProcessLookupError when there is no such process."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                text = file.read()
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from None
        head, _, tail = text.rpartition(b")")  # a name may hold anything, parentheses too
        fields = tail.split()
        self.pid = pid
        self.comm = os.fsdecode(head.partition(b"(")[2])
        self.state = fields[0].decode()
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
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


def maps(pid: int) -> bytes:
    """/proc/PID/maps (proc_pid_maps(5)); empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return file.read()
    except OSError:
        return b""


def environ(pid: int) -> list[bytes]:
    """List what ``pid`` was exec'ed with (b"NAME=value"), or nothing when that cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


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
