"""Finds the keeper's children without /proc: waitid(2) tells of one pid after another whether it is a child's.

Where /proc is empty, or another namespace's, nothing lists the orphans that have become children, and only exits show.
But waitid(2) answers for one pid, and for children only; it changes nothing, and a child that is not reaped keeps its
pid. Signals no process.
"""

from __future__ import annotations

from phalanx._base import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

PID_LIMIT = 1 << 22
"""The number of possible pids: PID_MAX_LIMIT of the kernel's threads.h. A look at all takes some seconds."""

_USUAL = 1 << 15  # most machines have no higher pid
_NEAR = 4096  # the pids after the keeper's, which are looked at in every step
_TURN = 10_000  # others that are looked at in one step: 9 ms; of the unlikely ones 16 times as many: 140 ms


class ChildScan:
    """Goes round all pids, beginning with those after the keeper's: its descendants were started later.

    On a machine that allows for four million pids most are much lower. So those up to the next power of two above any
    known one are looked at again and again, each time before a part of the others.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        """The children that were found. Some may have been reaped since."""
        self._own = os.getpid()
        self._offset, self._high, self._top = 0, 0, 0

    def step(self, known: int) -> bool:
        """Look at some more pids. ``known`` is the highest pid that a child is known to have.

        Returns whether a round over all pids has ended.
        """
        if not self._top:
            self._top = self._high = min(PID_LIMIT, max(_USUAL, 1 << max(self._own, known).bit_length()))
        self._ask(range(self._own + 1, min(self._own + 1 + _NEAR, self._top)))
        if self._offset < self._top:
            upto = min(self._offset + _TURN, self._top)
            self._ask((self._own + offset) % self._top or self._top for offset in range(self._offset, upto))
            self._offset = upto
        if self._offset == self._top and self._high < PID_LIMIT:
            upto = min(self._high + 16 * _TURN, PID_LIMIT)
            self._ask(range(self._high, upto))
            self._high = upto
            self._offset = 0 if upto < PID_LIMIT else self._top
        over = self._offset == self._top and self._high == PID_LIMIT
        if over:
            self._offset = self._top = 0
        return over

    def begin_again(self) -> bool:
        """Begin another round, unless most of this one is done. Returns whether it does."""
        early = self._high < PID_LIMIT // 4
        if early:
            self._offset = self._top = 0
        return early

    def _ask(self, numbers: Iterable[int]) -> None:
        self.found.update(linux.children_among(numbers))
