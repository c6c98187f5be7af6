"""How one attempt ended, and all of them: what the restart policy decides by, and what the report shows."""

from __future__ import annotations

from typing import NamedTuple


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
