"""What is said of a text, or of an error, in one line of bounded length."""

from __future__ import annotations

MOST = 400
"""Characters of the line, by default."""

SHORT = 100
"""Characters of a line that is a part of another, as in a ``repr``."""


def one_line(what: object, most: int = MOST) -> str:
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
