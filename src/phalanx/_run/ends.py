"""How a run has ended: what is recorded of it, and what a person is to read. Prints nothing.

That of a job of many machines is `job_node`'s.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from phalanx._base.clock import format_duration
from phalanx._group.restart_policy import AttemptEnd, describe_attempts
from phalanx._outcomes.result import RunProcsResult, verdict
from phalanx._run.attempts import Ending
from phalanx._run.logs import RunLogs
from phalanx._run.plan import in_our_words
from phalanx._run.run_team import RunTeam

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.errors import ChildFailedError


class RunEnd(NamedTuple):
    """How a run has ended.

    Attributes:
        state, code, cause, report: What is recorded, see `RunRecord.end`.
        printed: Lines, and the failures of which a report is printed, in this order.
        error: The failures by which the run has failed; None: it has not, or no worker has.
    """

    state: str
    code: int
    cause: str = ""
    report: str = ""
    printed: tuple[str | ChildFailedError, ...] = ()
    error: ChildFailedError | None = None


def conclude_run(ending: Ending, stopped: signal.Signals | None, team: RunTeam, logs: RunLogs) -> RunEnd:
    """Return how the run of one machine has ended. ``stopped``: the signal by which it was to end; None: none."""
    result = team.result or RunProcsResult()
    last = ending.ends[-1] if ending.ends else AttemptEnd("stopped")
    attempt, earlier = f"attempt {last.number}", describe_attempts(ending.ends[:-1])
    error = child_failed(team.name, result, logs, earlier, ending.why) if result.failures else None
    report = "" if error is None else error.format_msg()
    printed: list[str | ChildFailedError] = []
    if stopped is not None and ending.state == "stopped":
        by = team.control.named(stopped)
        cause = f"{by}, after {attempt}: {last.describe()}" if last.failed else by
        if failed := [end for end in ending.ends if end.failed]:
            # The latest in full, if no other attempt had begun after it.
            is_last = error is not None and failed[-1] is ending.ends[-1]
            printed = [error] if error is not None and is_last else [*describe_attempts(failed)]
            printed.append(f"stopped by {cause}")
        return RunEnd("stopped", 128 + stopped, cause, report, tuple(printed))
    code, cause = verdict(result)
    if team.lost is not None:
        printed.append(f"Error: {team.lost}")
        code, cause = code or 1, str(team.lost)
    elif last.state == "not started":
        why = last.error if ending.error is None else in_our_words(ending.error, team.group)
        printed.append(f"Error: {why}")
        code, cause = 1, last.error
    if len(ending.ends) > 1:
        cause = cause and f"{attempt}: {cause}"
        if not code:
            printed.append(f"{attempt} has succeeded, after {format_duration(last.uptime)}")
    if error is not None:
        printed.append(error)
    else:
        printed += [
            f"rank {rank}: {outcome.describe()}" for rank, outcome in result.outcomes.items()
            if outcome.state != "succeeded" or outcome.early
        ]  # fmt: skip
        printed += earlier if ending.state == "failed" else []
    return RunEnd("failed" if code else "succeeded", code, cause, report, tuple(printed), error)


def child_failed(
    name: str, result: RunProcsResult, logs: RunLogs, earlier: list[str], why: str, *, log_dir: str = "",
    lost: tuple[str, str] | None = None,
) -> ChildFailedError:  # fmt: skip
    """Return the report on a run that has failed, as an exception.

    ``earlier``: lines on the attempts before. ``why``: why no other followed. ``log_dir``: the folder of the logs;
    default: the run's. ``lost``: see `format_report`.
    """
    from phalanx._outcomes.failure import NOT_AVAILABLE
    from phalanx.errors import ChildFailedError, record

    folder, failures = log_dir or logs.run_log_dir or "", result.failures
    if not logs.is_kept:  # the error files have gone with the group
        failures = {rank: failure.replace(error_file=NOT_AVAILABLE) for rank, failure in failures.items()}

    @record  # a launcher that is itself a worker passes the root cause on to its own error file
    def fail() -> None:
        raise ChildFailedError(
            name, failures, outcomes=result.outcomes, log_dir=folder, lost=lost, earlier=earlier, gave_up=why
        )

    try:
        fail()
    except ChildFailedError as error:
        return error
    raise AssertionError
