"""Results as a person reads them, as Markdown, and as JSON."""

from __future__ import annotations

import json
import math
import re
import textwrap
from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

from benchmarks.case import FLOOR, PHALANX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.case import Case
    from benchmarks.runner import Result

VERSION = 3
"""Of the form that `as_json` returns. 2 did not have the contenders of a case."""

_NO_VALUE = "-"
_MET = {True: "met", False: "MISSED", None: "not measured"}

_SMALLEST = 8
"""The size from which growth is fitted: below it, what a start costs once is all of it."""


def number(value: float) -> str:
    """Return three significant digits, and all of a larger whole part.

    >>> [number(value) for value in (0.0, 0.01234, 3.14159, 31.4159, 31415.9)]
    ['0', '0.0123', '3.14', '31.4', '31416']
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float] | None) -> str:
    """Return the median and, where there is one, the range.

    >>> spread([3.0, 1.0, 2.0]), spread([2.0, 2.0]), spread(None)
    ('2 (1..3)', '2', '-')
    """
    if not values:
        return _NO_VALUE
    least, most = min(values), max(values)
    middle = number(median(values))
    return middle if least == most else f"{middle} ({number(least)}..{number(most)})"


def ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> str:
    """Return the ratio of two medians, where there is one.

    >>> ratio([3.0], [2.0]), ratio([3.0], [0.0]), ratio(None, [1.0])
    ('1.50', '-', '-')
    """
    if not ours or not theirs or not median(theirs):
        return _NO_VALUE
    return f"{median(ours) / median(theirs):.2f}"


def best(medians: Mapping[str, float], among: Iterable[str], *, more_is_better: bool) -> str | None:
    """Return whose median is the best of those that are named, if there is one."""
    known = [name for name in among if name in medians]
    return (max if more_is_better else min)(known, key=medians.__getitem__, default=None)


def best_peer(result: Result, figure: str) -> str | None:
    """Return the name of the peer whose median of a figure is the best, if any was measured."""
    medians = {name: median(values) for name in result.figures if (values := result.figures[name].get(figure))}
    more_is_better = result.case.units[figure].endswith("/s")
    return best(medians, result.case.peers(), more_is_better=more_is_better)


def _rows(results: Sequence[Result], contenders: Sequence[str]) -> list[list[str]]:
    """Return the head of the table of one case, and a row per figure and size."""
    sized = [["size"]] if results[0].size else [[]]
    rows = [["", *sized[0], "unit", *contenders, "x best peer", "x floor"]]
    for figure, unit in results[0].case.units.items():
        for result in results:
            figures = result.figures
            seen = {name: figures.get(name, {}).get(figure) for name in contenders}
            if not any(seen.values()):
                continue
            best = best_peer(result, figure)
            ratios = [ratio(seen.get(PHALANX), seen.get(other)) if other else _NO_VALUE for other in (best, FLOOR)]
            if best and ratios[0] != _NO_VALUE and len(result.case.peers()) > 1:
                ratios[0] += f" {best}"
            cells = ["FAILED" if name in result.errors else spread(values) for name, values in seen.items()]
            rows.append([figure, *([str(result.size)] if result.size else []), unit, *cells, *ratios])
    return rows


def _contenders(results: Sequence[Result]) -> list[str]:
    """Return the contenders that took part at all, in the order of the case."""
    return [name for name in results[0].case.contenders if any(name in r.seen or name in r.errors for r in results)]


def _remarks(results: Sequence[Result]) -> Iterable[str]:
    """Yield what else is to be said of a case: verdicts, notes, errors, and how the figures grow."""
    for result in results:
        of = f" of {result.size}" if result.size else ""
        for target, value, unit, met in result.verdicts():
            found = "" if value is None else f" ({number(value)} {unit})"
            yield f"target{of}: {PHALANX} {target}: {_MET[met]}{found}"
        yield from (f"{contender}{of}: {note}" for contender, notes in result.notes.items() for note in notes)
        yield from (f"{contender}{of}: FAILED: {error}" for contender, error in result.errors.items())
    yield from _rounds(results)
    for figure, exponents in growth(results).items():
        shown = ", ".join(f"{contender} {exponent:.2f}" for contender, exponent in exponents.items())
        yield f"grows with N to the power of: {figure}: {shown}"


def _rounds(results: Sequence[Result]) -> Iterable[str]:
    """Yield in how many rounds whose figures were seen, once for all sizes of which it is the same."""
    sizes: dict[str, list[int]] = {}
    for result in results:
        by: dict[int, list[str]] = {}
        for contender in result.figures:
            by.setdefault(max(map(len, result.seen[contender].values()), default=0), []).append(contender)
        text = "; ".join(f"{rounds} of {', '.join(names)}" for rounds, names in sorted(by.items(), reverse=True))
        sizes.setdefault(text, []).append(result.size)
    for text, those in sizes.items():
        of = f" of {', '.join(map(str, those))}" if len(sizes) > 1 else ""
        yield f"rounds{of}: {text or 'none'}"


def table(results: Sequence[Result]) -> str:
    """Return what a case came to as text: a heading, a row per figure and size, and what else is to be said."""
    case, rounds = results[0].case, results[0].rounds
    rows = _rows(results, _contenders(results))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{case.name}: {case.measures} ({rounds} {'round' if rounds == 1 else 'rounds'})"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    lines += [f"  {remark}" for remark in _remarks(results)]
    return "\n".join([*lines, *(f"  {text}" for result in results if (text := _took(result)))])


def _took(result: Result) -> str:
    """Return how long the measuring took, of whom."""
    of = f" of {result.size}" if result.size else ""
    shown = ", ".join(f"{contender} {seconds:.0f}" for contender, seconds in result.took.items())
    return f"took{of}: {sum(result.took.values()):.0f} s ({shown})" if shown else ""


def markdown(results: Sequence[Result]) -> str:
    """Return the same as a section of a page."""
    case = results[0].case
    rows = _rows(results, _contenders(results))
    rules = ["---"] * len(rows[0])
    lines = [f"### `{case.name}`", "", f"{case.measures[0].upper()}{case.measures[1:]}.", ""]
    lines += [f"| {' | '.join(row)} |" for row in (rows[0], rules, *rows[1:])]
    # What a contender has said is no Markdown, and may be long: the result has all of it.
    remarks = [textwrap.shorten(remark, 300, placeholder=" …") for remark in _remarks(results)]
    remarks = [re.sub(r"([\[\]<>*`\\])", r"\\\1", remark) for remark in remarks]
    return "\n".join([*lines, "", *(f"- {remark}" for remark in remarks)]).rstrip() + "\n"


def exponent(points: Mapping[int, float]) -> float | None:
    """Return by which power of the size a figure grows: the slope of a line through the logarithms.

    >>> round(exponent({8: 2.0, 64: 16.0, 256: 64.0}), 3), exponent({8: 2.0}), exponent({8: 0.0, 64: 1.0})
    (1.0, None, None)
    """
    fit = {size: value for size, value in points.items() if size >= _SMALLEST}
    if len(fit) < 2 or not all(value > 0 for value in fit.values()):
        return None
    return linear_regression([math.log(size) for size in fit], [math.log(value) for value in fit.values()]).slope


def growth(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return figure -> contender -> the exponent of its growth, where there are two sizes to see it by."""
    found: dict[str, dict[str, float]] = {}
    for figure in results[0].case.units:
        for contender in _contenders(results):
            points = {
                result.size: median(values)
                for result in results
                if (values := result.figures.get(contender, {}).get(figure))
            }
            if (slope := exponent(points)) is not None:
                found.setdefault(figure, {})[contender] = slope
    return found


def read(path: Path) -> dict[str, Any]:
    """Return what a file has of `as_json`. Raises OSError; ValueError: it is none."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a result in JSON: {error}") from None
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ValueError(f"{path}: expected a result of version {VERSION}, found {version!r}")
    return dict(found)


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write what `as_json` has returned, beside what is there first: a full disk does not cut that. Raises OSError."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(as_text(found), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def as_text(found: Mapping[str, Any]) -> str:
    """Return what `as_json` has returned as text: a line for the figures of each contender."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\[[\d\s.,e+-]*\]", lambda values: re.sub(r"\s+", " ", values[0]), text) + "\n"


def as_json(machine: Mapping[str, str], absent: Mapping[str, str], cases: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Return everything, every value of each round included, in terms that JSON knows.

    ``absent``: why which contender took no part. ``cases``: the results of each case, by its sizes.
    """
    return {
        "version": VERSION,
        "machine": dict(machine),
        "absent": dict(absent),
        "cases": {results[0].case.name: _case_as_json(results[0].case, results) for results in cases},
    }


def _case_as_json(case: Case, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "measures": case.measures,
        "units": dict(case.units),
        "contenders": list(case.contenders),
        "growth": growth(results),
        "runs": [
            {
                "size": result.size,
                "rounds": result.rounds,
                "figures": result.seen,
                "targets": [verdict._asdict() for verdict in result.verdicts()],
                "notes": result.notes,
                "errors": result.errors,
                "took": dict(result.took),
            }
            for result in results
        ],
    }
