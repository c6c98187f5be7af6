"""``phalanx report``: the report on a run, at any time.

Owns also the lines on the run itself. It prints what the run has left in its folder; where it has left none, the report
is made of the record, the events and the error files (`_runs.run_report`).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

import click

from phalanx._base import files
from phalanx._base.text import name_ranks, one_line
from phalanx._base.tty import printable
from phalanx.cli._commands import SETTINGS, Command, put
from phalanx.cli._options import resolved, run_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._outcomes.failure import ProcessFailure
    from phalanx._runs.catalog import RunDir
    from phalanx._runs.record import Run

_MOST = 16 << 20  # bytes of a report that are shown
_MOST_EVENTS = 64 << 20  # of each file of events
_LATEST = 1 << 37  # seconds of Unix time: a moment that `time.localtime` takes


@click.command(cls=Command, context_settings=SETTINGS)
@run_argument()
def report(run: str | None, *, log_dir: str | None) -> None:
    """Show what became of RUN: the report that it has printed at its end, with all attempts.

    \b
    phalanx report                       the latest run
    phalanx report 20261120-1030

    Of a run that still runs, or whose launcher was killed, it is what is known by now. RUN is as for phalanx logs.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = resolved(log_dir, run)
    text = "" if found.state == "running" else _written(found)
    if found.run is None:
        if not text:
            raise click.ClickException(found.problem)
    else:
        text = text or _made(found, found.run)
    lines = found.heading() + text.rstrip("\n").split("\n")
    if found.state == "running":
        name = found.name
        lines.append(f"phalanx stack {name} shows where its ranks are, phalanx logs -f {name} what they write")
    put("".join(f"{printable(line)}\n" for line in lines))


def _written(found: RunDir) -> str:
    """Return the report in the run's folder; "": there is none that can be read."""
    from phalanx._runs.record import REPORT

    path = os.path.join(found.path, REPORT)
    try:
        data = files.read(path, _MOST + 1)
    except OSError:
        return ""
    text = data[:_MOST].decode("utf-8", "backslashreplace")
    return text if len(data) <= _MOST else f"{text}\n... more in {path}"


def _made(found: RunDir, run: Run) -> str:
    """Make the report of what there is beside it."""
    from phalanx._evidence.error_file import message_of, read_error_file
    from phalanx._runs.record import to_object
    from phalanx._runs.run_report import describe_run, latest_ranks

    facts = to_object(run)
    ranks = latest_ranks(facts)
    if found.state in ("running", "lost"):  # the record of which may be older than the last exits
        _add_exits(found.path, ranks)
    if found.state != "lost":
        return describe_run(facts, found.path, {} if found.state == "running" else _failures(found.path, run, ranks))
    by = f"the launcher (pid {run.pid} on {run.host}) was killed, the machine went down, or nothing could be written"
    unseen = {rank: its for rank, its in ranks.items() if its[1]["state"] in ("running", "lost")}
    detail = [f"{name_ranks(unseen)}: the end was not seen"] if unseen else []
    for rank, (attempt, each) in unseen.items():
        path = os.path.join(_folder_of(found.path, attempt, each), "error.json")
        message = one_line(message_of(read_error_file(path)[0]) or "")
        detail += [f"rank {rank} had left an error: {message}"] if message else []
    failures = _failures(found.path, run, ranks)
    cause = f"the end is not recorded: {by}"
    if failures:
        return "\n".join((cause, *detail, describe_run(facts, found.path, failures)))
    return describe_run(facts, found.path, state="lost", cause=cause, detail=detail[bool(unseen) :])


def _folder_of(folder: str, attempt: int, facts: dict[str, Any]) -> str:
    """Return the folder of a worker."""
    return os.path.join(folder, f"attempt_{attempt}", str(facts["local_rank"]))


def _add_exits(folder: str, ranks: dict[int, tuple[int, dict[str, Any]]]) -> None:
    """Note the exits of which the events tell, and not the record. Anybody may have written these files."""
    from phalanx._events.event_file import EVENTS
    from phalanx._outcomes.failure import STATES

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


def _failures(folder: str, run: Run, ranks: dict[int, tuple[int, dict[str, Any]]]) -> dict[int, ProcessFailure]:
    """Return what the workers that have failed have left, by global rank."""
    from phalanx._logs.follower import TAIL_LINES, last_lines
    from phalanx._outcomes.failure import NOT_AVAILABLE, ProcessFailure

    failures = {}
    for rank, (attempt, facts) in ranks.items():
        if facts["state"] != "failed" or facts["exitcode"] is None:
            continue
        own = _folder_of(folder, attempt, facts)
        paths = {name: os.path.join(own, f"{name}.log") for name in ("stdout", "stderr")}
        there = {name: path if os.path.lexists(path) else "" for name, path in paths.items()}
        tail = last_lines(there["stderr"], rotates=True) if there["stderr"] else b""
        lines = tail.decode("utf-8", "backslashreplace").rstrip().splitlines()[-TAIL_LINES:]
        failure = ProcessFailure(
            facts["local_rank"], facts["pid"], facts["exitcode"], os.path.join(own, "error.json"), rank=rank,
            host=run.host, stderr_tail="\n".join(lines), stdout_file=there["stdout"], stderr_file=there["stderr"],
        )  # fmt: skip
        known = failure.error_file != NOT_AVAILABLE or facts["ended"] is None
        failures[rank] = failure if known else failure.replace(timestamp=int(facts["ended"]))
    return failures
