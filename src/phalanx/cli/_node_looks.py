"""Where the workers of a node are, when somebody on any node of its job asks: a thread looks, while there is something.

What is asked and answered is `phalanx._rendezvous.looks`' business.
"""

from __future__ import annotations

from phalanx._base.background import SerialExecutor
from phalanx._base.one_line import one_line
from phalanx._rendezvous import stack_report
from phalanx._stacks.dump import EXITED, NO_STACK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._group.context import PContext

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
