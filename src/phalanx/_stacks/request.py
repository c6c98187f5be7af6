"""One process, asked for its stacks by a signal that it has offered.

Owns who may be asked so (a process that catches the signal now; to any other it would be the death), on which of its
two signals, how it is seen that a dump is complete, and what is said of a process that shows none. Knows nothing of how
to wait, and of the other way to look at a process (`spy`).

What is offered stands in a file that others than the process may have written. So it counts only if the file belongs to
us, to root or to the process' own user; if the process has that very file open as the descriptor that is named; and for
a signal that can be its stack signal: a real-time one, SIGUSR1, SIGUSR2, or that of its environment.

A dump is many small writes to a file, the last of which looks like any other. It is complete when the process no longer
handles the signal: in its handler the kernel has the signal blocked (SigBlk of proc_pid_status(5)), unless another
thread than the main one has taken it, which happens where the main thread blocks it. Then the dump is complete
when nothing more has come for a while.
"""

from __future__ import annotations

import contextlib
import os
import signal

from phalanx._base import clock, files
from phalanx._base.frozen import Value
from phalanx._evidence import evidence
from phalanx._stacks.dump import GONE, MAIN_ALONE, NO_STACK
from phalanx._stacks.proc_status import facts, mask, states, status
from phalanx._stacks.py_spy import NO_PYTHON

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container

_LIMIT = 4 << 20  # bytes of a dump: 100 threads of 100 frames, faulthandler's own limits, are below 2 MiB
_FEW = 64  # threads: to look at more of them takes longer than to read them from outside
_QUIET = 0.005  # seconds
_CUT = b"\n...\n"  # how faulthandler ends a dump of more than 100 threads, of which it has shown the newest
_SILENT = "it offers none"
_MOST_ENVIRONMENT = 1 << 20  # bytes of an environment in which a variable is looked for
_USUAL = (signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
STATES = {
    "Z": GONE,
    "X": GONE,
    "T": "it is stopped, by SIGSTOP or a debugger",
    "t": "it is stopped, by SIGSTOP or a debugger",
    "D": "it is in an uninterruptible sleep",
}
"""What is said of a process in a state of proc_pid_status(5) in which it answers nobody."""


class Target(Value):
    """A process to be asked.

    Attributes:
        key: What it is called in the result.
        pid: Its pid, which is still its own: the caller is its parent, or holds a pidfd.
        error_file: That of its environment, beside which its stacks are.
        doomed: Whether it is about to be killed: then the signal that shows all of its threads is sent, which can harm
            it. Else it is looked at from outside, and only if that fails it is sent the one that shows one thread.
        native: Whether frames of C code are wanted as well.
        pidfd: The caller's, valid as long as the collection; -1: one is opened.
        send: Sends it a signal; may raise OSError. Default: through the pidfd.
    """

    __slots__ = ("key", "pid", "error_file", "doomed", "native", "pidfd", "send")  # noqa: RUF023 - the order is that of the arguments

    key: int
    pid: int
    error_file: str
    doomed: bool
    native: bool
    pidfd: int
    send: Callable[[int], object] | None

    def __init__(
        self,
        key: int,
        pid: int,
        error_file: str,
        *,
        doomed: bool = False,
        native: bool = False,
        pidfd: int = -1,
        send: Callable[[int], object] | None = None,
    ) -> None:
        self._store(key=key, pid=pid, error_file=error_file, doomed=doomed, native=native, pidfd=pidfd, send=send)


class Refused(Exception):  # noqa: N818 - it is an answer, and no error
    """The process is not asked. The message says why, as of ``it``."""


class Busy(Refused):
    """The process is not asked now."""


class Ask:
    """One process: what it has been asked, and what it has said so far."""

    __slots__ = (
        "_held", "alone", "blocks", "extra", "grown", "number", "numbers", "offset", "path", "pidfd", "said", "shared",
        "target", "text", "unread", "waits", "why",
    )  # fmt: skip

    def __init__(self, target: Target) -> None:
        self.target = target
        self.path = ""
        self.pidfd = target.pidfd
        self.numbers = (0, 0)  # the signals that it offers: for one thread, and for all
        # Whether its file is that of the process that has forked it: their dumps would mix, so it is not asked.
        self.shared = False
        self.number = 0  # the one that it was sent
        self.offset = 0
        self.blocks = False
        self.said = b""
        self.grown = 0.0
        self.waits = False  # for what it writes
        self.text: str | None = None  # the dump, once it is complete
        self.alone = False  # whether that is of one thread alone
        self.extra = ""  # native frames
        self.why = ""  # why it shows none
        self.unread = ""  # and why it could not be read from outside
        self._held = target.pidfd >= 0

    def open(self) -> None:
        """Take hold of the process, and see what it offers. Raises Refused: there is no such process; OSError."""
        if not self._held:
            try:
                self.pidfd = os.pidfd_open(self.target.pid)
            except ProcessLookupError:
                raise Refused(GONE) from None
        if self.state() == GONE:
            raise Refused(GONE)
        self.why = _SILENT
        if not self.target.error_file:
            return
        for pid in (self.target.pid, 0):
            path = evidence.stacks_path(self.target.error_file, pid)
            try:
                first, second, fd, author = evidence.offered(_contents(path, owners=self._owners()))
            except OSError:
                continue
            if not first:
                continue
            strange = [number for number in (first, second) if number and not self._is_its_own(number)]
            if strange:
                self.why = f"it offers them on signal {strange[0]}, which is not its stack signal"
            elif self._has_open(path, fd):
                self.shared = str(author) not in self._numbers()
                self.path, self.numbers, self.why = "" if self.shared else path, (first, second), ""
                return
            else:
                self.why = "it offers none itself"

    def _owners(self) -> set[int]:
        """Whose file of stacks counts. Raises OSError: the process is gone."""
        return {os.geteuid(), files.ROOT, os.stat(f"/proc/{self.target.pid}").st_uid}

    def _is_its_own(self, number: int) -> bool:
        """Whether a signal can be the one on which it shows stacks."""
        if number in _USUAL:
            return True
        try:
            found = files.contents(f"/proc/{self.target.pid}/environ", _MOST_ENVIRONMENT)
        except OSError:
            return False
        return f"{evidence.STACK_SIGNAL_ENV}={number}".encode() in found.split(b"\0")

    def _numbers(self) -> list[str]:
        """Its pids, as we have it and as it has it itself, in a namespace of its own (NSpid of proc_pid_status(5))."""
        return [str(self.target.pid), *status(self.target.pid).get("NSpid", "").split()]

    def _has_open(self, path: str, fd: int) -> bool:
        """Whether it has a file open as the descriptor that it names: else the dump would go to another file."""
        try:
            mine, theirs = os.lstat(path), os.stat(f"/proc/{self.target.pid}/fd/{fd}")
        except PermissionError:  # it has become undumpable, which is no harm
            return True
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)

    def sleeps(self, *, everyone: bool) -> bool:
        """Whether its main thread sleeps, or all of its threads do (which are few enough to be looked at)."""
        most = _FEW if everyone else 1
        found = states(self.target.pid, most + 1) if everyone else states(self.target.pid, 1)
        return len(found) <= most and {"S", "D"}.issuperset(found)

    def ask(self, *, everyone: bool) -> None:
        """Send it the signal on which it shows all its threads, or one. Raises Refused, Busy, OSError.

        One that is to go on is asked while the thread that will answer sleeps (that is the main thread, or any, where
        that one has the signal blocked): it is in a system call then, and its frames are as they should be. In the
        midst of a line of Python they may not be, and the handler that reads them ends the process by SIGSEGV: once in
        some thousand times.
        """
        number = (everyone and self.numbers[1]) or self.numbers[0]
        if not number:
            raise Refused(self.why)
        if self.shared:
            raise Refused("it would write into the file of the process that has forked it")
        self.offset = os.stat(self.path).st_size
        found = status(self.target.pid)  # as late as can be
        if not found:
            raise Refused(self.state() or "its state cannot be read")
        bit = 1 << number - 1
        state = _state(found)
        if state in STATES and state != "D":  # who sleeps so is asked once it wakes
            raise Refused(STATES[state])
        if not mask(found, "SigCgt") & bit:
            raise Refused(f"it does not handle signal {number}, on which it has offered one")
        self.blocks = bool(mask(found, "SigBlk") & bit)
        if not (self.target.doomed or self.sleeps(everyone=self.blocks)):
            raise Busy("it is running, and is only asked while it sleeps")
        self.number, self.waits, self.said, self.grown = number, True, b"", clock.now()
        try:
            if self.target.send is not None:
                self.target.send(number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)
        except BaseException as error:
            self.waits = False
            if isinstance(error, ProcessLookupError):
                raise Refused(GONE) from None
            raise

    def look(self) -> bool:
        """Take what has been written. Returns whether to look again soon although nothing more may be written."""
        said = self._read()
        if len(said) != len(self.said):
            self.said, self.grown = said, clock.now()
        if not said.endswith(b"\n"):
            return False
        found = status(self.target.pid)
        bit = 1 << self.number - 1
        if (mask(found, "SigPnd") | mask(found, "ShdPnd")) & bit:
            return True
        if not self.blocks and mask(found, "SigBlk") & bit:
            return True
        self.said = self._read()  # the handler may have written until it was seen to have ended
        dump = last_dump(self.said)
        # The main thread comes last; one that has the signal blocked has not taken it.
        by_main = self._to_one or dump.rfind(b"Current thread 0x") == dump.rfind(b"hread 0x") - 9 >= 0
        if (self.blocks or not by_main) and clock.now() - self.grown < _QUIET:
            return True
        self._take(dump)
        return False

    def exited(self) -> None:
        """It has: what it has written by now is all there will be."""
        if self.waits:
            self._take(last_dump(self._read()))
            self.why = GONE

    @property
    def is_cut(self) -> bool:
        """Whether the dump ends before all threads have been shown, the main thread among them."""
        return self.text is not None and self.text.endswith(_CUT.decode())

    @property
    def is_seen(self) -> bool:
        """Whether it has shown something that is complete in itself: all its threads, or the one that answered."""
        return self.text is not None and not self.is_cut

    def has_been_read(self, text: str) -> None:
        """It has been, from outside: there is no better text."""
        self.text, self.alone, self.waits = text, False, False

    def result(self) -> str:
        """What there is to say by now."""
        text = self.text
        if text is not None and self.alone:
            text = f"# {MAIN_ALONE} ({self.unread or 'there was no time for py-spy'})\n{text}"
        if text is None and self.waits:
            dump = last_dump(self.said)
            self.why = self.state() or ("its dump is not complete" if dump else "it has not answered in time")
            text = dump.decode("utf-8", "replace") or None
            if text is not None:
                text = f"# {self.why}\n{text}"
        if text is None:
            why = self.why if self.why == GONE else self.state() or self.why or "there was no time to ask it"
            if why == _SILENT and self.unread.startswith(NO_PYTHON):
                why = "it is no Python program"
            elif self.unread and why != GONE:
                why = f"{why}; {self.unread}"
            text = f"{NO_STACK}{why}\n{facts(self.target.pid)}"
        return f"{text.rstrip()}\n\nnative frames (py-spy):\n{self.extra}" if self.extra else text

    def state(self) -> str:
        """Why a process in its state answers nobody; ``""`` if it may."""
        found = status(self.target.pid)
        if not found and os.path.exists(f"/proc/{self.target.pid}"):  # no descriptor is left to read it
            return ""
        return STATES.get(_state(found), "")

    def close(self) -> None:
        """Give the descriptor back, if it is ours. Idempotent."""
        if self.pidfd >= 0 and not self._held:
            os.close(self.pidfd)
        self.pidfd = -1

    @property
    def _to_one(self) -> bool:
        """Whether it was sent the signal that shows one thread."""
        return self.number == self.numbers[0]

    def _take(self, dump: bytes) -> None:
        self.waits = False
        if dump:
            text = dump.decode("utf-8", "replace")
            if self.text is not None:  # a dump that was cut, and now the thread that it lacks
                text = f"{self.text}\n{text}"
            else:
                self.alone = self._to_one
            self.text = text

    def _read(self) -> bytes:
        """What has been written since the signal was sent."""
        try:
            return _contents(self.path, self.offset)
        except OSError:
            return self.said


def _state(found: dict[str, str]) -> str:
    """The state of proc_pid_status(5), one letter. Who is only paused by a py-spy, which is reading it, runs (R)."""
    state = found.get("State", "Z")[0]
    if state == "t":
        with contextlib.suppress(OSError), open(f"/proc/{found.get('TracerPid')}/comm", "rb") as file:
            return "R" if file.read() == b"py-spy\n" else state
    return state


def last_dump(data: bytes) -> bytes:
    """The last of several dumps, should others have asked as well. A thread's header after no empty line begins one."""
    lines = data.splitlines(keepends=True)
    start = 0
    for index, line in enumerate(lines):
        if line.startswith((b"Thread 0x", b"Current thread 0x", b"Stack (")) and (
            index == 0 or lines[index - 1] != b"\n"
        ):
            start = index
    return b"".join(line for line in lines[start:] if not line.startswith(b"# "))


def _contents(path: str, offset: int = 0, owners: Container[int] | None = None) -> bytes:
    """What a file of one of the ``owners`` has from ``offset`` on, `_LIMIT` bytes at the most. Raises OSError."""
    return files.contents(path, _LIMIT, offset, owners=owners)
