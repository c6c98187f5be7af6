"""A clock for tests."""

from __future__ import annotations


class FakeClock:
    """A clock that moves only by `advance`, for tests.

    >>> clock = FakeClock()
    >>> clock.advance(1.5)
    >>> clock()
    1.5
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` (>= 0) pass."""
        if seconds < 0:
            msg = f"a monotonic clock does not go back (got {seconds} s)"
            raise ValueError(msg)
        self._now += seconds
