"""What is said of a text, or of an error, in one line of bounded length."""

from __future__ import annotations

MOST = 400
"""Characters of the line, by default."""

SHORT = 100
"""Characters of a line that is a part of another, as in a ``repr``."""


def one_line(what: object, most: int = MOST) -> str:
    r"""Return the first line that is not empty of a text, or of an error's text; of an error without one, what it is.

    >>> one_line("\n  ValueError: bad shape\n  (see above)"), one_line(KeyError())
    ('ValueError: bad shape', 'KeyError()')
    >>> one_line("a" * 100, 5)
    'aaaa…'
    """
    text = what if isinstance(what, str) else str(what).strip() or repr(what)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= most else f"{line[: most - 1]}…"
