"""`phalanx run --restart worker`, from the first start to the end: signals, the report, the exit code."""

from __future__ import annotations

import signal
from contextlib import suppress

import click

from phalanx._agent.attempts import NoAttemptError
from phalanx._agent.history import describe_workers
from phalanx._base.rank_ranges import name_ranks
from phalanx._engine import host_signals
from phalanx._outcomes.result import verdict
from phalanx._runs.workers_recorder import result_of
from phalanx.cli._run_group import GONE, announced, child_failed, in_our_words, show_report, undisturbed
from phalanx.cli._say import say
from phalanx.multiprocessing import KeeperLostError, PreloadError, RunProcsResult, SignalException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx._agent.attempt_end import AttemptEnd, Ending
    from phalanx.cli._run_logs import RunLogs
    from phalanx.cli._worker_groups import WorkerTeams


def see_workers_through(teams: WorkerTeams, specs: RunLogs, grace: float, *, colour: bool) -> int:
    """Start the workers, each again as the policy says, wait for all ends, and say what became of them.

    Returns the exit code.
    """
    teams.record.begin()
    try:
        try:
            stopped = _run_all(teams, grace)
        except (PreloadError, NoAttemptError, KeeperLostError) as error:
            say(f"Error: {error}")
            teams.record_end("failed", 1, str(error))
            return 1
        except OSError as error:
            teams.record_end("failed", 1, text := in_our_words(error, teams.any_group))
            raise click.ClickException(text) from None
        except ValueError as error:
            teams.record_end("failed", 2, text := in_our_words(error, teams.any_group))
            raise click.UsageError(text) from None
        with suppress(SignalException):  # a console that nobody reads is waited for no longer
            teams.close()
        # No worker is left. A signal changes nothing any more: else it could keep the end from being recorded.
        return undisturbed(lambda: _conclude(teams, stopped, specs, colour=colour))
    finally:
        try:
            with suppress(SignalException):
                teams.close()  # closed already, unless an exception came
        finally:
            host_signals.ignore()  # until this process has left: its exit code is known
            host_signals.release(teams)
            teams.record.close()


def _run_all(teams: WorkerTeams, grace: float) -> signal.Signals | None:
    """Carry all attempts of all workers out. Returns by which signal they were stopped, or None.

    Signals raise SignalException from then on, until ``teams`` is released. Raises what a first start raises, with no
    worker left.
    """
    stopped: signal.Signals | None = None
    with teams.side_by_side as carrying:
        host_signals.acquire(teams)
        try:
            carrying.run()
        except SignalException as error:
            stopped = error.sigval
            _stop(teams, stopped, grace)
        except Exception:
            _stop(teams, signal.SIGKILL, 0.0, announces=False)
            raise
    return stopped


def _stop(teams: WorkerTeams, first: signal.Signals, grace: float, *, announces: bool = True) -> None:
    """End the run: gracefully, and at once on a further signal. Cleanup is never abandoned.

    Beyond the second there is nothing to be asked for, and a worker may send them without end: they are ignored.
    """
    death, seconds = first, grace
    while True:
        try:
            host_signals.forget_raised()  # it is handled here: asking a group for its state would raise it again
            if death == signal.SIGKILL:
                host_signals.ignore()
            if announces:
                _say_stop(teams, death, seconds)
            teams.side_by_side.ask_stop(death, seconds)
            teams.side_by_side.run()
        except SignalException:
            death, seconds = signal.SIGKILL, 0.0
        except Exception:
            if announces:  # else it is another first start that has failed
                raise
        else:
            return


def _say_stop(teams: WorkerTeams, death: signal.Signals, seconds: float) -> None:
    """Say what a signal has brought about."""
    runs = [team.group for team in teams.teams.values() if team.group is not None and team.group.is_open]
    waits = [rank for rank, each in teams.attempts.items() if each.state == "WAITING"]
    if runs:
        teams.say(f"phalanx: {death.name}: {announced(runs[0], death, seconds)}")
    elif any(team.is_put_off for team in teams.teams.values()):
        teams.say(f"phalanx: {death.name}: the run is stopped; {GONE}")
    if teams.check is not None and teams.check.is_under_way:
        teams.say(f"phalanx: {death.name}: ending --node-check; no attempt is started")
    if waits and death != signal.SIGKILL:
        teams.say(f"phalanx: {death.name}: {name_ranks(map(teams.number, waits))}: no other attempt is started")


def _conclude(teams: WorkerTeams, stopped: signal.Signals | None, specs: RunLogs, *, colour: bool) -> int:
    """Record how the run ended, and report what went wrong. Returns the exit code."""
    lost = {rank: ending for rank, ending in teams.endings.items() if ending.state == "failed"}  # they gave up
    first = min(lost, key=lambda rank: lost[rank].ends[-1].ended, default=None)
    joined = result_of(teams.results)
    lines = describe_workers({teams.number(rank): _told(ending) for rank, ending in teams.endings.items()})
    failures = {rank: failure for rank, failure in joined.failures.items() if rank in lost}
    if failures:
        joined = joined.replace(failures=failures)
        teams.error = child_failed(teams.name, joined, specs, lines, _reasons(teams, lost))
    if first is not None:
        code, cause = _verdict(teams, first, lost[first].ends[-1])
        teams.record_end("failed", code, cause, "" if teams.error is None else teams.error.format_msg())
    elif stopped is not None and any(ending.state == "stopped" for ending in teams.endings.values()):
        code = 128 + stopped
        teams.record_end("stopped", code, stopped.name)
    else:
        code, cause = verdict(joined)
        teams.record_end("failed" if code else "succeeded", code, cause)
    _report(teams, joined, lost, lines, colour=colour, stopped=stopped is not None)
    return code


def _report(
    teams: WorkerTeams,
    joined: RunProcsResult,
    lost: Mapping[int, Ending],
    lines: list[str],
    *,
    colour: bool,
    stopped: bool,
) -> None:
    """Say what went wrong, if anything did: who is ``lost`` in full, restarts in ``lines``."""
    given_up = () if teams.error is None else joined.failures
    for rank in lost.keys() - set(given_up):  # its keeper was lost, or another attempt could not be started
        say(f"Error: rank {teams.number(rank)}: {lost[rank].ends[-1].error}")
    if teams.error is not None:
        show_report(teams.error, colour=colour)
        return
    for line in (*lines, *_recovered(teams)):
        say(line)
    if not stopped:
        for rank, outcome in joined.outcomes.items():
            if outcome.state != "succeeded":
                say(f"rank {teams.number(rank)}: {outcome.describe()}")


def _recovered(teams: WorkerTeams) -> list[str]:
    """Return lines on workers that have succeeded in a later attempt."""
    again: dict[int, list[int]] = {}
    for rank, ending in teams.endings.items():
        if ending.state == "succeeded" and len(ending.ends) > 1:
            again.setdefault(ending.ends[-1].number, []).append(teams.number(rank))
    return [f"{name_ranks(ranks)}: attempt {number} has succeeded" for number, ranks in sorted(again.items())]


def _verdict(teams: WorkerTeams, rank: int, end: AttemptEnd) -> tuple[int, str]:
    """Return the exit code that follows from a worker that gave up, by its local rank, and the cause."""
    code, cause = verdict(teams.results.get(rank, RunProcsResult()))
    if end.number or not code:
        cause = f"rank {teams.number(rank)}: attempt {end.number}: {end.error}"
    return code or 1, cause


def _told(ending: Ending) -> list[AttemptEnd]:
    """Return the ends of attempts that are told in a line each: but for one that gave up, which is told in full."""
    failed = [end for end in ending.ends if end.failed]
    return failed[:-1] if ending.state == "failed" else failed


def _reasons(teams: WorkerTeams, lost: Mapping[int, Ending]) -> str:
    """Return why workers were not started again."""
    reasons: dict[str, list[int]] = {}
    for rank, ending in lost.items():
        if ending.why:
            reasons.setdefault(ending.why, []).append(teams.number(rank))
    return "; ".join(f"{name_ranks(ranks)}: {why}" for why, ranks in reasons.items())
