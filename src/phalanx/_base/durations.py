"""Reads and checks durations that callers give, and converts them to plain floats."""

from __future__ import annotations

import math

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


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


def parse(text: str, *, zero: bool = True, endless: bool = False) -> float:
    """Read a time from a text, in seconds: what options, job files and settings have. Without a unit they are seconds.

    Args:
        text: A number; or numbers with units, as ``90s``, ``1.5h``, ``1h30m``; the units are ms, s, m, h, d and w.
        zero: Whether 0 is allowed.
        endless: Whether ``inf`` is allowed.

    Raises:
        ValueError: It is no time, or not allowed; the message has the text, and what would be right.

    >>> parse("90"), parse("1.5h"), parse(" 1h30m "), parse("250ms"), parse("inf", endless=True)
    (90.0, 5400.0, 5400.0, 0.25, inf)
    >>> parse("5 minutes")
    Traceback (most recent call last):
    ValueError: '5 minutes': expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h
    """
    import re  # not for all that start a group

    word = text.strip()
    part = rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})"
    try:
        if re.fullmatch(f"(?:{part})+", word, re.ASCII):
            number = sum(float(count) * _UNITS[unit] for count, unit in re.findall(part, word, re.ASCII))
        else:
            number = float(word)
        return seconds("", number, zero=zero, endless=endless)
    except ValueError:
        least, most = "0 or more" if zero else "more than 0", ", 2h or inf" if endless else " or 2h"
        raise ValueError(f"{text!r}: expected a time, {least}, like 90 (seconds), 90s, 5m{most}") from None
