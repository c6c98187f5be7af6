"""Formats the report on a group: plain text with headings that log scrapers know.

Of a group that has failed, it has the root cause first, then the other failures, equal ones grouped, then the workers
that were stopped. Before that, the attempts before the last one: those in a row that have ended alike have one line.
It knows no terminal, neither its width nor its colours: the argument ``style`` adds colours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._base.text import how_many, name_ranks
from phalanx._base.tty import plain
from phalanx._outcomes.failure import (
    NOT_AVAILABLE,
    NOT_EXITED,
    WHILE_LEAVING,
    Outcome,
    ProcessFailure,
    first_failure,
    stderr_name,
)

Style = Callable[[str, str], str]
Lines = list[tuple[str, str]]

RULE = 72  # columns: fits any terminal, and e-mail
ROOT_LINES = 120  # lines of the root cause's traceback; the rest is in its error file
OTHER_LINES = 30  # lines of another failure's traceback
TAIL_LINES = 20  # lines of stderr
LINE = 500  # columns of one line
DIFFERENT = 8  # failures unlike all before them that are shown in full; each further one gets a line
COMPARED = 8 << 10  # characters of a text by which failures are compared: its two ends

# What makes equal failures look different: native frames, which only some have; addresses, process ids, the rank and
# device of the process itself, and the port of the peer that closed the connection.
_NATIVE = "native frames (py-spy):\n"
_MASKS = re.compile(
    r"(0x)[0-9a-f]{4,}|"
    r"((?:pid|process|rank|cuda|gpu|device)\W{0,3})(?!0x[0-9a-f]{4})\d+|"
    r"(\.\d{1,3}\.\d{1,3}\]?:)\d{4,5}\b|"  # 127.0.0.1:29500, and no slice, no version
    r"(\[(?!\d+\])[\w.:%-]+\]:)\d{4,5}\b",  # [::1]:29500, [localhost]:29500, and no index, no file
    re.IGNORECASE,
)
_TIMES = re.compile(r"\b\d+(?:(?:\.\d)?s|ms|[mhd]\d\d[shm]) (over|before)\b")


def format_report(
    name: str,
    failures: Mapping[int, ProcessFailure],
    *,
    outcomes: Mapping[int, Outcome] | None = None,
    log_dir: str = "",
    style: Style | None = None,
    earlier: Sequence[str] = (),
    gave_up: str = "",
    lost: tuple[str, str] | None = None,
) -> str:
    """Format the report on a failed group.

    Args:
        name: What was run.
        failures: The failures by global rank, at least one, in the order of their exits.
        outcomes: What became of every worker, by global rank, as far as known.
        log_dir: Where the logs of the run are, or ``""``.
        style: Called with the kind of a line (``"rule"``, ``"title"``, ``"heading"``, ``"field"``, ``"error"``,
            ``"text"``) and the line, returns the line to show. Default: the line as it is.
        earlier: How the attempts before this one ended, a line each.
        gave_up: Why no other attempt follows, or ``""``.
        lost: The host that is lost, and a line on that, where it is the root cause: the workers that failed have lost
            their connections to it. None: a worker is.

    Returns:
        Lines without a final newline. In what workers wrote, control characters become escapes, and colours are left
        out.

    Raises:
        ValueError: There is no failure.
    """
    root_rank, root = first_failure(failures)
    lines = _title(name, "failed")
    if lost is None:
        lines.append(("heading", "Root Cause (first observed failure):"))
        lines += _full(root_rank, root, ROOT_LINES)
        others = _others(root, {rank: failure for rank, failure in failures.items() if rank != root_rank})
    else:
        host, error = lost
        lines.append(("heading", "Root Cause:"))
        lines += [("field", f"  host      : {plain(host)}"), ("error", f"  error     : {_shorten(plain(error))}")]
        others = _others(None, {root_rank: root, **failures})
    if log_dir:
        lines.append(("field", f"  logs      : {plain(log_dir)}"))
    if others:
        lines += [("rule", "-" * RULE), ("heading", "Other Failures:"), *others]
    lines += _rest({rank: one.describe() for rank, one in (outcomes or {}).items() if rank not in failures})
    lines += _earlier(earlier)
    if gave_up:
        lines += [("field", f"  gave up   : {plain(gave_up)}")] if earlier else []
    lines.append(("rule", "=" * RULE))
    if style is None:
        return _joined(lines)
    return "\n".join(style(kind, line) for kind, line in lines)


def format_summary(
    name: str,
    state: str,
    *,
    cause: str = "",
    detail: Sequence[str] = (),
    endings: Mapping[int, str],
    log_dir: str = "",
    earlier: Sequence[str] = (),
) -> str:
    """Format the report on a group of which no failure of a worker is known.

    Args:
        name: What was run.
        state: What has become of it, in a word.
        cause: Why, in one line, or ``""``.
        detail: What else is known, a line each.
        endings: What has become of every worker, in words, by global rank.
        log_dir: See `format_report`.
        earlier: See `format_report`.

    Returns:
        As `format_report`.

    >>> print(format_summary("train.py", "succeeded", endings={0: "succeeded", 1: "succeeded"}))
    ========================================================================
    train.py SUCCEEDED
    ------------------------------------------------------------------------
    ranks 0-1: succeeded
    ========================================================================
    """
    lines = _title(name, state)[:-1]
    fields = [("error", "cause", cause), *(("error", "detail", line) for line in detail), ("field", "logs", log_dir)]
    shown = [(kind, f"  {key:10}: {_shorten(plain(text))}") for kind, key, text in fields if text]
    lines += [("rule", "-" * RULE), *shown] if shown else []
    return _joined([*lines, *_rest(endings), *_earlier(earlier), ("rule", "=" * RULE)])


def _title(name: str, state: str) -> Lines:
    return [("rule", "=" * RULE), ("title", f"{plain(name)} {state.upper()}"), ("rule", "-" * RULE)]


def _earlier(lines: Sequence[str]) -> Lines:
    if not lines:
        return []
    shown = [("text", f"  {_shorten(plain(line))}") for line in lines]
    return [("rule", "-" * RULE), ("heading", "Earlier Attempts:"), *shown]


def _joined(lines: Lines) -> str:
    return "\n".join(line for _, line in lines)


def _full(rank: int, failure: ProcessFailure, limit: int) -> Lines:
    by_signal = f" ({failure.signal_name()})" if failure.exitcode < 0 else ""
    fields = [
        ("time", failure.timestamp_isoformat()),
        ("host", failure.host),
        ("rank", f"{rank} (local_rank: {failure.local_rank})"),
        ("exitcode", f"{failure.exitcode} (pid: {failure.pid}){by_signal}"),
    ]
    if failure.error_file != NOT_AVAILABLE:
        fields.append(("error_file", failure.error_file + (f" ({failure.unreadable})" if failure.unreadable else "")))
    files = (("stdout", failure.stdout_file), ("stderr", failure.stderr_file))
    fields += [(key, path) for key, path in files if path]
    lines = [("field", f"  {key:10}: {plain(value)}") for key, value in fields]
    first, *more = plain(failure.message).split("\n")
    lines.append(("error", f"  error     : {_shorten(first)}"))
    if failure.detail:
        first, *rest = plain(failure.detail).split("\n")
        lines += [("error", f"  {'detail':10}: {first}"), *(("error", f"  {'':10}  {line}") for line in rest)]
    if failure.traceback:
        lines += _block("traceback", failure.traceback, limit, failure.error_file)
    else:
        lines += [("text", f"    {_shorten(line)}") for line in _cut(more, limit, failure.error_file)]
        if failure.stderr_tail:
            tail = _text_lines(failure.stderr_tail)
            shown = tail[-TAIL_LINES:]
            lines.append(("field", f"  last lines of {stderr_name(failure.stdout_file, failure.stderr_file)}:"))
            lines += [("text", f"    {_shorten(line)}") for line in shown]
    return lines


def _others(root: ProcessFailure | None, others: Mapping[int, ProcessFailure]) -> Lines:
    """Format the other failures: the ranks whose failure equals the root cause, then each other kind with its ranks."""
    kinds: dict[object, list[int]] = {None if root is None else signature(root): []}
    for rank, failure in others.items():
        kinds.setdefault(signature(failure), []).append(rank)
    same, *different = kinds.values()
    lines: Lines = []
    if same:
        lines.append(("heading", f"{name_ranks(same)}: the same"))
    for number, ranks in enumerate(different):
        first = others[ranks[0]]
        if number < DIFFERENT:
            lines.append(("heading", f"{name_ranks(ranks)}:"))
            lines += _full(ranks[0], first, OTHER_LINES)
        else:
            lines.append(("heading", f"{name_ranks(ranks)}: {_shorten(plain(first_line(first)).split(chr(10))[0])}"))
    return lines


def _rest(endings: Mapping[int, str]) -> Lines:
    """Format what has become of workers, those with the same ending together."""
    alike: dict[str, list[int]] = {}
    for rank, ending in sorted(endings.items()):
        alike.setdefault(ending, []).append(rank)
    lines = [("text", f"{name_ranks(ranks)}: {ending}") for ending, ranks in alike.items()]
    return [("rule", "-" * RULE), *lines] if lines else []


def signature(failure: ProcessFailure) -> object:
    """Return what two failures must have in common to count as the same; of long texts, the two ends."""
    # With a traceback the exit code does not count: a rank that raised may have been stopped in its teardown.
    code = None if failure.traceback else failure.exitcode
    lines = failure.detail.split("\n")
    detail = "\n".join(one for one in lines if not (one.endswith(WHILE_LEAVING) or one.startswith(NOT_EXITED)))
    texts = [failure.message, detail, failure.traceback]
    if not failure.traceback and failure.exitcode >= 0:
        texts.append(failure.stderr_tail)
    return (code, *(_masked(text, failure) for text in texts))


def first_line(failure: ProcessFailure) -> str:
    """Return the start of a message's first line, more of it than is shown."""
    return failure.message.partition("\n")[0][: 4 * LINE]


def _masked(text: str, failure: ProcessFailure) -> str:
    text = _without_native(text)
    if len(text) > COMPARED:
        text = f"{text[: COMPARED // 2]}\n…\n{text[-COMPARED // 2 :]}"
    text = mask(text)
    text = _TIMES.sub(r"… \1", text)
    return (re.sub(rf"\b{failure.pid}\b", "…", text) if failure.pid > 0 else text).rstrip()


def mask(text: str) -> str:
    """Leave out of a text the numbers by which equal failures differ.

    >>> mask("Signal 9 (SIGKILL) received by PID 4711")
    'Signal 9 (SIGKILL) received by PID …'
    """
    return _MASKS.sub(lambda found: f"{found[found.lastindex or 0]}…", text)


def _without_native(text: str) -> str:
    """Cut a text off where native frames begin. A regular expression would take quadratic time for blank lines."""
    found = text.find(_NATIVE)
    while found >= 0:
        start = text.rfind("\n", 0, found)
        if start >= 0 and not text[start:found].strip():
            return text[:start].rstrip()
        found = text.find(_NATIVE, found + len(_NATIVE))
    return text


def _block(key: str, text: str, limit: int, where: str) -> Lines:
    shown = _cut(_text_lines(text), limit, where)
    return [("field", f"  {key:10}:"), *(("text", f"    {_shorten(line)}") for line in shown)]


def _text_lines(text: str) -> list[str]:
    return plain(text).strip("\n").split("\n")


def _cut(lines: list[str], limit: int, where: str) -> list[str]:
    """Cut lines out of a long text: a third of the rest is its start, two thirds its end, where the error is."""
    over = len(lines) - limit
    if over <= 0:
        return lines
    head = limit // 3
    whole = "" if where == NOT_AVAILABLE else f", all in {plain(where)}"
    return [*lines[:head], f"... {how_many(over, 'line')} left out{whole} ...", *lines[head + over :]]


def _shorten(line: str) -> str:
    over = len(line) - LINE
    return line if over <= 0 else f"{line[:LINE]} ... {how_many(over, 'character')} left out"


# --- the attempts before the last one

_EARLIER = 20  # lines; those in the middle are left out


class Earlier(Value):
    """An attempt that has ended.

    Attributes:
        number: Which, from 0 on.
        text: Who ended it, and how, in one line.
        masked: The same without the numbers by which equal ones differ, see `mask`.
        how: What equal ones have in common beside that, as an exit code.
        step: The highest step that was reported; None: none was.
        uptime: For how many seconds it ran.
        ended: When it ended, in Unix time; None: by another machine's clock, or not at all.
    """

    number: int
    text: str
    masked: str
    how: object = None
    step: int | None = None
    uptime: float = 0.0
    ended: float | None = None


def describe_earlier(history: Sequence[Earlier]) -> list[str]:
    r"""Return the lines on a history.

    >>> def gone(number, pid, uptime):
    ...     return Earlier(number, f"rank 3, pid {pid} is gone", "rank 3, pid … is gone", uptime=uptime)
    >>> print(*describe_earlier([gone(0, 41, 60.0), gone(1, 42, 2.0), gone(2, 42, 7.0), gone(4, 43, 1.0)]), sep="\n")
    attempts 0 to 2, after 2.0s to 1m00s: rank 3, pid … is gone
    attempt 4, after 1.0s: rank 3, pid 43 is gone
    """
    lines = [_line([attempt for _, attempt in alike]) for _, alike in groupby(enumerate(history), key=_kind)]
    if len(lines) > _EARLIER:
        left = len(lines) - _EARLIER
        lines = [*lines[: _EARLIER // 2], f"... {left} more ...", *lines[-_EARLIER // 2 :]]
    return lines


def _kind(indexed: tuple[int, Earlier]) -> object:
    """What those have in common that have one line: their numbers follow each other, too."""
    index, attempt = indexed
    return attempt.number - index, attempt.how, attempt.masked


def _line(alike: list[Earlier]) -> str:
    first = alike[0]
    which = f"attempt {first.number}" if len(alike) == 1 else f"attempts {first.number} to {alike[-1].number}"
    steps = [*dict.fromkeys(str(attempt.step) for attempt in alike if attempt.step is not None)]
    if len(steps) > _EARLIER:
        steps = [*steps[: _EARLIER // 2], "…", *steps[-_EARLIER // 2 :]]
    text = first.text if all(attempt.text == first.text for attempt in alike) else first.masked
    said = f", step{'s' * (len(steps) > 1)} {', '.join(steps)}" if steps else ""
    return f"{which}, {_when(alike)}: {text}{said}"


def _when(alike: list[Earlier]) -> str:
    uptimes = sorted(attempt.uptime for attempt in alike)
    after = " to ".join(dict.fromkeys(format_duration(uptime) for uptime in (uptimes[0], uptimes[-1])))
    ends = sorted(attempt.ended for attempt in alike if attempt.ended is not None)
    if not ends:
        return f"after {after}"
    first, last = (time.strftime("%H:%M:%S", time.localtime(end)) for end in (ends[0], ends[-1]))
    return f"{first} after {after}" if len(alike) == 1 else f"{first} to {last}"
