"""Monotonic time. Owns the choice of clock: CLOCK_MONOTONIC, seconds as float.

Every process of one machine reads the same CLOCK_MONOTONIC (clock_gettime(2)), so moments noted in a worker, the
keeper and the launcher can be compared. The wall clock serves people only, and is never subtracted.
"""

from __future__ import annotations

import time

NS = 1_000_000_000

now = time.monotonic
now_ns = time.monotonic_ns
wall = time.time


class FakeClock:
    """A clock that moves only when told, for tests.

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
