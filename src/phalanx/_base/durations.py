"""Checks durations that callers give, and converts them to plain floats."""

from __future__ import annotations

import math


def seconds(name: str, value: object, *, zero: bool = True, endless: bool = True, negative: bool = False) -> float:
    """Convert a time in seconds to a plain float: `marshal` takes no subclass of one.

    Args:
        name: What the argument is called, for the error.
        value: An int, a float, or another number that can be converted (NumPy's); no bool.
        zero: Whether 0 is allowed.
        endless: Whether infinity is allowed.
        negative: Whether a negative number is allowed, and counts as 0.

    Raises:
        TypeError: ``value`` is no number.
        ValueError: It is negative, not a number (NaN), or not allowed.

    >>> seconds("grace", 2)
    2.0
    >>> seconds("grace", -1)
    Traceback (most recent call last):
    ValueError: grace: expected 0 seconds or more, got -1
    """
    # An array has a __float__ as well, if it is of one element.
    if isinstance(value, bool) or not hasattr(value, "__float__") or hasattr(value, "__len__"):
        raise TypeError(f"{name}: expected seconds, got {value!r}")
    number = float(value)
    if negative and number < 0:
        return 0.0
    if not number >= 0 or (number == 0 and not zero) or (number == math.inf and not endless):
        least = ("0 seconds or more" if endless else "a time of 0 seconds or more") if zero else "more than 0 seconds"
        raise ValueError(f"{name}: expected {least}, got {value!r}")
    return number
