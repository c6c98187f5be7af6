"""What an agent tells others of its life, from the stream of its events: by `phalanx.events` and `phalanx.metrics`.

Names and metadata are those of torch's agent. Both are observers of the stream, each on a thread of its own: a handler
holds up neither the agent nor the other.
"""

from __future__ import annotations

import json
from functools import wraps

from phalanx._base import clock
from phalanx._events import agent_kinds
from phalanx.agent._types import WorkerState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from phalanx._events.kinds import Event
    from phalanx.agent._spec import WorkerSpec
    from phalanx.agent._types import RunResult, Worker

    F = TypeVar("F", bound=Callable[..., Any])

_MS = 1000
_ENDS = ("run_success_with_retries", "run_success_no_retries", "run_failed_with_retries", "run_failed_no_retries")


def step(method: F) -> F:
    """Emit an `AgentStep` at the end of each call of a method of an agent, which has ``_emit``."""

    @wraps(method)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        began, failed = clock.now(), True
        try:
            result = method(self, *args, **kwargs)
            failed = False
            return result
        finally:
            self._emit(agent_kinds.AgentStep, step=method.__qualname__, seconds=clock.now() - began, failed=failed)

    return measured  # type: ignore[return-value]  # it has the same parameters


class StatusEvents:
    """Posts events to the destination of the spec: of the agent, and of each worker.

    The agent's are RENDEZVOUS and ASSIGN_WORKER_RANKS before each attempt; and, of a launched job, SUCCEEDED (`run` has
    returned, whatever became of the workers) or FAILED (it has raised) at the end. The workers' are START in each
    attempt, and those of the last one: SUCCEEDED, FAILED, or TERMINATED (ended because others have failed).

    Args:
        spec: Whose these are.
        is_launched: Whether the end of the agent is that of the job.

    Raises:
        UnknownDestinationError: The spec's ``event_log_handler`` names no destination.
    """

    def __init__(self, spec: WorkerSpec, *, is_launched: bool) -> None:
        from phalanx.events import UnknownDestinationError, get_logging_handler

        try:
            get_logging_handler(spec.event_log_handler)
        except UnknownDestinationError as error:
            msg = f"event_log_handler: {error}"
            raise UnknownDestinationError(msg) from None
        self._spec = spec
        self._is_launched = is_launched
        self._began = clock.now_ns()
        self._restarts = 0
        self._group_rank: int | None = None
        self._group_world_size: int | None = None
        self._workers: tuple[Worker, ...] = ()

    def __call__(self, events: list[Event]) -> None:
        """Post what these mean."""
        for event in events:
            if isinstance(event, agent_kinds.AgentStatus):
                self._on_status(event)
            elif isinstance(event, agent_kinds.AgentEnded):
                self._restarts = event.restarts
                if event.result is not None:
                    self._tell_workers(event, event.result)
                if self._is_launched:
                    self._tell(
                        event, "SUCCEEDED" if event.result is not None else "FAILED", raw_error=event.error or None
                    )

    def _on_status(self, event: agent_kinds.AgentStatus) -> None:
        self._restarts = event.restarts
        if event.status == "START":
            self._group_rank, self._group_world_size = event.group_rank, event.group_world_size
            self._workers = event.workers
            for worker in self._workers:
                self._tell(event, "START", worker)
        else:
            self._tell(event, event.status, duration=event.seconds)

    def _tell_workers(self, event: agent_kinds.AgentEnded, result: RunResult) -> None:
        for worker in self._workers if result.state != WorkerState.STOPPED else ():
            failure = result.failures.get(worker.global_rank)
            if failure is not None:
                error = json.dumps(getattr(failure, "error_file_data", str(failure)), default=repr)
                self._tell(event, "FAILED", worker, failure=failure, raw_error=error)
            else:
                self._tell(event, "TERMINATED" if result.is_failed() else "SUCCEEDED", worker)

    def _tell(
        self,
        event: Event,
        state: str,
        worker: Worker | None = None,
        failure: Any = None,
        raw_error: str | None = None,
        duration: float | None = None,
    ) -> None:
        """Post one event: of a worker, or of the agent."""
        from phalanx._agent.status_events import NAME, WorkerFacts, metadata
        from phalanx.events import Event as Posted
        from phalanx.events import EventSource, post

        spec = self._spec
        facts = None if worker is None else WorkerFacts(
            str(worker.id), worker.global_rank, worker.local_rank, worker.role_rank, worker.role_world_size,
            getattr(failure, "exitcode", None), getattr(failure, "pid", None),
        )  # fmt: skip
        told = metadata(
            state,
            run_id=spec.rdzv_handler.get_run_id(),
            role=spec.role,
            entry_point=spec.get_entrypoint_name(),
            backend=spec.rdzv_handler.get_backend(),
            group_rank=self._group_rank,
            group_world_size=self._group_world_size,
            total=(event.moment - self._began) / clock.NS,
            restarts=self._restarts,
            worker=facts,
            raw_error=raw_error,
            duration=duration,
        )
        source = EventSource.AGENT if worker is None else EventSource.WORKER
        post(Posted(f"{NAME}.{state}", source, metadata=told), spec.event_log_handler)


class StatusMetrics:
    """Puts metrics into the group ``torchelastic``.

    - ``<Class>.<method>.success`` or ``.failure``, 1, and ``.duration.ms``: of each step of the agent.
    - ``workers.<role>.remaining_restarts`` with ``.healthy``, ``.failed`` or ``.succeeded``, 1: when the workers run,
      and when they have ended. Torch's agent puts these each time that it looks; nothing looks here.
    - At the end of a run that was not stopped: ``workers.<role>.flakiness``, ``.run_total``, and how it ended.

    Args:
        role: That of the workers.
        max_restarts: How many restarts there may be.
    """

    def __init__(self, role: str, max_restarts: int) -> None:
        self._prefix = f"workers.{role}"
        self._max_restarts = max_restarts
        self._restarts = 0

    def __call__(self, events: list[Event]) -> None:
        """Put what these mean."""
        for event in events:
            if isinstance(event, agent_kinds.AgentStep):
                self._put(f"{event.step}.{'failure' if event.failed else 'success'}", 1)
                self._put(f"{event.step}.duration.ms", int(event.seconds * _MS))
            elif isinstance(event, agent_kinds.AgentStatus):
                self._restarts = event.restarts
            elif isinstance(event, agent_kinds.AgentState) and event.state == "RUNNING":
                self._put_state("healthy")
            elif isinstance(event, agent_kinds.AttemptEnded) and event.state in ("failed", "succeeded"):
                self._put_state(event.state)
            elif isinstance(event, agent_kinds.AgentEnded) and event.result is not None:
                self._restarts = event.restarts
                self._measure(event.result)

    def _put_state(self, state: str) -> None:
        self._put(f"{self._prefix}.remaining_restarts", self._max_restarts - self._restarts)
        self._put(f"{self._prefix}.{state}", 1)

    def _measure(self, result: RunResult) -> None:
        if result.state == WorkerState.STOPPED:
            return
        failed = result.is_failed()
        ended = f"run_{'failed' if failed else 'success'}_{'with' if self._restarts else 'no'}_retries"
        flakiness = 100 if failed else 100 * self._restarts // (self._max_restarts + 1)
        for name, value in {
            "flakiness": flakiness,
            "run_total": 1,
            **{name: int(name == ended) for name in _ENDS},
        }.items():
            self._put(f"{self._prefix}.{name}", value)

    def _put(self, name: str, value: int) -> None:
        from phalanx.metrics import put_metric

        put_metric(name, value)
