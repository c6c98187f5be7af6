"""What stands in a page between two markers, lines that a page does not show when it is rendered."""

from __future__ import annotations


def replace(page: str, begin: str, end: str, text: str, name: str = "the page") -> str:
    """Return the page with a text between two markers. Raises ValueError when one is missing, or there twice."""
    if page.count(begin) != 1 or end not in page.partition(begin)[2]:
        message = f"{name} must hold this line once, and after it {end}: {begin}"
        raise ValueError(message)
    head, _, rest = page.partition(begin)
    tail = rest.partition(end)[2]
    return f"{head}{begin}\n{text}{end}{tail}"
