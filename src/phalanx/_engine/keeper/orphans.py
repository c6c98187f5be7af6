"""What workers leave behind: whose it is, what it is, and how it was ended. Runs in the keeper.

A process that a worker started and that outlives it becomes the keeper's child. Owns what is written down of it before
it is signalled, for the person who finds it gone. Signals nobody.
"""

from __future__ import annotations

import os
import time

from phalanx._base import procfs
from phalanx._engine.keeper.proc_memory import COMMAND, MAPPED, VARIABLE, Peek
from phalanx._engine.keeper.start_process import page

MOST = 64
"""Processes of which all is written down. Those beyond are counted: to look at one takes 0.1 ms."""

_ERROR_FILE = b"TORCHELASTIC_ERROR_FILE"
_LOOK = 0.2  # seconds for all looks of one group that a process may hold up
_COMMAND = 200  # characters
_SIGTERM = 15

Entry = tuple[int, int, str, float, int, "int | None"]
"""Of one process: pid, local rank (-1: not known), command line, age in seconds when it was first signalled, the last
signal that it was sent (0: none), and its wait status (None: it is still there)."""


class _Left:
    __slots__ = ("age", "command", "ignores", "number", "pid", "rank", "status")

    def __init__(self, pid: int, rank: int) -> None:
        self.pid = pid
        self.rank = rank
        self.number = 0
        self.status: int | None = None
        self.command, self.age, self.ignores = "?", 0.0, False

    @property
    def entry(self) -> Entry:
        """All of it but whether it ignores SIGTERM."""
        return self.pid, self.rank, self.command, self.age, self.number, self.status


class Remains:
    """The processes that one group's workers left behind.

    Args:
        keeper: The pid of who has forked workers, see `starting.page`.
        workers: By pid, the rank of each worker, and the path of its error file as its environment has it.
    """

    def __init__(self, keeper: int, workers: dict[int, tuple[int, bytes | None]]) -> None:
        self.beyond = 0
        """How many were signalled, and have ended, of which nothing is written down."""
        # Every worker leads a session; its pid stays taken while that has a member.
        self._sessions = {pid: rank for pid, (rank, _path) in workers.items()}
        self._error_files = {path: rank for rank, path in workers.values() if path}
        self._peek = Peek(_ERROR_FILE, page(keeper, 0)[:-2].encode(), _LOOK)
        self._shown = procfs.is_shown()  # else /proc tells of others, or of nobody
        self._left: list[_Left] = []
        self._living: dict[int, _Left] = {}  # those of them that have not been reaped
        self._unwritten: set[int] = set()  # those for which there was no room
        self._sent: dict[int, int] = {}  # the last signal that each living process was sent by the sweep

    @property
    def own(self) -> set[int]:
        """Children that only look at others."""
        return self._peek.forks

    def in_session(self, pid: int) -> bool:
        """Whether a process is still in the session of a worker."""
        try:
            return os.getsid(pid) in self._sessions
        except OSError:  # it has just gone
            return False

    def sent(self, pid: int) -> int:
        """The signal that a process was sent last, or 0."""
        return self._sent.get(pid, 0)

    def note(self, numbers: dict[int, int]) -> None:
        """Each of these processes is about to be sent a signal."""
        # Of a worker, its exit tells.
        fresh = [pid for pid in numbers if pid not in self._sent and pid not in self._sessions]
        room = MOST - len(self._left)
        for left in self._look(fresh[:room]):
            self._living[left.pid] = left
            self._left.append(left)
        self._unwritten.update(fresh[room:])
        self._sent.update(numbers)
        for pid, number in numbers.items():
            if pid in self._living:
                self._living[pid].number = number

    def waiting(self, pids: list[int]) -> list[Entry]:
        """What there is to be told of processes that are waited for, and not signalled yet."""
        return [left.entry for left in self._look(pids)]

    def ended(self, pid: int, status: int) -> None:
        """A process has been reaped."""
        self._peek.forks.discard(pid)
        left = self._living.pop(pid, None)
        self._sent.pop(pid, 0)
        if pid in self._unwritten:
            self._unwritten.remove(pid)
            self.beyond += 1
        if left is not None:
            left.status = status
            # A resource tracker, say: it went by itself.
            if left.ignores and left.number == _SIGTERM and not os.WIFSIGNALED(status):
                self._left.remove(left)

    def abandon(self) -> None:
        """Nobody else will be reaped: whoever has died is the child of one that does not."""
        for pid, left in self._living.items():
            if self._glance(pid) is None:
                left.status = left.number

    def entries(self) -> list[Entry]:
        """Those that were signalled, in the order in which they were."""
        return [left.entry for left in self._left]

    def _look(self, pids: list[int]) -> list[_Left]:
        """Write down what these are, but for those that have exited."""
        found = [left for left in map(self._glance, pids) if left is not None]
        unplaced = [left for left in found if left.rank < 0]
        wanted = [(left.pid, COMMAND) for left in found if left.command != "?"]
        wanted += [(left.pid, kind) for left in unplaced for kind in (VARIABLE, MAPPED)]
        seen = self._peek.read(wanted) if self._shown else {}
        for left in found:
            words = seen.get((left.pid, COMMAND), b"").rstrip(b"\0").replace(b"\0", b" ")
            left.command = words.decode("utf-8", "replace")[:_COMMAND] or left.command
        for left in unplaced:  # by the environment, which it has from its worker; or by the memory that it is a fork of
            mapped = seen.get((left.pid, MAPPED), b"").partition(b"-")[0]
            left.rank = int(mapped) if mapped.isdigit() else -1
            left.rank = self._error_files.get(seen.get((left.pid, VARIABLE), b""), left.rank)
        return found

    def _glance(self, pid: int) -> _Left | None:
        """What can be told without a look into its memory. None: it has exited."""
        left = _Left(pid, -1)
        try:
            left.rank = self._sessions.get(os.getsid(pid), -1)
            stat = procfs.Stat(pid if self._shown else 0)
        except OSError:  # hidden (hidepid, proc(5)): not gone, for it has not been reaped
            return left
        if stat.has_exited:
            return None
        left.command = stat.comm
        left.age = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start / os.sysconf("SC_CLK_TCK"))
        left.ignores = bool(procfs.signal_set(procfs.status(pid), "SigIgn") >> (_SIGTERM - 1) & 1)
        return left
