"""Formats sets of ranks, and counts, the same way everywhere."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def format_ranks(ranks: Iterable[int], between: str = ", ") -> str:
    """Return ranks as a short text: ranges for neighbours, in ascending order.

    Args:
        ranks: The ranks, in any order; repeated ones count once.
        between: What stands between two ranges.

    >>> format_ranks([0, 1, 2, 3, 7]), format_ranks([5]), format_ranks([])
    ('0-3, 7', '5', '')
    >>> format_ranks([3, 0, 1, 2, 7], ",")
    '0-3,7'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return between.join("-".join(map(str, run)) for run in runs)


def name_ranks(ranks: Iterable[int]) -> str:
    """Format a set of ranks with the word: ``rank 3``, or ``ranks 0-2, 7``.

    >>> name_ranks([3]), name_ranks([7, 0, 1, 2])
    ('rank 3', 'ranks 0-2, 7')
    """
    known = set(ranks)
    return f"rank{'' if len(known) == 1 else 's'} {format_ranks(known)}"


def how_many(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> how_many(1, "node"), how_many(0, "worker"), how_many(1596, "more line")
    ('1 node', '0 workers', '1,596 more lines')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
