"""The last look at the workers of a node, as a rank of another node hangs; their end waits for it, but not long."""

from __future__ import annotations

from phalanx._base.latch import Latch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._group.context import PContext

LOOK = 3.0
"""Seconds by which the end of the workers is put off, at the most."""

_STACKS = 2.0  # seconds, of these, in which the workers have to give their stacks


class LastLook:
    """At most one look at a time. Used by one thread, which waits for nothing here.

    Attributes:
        end_at: When the end of the workers waits no longer (seconds, monotonic); None: it does not wait.
    """

    def __init__(self) -> None:
        self.end_at: float | None = None
        self._taken: Latch | None = None  # opened when the stacks are there; None: nobody has asked for them

    def begin(self, group: PContext, wake: Callable[[], None]) -> None:
        """Have the stacks of a group's workers taken and written. ``wake`` is called when they are, on any thread."""
        taken = self._taken = Latch()

        def note() -> None:
            taken.open()
            wake()

        group.take_stacks(_STACKS, note)

    @property
    def is_under_way(self) -> bool:
        """Whether the stacks are asked for, and not there yet."""
        return self._taken is not None and not self._taken

    def puts_off(self, now: float) -> bool:
        """Whether an end of the workers that is ordered now has to wait, until `is_over`."""
        if not self.is_under_way:
            return False
        self.end_at = now + LOOK
        return True

    def is_over(self, now: float) -> bool:
        """Whether an end that was put off has waited enough."""
        return self.end_at is not None and (bool(self._taken) or now >= self.end_at)

    def drop(self) -> None:
        """Wait no longer: the workers are being ended."""
        self.end_at = self._taken = None
