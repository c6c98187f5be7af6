"""What a case is: a name, what it measures, its targets, and one function per contender.

Owns the vocabulary of the package, as values. Knows nothing of how a case is run or printed.

Everything here is a ``NamedTuple`` and not a dataclass because each contender's interpreter imports this module, and
the memory of that interpreter is one of the things measured: ``dataclasses`` alone costs about 2 MB.
"""

from __future__ import annotations

import operator
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    Figures: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]
    """Contender -> figure -> the values seen."""

PHALANX, TORCH, FLOOR = "phalanx", "torch", "floor"

_COMPARE = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


class Sample(NamedTuple):
    """What one run of one contender found.

    ``figures`` maps a figure's name to the values seen, one or more; ``notes`` are facts worth printing once.
    """

    figures: dict[str, list[float]]
    notes: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """A target, judged: its text, the value found with its unit, and whether it is met (``None``: not measured)."""

    target: str
    value: float | None
    unit: str
    met: bool | None


class Target(NamedTuple):
    """A bound on one of Phalanx's figures: absolute, or a multiple of the same figure of the contender ``of``.

    The median is judged, or with ``worst`` the largest value seen (the smallest, for ``>=``). Of a case with sizes, it
    holds for one of them, or with 0 for each.

    >>> double = Target("elapsed", "<=", 2, of=FLOOR)
    >>> double.text("ms"), double.value({"phalanx": {"elapsed": [3.0]}, "floor": {"elapsed": [1.0]}})
    ('elapsed <= 2 x floor', 3.0)
    >>> none = Target("left", "<=", 0, worst=True)
    >>> none.text("processes"), none.value({"phalanx": {"left": [0, 0, 1]}})
    ('left <= 0 processes at worst', 1)
    """

    figure: str
    relation: str
    limit: float
    of: str = ""
    worst: bool = False
    size: int = 0

    def text(self, unit: str) -> str:
        """Return the target as a person would write it."""
        return f"{self.figure} {self.relation} {self.limit:g} {self.unit(unit)}" + (" at worst" if self.worst else "")

    def unit(self, unit: str) -> str:
        """Return the unit of the limit, given that of the figure."""
        return f"x {self.of}" if self.of else unit

    def value(self, seen: Figures) -> float | None:
        """Return what is to be held against the limit, or ``None`` where it was not measured."""
        ours = seen.get(PHALANX, {}).get(self.figure)
        theirs = seen.get(self.of, {}).get(self.figure)
        if not ours or (self.of and not theirs):
            return None
        extreme = min if self.relation == ">=" else max
        value = extreme(ours) if self.worst else median(ours)
        return value / median(theirs) if theirs else value

    @property
    def is_count(self) -> bool:
        """Whether it is of something that must not be there at all, however slow the machine is."""
        return self.worst and self.relation == "<=" and self.limit == 0

    def met(self, value: float) -> bool:
        """Tell whether a value meets the target."""
        return bool(_COMPARE[self.relation](value, self.limit))


class Case(NamedTuple):
    """One thing measured.

    ``units`` names every figure that a contender may return, in the order of printing, with its unit; of one in MB/s
    more is better, of all others less.
    ``contenders`` maps a contender's name to the function that measures it; each call has an interpreter to itself.
    With ``sizes`` the function is given one of them, and each is measured.
    ``rounds`` are the measured rounds (the peers, which may be slow, take part in the first ``peer_rounds`` of them);
    a round whose result is thrown away goes before them where ``warm_up`` says so.
    ``limit`` bounds one run of one contender, in seconds.
    ``interpreter`` names the contender whose interpreter all of them use, where that has what they need.
    """

    name: str
    measures: str
    units: Mapping[str, str]
    targets: tuple[Target, ...]
    contenders: Mapping[str, Callable[..., Sample]]
    rounds: int = 5
    peer_rounds: int = 3
    warm_up: bool = True
    limit: float = 120.0
    interpreter: str = ""
    sizes: tuple[int, ...] = ()

    def peers(self) -> list[str]:
        """Return the contenders that are neither Phalanx nor the floor."""
        return [name for name in self.contenders if name not in (PHALANX, FLOOR)]

    def targets_text(self) -> list[str]:
        """Return the targets as a person would write them."""
        return [target.text(self.units[target.figure]) for target in self.targets]

    def judge(self, seen: Figures, size: int = 0) -> list[Verdict]:
        """Judge every target by what was seen, of a case with sizes at one of them."""
        verdicts = []
        for target, text in zip(self.targets, self.targets_text(), strict=True):
            if target.size not in (0, size):
                continue
            value = target.value(seen)
            met = None if value is None else target.met(value)
            verdicts.append(Verdict(text, value, target.unit(self.units[target.figure]), met))
        return verdicts


def positive(text: str) -> int:
    """Return the number that a word of a command line is. Raises ValueError: it is none, or below 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def sizes(text: str) -> list[int]:
    """Return the sizes that a word of a command line names. Raises ValueError."""
    return [positive(word) for word in text.split(",")]


# argparse names the type in its error.
positive.__name__, sizes.__name__ = "positive whole number", "list of sizes, like 8,64"
