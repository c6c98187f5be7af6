"""The report on a run: as it was written; or made of the record, the events and the error files, at any time.

A record is an object of JSON here, see `record.to_object`. The report on failures, which knows more, is made where the
run ends (`_outcomes.report`). Anybody may have written the files that are read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from phalanx._base import files
from phalanx._base.text import name_ranks, one_line
from phalanx._evidence.error_file import message_of, read_error_file
from phalanx._logs.follower import last_text
from phalanx._outcomes.failure import NOT_AVAILABLE, STATES, Outcome, ProcessFailure
from phalanx._outcomes.report import Earlier, describe_earlier, format_report, format_summary, mask
from phalanx._runs import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._runs.catalog import RunDir  # which no end of a run has to load

Record = dict[str, Any]

_MOST = 16 << 20  # bytes of a report that are read
_MOST_EVENTS = 64 << 20  # of each file of events
_LATEST = 1 << 37  # seconds of Unix time: a moment that `time.localtime` takes


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
    earlier = describe_earlier([_earlier(attempt) for attempt in before])  # equal ones in a row have one line
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


def report_on(found: RunDir) -> str:
    """Return the report on a run, as it has printed it or as far as it is known by now; "": nothing is known."""
    text = "" if found.state == "running" else _written(found.path)
    return text or (_made(found, found.run) if found.run is not None else "")


def _written(folder: str) -> str:
    """Return the report in a run's folder; "": there is none that can be read."""
    path = os.path.join(folder, record.REPORT)
    try:
        data = files.read(path, _MOST + 1)
    except OSError:
        return ""
    text = data[:_MOST].decode("utf-8", "backslashreplace")
    return text if len(data) <= _MOST else f"{text}\n... more in {path}"


def _made(found: RunDir, run: record.Run) -> str:
    """Make the report of what there is beside it."""
    facts = record.to_object(run)
    ranks = latest_ranks(facts)
    if found.state in ("running", "lost"):  # the record of which may be older than the last exits
        _add_exits(found.path, ranks)
    if found.state != "lost":
        return describe_run(
            facts, found.path, {} if found.state == "running" else find_failures(found.path, run, ranks)
        )
    by = f"the launcher (pid {run.pid} on {run.host}) was killed, the machine went down, or nothing could be written"
    unseen = {rank: its for rank, its in ranks.items() if its[1]["state"] in ("running", "lost")}
    detail = [f"{name_ranks(unseen)}: the end was not seen"] if unseen else []
    for rank, (attempt, each) in unseen.items():
        path = os.path.join(rank_folder(found.path, attempt, each), "error.json")
        message = one_line(message_of(read_error_file(path)[0]) or "")
        detail += [f"rank {rank} had left an error: {message}"] if message else []
    failures = find_failures(found.path, run, ranks)
    cause = f"the end is not recorded: {by}"
    if failures:
        return "\n".join((cause, *detail, describe_run(facts, found.path, failures)))
    return describe_run(facts, found.path, state="lost", cause=cause, detail=detail[bool(unseen) :])


def rank_folder(folder: str, attempt: int, facts: Record) -> str:
    """Return the folder of a worker in that of its run."""
    return os.path.join(folder, f"attempt_{attempt}", str(facts["local_rank"]))


def _add_exits(folder: str, ranks: dict[int, tuple[int, Record]]) -> None:
    """Note the exits of which the events tell, and not the record. Anybody may have written these files."""
    from phalanx._events.event_file import EVENTS

    latest = {(attempt, facts["local_rank"]): facts for attempt, facts in ranks.values()}
    for name in (f"{EVENTS}.1", f"{EVENTS}.2", EVENTS):
        data = b""
        with suppress(OSError):
            data = files.read(os.path.join(folder, name), _MOST_EVENTS)
        for line in data.split(b"\n"):
            if b'"worker.exited"' not in line:
                continue
            with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                event = json.loads(line)
                state, code, sent, ended = (event[key] for key in ("state", "exitcode", "signal_sent", "timestamp"))
                facts = latest.get((event["attempt"], event["rank"]))
                if facts is not None and state in STATES and type(code) is int and type(sent) in (int, type(None)):
                    ended = float(ended)
                    facts.update(state=state, exitcode=code, signal_sent=sent)
                    facts["ended"] = ended if 0 <= ended < _LATEST else None


def find_failures(folder: str, run: record.Run, ranks: dict[int, tuple[int, Record]]) -> dict[int, ProcessFailure]:
    """Return what the workers that have failed have left, by global rank. ``ranks``: as of `latest_ranks`."""
    failures = {}
    for rank, (attempt, facts) in ranks.items():
        if facts["state"] != "failed" or facts["exitcode"] is None:
            continue
        own = rank_folder(folder, attempt, facts)
        paths = {name: os.path.join(own, f"{name}.log") for name in ("stdout", "stderr")}
        there = {name: path if os.path.lexists(path) else "" for name, path in paths.items()}
        tail = last_text(there["stderr"], rotates=True) if there["stderr"] else ""
        failure = ProcessFailure(
            facts["local_rank"], facts["pid"], facts["exitcode"], os.path.join(own, "error.json"), rank=rank,
            host=run.host, stderr_tail=tail, stdout_file=there["stdout"], stderr_file=there["stderr"],
        )  # fmt: skip
        known = failure.error_file != NOT_AVAILABLE or facts["ended"] is None
        failures[rank] = failure if known else failure.replace(timestamp=int(facts["ended"]))
    return failures
