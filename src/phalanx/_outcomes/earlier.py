"""The attempts before the last one, in words: those in a row that have ended alike have one line. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from phalanx._base.clock import format_duration

_MOST = 20  # lines; those in the middle are left out


class Earlier(NamedTuple):
    """An attempt that has ended.

    Attributes:
        number: Which, from 0 on.
        text: Who ended it, and how, in one line.
        masked: The same without the numbers by which equal ones differ, see `report.mask`.
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


def describe(history: Sequence[Earlier]) -> list[str]:
    r"""Return the lines on a history.

    >>> def gone(number, pid, uptime):
    ...     return Earlier(number, f"rank 3, pid {pid} is gone", "rank 3, pid … is gone", uptime=uptime)
    >>> print(*describe([gone(0, 41, 60.0), gone(1, 42, 2.0), gone(2, 42, 7.0), gone(4, 43, 1.0)]), sep="\n")
    attempts 0 to 2, after 2.0s to 1m00s: rank 3, pid … is gone
    attempt 4, after 1.0s: rank 3, pid 43 is gone
    """
    lines = [_line([attempt for _, attempt in alike]) for _, alike in groupby(enumerate(history), key=_kind)]
    if len(lines) > _MOST:
        left = len(lines) - _MOST
        lines = [*lines[: _MOST // 2], f"... {left} more ...", *lines[-_MOST // 2 :]]
    return lines


def _kind(indexed: tuple[int, Earlier]) -> object:
    """What those have in common that have one line: their numbers follow each other, too."""
    index, attempt = indexed
    return attempt.number - index, attempt.how, attempt.masked


def _line(alike: list[Earlier]) -> str:
    first = alike[0]
    which = f"attempt {first.number}" if len(alike) == 1 else f"attempts {first.number} to {alike[-1].number}"
    steps = [*dict.fromkeys(str(attempt.step) for attempt in alike if attempt.step is not None)]
    if len(steps) > _MOST:
        steps = [*steps[: _MOST // 2], "…", *steps[-_MOST // 2 :]]
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
