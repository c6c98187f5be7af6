"""Renders a run as one HTML file: no network, no inline handlers, nothing but its own script and style is let in.

Owns what of a run goes where on the page, and that nothing of a worker's is markup: the template escapes every value,
data for the script is JSON in which no tag can begin, and the page's Content-Security-Policy names the hashes of the
one script and the one style that may be used. The charts are uPlot's, which is small enough to be a part of each page,
see ``assets/README.md``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import pkgutil
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from phalanx import __version__
from phalanx._base.clock import format_duration
from phalanx._base.text import format_size, name_ranks
from phalanx._page.drawing import draw
from phalanx._page.facts import AttemptFacts, Facts, Worker
from phalanx._page.history import Mark
from phalanx._page.log_lines import Line
from phalanx._page.samples import Metric, Samples

MOST_WORKERS = 1024
"""Rows of the tables of ranks together."""

_CHUNK = 200  # lines that a browser lays out together, once they are seen
_REPORT, _LIST = "report.html.j2", "list.html.j2"
_STYLES = {_REPORT: ("uPlot.min.css", "report.css"), _LIST: ("report.css",)}
_SCRIPTS = {_REPORT: ("uPlot.iife.min.js", "report.js"), _LIST: ()}
_LIVE = "Live: what is new is shown as it comes."
_LIVE_SCRIPTS = ("idiomorph.min.js", "live.js")

CONTROLS = (
    ("stop", "Stop", "Stop the run: the ranks have the grace period"),
    ("stop-now", "Stop now", "Stop the run without a grace period"),
    ("restart", "Restart", "Stop the ranks and start them again"),
    ("pause", "Pause", "Pause the ranks, timers too"),
    ("resume", "Resume", "Let the ranks go on after a pause"),
    ("stack", "Where are the ranks", "Take the stacks of all ranks"),
)
"""What a live page can ask for: the word in the request, the button, and what it does."""


class Live(NamedTuple):
    """What the live page may ask of its server.

    Attributes:
        events: The path of the event stream, "/runs/NAME/events".
        home: The path of the list of runs.
        control: The path to which a POST acts on the run; "": it is only watched.
        version: That of this page: the page is fetched again when the stream has another one.
    """

    events: str
    home: str
    control: str = ""
    version: int = 0


class ListedRun(NamedTuple):
    """A run in the list of runs.

    ``started`` and ``ended`` are Unix time; None: it still runs, or it is not known. Without ``ranks``, nothing is.
    """

    name: str
    url: str
    state: str
    started: float
    ended: float | None
    script: str
    ranks: int
    attempt: int
    step: int | None
    cause: str


def render(facts: Facts, live: Live | None = None) -> str:
    """Return the page of a run: as a file that never changes, or live."""
    tables = _tables(facts.attempts)
    known = {f"w{number}-{worker.rank}" for number, workers in tables.items() for worker in workers}
    anchors, jumps = _jumps(facts.history.marks, facts.lines)
    return _page(
        _REPORT,
        live,
        status=_LIVE if facts.state == "running" else f"The run has ended: {facts.verdict}.",
        facts=facts,
        controls=CONTROLS,
        data=_ours(_json(_plotted(facts))),
        drawing=draw(facts, known),
        tables=tables,
        numbers=_numbers(facts.samples),
        jumps=jumps,
        chunks=_chunks(facts.lines, anchors),
    )


def render_list(runs: Sequence[ListedRun], live: Live, folder: str) -> str:
    """Return the list of the runs in a folder, live. No text may have what a terminal would obey, see `tty.plain`."""
    return _page(
        _LIST,
        live,
        status=_LIVE,
        folder=folder,
        runs=runs,
        running=sum(run.state == "running" for run in runs),
        made=time.time(),
    )


def policy() -> str:
    """Return the Content-Security-Policy of all live pages as a header. Nobody may frame them, which no <meta> can say.

    Each page has its own in itself, too, which allows it no more than it needs.
    """
    styles, scripts = zip(*(_assets(name, is_live=True) for name in (_REPORT, _LIST)), strict=True)
    return f"{_policy(styles, scripts, is_live=True)}; frame-ancestors 'none'"


def _page(name: str, live: Live | None, **values: Any) -> str:
    style, script = _assets(name, is_live=live is not None)
    text: str = (
        _environment()
        .get_template(name)
        .render(
            live=live,
            policy=_policy([style], [script], is_live=live is not None),
            # What is ours, and not a worker's, is not escaped.
            style=_ours(style),
            script=_ours(script),
            version=__version__,
            **values,
        )
    )
    return text


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Any] = {
        "clock": _clock,
        "day": lambda moment: time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(moment)),
        "duration": format_duration,
        "ranks": name_ranks,
    }
    environment.filters.update(filters)
    return environment


@functools.cache
def _assets(name: str, *, is_live: bool) -> tuple[str, str]:
    """Return the one style and the one script of a page."""
    scripts = (*_SCRIPTS[name], *_LIVE_SCRIPTS) if is_live else _SCRIPTS[name]
    return "\n".join(map(_asset, _STYLES[name])), "\n".join(map(_asset, scripts))


def _asset(name: str) -> str:
    data = pkgutil.get_data(__package__, f"assets/{name}")  # also out of a zip file
    assert data is not None
    return data.decode()


def _policy(styles: Iterable[str], scripts: Iterable[str], *, is_live: bool) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "img-src data:",
            *(("connect-src 'self'",) if is_live else ()),
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _ours(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704 - the package's own files, and JSON without a "<"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    r"""Encode data for a script element, which ends at the first "</script", whatever is around that.

    >>> _json("</script>")
    '"\\u003c/script>"'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII alone: no U+2028 either
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _clock(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%H:%M:%S", time.localtime(moment))


def _tables(attempts: Sequence[AttemptFacts]) -> dict[int, list[Worker]]:
    """Return the workers that have a row, by attempt: all of the last one, and those before that have failed."""
    tables: dict[int, list[Worker]] = {}
    room = MOST_WORKERS
    for attempt in reversed(attempts):
        every = attempt.workers if not tables else [one for one in attempt.workers if one.state == "failed"]
        tables[attempt.number] = sorted(sorted(every, key=_interest)[:room], key=lambda worker: worker.rank)
        room -= len(tables[attempt.number])
    return tables


def _interest(worker: Worker) -> tuple[bool, bool, int]:
    return worker.state != "failed", worker.state == "succeeded", worker.rank


# --- the log


class Row(NamedTuple):
    """A line of the log, and its id if something refers to it."""

    line: Line
    id: str


def _jumps(marks: Sequence[Mark], lines: Sequence[Line]) -> tuple[set[int], dict[int, int]]:
    """Return, by mark, the line that was written last before it, of its ranks if it has any; and all such lines."""
    jumps: dict[int, int] = {}
    times = [line.time for line in lines]
    for number, mark in enumerate(marks):
        if not lines or mark.time < times[0]:
            continue
        at = min(bisect_left(times, mark.time), len(lines)) - 1
        wanted = set(mark.ranks)
        for index in range(at, max(-1, at - 2000), -1):
            if lines[index].attempt == mark.attempt and (not wanted or lines[index].rank in wanted):
                jumps[number] = index
                break
    return set(jumps.values()), jumps


def _chunks(lines: Sequence[Line], anchors: set[int]) -> list[list[Row]]:
    rows = [Row(line, f"l{index}" if index in anchors else "") for index, line in enumerate(lines)]
    return [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]


# --- samples


def _plotted(facts: Facts) -> dict[str, Any]:
    samples = facts.samples
    return {
        "times": [round(moment - facts.began, 2) for moment in samples.times],
        "plots": [
            {
                "name": plot.metric.name,
                "title": plot.metric.title,
                "unit": plot.metric.unit,
                "ranks": [*plot.values],
                "values": [*plot.values.values()],
            }
            for plot in samples.plots
        ],
    }


class Numbers(NamedTuple):
    """The table beside the plots: what its columns are, and the cells of each rank."""

    columns: list[str]
    rows: list[tuple[int, list[str]]]


def _numbers(samples: Samples) -> Numbers:
    """Return the median and the highest value of each metric, by rank."""
    columns = [f"{plot.metric.title}, {what}" for plot in samples.plots for what in ("median", "highest")]
    ranks = sorted({rank for plot in samples.plots for rank in plot.values})
    rows = []
    for rank in ranks:
        cells = [str(samples.steps.get(rank, ""))]
        for plot in samples.plots:
            values = [value for value in plot.values[rank] if value is not None]
            cells += [_formatted(plot.metric, what(values)) if values else "" for what in (statistics.median, max)]
        rows.append((rank, cells))
    return Numbers(columns, rows)


def _formatted(metric: Metric, value: float) -> str:
    if metric.unit == "B":
        return format_size(int(value))
    return f"{value:.3g} {metric.unit}".rstrip()
