"""Attempts in words: the line of a failure, and those before the last one in a report, where equal ones are grouped."""

from __future__ import annotations

import time
from itertools import groupby
from operator import attrgetter

from phalanx._base import clock
from phalanx._base.clock import format_duration, format_seconds
from phalanx._base.rank_ranges import name_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx._agent.attempt_end import AttemptEnd

_MOST = 20  # lines; those in the middle are left out
_MINUTE = 60


def describe_failure(end: AttemptEnd) -> str:
    """Return a line on an attempt that has failed.

    >>> from phalanx._agent.attempt_end import AttemptEnd
    >>> describe_failure(AttemptEnd("failed", 2, 1, "ValueError: bad batch", ended=3.0))
    'attempt 0 failed after 3.0s: rank 2, ValueError: bad batch'
    """
    return f"attempt {end.number} {end.state} after {format_duration(end.uptime)}: {end.describe()}"


def describe_restart(attempt: int, delay: float, count: str) -> str:
    """Return which attempt follows, in how many seconds from now. ``count``: see `RestartPolicy.describe_count`.

    Attempts are numbered from 0, as in options, folders and events; restarts are counted.

    >>> describe_restart(1, 0, "restart 1 of at most 2"), describe_restart(3, 2.5, "not counted as a restart")
    ('attempt 1 follows (restart 1 of at most 2)', 'attempt 3 follows in 2.5 s (not counted as a restart)')
    >>> describe_restart(2, 90, "restart 2 of at most 2")
    'attempt 2 follows in 1m30s (restart 2 of at most 2)'
    """
    when = f" in {format_duration(delay) if delay >= _MINUTE else format_seconds(delay)}" if delay else ""
    return f"attempt {attempt} follows{when} ({count})"


def describe_workers(ends: Mapping[int, Sequence[AttemptEnd]]) -> list[str]:
    """Return lines on attempts of workers that are started again one by one, by rank: equal ones are grouped.

    Workers whose attempts have ended alike, whenever, have one line in all.

    >>> from phalanx._agent.attempt_end import AttemptEnd
    >>> failed = AttemptEnd("failed", 2, 1, "ValueError: bad batch")
    >>> [line.partition(", ")[0] for line in describe_workers({2: [failed], 3: [failed, failed.replace(number=1)]})]
    ['rank 2: attempt 0', 'rank 3: attempts 0 to 1']
    >>> [line.partition(", ")[0] for line in describe_workers({2: [failed], 3: [failed]})]
    ['ranks 2-3: attempt 0']
    """
    alike: dict[object, list[int]] = {}
    for rank, its in sorted(ends.items()):
        if its:
            alike.setdefault(tuple(_kind(end.replace(rank=None)) for end in its), []).append(rank)
    return [
        f"{name_ranks(ranks)}: {line}"
        for ranks in alike.values()
        for line in _describe([[end.replace(rank=None) for end in ends[rank]] for rank in ranks])
    ]


def describe_attempts(ends: Sequence[AttemptEnd]) -> list[str]:
    """Return a line for each attempt: when it ended, after which time, who failed, how, and at which step.

    Attempts in a row that the same rank ended in the same way have one line: process ids and addresses in the error do
    not count, see `mask`.

    >>> from phalanx._agent.attempt_end import AttemptEnd
    >>> first, second = (AttemptEnd("failed", 2, 1, "ValueError: bad batch", step) for step in (7, 9))
    >>> [line.partition(": ")[2] for line in describe_attempts([first, second])]
    ['rank 2, ValueError: bad batch, steps 7, 9']
    """
    return _describe([ends])


def _describe(histories: Sequence[Sequence[AttemptEnd]]) -> list[str]:
    """Return the lines on one history; or on several, in which each attempt has ended as in the first."""
    lines, at = [], 0
    for _same, group in groupby(histories[0], key=_kind):
        upto = at + len(list(group))
        lines.append(_line([end for history in histories for end in history[at:upto]]))
        at = upto
    if len(lines) > _MOST:
        left = len(lines) - _MOST
        lines = [*lines[: _MOST // 2], f"... {left} more ...", *lines[-_MOST // 2 :]]
    return lines


def _line(equal: list[AttemptEnd]) -> str:
    """Return a line on ends of one kind."""
    first = equal[0]
    numbers = sorted({end.number for end in equal})
    which = f"attempt {numbers[0]}" if len(numbers) == 1 else f"attempts {numbers[0]} to {numbers[-1]}"
    if len(equal) == 1:
        return f"{which}, {_moment(first)} after {format_duration(first.uptime)}: {first.describe()}"
    steps = [*dict.fromkeys(str(end.step) for end in equal if end.step is not None)]
    if len(steps) > _MOST:
        steps = [*steps[: _MOST // 2], "…", *steps[-_MOST // 2 :]]
    said = f", step{'s' * (len(steps) > 1)} {', '.join(steps)}" if steps else ""
    when = f"{which}, {' to '.join(_moment(find(equal, key=attrgetter('ended'))) for find in (min, max))}"
    error = first.error if all(end.error == first.error for end in equal) else _masked(first)
    return f"{when}: {first.replace(step=None, error=error).describe()}{said}"


def _kind(end: AttemptEnd) -> tuple[str, int | None, int | None, str]:
    """What equal attempts have in common."""
    return end.state, end.rank, end.exitcode, _masked(end)


def _masked(end: AttemptEnd) -> str:
    from phalanx._outcomes.report import mask  # not at the start of every run

    return mask(end.error)


def _moment(end: AttemptEnd) -> str:
    return time.strftime("%H:%M:%S", time.localtime(clock.to_wall(end.ended)))
