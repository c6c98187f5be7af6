"""The attempts of `phalanx run`, from the first start to the end: signals, the report, the exit code."""

from __future__ import annotations

import os
import signal

import click

from phalanx._agent import master_port
from phalanx._agent.attempt_end import AttemptEnd, Ending
from phalanx._agent.attempts import Attempts
from phalanx._agent.history import describe_attempts
from phalanx._agent.runner import NoAttemptError
from phalanx._base.clock import format_duration
from phalanx._base.stderr import mention, say, tell
from phalanx._engine import host_signals
from phalanx._outcomes.failure import NOT_AVAILABLE, signal_name
from phalanx._outcomes.result import verdict
from phalanx._run.run_team import RunTeam, see_through
from phalanx.cli._run_plan import PYTHON_EXEC_ENV
from phalanx.multiprocessing import KeeperLostError, PContext, PreloadError, RunProcsResult, ScriptContext
from phalanx.multiprocessing.errors import ChildFailedError, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._agent.master_port import ReservedPort
    from phalanx._run.run_record import Observer
    from phalanx._run.services import Services
    from phalanx.cli._run_logs import RunLogs
    from phalanx.cli._run_plan import RunPlan


_GONE = "the workers have ended by such a signal, too"


def observers_of(plan: RunPlan, services: Services | None) -> dict[str, Observer]:
    """Return who takes the events of a run, beside its record."""
    observers: dict[str, Observer] = {}
    if services is not None and plan.health_address is not None:
        observers["phalanx-health"] = services.observe
    if plan.events is not None:
        observers["phalanx-status"] = plan.events
    return observers


def see_attempts_through(team: RunTeam, specs: RunLogs, grace: float, *, colour: bool) -> int:
    """Start the group, again as the policy says, wait for the end, and say what became of it. Returns the exit code."""
    return see_through(
        team,
        lambda: _run_all(team, grace),
        lambda ending, stopped: _conclude(ending, stopped, team, specs, colour=colour),
    )


def _run_all(team: RunTeam, grace: float) -> tuple[Ending, signal.Signals | None]:
    """Carry all attempts out. Returns how it ended, and by which signal it was stopped, or None.

    Signals raise SignalException from then on, until ``team`` is released. Raises ClickException; and SystemExit where
    what could not be started has been reported.
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
        say(f"Error: {error}")
        team.record_end("failed", 1, str(error))
        raise SystemExit(1) from error
    except OSError as error:
        team.record_end("failed", 1, text := in_our_words(error, team.group))
        raise click.ClickException(text) from None
    except ValueError as error:
        team.record_end("failed", 2, text := in_our_words(error, team.group))
        raise click.UsageError(text) from None


def _conclude(ending: Ending, stopped: signal.Signals | None, team: RunTeam, specs: RunLogs, *, colour: bool) -> int:
    """Record how the run ended, and report what went wrong. Returns the exit code."""
    result = team.result or RunProcsResult()
    last = ending.ends[-1] if ending.ends else AttemptEnd("stopped")
    attempt = f"attempt {last.number}"
    error = None
    if result.failures:
        error = child_failed(team.name, result, specs, describe_attempts(ending.ends[:-1]), ending.why)
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
    chosen = isinstance(group, ScriptContext) and os.environ.get(PYTHON_EXEC_ENV)
    return f"{PYTHON_EXEC_ENV if chosen else 'SCRIPT'}: {text.removeprefix(head)}"


def _say_stop(attempts: Attempts, team: RunTeam, death: signal.Signals, seconds: float) -> None:
    """Say what a signal has brought about, above the live lines of a terminal."""
    if attempts.state == "WAITING":
        mention(f"phalanx: {death.name}: no other attempt is started")
    elif team.group is not None and team.group.is_open:
        text = f"phalanx: {death.name}: {_announced(team.group, death, seconds)}"
        if not team.group.say(text):
            mention(text)
    elif team.check is not None and team.check.is_under_way:
        mention(f"phalanx: {death.name}: ending --node-check; no attempt is started")
    elif team.is_put_off:
        mention(f"phalanx: {death.name}: the run is stopped; {_GONE}")


def _announced(group: PContext, death: signal.Signals, seconds: float) -> str:
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


def reserve_port() -> ReservedPort:
    """Reserve a port for rank 0, see `master_port.reserve`. Raises ClickException."""
    try:
        return master_port.reserve()
    except OSError as error:
        msg = f"no port for MASTER_PORT: {error.strerror}; --master-port takes the number of one"
        raise click.ClickException(msg) from None
