"""The report on a run as far as its record says it: at an end without failures of workers, before the end, or later.

A record is an object of JSON here, see `record.to_object`. The report on failures, which knows more, is made where the
run ends (`_outcomes.report`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx._outcomes.earlier import Earlier, describe
from phalanx._outcomes.failure import STATES, Outcome, ProcessFailure
from phalanx._outcomes.report import format_report, format_summary, mask

Record = dict[str, Any]


def describe_run(
    run: Record,
    folder: str,
    failures: Mapping[int, ProcessFailure] | None = None,
    *,
    state: str = "",
    cause: str = "",
    detail: Sequence[str] = (),
) -> str:
    """Return the report on a run, with lines on the attempts before its last one.

    Args:
        run: Its record.
        folder: Its folder.
        failures: What is known of workers that have failed, by global rank.
        state: What has become of it; "": as the record has it.
        cause: Why, in one line; "": as the record has it.
        detail: What else is known, a line each.
    """
    state = state or run["state"]
    ranks = latest_ranks(run)
    *before, last = run["attempts"] or [None]
    if last is not None and last["cause"]:  # another was to follow
        before.append(last)
    earlier = describe([_earlier(attempt) for attempt in before])  # equal ones in a row have one line
    if failures:
        outcomes = {rank: _outcome(facts) for rank, (_, facts) in ranks.items() if facts["state"] in STATES}
        return format_report(run["name"], failures, outcomes=outcomes, log_dir=folder, earlier=earlier)
    unknown = "running" if state == "running" else "the end was not seen"
    endings = {
        rank: _outcome(facts).describe() if facts["state"] in STATES else unknown for rank, (_, facts) in ranks.items()
    }
    cause = cause or ("" if state == "running" else run["cause"])
    more: dict[str, Any] = {"detail": detail, "log_dir": folder, "earlier": earlier}
    return format_summary(run["name"], state, cause=cause, endings=endings, **more)


def latest_ranks(run: Record) -> dict[int, tuple[int, Record]]:
    """Return the number of the latest attempt of each worker, and what the record says of it there, by global rank."""
    return {rank["rank"]: (attempt["number"], rank) for attempt in run["attempts"][-1:] for rank in attempt["ranks"]}


def _outcome(facts: Record) -> Outcome:
    return Outcome(
        facts["local_rank"], facts["pid"], facts["state"], facts["exitcode"], facts["signal_sent"],
        early=facts["early"],
    )  # fmt: skip


def _earlier(attempt: Record) -> Earlier:
    number, ended, step = attempt["number"], attempt["ended"], attempt["step"]
    cause: str = attempt["cause"].removeprefix(f"attempt {number}: ").removesuffix(f", step {step}")
    cause = cause or "ended, and nothing had failed"
    who, comma, error = cause.partition(", ")
    uptime = max(0.0, (ended or 0.0) - attempt["started"])
    return Earlier(number, cause, f"{who}{comma}{mask(error)}", None, step, uptime, ended)
