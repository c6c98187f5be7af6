"""What is said of a text, or of an error, in one line of bounded length."""

from __future__ import annotations

MOST = 400
"""Characters of the line."""


def one_line(what: object) -> str:
    r"""Return the first line that is not empty of a text, or of an error's text; of an error without one, what it is.

    >>> one_line("\n  ValueError: bad shape\n  (see above)"), one_line(KeyError())
    ('ValueError: bad shape', 'KeyError()')
    """
    text = what if isinstance(what, str) else str(what).strip() or repr(what)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= MOST else f"{line[: MOST - 1]}…"
