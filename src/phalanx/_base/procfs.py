"""Reads /proc and the files of cgroups. Owns their formats (proc(5), cgroups(7)); never waits, and signals nobody.

What is read here is had from the kernel without the lock of a process's memory. Its command line, environment and maps
take that lock, and may wait for ever with a process that waits for a disk: the keeper reads them in a fork.
"""

from __future__ import annotations

import errno

from phalanx._base.linux import text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_PF_EXITING, _PF_DUMPCORE = 0x4, 0x200
_OOM_TOGETHER = 1.0  # seconds after a rise of the kernel's count in which the end of a process is put down to it


def read(path: str, most: int = -1) -> bytes:
    """Read a file of /proc, at most ``most`` bytes of it (-1: all). Returns b"" when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


# --- one process


class Stat:
    """The fields of /proc/PID/stat (proc_pid_stat(5)) that identify a process and its parent, group and session.

    Attributes:
        comm: The name of its program, at most 15 bytes long (proc_pid_comm(5)).
        start: When it started, in clock ticks after boot. Pid and start time together name one process.
        state: One letter: R, S, D, T, Z, X ...
    """

    __slots__ = ("comm", "flags", "group", "parent", "pid", "session", "start", "state")

    def __init__(self, pid: int) -> None:
        """Read them.

        Raises ProcessLookupError when there is no such process, or /proc hides it (hidepid, proc(5)); PermissionError
        when it may not be read; OSError (EMFILE) when no descriptor is left.
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

    @property
    def exiting(self) -> bool:
        """Whether it is exiting or dumping core, or is a zombie."""
        return bool(self.flags & (_PF_EXITING | _PF_DUMPCORE))

    @property
    def has_exited(self) -> bool:
        """Whether its main thread has exited and is not reaped (a zombie). Other threads of it may run on."""
        return self.state in ("Z", "X")


def lives(pid: int, start: int) -> bool:
    """Whether the process with this pid and start time exists and has not exited."""
    try:
        found = Stat(pid)
    except OSError:  # /proc may hide other users' processes (hidepid, proc(5)); kill(2) with 0 only checks
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        except OverflowError:  # no pid
            return False
        return True
    return found.start == start and not found.has_exited


def has_exited(pid: int) -> bool:
    """Whether a process has exited, reaped or not. False when no descriptor is left to look."""
    try:
        return Stat(pid).has_exited
    except ProcessLookupError:
        return True
    except OSError:
        return False


def is_exiting(pid: int) -> bool:
    """Whether a process is exiting or dumping core (PF_* of the kernel's sched.h), or is a zombie. False if unknown."""
    try:
        return Stat(pid).exiting
    except OSError:
        return False


def status(folder: int | str) -> dict[str, str]:
    """Read the fields of /proc/PID/status (or PID/task/TID): name → value. {}: it is gone, or not ours to read."""
    fields = (line.partition(":") for line in read(f"/proc/{folder}/status").decode("utf-8", "replace").splitlines())
    return {name: " ".join(value.split()) for name, _, value in fields}


def status_field(pid: int | str, name: str) -> str:
    """Read one field of /proc/PID/status, which is not the first; "" when it cannot be read."""
    text = read(f"/proc/{pid}/status").partition(f"\n{name}:".encode())[2]
    return text.partition(b"\n")[0].strip().decode()


def signal_set(fields: Mapping[str, str], name: str) -> int:
    """A set of signals of a `status` ("SigIgn", "SigCgt", ...): bit n - 1 stands for signal n. 0 if it is not there."""
    try:
        return int(fields.get(name, "0"), 16)
    except ValueError:
        return 0


def effective_uid(pid: int) -> int:
    """Read the effective user id of a process. Raises ProcessLookupError, PermissionError, OSError (EMFILE)."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Uid:"):
                    return int(line.split()[2])
    except FileNotFoundError:
        pass
    raise ProcessLookupError(errno.ESRCH, "no such process", str(pid))


def threads(pid: int, most: int) -> list[tuple[str, str]]:
    """Read of ``most`` threads of a process, the main thread's first, what each does; []: it is gone.

    Returns of each its state, a letter, and how often it has gone to sleep (voluntary_ctxt_switches of
    proc_pid_status(5)): while that stays the same, a thread that is asleep has not woken up.
    """
    tasks = [pid]
    if most > 1:
        try:
            tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda task: task != pid)
        except OSError:
            return []
    found = (status(f"{pid}/task/{task}") for task in tasks[:most])
    return [(fields.get("State", "")[:1], fields.get("voluntary_ctxt_switches", "")) for fields in found]


def environ(pid: int) -> list[bytes]:
    """Read the environment of the last exec of a process (b"NAME=value"); [] when it cannot be read."""
    return [entry for entry in read(f"/proc/{pid}/environ").split(b"\0") if entry]


# --- all processes


def processes() -> Iterator[Stat]:
    """Read every process that /proc shows."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield Stat(int(name))
            except (ProcessLookupError, PermissionError):
                continue


def usage(pids: Iterable[int] | None = None) -> dict[int, tuple[int, int, int, int]]:
    """Read what processes have used: these, or (None) each one that /proc shows.

    Returns by pid, of those that are there: its parent; its CPU time in clock ticks, with that of children that it has
    waited for; its threads; and its resident memory in pages (proc_pid_stat(5)).
    """
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pids is None else pids:
        try:
            fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # a file object would take twice as long
        except OSError:
            continue
        try:
            fields = os.read(fd, 4096).rpartition(b")")[2].split(maxsplit=22)
        except OSError:  # it has gone
            continue
        finally:
            os.close(fd)
        if fields:
            found[pid] = int(fields[1]), sum(map(int, fields[11:15])), int(fields[17]), int(fields[21])
    return found


def descriptors(pid: int) -> int | None:
    """Count the open descriptors of a process; None: it is gone, or not ours to see."""
    folder = f"/proc/{pid}/fd"
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))  # the size is their number since Linux 6.2
    except OSError:
        return None


def proportional_memory(pid: int) -> int | None:
    """Read the bytes of memory of a process, what it shares with others in proportion (PSS); None: it cannot be read.

    It takes the lock of the memory, and may wait for ever.
    """
    text = read(f"/proc/{pid}/smaps_rollup").partition(b"\nPss:")[2]
    return int(text.split(maxsplit=1)[0]) << 10 if text else None


def children(pid: int) -> list[int]:
    """List the children of ``pid``, zombies too, from the kernel's own list, or by a look at every process."""
    try:
        found = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += [int(child) for child in file.read().split()]
        return found  # noqa: TRY300 - the reading as a whole may fail
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or no such process
        return [stat.pid for stat in processes() if stat.parent == pid]


def descendants(pids: list[int], most: int) -> dict[int, int]:
    """Find the processes below ``pids`` in the kernel's own lists. Returns pid → parent, of ``most`` or some more."""
    found: dict[int, int] = {}
    parents = list(pids)
    while parents and len(found) < most:
        parent = parents.pop(0)
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:  # gone
            continue
        for task in tasks:
            fresh = [int(word) for word in read(f"/proc/{parent}/task/{task}/children").split()]
            found.update(dict.fromkeys(fresh, parent))
            parents += fresh
    return found


_shown: list[tuple[int, int]] = []  # this process, and the device of the /proc that has shown it


def is_shown() -> bool:
    """Whether /proc shows this process, by the number that it has here: it may be empty, or another namespace's.

    It costs 2 µs from the second call on: a file system keeps its number, and each namespace's /proc is another.
    """
    pid = os.getpid()
    try:
        device = os.stat("/proc/self").st_dev
    except OSError:
        return False
    if _shown == [(pid, device)]:
        return True
    for field in ("NSpid", "Pid"):  # of namespaces one in another, each has its own number
        numbers = status_field("self", field).split()
        if numbers:
            _shown[:] = [(pid, device)] if numbers == [str(pid)] else []
            return bool(_shown)
    return False


# --- this process, and the machine


def umask() -> int:
    """Read this process's umask: the system call could return it only by setting another one for a moment."""
    return int(status_field("self", "Umask") or "022", 8)


def has_capability(number: int) -> bool:
    """Whether this process has a capability (capabilities(7)), in its own user namespace at least."""
    return bool(int(status_field("self", "CapEff") or "0", 16) >> number & 1)


def boot_id() -> str:
    """Read the id of this boot of the machine; "" when it cannot be read."""
    return read("/proc/sys/kernel/random/boot_id").decode().strip()


def pid_namespace() -> str:
    """Read the name of this process's pid namespace, "pid:[NUMBER]"; "" when it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def available_memory() -> int:
    """Read the bytes of memory that can be had without swapping, as the kernel estimates it; all, if unknown."""
    for line in read("/proc/meminfo", 1 << 14).splitlines():
        if line.startswith(b"MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


# --- cgroups


def cgroup_folders(controller: str) -> Iterator[tuple[str, str]]:
    """Find the folders of this process's cgroup that may hold ``controller``'s files. Yields mount point and folder.

    Several, because in a container without a cgroup namespace the path is the host's, and the mount is already ours.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
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


def find_oom_counter() -> tuple[str, int]:
    """Find the file that counts OOM kills in this process's memory cgroup, and its count; ("", 0) if there is none.

    v2: ``oom_kill`` of memory.events; v1: ``oom_kill`` of memory.oom_control (cgroups(7), and the kernel's
    admin-guide/cgroup-v2). Both rise before the victim is sent its SIGKILL.
    """
    for _point, folder in cgroup_folders("memory"):
        for path in (f"{folder}/memory.events", f"{folder}/memory.oom_control"):
            count = oom_kills(path)
            if count is not None:
                return path, count
    return "", 0


def oom_kills(path: str) -> int | None:
    """Read the count in a file that `find_oom_counter` found; None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            for line in file:
                key, _, value = line.partition(b" ")
                if key == b"oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


class OomKills:
    """Finds the SIGKILLs that the kernel's count of OOM kills explains. Arguments: what `find_oom_counter` returned."""

    def __init__(self, path: str, count: int) -> None:
        self._path = path
        self._count = count
        self._unclaimed: list[str] = []
        self._until = 0.0

    def explain(self, now: float) -> str:
        """Describe the OOM kill that ended a process just now, or return "". A rise by two explains two ends.

        ``now`` is in seconds, monotonic.
        """
        count = oom_kills(self._path) if self._path else None
        if count is not None and count > self._count:
            text = f"OOM kill: oom_kill in {self._path} rose from {self._count} to {count}"
            self._unclaimed = [text] * (count - self._count)
            self._until = now + _OOM_TOGETHER
            self._count = count
        if now > self._until:  # a grandchild's, which no later end may claim
            self._unclaimed = []
        return self._unclaimed.pop() if self._unclaimed else ""
