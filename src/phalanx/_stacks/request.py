"""Asks one process for its stacks by a signal that it has offered, and reads the dump that its handler writes.

Owns which process may be asked (one that handles the signal now; any other would be ended by it), on which of its two
signals, how the end of a dump is recognised, and what is reported of a process that shows none. Does not wait. The
other way to look at a process is `py_spy`.

The offer stands in a file that others than the process may have written. So it counts only if the file belongs to us,
to root or to the process's own user; if the process has that very file open as the descriptor that the file names; and
for a signal that can be its stack signal: a real-time one, SIGUSR1, SIGUSR2, or that of its environment.

A dump is many small writes to a file, the last of which looks like any other. It is complete when the process no longer
handles the signal: in its handler the kernel has the signal blocked (SigBlk of proc_pid_status(5)), unless another
thread than the main one has taken it, which happens where the main thread blocks it. Then the dump is complete
when nothing more has come for a while.

At the end, what the kernel tells of a process: facts, for one that shows no stack; and which one does the work of a
worker, which may only wait for a process below it (``sh run.sh``, ``numactl``).
"""

from __future__ import annotations

import os
import signal

from phalanx._base import clock, files, procfs
from phalanx._base.frozen import Value
from phalanx._base.process import Process
from phalanx._base.text import how_many
from phalanx._evidence.describe import decode_dump
from phalanx._evidence.stack_signals import STACK_SIGNAL_ENV, last_offer, stacks_path
from phalanx._stacks.dump import GONE, MAIN_ALONE, NO_STACK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container

_LIMIT = 4 << 20  # bytes of a dump: 100 threads of 100 frames, faulthandler's own limits, are below 2 MiB
_FEW = 64  # threads: to look at more of them takes longer than to read them from outside
_QUIET = 0.005  # seconds
_ASLEEP = 0.02  # seconds for which a thread has slept that will hardly wake up before a signal reaches it
_CUT = b"\n...\n"  # how faulthandler ends a dump of more than 100 threads, of which it has shown the newest
_OFFERS_NONE = "it offers none"
_NO_PYTHON = "py-spy: Failed to find python version"  # how `PySpy.why` begins when the process is no Python
_MOST_ENVIRONMENT = 1 << 20  # bytes of an environment in which a variable is looked for
_COMMON = (signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
STATES = {
    "Z": GONE,
    "X": GONE,
    "T": "it is stopped, by SIGSTOP or a debugger",
    "t": "it is stopped, by SIGSTOP or a debugger",
    "D": "it is in an uninterruptible sleep",
}
"""What is reported of a process in a state of proc_pid_status(5) in which it runs no handler."""


class Target(Value):
    """A process whose stacks are wanted.

    Attributes:
        key: Its key in the result.
        pid: Its pid, which is still its own: the caller is its parent, or holds a pidfd.
        error_file: The error file of its environment, beside which it writes its stacks.
        doomed: Whether it is about to be killed: then the signal that shows all of its threads is sent, which can harm
            it. Else it is read from outside, and only if that fails it is sent the one that shows one thread.
        native: Whether frames of C code are wanted as well.
        process: The process, held by the caller for as long as the collection lasts; None: it is opened.
        send: Sends it a signal; may raise OSError. Default: `Process.signal`.
    """

    key: int
    pid: int
    error_file: str
    doomed: bool = False
    native: bool = False
    process: Process | None = None
    send: Callable[[int], object] | None = None


class NotAskedError(Exception):
    """The process is sent no signal. The message is why, with "it" for the process."""


class BusyError(NotAskedError):
    """The process is sent no signal now, because it runs: it may be asked once it sleeps."""


class StackRequest:
    """One process: the signal that it was sent, and what it has written so far.

    Attributes:
        process: The process, held; None before `open` and after `close`.
        path: The file that its handler writes to; "" if there is none.
        signals: The signals that it offers, on which it writes one thread, and all of them; 0 for none.
        shared: Whether its file is that of the process that has forked it: their dumps would mix, so it is not asked.
        waits: Whether a dump is being waited for.
        text: The dump, or what was read from outside, once it is complete; else None.
        alone: Whether that is of one thread alone.
        why: Why there is no dump.
        unread: Why it could not be read from outside.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.path = ""
        self.process = target.process
        self.signals = (0, 0)
        self.shared = False
        self.number = 0
        self.waits = False
        self.text: str | None = None
        self.alone = False
        self.native_frames = ""
        self.why = ""
        self.unread = ""
        self._seen: list[tuple[str, str]] = []  # what its threads did when it was seen to do something else
        self._seen_at = 0.0  # and when that was: seconds, monotonic
        self._offset = 0  # of the file, where the dump begins
        self._blocks = False  # whether the main thread blocks the signal
        self._written = b""
        self._grown_at = 0.0  # seconds, monotonic

    def open(self) -> Process:
        """Take hold of the process, and read its offer. Raises NotAskedError: there is no such process; OSError."""
        if self.process is None:
            try:
                self.process = Process(self.target.pid)
            except ProcessLookupError:
                raise NotAskedError(GONE) from None
        if self.state() == GONE:
            raise NotAskedError(GONE)
        self.why = _OFFERS_NONE
        if self.target.error_file:
            self._read_offer()
        if not self.target.doomed:
            self._is_asleep()  # from when on that counts
        return self.process

    def _read_offer(self) -> None:
        for pid in (self.target.pid, 0):
            path = stacks_path(self.target.error_file, pid)
            try:
                owners = {os.geteuid(), files.ROOT, os.stat(f"/proc/{self.target.pid}").st_uid}
                first, second, fd, author = last_offer(_contents(path, owners=owners))
            except OSError:
                continue
            if not first:
                continue
            foreign = [number for number in (first, second) if number and not self._may_be_stack_signal(number)]
            if foreign:
                self.why = f"it offers them on signal {foreign[0]}, which is not its stack signal"
            elif self._has_open(path, fd):
                # Its pid in our pid namespace and in its own (NSpid of proc_pid_status(5)).
                pids = [str(self.target.pid), *procfs.status(self.target.pid).get("NSpid", "").split()]
                self.shared = str(author) not in pids
                self.path, self.signals, self.why = "" if self.shared else path, (first, second), ""
                return
            else:
                self.why = "it offers none itself"

    def _may_be_stack_signal(self, number: int) -> bool:
        if number in _COMMON:
            return True
        try:
            found = files.read(f"/proc/{self.target.pid}/environ", _MOST_ENVIRONMENT)
        except OSError:
            return False
        return f"{STACK_SIGNAL_ENV}={number}".encode() in found.split(b"\0")

    def _has_open(self, path: str, fd: int) -> bool:
        """Whether it has the file open as descriptor ``fd``: else the dump would go to another file."""
        try:
            mine, theirs = os.lstat(path), os.stat(f"/proc/{self.target.pid}/fd/{fd}")
        except PermissionError:  # it has become undumpable (PR_SET_DUMPABLE), which does no harm
            return True
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)

    def sleeps(self) -> bool:
        """Whether all of its threads sleep, which are few enough to be looked at."""
        found = procfs.threads(self.target.pid, _FEW + 1)
        return len(found) <= _FEW and _asleep(found)

    def _is_asleep(self) -> bool:
        """Whether the thread that will take the signal has slept for a while, as far as it was looked at."""
        found = procfs.threads(self.target.pid, _FEW if self._blocks else 1)
        if found != self._seen:
            self._seen, self._seen_at = found, clock.now()
        return _asleep(found) and clock.now() - self._seen_at >= _ASLEEP

    def send(self, *, all_threads: bool) -> None:
        """Send the signal on which it writes all its threads, or one. Raises NotAskedError, BusyError, OSError.

        A process that is to go on is asked while the thread that will take the signal (the main thread, or any, where
        that one blocks it) sleeps, and has done so for some time: it is in a system call then, and its frames are
        consistent. In the midst of a line of Python they may not be, and the handler that reads them ends the process
        by SIGSEGV: once in some hundred to some thousand times. One that only naps may wake up between the look and the
        signal.
        """
        number = (all_threads and self.signals[1]) or self.signals[0]
        if not number:
            raise NotAskedError(self.why)
        if self.shared:
            raise NotAskedError("it would write into the file of the process that has forked it")
        self._offset = os.stat(self.path).st_size
        found = procfs.status(self.target.pid)  # as late as can be
        if not found:
            raise NotAskedError(self.state() or "its state cannot be read")
        bit = 1 << number - 1
        state = _state(found)
        if state in STATES and state != "D":  # in that sleep the signal is kept until it wakes
            raise NotAskedError(STATES[state])
        if not procfs.signal_set(found, "SigCgt") & bit:
            raise NotAskedError(f"it does not handle signal {number}, on which it has offered one")
        self._blocks = bool(procfs.signal_set(found, "SigBlk") & bit)
        if not (self.target.doomed or self._is_asleep()):
            raise BusyError("it is running, and is only asked while it sleeps")
        self.number, self.waits, self._written, self._grown_at = number, True, b"", clock.now()
        try:
            if self.target.send is not None:
                self.target.send(number)
            else:
                assert self.process is not None
                self.process.signal(number)
        except BaseException as error:
            self.waits = False
            if isinstance(error, ProcessLookupError):
                raise NotAskedError(GONE) from None
            raise

    def poll(self) -> bool:
        """Read what has been written. Returns whether to poll again soon although nothing more may be written."""
        written = self._read()
        if len(written) != len(self._written):
            self._written, self._grown_at = written, clock.now()
        if not written.endswith(b"\n"):
            return False
        found = procfs.status(self.target.pid)
        bit = 1 << self.number - 1
        if (procfs.signal_set(found, "SigPnd") | procfs.signal_set(found, "ShdPnd")) & bit:
            return True
        if not self._blocks and procfs.signal_set(found, "SigBlk") & bit:
            return True
        self._written = self._read()  # the handler may have written until it was seen to have returned
        dump = last_dump(self._written)
        # The main thread comes last; if it blocks the signal, another has taken it.
        by_main = self._to_one or dump.rfind(b"Current thread 0x") == dump.rfind(b"hread 0x") - 9 >= 0
        if (self._blocks or not by_main) and clock.now() - self._grown_at < _QUIET:
            return True
        self._take(dump)
        return False

    def exited(self) -> None:
        """Take what it has written, after its end: there will be no more."""
        if self.waits:
            self._take(last_dump(self._read()))
            self.why = GONE

    @property
    def is_cut(self) -> bool:
        """Whether the dump ends before all threads have been shown, the main thread among them."""
        return self.text is not None and self.text.endswith(_CUT.decode())

    @property
    def is_seen(self) -> bool:
        """Whether its text is complete: of all its threads, or of the one that took the signal."""
        return self.text is not None and not self.is_cut

    def result(self) -> str:
        """Its stacks as far as they are there; or a line ``# no Python stack: `` with the reason, and `facts`."""
        text = self.text
        if text is not None and self.alone:
            text = f"# {MAIN_ALONE} ({self.unread or 'there was no time for py-spy'})\n{text}"
        if text is None and self.waits:
            dump = last_dump(self._written)
            self.why = self.state() or ("its dump is not complete" if dump else "it has not answered in time")
            text = decode_dump(dump) or None
            if text is not None:
                text = f"# {self.why}\n{text}"
        if text is None:
            why = self.why if self.why == GONE else self.state() or self.why or "there was no time to ask it"
            if why == _OFFERS_NONE and self.unread.startswith(_NO_PYTHON):
                why = "it is no Python program"
            elif self.unread and why != GONE:
                why = f"{why}; {self.unread}"
            text = f"{NO_STACK}{why}\n{facts(self.target.pid)}"
        return f"{text.rstrip()}\n\nnative frames (py-spy):\n{self.native_frames}" if self.native_frames else text

    def state(self) -> str:
        """Why a process in its state runs no handler; "" if it may run one."""
        found = procfs.status(self.target.pid)
        if not found and os.path.exists(f"/proc/{self.target.pid}"):  # no descriptor is left to read it
            return ""
        return STATES.get(_state(found), "")

    def close(self) -> None:
        """Close the pidfd, if it is ours. Idempotent."""
        if self.process is not None and self.target.process is None:
            self.process.close()
        self.process = None

    @property
    def _to_one(self) -> bool:
        """Whether it was sent the signal on which it writes one thread."""
        return self.number == self.signals[0]

    def _take(self, dump: bytes) -> None:
        self.waits = False
        if dump:
            text = decode_dump(dump)
            if self.text is not None:  # a dump that was cut, and now the main thread, which it lacks
                text = f"{self.text}\n{text}"
            else:
                self.alone = self._to_one
            self.text = text

    def _read(self) -> bytes:
        """What has been written since the signal was sent."""
        try:
            return _contents(self.path, self._offset)
        except OSError:
            return self._written


def _asleep(threads: list[tuple[str, str]]) -> bool:
    return {"S", "D"}.issuperset(state for state, _ in threads)


def _state(found: dict[str, str]) -> str:
    """The state of proc_pid_status(5), one letter. A process that a py-spy has paused to read it counts as R."""
    state = found.get("State", "Z")[0]
    if state == "t":
        return "R" if procfs.read(f"/proc/{found.get('TracerPid')}/comm") == b"py-spy\n" else state
    return state


def last_dump(data: bytes) -> bytes:
    """Cut the last of several dumps out, should others have asked as well.

    A thread's header begins a dump where no empty line precedes it.
    """
    lines = data.splitlines(keepends=True)
    start = 0
    for index, line in enumerate(lines):
        if line.startswith((b"Thread 0x", b"Current thread 0x", b"Stack (")) and (
            index == 0 or lines[index - 1] != b"\n"
        ):
            start = index
    return b"".join(line for line in lines[start:] if not line.startswith(b"# "))


def _contents(path: str, offset: int = 0, owners: Container[int] | None = None) -> bytes:
    """Read at most `_LIMIT` bytes from ``offset`` on, of a file of one of the ``owners``. Raises OSError."""
    return files.read(path, _LIMIT, offset, owners=owners)


MOST_THREADS = 64
"""Threads of a process that are looked at."""

_DEEPEST = 4  # wrappers, one in another
_STATUS = ("Name", "State", "PPid", "Threads", "VmRSS", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")


def facts(pid: int) -> str:
    """Describe a process, in lines that end with a newline; "" if it may not be read, or is gone. Never raises.

    From /proc/PID/status a few lines; and of each thread (64 at the most) its state, ``wchan``, ``syscall`` and
    ``stack``, see proc_pid_wchan(5), proc_pid_syscall(5) and proc_pid_stack(5).
    """
    status = procfs.status(pid)
    if not status:
        return ""
    lines = [f"{name}: {status[name]}" for name in _STATUS if name in status]
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        tasks = []
    for task in tasks[:MOST_THREADS]:
        folder = f"{pid}/task/{task}"
        thread = procfs.status(folder)
        line = f"thread {task} ({thread.get('Name', '?')}): {thread.get('State', '?')}"
        for name in ("wchan", "syscall"):
            text = _proc_text(folder, name).strip()
            if text and text != "0":
                line += f", {name} {text}"
        lines.append(line)
        lines += [f"  {frame}" for frame in _proc_text(folder, "stack").splitlines()]
    if len(tasks) > MOST_THREADS:
        lines.append(f"... and {how_many(len(tasks) - MOST_THREADS, 'more thread')}")
    return "\n".join(lines) + "\n"


def _proc_text(folder: str, name: str) -> str:
    return procfs.read(f"/proc/{folder}/{name}").decode("utf-8", "replace")


def working_process(pid: int) -> int:
    """Find the process whose stacks tell of the worker ``pid``: itself, or the one below it. Never raises.

    It is one below where the worker is no Python program, has a single child, and that child is the same user's (it is
    not below ``sudo``).
    """
    for _ in range(_DEEPEST):
        try:
            if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                break
            below = procfs.children(pid)
        except OSError:
            break
        if len(below) != 1 or not _have_one_owner(pid, below[0]):
            break
        (pid,) = below
    return pid


def _have_one_owner(*pids: int) -> bool:
    try:
        return len({os.stat(f"/proc/{pid}").st_uid for pid in pids}) == 1
    except OSError:
        return False
