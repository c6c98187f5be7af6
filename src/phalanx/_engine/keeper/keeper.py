"""The helper process of a group: parent, subreaper and undertaker of every worker, and the one that decides.

Owns what is done when: it carries out the table of `lifecycle`, by its `children`. The policy (settle window, grace
period, linger) comes with the order to start; what follows is on time whatever the launcher does. The launcher sends
wishes (stop, kill, signal a rank) and is sent what happened, in order, with moments. When it is gone, all that the
workers started is killed.

Nobody else's code runs here, and nothing here writes to a disk. One is needed only for the opening of log files, until
the last worker has started, and for an import of what the end needs, `BUSY` seconds after the keeper got up. The
`guard`, its parent, does the same by the same table when the keeper is killed.
"""

from __future__ import annotations

import errno
import select

from phalanx._base import channels, clock, linux
from phalanx._base.loop import READ, WRITE, Loop
from phalanx._engine import lifecycle
from phalanx._engine.keeper import start_process
from phalanx._engine.keeper.children import Children
from phalanx._engine.lifecycle import DRAIN_WAIT, KILL_WAIT, PATIENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import os
    import signal
    from collections.abc import Callable
    from typing import Any

    from phalanx._base.deadlines import Deadline
    from phalanx._engine.keeper.children import Report
    from phalanx._engine.rotation.log_writer import LogWriter
    from phalanx._timers.escalation import Escalation
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

BUSY = 0.1
"""Seconds in which the processor is left to what starts, and to what is over as soon."""

FOREVER = float("inf")

_BATCH = 250  # entries of one message: it has to fit a packet, for the launcher may have no descriptor left for more
_BEFORE = 0.01  # seconds before the end of the settle window in which workers are looked at once more
_FEW = 16  # entries that are long
_SIGINFO = 128  # bytes of one signal, of which there is one at most: SIGCHLD is not queued
_NO_ERRNO = 255  # the exit code of a log writer that could not go on
_LOOKED = 64  # workers that are looked at in one turn
_ALONE = (("start_failed",), ("orphaned",))  # last words beside which nothing is told of workers
_TOLD = ("SETTLING", "STOPPING", "LINGERING", "SWEEPING", "PURGING", "KILLING", "DRAINING")


class Keeper:
    """One group's keeper. `keep` returns when nothing is left to keep."""

    def __init__(self, sock: _socket.socket, call: Callable[[int, list[int]], None] | None = None) -> None:
        self._channel = channels.Channel(sock)
        self._call = call
        self._loop = Loop()
        self._state = "WAITING"
        self._due: dict[str, Deadline] = {}  # by the event that comes with it
        self._settle, self._grace, self._linger, self._together = 0.0, 0.0, 0.0, True
        self._endless = False  # a grace period runs that has no end
        self._death_signal: int = signal.SIGTERM
        self._order: tuple[Any, ...] = ()
        self._children = Children(self._loop, self._on_end, self._on_burial)
        self._ranks_told = 0
        self._all_well = True
        self._more_to_reap = False
        self._search_due = False
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._exits: list[Report] = []
        self._reason: channels.Message = ()  # the last word, if it is another than the usual one
        self._logs: LogWriter | None = None
        self.log_writer = 0
        """The pid of what fills log files of bounded size; 0: there is none, or it has ended."""
        self._notes = -1
        self._left: list[tuple[int, str, str]] = []  # what outlives SIGKILL: pid, name, state
        self._logs_left = ""
        self._escalation: Escalation | None = None
        self._guard = self._launcher = -1
        self._signals = linux.signalfd(signal.SIGCHLD)

    def keep(self, launcher: int, guard: int, parent: int, notes: int) -> None:
        """Serve until the group is gone. ``launcher`` and ``guard`` are pidfds, ``parent`` is the guard's pid.

        The socket's end would tell of the launcher's death, were it not that any process that the launcher forks
        inherits its side of the socket, and may outlive it. ``notes`` is a pipe to the guard, for what it has to know
        should it take over.
        """
        self._guard, self._launcher, self._notes = guard, launcher, notes
        self._open()
        self._loop.watch(guard, self._on_guard)
        self._loop.watch(launcher, _bound(self._on_orphaned, launcher))
        try:
            own = [os.pidfd_open(os.getpid())]
        except OSError:  # no descriptor is left, which the start will say
            own = []
        self._loop.after(BUSY, load)
        self._tell("up", os.getpid(), fds=tuple(own))
        for fd in own:
            os.close(fd)
        if os.getppid() != parent:
            self._on_guard(READ)
        self._loop.run()

    def take_over(self, keeper: int, status: int, log_writer: int, launcher: int) -> None:
        """Kill all, in the place of a ``keeper`` (a pid) that has ended with ``status``. ``launcher`` is a pidfd."""
        self._children.forker = keeper
        self._reason = ("lost", "keeper", os.waitstatus_to_exitcode(status))
        self.log_writer = log_writer
        self._open()
        self._loop.watch(launcher, _bound(self._on_orphaned, launcher))
        self._see("HELPER_LOST")  # before anything is read: the order to start may lie unread in the socket
        self._reap()  # of those who have ended already, no SIGCHLD tells
        self._loop.run()

    def _open(self) -> None:
        self._loop.watch(self._signals, self._on_signal)
        self._loop.watch(self._channel.fileno(), self._on_channel)

    # --- the table

    def _see(self, event: str) -> None:
        before = self._state
        self._state, actions = lifecycle.step(before, event)
        if self._state != before:
            for other in [other for other in self._due if (self._state, other) not in lifecycle.TABLE]:
                self._due.pop(other).cancel()
            if self._state in _TOLD:
                self._tell_exits()
                self._tell("state", self._state, clock.now_ns())
        for action in actions:
            _DO[action](self)

    def _arm(self, event: str, moment: float) -> None:
        """Have ``event`` happen at ``moment``, and no more when it was to happen before."""
        if event in self._due:
            self._due.pop(event).cancel()
        if moment < FOREVER:
            self._due[event] = self._loop.at(moment, lambda: self._see(event))

    # --- the launcher

    def _on_channel(self, events: int) -> None:
        try:
            if events & WRITE:
                self._flush()
            while self._state != "GONE" and (received := self._channel.receive()) is not None:
                message, fds = received
                verb, *arguments = message
                _OBEY[str(verb)](self, *arguments, *([fds] if verb == "start" else ()))
        except channels.Closed:
            self._on_orphaned(self._channel.fileno())
        except channels.Truncated:
            self._reason = self._reason or ("start_failed", -1, "", errno.EMFILE, "")
            self._see("KILL")

    def _on_start(self, *order: Any) -> None:
        self._order = order
        self._see("START")

    def _on_stop(self, number: int, grace: float) -> None:
        self._death_signal, self._grace = number, grace
        self._see("STOP")

    def _on_kill(self) -> None:
        self._see("KILL")

    def _on_grace(self, grace: float) -> None:
        """Let a failure stop the others within ``grace`` seconds. A grace period that runs can only become shorter."""
        self._grace = grace
        if "GRACE_OVER" in self._due:
            self._arm_grace()

    def _on_wish(self, rank: int, number: int) -> None:
        """Send ``number`` to one worker at its owner's wish. It is no stop of ours: what follows is its own."""
        self._children.signal_rank(rank, number)

    def _on_testified(self, serial: int) -> None:
        if self._escalation is not None:
            self._escalation.evidence_taken(serial)

    def _on_orphaned(self, fd: int) -> None:
        self._loop.forget(fd)
        if self._state != "GONE":
            self._reason = ("orphaned",)  # what else there is to be said, nobody hears
            self._see("ORPHANED")

    def _on_guard(self, _events: int) -> None:
        self._loop.forget(self._guard)
        self._lose("guard", -linux.SIGKILL)

    def _note(self, text: str) -> None:
        """Leave a word for the guard, should it take over."""
        try:
            if self._notes >= 0:
                os.write(self._notes, text.encode())
        except BrokenPipeError:  # it has gone
            return

    def _lose(self, who: str, returncode: int) -> None:
        """Kill all. How the group ends is known when a failure or a stop came first, or nobody is left: that stays."""
        decided = self._state not in ("WAITING", "STARTING", "RUNNING")
        if not decided:
            self._reason = self._reason or ("lost", who, returncode)
        if self._state not in ("ENDED", "GONE"):
            self._tell("loss", who, returncode, decided)
        if self._state != "GONE":
            self._see("HELPER_LOST")

    def _tell(self, *message: object, fds: tuple[int, ...] = ()) -> bool:
        """Send a message, or have `_flush` called when there is room. Returns whether nothing waits to be sent."""
        try:
            sent = self._channel.send(message, fds)
        except channels.Closed:  # the socket is readable then, and `_on_channel` knows
            return True
        if not sent:
            self._loop.change(self._channel.fileno(), READ | WRITE)
        return sent

    def _tell_all(self, verb: str, entries: list[Any]) -> None:
        for first in range(0, len(entries), _BATCH):
            self._tell(verb, entries[first : first + _BATCH])

    def _flush(self) -> None:
        if self._channel.flush():
            self._loop.change(self._channel.fileno(), READ)
            if self._state == "ENDED":
                self._see("TOLD")

    # --- starting

    def _begin(self) -> None:
        """Start every worker that was ordered."""
        forked, modules, base, specs, oom, policy, timers, fds = self._order
        self._order = ()
        self._settle, self._grace, self._linger, self._together = policy
        self._children.oom_counter = oom
        table = () if timers is None else (fds[timers[0]], fds[timers[1]])
        if any(spec[7][0] for spec in specs):
            self._have_logs_written()
        start_process.load(modules)
        failed = not self._reason and self._children.start(
            specs,
            base,
            fds,
            self._null,
            self._logs,
            forked=forked,
            call=self._call,
            own=self.descriptors,
            may_go_on=self._may_go_on,
        )
        if failed:
            self._reason = self._reason or ("start_failed", *failed)
        # /dev/null is of no more use, and where descriptors are scarce, its place is what a look at /proc needs.
        for fd in (*fds, self._null):
            if fd not in table:
                os.close(fd)
        self._null = -1
        if self._call is not None:  # a fork of the launcher: what it had open was for the workers
            start_process.close_all_but([*self.descriptors(), *table])
        if self._state != "STARTING":  # the launcher has changed its mind, or is gone
            return
        if self._reason:
            self._children.unwatch()  # it may be descriptors that have run out, and killing takes some
            self._see("START_FAILED")
            return
        self._see("STARTED")
        load_procfs()
        if timers is not None:
            self._loop.when_idle(lambda: self._watch_timers(table, *timers[2:]))

    def _may_go_on(self, hear: bool) -> bool:  # noqa: FBT001 - as it is called by `Children.start`
        """Whether launcher and guard are there, and, in the midst of a long start, nothing else is wished."""
        callbacks = {self._launcher: _bound(self._on_orphaned, self._launcher), self._guard: self._on_guard}
        if hear:
            callbacks[self._channel.fileno()] = self._on_channel
        poll = select.poll()
        for fd in callbacks:
            poll.register(fd, select.POLLIN)
        for fd, _events in poll.poll(0):
            if self._state == "STARTING":
                callbacks[fd](READ)
        return self._state == "STARTING"

    def _have_logs_written(self) -> None:
        """Fork the process that fills log files of bounded size: a disk may block it, and nobody else."""
        try:
            from phalanx._engine.rotation.log_writer import LogWriter

            self._logs = LogWriter(self._loop, self._notes)
            self.log_writer = self._logs.pid
        except (OSError, ImportError) as error:
            number = getattr(error, "errno", None) or errno.EMFILE
            self._reason = ("start_failed", -1, "starting what writes its log files", number, "")

    def _refuse(self) -> None:
        """Start nothing: it is too late for that."""
        for fd in self._order[-1]:
            os.close(fd)
        self._order = ()

    def _tell_started(self) -> None:
        self._tell_ranks()
        self._tell("running", clock.now_ns(), self.log_writer)

    def _tell_ranks(self) -> None:
        """Say which process each worker is: before anything else is said of it."""
        fresh = self._children.started[self._ranks_told :]
        self._ranks_told += len(fresh)
        self._tell_all("started", fresh)

    def _watch_timers(self, fds: Any, seats: int, hang: int, steps: list[tuple[str, float]]) -> None:
        try:
            from phalanx._timers.escalation import Escalation
            from phalanx._timers.table import TimerTable

            table = TimerTable.from_descriptors(fds, seats, hang, by_rank=True)
            strike = self._children.strike
            self._escalation = Escalation(table, steps, self._loop, self._in_charge, strike, self._tell)
            self._escalation.open()
        except (OSError, ImportError) as error:
            self._tell("unwatched", str(error))

    def _in_charge(self) -> dict[int, int]:
        """The live workers, by rank, as long as nobody is stopping them."""
        if self._state not in ("RUNNING", "SETTLING"):
            return {}
        return {worker.rank: pid for pid, worker in self._children.workers.items()}

    def descriptors(self) -> list[int]:
        """All that is open here. It is none of a worker's business."""
        own = [self._guard, self._launcher, self._null, self._notes, self._signals]
        own += [*self._channel.descriptors(), *self._loop.descriptors(), *self._children.descriptors()]
        own += self._logs.descriptors() if self._logs is not None else []
        return [fd for fd in own if fd >= 0]

    # --- ends

    def _on_signal(self, _events: int) -> None:
        os.read(self._signals, _SIGINFO)  # the loop says that there is something
        self._reap()

    def _reap(self) -> None:
        if self._children.reap() and not self._more_to_reap:
            self._more_to_reap = True
            self._loop.call(self._reap_more)
        if (self._state, "EMPTY") in lifecycle.TABLE:
            self._look()

    def _reap_more(self) -> None:
        self._more_to_reap = False
        self._reap()

    def _on_end(self, report: Report) -> None:
        """A worker has exited."""
        if not self._exits:  # all that this round of the loop sees goes in one message
            self._loop.call(self._after_exits)
        self._exits.append(report)
        failed = bool(report[1] or report[-1])  # a bad end; or it hung, whatever it says on its way out
        self._all_well = self._all_well and not failed
        if not self._children.workers:
            self._see("ALL_SUCCEEDED" if self._all_well else "ALL_ENDED")
        elif failed and self._together:
            if self._state == "RUNNING":
                self._loop.when_idle(lambda: self._look_at_workers(early=True))
            self._see("ONE_FAILED")
        else:
            self._see("ONE_ENDED")

    def _look_at_workers(self, *, early: bool) -> None:
        """Note who is on its way out, a few at a time: a look at each takes some microseconds."""
        workers = list(self._children.workers.values())

        def look() -> None:
            if self._state == "SETTLING":
                self._children.look(workers[:_LOOKED], early=early)
                del workers[:_LOOKED]
                if workers:
                    self._loop.call(look)

        look()

    def _after_exits(self) -> None:
        self._tell_exits()
        self._reap()  # orphans that stood behind a worker, the order of whose exit epoll had to say

    def _tell_exits(self) -> None:
        exits, self._exits = self._exits, []
        if exits and self._reason[:1] not in _ALONE:
            self._tell_ranks()
            self._tell_all("exits", exits)

    def _on_burial(self, pid: int, status: int) -> None:
        """A child that is no worker has been reaped."""
        if pid != self.log_writer:
            return
        self.log_writer = 0
        self._note("0 ")  # the pid may be another's soon
        code = os.waitstatus_to_exitcode(status)
        refused = 0 < code < _NO_ERRNO  # an errno, see `rotate.LogWriter`
        if code:
            self._logs_left = os.strerror(code) if refused else f"the process that wrote them was lost ({code})"
        if self._state == "DRAINING":
            self._see("DRAINED")
        elif code and not refused:
            self._lose("log writer", code)

    # --- what the table has us do

    def _arm_settle(self) -> None:
        until = clock.now() + self._settle
        self._arm("SETTLED", until)
        if self._settle > _BEFORE:  # not when it is over: a look at many takes milliseconds
            self._loop.at(until - _BEFORE, lambda: self._look_at_workers(early=False))

    def _arm_grace(self) -> None:
        until = clock.now() + self._grace
        if "GRACE_OVER" in self._due:
            until = min(until, self._due["GRACE_OVER"].at)  # asked twice: the sooner of the two, never later
        self._endless = until == FOREVER
        self._arm("GRACE_OVER", until)

    def _arm_linger(self) -> None:
        self._arm("LINGER_OVER", clock.now() + self._linger)
        if self._linger > PATIENCE:
            self._loop.after(PATIENCE, self._tell_lingering)

    def _arm_rest(self) -> None:
        """What is in a worker's session has the rest of a grace period that runs; all have a moment."""
        soon = clock.now() + PATIENCE
        self._arm("PATIENCE_OVER", soon)
        if "GRACE_OVER" in self._due:
            self._arm("GRACE_OVER", max(soon, self._due["GRACE_OVER"].at))
        elif not self._endless:
            self._arm("GRACE_OVER", soon)

    def _tell_lingering(self) -> None:
        if self._state == "LINGERING":
            pids = self._children.orphans(self.log_writer)
            if not pids:  # they do not show
                return
            self._tell("lingering", self._children.remains().waiting(pids[:_FEW]), len(pids))

    def _signal(self) -> None:
        self._signal_all(self._death_signal)

    def _signal_all(self, number: int) -> None:
        moment = clock.now_ns()
        ranks = self._children.signal(number)
        self._tell_ranks()
        for first in range(0, len(ranks), _BATCH):
            self._tell("signalled", number, moment, ranks[first : first + _BATCH])

    def _kill(self) -> None:
        if self._reason[:1] not in _ALONE:
            self._signal_all(linux.SIGKILL)
        self._arm("KILL_OVER", clock.now() + KILL_WAIT)
        self._loop.after(PATIENCE, self._kill_below)

    def _kill_below(self) -> None:
        """Kill what a look at our own children does not reach, for as long as there is somebody."""
        if self._state == "KILLING":
            self._children.kill_below(self._children.orphans(self.log_writer))
            self._loop.after(PATIENCE, self._kill_below)

    def _look(self) -> None:
        left = self._children.orphans(self.log_writer)
        if not left and not self._children.searching:
            self._see("EMPTY")
        elif self._state != "LINGERING":
            if left:
                self._children.sweep(left, purge=self._state == "PURGING", kill=self._state == "KILLING")
            if self._children.searching and not self._search_due:
                self._search_due = True
                self._loop.call(self._search)

    def _search(self) -> None:
        """Look for what /proc does not show, a little; again and again, with a rest after all has been looked at."""
        self._search_due = False
        if (self._state, "EMPTY") in lifecycle.TABLE and self._state != "LINGERING":
            if self._children.search():
                self._search_due = True
                self._loop.after(PATIENCE, self._search)
            self._look()

    def _abandon(self) -> None:
        self._left = self._children.abandon(self._children.orphans(self.log_writer))

    def _drain(self) -> None:
        if self._logs is not None:
            self._logs.finish()
        if self.log_writer and self._reason != ("orphaned",):  # else it ends by itself
            self._arm("DRAIN_OVER", clock.now() + DRAIN_WAIT)
        else:
            self._see("DRAINED")

    def _leave_logs(self) -> None:
        self._logs_left = f"process {self.log_writer} still writes them"

    def _say_last(self) -> None:
        self._loop.forget(self._signals)
        self._tell_exits()
        sent = True
        if self._reason != ("orphaned",):
            entries, beyond = self._children.left()
            for first in range(0, len(entries), _FEW):
                self._tell("remains", entries[first : first + _FEW], beyond)
            sent = self._tell(*(self._reason or ("ended", self._left[:_BATCH], self._logs_left)))
        if sent:
            self._see("TOLD")

    def _leave(self) -> None:
        self._loop.stop()


_DO: dict[str, Callable[[Keeper], None]] = {
    "BEGIN": Keeper._begin,
    "REFUSE": Keeper._refuse,
    "TELL_STARTED": Keeper._tell_started,
    "ARM_SETTLE": Keeper._arm_settle,
    "SIGNAL": Keeper._signal,
    "ARM_GRACE": Keeper._arm_grace,
    "ARM_LINGER": Keeper._arm_linger,
    "ARM_REST": Keeper._arm_rest,
    "LOOK": Keeper._look,
    "KILL": Keeper._kill,
    "ABANDON": Keeper._abandon,
    "DRAIN": Keeper._drain,
    "LEAVE_LOGS": Keeper._leave_logs,
    "SAY_LAST": Keeper._say_last,
    "LEAVE": Keeper._leave,
}

_OBEY: dict[str, Callable[..., None]] = {
    "start": Keeper._on_start,
    "stop": Keeper._on_stop,
    "kill": Keeper._on_kill,
    "grace": Keeper._on_grace,
    "signal": Keeper._on_wish,
    "testified": Keeper._on_testified,
}


def load_procfs() -> None:
    """Import what the first end takes: the workers run, and it is needed at once when one of them fails."""
    try:
        import phalanx._base.procfs  # noqa: F401 - see above
    except (OSError, ImportError):  # as below
        return


def load() -> None:
    """Import what is needed at the end: it is on a disk, which may not answer then."""
    try:
        import phalanx._base.process
        import phalanx._engine.keeper.child_scan
        import phalanx._engine.keeper.orphans  # noqa: F401 - see above
    except (OSError, ImportError):  # no descriptor is left, perhaps: it is said when it is needed
        return


def _bound(method: Callable[[Any], None], argument: object) -> Callable[[int], None]:
    return lambda _events: method(argument)
