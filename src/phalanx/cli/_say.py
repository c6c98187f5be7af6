"""Lines of the command line's own, on stderr."""

from __future__ import annotations

from phalanx._base.stderr import tell
from phalanx._base.tty import printable


def say(text: str) -> None:
    """Write lines to stderr, after ``phalanx: ``. What a terminal would obey is shown as escapes."""
    tell("\n".join(map(printable, f"phalanx: {text}".split("\n"))))
