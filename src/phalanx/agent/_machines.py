"""What an agent has to do with those of other machines: through a `ManyMachinesRendezvous`, if its spec has one."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable

from phalanx._agent.attempt_end import AttemptEnd
from phalanx._agent.history import describe_restart
from phalanx._agent.restart_policy import RestartPolicy
from phalanx._base import interrupts
from phalanx._group.context import PContext
from phalanx._outcomes.result import RunProcsResult
from phalanx._rendezvous.conf import NOT_FOR_WORKERS
from phalanx.agent._spec import WorkerSpec
from phalanx.agent._types import Worker
from phalanx.errors import ChildFailedError
from phalanx.rendezvous import ManyMachinesRendezvous

_ASKS_OTHERS = RestartPolicy(2**31 - 1, window=1e9)
"""Of an agent that does not decide alone: if no other attempt follows, the next rendezvous says so."""


class AgentMachines:
    """The other machines, for an agent.

    Args:
        spec: Whose workers it has.

    Attributes:
        handler: What brings the agents together; None: there are no other machines, or the handler is somebody else's.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        handler = spec.rdzv_handler
        self.handler = handler if isinstance(handler, ManyMachinesRendezvous) else None
        self._spec = spec
        self._lock = allocate_lock()
        self._early = -1  # the attempt of whose failures an observer may still tell

    def begin(self, attempt: int) -> None:
        """Begin an attempt: of those before it, no observer tells any more, however late it is."""
        with interrupts.deferred(), self._lock:
            self._early = attempt

    def announce(
        self, policy: RestartPolicy, grace: float, barrier: float, call: Callable[[], object],
        expect: Callable[[float], object],
    ) -> RestartPolicy:  # fmt: skip
        """Tell the handler of the agent; ``call`` is called when it is to look at once. Return the agent's policy.

        ``expect``: see `ManyMachinesRendezvous.announce`.

        Raises RuntimeError: the handler has served another run.
        """
        if self.handler is None:
            return policy
        spec = self._spec
        self.handler.announce(
            nproc=spec.local_world_size, role=spec.role, policy=policy, grace=grace, barrier=barrier, expect=expect
        )
        self.handler.when_ended(call)
        return _ASKS_OTHERS

    def have_succeeded(self) -> bool | None:
        """Return whether the workers of all machines have, now that these have; None: it is not known yet."""
        return True if self.handler is None else self.handler.tell_success(wait=False)

    def tell_failure(self, end: AttemptEnd, observed: int | None = None) -> None:
        """Tell the other machines that workers here have failed.

        ``observed``: the attempt, of an observer, whose word is early and says less: it has none once that attempt's
        end was told, or another one has begun. None: that attempt has ended.
        """
        if self.handler is None:
            return
        with interrupts.deferred(), self._lock:
            if observed is None:
                self._early = -1
            elif observed != self._early:
                return
            self.handler.tell_failure(end.error, rank=end.rank, exitcode=end.exitcode)

    def tell_outcomes(self, group: PContext, result: RunProcsResult, log_dir: str) -> None:
        """Tell them what became of the workers here, none of which is left: before their end is told."""
        if self.handler is not None:
            self.handler.tell_outcomes(result, log_dir=log_dir, hangs=group.hang_report)

    def report(self, name: str) -> ChildFailedError | None:
        """Make the report of all machines on a job that has failed; None: there is none."""
        return None if self.handler is None else self.handler.report(name)

    @property
    def describe(self) -> Callable[[int, float, str], str]:
        """What returns what is said of the attempt that follows a failure: see `Team`."""
        return describe_restart if self.handler is None else lambda *_: "the machines decide what follows"

    @property
    def variables(self) -> dict[str, str]:
        """What workers find in their environment: not the job's secret, nor a password, which are the agents' alone."""
        return {} if self.handler is None else dict(NOT_FOR_WORKERS)

    @property
    def failed_here(self) -> bool:
        """Whether a worker of this machine has failed: the others are being ended by that."""
        return self.handler is not None and self.handler.failed_here

    @property
    def why_again(self) -> str:
        """Why the workers here are ended, for another attempt."""
        return (self.handler is not None and self.handler.why_ended) or "another machine waits"

    def ranked(self, group_rank: int) -> list[Worker]:
        """Return the workers of this machine, which is that of a rank: they follow those of the machines before it."""
        spec, members = self._spec, () if self.handler is None else self.handler.members
        first = sum(count for _, count, _ in members[:group_rank])
        first_in_role = sum(count for _, count, role in members[:group_rank] if role == spec.role)
        size = sum(count for _, count, _ in members)
        size_of_role = sum(count for _, count, role in members if role == spec.role)
        return [
            Worker(rank, first + rank, first_in_role + rank, size, size_of_role)
            for rank in range(spec.local_world_size)
        ]
