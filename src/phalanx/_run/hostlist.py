"""Slurm's hostlist expressions: ``gpu-[001-004,7],login`` for names that differ in numbers."""

from __future__ import annotations

import itertools
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_HOSTS = 65536
"""Of an expression: Slurm has no more nodes."""

_MOST_TEXT = 1 << 17
_MOST_DIGITS = 18
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")  # a name, with brackets in it
_RANGE = re.compile(rf"([0-9]{{1,{_MOST_DIGITS}}})(?:-([0-9]{{1,{_MOST_DIGITS}}}))?")


def hosts(text: str) -> list[str]:
    """Return the names of an expression, in its order: 1 to `MOST_HOSTS`.

    Brackets hold numbers and ranges of numbers, with the first one's leading zeros. Of several brackets in a name, the
    last one counts fastest. Raises ValueError: it is none, or has more names.

    >>> hosts("n[1-3,07],gpu-[09-10]x[1-2]")
    ['n1', 'n2', 'n3', 'n07', 'gpu-09x1', 'gpu-09x2', 'gpu-10x1', 'gpu-10x2']
    """
    if len(text) > _MOST_TEXT:
        msg = f"expected a list of hosts of at most {_MOST_TEXT} characters, got {len(text)}"
        raise ValueError(msg)
    found: list[str] = []
    at = 0
    while True:
        item = _ITEM.match(text, at)
        if item is None or text[item.end() : item.end() + 1] not in ("", ","):
            raise _unreadable(text)
        found.extend(itertools.islice(_names(item[0], text), MOST_HOSTS + 1 - len(found)))
        if len(found) > MOST_HOSTS:
            raise _too_many(text)
        if item.end() == len(text):
            return found
        at = item.end() + 1


def _names(item: str, text: str) -> Iterator[str]:
    """Yield the names of what stands between two commas."""
    parts = re.split(r"\[([^\[\]]*)\]", item)  # every second one was in brackets
    groups: list[list[str]] = []
    count = 1
    for part in parts[1::2]:
        groups.append(list(itertools.islice(_numbers(part, text), MOST_HOSTS + 1)))
        count *= len(groups[-1])
        if count > MOST_HOSTS:
            raise _too_many(text)
    for numbers in itertools.product(*groups):
        yield parts[0] + "".join(itertools.chain.from_iterable(zip(numbers, parts[2::2], strict=True)))


def _numbers(group: str, text: str) -> Iterator[str]:
    """Yield the numbers of a bracket."""
    for part in group.split(","):
        found = _RANGE.fullmatch(part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise _unreadable(text)
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}d}"


def _too_many(text: str) -> ValueError:
    return ValueError(f"expected at most {MOST_HOSTS} hosts, and {text[:60]!r} has more")


def _unreadable(text: str) -> ValueError:
    return ValueError(f"expected a list of hosts, like n[1-3,07],gpu-[001-004], got {text[:60]!r}")
