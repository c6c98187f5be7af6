"""The workers of an agent, and what became of them."""

from __future__ import annotations

from enum import Enum
from typing import Any

from phalanx._base.frozen import Value
from phalanx._base.text import SHORT_LINE, how_many, one_line
from phalanx._outcomes.failure import ProcessFailure
from phalanx.agent._spec import WorkerSpec


class WorkerState(str, Enum):  # noqa: UP042 - its text is that of torch's: WorkerState.HEALTHY
    """The state of a group of workers: all of them change it together."""

    __module__ = "phalanx.agent"

    UNKNOWN = "UNKNOWN"
    """Not known: the agent cannot go on."""
    INIT = "INIT"
    """Nothing has been started."""
    HEALTHY = "HEALTHY"
    """The workers run."""
    UNHEALTHY = "UNHEALTHY"
    """The workers run, but make no headway: the group is to be restarted."""
    STOPPED = "STOPPED"
    """The agent has stopped them."""
    SUCCEEDED = "SUCCEEDED"
    """Every worker has exited with 0."""
    FAILED = "FAILED"
    """A worker has failed."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether workers in ``state`` run: HEALTHY and UNHEALTHY ones do.

        >>> [state.value for state in WorkerState if WorkerState.is_running(state)]
        ['HEALTHY', 'UNHEALTHY']
        """
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class Worker:
    """One worker of a group. Its ranks are assigned anew before each attempt.

    Args:
        local_rank: Its rank on this machine.
        global_rank: Its rank in the whole job; -1: not assigned yet, as of the others.
        role_rank: Its rank among the workers of its role.
        world_size: How many workers the job has.
        role_world_size: How many workers the role has.

    Attributes:
        id: What `_start_workers` has returned for it: the process id, for `LocalElasticAgent`. None before.
    """

    __module__ = "phalanx.agent"
    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __repr__(self) -> str:
        return (
            f"Worker(id={self.id!r}, local_rank={self.local_rank}, global_rank={self.global_rank}, "
            f"role_rank={self.role_rank}, world_size={self.world_size}, role_world_size={self.role_world_size})"
        )


class WorkerGroup:
    """The workers of an agent, as of the latest attempt.

    Args:
        spec: What they are.

    Attributes:
        workers: One `Worker` for each local rank, in order.
        store: What the agents share, see `phalanx.rendezvous.RendezvousInfo`; None on one machine.
        group_rank: The agent's rank among the agents; None before the first rendezvous, as the next three.
        group_world_size: How many agents there are.
        master_addr: Where the workers meet.
        master_port: The port.
        state: Their `WorkerState`.
    """

    __module__ = "phalanx.agent"
    __slots__ = (
        *("group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers"),
    )

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.spec.role!r}, {self.state.value}, {how_many(len(self.workers), 'worker')}>"


class RunResult(Value):
    """What became of the workers; or, as `_monitor_workers` returns it, how they are.

    Args:
        state: Their state.
        return_values: If all succeeded: what each returned (None for a program), by global rank.
        failures: If any failed: the failures of those that failed by themselves, by global rank.

    >>> RunResult(WorkerState.SUCCEEDED, {0: "done"}).return_values[0]
    'done'
    """

    __module__ = "phalanx.agent"
    __slots__ = ("state", "return_values", "failures")  # noqa: RUF023 - the order is that of the arguments

    state: WorkerState
    return_values: dict[int, Any]
    failures: dict[int, ProcessFailure]

    def __init__(
        self,
        state: WorkerState,
        return_values: dict[int, Any] | None = None,
        failures: dict[int, ProcessFailure] | None = None,
    ) -> None:
        self._store(
            state=WorkerState(state),
            return_values={} if return_values is None else return_values,
            failures={} if failures is None else failures,
        )

    def __repr__(self) -> str:
        text = super().__repr__()
        if len(text) < 3 * SHORT_LINE and "\n" not in text:
            return text
        failed = min(self.failures.values(), key=lambda one: getattr(one, "first_key", 0), default=None)
        cause = "" if failed is None else f", first {one_line(repr(failed), 2 * SHORT_LINE)}"
        counts = f"{how_many(len(self.return_values), 'return value')}, {how_many(len(self.failures), 'failure')}"
        return f"<{type(self).__name__} {self.state.value}: {counts}{cause}>"

    def is_failed(self) -> bool:
        """Whether the state is FAILED."""
        return self.state == WorkerState.FAILED
