"""Ends what workers left behind: finds the orphans among the keeper's children, and signals them.

Owns the search. Signals children alone, which keep their pids until they are reaped, or processes below them by pidfd.
What is noted of an orphan for the report is in `orphans`. Loaded shortly after the keeper got up, see `guard.BUSY`.
"""

from __future__ import annotations

import resource  # noqa: F401 - what wait4(2) returns is one of its types, and would import it at the first exit

from phalanx._base import linux, procfs
from phalanx._base.process import Process
from phalanx._engine.keeper.child_scan import ChildScan
from phalanx._engine.keeper.children import send
from phalanx._engine.keeper.orphans import Orphans
from phalanx._engine.lifecycle import PATIENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable, Iterable
    from typing import Any

    from phalanx._base.loop import Loop
    from phalanx._engine.keeper.children import Children
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

UNFOUND = 0, "", ""
"""What stands for children that could not be found, in `Sweep.abandon`."""

_BELOW = 512  # processes below children that are looked at in one turn


class Sweep:
    """The orphans of one group.

    Args:
        children: The keeper's.
        loop: Has the search go on.
        now: Returns the group's state, and the pid of the log writer, which is spared (0: there is none).
        see: Called with EMPTY when no child but the log writer is left.
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
        for group in self._groups(children[-_BELOW:]):  # the newest: the others may be zombies by the thousand
            try:
                os.killpg(group, linux.SIGKILL)
            except OSError:  # gone, or another user's
                continue
        for pid, parent in below.items():
            try:
                with Process(pid, parent=parent) as process:
                    process.signal(linux.SIGKILL)
            except OSError:  # gone, or no descriptor is left
                continue
        self._loop.after(PATIENCE, self.kill_below)

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
