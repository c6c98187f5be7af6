"""The attempts of `phalanx run`, from the first start to the end: signals, the report, the exit code."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import NamedTuple

import click

from phalanx._agent.attempt_end import AttemptEnd, Ending
from phalanx._agent.attempts import Attempts
from phalanx._agent.common_stop import CommonStop
from phalanx._agent.group_team import GroupTeam
from phalanx._agent.history import describe_attempts
from phalanx._agent.runner import NoAttemptError
from phalanx._base import clock, interrupts
from phalanx._base.clock import format_duration
from phalanx._base.stderr import mention, tell
from phalanx._engine import host_signals
from phalanx._events import agent_kinds
from phalanx._outcomes.outcome import NOT_AVAILABLE, signal_name
from phalanx._outcomes.result import verdict
from phalanx._run.status_events import StatusWorker
from phalanx._runs.recorder import Recorder
from phalanx.cli import _python
from phalanx.cli._run_record import RunRecord
from phalanx.cli._say import say
from phalanx.multiprocessing import (
    KeeperLostError,
    PContext,
    PreloadError,
    RunProcsResult,
    ScriptContext,
    SignalException,
)
from phalanx.multiprocessing.errors import ChildFailedError, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import ExitStack
    from typing import Any, TypeVar

    from phalanx._agent.restart_policy import RestartPolicy
    from phalanx._events.kinds import Event
    from phalanx.cli._attempt_groups import AttemptGroups
    from phalanx.cli._node_check import NodeCheck
    from phalanx.cli._run_logs import RunLogs
    from phalanx.cli._run_plan import RunPlan
    from phalanx.cli._run_record import Asked, Observer, Observers
    from phalanx.cli._services import Services

    T = TypeVar("T")


GONE = "the workers have ended by such a signal, too"


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
        observers: See `RunRecord`.
        signals: Those that stop the run.
        asked: What was asked for.
        check: What this machine has to pass before each attempt; None: nothing.
    """

    def __init__(
        self,
        groups: AttemptGroups,
        policy: RestartPolicy,
        *,
        run_id: str,
        keep_runs: int | None,
        observers: Observers,
        signals: Iterable[int],
        asked: Asked,
        check: NodeCheck | None = None,
    ) -> None:
        recorder = Recorder(
            groups.script, groups.envs, run_id=run_id, command=groups.command, warn=self.warn, keep_runs=keep_runs,
            argv=asked.argv, config=asked.config,
        )  # fmt: skip
        self.record = RunRecord(recorder, self.warn, observers)
        super().__init__(self._make_warm, common=CommonStop(signals))
        groups.emit_into(self.record.stream)
        self._groups = groups
        self.name = groups.script
        self.policy = policy
        self._number = -1  # of the latest attempt
        self._place = Place()
        groups.options["on_reader_gone"] = lambda stream: self.record.reader_gone(self._number, stream)
        self.not_started: Exception | None = None
        """Why the last attempt could not be started; None: it was."""
        self.error: ChildFailedError | None = None
        """The failures that the report is about; None: there are none."""
        self.check: NodeCheck | None = check

    def warn(self, text: str) -> None:
        """Say a line, above those of the workers. By any thread."""
        if self.group is None or not self.group.say(f"phalanx: {text}"):
            say(text)

    def _make_warm(self, attempt: int, before: PContext | None) -> PContext:
        self._groups.warm_up()
        return self._groups.make(attempt, before)

    def record_end(self, state: str, exitcode: int, cause: str = "", report: str = "") -> None:
        """Record how the run has ended, see `RunRecord.end`."""
        result = self.result
        known = result is not None and state != "stopped"
        failures = result.failures if known and result is not None else {}
        outcomes = result.outcomes if known and result is not None else {}
        fell = {rank for rank, outcome in outcomes.items() if failures or outcome.state != "succeeded"}
        self.emit(
            agent_kinds.AgentEnded, self._number, state=state.upper() if known else "RAISED",
            restarts=max(0, self._number), error="" if known else "stopped" if state == "stopped" else cause,
            failures={self._place.first_rank + rank: failure for rank, failure in failures.items()},
            terminated={self._place.first_rank + rank for rank in fell - failures.keys()},
        )  # fmt: skip
        self.record.end(self._number, state, exitcode, cause, report)

    def emit(self, kind: type[Event], attempt: int, **fields: Any) -> None:
        """Emit an event of this agent that happens now."""
        self.record.stream.emit(kind, attempt, clock.now_ns(), **fields)

    def _emit_status(self, status: str, attempt: int, workers: tuple[StatusWorker, ...] = ()) -> None:
        self.emit(
            agent_kinds.AgentStatus, attempt, status=status, seconds=0.0, restarts=attempt,
            group_rank=self._place.group_rank, group_world_size=self._place.group_world_size, workers=workers,
        )  # fmt: skip

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """See `Team`. The workers are started when the machine has passed its check."""
        self._number, self.not_started, self._wake = attempt, None, wake
        self._emit_status("RENDEZVOUS", attempt)
        self._emit_status("ASSIGN_WORKER_RANKS", attempt)
        try:
            self._prepare(attempt)
        except Exception as error:
            self.not_started = error
            raise
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

    def _start_pending(self) -> None:
        try:
            super()._start_pending()
        except Exception as error:
            self.not_started = error
            raise

    def _start_group(self, attempt: int) -> None:
        super()._start_group(attempt)
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
        return is_up

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        if self.check is not None and self.check.is_under_way:
            self.poll_seconds = self.check.seconds_left
            return None
        return super().ended()

    def stop(self, death_signal: int, grace: float) -> None:
        """See `Team`."""
        if self.check is not None:
            self.check.stop(death_signal, grace)
        super().stop(death_signal, grace)

    def close(self) -> None:
        """See `GroupTeam`."""
        super().close()
        if self.check is not None:
            self.check.close()

    def wait_shown(self) -> None:
        """Return when all lines of the workers are shown, or those that a slow console takes in 10 s."""
        if self.group is not None:
            with suppress(RuntimeError):  # it was never up; or its keeper was lost, which is known
                self.group.wait()


def observers_of(plan: RunPlan, services: Services | None, until_end: ExitStack) -> dict[str, Observer]:
    """Return who takes the events of a run, beside its record."""
    observers: dict[str, Observer] = {}
    if services is not None and plan.health_address is not None:
        observers["phalanx-health"] = services.observe
    if plan.events is not None:
        observers["phalanx-status"] = plan.events
        until_end.callback(plan.events.close)
    return observers


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
    team.record.begin()
    try:
        ending, stopped = run()
        with suppress(SignalException):  # a console that nobody reads is waited for no longer
            team.wait_shown()
            team.close()
        # No worker is left. A signal changes nothing any more: else it could keep the end from being recorded.
        return undisturbed(lambda: conclude(ending, stopped))
    finally:
        try:
            with suppress(SignalException):
                team.close()  # closed already, unless an exception came
            at_end()
        finally:
            host_signals.ignore()  # until this process has left: its exit code is known
            host_signals.release(team)
            team.record.close()


def see_attempts_through(team: RunTeam, specs: RunLogs, grace: float, *, colour: bool) -> int:
    """Start the group, again as the policy says, wait for the end, and say what became of it. Returns the exit code."""
    try:
        return see_through(
            team,
            lambda: _run_all(team, grace),
            lambda ending, stopped: _conclude(ending, stopped, team, specs, colour=colour),
        )
    except (PreloadError, NoAttemptError, KeeperLostError) as error:
        say(f"Error: {error}")
        return 1
    except OSError as error:
        raise click.ClickException(in_our_words(error, team.group)) from None
    except ValueError as error:
        raise click.UsageError(in_our_words(error, team.group)) from None


def _run_all(team: RunTeam, grace: float) -> tuple[Ending, signal.Signals | None]:
    """Carry all attempts out. Returns how it ended, and by which signal it was stopped, or None.

    Signals raise SignalException from then on, until ``team`` is released.
    """

    def stop(death: signal.Signals) -> None:
        seconds = 0.0 if death == signal.SIGKILL else grace
        if death == signal.SIGKILL:
            host_signals.ignore()  # beyond, there is nothing to be asked for, and a worker may send them without end
        _say_stop(attempts, team, death, seconds)
        attempts.ask_stop(death, seconds)

    try:
        with Attempts(team, team.policy, events=team.record.stream) as attempts:
            first = attempts.carry_to_end(stop, team)
            return attempts.run(), None if first is None else first.sigval
    except (PreloadError, NoAttemptError, KeeperLostError) as error:
        team.record_end("failed", 1, str(error))
        raise
    except (OSError, ValueError) as error:
        team.record_end("failed", 1 if isinstance(error, OSError) else 2, in_our_words(error, team.group))
        raise


def undisturbed(step: Callable[[], T]) -> T:
    """Return what ``step`` returns. A signal that comes meanwhile has no effect."""
    done: list[T] = []
    while not done:  # one may have come just before the signals were deferred
        with suppress(SignalException), interrupts.deferred():
            done.append(step())
    return done[0]


def _conclude(ending: Ending, stopped: signal.Signals | None, team: RunTeam, specs: RunLogs, *, colour: bool) -> int:
    """Record how the run ended, and report what went wrong. Returns the exit code."""
    result = team.result or RunProcsResult()
    last = ending.ends[-1] if ending.ends else AttemptEnd("stopped")
    attempt = f"attempt {last.number}"
    error = _failures(team, result, specs, ending)
    report = "" if error is None else error.format_msg()
    if stopped is not None and ending.state == "stopped":
        code = 128 + stopped
        cause = f"{stopped.name}, after {attempt}: {last.describe()}" if last.failed else stopped.name
        team.record_end("stopped", code, cause, report)
        _report_stop(error, ending, cause, colour=colour)
        return code
    team.error = error
    code, cause = verdict(result)
    if team.lost is not None:
        say(f"Error: {team.lost}")
        code, cause = code or 1, str(team.lost)
    elif last.state == "not started":
        why = last.error if team.not_started is None else in_our_words(team.not_started, team.group)
        say(f"Error: {why}")
        code, cause = 1, last.error
    if len(ending.ends) > 1:
        cause = cause and f"{attempt}: {cause}"
        if not code:
            say(f"{attempt} has succeeded, after {format_duration(last.uptime)}")
    team.record_end("failed" if code else "succeeded", code, cause, report)
    _report(error, result, ending, colour=colour)
    return code


def in_our_words(error: Exception, group: PContext | None) -> str:
    """What the library says of the program, said of what the user has given."""
    head, text = "entrypoint: ", str(error)
    if not text.startswith(head):
        return text
    chosen = isinstance(group, ScriptContext) and os.environ.get(_python.CHOICE)
    return f"{_python.CHOICE if chosen else 'SCRIPT'}: {text.removeprefix(head)}"


def _say_stop(attempts: Attempts, team: RunTeam, death: signal.Signals, seconds: float) -> None:
    """Say what a signal has brought about, above the live lines of a terminal."""
    if attempts.state == "WAITING":
        mention(f"phalanx: {death.name}: no other attempt is started")
    elif team.group is not None and team.group.is_open:
        text = f"phalanx: {death.name}: {announced(team.group, death, seconds)}"
        if not team.group.say(text):
            mention(text)
    elif team.check is not None and team.check.is_under_way:
        mention(f"phalanx: {death.name}: ending --node-check; no attempt is started")
    elif team.is_put_off:
        mention(f"phalanx: {death.name}: the run is stopped; {GONE}")


def announced(group: PContext, death: signal.Signals, seconds: float) -> str:
    """Return what is said of a stop of the workers."""
    if death == signal.SIGKILL:
        return "killing the workers"
    if group.notice is None:
        return f"stopping the workers (at most {seconds:g} s; once more to kill them)"
    number, span = group.notice
    spans = f"{span:g} s from now, SIGKILL at most {seconds:g} s later; once more to kill them"
    return f"giving the workers notice of a stop by {signal_name(number)} ({death.name} {spans})"


def _report_stop(error: ChildFailedError | None, ending: Ending, cause: str, *, colour: bool) -> None:
    """Say which attempts had failed before the run was stopped: the latest in full, if no other had begun after it."""
    failed = [end for end in ending.ends if end.failed]
    if not failed:
        return
    if error is not None and failed[-1] is ending.ends[-1]:
        show_report(error, colour=colour)
    else:
        for line in describe_attempts(failed):
            say(line)
    say(f"stopped by {cause}")


def _failures(team: RunTeam, result: RunProcsResult, logs: RunLogs, ending: Ending) -> ChildFailedError | None:
    """Return what the report is about; None: no worker has failed."""
    if not result.failures:
        return None
    return child_failed(team.name, result, logs, describe_attempts(ending.ends[:-1]), ending.why)


def _report(error: ChildFailedError | None, result: RunProcsResult, ending: Ending, *, colour: bool) -> None:
    """Say what went wrong, if anything did."""
    if error is not None:
        show_report(error, colour=colour)
        return
    for rank, outcome in result.outcomes.items():
        if outcome.state != "succeeded" or outcome.early:
            say(f"rank {rank}: {outcome.describe()}")
    if ending.state == "failed":
        for line in describe_attempts(ending.ends[:-1]):
            say(line)


def child_failed(
    name: str, result: RunProcsResult, logs: RunLogs, earlier: list[str], why: str, *, log_dir: str = "",
    lost: tuple[str, str] | None = None,
) -> ChildFailedError:  # fmt: skip
    """Return the report on a run that has failed, as an exception.

    ``earlier``: lines on the attempts before. ``why``: why no other followed. ``log_dir``: the folder of the logs;
    default: the run's. ``lost``: see `format_report`.
    """
    log_dir, failures = log_dir or logs.run_log_dir or "", result.failures
    if not logs.is_kept:  # the error files have gone with the group
        failures = {rank: failure.replace(error_file=NOT_AVAILABLE) for rank, failure in failures.items()}

    @record  # a launcher that is itself a worker passes the root cause on to its own error file
    def fail() -> None:
        raise ChildFailedError(
            name, failures, outcomes=result.outcomes, log_dir=log_dir, lost=lost, earlier=earlier, gave_up=why
        )

    try:
        fail()
    except ChildFailedError as error:
        return error
    raise AssertionError


def show_report(error: ChildFailedError, *, colour: bool) -> None:
    """Show a report."""
    from phalanx.errors import format_report

    tell(format_report(
        error.name, error.failures, outcomes=error.outcomes, log_dir=error.log_dir, lost=error.lost,
        earlier=error.earlier, gave_up=error.gave_up, style=style if colour else None,
    ))  # fmt: skip


def style(kind: str, line: str) -> str:
    """Give a line of the report its looks."""
    looks: dict[str, dict[str, Any]] = {
        "rule": {"dim": True},
        "title": {"fg": "red", "bold": True},
        "heading": {"bold": True},
        "error": {"fg": "red"},
    }
    return click.style(line, **looks.get(kind, {}))
