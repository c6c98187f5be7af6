"""Results as a person reads them, and as JSON."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.case import CONTENDERS, FLOOR, PEER, PHALANX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.runner import Result

_NO_VALUE = "-"
_MET = {True: "met", False: "MISSED", None: "not measured"}


def _number(value: float) -> str:
    """Return three significant digits, and all of a larger whole part.

    >>> [_number(value) for value in (0.0, 0.01234, 3.14159, 31.4159, 31415.9)]
    ['0', '0.0123', '3.14', '31.4', '31416']
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _spread(values: Sequence[float] | None) -> str:
    """Return the median and, where there is one, the range.

    >>> _spread([3.0, 1.0, 2.0]), _spread([2.0, 2.0]), _spread(None)
    ('2 (1..3)', '2', '-')
    """
    if not values:
        return _NO_VALUE
    least, most = min(values), max(values)
    middle = _number(median(values))
    return middle if least == most else f"{middle} ({_number(least)}..{_number(most)})"


def _ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> str:
    """Return the ratio of two medians, where there is one.

    >>> _ratio([3.0], [2.0]), _ratio([3.0], [0.0]), _ratio(None, [1.0])
    ('1.50', '-', '-')
    """
    if not ours or not theirs or not median(theirs):
        return _NO_VALUE
    return f"{median(ours) / median(theirs):.2f}"


def table(result: Result) -> str:
    """Return a result as text: a heading, a row per figure, the verdicts, and what else is to be said."""
    case = result.case
    rows = [["", "unit", *CONTENDERS, f"{PHALANX}/{PEER}", f"{PHALANX}/{FLOOR}"]]
    for figure, unit in case.units.items():
        seen = {contender: result.figures.get(contender, {}).get(figure) for contender in CONTENDERS}
        ratios = [_ratio(seen[PHALANX], seen[other]) for other in (PEER, FLOOR)]
        rows.append([figure, unit, *map(_spread, seen.values()), *ratios])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{case.name}: {case.measures} ({result.rounds} {'round' if result.rounds == 1 else 'rounds'})"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    for target, value, unit, met in result.verdicts():
        found = "" if value is None else f" ({_number(value)} {unit})"
        lines.append(f"  target: {PHALANX} {target}: {_MET[met]}{found}")
    lines += [f"  {contender}: {note}" for contender, notes in result.notes.items() for note in notes]
    lines += [f"  {contender}: FAILED: {error}" for contender, error in result.errors.items()]
    return "\n".join(lines)


def as_json(machine: dict[str, str], results: Sequence[Result]) -> dict[str, Any]:
    """Return everything, every value seen included, in terms that JSON knows."""
    return {
        "machine": machine,
        "cases": {
            result.case.name: {
                "measures": result.case.measures,
                "rounds": result.rounds,
                "units": dict(result.case.units),
                "figures": result.figures,
                "targets": [verdict._asdict() for verdict in result.verdicts()],
                "notes": result.notes,
                "errors": result.errors,
            }
            for result in results
        },
    }
