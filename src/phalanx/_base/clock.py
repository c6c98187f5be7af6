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


def booted() -> float:
    """When this machine was started, in Unix time, as the wall clock goes now."""
    return wall() - time.clock_gettime(time.CLOCK_BOOTTIME)


def spoken(seconds: float) -> str:
    """A short time, for people.

    >>> spoken(0.0012), spoken(2)
    ('1.2 ms', '2.0 s')
    """
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def in_a_word(seconds: float) -> str:
    """A duration in one word.

    >>> in_a_word(2.14), in_a_word(725), in_a_word(3725), in_a_word(273600)
    ('2.1s', '12m05s', '1h02m', '3d04h')
    >>> in_a_word(59.99), in_a_word(-1)
    ('1m00s', '0.0s')
    """
    seconds = max(0.0, seconds)
    whole = round(seconds)
    if round(seconds, 1) < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{seconds:.1f}s"
    for size, unit, below, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02}{part}"
    raise AssertionError


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
