"""The helper process of a group: parent, subreaper and undertaker of every worker.

Owns forking, exec'ing, reaping, signalling and the removal of all that the workers leave behind. It obeys one launcher
over one socket, and when that socket closes it kills all of its descendants and leaves. It knows no table, no
deadline of the group, and nothing of why a worker is wanted.

It is two processes, the second a fork of the first that shares its pages:

    launcher -- guard -- keeper -- workers

Both are subreapers. When the keeper is killed, every process below it, however far it has run (setsid, double
fork), becomes a child of the guard, which finishes the work and reports. When the guard is killed, the keeper
does. A lone keeper with PR_SET_PDEATHSIG on its workers would lose their grandchildren to init; and arming it
needs code in the child between fork and exec, which rules out posix_spawn(3): a fork with an exec takes half as long
again.

It runs on its own (no site, no package beyond its own few modules), and is up in about 10 ms.
"""

from __future__ import annotations

import _socket
import errno
import gc
import os
import select

from phalanx._core import clock, linux, starting, wire
from phalanx._core.loop import READ, WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, NoReturn

    from phalanx._core.deadlines import Deadline
    from phalanx._core.rotate import Rotator
    from phalanx._core.starting import Spec
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms

LINGER = 0.05
"""Seconds between SIGTERM and SIGKILL for what a worker left behind. Enough for a resource tracker, which ignores
SIGTERM, to see its worker's end and unlink the shared memory that it tracks."""

KILL_WAIT = 10.0
"""Seconds that a SIGKILL is given. A process that outlives it sits in uninterruptible sleep, and is abandoned."""

_OOM_TOGETHER = 1.0  # seconds in which the ends of OOM-killed workers are told after the kernel's count has risen
_SPARE_DESCRIPTORS = 64  # beside a pidfd for each worker
_DESCRIPTORS_ROTATING = 1 + 2 * 3  # with a pipe and a file for each of its streams


class Worker:
    """A worker that has not been reaped: so its pid cannot have been reused."""

    __slots__ = ("pid", "pidfd", "rank", "signalled")

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = -1
        self.signalled = 0

    def gone(self) -> bool:
        """Whether it has exited already, reaped or not."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


class Keeper:
    """One group's keeper. `keep` returns when nothing is left to keep."""

    def __init__(self, sock: _socket.socket, call: Callable[[int, list[int]], None] | None = None) -> None:
        self._channel = wire.Channel(sock)
        self._call = call
        self._loop = Loop()
        self._workers: dict[int, Worker] = {}
        self._rotators: dict[int, list[Rotator]] = {}
        self._sessions: set[int] = set()  # every worker leads one; its pid stays taken while the session has a member
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._oom_file, self._oom_kills = "", 0
        self._oom_said: list[str] = []
        self._oom_until = 0.0
        self._exits: list[tuple[object, ...]] = []
        self._reason: wire.Message = ()  # the last word, sent when all is swept
        self._asked: set[int] = set()
        self._sweep_timer: Deadline | None = None
        self._lingered = False
        self._killing = False
        self._abandoning = False
        self._leaving = False
        self._guard = self._launcher = -1
        self._signals = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def keep(self, launcher: int, guard: int, parent: int) -> None:
        """Serve until the group is gone. ``launcher`` and ``guard`` are pidfds, ``parent`` is the guard's pid.

        The socket's end would tell of the launcher's death, were it not that any process that the launcher forks
        inherits its side of the socket, and may outlive it.
        """
        self._guard, self._launcher = guard, launcher
        self._loop.watch(guard, self._on_guard)
        self._loop.watch(launcher, _bound(self._on_orphaned, launcher))
        if os.getppid() != parent:
            self._on_guard(READ)
        self._run()

    def finish_for(self, status: int) -> None:
        """What the guard does when its keeper has ended with ``status``: become the keeper, and kill all."""
        self._reason = ("lost", "keeper", os.waitstatus_to_exitcode(status))
        self._loop.call(self._kill)
        self._run()

    def _run(self) -> None:
        signal.signal(signal.SIGCHLD, starting.ignore)
        signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)
        self._loop.watch(self._signals[0], self._on_signal)
        self._loop.watch(self._channel.fileno(), self._on_channel)
        self._loop.run()

    # --- the launcher's wishes

    def _on_channel(self, events: int) -> None:
        try:
            if events & WRITE:
                self._flush()
            while (received := self._channel.receive()) is not None:
                (verb, *arguments), fds = received
                if verb == "start":
                    self._start(*arguments, fds)  # type: ignore[arg-type, call-arg]  # the launcher sends what `_start` takes
                elif verb == "signal":
                    self._signal(*arguments)  # type: ignore[arg-type]  # as above
                elif verb == "send":
                    self._send_to(*arguments)  # type: ignore[arg-type]  # as above
                elif verb == "sweep":
                    self._sweep(*arguments)  # type: ignore[arg-type]  # as above
                elif verb == "kill":
                    self._kill()
        except wire.Closed:
            self._on_orphaned(self._channel.fileno())
        except wire.Truncated:
            self._reason = ("start_failed", -1, "", errno.EMFILE, "")
            self._kill()

    def _on_orphaned(self, fd: int) -> None:
        self._loop.forget(fd)
        self._reason = self._reason or ("orphaned",)
        self._kill()
        if self._leaving:  # with a last word that nobody will read
            self._loop.stop()

    def _send(self, *message: object) -> None:
        """Send, or have `_flush` called when there is room. Sets ``_sent``."""
        self._sent = True  # also when nobody is left to read: the socket is readable then, and `_on_channel` knows
        try:
            if not self._channel.send(message):
                self._sent = False
                self._loop.change(self._channel.fileno(), READ | WRITE)
        except wire.Closed:
            pass

    def _flush(self) -> None:
        if self._channel.flush():
            self._loop.change(self._channel.fileno(), READ)
            if self._leaving:
                self._loop.stop()

    # --- starting

    def _start(
        self,
        fork: bool,  # noqa: FBT001 - positional on the wire
        base: dict[bytes, bytes],
        specs: list[Spec],
        oom: tuple[str, int],
        fds: list[int],
    ) -> None:
        self._oom_file, self._oom_kills = oom
        rank, doing = -1, ""
        ignored = starting.ignored_signals()
        # Watched from its start on, a worker's exit keeps its place in epoll's order. Beyond the caller's limit on
        # descriptors, which the workers inherit, the watching has to wait until all are started and we may raise it.
        wanted = sum(_DESCRIPTORS_ROTATING if spec[7] else 1 for spec in specs) + _SPARE_DESCRIPTORS
        early = wanted <= os.sysconf("SC_OPEN_MAX")
        try:
            for spec in specs:
                rank, doing = spec[0], "opening its log files"
                with starting.Outputs(self._null, spec[4], spec[5], spec[7]) as outputs:
                    self._rotators[rank] = outputs.rotators
                    doing = "starting it"
                    given = [fds[index] for index in spec[6]]
                    if fork:
                        # Those that become 1 and 2 are closed with the outputs.
                        private = {*self._own_descriptors(), *fds}.difference(given, outputs.writers())
                        pid = starting.fork(spec, base, outputs, given, private, self._call)
                    else:
                        pid = starting.execute(spec, base, outputs, given, ignored)
                self._watch_outputs(outputs.rotators)
                worker = self._workers[pid] = Worker(rank, pid)
                self._sessions.add(pid)
                if early:
                    self._watch(worker)
            if not early:
                _allow_descriptors(wanted)
                for worker in self._workers.values():
                    rank, doing = worker.rank, "watching it"
                    self._watch(worker)
        except OSError as error:
            doing = getattr(error, "doing", doing)  # what a child that was to place itself could not
            self._reason = ("start_failed", rank, doing, error.errno or 0, os.fsdecode(error.filename or ""))
        # /dev/null is of no more use, and where descriptors are scarce, its place is what a look at /proc needs.
        for fd in (*fds, self._null):
            os.close(fd)
        self._null = -1
        if self._call is not None:  # a fork of the launcher: what it had open was for the workers
            starting.close_all_but(self._own_descriptors())
        if not self._reason:
            self._send("started", [(worker.rank, pid) for pid, worker in self._workers.items()])
            return
        self._unwatch()  # it may be descriptors that have run out, and killing takes some
        self._kill()

    def _watch_outputs(self, rotators: list[Rotator]) -> None:
        for rotator in rotators:
            self._loop.watch(rotator.reader, _bound(self._on_output, rotator))

    def _watch(self, worker: Worker) -> None:
        worker.pidfd = os.pidfd_open(worker.pid)
        self._loop.watch(worker.pidfd, _bound(self._on_exit, worker))

    def _unwatch(self) -> None:
        for worker in self._workers.values():
            if worker.pidfd >= 0:
                self._loop.forget(worker.pidfd)
                os.close(worker.pidfd)
                worker.pidfd = -1

    def _own_descriptors(self) -> list[int]:
        """All that is open here and is none of a worker's business."""
        loop = self._loop.descriptors()
        pidfds = [worker.pidfd for worker in self._workers.values() if worker.pidfd >= 0]
        rotated = [fd for rotators in self._rotators.values() for rotator in rotators for fd in rotator.descriptors()]
        own = [self._channel.fileno(), self._guard, self._launcher, self._null, *self._signals]
        return [*own, *loop, *pidfds, *rotated]

    # --- ends

    def _on_signal(self, _events: int) -> None:
        try:
            while os.read(self._signals[0], 4096):
                pass
        except BlockingIOError:
            pass
        self._reap_adopted()

    def _on_exit(self, worker: Worker) -> None:
        """Epoll reports pidfds in the order in which the processes exited; wait4(-1) would go by age."""
        pid, status, usage = os.wait4(worker.pid, os.WNOHANG)
        if not pid:
            return
        moment = clock.now_ns()
        self._drain(worker.rank)
        self._loop.forget(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[pid]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == linux.SIGKILL
        oom = self._oom_risen() if killed and worker.signalled != linux.SIGKILL else ""
        if not self._exits:  # all that this round of the loop sees goes in one message
            self._loop.call(self._tell_exits)
        self._exits.append((worker.rank, status, moment, usage.ru_maxrss, usage.ru_utime + usage.ru_stime, oom))

    def _on_output(self, rotator: Rotator) -> None:
        """A worker has written. What cannot be kept is refused: it sees EPIPE, as it would see ENOSPC by itself."""
        try:
            if rotator.drain():
                return
        except OSError:
            pass
        self._loop.forget(rotator.reader)
        rotator.close()

    def _drain(self, rank: int) -> None:
        """Have all that a worker wrote in its files before its end is told."""
        for rotator in self._rotators.get(rank, ()):
            if rotator.reader >= 0:
                self._on_output(rotator)

    def _tell_exits(self) -> None:
        if self._exits and not self._reason:  # else the launcher hears one thing only
            self._send("exits", self._exits)
        self._exits = []
        self._reap_adopted()

    def _oom_risen(self) -> str:
        """What the kernel says of an OOM kill just now; "" when it says nothing. A rise by two explains two ends."""
        kills = linux.oom_kills(self._oom_file) if self._oom_file else None
        if kills is not None and kills > self._oom_kills:
            said = f"OOM kill: oom_kill in {self._oom_file} rose from {self._oom_kills} to {kills}"
            self._oom_said = [said] * (kills - self._oom_kills)
            self._oom_until = clock.now() + _OOM_TOGETHER
            self._oom_kills = kills
        if clock.now() > self._oom_until:  # a grandchild's, which no later end may claim
            self._oom_said = []
        return self._oom_said.pop() if self._oom_said else ""

    def _reap_adopted(self) -> None:
        """Reap orphans that have become our children. Workers are left to epoll, for the order of their exits."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if info is None or (info.si_pid in self._workers and self._workers[info.si_pid].pidfd >= 0):
                break
            os.waitpid(info.si_pid, 0)
            self._workers.pop(info.si_pid, None)
            self._asked.discard(info.si_pid)
        if self._sweep_timer is not None:
            self._sweep_round()

    def _on_guard(self, _events: int) -> None:
        self._loop.forget(self._guard)
        self._reason = ("lost", "guard", -linux.SIGKILL)
        self._kill()

    # --- signals

    def _signal(self, number: int) -> None:
        """Send ``number`` to every worker that has not exited, and say to which."""
        moment = clock.now_ns()
        reached = []
        for worker in self._workers.values():
            if not worker.gone() and _send_signal(worker.pid, number):
                if number != linux.SIGKILL:
                    _send_signal(worker.pid, signal.SIGCONT)  # a stopped process would not see it before the SIGKILL
                worker.signalled = number
                reached.append(worker.rank)
        self._send("signalled", number, moment, reached)

    def _send_to(self, rank: int, number: int) -> None:
        """Send ``number`` to one worker at its owner's wish. It is no stop of ours: what follows is its own."""
        for worker in self._workers.values():
            if worker.rank == rank:
                _send_signal(worker.pid, number)

    # --- the end of everything

    def _sweep(self, grace: float) -> None:
        """Remove what the workers left: SIGTERM, a moment, SIGKILL.

        Processes still in a worker's session are part of its job (``sh run.sh`` dies of the SIGTERM at once, the python
        below it is saving its work): they have the ``grace`` seconds that are left of the group's. Daemons have
        `LINGER`.
        """
        if self._sweep_timer is None and not self._killing:
            self._sweep_timer = self._loop.after(LINGER, self._linger_over)
            self._loop.after(max(grace, LINGER), self._kill)
            self._reap_adopted()

    def _linger_over(self) -> None:
        self._lingered = True
        self._sweep_round()

    def _kill(self) -> None:
        if not self._killing:
            self._killing = True
            if self._workers and not self._reason:
                self._signal(linux.SIGKILL)
            if self._sweep_timer is not None:
                self._sweep_timer.cancel()
            self._sweep_timer = self._loop.after(KILL_WAIT, self._abandon)
            self._reap_adopted()

    def _abandon(self) -> None:
        self._abandoning = True
        self._sweep_round()

    def _sweep_round(self) -> None:
        """One look at our children: none, and we are done; else each is asked, or killed, until none is left.

        They are not reaped, so their pids are theirs. Whatever they forked comes to us when they die.
        """
        left = self._own_children()
        if not left or self._abandoning:
            named = [(stat.pid, stat.comm, stat.state) for stat in map(linux.Stat, left)]
            self._leave(*(self._reason or ("swept", named)))
            return
        for pid in left:
            if self._killing or (self._lingered and linux.Stat(pid).session not in self._sessions):
                _send_signal(pid, linux.SIGKILL)
            elif pid not in self._asked:
                self._asked.add(pid)
                _send_signal(pid, signal.SIGTERM)
                _send_signal(pid, signal.SIGCONT)

    def _leave(self, *last_word: object) -> None:
        if not self._leaving:
            self._leaving = True
            for rank in self._rotators:
                self._drain(rank)
            self._loop.forget(self._signals[0])
            self._tell_exits()
            self._send(*last_word)
            if self._sent or last_word == ("orphaned",):
                self._loop.stop()

    def _own_children(self) -> list[int]:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []
        return linux.children(os.getpid())


def keep(sock: _socket.socket, call: Callable[[int, list[int]], None] | None = None, launcher: int = -1) -> None:
    """Be guard and keeper at the end ``sock``, with ``call`` for workers that are forks of us. Does not return.

    ``launcher`` is a pidfd, where it is not the launcher that has forked us.
    """
    try:
        starting.fill_standard_descriptors()
        starting.turn_deaf()
        gc.disable()  # nothing here makes cycles, and a collection would copy every page that is shared with a fork
        gc.freeze()
        linux.become_subreaper()
        parent, guard = os.getppid(), os.getpid()
        try:
            above = os.pidfd_open(guard)
            if launcher < 0:
                launcher = os.pidfd_open(parent)
                if os.getppid() != parent:  # it died first, and the pid may be another's by now
                    os._exit(0)
            keeper = os.fork()
            if keeper == 0:
                linux.become_subreaper()
            serving = Keeper(sock, call) if keeper == 0 else None
        except OSError as error:  # nothing is there to be kept yet
            _give_up(sock, error)
        if serving is not None:
            serving.keep(launcher, above, guard)
        else:
            if call is not None:
                starting.close_all_but([sock.fileno(), launcher])
            status = _outlive(keeper, launcher)
            if status:
                Keeper(sock).finish_for(status)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        os._exit(70)


def _outlive(keeper: int, launcher: int) -> int:
    """Wait for the keeper to end, and return its status: what the guard does.

    A keeper that somebody has stopped (SIGSTOP) cannot see that the launcher has died, so it is woken up then; and
    should it still be there when all its own deadlines are over, it is killed, and the guard does its work.
    """
    ended = os.pidfd_open(keeper)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(launcher, select.POLLIN)
    if ended not in dict(poll.poll()):
        poll.unregister(launcher)
        os.kill(keeper, signal.SIGCONT)
        if not poll.poll((KILL_WAIT + 1) * 1000):
            os.kill(keeper, linux.SIGKILL)
    os.close(ended)
    return os.waitpid(keeper, 0)[1]


def _give_up(sock: _socket.socket, error: OSError) -> NoReturn:
    """Tell the launcher that there will be no keeper. Does not return."""
    try:
        wire.Channel(sock).send(("start_failed", -1, "", error.errno or 0, os.fsdecode(error.filename or "")))
    finally:
        os._exit(0)


def main(fd: int) -> None:
    """The keeper as a program: the socket to its launcher is descriptor ``fd``. Does not return."""
    os.set_inheritable(fd, False)  # it had to survive one exec; no worker may hold our end of the conversation
    keep(_socket.socket(fileno=fd))


def _send_signal(pid: int, number: int) -> bool:
    """Send ``number`` to a child, unless it has become another user's (sudo): one that we may not kill is abandoned."""
    try:
        os.kill(pid, number)
    except PermissionError:
        return False
    return True


def _bound(method: Callable[[Any], None], argument: object) -> Callable[[int], None]:
    return lambda _events: method(argument)


def _allow_descriptors(wanted: int) -> None:
    try:
        import resource
    except ImportError as error:  # it is a file, and there may be no descriptor left to open it
        raise OSError(errno.EMFILE, str(error)) from error
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
