"""One process, asked for its stacks.

Owns who may be asked (a process that catches the signal now; to any other it would be the death), how it is seen that
a dump is complete, and what is said of a process that shows none. Knows nothing of how to wait.

A dump is many small writes to a file, the last of which looks like any other. It is complete when the process no longer
handles the signal: in its handler the kernel has the signal blocked (SigBlk of proc_pid_status(5)), unless another
thread than the main one has taken it, which happens where the main thread blocks it. Then the dump is complete
when nothing more has come for a while.
"""

from __future__ import annotations

import contextlib
import os
import signal

from phalanx._core import clock, evidence
from phalanx._core.facts import facts, mask, status
from phalanx._core.frames import NO_STACK
from phalanx._core.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._core.spy import Spy

_LIMIT = 4 << 20  # bytes of a dump: 100 threads of 100 frames, faulthandler's own limits, are below 2 MiB
_QUIET = 0.005  # seconds
_STOPPED = "it is stopped, by SIGSTOP or a debugger"
_STUCK = "it is in an uninterruptible sleep"


class Target(Value):
    """A process to be asked.

    Attributes:
        rank: What it is called in the result.
        pid: Its pid, which is still its own: the caller is its parent, or holds a pidfd.
        error_file: That of its environment, beside which its stacks are.
        send: Sends it a signal; may raise OSError. Default: through a pidfd, once it is known to be the one that has
            the file for its stacks open.
        native: Whether frames of C code are wanted as well, where py-spy is installed.
    """

    __slots__ = ("rank", "pid", "error_file", "send", "native")  # noqa: RUF023 - the order is that of the arguments

    rank: int
    pid: int
    error_file: str
    send: Callable[[int], object] | None
    native: bool

    def __init__(
        self,
        rank: int,
        pid: int,
        error_file: str,
        send: Callable[[int], object] | None = None,
        native: bool = False,  # noqa: FBT001, FBT002 - a field of the value
    ) -> None:
        self._store(rank=rank, pid=pid, error_file=error_file, send=send, native=native)


class Refused(Exception):  # noqa: N818 - it is an answer, and no error
    """The process is not asked. The message says why, as of ``it``."""


class Ask:
    """One process: what it has been asked, and what it has said so far."""

    __slots__ = ("blocks", "grown", "number", "offset", "path", "pidfd", "said", "spy", "target", "text", "why")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.path = evidence.stacks_path(target.error_file) if target.error_file else ""
        self.pidfd = -1
        self.number = 0
        self.offset = 0
        self.blocks = False
        self.said = b""
        self.grown = 0.0
        self.text: str | None = None  # the dump, once it is complete
        self.why = ""  # there will be none
        self.spy: Spy | None = None

    @property
    def done(self) -> bool:
        return (self.text is not None or self.why != "") and (self.spy is None or self.spy.done)

    @property
    def waits(self) -> bool:
        return self.text is None and not self.why

    def open(self) -> None:
        """Take hold of the process, and see whether it can be asked. Raises Refused, OSError."""
        try:
            self.pidfd = os.pidfd_open(self.target.pid)
        except ProcessLookupError:
            raise Refused("it has exited") from None
        try:
            self.number, fd = evidence.offered(_contents(self.path)) if self.path else (0, -1)
        except OSError:
            self.number = fd = 0
        if not self.number:
            raise Refused(self._state() or "it offers none")
        if fd >= 0:
            with contextlib.suppress(PermissionError):  # it has become undumpable, which is no harm
                try:
                    mine, theirs = os.stat(self.path), os.stat(f"/proc/{self.target.pid}/fd/{fd}")
                except FileNotFoundError:
                    raise Refused(self._state() or "it offers none itself") from None
                if (mine.st_dev, mine.st_ino) != (theirs.st_dev, theirs.st_ino):
                    raise Refused("it offers none itself")

    def ask(self) -> None:
        """Send the signal, to a process that handles it. Raises Refused, OSError."""
        self.offset = os.stat(self.path).st_size
        found = status(self.target.pid)  # as late as can be
        if not found:
            raise Refused(self._state() or "its state cannot be read")
        bit = 1 << self.number - 1
        state = found.get("State", "Z")[0]
        if state in "ZX":
            raise Refused("it has exited")
        if state in "Tt":
            raise Refused(_STOPPED)
        if not mask(found, "SigCgt") & bit:
            raise Refused(f"it does not handle signal {self.number}, on which it has offered one")
        self.blocks = bool(mask(found, "SigBlk") & bit)
        self.grown = clock.now()
        try:
            if self.target.send is not None:
                self.target.send(self.number)
            else:
                signal.pidfd_send_signal(self.pidfd, self.number)
        except ProcessLookupError:
            raise Refused("it has exited") from None

    def look(self) -> bool:
        """Take what has been written. Returns whether to look again soon although nothing more may be written."""
        said = self.read()
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
        self.said = self.read()  # the handler may have written until it was seen to have ended
        dump = last_dump(self.said)
        # The main thread comes last; one that has the signal blocked has not taken it.
        by_main = not self.blocks and dump.rfind(b"Current thread 0x") == dump.rfind(b"hread 0x") - 9 >= 0
        if not by_main and clock.now() - self.grown < _QUIET:
            return True
        self.text = dump.decode("utf-8", "replace")
        return False

    def read(self) -> bytes:
        """What has been written since the signal was sent."""
        try:
            return _contents(self.path, self.offset)
        except OSError:
            return self.said

    def exited(self) -> None:
        """It has: what it has written by now is all there will be."""
        if self.waits:
            dump = last_dump(self.read()) if self.number else b""
            if dump:
                self.text = dump.decode("utf-8", "replace")
            else:
                self.why = "it has exited"

    def result(self) -> str:
        """What there is to say by now."""
        text = self.text
        if text is None and not self.why:
            dump = last_dump(self.said)
            self.why = self._state() or ("its dump is not complete" if dump else "it has not answered in time")
            text = dump.decode("utf-8", "replace") or None
            if text is not None:
                text = f"# {self.why}\n{text}"
        if text is None:
            text = f"{NO_STACK}{self.why}\n{facts(self.target.pid)}"
        native = self.spy.text() if self.spy is not None else ""
        return f"{text.rstrip()}\n\nnative frames (py-spy):\n{native}" if native else text

    def _state(self) -> str:
        found = status(self.target.pid)
        if not found and os.path.exists(f"/proc/{self.target.pid}"):  # no descriptor is left to read it
            return ""
        state = found.get("State", "Z")[0]
        return {"Z": "it has exited", "X": "it has exited", "T": _STOPPED, "t": _STOPPED, "D": _STUCK}.get(state, "")


def last_dump(data: bytes) -> bytes:
    """The last of several dumps, should others have asked as well. A thread's header after no empty line begins one."""
    lines = data.splitlines(keepends=True)
    start = 0
    for index, line in enumerate(lines):
        if line.startswith((b"Thread 0x", b"Current thread 0x")) and (index == 0 or lines[index - 1] != b"\n"):
            start = index
    return b"".join(line for line in lines[start:] if not line.startswith(b"# "))


def _contents(path: str, offset: int = 0) -> bytes:
    """What a file has from ``offset`` on, `_LIMIT` bytes at the most. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)  # should anybody put a FIFO there
    try:
        return os.pread(fd, _LIMIT, offset)
    finally:
        os.close(fd)
