"""``python -m benchmarks page RESULT``: a result as pictures and text, put into the page on benchmarks and the README.

What stands between two marks of those files is written anew; the rest is a person's. A picture is cost against size,
both logarithmic: a line a contender, Phalanx's thick, the floor's dashed, with the exponent of its growth. It is one
file for light and for dark pages.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.case import FLOOR, PHALANX, Case, Sample
from benchmarks.runner import ROOT, Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER, RESULT = "benchmarks", "result.json"
"""Beside the page: where its pictures are, and the result that it shows."""

BEGIN, END = "<!-- measured: {} -->", "<!-- end of what was measured -->"

PICTURES = {
    "launch": ("elapsed",),
    "programs": ("elapsed",),
    "functions": ("elapsed",),
    "stand": ("up", "cpu", "memory", "ended"),
    "failure": ("ended",),
    "lines": ("speed",),
    "rendezvous": ("last",),
}
"""The figures that the page has a picture of."""

_LEFT_OUT = ("store_use",)
"""It has no peer, and a hundred figures, of which the page on many machines shows what matters."""

ROWS = (
    ("launch", "elapsed", 64, "64 programs that do nothing, by a command"),
    ("functions", "elapsed", 64, "64 empty functions, each in a new interpreter"),
    ("failure", "ended", 64, "one of 64 fails, until all are gone and the launcher has ended"),
    ("lines", "speed", 8, "8 programs write, each line marked and whole"),
    ("kills", "killed, left", 64, "processes of 64 that survive `kill -9` of the launcher"),
)
"""The rows of the README: the case, its figure, the size, and what they are called there."""

AHEAD, FAR = 1.1, 2.0
"""From which ratio to the best peer it is ahead, and above which one the floor is far."""

_KEEPER = "the keeper and its guard, an interpreter of their own, which are there when the launcher is killed"
STAYS: dict[tuple[str, str], str] = {
    ("launch", "elapsed"): (
        "two thirds are the start of Python and the imports of the command, of which click is a third, and no other"
        " module a hundredth; the rest is the keeper's start, the run and its record"
    ),
    ("programs", "elapsed"): (
        _KEEPER + "; with N the ratio falls. Of one program's 23 ms of CPU, 9 are the start of that interpreter, 5 its "
        "modules and 4 the launcher; each further program costs 0.3 ms, for its descriptor, its exit and its report"
    ),
    ("functions", "elapsed"): (
        "for one function, the keeper; a worker's imports take 34 ms of CPU, of which `multiprocessing`'s are 30; "
        "with 32 it takes no more CPU than `multiprocessing`"
    ),
    ("warm_torch", "second start"): (
        "the group's guard and keeper are two more forks of what has torch, and each worker copies some 900 pages "
        "that it is the first to touch"
    ),
    ("watched", "status"): "a Python, its imports and a question; the floor is a bare Python that reads /proc",
    ("stand", "up"): (_KEEPER + "; from 256 programs on it is the first"),
    ("stand", "threads"): "the same number for every N: each has a task that must not wait for another's",
    ("stand", "memory"): "a Python of its own; the peer is a program in C that looks after nothing else",
    ("stand", "ended"): (
        "the report, the record of the run, the events of each worker, and the search for what the programs left behind"
    ),
    ("failure", "ended"): "the settle window of 30 ms, in which a cause may still come; then as `stand`, ended",
    ("restart", "cold"): (
        "the settle window of 30 ms; and what each worker does before its first line (its error file, its handler for "
        "fatal signals), of which 64 share two cores"
    ),
    ("rendezvous", ""): (
        "each agent is admitted by its secret, writes to the store, watches it and decides, all on two cores; the "
        "floor counts them"
    ),
    ("broadcast", ""): "a transaction at the store, its watches, and a decision in each agent",
    ("big_argument", "forkserver"): "the array is copied once into shared memory; a bare fork has the parent's",
    ("exit_to_wait", "beyond settle"): (
        "the keeper reaps and reports, and a thread of the launcher wakes the caller; torch looks each 10 ms, on "
        "the caller's own"
    ),
    ("memory", "helper"): "guard and keeper; the others have none",
    ("thousand", "launcher fds"): "six for the group, however many its workers are",
    ("thousand", "helper"): (
        "the keeper has a descriptor for each worker, and what is known of it; the others have no keeper"
    ),
    ("thousand", "start"): "within the spread of its rounds, of which torch has one",
    ("thousand", "close"): "each process is signalled, reaped and recorded, and what it left is looked for",
    ("thousand", "launcher memory"): "what is known of a worker: its state, its files, its name",
    ("import", "import"): "the library's public names",
    ("lines", "speed"): (
        "the end of a run (`stand`, ended) is in the time; and each line is in a file, too, which parallel does not"
        " keep"
    ),
    ("log_throughput", "devnull"): (
        "each line is found and marked, and compared if it may begin a traceback; the writing is in the time, which"
        " the floor's is not"
    ),
    ("log_delay", "median"): (
        "one more process reads the file and writes the line: the least Python that does this takes nearly three times "
        "the floor; the rest notes the moment, marks, cuts and compares lines, with cold caches"
    ),
    ("log_delay", "p99"): "as the median",
    ("timer_cost", "expires"): (
        "an object and its four methods are 3.6 times the floor; the rest is the caller's line, a slot, and the "
        "watcher's next look"
    ),
    ("timer_cost", "file"): (
        "JSON with three decimal numbers, which torch's servers read, a pid, and a check that it is one write; of a"
        " flood, the server's 7 us a request are what is measured"
    ),
    ("timer_cost", "local"): (
        "written when it returns, so a worker that is killed just after has been heard; torch's returns when it is "
        "in a buffer, and is more than twice as slow until it has been written"
    ),
    ("timer_flood", "wall"): "torch's raises an error in nearly every timer, and so does not wait",
}
"""Why a figure is behind, by case and the beginning of the figure's name."""

# Colours that nobody else uses, for which a picture has one of its page's.
_TEXT, _GRID, _OURS = "#010101", "#020202", "#030303"
_STYLE = """<style>
svg { --text: #1f2328; --grid: #d1d9e0; --ours: #0b62d6 }
@media (prefers-color-scheme: dark) { svg { --text: #e6edf3; --grid: #3d444d; --ours: #58a6ff } }
</style>"""
_NAMES = {_TEXT: "var(--text)", _GRID: "var(--grid)", _OURS: "var(--ours)"}


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several results as one: of a case and size that are in two of them, what the last has."""
    first, *later = found
    first["machine"] = {fact: _fact(fact, [one["machine"][fact] for one in found]) for fact in first["machine"]}
    first["absent"] = {name: why for one in found for name, why in one["absent"].items()}
    for name, case in ((name, case) for one in later for name, case in one["cases"].items()):
        runs = {run["size"]: run for run in [*first["cases"].get(name, {"runs": []})["runs"], *case["runs"]]}
        first["cases"][name] = case | {"runs": [runs[size] for size in sorted(runs)]}
    for results in results_of(first):
        first["cases"][results[0].case.name]["growth"] = report.growth(results)
    return first


def _fact(name: str, values: Sequence[str]) -> str:
    """Return a fact of the machine of several results. Raises ValueError: they are of different machines."""
    if name in {"cores", "kernel", "python"} and len(set(values)) > 1:
        raise ValueError(f"results of different machines, {name}: {' and '.join(dict.fromkeys(values))}")
    return ", ".join(dict.fromkeys(word for value in values for word in value.split(", ") if word))


def results_of(found: dict[str, Any]) -> Iterator[list[Result]]:
    """Yield the results of each case in what `report.as_json` has returned, without targets, see `missed`."""
    for name, one in found["cases"].items():
        case = Case(name, one["measures"], one["units"], (), dict.fromkeys(one["contenders"], _not_run))
        yield [
            Result(
                case,
                run["rounds"],
                run["figures"],
                {contender: tuple(notes) for contender, notes in run["notes"].items()},
                run["errors"],
                run["size"],
            )
            for run in one["runs"]
        ]


def _not_run(*_size: int) -> Sample:
    raise NotImplementedError("a result of a run that was")


def _points(results: Sequence[Result], figure: str, contender: str) -> dict[int, float]:
    """Return size -> median of a figure, where it is more than nothing."""
    seen = {result.size: result.figures.get(contender, {}).get(figure) for result in results}
    return {size: median(values) for size, values in seen.items() if values and median(values) > 0}


def draw(results: Sequence[Result], figure: str) -> str:
    """Return one picture, as SVG."""
    import io

    import matplotlib.pyplot as plt
    from matplotlib.colors import TABLEAU_COLORS

    plt.rcParams["svg.hashsalt"] = "phalanx"  # the same file for the same figures
    case, grown = results[0].case, report.growth(results).get(figure, {})
    canvas, axes = plt.subplots(figsize=(7, 4.2))
    axes.set_prop_cycle(color=[color for name, color in TABLEAU_COLORS.items() if name != "tab:blue"])  # ours is blue
    for contender in sorted(case.contenders, key=lambda name: (name != PHALANX, name == FLOOR)):
        if not (points := _points(results, figure, contender)):
            continue
        style: dict[str, Any] = {"linewidth": 1.2, "marker": "."}
        if contender == PHALANX:
            style = {"linewidth": 3, "marker": "o", "color": _OURS, "zorder": 5}
        elif contender == FLOOR:
            style = {"linewidth": 1.5, "linestyle": "--", "color": _TEXT}
        label = f"{contender}  (N^{grown[contender]:.2f})" if contender in grown else contender
        # A size at which it failed is a gap.
        sizes = [result.size for result in results]
        axes.plot(sizes, [points.get(size, math.nan) for size in sizes], label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="N", ylabel=case.units[figure], title=f"{case.name}: {figure}")
    axes.set_xticks([result.size for result in results], [str(result.size) for result in results])
    axes.minorticks_off()
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_facecolor("none")
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
        part.set_color(_TEXT)
    axes.tick_params(colors=_TEXT)
    for spine in axes.spines.values():
        spine.set_color(_GRID)
    axes.legend(frameon=False, labelcolor=_TEXT, loc="center left", bbox_to_anchor=(1.0, 0.5))
    file = io.StringIO()
    canvas.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(canvas)
    drawn = re.sub(r"(<svg\b[^>]*>)", rf"\1\n{_STYLE}", file.getvalue(), count=1)
    return re.sub("|".join(_NAMES), lambda found: _NAMES[found[0]], drawn)


def pictures(found: dict[str, Any]) -> Iterator[tuple[str, list[Result], str]]:
    """Yield each picture that a result can be drawn as: the name of its file, the results of its case, its figure."""
    for results in results_of(found):
        name = results[0].case.name
        for figure in PICTURES.get(name, ()):
            if len(_points(results, figure, PHALANX)) > 1:
                yield f"{name}-{figure.replace(' ', '-')}.svg", results, figure


def _worst(results: Sequence[Result], figure: str, others: Sequence[str]) -> tuple[float, str]:
    """Return by how many times Phalanx is behind the best of the others, where it is most, and what to print of it."""
    more_is_better = results[0].case.units[figure].endswith("/s")
    worst, text = 0.0, "-"
    for result in results:
        if PHALANX in result.errors:
            return math.inf, f"{PHALANX} FAILED" + (f" (N = {result.size})" if result.size else "")
        medians = {name: median(values) for name in result.figures if (values := result.figures[name].get(figure))}
        best = report.best(medians, others, more_is_better=more_is_better)
        if best is None or not medians.get(PHALANX):
            continue
        ours, theirs = medians[PHALANX], medians[best]
        ratio = (theirs / ours if more_is_better else ours / theirs) if theirs else math.inf
        if ratio > worst:
            of = [*([best] if best != FLOOR else []), *([f"N = {result.size}"] if result.size else [])]
            shown = report.number(ratio) if theirs else f"{report.number(ours)} for 0"
            worst, text = ratio, f"{shown} ({', '.join(of)})" if of else shown
    return worst, text


def behind(found: dict[str, Any]) -> str:
    """Return the table of the figures in which a peer is ahead, or the floor by more than twice; with why it stays."""
    lines = ["| case | figure | x best peer, at most | x floor, at most | why |", "| --- | --- | --- | --- | --- |"]
    for results in results_of(found):
        case = results[0].case
        for figure in case.units:
            peer, of_peer = _worst(results, figure, case.peers())
            floor, of_floor = _worst(results, figure, [FLOOR])
            if peer >= AHEAD or floor > FAR:
                why = next(
                    (text for (name, of), text in STAYS.items() if name == case.name and figure.startswith(of)), ""
                )
                lines.append(f"| `{case.name}` | {figure} | {of_peer} | {of_floor} | {why} |")
    return "\n".join(lines)


def missed(found: dict[str, Any]) -> str:
    """Return the table of the targets that were missed, as they were judged when it was measured."""
    lines = ["| case | N | target | found |", "| --- | --- | --- | --- |"]
    for name, case in found["cases"].items():
        for run in case["runs"]:
            lines += [
                f"| `{name}` | {run['size'] or ''} | {one['target']} | {report.number(one['value'])} {one['unit']} |"
                for one in run["targets"]
                if one["met"] is False
            ]
    return "\n".join(lines) if len(lines) > 2 else "None."


def section(found: dict[str, Any]) -> str:
    """Return all of a result for the page: the machine, each case's table, its pictures, and who took no part."""
    lines = ["; ".join(f"{name}: {fact}" for name, fact in found["machine"].items()) + ".", ""]
    lines += [f"- {name} took no part: {why}" for name, why in found["absent"].items()]
    drawn = list(pictures(found))
    for results in results_of(found):
        name = results[0].case.name
        if name in _LEFT_OUT:
            continue
        lines += ["", report.markdown(results)]
        lines += [
            f"![{name}: {figure} against N, both logarithmic, a line a contender]({FOLDER}/{file})"
            for file, of, figure in drawn
            if of[0].case.name == name
        ]
    return "\n".join(lines)


def rows(found: dict[str, Any]) -> str:
    """Return the table of the README: Phalanx, the best of the peers, and the floor."""
    lines = ["| | Phalanx | torch | the best peer | the floor |", "| --- | --- | --- | --- | --- |"]
    by_name = {results[0].case.name: results for results in results_of(found)}
    for name, figure, size, what in ROWS:
        result = next((one for one in by_name.get(name, []) if one.size == size), None)
        if result is None:
            continue
        figures, unit = result.figures, result.case.units[figure]
        best = report.best_peer(result, figure)

        def cell(contender: str | None, figures: Any = figures, figure: str = figure, unit: str = unit) -> str:
            values = figures.get(contender, {}).get(figure)
            value = report.number(median(values)) if values else "-"
            return f"{value} {unit}" if values and unit != "processes" else value

        cells = [cell(PHALANX), cell("torch"), f"{cell(best)} ({best})" if best else "-", cell(FLOOR)]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    lines += ["", f"![N programs that do nothing, by each command: time against N](docs/{FOLDER}/launch-elapsed.svg)"]
    return "\n".join(lines)


def between_marks(path: Path, name: str) -> tuple[str, str, str]:
    """Return what a file has before, between and after the marks of this name. Raises ValueError: it has none."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN.format(name))
    between, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: expected {BEGIN.format(name)} and {END}")
    return before + begin, between.strip(), end + after


def put(path: Path, name: str, text: str) -> None:
    """Write a text between the marks of this name."""
    before, _, after = between_marks(path, name)
    path.write_text(f"{before}\n\n{text.strip()}\n\n{after}", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Write pictures, page and README."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks page", description="Put a result into the documentation."
    )
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT",
        help="what `python -m benchmarks --json` has written; of a case and size in two of them, the last is shown",
    )  # fmt: skip
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", metavar="FILE")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    options = parser.parse_args(argv)
    try:
        found = merged([report.read(path) for path in options.results])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    folder = options.page.parent / FOLDER
    folder.mkdir(exist_ok=True)
    for file, results, figure in pictures(found):
        (folder / file).write_text(draw(results, figure), encoding="utf-8")
    put(options.page, "behind", behind(found))
    put(options.page, "missed", missed(found))
    put(options.page, "cases", section(found))
    put(options.readme, "rows", rows(found))
    report.write(folder / RESULT, found)
    return 0
