"""Text for people, the same everywhere: sets of ranks, counts, sizes, durations, one line of a long text; and back."""

from __future__ import annotations

import math
from collections.abc import Iterable


def format_ranks(ranks: Iterable[int], between: str = ", ") -> str:
    """Return ranks as a short text: ranges for neighbours, in ascending order.

    Args:
        ranks: The ranks, in any order; repeated ones count once.
        between: What stands between two ranges.

    >>> format_ranks([0, 1, 2, 3, 7]), format_ranks([5]), format_ranks([])
    ('0-3, 7', '5', '')
    >>> format_ranks([3, 0, 1, 2, 7], ",")
    '0-3,7'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return between.join("-".join(map(str, run)) for run in runs)


def name_ranks(ranks: Iterable[int]) -> str:
    """Format a set of ranks with the word: ``rank 3``, or ``ranks 0-2, 7``.

    >>> name_ranks([3]), name_ranks([7, 0, 1, 2])
    ('rank 3', 'ranks 0-2, 7')
    """
    known = set(ranks)
    return f"rank{'' if len(known) == 1 else 's'} {format_ranks(known)}"


def how_many(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> how_many(1, "node"), how_many(0, "worker"), how_many(1596, "more line")
    ('1 node', '0 workers', '1,596 more lines')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


LINE = 400
"""Characters of the line, by default."""

SHORT_LINE = 100
"""Characters of a line that is a part of another, as in a ``repr``."""


def one_line(what: object, most: int = LINE) -> str:
    r"""Return the first line that is not empty of a text, or of an error's text; of an error without one, what it is.

    The line after one that ends with a colon belongs to it: the text of an error may begin with a newline.

    >>> one_line("\n  ValueError: bad shape\n  (see above)"), one_line(KeyError())
    ('ValueError: bad shape', 'KeyError()')
    >>> one_line("ChildFailedError: \n=====\ntrain FAILED\n-----"), one_line("ValueError: ")
    ('ChildFailedError: train FAILED', 'ValueError:')
    >>> one_line("a" * 100, 5)
    'aaaa…'
    """
    text = what if isinstance(what, str) else str(what).strip() or repr(what)
    lines = [line.strip() for line in text.splitlines() if line.strip(" \t=-")]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"


_SIZE_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def format_size(size: int) -> str:
    """Format a number of bytes.

    >>> format_size(0), format_size(1023), format_size(1536), format_size((1 << 20) - 1), format_size(1 << 40)
    ('0 B', '1023 B', '1.5 KiB', '1.0 MiB', '1.0 TiB')
    """
    if size < 1024:  # noqa: PLR2004 - bytes of a KiB
        return f"{size} B"
    number = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1023.95:  # noqa: PLR2004 - what is shown as 1024.0
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"


def parse_size(text: str) -> int:
    """Read a number of bytes, 0 or more, with a unit or without. Raises ValueError.

    >>> parse_size("100MB"), parse_size("1.5GiB"), parse_size("4096")
    (100000000, 1610612736, 4096)
    """
    lower = text.strip().lower().removesuffix("b")
    number = lower.rstrip("kmgti")
    try:
        size = int(float(number) * _SIZE_UNITS[lower[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        msg = f"{text!r}: expected a size, like 500000, 100MB or 1GiB"
        raise ValueError(msg)
    return size


_TIME_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


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


def parse_duration(text: str, *, zero: bool = True, endless: bool = False) -> float:
    """Read a time from a text, in seconds: what options, job files and settings have. Without a unit they are seconds.

    Args:
        text: A number; or numbers with units, as ``90s``, ``1.5h``, ``1h30m``; the units are ms, s, m, h, d and w.
        zero: Whether 0 is allowed.
        endless: Whether ``inf`` is allowed.

    Raises:
        ValueError: It is no time, or not allowed; the message has the text, and what would be right.

    >>> parse_duration("90"), parse_duration(" 1h30m "), parse_duration("250ms"), parse_duration("inf", endless=True)
    (90.0, 5400.0, 0.25, inf)
    >>> parse_duration("5 minutes")
    Traceback (most recent call last):
    ValueError: '5 minutes': expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h
    """
    import re  # not for all that start a group

    word = text.strip()
    part = rf"(\d+(?:\.\d+)?)({'|'.join(_TIME_UNITS)})"
    try:
        if re.fullmatch(f"(?:{part})+", word, re.ASCII):
            number = sum(float(count) * _TIME_UNITS[unit] for count, unit in re.findall(part, word, re.ASCII))
        else:
            number = float(word)
        return seconds("", number, zero=zero, endless=endless)
    except ValueError:
        least, most = "0 or more" if zero else "more than 0", ", 2h or inf" if endless else " or 2h"
        raise ValueError(f"{text!r}: expected a time, {least}, like 90 (seconds), 90s, 5m{most}") from None
