"""The means for faults: signals, exhaustion, readers. `run` decides when they are used, and on whom.

Signals go through pidfds, and only to a process whose start time is known: so they reach nobody whom the injector has
not started. An exhaustion is felt by one run alone. Descriptors have limits of that run's processes, processes a
cgroup, inotify a user namespace, and the disk is a file system that no other process sees. Where the machine does not
allow one of these, the fault is left out, and the run says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pty
import resource
import select
import signal
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.injector.plan import Reader

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CAP_SYS_RESOURCE = 1 << 24
_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MNT_DETACH = 2
_CGROUPS = "/sys/fs/cgroup/pids"
_PAGE = 4096
DISK = 64 << 20
"""Bytes of the file system that can be filled."""


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prepare() -> None:
    """Let every orphan below us become our child, and let us end with our parent. Raises OSError."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    _check(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0), "prctl")


# --- processes


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as /proc showed it."""

    pid: int
    parent: int
    session: int
    start: int
    state: str

    @property
    def alive(self) -> bool:
        """Whether it has not exited."""
        return self.state not in "ZX"


def process(pid: int) -> Process | None:
    """One process; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0].decode())


def children(pid: int) -> list[int]:
    """The children of a process, zombies included; none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[Process]:
    """All processes below a process. Where that is a subreaper, one that becomes an orphan meanwhile is not missed."""
    below: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (each := process(int(name))) is not None:
            below.setdefault(each.parent, []).append(each)
    found: list[Process] = []
    todo = [pid]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += [child.pid for child in children]
    return found


def marked(mark: str) -> Iterator[Process]:
    """The live processes that carry ``mark`` in the environment that they were executed with."""
    needle = mark.encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if needle in file.read().split(b"\0") and (found := process(int(name))) is not None and found.alive:
                    yield found


def send(number: int, pid: int, start: int) -> bool:
    """Send a signal to the process that has this pid and start time. Returns whether there was one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        found = process(pid)  # with the pidfd in hand: that is on this one or on none
        if found is None or found.start != start or not found.alive:
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def dump(pid: int) -> str:
    """What /proc shows of a process, for the person who has to find out why it is there."""
    parts = []
    for name in ("cmdline", "stat", "wchan", "syscall", "stack"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                text = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError as error:
            text = f"({error.strerror})"
        parts.append(f"    {name}: {text[:600]}")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
        kept = ("State", "PPid", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
        parts += [f"    {line.rstrip()}" for line in stream if line.partition(":")[0] in kept]
    return "\n".join([f"  process {pid}", *parts])


# --- what runs out


def few_descriptors(pid: int, left: int) -> tuple[int, int]:
    """Leave a process so many descriptors beyond those that are open. Returns the limits before. Raises OSError."""
    count = len(os.listdir(f"/proc/{pid}/fd"))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Root could raise its soft limit, and so the hard one is lowered as well; unless nobody could undo that here.
    hard = count + left if _can_raise_limits() else before[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count + left, hard))
    return before


def _can_raise_limits() -> bool:
    """Whether we have CAP_SYS_RESOURCE. In containers, even root often has not."""
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) & _CAP_SYS_RESOURCE)


def enough_descriptors(pid: int, limits: tuple[int, int]) -> None:
    """Give a process the limits that it had before `few_descriptors`."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def limit_files(pid: int, size: int) -> None:
    """Let a process, and what it will start, make no file larger than ``size`` bytes. Raises OSError."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


class Crowd:
    """A cgroup for the processes of one run, which can be made to allow no more of them."""

    def __init__(self, name: str) -> None:
        self._folder = os.path.join(_CGROUPS, name)
        self.there = False
        with contextlib.suppress(OSError):
            os.mkdir(self._folder)
            self.there = True

    def take(self, pid: int) -> None:
        """Put a process into it, and with it what that will start."""
        if self.there:
            self._write("cgroup.procs", str(pid))

    def members(self) -> list[int]:
        """The processes in it. The kernel lists them at one moment, which a look at all of /proc does not."""
        if not self.there:
            return []
        with open(os.path.join(self._folder, "cgroup.procs"), encoding="ascii") as file:
            return [int(line) for line in file]

    def limit(self, more: int) -> bool:
        """Allow ``more`` processes beside those that there are. Returns whether that is possible."""
        if not self.there:
            return False
        with open(os.path.join(self._folder, "pids.current"), encoding="ascii") as file:
            count = int(file.read())
        self._write("pids.max", str(count + more))
        return True

    def lift(self) -> None:
        """Allow any number of processes."""
        if self.there:
            self._write("pids.max", "max")

    def close(self) -> None:
        """Remove it. It must be empty."""
        if self.there:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)

    def _write(self, name: str, text: str) -> None:
        with open(os.path.join(self._folder, name), "w", encoding="ascii") as file:
            file.write(text)


class Disk:
    """A small file system on a folder, which can be filled. Only this process and its descendants see it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._filler = os.path.join(folder, "filler")
        self.there = False
        try:
            _check(_libc.unshare(_CLONE_NEWNS), "unshare")
            _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
            options = b"size=%d" % DISK
            _check(_libc.mount(b"injector", os.fsencode(folder), b"tmpfs", 0, options), "mount")
            self.there = True
        except OSError:
            return

    def fill(self, pages: int) -> bool:
        """Fill it until ``pages`` pages are free. Returns whether that is possible."""
        if not self.there:
            return False
        free = os.statvfs(self._folder)
        fd = os.open(self._filler, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # somebody writes meanwhile, and it is full before we have ours
                os.posix_fallocate(fd, 0, max(1, free.f_bavail * free.f_frsize - pages * _PAGE))
        finally:
            os.close(fd)
        return True

    def lift(self) -> None:
        """Make room again."""
        with contextlib.suppress(OSError):
            os.unlink(self._filler)

    def close(self) -> None:
        """Unmount it."""
        if self.there:
            _libc.umount2(os.fsencode(self._folder), _MNT_DETACH)


def own_user(command: Sequence[str]) -> list[str]:
    """A command that runs ``command`` in a user namespace of its own, which allows no inotify."""
    script = 'echo 0 >/proc/sys/user/max_inotify_instances; exec "$@"'
    return ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", *command]


def can_have_own_user() -> bool:
    """Whether this machine lets us make user namespaces."""
    pid = os.fork()
    if pid == 0:
        os._exit(_libc.unshare(_CLONE_NEWUSER) != 0)
    return os.waitpid(pid, 0)[1] == 0


# --- who reads


class Ends:
    """The launcher's console: the end that it writes to, and ours, which is read as `plan.Reader` says."""

    TURN = 400
    """Bytes that a slow reader takes at a time."""
    EVERY = 0.02
    """Seconds between two times."""
    MOST = 64 << 20
    """Bytes that are kept."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.data = bytearray()
        if reader.terminal:
            self.ours, self.theirs = pty.openpty()
            tty.setraw(self.theirs)
        else:
            self.ours, self.theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.ours, False)

    def take(self, most: int = 1 << 16) -> bool:
        """Read what is there. Returns whether there may be more to come."""
        if self.ours < 0:
            return False
        try:
            data = os.read(self.ours, most)
        except BlockingIOError:
            return True
        except OSError as error:  # a terminal that nobody has open for writing
            if error.errno != errno.EIO:
                raise
            data = b""
        if len(self.data) < self.MOST:
            self.data += data
        return bool(data)

    def drain(self) -> None:
        """Read what is left. Nobody writes any more."""
        while self.ours >= 0 and select.select((self.ours,), (), (), 0)[0] and self.take():
            pass

    def let_go(self) -> None:
        """Close the launcher's end here: it has its own."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def leave(self) -> None:
        """Close ours."""
        if self.ours >= 0:
            os.close(self.ours)
            self.ours = -1

    def close(self) -> None:
        """Close both."""
        self.let_go()
        self.leave()
