"""How one attempt ended, and all of them: what the restart policy decides by, and the lines on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._outcomes import earlier
from phalanx._outcomes.earlier import Earlier


class AttemptEnd(NamedTuple):
    """How one attempt of a group ended.

    Attributes:
        state: "succeeded"; "failed"; "stopped", because somebody asked for it; or "not started".
        rank: The global rank of the root cause; None: it has no rank, or none failed.
        exitcode: Its exit code, negative for a signal; None: not known.
        error: What went wrong, in one line (see `one_line`); "": nothing.
        step: The highest step that any rank has reported, see `phalanx.timer.progress`; None: none has.
        survivors: How many workers have outlived SIGKILL (uninterruptible sleep).
        number: The attempt, from 0 on.
        began: When its start began, in seconds (monotonic).
        ended: When no process of it was left, likewise.
    """

    state: str
    rank: int | None = None
    exitcode: int | None = None
    error: str = ""
    step: int | None = None
    survivors: int = 0
    number: int = 0
    began: float = 0.0
    ended: float = 0.0

    @property
    def uptime(self) -> float:
        """Seconds from its start to its end."""
        return max(0.0, self.ended - self.began)

    @property
    def failed(self) -> bool:
        """Whether it counts as a failure."""
        return self.state in ("failed", "not started")

    def describe(self) -> str:
        """Return who failed, and how, in one line.

        >>> AttemptEnd("failed", 2, 1, "ValueError: bad batch", 120).describe()
        'rank 2, ValueError: bad batch, step 120'
        """
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        parts += [self.error] if self.error else [self.state] if not parts else []
        parts += [f"step {self.step}"] if self.step is not None else []
        return ", ".join(parts)


class Ending(NamedTuple):
    """How it all ended.

    Attributes:
        state: "succeeded", "failed" or "stopped".
        ends: How each attempt ended, the latest last.
        why: Why no other attempt followed a failure; "": none was allowed in the first place.
    """

    state: str
    ends: tuple[AttemptEnd, ...]
    why: str = ""


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
    ('attempt 1 follows (restart 1 of at most 2)', 'attempt 3 follows in 2.5s (not counted as a restart)')
    >>> describe_restart(2, 90, "restart 2 of at most 2")
    'attempt 2 follows in 1m30s (restart 2 of at most 2)'
    """
    when = f" in {format_duration(delay)}" if delay else ""
    return f"attempt {attempt} follows{when} ({count})"


def describe_attempts(ends: Sequence[AttemptEnd]) -> list[str]:
    """Return a line for each attempt: when it ended, after which time, who failed, how, and at which step.

    Attempts in a row that the same rank ended in the same way have one line: process ids and addresses in the error do
    not count, see `mask`.

    >>> from phalanx._agent.attempt_end import AttemptEnd
    >>> first = AttemptEnd("failed", 2, 1, "ValueError: bad batch", 7)
    >>> [line.partition(": ")[2] for line in describe_attempts([first, first._replace(step=8, number=1)])]
    ['rank 2, ValueError: bad batch, steps 7, 8']
    """
    return earlier.describe([_earlier(end) for end in ends])


def _earlier(end: AttemptEnd) -> Earlier:
    from phalanx._outcomes.report import mask  # not at the start of every run

    bare = end._replace(step=None)
    masked = bare._replace(error=mask(end.error)).describe()
    moment = clock.to_wall(end.ended)
    return Earlier(end.number, bare.describe(), masked, (end.state, end.exitcode), end.step, end.uptime, moment)
