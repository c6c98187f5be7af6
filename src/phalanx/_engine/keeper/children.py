"""The workers of a keeper, and its other children as far as they are reaped.

Owns the reaping of all children, and the signals to workers. A child that is not reaped keeps its pid, so none of these
signals can reach another process. Decides nothing. Processes that workers left behind are ended by `sweep`.
"""

from __future__ import annotations

import select

from phalanx._base import clock, linux
from phalanx._engine.protocol import STOP_FLAG, ExitReport

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable, Iterable

    from phalanx._base.loop import Loop
    from phalanx._base.procfs import OomKills
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_LOOKED = 64  # workers that are looked at in one turn
_REAPED = 256  # orphans that are reaped before other events have their turn


class LiveWorker:
    """A worker that has not been reaped, so its pid cannot have been reused."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = -1
        self.signalled = 0
        self.struck = 0  # the last signal that it was sent for an expired timer
        self.exiting_ns = 0  # when it was first seen exiting, by itself
        self.exiting_early = False  # whether that was when the first failure was seen
        self.leaving = False  # whether it has failed, and left its main function
        self.exited_ns = 0  # when it was seen to have exited while a tracer kept it from being reaped

    def gone(self) -> bool:
        """Whether it has exited, reaped or not."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(self.exited_ns or poll.poll(0))


class Children:
    """All children of one keeper.

    ``ended`` is called with the report of each worker's exit, in the order in which they exited, and whether it had
    failed before, and left its main function; ``reaped`` with pid and wait status of each other child that has ended.
    """

    def __init__(
        self, loop: Loop, ended: Callable[[ExitReport, bool], None], reaped: Callable[[int, int], None]
    ) -> None:
        self.workers: dict[int, LiveWorker] = {}
        """The live workers, by pid."""
        self.started: list[tuple[int, int]] = []
        """Rank and pid of all that have been started."""
        self.error_files: dict[int, tuple[int, bytes | None]] = {}
        """Rank and error file of all that have been started, by pid."""
        self.forker = os.getpid()
        """The pid of the process that forked the workers: the keeper's, also in the guard."""
        self.oom_counter: tuple[str, int] = ("", 0)
        """What the launcher's `procfs.find_oom_counter` has returned."""
        self._oom: OomKills | None = None
        self.count_reaped = 0
        self._loop = loop
        self._ended = ended
        self._on_reaped = reaped

    # --- the start

    def add(self, rank: int, pid: int, error_file: bytes | None) -> LiveWorker:
        """Take charge of a worker that has just been started."""
        worker = self.workers[pid] = LiveWorker(rank, pid)
        self.started.append((rank, pid))
        self.error_files[pid] = rank, error_file
        return worker

    def watch(self, worker: LiveWorker, pidfd: int) -> None:
        """Reap a worker when its ``pidfd`` is readable. The descriptor is closed then."""
        worker.pidfd = pidfd
        self._loop.watch(pidfd, lambda _events: self._on_exit(worker))

    def descriptors(self) -> list[int]:
        """Return the open descriptors."""
        return [worker.pidfd for worker in self.workers.values() if worker.pidfd >= 0]

    def by_rank(self) -> dict[int, int]:
        """Return the pids of the live workers by rank."""
        return {worker.rank: pid for pid, worker in self.workers.items()}

    def unwatch(self) -> None:
        """Close the workers' pidfds. Their exits are seen by `reap` then."""
        for worker in self.workers.values():
            if worker.pidfd >= 0:
                self._loop.forget(worker.pidfd)
                os.close(worker.pidfd)
                worker.pidfd = -1

    # --- ends

    def _on_exit(self, worker: LiveWorker) -> None:
        """Epoll reports pidfds in the order in which the processes exited; wait4(-1) would go by age."""
        pid, status, usage = os.wait4(worker.pid, os.WNOHANG)
        if not pid:
            # It has exited, and its tracer has to reap it first. SIGCHLD comes again when that has been done.
            worker.exited_ns = worker.exited_ns or clock.now_ns()
            self._loop.forget(worker.pidfd)
            return
        self.count_reaped += 1
        moment = worker.exited_ns or clock.now_ns()
        if worker.pidfd >= 0:
            self._loop.forget(worker.pidfd)
            os.close(worker.pidfd)
        del self.workers[pid]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == linux.SIGKILL
        oom = self._oom_kill() if killed and worker.signalled != linux.SIGKILL else ""
        seconds = usage.ru_utime + usage.ru_stime
        exiting = worker.exiting_ns, worker.exiting_early
        report = ExitReport(worker.rank, status, moment, usage.ru_maxrss, seconds, oom, *exiting, worker.struck)
        self._ended(report, worker.leaving)

    def _oom_kill(self) -> str:
        """What the kernel tells of an OOM kill just now, or ""."""
        from phalanx._base import procfs

        if self._oom is None:
            self._oom = procfs.OomKills(*self.oom_counter)
        return self._oom.explain(clock.now())

    def reap(self) -> bool:
        """Reap orphans that have become the keeper's children. Workers are left to epoll, for the order of their exits.

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
                self.count_reaped += 1
                self._on_reaped(pid, status)
            elif worker.pidfd < 0 or worker.exited_ns:
                self._on_exit(worker)
            else:
                return False
        return True

    def note_exiting(self, wanted: Callable[[], bool], *, early: bool) -> None:
        """Note which workers are exiting by themselves: their connections may close long before the exit is seen.

        A few in each turn of the loop, as a look at one takes some microseconds, and as long as it is ``wanted``.
        """
        workers = list(self.workers.values())

        def look() -> None:
            if wanted():
                self._look(workers[:_LOOKED], early=early)
                del workers[:_LOOKED]
                if workers:
                    self._loop.call(look)

        look()

    def _look(self, workers: Iterable[LiveWorker], *, early: bool) -> None:
        from phalanx._base import procfs

        moment = clock.now_ns()
        for worker in workers:
            here = self.workers.get(worker.pid) is worker
            if here and not worker.exiting_ns and not worker.signalled and procfs.is_exiting(worker.pid):
                worker.exiting_ns, worker.exiting_early = moment, early

    # --- signals

    def signal(self, number: int, *, but_leaving: bool = False) -> list[int]:
        """Send ``number`` to every worker that has not exited. Returns the ranks of those.

        ``but_leaving``: not to those that leave by themselves: what they do in their exit handlers may be of use.
        """
        reached = []
        for worker in self.workers.values():
            if not (but_leaving and worker.leaving) and not worker.gone() and send(worker.pid, number):
                worker.signalled = number
                reached.append(worker.rank)
        return reached

    def signal_rank(self, rank: int, number: int) -> None:
        """Send ``number`` to one worker. What follows is the worker's own end."""
        for worker in self.workers.values():
            if worker.rank == rank:
                send(worker.pid, number, wake=False)

    def strike(self, pid: int, number: int) -> None:
        """Send ``number`` to a worker that hangs, and wake it. Unless it has exited by now, it has failed."""
        worker = self.workers.get(pid)
        if worker is not None and not worker.gone() and send(pid, number):
            worker.struck = number

    # --- what is left

    def none_left(self) -> bool:
        """Whether the keeper has no child at all (waitid(2): ECHILD). Children that can be reaped count."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def abandon(self) -> None:
        """Wait for no worker any more."""
        self.unwatch()
        self.workers.clear()


def send(pid: int, number: int, *, wake: bool = True) -> bool:
    """Send a signal to a child. Returns False if it belongs to another user by now (sudo): EPERM.

    ``wake``: send SIGCONT as well. A stopped process handles no signal but SIGKILL.
    """
    try:
        os.kill(pid, number)
        if wake and number != linux.SIGKILL:
            os.kill(pid, signal.SIGCONT)
    except PermissionError:
        return False
    return True


class Notice:
    """One group's: the signal, the seconds to the death signal, and the descriptor of the page with the stop flag."""

    def __init__(self, number: int, seconds: float, page: int) -> None:
        self.number = number
        self.seconds = seconds
        self.page = page

    def set_flag(self) -> None:
        """Have `should_stop` return True in every worker."""
        os.pwrite(self.page, b"\1", STOP_FLAG)

    def give(self, children: Children) -> list[int]:
        """Set the flag, send the signal to each worker that handles it, and wake each one.

        Returns the ranks of all that live. A worker may see the flag, and end, before it can be sent the signal.
        """
        alive = [worker for worker in children.workers.values() if not worker.gone()]
        self.set_flag()
        for worker in alive:
            send(worker.pid, self.number if self._is_handled(worker.pid) else signal.SIGCONT)
        return [worker.rank for worker in alive]

    def _is_handled(self, pid: int) -> bool:
        """Whether a process catches the signal, or blocks it, to wait for it: the default action of most ends it.

        While a thread is in sigwait(3), the kernel shows what it waits for as not blocked. What counts here is the main
        thread: one that has others wait blocks the signal all the time.
        """
        from phalanx._base import procfs

        if not procfs.is_shown():  # what /proc has under this number is another process
            return False
        fields = procfs.status(pid)
        handled = procfs.signal_set(fields, "SigCgt") | procfs.signal_set(fields, "SigBlk")
        return bool(handled >> (self.number - 1) & 1)
