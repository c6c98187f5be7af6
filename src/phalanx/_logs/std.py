"""`Std`: a set of a worker's standard streams, and its notation on the command line."""

from __future__ import annotations

from enum import IntFlag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Std(IntFlag):
    """A set of standard streams: none, stdout, stderr, or both.

    Attributes:
        NONE: Neither stream: 0.
        OUT: stdout: 1.
        ERR: stderr: 2.
        ALL: Both: 3.

    >>> Std.ALL == Std.OUT | Std.ERR
    True
    """

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read the command line's notation: one value for all ranks, or ``rank:value`` pairs, separated by commas.

        Args:
            vm: The text. Ranks may have several digits.

        Returns:
            One value, or a value for each rank that is named.

        Raises:
            ValueError: It is neither; the message names the part that is wrong.

        >>> Std.from_str("3")
        <Std.ALL: 3>
        >>> Std.from_str("0:3,1:0,12:1")
        {0: <Std.ALL: 3>, 1: <Std.NONE: 0>, 12: <Std.OUT: 1>}
        """
        values = {str(value.value): value for value in (cls.NONE, cls.OUT, cls.ERR, cls.ALL)}
        text = vm.strip()
        if text in values:
            return values[text]
        ranks: dict[int, Std] = {}
        for entry in text.split(","):
            rank, colon, value = entry.partition(":")
            if not (colon and rank.isascii() and rank.isdigit() and value in values):
                msg = (
                    f"{vm!r} is not a choice of streams: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                    f"or a value per local rank like '0:3,1:0'; the trouble is with {entry!r}"
                )
                raise ValueError(msg)
            if int(rank) in ranks:
                msg = f"{vm!r} names local rank {int(rank)} twice"
                raise ValueError(msg)
            ranks[int(rank)] = values[value]
        return ranks


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return one `Std` for each rank.

    Args:
        val_or_map: One value for all ranks, or a mapping; a rank that it leaves out gets ``Std.NONE``.
        local_world_size: How many ranks there are.

    >>> to_map({1: Std.OUT}, 2)
    {0: <Std.NONE: 0>, 1: <Std.OUT: 1>}
    """
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    if isinstance(val_or_map, int):
        return dict.fromkeys(range(local_world_size), Std(val_or_map))
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}
