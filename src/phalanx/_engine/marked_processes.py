"""Finds and kills every process that carries a group's mark: the last resort, when guard and keeper are both dead.

Owns the mark, and a search that ends. The kernel reads a process's environment from its memory. While a process waits
for a disk in a page fault or an mmap(2), such a read does not return. So it is done on threads that are not waited
for.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from signal import SIGKILL

from phalanx._base import clock, procfs, unpatched
from phalanx._base.process import Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MARK = b"PHALANX_GROUP"
"""The environment variable that every worker of a group carries, and with it, unless it is removed on purpose,
every process that a worker starts. Nested groups add to it: ``outer/inner``.

What /proc shows is the environment of the last exec. The keeper carries the mark too, so that its forks show it; forks
of the launcher itself, which was exec'ed before there was a group, carry it as the name of a mapped page instead."""

_TURN = 0.1
"""Seconds after which a look at one process that has not returned is left to its thread."""

_REST = 1.0
"""Seconds for all such looks to return, when all other processes have been looked at."""


_LOOKS = 3
"""Searches in a row that must find nobody: a chain of processes, each of which forks and exits, may escape one."""

_MORE_LOOKS = 30
"""Further searches, at most, if a process had exited before it was looked at."""


class MarkedProcesses:
    """The processes of one group, which is about to be started."""

    def __init__(self) -> None:
        self.token = os.urandom(8).hex()
        self.page = f"phalanx-group-{self.token}"
        # In the unit of /proc/PID/stat, and one early: whoever is older is none of the group.
        ticks = os.sysconf("SC_CLK_TCK")
        self._since = int(time.clock_gettime(time.CLOCK_BOOTTIME) * ticks) - 1

    def environment(self) -> dict[bytes, bytes]:
        """Return this process's environment with the mark."""
        base = dict(os.environb)
        base[MARK] = b"/".join(filter(None, (base.get(MARK), self.token.encode())))
        return base

    def kill(self, seconds: float, spared: int = 0) -> tuple[list[int], list[int]] | None:
        """Kill all that carries the mark, but for ``spared``, in ``seconds`` at most.

        It finds processes after setsid and double forks, but not those with a cleared environment. It needs two
        descriptors. Returns the pids of those left, and of those that could not be read; None when no process could be
        looked at, for want of descriptors or of a /proc that shows this process.
        """
        deadline = clock.now() + seconds
        silent: set[int] = set()
        looks, more = _LOOKS, _MORE_LOOKS
        while True:
            search = _Search(self, {os.getpid(), spared} | silent)
            search.run(deadline)
            if search.blind:
                return None
            silent |= search.silent
            left = [pid for pid, start in search.found.copy().items() if not _gone(pid, start, deadline)]
            if search.found:
                looks = _LOOKS
            elif search.missed and more:
                more -= 1
            else:
                looks -= 1
            if left or not looks or clock.now() >= deadline:
                return left, sorted(silent)

    def start_of(self, pid: int) -> int:
        """When a process that carries the mark was started, in clock ticks since boot; 0 for any other.

        May not return. Raises OSError when no descriptor is left.
        """
        try:
            found = procfs.Stat(pid)
            if found.start < self._since:
                return 0
            task = _live_task(found)
            for name, needle in (("environ", self.token), ("maps", self.page)) if task else ():
                with open(f"/proc/{pid}/task/{task}/{name}", "rb") as file:
                    for entry in file.read().split(b"\0" if name == "environ" else b"\n"):
                        if needle.encode() in entry and (name == "maps" or entry.startswith(MARK + b"=")):
                            return found.start
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
        return 0

    def has_gone(self, pid: int) -> bool:
        """Whether a process that may have been of the group has exited."""
        try:
            found = procfs.Stat(pid)
        except OSError:
            return True
        return found.has_exited and found.start >= self._since


class _Search:
    """One search through all processes. Each one with the mark is killed as soon as that is seen, however late."""

    def __init__(self, marked: MarkedProcesses, spared: Iterable[int]) -> None:
        self._marked = marked
        self._spared = spared
        self._todo: deque[int] = deque()
        self._at: dict[int, int] = {}  # by thread
        self.found: dict[int, int] = {}
        """The start times of those that carry the mark, by pid."""
        self.silent: set[int] = set()
        """Those that could not be read."""
        self.missed = False
        """Whether a process had exited before it was looked at."""
        self.blind = False
        """Whether no process can be looked at, for want of descriptors or of a /proc that shows this process."""

    def run(self, deadline: float) -> None:
        """Look at all processes. When a look does not return, another thread goes on with the next."""
        if not procfs.is_shown():
            self.blind = True
            return
        try:
            # The newest first: it may exit soon.
            self._todo.extend(sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True))
        except OSError:
            self.blind = True
            return
        threads = []
        while self._todo and not self.blind and clock.now() < deadline:
            thread = unpatched.thread(target=self._look, name="phalanx-last-resort")
            try:
                thread.start()
            except RuntimeError:  # no thread can be started
                self._look()
            else:
                threads.append(thread)
                self._follow(thread)
        rest = min(deadline, clock.now() + _REST)
        for thread in threads:
            thread.join(max(0.0, rest - clock.now()))
        self.silent = {*self._at.copy().values(), *self._todo}

    def _follow(self, thread: threading.Thread) -> None:
        """Return when ``thread`` has ended, or has looked at one process for too long."""
        at = -1
        while thread.is_alive():
            before, at = at, self._at.get(thread.ident or 0, 0)
            if at == before:
                return
            thread.join(_TURN)

    def _look(self) -> None:
        me = threading.get_ident()
        try:
            while True:
                pid = self._at[me] = self._todo.popleft()
                if pid in self._spared:
                    continue
                start = self._marked.start_of(pid)
                if start:
                    self.found[pid] = start
                    _kill(pid, start)
                elif self._marked.has_gone(pid):
                    self.missed = True
        except IndexError:  # that was the last one
            pass
        except OSError:
            self.blind = True
        finally:
            self._at.pop(me, None)


def _live_task(found: procfs.Stat) -> int:
    """A thread of a process that has not exited; 0 if there is none. The first one may exit before the others."""
    if not found.has_exited:
        return found.pid
    for name in os.listdir(f"/proc/{found.pid}/task"):
        try:
            if not procfs.Stat(int(name)).has_exited:
                return int(name)
        except ProcessLookupError:
            continue
    return 0


def _kill(pid: int, start: int) -> None:
    """SIGKILL a process, if it is still the one that started at ``start``, and its group, which cannot fork then.

    A session other than this process's was made by a marked process, with all its members.
    """
    try:
        with Process(pid, start=start) as process:
            found = procfs.Stat(pid)  # before it can be reaped
            process.signal(SIGKILL)
            if found.session != os.getsid(0):
                os.killpg(found.group, SIGKILL)
    except OSError:  # gone, or no descriptor is left
        pass


def _gone(pid: int, start: int, deadline: float) -> bool:
    """Whether a process has exited by ``deadline``. Waits for it."""
    try:
        with Process(pid, start=start) as process:
            return process.wait(max(0.0, deadline - clock.now()))
    except (ProcessLookupError, PermissionError):
        return True
    except OSError:  # no descriptor is left
        return False
