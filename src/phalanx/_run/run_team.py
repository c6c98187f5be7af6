"""The workers of a run on this machine: their events, the record of these, the signals passed on to them, their end."""

from __future__ import annotations

import atexit
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from phalanx._base import clock, interrupts
from phalanx._base.stderr import say
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._engine import host_signals
from phalanx._events import agent_kinds, kinds
from phalanx._events.kinds import Event
from phalanx._events.stream import PATIENCE, EventStream
from phalanx._group.restart_policy import AttemptEnd, RestartPolicy
from phalanx._run.control import Control
from phalanx._run.group_team import CommonStop, GroupTeam
from phalanx._run.run_events import Asked, Observers, StatusWorker
from phalanx._run.status import RunStatus
from phalanx._run.worker_env import AttemptGroups
from phalanx._runs.recorder import Recorder, observe
from phalanx.multiprocessing import PContext, SignalException

T = TypeVar("T")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._run.event_commands import EventCommands
    from phalanx._run.node_check import NodeCheck
    from phalanx.multiprocessing.errors import ChildFailedError

_LAST = 0.2  # seconds for what is emitted after the end of the run is recorded, where an exception came instead


class Place(NamedTuple):
    """Where the workers of this machine are among those of all.

    Attributes:
        group_rank, group_world_size: Which machine this is, of how many.
        first_rank: The rank in the job of local rank 0.
        role_rank, role_world_size: Its rank among the workers of its role, and how many those are; 0: those of here.
    """

    group_rank: int = 0
    group_world_size: int = 1
    first_rank: int = 0
    role_rank: int = 0
    role_world_size: int = 0


class RunTeam(GroupTeam):
    """The attempts of a run, their events, and what is recorded of these.

    Args:
        groups: Makes the groups.
        policy: When a group is started again.
        run_id: The run's id.
        keep_runs: See `Recorder`.
        status: Learns what happens, and which group runs.
        observers: Take the events, too, each on a thread of the name that is its key.
        signals: Those that stop the run.
        asked: What was asked for.
        check: What this machine has to pass before each attempt; None: nothing.
        sample: Seconds between two samples of the workers, see `phalanx._run.samples`; 0: none is taken.
        commands: Runs commands when something happens; None: there are none.
    """

    def __init__(
        self,
        groups: AttemptGroups,
        policy: RestartPolicy,
        *,
        run_id: str,
        keep_runs: int | None,
        status: RunStatus,
        observers: Observers,
        signals: Iterable[int],
        asked: Asked,
        check: NodeCheck | None = None,
        sample: float = 0.0,
        commands: EventCommands | None = None,
    ) -> None:
        self.events = EventStream()
        """Where what happens is emitted."""
        self._status = status
        status.name, status.group = groups.script, lambda: self.group
        self._observers, self._commands = observers, commands
        self._closed: set[str] = set()  # of stdout and stderr
        self._recorder = Recorder(
            groups.script, groups.envs, run_id=run_id, command=groups.command, warn=self.warn, keep_runs=keep_runs,
            argv=asked.argv, config=asked.config,
        )  # fmt: skip
        super().__init__(self._make_warm, common=CommonStop(signals))
        groups.options["events"] = self.events
        self._groups = groups
        self.name = groups.script
        self.policy = policy
        self._number = -1  # of the latest attempt
        self._place = Place()
        groups.options["on_reader_gone"] = self._reader_gone
        self.error: ChildFailedError | None = None
        """The failures that the report is about; None: there are none."""
        self.check: NodeCheck | None = check
        self.control = Control(self, self.warn)
        """Answers those who ask about the run from outside."""
        self.on_up: Callable[[RunTeam], object] = lambda _team: None
        """Called when every worker of an attempt runs."""
        self._sample, self._over = sample, Latch()
        self._sampling = SerialExecutor("phalanx-sampler")
        self.control.stops, self.control.status = tuple(signals), status.collect

    def warn(self, text: str) -> None:
        """Say a line, above those of the workers. By any thread."""
        if self.group is None or not self.group.say(f"phalanx: {text}"):
            say(text)

    def _make_warm(self, attempt: int, before: PContext | None) -> PContext:
        self._groups.warm_up()
        return self._groups.make(attempt, before)

    def begin_record(self) -> None:
        """Begin to write what happens."""
        observe(self.events, self.warn, self._recorder)
        self.events.subscribe("phalanx-state", self._status.observe)
        for name, take in self._observers.items():
            self.events.subscribe(name, take)
        if self._commands is not None:
            self._commands.warn = self.warn
            self.events.subscribe(self._commands.NAME, self._commands)
        if self._sample:
            self._sampling.submit(self._take_samples)

    def _take_samples(self) -> None:
        """Take samples until the end, on a thread of its own. A run that is over before the first one has no part."""
        if not self._over.wait(self._sample):
            from phalanx._run.samples import Sampler

            folder, sample = lambda: self._groups.log_dir, self._sample
            Sampler(self._status, self.control, folder, sample, self.warn, self.emit).run(self._over)

    def _reader_gone(self, stream: str) -> None:
        """Emit, and print, that nobody reads a stream of the launcher's any more. Once for each; see `PContext`."""
        if stream not in self._closed:
            self._closed.add(stream)
            self.emit(kinds.ConsoleClosed, self._number, stream=stream)
            self.warn(f"nobody reads {stream} any more; the run goes on, and its log files have all lines")

    def record_end(self, state: str, exitcode: int, cause: str = "", report: str = "") -> None:
        """Write how the run has ended. Returns when all is written, after 5 s at most if the disk does not answer.

        ``report``: what the report says; "": what the record does.
        """
        if self._number >= 0:  # else it has had no part in the run
            self._emit_end(state, cause)
        self._recorder.report = report
        if self._commands is not None:
            self._commands.report = report
        self.emit(agent_kinds.RunEnded, self._number, state=state, exitcode=exitcode, cause=cause)
        self._recorder.finish(self.events)

    def begin_last_commands(self) -> None:
        """Run the commands that are about the end, which was recorded and printed. Returns at once, or after 5 s.

        Idempotent.
        """
        if self._commands is not None and not self._commands.is_ending:
            with interrupts.deferred():
                if self.events.drain(PATIENCE, (self._commands.NAME,)):
                    self.warn(f"--on-event: no command runs for the end, of which nothing came within {PATIENCE:g} s")
                self._commands.begin_end()

    def end_commands(self, seconds: float) -> None:
        """Wait for the commands. ``seconds``: 0: they are killed."""
        if self._commands is not None:
            self._commands.close(seconds)

    def close_record(self) -> None:
        """End the threads, once they have handled all, or after 0.2 s; after 5 s where somebody observes them."""
        self._over.open()
        self._sampling.drain(_LAST)
        late = self.events.close(PATIENCE if self._observers else _LAST)
        for name in self._observers.keys() & set(late):
            self.warn(f"{name} has not taken all events of this run within {PATIENCE:g} s of its end")

    def _emit_end(self, state: str, cause: str) -> None:
        result, first = self.result, self._place.first_rank
        known = result is not None and state != "stopped"
        failures = result.failures if known and result is not None else {}
        outcomes = result.outcomes if known and result is not None else {}
        well = {rank for rank, outcome in outcomes.items() if outcome.state == "succeeded" and not failures}
        self.emit(
            agent_kinds.AgentEnded, self._number, state=state.upper() if known else "RAISED", restarts=self._number,
            error="" if known else "stopped" if state == "stopped" else cause,
            failures={first + rank: failure for rank, failure in failures.items()},
            terminated={first + rank for rank in self._groups.envs.keys() - failures.keys() - well},
        )  # fmt: skip

    def emit(self, kind: type[Event], attempt: int, **fields: Any) -> None:
        """Emit an event of this agent that happens now."""
        self.events.emit(kind, attempt, clock.now_ns(), **fields)

    def _emit_status(self, status: str, attempt: int, workers: tuple[StatusWorker, ...] = ()) -> None:
        self.emit(
            agent_kinds.AgentStatus, attempt, status=status, seconds=0.0, restarts=attempt,
            group_rank=self._place.group_rank, group_world_size=self._place.group_world_size, workers=workers,
        )  # fmt: skip

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """See `Team`. The workers are started when the machine has passed its check."""
        self._number, self._wake = attempt, wake
        self._emit_status("RENDEZVOUS", attempt)
        self._emit_status("ASSIGN_WORKER_RANKS", attempt)
        self._prepare(attempt)
        super().start(attempt, wake)

    def _prepare(self, attempt: int) -> None:
        """Begin what a start has to wait for. Raises OSError."""
        if self.check is not None:
            self.check.begin(f"attempt {attempt}", self._wake)

    def _may_start(self) -> bool:
        if self.check is None:
            return True
        try:
            has_passed = self.check.has_passed()
        finally:
            self.poll_seconds = self.check.seconds_left
        return has_passed

    def _start_group(self, attempt: int) -> None:
        super()._start_group(attempt)
        self.control.open(self._groups.log_dir)
        if self.check is not None:
            self.check.write(self._groups.log_dir)
        # Now: at the end there may be no descriptor, or no disk. And whole: a handler's exception in the midst of an
        # import can leave the lock of the import system taken, for which the thread that writes run.json would wait.
        with interrupts.deferred():
            from phalanx._runs.run_report import describe_run  # noqa: F401 - see above
            from phalanx.errors import format_report  # noqa: F401 - likewise

    def is_up(self) -> bool:
        """See `Team`."""
        is_up = super().is_up()
        if is_up and self.group is not None:
            place, pids = self._place, self.group.pids()
            size = place.role_world_size or len(self._groups.envs)
            self._emit_status("START", self._number, tuple(
                StatusWorker(pids.get(rank), rank, place.first_rank + rank, place.role_rank + rank, size)
                for rank in sorted(self._groups.envs)
            ))  # fmt: skip
            self.on_up(self)
        return is_up

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        if self.check is not None and self.check.is_under_way:
            self.poll_seconds = self.check.seconds_left
            return None
        return super().ended()

    def stop(self, death_signal: int | None, grace: float) -> None:
        """See `Team`."""
        if self.check is not None:
            self.check.stop(death_signal or signal.SIGTERM, grace)
        super().stop(death_signal, grace)

    def close(self) -> None:
        """See `GroupTeam`."""
        self.control.close()
        super().close()
        if self.check is not None:
            self.check.close()


def see_through(
    team: RunTeam,
    run: Callable[[], tuple[T, signal.Signals | None]],
    conclude: Callable[[T, signal.Signals | None], int],
    at_end: Callable[[], object] = lambda: None,
) -> int:
    """Carry a run out from its record's beginning to its end. Returns the exit code.

    Args:
        team: The workers.
        run: Carries all attempts out. Returns how they ended, and by which signal that was asked for, or None.
        conclude: Records how they ended, and reports what went wrong. Returns the exit code.
        at_end: Called when no worker is left, whatever has happened.
    """
    team.begin_record()
    try:
        ending, stopped = run()
        with suppress(SignalException):  # a console that nobody reads is waited for no longer
            with suppress(RuntimeError):  # it was never up; or its keeper was lost, which is known
                if team.group is not None:  # until all lines are shown, or those that a slow console takes in 10 s
                    team.group.wait()
            team.close()
        # No worker is left. A signal changes nothing any more: else it could keep the end from being recorded.
        codes: list[int] = []
        while not codes:  # one may have come just before the signals were deferred
            with suppress(SignalException), interrupts.deferred():
                codes.append(conclude(ending, stopped))
        return codes[0]
    finally:
        try:
            with suppress(SignalException):
                team.close()  # closed already, unless an exception came

            def end(seconds: float) -> None:  # a signal may come at any moment of it: then it is done again
                team.begin_last_commands()
                at_end()
                team.end_commands(seconds)

            host_signals.shortened(end, math.inf)
        finally:
            host_signals.ignore()  # until this process has left: its exit code is known
            host_signals.release(team)
            team.close_record()


def _one_by_one(call: Callable[[int], None]) -> Callable[[int, object], None]:
    """Return a handler that calls ``call`` with the number of the signal, and is not interrupted by itself.

    Of the signals that come meanwhile, however many, each is passed on once, afterwards: so the kernel does with
    signals that are pending (signal(7)).
    """
    due: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if due:  # the call that this has interrupted goes on with it
            if number not in due[1:]:
                due.append(number)
            return
        try:
            due.append(number)
            while due:
                call(due[0])
                del due[0]
        finally:
            due.clear()  # a signal that stops the run has raised

    return handle


@contextmanager
def forwarding(chosen: list[signal.Signals], team: GroupTeam) -> Iterator[None]:
    """Pass signals to this process on to the workers that run; from the main thread only, where handlers can be set.

    One that this process ignores stays ignored, and a handler of C code's stays. One that would kill this process does
    nothing after the end, either: it would take the place of the exit code. See `restoring`.
    """
    forward = _one_by_one(team.signal)

    def ignore(number: int) -> None:
        if signal.getsignal(number) is forward:
            signal.signal(number, signal.SIG_IGN)

    before: dict[int, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        chosen = []
    try:
        for number in chosen:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, forward)
        yield
    finally:
        for taken, handler in before.items():
            if handler != signal.SIG_DFL:
                signal.signal(taken, handler)
            else:  # the interpreter's end would restore it, for the time that it takes
                atexit.register(ignore, taken)


@contextmanager
def restoring() -> Iterator[None]:
    """Have the handlers of all signals as before, afterwards: for a program that goes on when a run has ended."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
