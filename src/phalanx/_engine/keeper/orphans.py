"""What is noted of the processes that workers left behind: rank, command, age, and how each was ended.

A process that outlives its worker becomes the keeper's child. Owns what is written down of it before it is signalled,
for the report. Signals no process.
"""

from __future__ import annotations

import os
import time

from phalanx._base import procfs
from phalanx._engine import protocol
from phalanx._engine.keeper.proc_memory import COMMAND, MAPPED, VARIABLE, MemoryReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST = 64
"""Processes that are described. Those beyond are counted: a look at one takes 0.1 ms."""

_ERROR_FILE = b"TORCHELASTIC_ERROR_FILE"
_LOOK = 0.2  # seconds for all looks of one group that a process may hold up
_COMMAND = 200  # characters
_SIGTERM = 15
_SCRIPT, _BOOT = b"/phalanx/_engine/worker/script.py", b"import sys;"  # in the command lines of workers


class _Orphan(protocol.Orphan):
    __slots__ = ("ignores",)

    def __init__(self, pid: int, rank: int) -> None:
        super().__init__(pid, rank, "?", 0.0, 0, None)
        self.ignores = False  # SIGTERM


class Orphans:
    """The processes that one group's workers left behind.

    Args:
        keeper: The pid of the process that forked the workers, see `protocol.worker_page`.
        workers: By pid, the rank of each worker, and the path of its error file as its environment has it.
    """

    def __init__(self, keeper: int, workers: dict[int, tuple[int, bytes | None]]) -> None:
        self.beyond = 0
        """How many were signalled and have ended, and are not described."""
        # Every worker leads a session; its pid stays taken while that has a member.
        self._sessions = {pid: rank for pid, (rank, _path) in workers.items()}
        self._error_files = {path: rank for rank, path in workers.values() if path}
        self._reader = MemoryReader(_ERROR_FILE, protocol.worker_page(keeper, 0)[:-2].encode(), _LOOK)
        self._shown = procfs.is_shown()  # else /proc tells of others, or of nobody
        self._left: list[_Orphan] = []
        self._living: dict[int, _Orphan] = {}  # those of them that have not been reaped
        self._unwritten: set[int] = set()  # those that are counted only
        self._sent: dict[int, int] = {}  # the last signal that each living process was sent by the sweep

    @property
    def readers(self) -> set[int]:
        """Children that are the reader's forks."""
        return self._reader.forks

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
        """Note that each of these processes is about to be sent a signal: ``numbers`` by pid."""
        # Workers are reported by their exits.
        fresh = [pid for pid in numbers if pid not in self._sent and pid not in self._sessions]
        room = MOST - len(self._left)
        for left in self._look(fresh[:room]):
            self._living[left.pid] = left
            self._left.append(left)
        self._unwritten.update(fresh[room:])
        self._sent.update(numbers)
        for pid, number in numbers.items():
            if pid in self._living:
                self._living[pid].signal = number

    def waiting(self, pids: list[int]) -> list[tuple[Any, ...]]:
        """Describe processes that are not signalled yet: packed `protocol.Orphan`."""
        return [left.pack() for left in self._look(pids)]

    def ended(self, pid: int, status: int) -> None:
        """Note that a process has been reaped."""
        self._reader.forks.discard(pid)
        left = self._living.pop(pid, None)
        self._sent.pop(pid, 0)
        if pid in self._unwritten:
            self._unwritten.remove(pid)
            self.beyond += 1
        if left is not None:
            left.status = status
            # A resource tracker, for one: it ended by itself.
            if left.ignores and left.signal == _SIGTERM and not os.WIFSIGNALED(status):
                self._left.remove(left)

    def abandon(self) -> None:
        """Note who has died, for none will be reaped: a parent that does not die keeps its zombies."""
        for pid, left in self._living.items():
            if self._glance(pid) is None:
                left.status = left.signal

    def entries(self) -> list[tuple[Any, ...]]:
        """Describe those that were signalled, in that order: packed `protocol.Orphan`."""
        return [left.pack() for left in self._left]

    def _look(self, pids: list[int]) -> list[_Orphan]:
        """Describe those of these processes that have not exited."""
        found = [left for left in map(self._glance, pids) if left is not None]
        unplaced = [left for left in found if left.rank < 0]
        wanted = [(left.pid, COMMAND) for left in found if left.command != "?"]
        wanted += [(left.pid, kind) for left in unplaced for kind in (VARIABLE, MAPPED)]
        seen = self._reader.read(wanted) if self._shown else {}
        for left in found:
            words = seen.get((left.pid, COMMAND), b"").rstrip(b"\0").split(b"\0")
            words = _of_the_program(words)
            words[0] = words[0].rpartition(b"/")[2]  # the program: its folders may be longer than a line
            left.command = b" ".join(words).decode("utf-8", "replace")[:_COMMAND] or left.command
        for left in unplaced:  # by its worker's environment; or by its worker's memory, which it is a fork of
            mapped = seen.get((left.pid, MAPPED), b"").partition(b"-")[0]
            left.rank = int(mapped) if mapped.isdigit() else -1
            left.rank = self._error_files.get(seen.get((left.pid, VARIABLE), b""), left.rank)
        return found

    def _glance(self, pid: int) -> _Orphan | None:
        """Describe a process without a look into its memory. None: it has exited."""
        left = _Orphan(pid, -1)
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


def _of_the_program(words: list[bytes]) -> list[bytes]:
    """Leave out of a command line by what Phalanx has started a worker: a fork of it has the same.

    >>> _of_the_program([b"/bin/python", b"-u", b"/x/phalanx/_engine/worker/script.py", b"train.py", b"1"])
    [b'/bin/python', b'train.py', b'1']
    >>> _of_the_program([b"/bin/python", b"-c", b"import sys;std=getattr(sys.modules['encodings'],'__file__','')"])
    [b'/bin/python, forked by its worker']
    """
    for at, word in enumerate(words):
        if _SCRIPT in word:  # the file, or the code that runs it out of a zip file
            return [words[0], *words[at + 1 :]]
        if word.startswith(_BOOT) and b"modules['encodings']" in word:
            return [words[0] + b", forked by its worker"]
    return words
