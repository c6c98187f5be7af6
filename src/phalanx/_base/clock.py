"""Reads the clock: CLOCK_MONOTONIC, in seconds as a float.

Every process of one machine reads the same CLOCK_MONOTONIC (clock_gettime(2)), so moments noted in a worker, the
keeper and the launcher can be compared. The wall clock is for people, and is never subtracted. Moments that callers
give or want in Unix time are converted at once, by `from_wall` and `to_wall`.
"""

from __future__ import annotations

import time

NS = 1_000_000_000

now = time.monotonic
now_ns = time.monotonic_ns
wall = time.time


def from_wall(moment: float) -> float:
    """Convert a moment in Unix time to CLOCK_MONOTONIC. Later steps of the wall clock do not move it.

    If this process loses its CPU between the two readings, the result is later by that time, never earlier.
    """
    return moment - wall() + now()


def to_wall(moment: float) -> float:
    """Convert a moment on CLOCK_MONOTONIC to Unix time, by the wall clock of now; may be later, as above."""
    return moment - now() + wall()


def booted() -> float:
    """When this machine was booted, in Unix time, by the wall clock of now."""
    return wall() - time.clock_gettime(time.CLOCK_BOOTTIME)


def format_duration(seconds: float) -> str:
    """Format a duration as one word: the one way in which times are shown that were measured, or are counted down.

    A limit is shown as it was set, ``0.25 s``.

    >>> format_duration(2.14), format_duration(725), format_duration(3725), format_duration(273600)
    ('2.1s', '12m05s', '1h02m', '3d04h')
    >>> format_duration(59.99), format_duration(0.9185), format_duration(0.0023), format_duration(-1)
    ('1m00s', '0.9s', '2ms', '0ms')
    """
    seconds = max(0.0, seconds)
    whole = round(seconds)
    if seconds < 0.0995:  # noqa: PLR2004 - of which tenths of a second say little
        return f"{seconds * 1000:.0f}ms"
    if round(seconds, 1) < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{seconds:.1f}s"
    for size, unit, below, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02}{part}"
    raise AssertionError
