"""``python -m benchmarks compare BEFORE AFTER [CASE...]``: what became worse or better between two results.

Of each figure of Phalanx, the medians of the rounds are compared: plain, and where both results have the floor also
each divided by the floor's of the same round. A figure has changed if, of both and in the same direction,

- the two-sided Mann-Whitney U test gives a p-value of at most ``--p``, and
- the ratio of the two results' medians is beyond ``--at-least``.

With fewer than five rounds a result, no p-value is small enough, and that is said. No test is needed to see that a
count that was 0 is more, that Phalanx failed, or that a case, a size or a figure is gone: each is worse.

``compare --trees BEFORE AFTER CASE...`` measures the libraries of two checkouts, by the cases of this one, in turn and
in one run, so that the machine's own drift meets both. The two of a round are a pair, and the test is Wilcoxon's.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import launchers, peers, report
from benchmarks.case import FLOOR, PHALANX, Case, positive, sizes
from benchmarks.cases import NAMES, load
from benchmarks.runner import Result, RunError, run_contender

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

P, AT_LEAST = 0.01, 10.0
LEAST_ROUNDS, LEAST_PAIRS = 5, 8
"""With fewer, neither test gives a p-value of 0.01, whatever the figures are."""


WORSE, BETTER, ALIKE, NOT_COMPARED = "WORSE", "better", "not told apart", "not compared"


class Change(NamedTuple):
    """A verdict on one figure, or on all of one case and size; and what was compared."""

    verdict: str
    what: str


class Rule(NamedTuple):
    """When a figure counts as changed: at most this p-value, and at least so many percent."""

    p: float = P
    at_least: float = AT_LEAST
    paired: bool = False

    @property
    def rounds(self) -> int:
        """How many rounds it takes."""
        return LEAST_PAIRS if self.paired else LEAST_ROUNDS


RULE = Rule()


def changed(before: Sequence[float], after: Sequence[float], *, paired: bool = False) -> tuple[float, float]:
    """Return the ratio of two samples, and the p-value: by how much the second is more, and how sure that is not.

    >>> growth, p = changed([1.0, 1.1, 1.2, 1.05, 1.15], [1.5, 1.4, 1.6, 1.45, 1.55])
    >>> round(growth, 2), round(p, 4)
    (1.36, 0.0079)
    >>> changed([1.0, 1.1, 1.2, 1.05, 1.15], [1.1, 1.0, 1.2, 1.05, 1.15])[0]
    1.0
    >>> growth, p = changed([1, 2, 3, 4, 5, 6, 7, 8], [1.2, 2.4, 3.6, 4.8, 6, 7.2, 8.4, 9.6], paired=True)
    >>> round(growth, 2), round(p, 4)
    (1.2, 0.0078)
    """
    from scipy.stats import mannwhitneyu, wilcoxon

    if paired and min(map(min, (before, after))) > 0:
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        logs = [math.log(ratio) for ratio in ratios]
        return median(ratios), float(wilcoxon(logs).pvalue) if any(logs) else 1.0
    # Of a count that is mostly 0 the medians have no ratio.
    middle = median if median(before) and median(after) else fmean
    return middle(after) / middle(before), float(mannwhitneyu(before, after, alternative="two-sided").pvalue)


def compare(
    before: dict[str, Any], after: dict[str, Any], cases: Sequence[str] = (), rule: Rule = RULE
) -> Iterator[Change]:
    """Yield what became of all that the first result has; with ``cases``, of these."""
    for name, case in before["cases"].items():
        later = {run["size"]: run for run in after["cases"].get(name, {"runs": []})["runs"]}
        for run in case["runs"] if not cases or name in cases else []:
            of = f"{name} of {run['size']}" if run["size"] else name
            if run["size"] not in later:
                yield Change(WORSE, f"{of}: gone")
                continue
            runs = run, later[run["size"]]
            failed = [one["errors"].get(PHALANX) for one in runs]
            if any(failed):
                verdict = NOT_COMPARED if all(failed) else WORSE if failed[1] else BETTER
                yield Change(verdict, f"{of}: FAILED: {failed[1]}" if failed[1] else f"{of}: no longer FAILED")
                continue
            for figure, unit in case["units"].items():
                if run["figures"].get(PHALANX, {}).get(figure):
                    verdict, what = _figure(runs, figure, unit, rule)
                    yield Change(verdict, f"{of}, {figure}: {what}")


def _figure(runs: Sequence[dict[str, Any]], figure: str, unit: str, rule: Rule) -> Change:
    """Compare a figure that the first run has."""
    wanted = any(one["target"].startswith(f"{figure} >=") for one in runs[0]["targets"])
    up, down = (BETTER, WORSE) if unit.endswith("/s") or wanted else (WORSE, BETTER)
    seen = [run["figures"].get(PHALANX, {}).get(figure, []) for run in runs]
    if not seen[1]:
        return Change(WORSE, "gone")
    most = [max(value for values in rounds for value in values) for rounds in seen]
    if not all(most) and all(value == int(value) for value in most):  # a count, and one has none
        verdict = ALIKE if most[0] == most[1] else up if most[1] else down
        return Change(verdict, f"at most {report.number(most[0])}, then at most {report.number(most[1])} {unit}")
    if not all(most) or min(map(len, seen)) < rule.rounds:
        return Change(NOT_COMPARED, f"fewer than {rule.rounds} rounds" if all(most) else "one is 0")
    plain = [[median(values) for values in rounds] for rounds in seen]
    floors = [[median(values) for values in run["figures"].get(FLOOR, {}).get(figure, [])] for run in runs]
    kinds = {f" {unit}": plain}
    if all(floors) and min(map(min, floors)) > 0:
        kinds[" floors of their rounds"] = [
            [ours / floor for ours, floor in zip(*both, strict=False)] for both in zip(plain, floors, strict=True)
        ]
    verdicts, told = set(), []
    for what, (old, new) in kinds.items():
        growth, p = changed(old, new, paired=rule.paired)
        is_up, is_down = growth >= 1 + rule.at_least / 100, growth <= 1 / (1 + rule.at_least / 100)
        verdicts.add(ALIKE if p > rule.p else up if is_up else down if is_down else ALIKE)
        told.append(f"{report.number(median(old))} to {report.number(median(new))}{what} (x {growth:.2f}, p = {p:.4f})")
    return Change(verdicts.pop() if len(verdicts) == 1 else ALIKE, "; ".join(told))


def in_turn(case: Case, size: int, trees: Sequence[Path], rounds: int) -> list[Result]:
    """Measure Phalanx of each checkout in turn, A B B A ..., after a warm-up."""
    python = peers.python(case.interpreter or PHALANX)
    results = [Result(case, rounds, {}, {}, {}, size) for _ in trees]
    for turn in range(-1, rounds):
        for tree, result in list(zip(trees, results, strict=True))[:: 1 if turn % 2 else -1]:
            sys.stderr.write(f"{case.name} of {size}: round {turn + 1}/{rounds}: {tree}\n")
            try:
                found = {} if result.errors else run_contender(case, PHALANX, python, size, tree).figures
            except RunError as error:
                result.errors[PHALANX], found = str(error), {}
            for figure, values in found.items() if turn >= 0 else ():
                result.seen.setdefault(PHALANX, {}).setdefault(figure, []).append(values)
    return results


def _measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Return what `in_turn` finds as two results."""
    trees = [path.resolve() for path in (options.before, options.after)]
    if without := [tree for tree in trees if not (tree / "src" / "phalanx").is_dir()]:
        parser.error(f"{without[0]} has no src/phalanx")
    if not options.cases:
        parser.error("argument --trees: say which cases")
    both: list[list[list[Result]]] = [[], []]
    for case in map(load, options.cases):
        if why := launchers.missing(case.interpreter or PHALANX):
            parser.error(f"{case.name} cannot be measured: {why}")
        wanted = [size for size in case.sizes if size in (options.sizes or case.sizes)] if case.sizes else [0]
        if not wanted:
            parser.error(f"argument --sizes: {case.name} has {', '.join(map(str, case.sizes))}")
        measured = [in_turn(case, size, trees, options.rounds) for size in wanted]
        for which, results in enumerate(both):
            results.append([found[which] for found in measured])
    return [report.as_json({}, {}, results) for results in both]


def main(argv: list[str]) -> int:
    """Print what changed. Return 1 if something became worse, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description="What became worse or better between two results of `python -m benchmarks --json`.",
        epilog="The test: two-sided Mann-Whitney U on the medians of the rounds, plain and in floors of the same "
        "round; with --trees Wilcoxon's on the pairs of a round.",
    )  # fmt: skip
    parser.add_argument("before", type=Path, metavar="BEFORE")
    parser.add_argument("after", type=Path, metavar="AFTER")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these (default: all)")
    parser.add_argument("--p", type=float, default=P, help=f"the largest p-value that counts (default: {P})")
    parser.add_argument(
        "--at-least", type=float, default=AT_LEAST, metavar="PERCENT",
        help=f"the smallest change that counts (default: {AT_LEAST:g})",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="print what is not told apart and what is not compared, too")
    parser.add_argument("--trees", action="store_true", help="BEFORE and AFTER are checkouts: measure both, in turn")
    parser.add_argument("--sizes", type=sizes, metavar="N,N", help="with --trees: of the cases, only these")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="with --trees (default: 12)")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.cases if name not in NAMES]:
        parser.error(f"no such case: {', '.join(unknown)} (there are {', '.join(NAMES)})")
    try:
        results = (
            _measure(options, parser) if options.trees else [report.read(options.before), report.read(options.after)]
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rule = Rule(options.p, options.at_least, options.trees)
    before, after = results
    found = list(compare(before, after, options.cases, rule))
    for verdict in (WORSE, BETTER, *([ALIKE, NOT_COMPARED] if options.all else [])):
        for change in found:
            if change.verdict == verdict:
                print(f"{verdict}: {change.what}")
    print(
        ", ".join(
            f"{sum(c.verdict == verdict for c in found)} {verdict}" for verdict in (WORSE, BETTER, ALIKE, NOT_COMPARED)
        )
    )
    return int(any(change.verdict == WORSE for change in found))
