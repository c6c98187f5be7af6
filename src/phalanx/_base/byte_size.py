"""Reads and writes numbers of bytes with units, as people do: 1.5 GiB."""

from __future__ import annotations

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


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


def parse(text: str) -> int:
    """Read a number of bytes, 0 or more, with a unit or without. Raises ValueError.

    >>> parse("100MB"), parse("1.5GiB"), parse("4096")
    (100000000, 1610612736, 4096)
    """
    lower = text.strip().lower().removesuffix("b")
    number = lower.rstrip("kmgti")
    try:
        size = int(float(number) * _UNITS[lower[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        msg = f"{text!r}: expected a size, like 500000, 100MB or 1GiB"
        raise ValueError(msg)
    return size
