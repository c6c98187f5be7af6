"""The waits of a group's table: settle window, grace period, linger, patience, and those after a SIGKILL.

Owns when an event that time brings is due. A wait ends early when the group enters a state in which its event is not in
the table.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._engine import lifecycle
from phalanx._engine.lifecycle import PATIENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._base.loop import Deadline, Loop

FOREVER = float("inf")


class Waits:
    """The waits of one group. ``see`` is called with the event when one is over.

    Attributes:
        settle: The settle window in seconds.
        grace: The grace period in seconds; `FOREVER`: it does not end.
        linger: Seconds for what successful workers left behind.
    """

    def __init__(self, loop: Loop, see: Callable[[str], None]) -> None:
        self.settle, self.grace, self.linger = 0.0, 0.0, 0.0
        self._loop = loop
        self._see = see
        self._due: dict[str, Deadline] = {}  # by event
        self._endless = False  # a grace period without an end runs

    def arm(self, event: str, moment: float) -> None:
        """Have ``event`` happen at ``moment``, in place of the moment at which it was due before."""
        if event in self._due:
            self._due.pop(event).cancel()
        if moment < FOREVER:
            self._due[event] = self._loop.at(moment, lambda: self._see(event))

    def enter(self, state: str) -> None:
        """End the waits for events that ``state`` has no place for in the table."""
        for event in [event for event in self._due if (state, event) not in lifecycle.TABLE]:
            self._due.pop(event).cancel()

    def arm_grace(self) -> None:
        """Begin the grace period, or shorten the one that runs."""
        until = clock.now() + self.grace
        if "GRACE_OVER" in self._due:
            until = min(until, self._due["GRACE_OVER"].at)  # of two orders the sooner end, never the later
        self._endless = until == FOREVER
        self.arm("GRACE_OVER", until)

    def set_grace(self, grace: float) -> None:
        """Let the grace period be ``grace`` seconds. One that runs can only become shorter."""
        self.grace = grace
        if "GRACE_OVER" in self._due:
            self.arm_grace()

    def arm_patience(self) -> None:
        """Give all orphans PATIENCE, and those in a worker's session the rest of a grace period that runs."""
        soon = clock.now() + PATIENCE
        self.arm("PATIENCE_OVER", soon)
        if "GRACE_OVER" in self._due:
            self.arm("GRACE_OVER", max(soon, self._due["GRACE_OVER"].at))
        elif not self._endless:
            self.arm("GRACE_OVER", soon)
