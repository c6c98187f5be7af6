"""Attempts in words: the line of a failure, and those before the last one in a report, where equal ones are grouped."""

from __future__ import annotations

import time
from itertools import groupby

from phalanx._base import clock
from phalanx._base.clock import format_duration, format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx._agent.attempt_end import AttemptEnd

_MOST = 20  # lines; those in the middle are left out
_MINUTE = 60


def describe_failure(end: AttemptEnd, attempts: str) -> str:
    """Return a line on an attempt that has failed, of so many, see `RestartPolicy.attempts`.

    >>> from phalanx._agent.attempt_end import AttemptEnd
    >>> describe_failure(AttemptEnd("failed", 2, 1, "ValueError: bad batch", ended=3.0), " of 4")
    'attempt 1 of 4 failed after 3.0s: rank 2, ValueError: bad batch'
    """
    return f"attempt {end.number + 1}{attempts} {end.state} after {format_duration(end.uptime)}: {end.describe()}"


def describe_restart(delay: float) -> str:
    """Return when another attempt follows, in seconds from now.

    >>> describe_restart(0), describe_restart(2.5), describe_restart(90)
    ('restarting', 'restarting in 2.5 s', 'restarting in 1m30s')
    """
    if not delay:
        return "restarting"
    return f"restarting in {format_duration(delay) if delay >= _MINUTE else format_seconds(delay)}"


def describe_attempts(ends: Sequence[AttemptEnd]) -> list[str]:
    """Return a line for each attempt: when it ended, after which time, who failed, how, and at which step.

    Attempts in a row that the same rank ended in the same way have one line: process ids and addresses in the error do
    not count, see `mask`.

    >>> from phalanx._agent.attempt_end import AttemptEnd
    >>> first, second = (AttemptEnd("failed", 2, 1, "ValueError: bad batch", step) for step in (7, 9))
    >>> [line.partition(": ")[2] for line in describe_attempts([first, second])]
    ['rank 2, ValueError: bad batch, steps 7, 9']
    """
    lines = []
    for (_state, _rank, _code, masked), group in groupby(ends, key=_kind):
        equal = list(group)
        first, last = equal[0], equal[-1]
        if len(equal) == 1:
            when = f"attempt {first.number + 1}, {_moment(first)} after {format_duration(first.uptime)}"
            lines.append(f"{when}: {first.describe()}")
            continue
        steps = [str(end.step) for end in equal if end.step is not None]
        shown = [*dict.fromkeys(steps)]
        if len(shown) > _MOST:
            shown = [*shown[: _MOST // 2], "…", *shown[-_MOST // 2 :]]
        said = f", step{'s' * (len(shown) > 1)} {', '.join(shown)}" if shown else ""
        when = f"attempts {first.number + 1} to {last.number + 1}, {_moment(first)} to {_moment(last)}"
        error = first.error if all(end.error == first.error for end in equal) else masked
        lines.append(f"{when}: {first.replace(step=None, error=error).describe()}{said}")
    if len(lines) > _MOST:
        left = len(lines) - _MOST
        lines = [*lines[: _MOST // 2], f"... {left} more ...", *lines[-_MOST // 2 :]]
    return lines


def _kind(end: AttemptEnd) -> tuple[str, int | None, int | None, str]:
    """What equal attempts have in common."""
    from phalanx._outcomes.report import mask  # not at the start of every run

    return end.state, end.rank, end.exitcode, mask(end.error)


def _moment(end: AttemptEnd) -> str:
    return time.strftime("%H:%M:%S", time.localtime(clock.to_wall(end.ended)))
