"""The children of a keeper: workers, and what becomes an orphan below them.

Owns their start, reaping and signalling. A child that is not reaped keeps its pid, so none of these signals can reach
anybody else. Decides nothing: what is to be done the keeper says, which is told who has ended.
"""

from __future__ import annotations

import select

from phalanx._base import clock, files, linux
from phalanx._engine.keeper import start_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable, Iterable

    from phalanx._base.loop import Loop
    from phalanx._base.procfs import OomKills
    from phalanx._engine.keeper.child_scan import Walk
    from phalanx._engine.keeper.orphans import Entry, Remains
    from phalanx._engine.keeper.start_process import Spec
    from phalanx._engine.rotation.log_writer import LogWriter
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

Report = tuple[int, int, int, int, float, str, int, bool, int]
"""An exit: rank, wait status, moment, peak memory in KiB, CPU seconds, what an OOM killer has to do with it, when it
was first seen to be on its way out, by itself (0: it was not), whether that was when the first failure was seen, and
the last signal that it was sent for a timer that had expired (0: none). Moments are CLOCK_MONOTONIC in nanoseconds."""

UNFOUND = 0, "", ""
"""What stands for children that could not be found."""

_SPARE_DESCRIPTORS = 64  # beside those that are kept of each worker
_TOGETHER = 32  # workers whose log files are opened at a time, and after which it is asked whether to go on
_BELOW = 512  # processes below children that are looked at in one turn
_REAPED = 256  # orphans that are reaped before others have their turn


class Worker:
    """A worker that has not been reaped: so its pid cannot have been reused."""

    __slots__ = ("exited_ns", "exiting_early", "exiting_ns", "pid", "pidfd", "rank", "signalled", "struck")

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = -1
        self.signalled = 0
        self.struck = 0  # what it was sent because it hung
        self.exiting_ns = 0  # when it was first seen to be on its way out, by itself
        self.exiting_early = False  # whether that was when the first failure was seen
        self.exited_ns = 0  # when it was seen to have exited, though it could not be reaped: a tracer has it

    def gone(self) -> bool:
        """Whether it has exited already, reaped or not."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(self.exited_ns or poll.poll(0))


class Children:
    """All children of one keeper.

    Args:
        loop: What waits for the workers' exits.
        ended: Called with the report of each worker's exit, in the order in which they exited.
        buried: Called with pid and wait status of each other child that has ended.
    """

    def __init__(self, loop: Loop, ended: Callable[[Report], None], buried: Callable[[int, int], None]) -> None:
        self.workers: dict[int, Worker] = {}
        """Those that live, by pid."""
        self.started: list[tuple[int, int]] = []
        """Rank and pid of all that have been started."""
        self.forker = os.getpid()
        """Who has forked workers: the keeper."""
        self.oom_counter: tuple[str, int] = ("", 0)
        """What the launcher's `procfs.find_oom_counter` has returned."""
        self._oom: OomKills | None = None
        self._loop = loop
        self._ended = ended
        self._buried = buried
        self._error_files: dict[int, tuple[int, bytes | None]] = {}  # by pid, with the rank
        self._remains: Remains | None = None
        self.searching = False
        """Whether there are children, or may be, that are yet to be found by a `search`: /proc does not show them."""
        self._walk: Walk | None = None
        self._reaped = 0  # children, so far
        self._walk_began = self._walked = -1  # how many had been when a round began, and when the last one found nobody

    # --- the start

    def start(
        self,
        specs: list[Spec],
        base: dict[bytes, bytes],
        fds: list[int],
        null: int,
        log_writer: LogWriter | None,
        *,
        forked: bool,
        call: Callable[[int, list[int]], None] | None,
        own: Callable[[], list[int]],
        may_go_on: Callable[[bool], bool],
    ) -> tuple[object, ...]:
        """Start workers, as long as ``may_go_on``. Returns what went wrong: rank, what was done, errno, file; or ().

        The log files of some are opened before the first of them starts: a disk may take long to answer, and whoever
        runs then has nobody who supervises it.

        Args:
            specs: The workers.
            base: The environment that they share.
            fds: The descriptors that the specs refer to.
            null: A descriptor of /dev/null.
            log_writer: What fills files of bounded size.
            forked: Whether they are forks of this process.
            call: What forks do.
            own: Gives the descriptors that a fork must not have.
            may_go_on: Is asked before the first one, with False, and from time to time, with True.
        """
        rank, doing = -1, "raising the limit on open files"
        ignored = start_process.ignored_signals()
        wanted = sum(start_process.DESCRIPTORS_ROTATING if spec[7][0] else 1 for spec in specs) + _SPARE_DESCRIPTORS
        opened: list[start_process.Outputs] = []
        try:
            limit = start_process.DescriptorLimit(wanted)
            for number, spec in enumerate(specs):
                if number % _TOGETHER == 0:
                    if not may_go_on(number > 0):
                        break
                    doing = "opening its log files"
                    for ahead in specs[number : number + _TOGETHER]:
                        rank = ahead[0]
                        opened.append(start_process.Outputs(null, ahead[4], ahead[5], ahead[7]))
                rank, doing = spec[0], "starting it"
                with opened.pop(0) as outputs:
                    if log_writer is not None:
                        outputs.hand_over(log_writer)
                    given = [fds[index] for index in spec[6]]
                    with limit:  # which is ours alone
                        if forked:
                            # Those that become 1 and 2 are closed with the outputs.
                            others = [fd for each in opened for fd in each.descriptors()]
                            private = {*own(), *fds, *others}.difference(given)
                            pid = start_process.fork(spec, base, outputs, given, private, call)
                        else:
                            pid = start_process.execute(spec, base, outputs, given, ignored)
                    worker = self.workers[pid] = Worker(rank, pid)
                    self.started.append((rank, pid))
                    self._error_files[pid] = rank, spec[3].get(b"TORCHELASTIC_ERROR_FILE")
                doing = "watching it"
                # Watched from its start on, a worker's exit keeps its place in epoll's order.
                worker.pidfd = limit.put_away(os.pidfd_open(pid))
                self._loop.watch(worker.pidfd, lambda _events, each=worker: self._on_exit(each))  # type: ignore[misc]  # mypy has no type for it
        except OSError as error:
            doing = getattr(error, "doing", doing)  # what a child that was to place itself could not
            if isinstance(error, files.UnfitError):
                doing = f"{doing} ({error.strerror})"
            return rank, doing, error.errno or 0, linux.path_of(error)
        finally:
            for outputs in opened:
                outputs.close()
        return ()

    def descriptors(self) -> list[int]:
        """All that is open here."""
        return [worker.pidfd for worker in self.workers.values() if worker.pidfd >= 0]

    def unwatch(self) -> None:
        """Give the workers' descriptors back. Their ends are seen by `reap`."""
        for worker in self.workers.values():
            if worker.pidfd >= 0:
                self._loop.forget(worker.pidfd)
                os.close(worker.pidfd)
                worker.pidfd = -1

    # --- ends

    def _on_exit(self, worker: Worker) -> None:
        """Epoll reports pidfds in the order in which the processes exited; wait4(-1) would go by age."""
        pid, status, usage = os.wait4(worker.pid, os.WNOHANG)
        if not pid:
            # It has exited, and a tracer has the first word: only then it is ours to reap, and SIGCHLD comes again.
            worker.exited_ns = worker.exited_ns or clock.now_ns()
            self._loop.forget(worker.pidfd)
            return
        self._reaped += 1
        moment = worker.exited_ns or clock.now_ns()
        if worker.pidfd >= 0:
            self._loop.forget(worker.pidfd)
            os.close(worker.pidfd)
        del self.workers[pid]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == linux.SIGKILL
        oom = self._oom_kill() if killed and worker.signalled != linux.SIGKILL else ""
        seconds = usage.ru_utime + usage.ru_stime
        leaving = worker.exiting_ns, worker.exiting_early
        self._ended((worker.rank, status, moment, usage.ru_maxrss, seconds, oom, *leaving, worker.struck))

    def _oom_kill(self) -> str:
        """What the kernel tells of an OOM kill just now, or ""."""
        from phalanx._base import procfs

        if self._oom is None:
            self._oom = procfs.OomKills(*self.oom_counter)
        return self._oom.explain(clock.now())

    def reap(self) -> bool:
        """Reap some orphans that have become our children. Workers are left to epoll, for the order of their exits.

        Returns whether there may be more: workers can make them as fast as they are reaped.
        """
        for _ in range(_REAPED):
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if info is None:
                return False
            worker = self.workers.get(info.si_pid)
            if worker is None:
                pid, status = os.waitpid(info.si_pid, 0)
                self._reaped += 1
                if self._remains is not None:
                    self._remains.ended(pid, status)
                self._buried(pid, status)
            elif worker.pidfd < 0 or worker.exited_ns:
                self._on_exit(worker)
            else:
                return False
        return True

    def look(self, workers: Iterable[Worker], *, early: bool) -> None:
        """Note which of these are on their way out, by themselves: their connections may close long before the end."""
        from phalanx._base import procfs

        moment = clock.now_ns()
        for worker in workers:
            here = self.workers.get(worker.pid) is worker
            if here and not worker.exiting_ns and not worker.signalled and procfs.is_exiting(worker.pid):
                worker.exiting_ns, worker.exiting_early = moment, early

    # --- signals

    def signal(self, number: int) -> list[int]:
        """Send ``number`` to every worker that has not exited. Returns the ranks of those."""
        reached = []
        for worker in self.workers.values():
            if not worker.gone() and send(worker.pid, number):
                worker.signalled = number
                reached.append(worker.rank)
        return reached

    def signal_rank(self, rank: int, number: int) -> None:
        """Send ``number`` to one worker. What follows is its own doing."""
        for worker in self.workers.values():
            if worker.rank == rank:
                send(worker.pid, number, wake=False)

    def strike(self, pid: int, number: int) -> None:
        """Send ``number`` to a worker that hangs, stopped or not. Unless it has exited by now, it has failed."""
        worker = self.workers.get(pid)
        if worker is not None and not worker.gone() and send(pid, number):
            worker.struck = number

    def remains(self) -> Remains:
        """What is known of processes that workers left behind."""
        if self._remains is None:
            from phalanx._engine.keeper.orphans import Remains

            self._remains = Remains(self.forker, self._error_files)
        return self._remains

    def left(self) -> tuple[list[Entry], int]:
        """What is to be told of what was left behind, and how many there are of which nothing is known."""
        return ([], 0) if self._remains is None else (self._remains.entries(), self._remains.beyond)

    def orphans(self, spared: int) -> list[int]:
        """The children that there are, but for one: workers, and orphans. Zombies that can be reaped have been.

        That there is none only waitid(2) can tell. What /proc lists is believed where it shows us; where it does not,
        or cannot be read, those are told that are known, and `searching` says whether there may be others.
        """
        from phalanx._base import procfs

        self.searching = False
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []
        shown = procfs.is_shown()
        try:
            children = procfs.children(os.getpid()) if shown else []
        except OSError:  # no descriptor is left
            shown, children = False, []
        own = set() if self._remains is None else self._remains.own
        others = [pid for pid in children if pid != spared and pid not in own]
        if shown and (others or spared or own):
            return others
        known = {*self.workers, *(() if self._walk is None else self._walk.found)}
        others = [pid for pid in linux.children_among(sorted(known)) if pid != spared and pid not in own]
        self.searching = bool(others) or not (spared or own) or self._walked != self._reaped
        return others

    def search(self) -> bool:
        """Look for more children, for some milliseconds. Returns whether all numbers have been looked at once more."""
        if self._walk is None:
            from phalanx._engine.keeper.child_scan import Walk

            self._walk = Walk()
        if self._walk_began < 0 or (self._walk_began != self._reaped and self._walk.begin_again()):
            self._walk_began = self._reaped
            self._walk.found.clear()
        if not self._walk.turn(max((pid for _rank, pid in self.started), default=0)):
            return False
        # Who became ours in the midst of it, and was missed, did so by the end of another, who was reaped.
        self._walked, self._walk_began = self._walk_began, -1
        return True

    def sweep(self, pids: Iterable[int], *, purge: bool, kill: bool) -> None:
        """Ask children to end, once; ``kill`` them all, or ``purge`` those that have left the session of their worker.

        They are not reaped, so their pids are theirs. Whatever they forked becomes our child when they die.
        """
        remains = self.remains()
        numbers = {}
        for pid in pids:
            number = linux.SIGKILL if kill or (purge and not remains.in_session(pid)) else int(signal.SIGTERM)
            if remains.sent(pid) not in (number, linux.SIGKILL):
                numbers[pid] = number
        remains.note(numbers)
        for pid, number in numbers.items():
            send(pid, number)

    def kill_below(self, children: list[int]) -> None:
        """SIGKILL whole process groups of children that live on, and every process below these that can be seen.

        One that does not die keeps its children from becoming ours; and a chain of processes that fork and exit may be
        faster than we are, but kill(2) holds up every fork in a process group.
        """
        from phalanx._base import procfs
        from phalanx._base.process import Process

        below = procfs.descendants(children, _BELOW) if procfs.is_shown() else {}
        self.remains().note(dict.fromkeys(below, linux.SIGKILL))
        for group in self._groups(children[-_BELOW:]):  # the newest: the others may be zombies by the thousand
            try:
                os.killpg(group, linux.SIGKILL)
            except OSError:  # gone, or another user's
                continue
        for pid, parent in below.items():
            try:
                with Process(pid, parent=parent) as process:  # whose parent it has is who it was
                    process.signal(linux.SIGKILL)
            except OSError:  # gone, or no descriptor is left
                continue

    def _groups(self, children: Iterable[int]) -> set[int]:
        """The process groups of children in sessions of their own: all in them has been started below us."""
        ours = os.getsid(0)
        return {os.getpgid(pid) for pid in children if os.getsid(pid) != ours}

    def abandon(self, pids: list[int]) -> list[tuple[int, str, str]]:
        """Wait for nobody any more. Returns pid, name and state of the children ``pids``, and of who is below these.

        The first is `UNFOUND` where there may be more.
        """
        from phalanx._base import procfs

        left = [UNFOUND] if self.searching else []
        shown = procfs.is_shown()
        for pid in [*pids, *(procfs.descendants(pids, _BELOW) if shown else ())]:
            try:
                stat = procfs.Stat(pid if shown else 0)
                left.append((pid, stat.comm, stat.state))
            except OSError:  # hidden
                left.append((pid, "?", "?"))
        self.remains().abandon()
        self.unwatch()
        self.workers.clear()
        return left


def send(pid: int, number: int, *, wake: bool = True) -> bool:
    """Signal a child, unless it has become another user's (sudo): one that we may not kill is abandoned.

    ``wake`` it, too: a stopped process would not see the signal before the SIGKILL.
    """
    try:
        os.kill(pid, number)
        if wake and number != linux.SIGKILL:
            os.kill(pid, signal.SIGCONT)
    except PermissionError:
        return False
    return True
