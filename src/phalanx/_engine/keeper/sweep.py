"""Ends what workers left behind: finds the orphans among the keeper's children, and signals them.

Owns the search, and the record of what was ended: rank, command, age, and how. Signals children alone, which keep their
pids until they are reaped, or processes below them by pidfd. Loaded shortly after the keeper got up, see `guard.BUSY`.
"""

from __future__ import annotations

import marshal
import os
import resource  # noqa: F401 - what wait4(2) returns is one of its types, and would import it at the first exit
import select
import time

from phalanx._base import clock, linux, procfs
from phalanx._base.process import Process
from phalanx._engine import protocol
from phalanx._engine.keeper.children import send
from phalanx._engine.lifecycle import PATIENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, NoReturn

    from phalanx._base.loop import Loop
    from phalanx._engine.keeper.children import Children
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms

UNFOUND = 0, "", ""
"""What stands for children that could not be found, in `Sweep.abandon`."""

_BELOW = 512  # processes below children that are looked at in one turn


class Sweep:
    """The orphans of one group.

    ``now`` returns the group's state, and the pid of the log writer, which is spared (0: there is none). ``see`` is
    called with EMPTY when no child but the log writer is left.
    """

    def __init__(
        self, children: Children, loop: Loop, now: Callable[[], tuple[str, int]], see: Callable[[str], None]
    ) -> None:
        self._children = children
        self._loop = loop
        self._now = now
        self._see = see
        self._orphans = Orphans(children.forker, children.error_files)
        self._searching = False  # there may be children that /proc does not show, and that no scan has found yet
        self._search_due = False
        self._scan: ChildScan | None = None
        # How many children had been reaped when this round of the scan began; and when the last one began.
        self._scan_began = self._scanned = -1

    def look(self) -> None:
        """See EMPTY if nobody is left. Else signal what is left as the state demands, and search for more."""
        state, _spared = self._now()
        left = self._find()
        if not left and not self._searching:
            self._see("EMPTY")
        elif state != "LINGERING":
            if left:
                self._signal(left, purge=state == "PURGING", kill=state == "KILLING")
            if self._searching and not self._search_due:
                self._search_due = True
                self._loop.call(self._go_on)

    def _go_on(self) -> None:
        """Search for what /proc does not show, a little at a time; PATIENCE lies between two rounds."""
        self._search_due = False
        if self._now()[0] in ("SWEEPING", "PURGING", "KILLING"):
            if self._search():
                self._search_due = True
                self._loop.after(PATIENCE, self._go_on)
            self.look()

    def lingering(self, most: int) -> tuple[list[tuple[Any, ...]], int]:
        """Describe ``most`` orphans that are waited for (packed `protocol.Orphan`), and count all."""
        pids = self._find()
        return self._orphans.waiting(pids[:most]), len(pids)

    def reaped(self, pid: int, status: int) -> None:
        """Note that a child which is no worker has been reaped."""
        self._orphans.ended(pid, status)

    def report(self) -> tuple[list[tuple[Any, ...]], int]:
        """Describe the orphans that were signalled (packed `protocol.Orphan`), and count those not described."""
        return self._orphans.entries(), self._orphans.beyond

    def _find(self) -> list[int]:
        """Return the pids of all children but the log writer: workers and orphans. Zombies have been reaped before.

        Only waitid(2) can tell that there is none. Otherwise /proc lists them, where it shows this process; where it
        does not, or cannot be read, those that are known are returned, and `_searching` is set if there may be others.
        """
        _state, spared = self._now()
        self._searching = False
        if self._children.none_left():
            return []
        shown = procfs.is_shown()
        try:
            children = procfs.children(os.getpid()) if shown else []
        except OSError:  # no descriptor is left
            shown, children = False, []
        own = self._orphans.readers
        others = [pid for pid in children if pid != spared and pid not in own]
        if shown and (others or spared or own):
            return others
        known = {*self._children.workers, *(() if self._scan is None else self._scan.found)}
        others = [pid for pid in linux.children_among(sorted(known)) if pid != spared and pid not in own]
        self._searching = bool(others) or not (spared or own) or self._scanned != self._children.count_reaped
        return others

    def _search(self) -> bool:
        """Scan for more children, for some milliseconds. Returns whether a round over all pids has ended."""
        if self._scan is None:
            self._scan = ChildScan()
        if self._scan_began < 0 or (self._scan_began != self._children.count_reaped and self._scan.begin_again()):
            self._scan_began = self._children.count_reaped
            self._scan.found.clear()
        if not self._scan.step(max((pid for _rank, pid in self._children.started), default=0)):
            return False
        # An orphan that this round missed became a child when its parent ended: `count_reaped` has grown since.
        self._scanned, self._scan_began = self._scan_began, -1
        return True

    def _signal(self, pids: Iterable[int], *, purge: bool, kill: bool) -> None:
        """Send SIGTERM to children, once; with ``kill`` SIGKILL, with ``purge`` so to those outside workers' sessions.

        They are not reaped, so their pids cannot have been reused. What they forked becomes our child when they die.
        """
        orphans = self._orphans
        numbers = {}
        for pid in pids:
            number = linux.SIGKILL if kill or (purge and not orphans.in_session(pid)) else int(signal.SIGTERM)
            if orphans.sent(pid) not in (number, linux.SIGKILL):
                numbers[pid] = number
        orphans.note(numbers)
        for pid, number in numbers.items():
            send(pid, number)

    def kill_below(self) -> None:
        """SIGKILL the process groups of children that live on, and every process below these that /proc shows.

        Again every PATIENCE seconds, until the group is KILLING no more.

        A child that does not die keeps its own children from becoming ours. And a chain of processes that fork and exit
        may be faster than this search, but kill(2) to a process group holds up every fork in it.
        """
        if self._now()[0] != "KILLING":
            return
        children = self._find()
        below = procfs.descendants(children, _BELOW) if procfs.is_shown() else {}
        self._orphans.note(dict.fromkeys(below, linux.SIGKILL))
        self._signal_below(children[-_BELOW:], below, linux.SIGKILL)  # the newest: the others may be many zombies
        self._loop.after(PATIENCE, self.kill_below)

    def signal_all(self, number: int) -> None:
        """Send a signal to the children, and all that is below. Twice: a process may fork before it is stopped."""
        for _ in range(2):
            children = self._find()
            for pid in children:
                send(pid, number, wake=False)
            below = procfs.descendants(children, _BELOW * 8) if procfs.is_shown() else {}
            self._signal_below(children, below, number)

    def _signal_below(self, children: list[int], below: dict[int, int], number: int) -> None:
        """Send a signal to the process groups of children, and to the processes ``below`` them: pid → parent."""
        for group in self._groups(children):
            try:
                os.killpg(group, number)
            except OSError:  # gone, or another user's
                continue
        for pid, parent in below.items():
            try:
                with Process(pid, parent=parent) as process:
                    process.signal(number)
            except OSError:  # gone, or no descriptor is left
                continue

    def _groups(self, children: Iterable[int]) -> set[int]:
        """The process groups of children in sessions of their own: their members were all started below us."""
        ours = os.getsid(0)
        return {os.getpgid(pid) for pid in children if os.getsid(pid) != ours}

    def abandon(self) -> list[tuple[int, str, str]]:
        """Wait for no child any more. Returns pid, name and state of those left, and of the processes below them.

        The first is `UNFOUND` where there may be more.
        """
        pids = self._find()
        left = [UNFOUND] if self._searching else []
        shown = procfs.is_shown()
        for pid in [*pids, *(procfs.descendants(pids, _BELOW) if shown else ())]:
            try:
                stat = procfs.Stat(pid if shown else 0)
                left.append((pid, stat.comm, stat.state))
            except OSError:  # hidden
                left.append((pid, "?", "?"))
        self._orphans.abandon()
        self._children.abandon()
        return left


MOST = 64
"""Processes that are described. Those beyond are counted: a look at one takes 0.1 ms."""

_ERROR_FILE = b"TORCHELASTIC_ERROR_FILE"
_LOOK = 1.0  # seconds for all looks of one group, which a process may hold up
_COMMAND = 200  # characters
_SIGTERM = 15
_SCRIPT, _BOOT = b"/phalanx/_engine/worker/script.py", b"import sys;"  # in the command lines of workers


class _Orphan(protocol.Orphan):
    ignores = False  # SIGTERM


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
        left = _Orphan(pid, -1, "?", 0.0, 0, None)
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


PID_LIMIT = 1 << 22
"""The number of possible pids: PID_MAX_LIMIT of the kernel's threads.h. A look at all takes some seconds."""

_USUAL = 1 << 15  # most machines have no higher pid
_NEAR = 4096  # the pids after the keeper's, which are looked at in every step
_TURN = 10_000  # others that are looked at in one step: 9 ms; of the unlikely ones 16 times as many: 140 ms


class ChildScan:
    """Finds the keeper's children without /proc: waitid(2) tells of one pid after another whether it is a child's.

    Where /proc is empty, or another namespace's, nothing lists the orphans that have become children, and only exits
    show. But waitid(2) answers for one pid, and for children only; it changes nothing, and a child that is not reaped
    keeps its pid.

    The scan goes round all pids, beginning with those after the keeper's: its descendants were started later.
    On a machine that allows for four million pids most are much lower. So those up to the next power of two above any
    known one are looked at again and again, each time before a part of the others.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        """The children that were found. Some may have been reaped since."""
        self._own = os.getpid()
        self._offset, self._high, self._top = 0, 0, 0

    def step(self, known: int) -> bool:
        """Look at some more pids. ``known`` is the highest pid that a child is known to have.

        Returns whether a round over all pids has ended.
        """
        if not self._top:
            self._top = self._high = min(PID_LIMIT, max(_USUAL, 1 << max(self._own, known).bit_length()))
        self._ask(range(self._own + 1, min(self._own + 1 + _NEAR, self._top)))
        if self._offset < self._top:
            upto = min(self._offset + _TURN, self._top)
            self._ask((self._own + offset) % self._top or self._top for offset in range(self._offset, upto))
            self._offset = upto
        if self._offset == self._top and self._high < PID_LIMIT:
            upto = min(self._high + 16 * _TURN, PID_LIMIT)
            self._ask(range(self._high, upto))
            self._high = upto
            self._offset = 0 if upto < PID_LIMIT else self._top
        over = self._offset == self._top and self._high == PID_LIMIT
        if over:
            self._offset = self._top = 0
        return over

    def begin_again(self) -> bool:
        """Begin another round, unless most of this one is done. Returns whether it does."""
        early = self._high < PID_LIMIT // 4
        if early:
            self._offset = self._top = 0
        return early

    def _ask(self, numbers: Iterable[int]) -> None:
        self.found.update(linux.children_among(numbers))


COMMAND, VARIABLE, MAPPED = range(3)
"""What is read: the command line; the value of the variable; the rest of the mapped file's name."""

_COMMAND_SIZE = 1024
_MOST_BYTES = 1 << 20  # bytes of an environment, or of a list of what is mapped
_HEAD = 4  # bytes of a record's length


class MemoryReader:
    """Reads what /proc shows from processes' own memory: command lines, environments, the files that they map.

    To read these, the kernel takes the lock of that memory (mmap_lock), and its pages. When the process waits for a
    disk that does not answer, the reader may wait with it, without end. So a fork of the keeper reads, for ``seconds``
    in all, and is killed then. /proc/PID/stat and /proc/PID/status need no such lock.

    ``variable`` is the name of the environment variable whose value is wanted; ``mapped`` the beginning of the name of
    the memfd that is wanted among the mapped files.
    """

    def __init__(self, variable: bytes, mapped: bytes, seconds: float) -> None:
        self.forks: set[int] = set()
        """Children that took too long and have not been reaped. Whoever reaps one takes it out."""
        self._variable = variable + b"="
        self._mapped = b"/memfd:" + mapped
        self._seconds = seconds

    def read(self, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Read what can be read of ``wanted``, in this order: each a pid and what to read."""
        if not wanted or self._seconds <= 0:
            return {}
        try:
            reader, writer = os.pipe2(os.O_CLOEXEC)
        except OSError:  # no descriptor is left
            return {}
        data = b""
        try:
            child = os.fork()
            if child == 0:
                self._serve(wanted, writer)
            self.forks.add(child)
            os.close(writer)
            writer = -1
            data, ended = self._receive(reader)
            if ended:
                os.waitpid(child, 0)  # it is about to exit
                self.forks.discard(child)
            else:
                os.kill(child, linux.SIGKILL)  # reaped with the other children, if it can die
        except OSError:  # fork(2): EAGAIN
            pass
        finally:
            for fd in (reader, writer):
                if fd >= 0:
                    os.close(fd)
        return dict(_records(data))

    def _receive(self, reader: int) -> tuple[bytes, bool]:
        """Return what the fork wrote until EOF, or until the time was over; and whether it was EOF."""
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        data, until = b"", clock.now() + self._seconds
        try:
            while poll.poll(max(0.0, until - clock.now()) * 1000):
                more = os.read(reader, select.PIPE_BUF)
                if not more:
                    return data, True
                data += more
        finally:
            self._seconds = until - clock.now()
        return data, False

    def _serve(self, wanted: list[tuple[int, int]], writer: int) -> NoReturn:
        """Run as the fork: write a record for each read, and exit."""
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
            linux.close_all_but([writer])  # it may sleep without end, and must hold no pipe open
            for pid, what in wanted:
                record = marshal.dumps(((pid, what), self._read_one(pid, what)))
                os.write(writer, len(record).to_bytes(_HEAD, "little") + record)
        finally:
            os._exit(0)

    def _read_one(self, pid: int, what: int) -> bytes:
        if what == COMMAND:
            return procfs.read(f"/proc/{pid}/cmdline", _COMMAND_SIZE)
        if what == VARIABLE:
            for entry in procfs.read(f"/proc/{pid}/environ", _MOST_BYTES).split(b"\0"):
                if entry.startswith(self._variable):
                    return entry[len(self._variable) :]
            return b""
        return procfs.read(f"/proc/{pid}/maps", _MOST_BYTES).partition(self._mapped)[2].partition(b"\n")[0]


def _records(data: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
    """The records that are complete."""
    while len(data) >= _HEAD:
        size = int.from_bytes(data[:_HEAD], "little") + _HEAD
        if len(data) < size:
            return
        yield marshal.loads(data[_HEAD:size])  # noqa: S302 - of our own fork
        data = data[size:]
