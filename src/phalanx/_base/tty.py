"""What there is to know of a terminal: what is one, its size, whether it is given colours; names that fit one line."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

_SIZE = (80, 24)  # of one that does not say


def size(fd: int) -> tuple[int, int]:
    """Columns and rows of the terminal ``fd``. Where it does not say them: ``COLUMNS`` and ``LINES``, or 80 and 24."""
    try:
        said = tuple(os.get_terminal_size(fd))
    except OSError:
        said = (0, 0)
    columns, rows = [
        number or _positive(os.environ.get(name, "")) or usual
        for number, name, usual in zip(said, ("COLUMNS", "LINES"), _SIZE, strict=True)
    ]
    return columns, rows


def is_one(stream: Any) -> bool:
    """Whether a descriptor is a terminal; or a stream, or what has one's methods, says that it is."""
    try:
        return stream is not None and bool(os.isatty(stream) if isinstance(stream, int) else stream.isatty())
    except Exception:  # noqa: BLE001 - closed; or an object of the host's, which may raise anything
        return False


def obeys(stream: int | TextIO | None) -> bool:
    """Whether this is a terminal that knows control sequences: ``TERM`` is neither dumb nor empty."""
    try:
        known = stream is not None and is_one(stream if isinstance(stream, int) else stream.fileno())
    except Exception:  # noqa: BLE001 - see above
        return False
    return known and os.environ.get("TERM", "") not in ("", "dumb")


def coloured(stream: int | TextIO | None, choice: str = "auto") -> bool:
    """Whether colours are to be written to a descriptor, or to a stream.

    ``choice`` ("always" or "never") decides; of "auto" ``NO_COLOR`` (no-color.org), then ``FORCE_COLOR``
    (force-color.org), either with any value but an empty one, and then whether it is a terminal that knows them.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or obeys(stream)


def printable(text: str) -> str:
    r"""The text with escapes for what a terminal would obey, and for what the encoding of stdout cannot say.

    >>> print(printable("a\tb\x1b[2Jc"))
    a\tb\x1b[2Jc
    """
    import sys

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _positive(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
