"""The attempts of `phalanx run`, from the first start to the end: signals, the report, the exit code."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import click

from phalanx._agent.attempt_end import AttemptEnd, Ending
from phalanx._agent.attempts import Attempts
from phalanx._agent.group_team import GroupTeam
from phalanx._agent.history import describe_attempts
from phalanx._base import interrupts
from phalanx._base.clock import format_duration
from phalanx._base.stderr import mention, tell
from phalanx._engine import host_signals
from phalanx._engine.host_signals import signals_to_handle
from phalanx._outcomes.outcome import NOT_AVAILABLE, signal_name
from phalanx._outcomes.result import verdict
from phalanx._runs.recorder import Recorder
from phalanx.cli import _python
from phalanx.cli._say import say
from phalanx.multiprocessing import (
    LogsDest,
    PContext,
    PreloadError,
    RunProcsResult,
    ScriptContext,
    SignalException,
)
from phalanx.multiprocessing.errors import ChildFailedError, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    from phalanx._agent.restart_policy import RestartPolicy
    from phalanx._runs.recorder import Seen
    from phalanx.cli._attempt_groups import AttemptGroups
    from phalanx.cli._run_logs import RunLogs

    T = TypeVar("T")


class RunTeam(GroupTeam):
    """The attempts of a run, and their record.

    Args:
        groups: Makes the groups.
        policy: When a group is started again.
        run_id: The run's id.
        keep_runs: See `Recorder`.
        observers: Are called with what happens, as `observe` is.
    """

    def __init__(
        self,
        groups: AttemptGroups,
        policy: RestartPolicy,
        *,
        run_id: str,
        keep_runs: int | None,
        observers: Sequence[Callable[[str, dict[str, Any]], None]] = (),
    ) -> None:
        super().__init__(self._make_noted)
        self.name = groups.script
        self.policy = policy
        self.recorder = Recorder(
            groups.script, groups.envs, LogsDest, lambda: ({}, None), run_id=run_id, command=groups.command,
            warn=self._warn, keep_runs=keep_runs,
        )  # fmt: skip
        self.not_started: Exception | None = None
        """Why the last attempt could not be started; None: it was."""
        self.error: ChildFailedError | None = None
        """The failures that the report is about; None: there are none."""
        self._followed = -1  # the attempt that is recorded
        self.stopped_in_delay = False
        """Whether the run was stopped between two attempts."""
        self._groups = groups
        self._standby = groups.standby
        self._latest: dict[int, PContext] = {}  # the latest two groups, by attempt
        self._failed = AttemptEnd("failed")
        self._observers = observers
        self.envs = groups.envs

    def _warn(self, text: str) -> None:
        if self.group is None or not self.group.say(f"phalanx: {text}"):
            say(text)

    def _make_noted(self, attempt: int, before: PContext | None) -> PContext:
        self._groups.warm_up()
        group = self._latest[attempt] = self._groups.make(attempt, before)
        self._latest.pop(attempt - 2, None)
        if attempt == 0:  # its start may fail, too; a later one is followed once the end of the one before is recorded
            self._follow(0)
        return group

    def pids(self) -> dict[int, int]:
        """Return the process ids of the attempt that runs, or ran last; none, if it was never up."""
        return {} if self.group is None else look(self.group)[0]

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """See `Team`."""
        self.not_started = None
        try:
            super().start(attempt, wake)
        except Exception as error:
            self.not_started = error
            raise
        if self._standby is not None and self.group is not None and self.policy.may_follow(attempt):
            self._standby.expect(attempt + 1, self.group)
        # Now: at the end there may be no descriptor, or no disk. And whole: a handler's exception in the midst of an
        # import can leave the lock of the import system taken, for which the thread that writes run.json would wait.
        with interrupts.deferred():
            from phalanx.errors import format_report  # noqa: F401 - see above

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        end = super().ended()
        if self._standby is not None:
            if end is None:
                self.poll_seconds = self._standby.tend()
            elif not end.failed:
                self._standby.drop()
        return end

    def stop(self, death_signal: int, grace: float) -> None:
        """See `Team`."""
        self.drop_standby()
        super().stop(death_signal, grace)

    def drop_standby(self) -> None:
        """Order the end of what is ready for a next attempt: there is none."""
        if self._standby is not None:
            self._standby.drop()

    def close(self) -> None:
        """See `GroupTeam`."""
        self.drop_standby()  # before the waits for consoles
        super().close()
        if self._standby is not None:
            self._standby.close()

    def observe(self, name: str, facts: dict[str, Any]) -> None:
        """Record what has happened, see `Attempts`."""
        for each in self._observers:
            each(name, facts)
        if name == "agent.state" and facts["state"] == "RUNNING":
            self._follow(facts["attempt"])
            self.recorder.record_start()
        elif name == "attempt.ended":
            end = AttemptEnd(**facts)
            if end.failed:
                self._failed = end
            if end.number > self._followed:
                self._record_unfollowed(end)
        elif name == "restart.decided":
            cause = f"attempt {facts['attempt'] + 1}{self.policy.attempts}: {self._failed.describe()}"
            self.recorder.record_restart(cause, self._failed.step)

    def _record_unfollowed(self, end: AttemptEnd) -> None:
        """Record an attempt that was not started, or that was to be stopped before all of it was."""
        group = self._latest.get(end.number)
        if end.state == "not started" or group is None or not group.logs.timeline:
            self.recorder.record_not_started(end.number)
        else:
            self._follow(end.number)
            self.recorder.record_start()

    def _follow(self, attempt: int) -> None:
        """Record an attempt from now on."""
        group = self._latest.get(attempt)
        if group is not None:
            self._followed = attempt
            self.recorder.follow(lambda: group.logs, lambda: look(group))

    def wait_shown(self) -> None:
        """Return when all lines of the workers are shown, or those that a slow console takes in 10 s."""
        if self.group is not None:
            with suppress(RuntimeError):  # it was never up; or its keeper was lost, which is known
                self.group.wait()


def see_through(team: RunTeam, specs: RunLogs, grace: float, *, colour: bool) -> int:
    """Start the group, again as the policy says, wait for the end, and say what became of it. Returns the exit code."""
    recorder = team.recorder
    try:
        try:
            ending, stopped = _run_all(team, grace)
        except PreloadError as error:
            say(f"Error: {error}")
            recorder.record_end_and_wait("failed", 1, str(error))
            return 1
        except OSError as error:
            recorder.record_end_and_wait("failed", 1, text := in_our_words(error, team.group))
            raise click.ClickException(text) from None
        except ValueError as error:
            recorder.record_end_and_wait("failed", 2, text := in_our_words(error, team.group))
            raise click.UsageError(text) from None
        with suppress(SignalException):  # a console that nobody reads is waited for no longer
            team.wait_shown()
            team.close()
        # No worker is left. A signal changes nothing any more: else it could keep the end from being recorded.
        return undisturbed(lambda: _conclude(ending, stopped, team, specs, colour=colour))
    finally:
        try:
            with suppress(SignalException):
                team.close()  # closed already, unless an exception came
        finally:
            host_signals.release(team)


def _run_all(team: RunTeam, grace: float) -> tuple[Ending, signal.Signals | None]:
    """Carry all attempts out. Returns how it ended, and by which signal it was stopped, or None.

    Signals raise SignalException from then on, until ``team`` is released.
    """
    stopped: signal.Signals | None = None
    with Attempts(team, team.policy, observe=team.observe) as attempts:
        host_signals.acquire(team)
        try:
            ending = attempts.run()
        except SignalException as error:
            stopped = error.sigval
            ending = _stop(attempts, team, stopped, grace)
        team.drop_standby()
        undisturbed(attempts.close)  # what the observer has still to record comes before the end
    return ending, stopped


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
    attempt = f"attempt {last.number + 1}{team.policy.attempts}"
    if stopped is not None and (team.stopped_in_delay or not result.failures):
        code = 128 + stopped
        cause = stopped.name if last.state != "failed" else f"{stopped.name}, after {attempt}: {last.describe()}"
        team.recorder.record_end_and_wait("stopped", code, cause)
        if team.stopped_in_delay:
            _report(team, result, specs, ending, colour=colour)
        return code
    code, cause = verdict(result)
    if team.lost is not None:
        say(f"Error: {team.lost}")
        code, cause = code or 1, str(team.lost)
    elif last.state == "not started":
        error = last.error if team.not_started is None else in_our_words(team.not_started, team.group)
        say(f"Error: {error}")
        code, cause = 1, last.error
    if len(ending.ends) > 1:
        cause = cause and f"{attempt}: {cause}"
        if not code:
            say(f"{attempt} has succeeded, after {format_duration(last.uptime)}")
    team.recorder.record_end_and_wait("failed" if code else "succeeded", code, cause)
    _report(team, result, specs, ending, colour=colour)
    return code


def in_our_words(error: Exception, group: PContext | None) -> str:
    """What the library says of the program, said of what the user has given."""
    head, text = "entrypoint: ", str(error)
    if not text.startswith(head):
        return text
    chosen = isinstance(group, ScriptContext) and os.environ.get(_python.CHOICE)
    return f"{_python.CHOICE if chosen else 'SCRIPT'}: {text.removeprefix(head)}"


def _stop(attempts: Attempts, team: RunTeam, first: signal.Signals, grace: float) -> Ending:
    """End the run: gracefully, and at once on a further signal. Cleanup is never abandoned.

    Beyond the second there is nothing to be asked for, and a worker may send them without end: they are ignored.
    """
    death, seconds = first, grace
    while True:
        try:
            if death == signal.SIGKILL:
                for number in signals_to_handle():
                    signal.signal(number, signal.SIG_IGN)
            _say_stop(attempts, team, death, seconds)
            attempts.ask_stop(death, seconds)
            return attempts.run()
        except SignalException:
            death, seconds = signal.SIGKILL, 0.0


def _say_stop(attempts: Attempts, team: RunTeam, death: signal.Signals, seconds: float) -> None:
    """Say what a signal has brought about, above the live lines of a terminal."""
    if attempts.state == "WAITING":
        team.stopped_in_delay = True
        mention(f"phalanx: {death.name}: no other attempt is started")
    elif team.group is not None and team.group.is_open:
        text = f"phalanx: {death.name}: {announced(team.group, death, seconds)}"
        if not team.group.say(text):
            mention(text)


def announced(group: PContext, death: signal.Signals, seconds: float) -> str:
    """Return what is said of a stop of the workers."""
    if death == signal.SIGKILL:
        return "killing the workers"
    if group.notice is None:
        return f"stopping the workers (at most {seconds:g} s; once more to kill them)"
    number, span = group.notice
    spans = f"{span:g} s from now, SIGKILL at most {seconds:g} s later; once more to kill them"
    return f"giving the workers notice of a stop by {signal_name(number)} ({death.name} {spans})"


def look(group: PContext) -> Seen:
    """What is known of a group now."""
    try:
        pids = group.pids()
    except RuntimeError:  # it was never up
        return {}, None
    try:
        return pids, group.wait_gone(0)
    except RuntimeError:  # nor is it; or its keeper was killed
        return pids, None


def _report(team: RunTeam, result: RunProcsResult, logs: RunLogs, ending: Ending, *, colour: bool) -> None:
    """Say what went wrong, if anything did."""
    before = describe_attempts(ending.ends[:-1])
    if not result.failures:
        for rank, outcome in result.outcomes.items():
            if outcome.state != "succeeded" or outcome.early:
                say(f"rank {rank}: {outcome.describe()}")
        if ending.state == "failed":
            for line in before:
                say(line)
        return

    team.error = report_failures(team.name, result, logs, before, ending.why, colour=colour)


def report_failures(
    name: str, result: RunProcsResult, logs: RunLogs, earlier: list[str], why: str, *, colour: bool
) -> ChildFailedError:
    """Show the report on a run that has failed: with lines on ``earlier`` attempts, and why no other followed.

    Returns it, as an exception.
    """
    log_dir, failures = logs.run_log_dir or "", result.failures
    if not logs.is_kept:  # the error files have gone with the group
        failures = {rank: failure.replace(error_file=NOT_AVAILABLE) for rank, failure in failures.items()}

    @record  # a launcher that is itself a worker passes the root cause on to its own error file
    def fail() -> None:
        raise ChildFailedError(name, failures, outcomes=result.outcomes, log_dir=log_dir)

    try:
        fail()
    except ChildFailedError as error:
        from phalanx.errors import format_report

        more: dict[str, Any] = {"earlier": earlier, "gave_up": why, "style": style if colour else None}
        tell(format_report(name, error.failures, outcomes=error.outcomes, log_dir=log_dir, **more))
        return error
    raise AssertionError


def style(kind: str, line: str) -> str:
    """Give a line of the report its looks."""
    looks: dict[str, dict[str, Any]] = {
        "rule": {"dim": True},
        "title": {"fg": "red", "bold": True},
        "heading": {"bold": True},
        "error": {"fg": "red"},
    }
    return click.style(line, **looks.get(kind, {}))
