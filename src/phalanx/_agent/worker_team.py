"""A team of `attempts` that is carried side by side with others: nothing that it does waits."""

from __future__ import annotations

from collections import deque

from phalanx._agent.group_team import MOST_SHOWN, GroupTeam
from phalanx._base import clock, interrupts
from phalanx._base.background import SerialExecutor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx._agent.attempt_end import AttemptEnd
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
        self._pending = -1  # the attempt that is to be launched; -1: none
        self._began = 0.0  # when the latest launch was (seconds, monotonic)

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

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """Make a group and launch it, now or when earlier ones are shown. Raises what these raise."""
        self._wake, self._pending = wake, attempt
        self._launch()

    def is_up(self) -> bool:
        """See `Team`."""
        if self._pending >= 0:
            self._launch()
        return self._pending < 0 and self.group is not None and self.group.is_up()

    def _launch(self) -> None:
        self._forget_closed()
        if len(self._before) > MOST_SHOWN:  # `_close` wakes
            return
        attempt, self._pending, self._began = self._pending, -1, clock.now()
        self.group = self._make(attempt, self._before[-1] if self._before else None)
        self.group.launch()
        self.group.when_up(self._wake)
        self._wake_at_end(self.group)

    def _forget_closed(self) -> None:
        with interrupts.deferred():
            while self._closed:
                self._before.remove(self._closed.popleft())

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        end = super().ended() if self._pending < 0 else None
        return end and end.replace(began=self._began)  # what it had to wait for is no part of it

    def stop(self, death_signal: int, grace: float) -> None:
        """See `Team`."""
        self._pending = -1
        super().stop(death_signal, grace)

    def _close_before(self, most: int) -> None:  # noqa: ARG002 - all of them
        """Wait until all groups that are gone are closed."""
        self._aside.drain(-1)
        self._forget_closed()
