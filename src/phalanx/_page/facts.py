"""Everything that a page says of a run, as plain values: read from the run's folder, bounded, each cut named.

Anybody may have written what lies there, and it may be damaged: nothing here raises for that, the page says it. How the
values are shown is the business of `page`.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from phalanx._base import files
from phalanx._base.clock import format_duration
from phalanx._base.secrets import shown_arguments, shown_value
from phalanx._base.text import format_size, how_many, name_ranks, one_line
from phalanx._base.tty import plain
from phalanx._outcomes.failure import NOT_AVAILABLE, ProcessFailure, describe_exit, first_failure
from phalanx._outcomes.report import signature
from phalanx._page.history import LOST, History, Span, read_history
from phalanx._page.log_lines import MOST_BYTES, Line, read_last
from phalanx._page.samples import Samples, read_samples
from phalanx._runs.catalog import RunDir
from phalanx._runs.record import CONFIG, Attempt, Leftover, Rank, Run, to_object
from phalanx._runs.run_report import find_failures, rank_folder, report_on
from phalanx._stacks.dump import alike, describe, group_equal, location, native_part, parse, sum_up_locations

MOST_ATTEMPTS = 50
"""Attempts whose ranks, failures and stacks a page has: the latest."""

MOST_FAILURES = 512
"""Failed ranks of an attempt whose error files are read."""

MOST_KINDS = 12
"""Failures of an attempt that are unlike each other."""

MOST_TEXT = 16_000
"""Characters of a traceback, or of the stacks of one rank."""

MOST_REPORT = 200_000
"""Characters of the report."""

_MOST_STACKS = 1024  # ranks of an attempt whose stacks are read
_STACKS = re.compile(r"stacks-([0-9]{1,9})\.txt")
_MOST_CONFIG = 256 << 10
_TAIL = 4000  # characters of the last lines of stderr
_LEFTOVERS = 20

STATES = {
    "succeeded": "succeeded", "failed": "failed", "stopped": "stopped", "running": "still running", "lost": "lost",
}  # fmt: skip
"""The states of a run, in words."""


class Worker(NamedTuple):
    """One rank of an attempt: where it ran, when (Unix time; None: not known), and what became of it."""

    rank: int
    local_rank: int
    pid: int
    started: float | None
    ended: float | None
    state: str
    exitcode: int | None
    how: str
    peak: str
    cpu: str


class Failure(NamedTuple):
    """Ranks that have failed in the same way: what is known of ``first``, one of them."""

    ranks: tuple[int, ...]
    first: int
    exit: str
    time: float
    error: str
    detail: str
    traceback: str
    tail: str
    tail_name: str
    path: str


class Stacks(NamedTuple):
    """Where the ranks of an attempt were when it hung: in one line, and by equal stacks, as (kind, line)."""

    summary: str
    groups: list[list[tuple[str, str]]]
    notes: list[str]


class AttemptFacts(NamedTuple):
    """One start of all ranks."""

    number: int
    started: float
    ended: float
    state: str
    cause: str
    nodes: int
    step: int | None
    workers: list[Worker]
    failures: list[Failure]
    stacks: Stacks | None
    leftovers: list[str]
    notes: list[str]


class Facts(NamedTuple):
    """A run. ``began`` and ``ended`` are Unix time; ``ended`` is now if it still runs."""

    name: str
    script: str
    path: str
    state: str
    verdict: str
    cause: str
    sentence: str
    summary: list[str]
    began: float
    ended: float
    attempts: list[AttemptFacts]
    omitted: int
    """Attempts before those."""
    history: History
    machines: list[tuple[str, str]]
    samples: Samples
    lines: list[Line]
    lines_note: str
    ran: list[tuple[str, str]]
    config: list[tuple[str, str]]
    environ: list[tuple[str, str]]
    report: str
    notes: list[str]
    made: float


def gather(found: RunDir, log_bytes: int = MOST_BYTES) -> Facts:
    """Read what a run has left. Never raises for what lies there.

    Args:
        found: The run.
        log_bytes: How much of its logs is read, about.
    """
    run, now = found.run, time.time()
    notes = [plain(found.problem)] if run is None and found.problem else []
    globals_ = _global_ranks(run)

    def rank_of(attempt: int, local: int) -> int:
        known, offset = globals_.get(attempt, ({}, 0))
        return known.get(local, local + offset)

    history = read_history(found.path, rank_of)
    latest = run.attempts[-MOST_ATTEMPTS:] if run is not None else []
    ends = [span.ended for span in history.spans.values() if span.ended is not None]
    lasts = [*ends, *(mark.time for mark in history.marks)]
    began = run.started if run is not None else min(lasts, default=found.started)
    ended = now if found.state == "running" else max([run.ended or 0.0 if run is not None else 0.0, began, *lasts])
    attempts = [] if run is None else [_attempt(found, run, one, history, ended) for one in latest]
    lines, lines_note = read_last(_folders(found.path), rank_of, log_bytes)
    report = ""
    try:
        report = plain(report_on(found))
    except (OSError, ValueError) as error:
        notes.append(f"The report is unreadable: {plain(one_line(error))}.")
    if len(report) > MOST_REPORT:
        report = f"{report[:MOST_REPORT]}\n… {how_many(len(report) - MOST_REPORT, 'more character')} in its file"
    samples = read_samples(found.path)
    return Facts(
        name=plain(found.name),
        script=plain(os.path.basename(run.name) if run is not None else found.name),
        path=plain(found.path),
        state=found.state,
        verdict=STATES.get(found.state, found.state),
        cause=_cause(found, run, attempts),
        sentence=_sentence(found, run, attempts),
        summary=list(_summary(found, run, ended)),
        began=began,
        ended=ended,
        attempts=attempts,
        omitted=len(run.attempts) - len(latest) if run is not None else 0,
        history=history,
        machines=[*_machines(run), *history.excluded],
        samples=samples,
        lines=lines,
        lines_note=lines_note,
        ran=[(name, plain(value)) for name, value in _ran(found, run) if value],
        config=[(plain(name), plain(value)) for name, value in _config(found.path)],
        environ=[(plain(name), plain(value)) for name, value in _environ(run)],
        report=report,
        notes=[*notes, *history.notes, *samples.notes],
        made=now,
    )


def _global_ranks(run: Run | None) -> dict[int, tuple[dict[int, int], int]]:
    """Return, by attempt, the global rank of each local one that is known, and by how much others differ."""
    found = {}
    for attempt in run.attempts if run is not None else ():
        known = {rank.local_rank: rank.rank for rank in attempt.ranks}
        found[attempt.number] = known, next((rank - local for local, rank in known.items()), 0)
    return found


def _folders(folder: str) -> dict[int, str]:
    """Return the folders of a run's attempts; a folder of ranks alone is attempt 0."""
    with suppress(OSError):
        names = os.listdir(folder)
        numbers = [name.removeprefix("attempt_") for name in names if name.startswith("attempt_")]
        found = {int(text): os.path.join(folder, f"attempt_{text}") for text in numbers if text.isdecimal()}
        return found or ({0: folder} if "0" in names else {})
    return {}


# --- the head


def _summary(found: RunDir, run: Run | None, ended: float) -> Iterator[str]:
    if run is None:
        return
    if run.exit_code is not None:
        yield f"exit code {run.exit_code}"
    spent = format_duration((ended if run.ended is None else run.ended) - run.started)
    yield f"{'for' if found.state == 'running' else 'last seen after' if run.ended is None else 'after'} {spent}"
    nodes = max((attempt.nodes for attempt in run.attempts), default=1)
    ranks = how_many(run.nprocs, "rank")
    yield f"{ranks} on {plain(run.host)}" + (f", one of {nodes} machines" if nodes > 1 else "")
    if len(run.attempts) > 1:
        yield how_many(len(run.attempts), "attempt")


def _cause(found: RunDir, run: Run | None, attempts: Sequence[AttemptFacts]) -> str:
    if run is None or found.state == "succeeded":
        return ""
    if found.state == "lost" and not any(attempt.failures for attempt in attempts[-1:]):
        return "The end is not recorded."
    return plain(one_line(run.cause))


def _sentence(found: RunDir, run: Run | None, attempts: Sequence[AttemptFacts]) -> str:
    """Return what has happened, in a sentence or two."""
    if run is None:
        return "The record of this run cannot be read. Below is what else its folder has."
    restarts = how_many(len(run.attempts) - 1, "restart")
    after = f" It took {restarts}." if len(run.attempts) > 1 else ""
    lost = LOST.search(run.cause) if found.state == "failed" else None
    failures = attempts[-1].failures if attempts else []
    if found.state == "succeeded":
        text = f"{'The rank' if run.nprocs == 1 else f'All {run.nprocs} ranks'} ended with exit code 0."
    elif found.state == "running":
        text = ""
    elif found.state == "lost":
        launcher = f"The launcher (pid {run.pid} on {plain(run.host)})"
        text = f"{launcher} was killed, the machine went down, or nothing could be written."
    elif lost:
        who = f"node {lost[1]}" + (f" on host {plain(lost[2])}" if lost[2] else "")
        text = f"A machine is lost, {who}: its agent is gone, or cut off. The other ranks were stopped."
    elif failures:
        return " ".join(_of_failures(attempts[-1], restarts if len(run.attempts) > 1 else ""))
    else:
        text = "No rank of this machine failed by itself." if found.state == "failed" else "It was stopped."
    return (text + after).strip()


def _of_failures(attempt: AttemptFacts, restarts: str) -> Iterator[str]:
    first = attempt.failures[0]
    others = sum(len(failure.ranks) for failure in attempt.failures) - 1
    stopped = sum(worker.state == "stopped" for worker in attempt.workers)
    yield f"Rank {first.first} {'hung' if first.error.startswith('Hang:') else 'failed'} first, and {first.exit}."
    if others:
        yield f"{how_many(others, 'other rank')} failed, too."
    if stopped:
        yield f"{how_many(stopped, 'rank')} {'was' if stopped == 1 else 'were'} stopped because of it."
    if restarts:
        yield f"{restarts} did not help."


def _machines(run: Run | None) -> Iterator[tuple[str, str]]:
    """Yield the machines that were lost, as far as the causes name them, and why."""
    seen = set()
    for cause in [*(attempt.cause for attempt in run.attempts), run.cause] if run is not None else ():
        lost = LOST.search(cause)
        if lost is not None and cause not in seen:
            seen.add(cause)
            yield plain(lost[2] or f"node {lost[1]}"), plain(one_line(cause))


# --- an attempt


def _attempt(found: RunDir, run: Run, attempt: Attempt, history: History, now: float) -> AttemptFacts:
    spans = history.spans
    workers = [_worker(rank, spans.get((attempt.number, rank.local_rank)), attempt) for rank in attempt.ranks]
    known = {rank.local_rank for rank in attempt.ranks}
    offset = next((rank.rank - rank.local_rank for rank in attempt.ranks), 0)
    workers += [  # of earlier attempts, a record keeps those ranks alone that have failed
        _worker(Rank(rank=local + offset, local_rank=local, pid=1, state="lost"), span, attempt)._replace(pid=0)
        for (number, local), span in spans.items()
        if number == attempt.number and local not in known
    ]
    if found.state != "running":  # the end of those that the record still has as running was not seen
        workers = [one._replace(state="lost") if one.state == "running" else one for one in workers]
    workers.sort(key=lambda worker: worker.rank)
    notes: list[str] = []
    failures = _failures(found.path, run, attempt, workers, history.roots.get(attempt.number), notes)
    is_last = attempt.number == run.attempts[-1].number
    if is_last and found.state != "running":
        state = found.state
    elif is_last and attempt.ended is None:
        state = "running"
    else:
        state = "failed" if failures or attempt.cause else "stopped"
    return AttemptFacts(
        number=attempt.number,
        started=attempt.started,
        ended=attempt.ended if attempt.ended is not None else now,
        state=state,
        cause=plain(one_line(attempt.cause or (run.cause if is_last and found.state != "succeeded" else ""))),
        nodes=attempt.nodes,
        step=attempt.step,
        workers=workers,
        failures=failures,
        stacks=_stacks(found.path, run, attempt.number, workers),
        leftovers=[*_leftovers(attempt.leftovers)],
        notes=notes,
    )


def _worker(rank: Rank, span: Span | None, attempt: Attempt) -> Worker:
    span = span or Span()
    state = span.state if rank.state in ("running", "lost") and span.state else rank.state
    exitcode = rank.exitcode if rank.exitcode is not None else span.exitcode
    return Worker(
        rank=rank.rank,
        local_rank=rank.local_rank,
        pid=rank.pid,
        started=span.started if span.started is not None else attempt.started,
        ended=rank.ended if rank.ended is not None else span.ended,
        state=state,
        exitcode=exitcode,
        how="" if exitcode is None else describe_exit(exitcode),
        peak="" if span.peak is None else format_size(span.peak),
        cpu="" if span.cpu is None else format_duration(span.cpu),
    )


def _leftovers(leftovers: Sequence[Leftover]) -> Iterator[str]:
    for one in leftovers[:_LEFTOVERS]:
        of = "" if one.local_rank is None else f" of local rank {one.local_rank}"
        yield plain(one_line(f"process {one.pid}{of}, {format_duration(one.age)} old: {one.command}"))
    if len(leftovers) > _LEFTOVERS:
        yield f"and {len(leftovers) - _LEFTOVERS} more"


def _failures(
    folder: str, run: Run, attempt: Attempt, workers: Sequence[Worker], root: int | None, notes: list[str]
) -> list[Failure]:
    """Return the failures of an attempt, equal ones together, that of the root cause first."""
    ended = {worker.rank: worker for worker in workers if worker.state == "failed" and worker.exitcode is not None}
    failed = {
        rank.rank: to_object(rank) | {name: getattr(ended[rank.rank], name) for name in ("state", "exitcode", "ended")}
        for rank in attempt.ranks
        if rank.rank in ended
    }
    if len(failed) > MOST_FAILURES:
        notes.append(f"{len(failed)} ranks have failed; the error files of {MOST_FAILURES} were read.")
        chosen = sorted(failed, key=lambda rank: (rank != root, rank))[:MOST_FAILURES]
        failed = {rank: failed[rank] for rank in chosen}
    try:
        found = find_failures(folder, run, {rank: (attempt.number, facts) for rank, facts in failed.items()})
    except (OSError, ValueError) as error:
        notes.append(f"The error files of attempt {attempt.number} are unreadable: {plain(one_line(error))}.")
        return []
    if not found:
        return []
    if root not in found:
        root = first_failure(found)[0]
    kinds: dict[object, list[int]] = {signature(found[root]): [root]}
    for rank, failure in sorted(found.items()):
        if rank != root:
            kinds.setdefault(signature(failure), []).append(rank)
    groups = list(kinds.values())
    if len(groups) > MOST_KINDS:
        rest = [rank for ranks in groups[MOST_KINDS:] for rank in ranks]
        notes.append(
            f"{len(groups)} failures are unlike each other; those of {name_ranks(rest)} are in their error files."
        )
    return [_failure(ranks, found[ranks[0]]) for ranks in groups[:MOST_KINDS]]


def _failure(ranks: Sequence[int], failure: ProcessFailure) -> Failure:
    message = plain(failure.message)
    first, _, rest = message.partition("\n")
    traceback = _cut(plain(failure.traceback or rest))
    is_known = failure.error_file != NOT_AVAILABLE
    return Failure(
        ranks=tuple(sorted(ranks)),
        first=ranks[0],
        exit=describe_exit(failure.exitcode),
        time=float(failure.timestamp),
        error=_cut(first, 1000),
        detail=_cut(plain(failure.detail), _TAIL),
        traceback=traceback.strip("\n"),
        tail="" if failure.traceback else _cut(plain(failure.stderr_tail), _TAIL).strip("\n"),
        tail_name="stderr" if failure.stderr_file else "stdout",
        path=plain(failure.error_file) + (f" ({failure.unreadable})" if failure.unreadable else "") if is_known else "",
    )


def _cut(text: str, most: int = MOST_TEXT) -> str:
    """Cut out the middle of a long text."""
    over = len(text) - most
    if over <= 0:
        return text
    return f"{text[: most // 3]}\n… {how_many(over, 'character')} left out …\n{text[over + most // 3 :]}"


def _stacks(folder: str, run: Run, attempt: int, workers: Sequence[Worker]) -> Stacks | None:
    """Return the latest stacks that lie in the folders of the ranks; None: there are none."""
    texts: dict[int, str] = {}
    notes = []
    for worker in workers[:_MOST_STACKS]:
        own = rank_folder(folder, attempt, {"local_rank": worker.local_rank})
        with suppress(OSError):
            numbers = [int(found[1]) for found in map(_STACKS.fullmatch, os.listdir(own)) if found]
            if numbers:
                data = files.read(os.path.join(own, f"stacks-{max(numbers)}.txt"), MOST_TEXT + 1)
                if len(data) > MOST_TEXT:
                    notes.append(f"The stacks of rank {worker.rank} are cut; all are in {plain(own)}.")
                text = plain(data[:MOST_TEXT].decode("utf-8", "backslashreplace"))
                # Native frames are those of the ranks that hung, and would tell equal ranks apart.
                texts[worker.rank] = text.removesuffix(native_part(text)) if native_part(text) else text
    if not texts:
        return None
    if len(workers) > _MOST_STACKS:
        notes.append(f"The stacks of {_MOST_STACKS} of {len(workers)} ranks were read.")
    summary = sum_up_locations({rank: location(text) for rank, text in texts.items()})
    groups = [describe(name_ranks(ranks), text, run.cwd) for ranks, text in _by_size(texts)]
    if not any(map(parse, texts.values())):
        notes.append("No rank has shown a Python stack.")
    return Stacks(plain(summary), groups, notes[:3])


def _by_size(texts: dict[int, str]) -> list[tuple[list[int], str]]:
    """Group equal stacks: the smallest group first, for it is the one that the others wait for, as a rule."""
    return sorted(group_equal(texts, alike), key=lambda group: (len(group[0]), group[0]))


# --- what ran


def _ran(found: RunDir, run: Run | None) -> Iterator[tuple[str, str]]:
    if run is not None:
        yield "Command", one_line(shlex.join(shown_arguments(run.argv or run.command)), MOST_TEXT)
        yield "Folder", run.cwd
        yield "Host", run.host
        yield "Launcher", f"pid {run.pid}"
        yield "Versions", run.versions
        yield "Commit", run.commit and f"{run.commit}; changes since are not known"
        yield "Run id", run.run_id
    yield "Files", found.path


def _environ(run: Run | None) -> Iterator[tuple[str, str]]:
    for variable in run.environ if run is not None else ():
        name, _, value = variable.partition("=")
        yield name, shown_value(name, value)


_OF_COMMAND = ("script", "args")  # settings that the command line has, without its secrets
_SOURCES = re.compile(r"(?P<name>[\w.-]+) += (?P<value>.*\S) +# (?!default$)(?P<source>[^#\n]+)")


def _config(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run that are no defaults, and where each comes from."""
    try:
        data = files.read(os.path.join(folder, CONFIG), _MOST_CONFIG)
    except OSError:
        return
    for line in data.decode("utf-8", "backslashreplace").split("\n"):
        found = _SOURCES.fullmatch(line.rstrip())
        if found is not None and len(line) < MOST_TEXT and found["name"] not in _OF_COMMAND:
            ((text),) = shown_arguments([f"{found['name']}={found['value'].strip()}"])
            yield found["name"], f"{text.partition('=')[2]} ({found['source'].strip()})"
