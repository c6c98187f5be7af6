"""The samples of a run, ``samples.jsonl``: resources and steps of each rank, thinned out to what a page can hold.

Anybody may have written the file: what is not as expected is passed over, and nothing here raises.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx._base import files
from phalanx._base.text import how_many

FILE = "samples.jsonl"

MOST_VALUES = 120_000
"""Numbers of all plots together: about 0.7 MB of a page."""

_MOST_BYTES = 16 << 20
_MOST_TIMES = 600  # of a plot: more than it has columns of pixels
_MOST_RANKS = 1024
_LATEST = 1 << 37
_LARGEST = 1e18
_DIGITS = 3


class Metric(NamedTuple):
    """What is plotted: its name in the file, its title, its unit ("" for a share of a core, in percent)."""

    name: str
    title: str
    unit: str


METRICS = (
    Metric("step_time", "Step time", "s"),
    Metric("beat", "Age of the heartbeat", "s"),
    Metric("cpu", "CPU", "%"),
    Metric("memory", "Memory", "B"),
    Metric("gpu", "GPU", "%"),
    Metric("gpu_memory", "GPU memory", "B"),
    Metric("threads", "Threads", ""),
)


class Plot(NamedTuple):
    """One metric over time: of each rank, a value or None for each of the times."""

    metric: Metric
    values: dict[int, list[float | None]]


class Samples(NamedTuple):
    """The times (seconds of Unix time), what is plotted, the last step by rank, and what is left out."""

    times: list[float]
    plots: list[Plot]
    steps: dict[int, int]
    notes: list[str]


def read_samples(folder: str) -> Samples:
    """Read the samples of a run; of one without, there are no plots."""
    try:
        data = files.read(os.path.join(folder, FILE), _MOST_BYTES)
    except FileNotFoundError:
        return Samples([], [], {}, [])
    except OSError as error:
        return Samples([], [], {}, [f"{FILE} is unreadable: {error.strerror or error}."])
    rows, damaged = [], 0
    for line in data.split(b"\n"):
        try:
            if line:
                rows.append(_row(json.loads(line)))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            damaged += 1
    notes = [f"{how_many(damaged, 'sample')} could not be read."] if damaged > 1 else []  # the last may be torn
    rows.sort(key=lambda row: row[0])
    ranks = sorted({rank for row in rows for rank in row[2]})
    if len(ranks) > _MOST_RANKS:
        notes.append(f"The plots have {_MOST_RANKS} of {len(ranks)} ranks.")
        ranks = ranks[:_MOST_RANKS]
    return _thinned(rows, ranks, notes)


Row = tuple[float, int, dict[int, dict[str, float | None]]]
"""The time, the attempt, and by rank the numbers."""


def _row(found: Any) -> Row:
    time, attempt, ranks = float(found["time"]), int(found["attempt"]), found["ranks"]
    if not 0 <= time < _LATEST:
        raise ValueError(time)
    names = ("step", *(metric.name for metric in METRICS))
    columns = {name: found[name] for name in names if name in found}
    return time, attempt, {
        rank: {name: _number(column[index]) for name, column in columns.items()}
        for index, rank in enumerate(ranks)
        if type(rank) is int and rank >= 0
    }  # fmt: skip


def _number(value: Any) -> float | None:
    if type(value) not in (int, float):
        return None
    number = float(value)
    return number if abs(number) < _LARGEST else None  # NaN is not


def _thinned(rows: list[Row], ranks: Sequence[int], notes: list[str]) -> Samples:
    steps: dict[int, int] = {}
    for _, _, values in rows:
        for rank, numbers in values.items():
            if (step := numbers.get("step")) is not None:
                steps[rank] = int(step)
    known = [
        metric
        for metric in METRICS
        if any(numbers.get(metric.name) is not None for _, _, values in rows for numbers in values.values())
    ]
    if not rows or not known:
        return Samples([], [], steps, notes)
    columns = max(2, min(_MOST_TIMES, len(rows), MOST_VALUES // max(1, len(ranks) * len(known))))
    groups = [rows[len(rows) * index // columns : len(rows) * (index + 1) // columns] for index in range(columns)]
    groups = [group for group in groups if group]
    if len(groups) < len(rows):
        notes.append(f"Each point of the plots is of about {len(rows) / len(groups):.1f} samples: their highest.")
    _to_shares(rows)
    times = [round(group[-1][0], 2) for group in groups]
    plots = [Plot(metric, {rank: [None] * len(groups) for rank in ranks}) for metric in known]
    for index, group in enumerate(groups):
        for plot in plots:
            for rank, number in _highest(group, plot.metric.name).items():
                if rank in plot.values:
                    plot.values[rank][index] = float(f"{number:.{_DIGITS}g}")
    return Samples(times, plots, steps, notes)


def _to_shares(rows: list[Row]) -> None:
    """Make shares of a core, in percent, of the CPU seconds since the start of each rank."""
    before: dict[tuple[int, int], tuple[float, float]] = {}
    for time, attempt, values in rows:
        for rank, numbers in values.items():
            used = numbers.get("cpu")
            numbers["cpu"] = None
            last = before.get((attempt, rank))
            if used is not None:
                before[attempt, rank] = time, used
                if last is not None and time > last[0]:
                    numbers["cpu"] = max(0.0, (used - last[1]) / (time - last[0]) * 100)


def _highest(group: list[Row], name: str) -> dict[int, float]:
    """Return the highest value of each rank that has one; each value is looked at once, whoever has written them."""
    highest: dict[int, float] = {}
    for _, _, values in group:
        for rank, numbers in values.items():
            number = numbers.get(name)
            if number is not None and (rank not in highest or number > highest[rank]):
                highest[rank] = number
    return highest
