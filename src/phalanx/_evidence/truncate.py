"""Bounds what a launcher keeps in memory of the error file of each rank."""

from __future__ import annotations

from phalanx._evidence.describe import cut_middle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEPT_LIMIT = 32 << 10
"""The most characters of each text of an error file that a launcher keeps of every rank."""
_CUT = "... cut ..."
_DEPTH = 20  # levels of error file data that are kept
_BRIEF = 4096  # characters of what a file held before


def truncate(text: str, path: str = "") -> str:
    """Cut the middle out of a text of more than `KEPT_LIMIT` characters. ``path`` names the file that has all of it."""
    return cut_middle(text, KEPT_LIMIT, f"; all in {path}" if path else "")


def truncate_data(data: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Copy error file data without what would take much memory.

    Of a long text the two ends are kept, of many members the first, of deep nesting the outer levels. Data stay as they
    are if no text has more than `KEPT_LIMIT` characters, and all texts, with 8 characters for every member, have at
    most three times as many. ``path`` names the file that has all of it.
    """
    whole: dict[str, Any] = _truncated(data, path, [3 * KEPT_LIMIT], 0)
    return whole


def _truncated(value: Any, path: str, left: list[int], depth: int) -> Any:
    """Copy one value for `truncate_data`. ``left`` holds the number of characters that may still be kept."""
    left[0] -= 8
    if isinstance(value, str):
        text = truncate(value, path) if left[0] >= KEPT_LIMIT else cut_middle(value, max(left[0], 0))
        left[0] -= len(text)
        return text
    if isinstance(value, int) and value.bit_length() > _BRIEF:
        return _CUT
    if not isinstance(value, (dict, list)):
        return value
    if depth == _DEPTH:
        return _CUT
    names = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = []
    for name in names:
        if left[0] <= 0:
            found.append((_CUT, f"... {len(value) - len(found)} of {len(value)} cut ..."))
            break
        short = cut_middle(name, _BRIEF) if isinstance(name, str) else name
        left[0] -= len(str(short))
        found.append((short, _truncated(value[name], path, left, depth + 1)))
    return dict(found) if isinstance(value, dict) else [each for _name, each in found]
