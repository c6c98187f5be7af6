"""Finding our children without /proc: the kernel is asked of one number after another whether it is a child's.

Where /proc is empty, or another namespace's, nothing lists the orphans that have become ours, and only those that exit
are told. But waitid(2) answers for one number, and only for children: it can name nobody else, it changes nothing, and
a child that is not reaped keeps its number. Signals nobody.
"""

from __future__ import annotations

from phalanx._base import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

NUMBERS = 1 << 22
"""Numbers that processes can have: PID_MAX_LIMIT of the kernel's threads.h. A look at all takes some seconds."""

_USUAL = 1 << 15  # where most machines have none that is higher
_NEAR = 4096  # the numbers after ours, which are looked at in every turn
_TURN = 10_000  # others that are looked at in one turn: 9 ms; and of those that are unlikely 16 times as many: 140 ms


class Walk:
    """Goes round the numbers, beginning with those after ours: what is below us was started later.

    The numbers of a machine that allows for four million are mostly much lower. So those up to the next power of two
    above any that is known are looked at again and again, each time before a part of the others.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        """The children that were met. Some may have been reaped since."""
        self._own = os.getpid()
        self._offset, self._high, self._top = 0, 0, 0

    def turn(self, known: int) -> bool:
        """Ask of some numbers more, ``known`` being the highest that a child is known to have.

        Returns whether all have been asked about since this was last returned.
        """
        if not self._top:
            self._top = self._high = min(NUMBERS, max(_USUAL, 1 << max(self._own, known).bit_length()))
        self._ask(range(self._own + 1, min(self._own + 1 + _NEAR, self._top)))
        if self._offset < self._top:
            upto = min(self._offset + _TURN, self._top)
            self._ask((self._own + offset) % self._top or self._top for offset in range(self._offset, upto))
            self._offset = upto
        if self._offset == self._top and self._high < NUMBERS:
            upto = min(self._high + 16 * _TURN, NUMBERS)
            self._ask(range(self._high, upto))
            self._high = upto
            self._offset = 0 if upto < NUMBERS else self._top
        over = self._offset == self._top and self._high == NUMBERS
        if over:
            self._offset = self._top = 0
        return over

    def begin_again(self) -> bool:
        """Begin another round, unless most of the work of this one would be lost by that. Returns whether it does."""
        early = self._high < NUMBERS // 4
        if early:
            self._offset = self._top = 0
        return early

    def _ask(self, numbers: Iterable[int]) -> None:
        self.found.update(linux.children_among(numbers))
