"""``python -m benchmarks compare BEFORE AFTER``: what became slower or faster beyond the noise between two results.

Of each figure of Phalanx, the medians of the rounds are compared. Where the floor was measured, too, each median is
taken as a multiple of the floor's of its own result: what the machine itself became slower by is not Phalanx's. A
figure has changed if

- the two-sided Mann-Whitney U test on the medians of the rounds gives a p-value of at most ``--p``, and
- the ratio of the two results' medians is beyond ``--at-least``,

in floors and in the figure's own unit, in the same direction: where only the floor became faster, that is not
Phalanx's, either.

With fewer than five rounds a result, no p-value is small enough, and that is said.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import report
from benchmarks.case import FLOOR, PHALANX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

P, AT_LEAST = 0.01, 10.0
LEAST_ROUNDS = 5


class Change(NamedTuple):
    """One figure in both results: by what it grew (1: by nothing), how sure that is, and whether it counts."""

    name: str
    unit: str
    before: float
    after: float
    growth: float
    p: float
    counts: bool

    @property
    def is_worse(self) -> bool:
        """Whether the change is to the worse."""
        return self.counts and (self.growth > 1) != self.unit.endswith("/s")


def changed(before: Sequence[float], after: Sequence[float], *, p: float, at_least: float) -> tuple[float, float, bool]:
    """Return the ratio of the medians, the p-value, and whether both are beyond their bounds.

    >>> growth, p, counts = changed([1.0, 1.1, 1.2, 1.05, 1.15], [1.5, 1.4, 1.6, 1.45, 1.55], p=0.01, at_least=10)
    >>> round(growth, 2), round(p, 4), counts
    (1.36, 0.0079, True)
    >>> changed([1.0, 1.1, 1.2, 1.05, 1.15], [1.1, 1.0, 1.2, 1.05, 1.15], p=0.01, at_least=10)[2]
    False
    """
    from scipy.stats import mannwhitneyu

    growth = median(after) / median(before)
    value = float(mannwhitneyu(before, after, alternative="two-sided").pvalue)
    return growth, value, value <= p and max(growth, 1 / growth) >= 1 + at_least / 100


def _rounds(run: dict[str, Any], figure: str) -> tuple[list[float], list[float]]:
    """Return the medians of the rounds of a figure of Phalanx, and the same in floors where there is a floor."""
    ours = [median(values) for values in run["figures"].get(PHALANX, {}).get(figure, [])]
    floor = [value for values in run["figures"].get(FLOOR, {}).get(figure, []) for value in values]
    middle = median(floor) if floor else 0
    return ours, [value / middle for value in ours] if middle > 0 else ours


def compare(before: dict[str, Any], after: dict[str, Any], *, p: float, at_least: float) -> Iterator[Change | str]:
    """Yield each figure that both results have, or why it cannot be compared."""
    for name, case in before["cases"].items():
        later = {run["size"]: run for run in after["cases"].get(name, {}).get("runs", [])}
        for run in case["runs"]:
            if run["size"] not in later:
                continue
            of = f"{name} of {run['size']}" if run["size"] else name
            for figure, unit in case["units"].items():
                own, medians = zip(_rounds(run, figure), _rounds(later[run["size"]], figure), strict=True)
                if not all(medians) or not all(value > 0 for values in medians for value in values):
                    continue
                if min(map(len, medians)) < LEAST_ROUNDS:
                    yield f"{of}, {figure}: fewer than {LEAST_ROUNDS} rounds"
                    continue
                plain = [
                    median(value for values in seen["figures"][PHALANX][figure] for value in values)
                    for seen in (run, later[run["size"]])
                ]
                growth, value, counts = changed(*medians, p=p, at_least=at_least)
                bare, _, also = changed(*own, p=p, at_least=at_least)
                counts = counts and also and (growth > 1) == (bare > 1)
                yield Change(f"{of}, {figure}", unit, plain[0], plain[1], growth, value, counts)


def main(argv: list[str]) -> int:
    """Print what changed. Return 1 if something became worse, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description="What became slower or faster between two results of `python -m benchmarks --json`.",
        epilog="The test: two-sided Mann-Whitney U on the medians of the rounds, in floors where there is one.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE")
    parser.add_argument("after", type=Path, metavar="AFTER")
    parser.add_argument("--p", type=float, default=P, help=f"the largest p-value that counts (default: {P})")
    parser.add_argument(
        "--at-least", type=float, default=AT_LEAST, metavar="PERCENT",
        help=f"the smallest change that counts (default: {AT_LEAST:g})",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        results = report.read(options.before), report.read(options.after)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    found = list(compare(*results, p=options.p, at_least=options.at_least))
    changes = [change for change in found if isinstance(change, Change)]
    for change in sorted(changes, key=lambda change: -change.growth):
        if change.counts:
            verdict = "WORSE" if change.is_worse else "better"
            by = f"x {change.growth:.2f}, p = {change.p:.4f}"
            values = f"{report.number(change.before)} to {report.number(change.after)} {change.unit}"
            print(f"{verdict}: {change.name}: {values} ({by})")
    print(f"{len(changes)} figures compared, {sum(change.counts for change in changes)} changed")
    if unfit := [text for text in found if isinstance(text, str)]:
        print(f"{len(unfit)} not compared, the first: {unfit[0]}", file=sys.stderr)
    return int(any(change.is_worse for change in changes))
