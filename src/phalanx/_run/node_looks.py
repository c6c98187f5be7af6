"""Where the workers of a node are, when somebody on any node of its job asks: a thread looks, while there is something.

What is asked and answered is `phalanx._rendezvous.stack_requests`' business.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx._base.text import one_line
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._engine import host_signals
from phalanx._group.context import PContext
from phalanx._rendezvous import stack_report
from phalanx._stacks.dump import EXITED, NO_STACK

LOOK = 3.0
"""Seconds by which the end of the workers is put off, at the most, as a rank of another node hangs."""

_STACKS = 2.0  # seconds in which workers have to give their stacks
_NOT_STARTED = f"{NO_STACK}it has not been started\n"


class NodeLooks:
    """Looks at the workers of a node, one time after another."""

    def __init__(self) -> None:
        self._thread = SerialExecutor("phalanx-look", 1)

    def look(self, group: PContext | None, first: int, nproc: int, nodes: int, then: Callable[[bytes], None]) -> None:
        """Have ``then`` called with where the workers are, for the others to read. Returns at once.

        Args:
            group: The workers; None: they have not been started.
            first: The rank of the first one in the job.
            nproc: How many they are.
            nodes: How many nodes share the room for answers.
            then: Called by a thread of ours, or by this one.
        """

        def take() -> None:
            if group is None:
                then(stack_report.write({}, 0, why="no worker of this attempt has been started there"))
                return
            try:
                from phalanx._stacks import live

                pids = group.pids()
                texts = {rank: EXITED if rank in pids else _NOT_STARTED for rank in range(nproc)}
                texts |= live.take(lambda: group.alive, group.error_files, _STACKS)
                then(stack_report.write(texts, first, nodes))
            except Exception as error:  # noqa: BLE001 - no descriptor is left, say: who asks is to know
                then(stack_report.write({}, 0, why=one_line(f"its workers could not be looked at: {error}")))

        if not self._thread.submit(take):
            then(stack_report.write({}, 0, why="its agent has no thread left to look at its workers"))

    def close(self) -> None:
        """Wait for a look that is under way, but not for long."""
        self._thread.drain(_STACKS)


class LastLook:
    """The last look at the workers of a node, as a rank of another node hangs; their end waits for it, but not long.

    At most one look at a time. Used by one thread, which waits for nothing here.

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

    def wait(self) -> None:
        """Return when the stacks are there, after `LOOK` at the latest; a signal may interrupt it."""
        if self._taken is not None:
            with host_signals.delivering():
                self._taken.wait(LOOK)

    def drop(self) -> None:
        """Wait no longer: the workers are being ended."""
        self.end_at = self._taken = None
