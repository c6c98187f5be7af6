"""Tells whether a stream is a terminal, its size, and whether to write colours; makes text printable on one line."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

_SIZE = (80, 24)  # of a terminal that reports 0, or none


def size(fd: int) -> tuple[int, int]:
    """Read columns and rows of the terminal ``fd``; where it reports none, ``COLUMNS`` and ``LINES``, or 80 and 24."""
    try:
        found = tuple(os.get_terminal_size(fd))
    except OSError:
        found = (0, 0)
    columns, rows = [
        number or _positive(os.environ.get(name, "")) or usual
        for number, name, usual in zip(found, ("COLUMNS", "LINES"), _SIZE, strict=True)
    ]
    return columns, rows


def is_terminal(stream: Any) -> bool:
    """Whether a descriptor is a terminal, or a stream's ``isatty`` returns true. Never raises."""
    try:
        return stream is not None and bool(os.isatty(stream) if isinstance(stream, int) else stream.isatty())
    except Exception:  # noqa: BLE001 - closed; or an object of the host's, which may raise anything
        return False


def obeys_controls(stream: int | TextIO | None) -> bool:
    """Whether this is a terminal that knows control sequences: ``TERM`` is neither dumb nor empty. Never raises."""
    try:
        known = stream is not None and is_terminal(stream if isinstance(stream, int) else stream.fileno())
    except Exception:  # noqa: BLE001 - see above
        return False
    return known and os.environ.get("TERM", "") not in ("", "dumb")


def use_colour(stream: int | TextIO | None, choice: str = "auto") -> bool:
    """Whether to write colours to a descriptor, or to a stream.

    ``choice`` is "always", "never" or "auto". For "auto", ``NO_COLOR`` (no-color.org) decides, then ``FORCE_COLOR``
    (force-color.org), either with any value but an empty one, and then whether it is a terminal that knows colours.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or obeys_controls(stream)


def printable(text: str) -> str:
    r"""Replace by escapes what a terminal would obey, and what the encoding of stdout cannot express.

    >>> print(printable("a\tb\x1b[2Jc"))
    a\tb\x1b[2Jc
    """
    import sys

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _positive(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
