"""Monotonic time. Owns the choice of clock: CLOCK_MONOTONIC, seconds as float.

Every process of one machine reads the same CLOCK_MONOTONIC (clock_gettime(2)), so moments noted in a worker, the
keeper and the launcher can be compared. The wall clock serves people, and is never subtracted, but for the moments
that others give us in Unix time, or want so: they are converted at once, by `from_wall` and `to_wall`.
"""

from __future__ import annotations

import time

NS = 1_000_000_000

now = time.monotonic
now_ns = time.monotonic_ns
wall = time.time


def from_wall(moment: float) -> float:
    """A moment in Unix time as one on CLOCK_MONOTONIC: what steps the wall clock takes from now on does not move it.

    Should this process have to wait for a processor between the two clocks, that makes the moment later, never sooner.
    """
    return moment - wall() + now()


def to_wall(moment: float) -> float:
    """A moment on CLOCK_MONOTONIC in Unix time, as the wall clock goes now: later, perhaps, and no sooner; as above."""
    return moment - now() + wall()


def spoken(seconds: float) -> str:
    """A short time, for people.

    >>> spoken(0.0012), spoken(2)
    ('1.2 ms', '2.0 s')
    """
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


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
