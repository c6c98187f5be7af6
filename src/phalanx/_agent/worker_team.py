"""A team of `attempts` that is carried side by side with others: nothing that it does waits."""

from __future__ import annotations

from collections import deque

from phalanx._agent.group_team import MOST_SHOWN, GroupTeam
from phalanx._base import interrupts
from phalanx._base.background import SerialExecutor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._group.context import PContext


class WorkerTeam(GroupTeam):
    """Launches the group of an attempt, where `GroupTeam` waits until its workers run; and closes groups aside.

    An attempt is launched when no more than three groups are left whose lines a slow console has not taken.

    Args: See `GroupTeam`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._aside = SerialExecutor("phalanx-close")
        self._closed: deque[PContext] = deque()  # groups of `_before`

    def begin(self, attempt: int) -> None:
        """See `Team`."""
        gone = self.group
        super().begin(attempt)
        if gone is not None and not self._aside.submit(lambda: self._close(gone)):
            self._close(gone)

    def _close(self, group: PContext) -> None:
        """Close a group that is gone, as soon as it is shown."""
        try:
            group.close(9)
        finally:
            self._closed.append(group)
            self._wake()

    def is_up(self) -> bool:
        """See `Team`."""
        return super().is_up() and self.group is not None and self.group.is_up()

    def _may_start(self) -> bool:
        self._forget_closed()
        return len(self._before) <= MOST_SHOWN and super()._may_start()  # `_close` wakes

    def _start_group(self, attempt: int) -> None:
        self.group = self._make(attempt, self._before[-1] if self._before else None)
        self.group.launch()
        self.group.when_up(self._wake)
        self._wake_at_end(self.group)

    def _forget_closed(self) -> None:
        with interrupts.deferred():
            while self._closed:
                self._before.remove(self._closed.popleft())

    def _close_before(self, most: int) -> None:  # noqa: ARG002 - all of them
        """Wait until all groups that are gone are closed."""
        self._aside.drain(-1)
        self._forget_closed()
