"""The helper process of a group: parent and subreaper of every worker, and the process that decides.

Carries out the table of `lifecycle`: it starts, signals, kills and reaps workers, by its `children`. The policy (settle
window, grace period, linger) comes with the order to start, so what follows is on time whatever the launcher does. When
the launcher dies, every process that the workers started is killed, at once or after the orphan grace.

Only code of this package runs here, and nothing here writes to a disk. A disk is read to open log files, until the last
worker has started, and for imports: of what a start needs, before its order comes, or with it; of what an end needs,
soon after. The `guard`, its parent, does the same by the same table when the keeper is killed.
"""

from __future__ import annotations

import errno

from phalanx._base import channels, clock, linux
from phalanx._base.loop import Loop
from phalanx._engine import lifecycle, protocol
from phalanx._engine.keeper.children import Children
from phalanx._engine.keeper.connection import BATCH, FEW, Connection
from phalanx._engine.lifecycle import PATIENCE
from phalanx._engine.protocol import DRAIN_WAIT, KILL_WAIT, LOSS_SETTLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import os
    import signal
    from collections.abc import Callable
    from typing import Any

    from phalanx._base.loop import Deadline
    from phalanx._engine.keeper.children import Notice
    from phalanx._engine.keeper.log_writer import RotatedLogs
    from phalanx._engine.keeper.start_group import Start
    from phalanx._engine.keeper.sweep import Sweep
    from phalanx._timers.escalation import Escalation
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_BEFORE = 0.01  # seconds before the end of the settle window in which workers are looked at once more
_SIGINFO = 128  # bytes of one signal, of which there is one at most: SIGCHLD is not queued
_ORPHANED = ("orphaned",)  # in place of the last message: nobody receives one
_NO_START = ("start_failed",)  # what the last message begins with beside which no exit is reported
_REPORTED = ("SETTLING", "NOTICED", "STOPPING", "LINGERING", "SWEEPING", "PURGING", "KILLING", "DRAINING")


class Keeper:
    """One group's keeper. `keep` returns when the group is gone."""

    def __init__(self, sock: _socket.socket, call: Callable[[int, list[int]], None] | None = None) -> None:
        self._call = call
        self.loop = Loop()
        self._state = "WAITING"
        self._connection = Connection(
            sock,
            self.loop,
            receive=self._on_message,
            truncated=self._on_truncated,
            orphaned=self._on_orphaned,
            guard_lost=lambda: self._lose("guard", -linux.SIGKILL),
            sent=lambda: self._see("REPORTED") if self._state == "ENDED" else None,
        )
        self._waits = Waits(self.loop, self._on_wait_over)
        self._orphan_grace = 0.0
        self._silence: Deadline | None = None  # after which the launcher is stopped, or worse
        self._taken_over: dict[int, int] | None = None  # in the keeper's place: the children that ended, and how
        self._ordered = False  # whether the launcher has ordered the end, or died
        self._death_signal: int = signal.SIGTERM
        self._notice: Notice | None = None
        self._order: tuple[Any, ...] = ()
        self._children = Children(self.loop, self._on_worker_exit, self._on_reaped)
        self._failed_at = 0.0  # when the settle window began
        self._sweep: Sweep | None = None  # from the first look on
        self._all_well, self._more_to_reap = True, False
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._exits: list[protocol.ExitReport] = []
        self._last_message: channels.Message = ()  # where it is not `protocol.ended`
        self._logs: RotatedLogs | None = None  # where files are bounded in size
        self._abandoned: list[tuple[int, str, str]] = []  # what outlives SIGKILL: pid, name, state
        self._escalation: Escalation | None = None
        self._is_paused = self._is_held = False
        self._pause_order: bool | None = None  # that is not carried out: whether to pause; None: there is none
        self._signals = linux.signalfd(signal.SIGCHLD)

    def keep(self, launcher: int, guard: int, parent: int, notes: int) -> None:
        """Serve until the group is gone. ``parent`` is the guard's pid; for the others see `Connection.open`."""
        self.loop.watch(self._signals, self._on_signal)
        self._connection.open(launcher, guard, notes)
        self._connection.send_up()
        if os.getppid() != parent:
            self._connection.on_guard()
        self.loop.run()

    def take_over(self, keeper: int, status: int, log_writer: int, launcher: int) -> None:
        """Kill all, in the place of a ``keeper`` (a pid) that has ended with ``status``. ``launcher`` is a pidfd."""
        self._children.forker, self._taken_over = keeper, {}
        self._last_message = protocol.ended_by_loss("keeper", os.waitstatus_to_exitcode(status))
        if log_writer:
            from phalanx._engine.keeper.log_writer import RotatedLogs

            self._logs = RotatedLogs(log_writer)
        self.loop.watch(self._signals, self._on_signal)
        self._connection.open(launcher)
        self._see("HELPER_LOST")  # before anything is read: the order to start may lie unread in the socket
        self._reap()  # no SIGCHLD comes for children that have ended already
        self.loop.run()

    @property
    def log_writer(self) -> int:
        """The pid of the process that fills log files of bounded size; 0: there is none, or it has ended."""
        return 0 if self._logs is None else self._logs.pid

    # --- the table

    def _see(self, event: str) -> None:
        """Take the step of the table that ``event`` leads to."""
        before = self._state
        self._state, actions = lifecycle.step(before, event)
        if self._state != before:
            self._waits.enter(self._state)
            if self._is_paused and self._state != "RUNNING":
                self._end_pause()
            if self._pause_order is not None:
                self.loop.call(self._obey_pause)
            if self._state in _REPORTED:
                self._send_exits()
                self._connection.send(protocol.state(self._state, clock.now_ns()))
        for action in actions:
            _ACTIONS[action](self)

    def _on_wait_over(self, event: str) -> None:
        """Take the step, but do not end a settle window while a worker stands at a breakpoint."""
        if event == "SETTLED" and self._escalation is not None and self._escalation.stands:
            if not self._is_held:
                self._is_held = True
                self._connection.send(protocol.held())
            self._escalation.when_released(lambda: self._on_wait_over(event))
        elif event != "SETTLED" or self._state == "SETTLING":  # else another event came while it was held
            self._see(event)

    # --- the launcher

    def _on_message(self, message: channels.Message, fds: list[int]) -> None:
        """Do what the launcher has ordered."""
        verb, *fields = message
        _ON_MESSAGE[str(verb)](self, *fields, *([fds] if verb == "start" else ()))

    def _on_truncated(self) -> None:
        """A message has lost its descriptors: no more may be open here."""
        self._last_message = self._last_message or protocol.start_failed(-1, "", errno.EMFILE, "")
        self._see("KILL")

    def _on_start(self, *order: Any) -> None:
        self._order = order
        self._see("START")

    def _on_stop(self, number: int, grace: float) -> None:
        self._death_signal, self._waits.grace, self._ordered = number, grace, True
        if self._notice is not None and self._state != "RUNNING":
            self._notice.set_flag()
        self._see("STOP_WITH_NOTICE" if self._notice is not None and self._state == "RUNNING" else "STOP")

    def _on_expect(self, seconds: float) -> None:
        """Stop the group as by an order, if the launcher is silent for so long: nobody else ends what it has left."""
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self.loop.at(clock.now() + seconds, lambda: self._on_stop(signal.SIGTERM, self._waits.grace))

    def _on_pause(self, is_on: bool) -> None:  # noqa: FBT001 - as the message has it
        """Pause a group that runs, or continue it, soon. Of orders that come at once, the last one holds."""
        if self._pause_order is None:
            self.loop.call(self._obey_pause)
        self._pause_order = is_on

    def _obey_pause(self) -> None:
        """Carry the last order out; once all are started, see `_see`."""
        is_on = self._pause_order
        if is_on is None or self._state == "STARTING":
            return
        self._pause_order = None
        if self._is_paused and not is_on:
            self._end_pause()
        elif is_on and not self._is_paused and self._state == "RUNNING":
            self._is_paused = True
            if self._escalation is not None:
                self._escalation.pause(True)
            self._sweeper().signal_all(signal.SIGSTOP)
            self._connection.send(protocol.paused(True))

    def _end_pause(self) -> None:
        """Continue all that was stopped, unless it is about to be killed: a stopped process handles no SIGTERM."""
        self._is_paused = False
        if self._state != "KILLING":
            self._sweeper().signal_all(signal.SIGCONT)
        if self._escalation is not None:
            self._escalation.pause(False)
        self._connection.send(protocol.paused(False))

    def _on_leaving(self, pid: int) -> None:
        """A worker has left its main function by a failure. While it is being stopped, that is none of its own.

        It may have exited since, with whatever code.
        """
        rank, _error_file = self._children.error_files.get(pid, (-1, None))
        if self._state == "STARTING":
            self.loop.call(lambda: self._on_leaving(pid))  # when all are started
        elif rank >= 0 and self._state in ("RUNNING", "SETTLING"):
            if pid in self._children.workers:  # else it has exited
                self._children.workers[pid].leaving = True
            self._all_well = False
            self._send_exits()
            self._connection.send(protocol.failing(rank))
            if self._state == "RUNNING":
                self._see("ONE_LEAVES")

    def _on_judged(self, is_lost_connection: bool) -> None:  # noqa: FBT001 - as it is called
        """The launcher has read the first failure's evidence."""
        if self._state == "SETTLING" and not is_lost_connection:
            self._settle_for(self._waits.settle)

    def _on_orphaned(self) -> None:
        if self._last_message == _ORPHANED:  # the pidfd has told it, and now the socket does, or the other way round
            return
        self._last_message = _ORPHANED
        self._connection.silence()
        self._ordered = True
        if self._orphan_grace > 0:
            if self._notice is not None:
                self._notice.set_flag()
            self._death_signal, self._waits.grace = signal.SIGTERM, self._orphan_grace
            self._see("ORPHANED_WITH_GRACE")
        else:
            self._see("ORPHANED")

    def _lose(self, who: str, returncode: int) -> None:
        """Kill all. If a failure or a stop came first, or no worker is left, that stays how the group ended."""
        decided = self._state not in ("WAITING", "STARTING", "RUNNING")
        if not decided:
            self._last_message = self._last_message or protocol.ended_by_loss(who, returncode)
        if self._state != "ENDED":
            self._connection.send(protocol.helper_lost(who, returncode, decided))
        self._see("HELPER_LOST")

    # --- starting

    def _start_workers(self) -> None:
        from phalanx._engine.keeper import start_group  # loaded by now, see `guard`

        start = start_group.Start(*self._order)
        self._order = ()
        self._waits.settle, self._waits.grace, self._waits.linger, self._orphan_grace = start.policy
        if self._orphan_grace > 0:
            self._connection.note(protocol.orphan_grace_note(self._orphan_grace))
        self._children.oom_counter = start.oom_counter
        connection = self._connection
        self._notice, self._logs, failed = start.prepare(self.loop, connection.notes, connection.send)
        if not failed:
            add = None if self._logs is None else self._logs.add
            failed = start.run(
                self._children, self._null, add, self._call, own=self.descriptors, may_go_on=self._may_go_on
            )
        self._last_message = self._last_message or failed
        # /dev/null is of no more use, and a look at /proc may need its descriptor where those are scarce.
        os.close(self._null)
        self._null = -1
        start.close()
        if self._call is not None:  # a fork of the launcher, whose descriptors were for the workers
            linux.close_all_but([*self.descriptors(), *start.table])
        if self._state != "STARTING":  # a stop, a kill, or the launcher's end was seen meanwhile
            return
        if self._last_message:
            self._children.unwatch()  # descriptors may have run out, and killing takes some
            self._see("START_FAILED")
            return
        self._see("STARTED")
        start_group.load_procfs()
        if start.table:
            self.loop.when_idle(lambda: self._watch_timers(start))

    def _may_go_on(self, receive: bool) -> bool:  # noqa: FBT001 - as it is called by `start_group`
        self._connection.poll(lambda: self._state == "STARTING", receive=receive)
        return self._state == "STARTING"

    def _refuse(self) -> None:
        for fd in self._order[-1]:
            os.close(fd)
        self._order = ()

    def _report_started(self) -> None:
        self._connection.started(self._children.started)
        self._connection.send(protocol.running(clock.now_ns(), self.log_writer))

    def _watch_timers(self, start: Start) -> None:
        send, strike = self._connection.send, self._children.strike
        self._escalation = start.watch_timers(self.loop, self._in_charge, strike, send)
        if self._is_paused and self._escalation is not None:
            self._escalation.pause(True)

    def _in_charge(self) -> dict[int, int]:
        """The pids of the live workers by rank; none once they are being stopped."""
        return self._children.by_rank() if self._state in ("RUNNING", "SETTLING") else {}

    def descriptors(self) -> list[int]:
        """Return the open descriptors. No worker may have any of them."""
        own = [self._null, self._signals, *self._connection.descriptors()]
        own += [*self.loop.descriptors(), *self._children.descriptors()]
        own += self._logs.descriptors() if self._logs is not None else []
        own += [self._notice.page] if self._notice is not None else []
        return [fd for fd in own if fd >= 0]

    # --- exits

    def _on_signal(self, _events: int) -> None:
        os.read(self._signals, _SIGINFO)  # never blocks: the loop has seen that there is one
        self._reap()

    def _reap(self) -> None:
        if self._children.reap() and not self._more_to_reap:
            self._more_to_reap = True
            self.loop.call(self._reap_more)
        if (self._state, "EMPTY") in lifecycle.TABLE:
            self._sweep_orphans()

    def _reap_more(self) -> None:
        self._more_to_reap = False
        self._reap()

    def _on_worker_exit(self, report: protocol.ExitReport, leaving: bool) -> None:  # noqa: FBT001 - as it is called
        if not self._exits:  # all that this round of the loop sees goes in one message
            self.loop.call(self._after_exits)
        self._exits.append(report)
        # Whatever its status: a worker that hung has failed, and so has one of which that was reported.
        failed = bool(report.status or report.struck or leaving)
        self._all_well = self._all_well and not failed
        if not self._children.workers:
            self._see("ALL_SUCCEEDED" if self._all_well else "ALL_ENDED")
        elif failed:
            self._see("ONE_FAILED")
        else:
            self._see("ONE_ENDED")

    def _after_exits(self) -> None:
        self._send_exits()
        self._reap()  # orphans listed behind a worker: `Children.reap` stops there

    def _send_exits(self) -> None:
        exits, self._exits = self._exits, []
        if exits and self._last_message[:1] != _NO_START:
            self._connection.started(self._children.started)
            self._connection.send_all(protocol.exits, [report.pack() for report in exits])

    def _on_reaped(self, pid: int, status: int) -> None:
        """A child that is no worker has been reaped."""
        if self._taken_over is not None:
            self._taken_over[pid] = status
        if self._sweep is not None:
            self._sweep.reaped(pid, status)
        if self._logs is None or pid != self._logs.pid:
            return
        failed = self._logs.reaped(status)
        self._connection.note(protocol.log_writer_note(0))  # the pid may be reused
        if self._state == "DRAINING":
            self._see("DRAINED")
        elif failed and self._state != "GONE":  # since an earlier event of this round of the loop
            self._lose("log writer", failed)

    # --- the actions of the table

    def _arm_settle(self) -> None:
        """Open the settle window: the first failure has just been seen.

        The cause of a lost connection may still be on its way up, through handlers that close what it had open. So a
        short window lasts longer, until the launcher, which may be busy, reports that the first failure is none.
        """
        self._failed_at, window = clock.now(), self._waits.settle
        self._settle_for(max(window, LOSS_SETTLE) if window else 0.0)
        self.loop.when_idle(lambda: self._note_exiting(early=True))

    def _settle_for(self, window: float) -> None:
        """Let the settle window last for so many seconds from its beginning."""
        until = self._failed_at + window
        self._waits.arm("SETTLED", until)
        if window > _BEFORE:  # not when it is over: a look at many takes milliseconds
            self.loop.at(until - _BEFORE, lambda: self._note_exiting(early=False))

    def _note_exiting(self, *, early: bool) -> None:
        self._children.note_exiting(lambda: self._state == "SETTLING", early=early)

    def _arm_linger(self) -> None:
        linger = self._waits.linger
        self._waits.arm("LINGER_OVER", clock.now() + linger)
        if linger > PATIENCE:
            self.loop.after(PATIENCE, self._report_lingering)

    def _report_lingering(self) -> None:
        if self._state == "LINGERING":
            orphans, count = self._sweeper().lingering(FEW)
            if count:  # else /proc does not show them
                self._connection.send(protocol.lingering(orphans, count))

    def _signal_all(self, number: int, *, but_leaving: bool = False) -> None:
        moment = clock.now_ns()
        ranks = self._children.signal(number, but_leaving=but_leaving)
        self._connection.started(self._children.started)
        self._connection.send_all(lambda some: protocol.signalled(number, moment, some), ranks)

    def _give_notice(self) -> None:
        assert self._notice is not None
        moment = clock.now_ns()
        self._waits.arm("NOTICE_OVER", clock.now() + self._notice.seconds)
        number, ranks = self._notice.number, self._notice.give(self._children)
        self._connection.send_all(lambda some: protocol.noticed(number, moment, some), ranks)

    def _kill(self) -> None:
        if self._last_message[:1] != _NO_START:
            self._signal_all(linux.SIGKILL)
        self._waits.arm("KILL_OVER", clock.now() + KILL_WAIT)
        self.loop.after(PATIENCE, lambda: self._sweeper().kill_below() if self._state == "KILLING" else None)

    def _sweeper(self) -> Sweep:
        if self._sweep is None:
            from phalanx._engine.keeper.sweep import Sweep

            self._sweep = Sweep(self._children, self.loop, lambda: (self._state, self.log_writer), self._see)
        return self._sweep

    def _sweep_orphans(self) -> None:
        if self._children.none_left():
            self._see("EMPTY")
        else:
            self._sweeper().look()

    def _abandon(self) -> None:
        self._abandoned = self._sweeper().abandon()

    def _drain(self) -> None:
        if self._logs is not None:
            self._logs.finish()
        if self.log_writer and self._last_message != _ORPHANED:  # without a launcher it ends by itself
            self._waits.arm("DRAIN_OVER", clock.now() + DRAIN_WAIT)
        else:
            self._see("DRAINED")

    def _report_end(self) -> None:
        self.loop.forget(self._signals)
        self._send_exits()
        sent = True
        if self._last_message != _ORPHANED:
            entries, beyond = ([], 0) if self._sweep is None else self._sweep.report()
            described = {pid for pid, *_ in entries}
            # Workers among them, whom the launcher knows: the kernel kills them with the keeper (`die_with_parent`).
            gone = [one for one in (self._taken_over or {}).items() if one[0] not in described]
            entries += [protocol.Orphan(pid, -1, "", 0.0, 0, status).pack() for pid, status in gone]
            self._connection.send_all(lambda some: protocol.orphans(some, beyond), entries, FEW)
            logs = "" if self._logs is None else self._logs.incomplete
            sent = self._connection.send(self._last_message or protocol.ended(self._abandoned[:BATCH], logs))
        if sent:
            self._see("REPORTED")

    def _leave(self) -> None:
        self._connection.leave()
        self.loop.stop()


_ACTIONS: dict[str, Callable[[Keeper], None]] = {
    "START_WORKERS": Keeper._start_workers,
    "REFUSE": Keeper._refuse,
    "REPORT_STARTED": Keeper._report_started,
    "ARM_SETTLE": Keeper._arm_settle,
    "GIVE_NOTICE": Keeper._give_notice,
    "SIGNAL": lambda keeper: keeper._signal_all(keeper._death_signal, but_leaving=not keeper._ordered),
    "ARM_GRACE": lambda keeper: keeper._waits.arm_grace(),
    "ARM_LINGER": Keeper._arm_linger,
    "ARM_PATIENCE": lambda keeper: keeper._waits.arm_patience(),
    "SWEEP": Keeper._sweep_orphans,
    "KILL": Keeper._kill,
    "ABANDON": Keeper._abandon,
    "DRAIN": Keeper._drain,
    "ABANDON_LOGS": lambda keeper: None if keeper._logs is None else keeper._logs.abandon(),
    "REPORT_END": Keeper._report_end,
    "LEAVE": Keeper._leave,
}

_ON_MESSAGE: dict[str, Callable[..., None]] = {
    "start": Keeper._on_start,
    "stop": Keeper._on_stop,
    "kill": lambda keeper: keeper._see("KILL"),
    "set_grace": lambda keeper, grace: keeper._waits.set_grace(grace),
    "expect": Keeper._on_expect,
    "signal_worker": lambda keeper, rank, number: keeper._children.signal_rank(rank, number),
    "pause": Keeper._on_pause,
    "evidence_taken": lambda keeper, serial: keeper._escalation and keeper._escalation.evidence_taken(serial),
    "judged": Keeper._on_judged,
    "leaving": Keeper._on_leaving,
}


FOREVER = float("inf")


class Waits:
    """The waits of one group. ``see`` is called with the event when one is over.

    Attributes:
        settle: The settle window in seconds.
        grace: The grace period in seconds; `FOREVER`: it does not end.
        linger: Seconds for what successful workers left behind.
    """

    def __init__(self, loop: Loop, see: Callable[[str], None]) -> None:
        self.settle, self.grace, self.linger = 0.0, 0.0, 0.0
        self._loop = loop
        self._see = see
        self._due: dict[str, Deadline] = {}  # by event
        self._endless = False  # a grace period without an end runs

    def arm(self, event: str, moment: float) -> None:
        """Have ``event`` happen at ``moment``, in place of the moment at which it was due before."""
        if event in self._due:
            self._due.pop(event).cancel()
        if moment < FOREVER:
            self._due[event] = self._loop.at(moment, lambda: self._see(event))

    def enter(self, state: str) -> None:
        """End the waits for events that ``state`` has no place for in the table."""
        for event in [event for event in self._due if (state, event) not in lifecycle.TABLE]:
            self._due.pop(event).cancel()

    def arm_grace(self) -> None:
        """Begin the grace period, or shorten the one that runs."""
        until = clock.now() + self.grace
        if "GRACE_OVER" in self._due:
            until = min(until, self._due["GRACE_OVER"].at)  # of two orders the sooner end, never the later
        self._endless = until == FOREVER
        self.arm("GRACE_OVER", until)

    def set_grace(self, grace: float) -> None:
        """Let the grace period be ``grace`` seconds. One that runs can only become shorter."""
        self.grace = grace
        if "GRACE_OVER" in self._due:
            self.arm_grace()

    def arm_patience(self) -> None:
        """Give all orphans PATIENCE, and those in a worker's session the rest of a grace period that runs."""
        soon = clock.now() + PATIENCE
        self.arm("PATIENCE_OVER", soon)
        if "GRACE_OVER" in self._due:
            self.arm("GRACE_OVER", max(soon, self._due["GRACE_OVER"].at))
        elif not self._endless:
            self.arm("GRACE_OVER", soon)
