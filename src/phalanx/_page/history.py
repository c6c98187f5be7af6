"""What happened in a run, out of ``events.jsonl``: when each worker ran, and the moments that a reader may ask about.

Anybody may have written the file: what is not as expected is passed over, and nothing here raises.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx._base import files
from phalanx._base.clock import format_duration
from phalanx._base.text import how_many, name_ranks, one_line
from phalanx._base.tty import plain
from phalanx._events.event_file import EVENTS, EVENTS_SIZE
from phalanx._outcomes.failure import STATES, describe_exit, signal_name

Event = dict[str, Any]

MOST_EVENTS = 100_000
"""Events that are read, the first and the last ones; the parsing of so many takes about half a second."""

MOST_MARKS = 1500
"""Moments of a page, the first third and the last two thirds."""

TOGETHER = 1.0
"""Seconds in which what happens to several ranks is one moment."""

_PARSED = 16 << 10  # bytes of one event
_LATEST = 1 << 37  # seconds of Unix time: a moment that `time.localtime` takes
_TEXT = 300  # characters of a cause


class Span(NamedTuple):
    """One worker's time: from its start to its exit (Unix time; None: not known)."""

    started: float | None = None
    ended: float | None = None
    state: str = ""
    """As in the record; "": its exit is not known."""
    exitcode: int | None = None
    peak: int | None = None
    """Bytes of memory, at the most."""
    cpu: float | None = None
    """Seconds of user and system time."""


class Mark(NamedTuple):
    """A moment: when, in which attempt, of which kind (see `KINDS`), of which ranks (none: of all), and what."""

    time: float
    attempt: int
    kind: str
    ranks: tuple[int, ...]
    text: str


KINDS = {
    "start": "start",
    "run": "all workers run",
    "notice": "notice of a stop",
    "stop": "stop",
    "exit": "exit",
    "failure": "failure",
    "hang": "hang",
    "slow": "slow rank",
    "lost": "machine lost, or left out",
    "restart": "restart",
    "end": "end",
    "other": "other",
}
"""The kinds of marks, and what they are called."""


class History(NamedTuple):
    """What the events tell.

    Attributes:
        spans: By attempt and local rank.
        marks: In the order of time.
        roots: The global rank of each attempt's root cause.
        excluded: The machines that were left out, and why.
        notes: What is left out, a sentence each.
    """

    spans: dict[tuple[int, int], Span]
    marks: list[Mark]
    roots: dict[int, int]
    excluded: list[tuple[str, str]]
    notes: list[str]


def read_history(folder: str, rank_of: Callable[[int, int], int]) -> History:
    """Read a run's events. ``rank_of`` returns the global rank of an attempt's local one."""
    notes: list[str] = []
    spans: dict[tuple[int, int], Span] = {}
    roots: dict[int, int] = {}
    excluded: list[tuple[str, str]] = []
    marks: list[Mark] = []
    latest: dict[tuple[int, str, str], int] = {}  # the marks to which more ranks may come, by what they are about
    members: dict[int, set[int]] = {}  # their ranks
    for event in _events(folder, notes):
        with suppress(LookupError, TypeError, ValueError, OverflowError):
            time, attempt = _moment(event["timestamp"]), _whole(event["attempt"])
            _note_span(spans, event, attempt, time)
            if event["name"] == "attempt.ended" and event["rank"] is not None:
                roots[attempt] = _whole(event["rank"])
            if event["name"] == "machine.excluded":
                excluded.append((_text(event["host"]), f"left out: {_text(event['cause'])}"))
            found = _in_words(event)
            if found is None:
                continue
            kind, text = found
            own = event.get("rank") if event["name"] not in _OF_AGENT else None
            if own is None:
                marks.append(Mark(time, max(0, attempt), kind, (), text))
                continue
            rank = rank_of(attempt, _whole(own)) if event["name"] != "rank.slow" else _whole(own)
            known = latest.get(key := (attempt, kind, text))
            if known is not None and (rank in members[known] or time - marks[known].time < TOGETHER):
                members[known].add(rank)  # a timer that is only reported on expires again and again
                continue
            latest[key] = len(marks)
            members[len(marks)] = {rank}
            marks.append(Mark(time, attempt, kind, (), text))
    marks = [_with_ranks(mark, members.get(index, ())) for index, mark in enumerate(marks)]
    marks.sort(key=lambda mark: mark.time)
    if len(marks) > MOST_MARKS:
        head = MOST_MARKS // 3
        notes.append(f"{how_many(len(marks) - MOST_MARKS, 'moment')} in the middle of the run are left out.")
        marks = marks[:head] + marks[head - MOST_MARKS :]
    return History(spans, marks, roots, excluded, notes)


def _with_ranks(mark: Mark, members: Iterable[int]) -> Mark:
    ranks = tuple(sorted(members))
    return mark._replace(ranks=ranks, text=f"{one_line(name_ranks(ranks), _TEXT)}: {mark.text}") if ranks else mark


def _note_span(spans: dict[tuple[int, int], Span], event: Event, attempt: int, time: float) -> None:
    if event["name"] == "worker.started":
        spans[attempt, _whole(event["rank"])] = Span(time)
    elif event["name"] == "worker.exited" and event["state"] in STATES:
        key = attempt, _whole(event["rank"])
        peak, cpu = event.get("max_rss_kib"), event.get("cpu_seconds")
        spans[key] = spans.get(key, Span())._replace(
            ended=time,
            state=event["state"],
            exitcode=_whole(event["exitcode"], -(2**31)),
            peak=_whole(peak) << 10 if peak is not None else None,
            cpu=_moment(cpu) if cpu is not None else None,
        )


# --- each kind of event in words; of those with a rank, what follows "rank 3: "


def _exited(event: Event) -> tuple[str, str]:
    how = describe_exit(_whole(event["exitcode"], -(2**31)))
    if event["state"] == "failed":
        oom = f", {_text(event['oom'])}" if event.get("oom") else ""
        return "failure", f"failed, {how}{oom}"
    return "exit", "stopped" if event["state"] == "stopped" else "succeeded"


def _timer(event: Event) -> str:
    scope = _text(event.get("scope") or event.get("place") or "")
    return "no heartbeat in time" if scope == "heartbeat" else f"the timer {scope or '(without a name)'} has expired"


def _restart(event: Event) -> tuple[str, str]:
    cause = _text(event["cause"])
    after = f" after {format_duration(_moment(event['delay']))}" if event["delay"] else ""
    attempt = _whole(event["attempt"])
    return "lost" if LOST.search(cause) else "restart", f"{cause}; attempt {attempt + 1} follows{after}"


def _run_ended(event: Event) -> tuple[str, str]:
    cause = _text(event["cause"])
    why = f": {cause}" if cause else ""
    return "lost" if LOST.search(cause) else "end", f"the run {_text(event['state'])}{why}"


LOST = re.compile(r"\bnode (\d+) is lost\b(?:: its agent on host (\S+))?")
"""How a cause begins that names a machine."""

_OF_AGENT = ("attempt.ended",)  # the rank of which is a global one
_WORDS: dict[str, Callable[[Event], tuple[str, str] | None]] = {
    "group.starting": lambda event: (
        "start",
        f"start of attempt {_whole(event['attempt'])}, {how_many(_whole(event['nprocs']), 'worker')}",
    ),
    "group.running": lambda _event: ("run", "all workers run"),
    "group.paused": lambda event: ("other", "paused" if event["paused"] else "goes on after a pause"),
    "group.lost": lambda event: ("failure", f"a helper process is lost: {_text(event['error'])}"),
    "group.not_started": lambda event: ("failure", f"could not start: {_text(event['error'])}"),
    "group.swept": lambda event: (
        "other",
        f"left the process {_whole(event['pid'])} behind: {_text(event['command'])}",
    ),
    "group.swept_more": lambda event: ("other", f"{how_many(_whole(event['count']), 'more process')} left behind"),
    "worker.exited": _exited,
    "worker.started": lambda _event: None,
    "worker.signalled": lambda event: ("stop", f"sent {signal_name(_whole(event['signal']))}, to stop"),
    "worker.noticed": lambda _event: ("notice", "given notice of a stop"),
    "worker.reaped": lambda event: ("stop", f"sent {signal_name(_whole(event['signal']))}: {_timer(event)}"),
    "timer.expired": lambda event: ("hang", _timer(event)),
    "timer.left": lambda _event: ("other", "went on after its timer had expired"),
    "timer.breakpoint": lambda _event: ("other", "at a breakpoint"),
    "timer.unwatched": lambda event: ("other", f"no timer is watched any more: {_text(event['why'])}"),
    "rank.slow": lambda event: (
        "slow",
        f"{_moment(event['ratio']):.1f} x the median step, on host {_text(event['host'])}",
    ),
    "restart.decided": _restart,
    "machine.excluded": lambda event: (
        "lost",
        f"host {_text(event['host'])} is left out from now on: {_text(event['cause'])}",
    ),
    "agent.gave_up": lambda event: ("other", f"gave up: {_text(event['why'])}") if event["why"] else None,
    "attempt.ended": lambda _event: None,
    "run.ended": _run_ended,
    "events.removed": lambda event: ("other", f"{_whole(event['count'])} events are not kept from here on"),
}


def _in_words(event: Event) -> tuple[str, str] | None:
    return _WORDS[event["name"]](event)


def _text(value: object) -> str:
    return plain(one_line(str(value)[: 4 * _TEXT], _TEXT)) if value else ""


def _whole(value: Any, least: int = -1) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(value)
    return value


def _moment(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and 0 <= number < _LATEST):
        raise ValueError(value)
    return number


# --- reading


def _events(folder: str, notes: list[str]) -> Iterator[Event]:
    """Yield the events that have words, in the order of the files."""
    lines = []
    for name in (f"{EVENTS}.1", f"{EVENTS}.2", EVENTS):
        try:
            data = files.read(os.path.join(folder, name), EVENTS_SIZE)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{name} is unreadable: {error.strerror or error}.")
            continue
        lines += [line for line in data.split(b"\n") if _name_of(line) in _WORDS and len(line) <= _PARSED]
    if len(lines) > MOST_EVENTS:
        notes.append(f"{how_many(len(lines) - MOST_EVENTS, 'event')} in the middle of the run are left out.")
        lines = lines[: MOST_EVENTS // 2] + lines[-(MOST_EVENTS // 2) :]
    damaged = 0
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(event, dict) and event.get("name") in _WORDS:
            yield event
    if damaged:
        notes.append(f"{how_many(damaged, 'event')} in {EVENTS} could not be read.")


_NAME = b'{"name": "'


def _name_of(line: bytes) -> str:
    if not line.startswith(_NAME):
        return ""
    return line[len(_NAME) : line.find(b'"', len(_NAME))][:40].decode("latin-1")
