"""Posts the events of a run to the destination of ``--event-log-handler``, those that torchrun's agent records."""

from __future__ import annotations

import json

import click

from phalanx._agent.status_events import NAME, WorkerFacts, metadata
from phalanx._base import clock
from phalanx._events import agent_kinds, kinds
from phalanx.events import Event as Posted
from phalanx.events import EventSource, UnknownDestinationError, flush, get_logging_handler, post

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._events.kinds import Event
    from phalanx._outcomes.failure import ProcessFailure

_FLUSH = 5.0  # seconds that the end waits for the handler


class RunEvents:
    """Posts events: of the agent, and of each worker.

    With workers that are restarted one by one, the agent's first two come once, and each worker's when they happen.

    The agent's are RENDEZVOUS and ASSIGN_WORKER_RANKS before each attempt, and at the end SUCCEEDED (whatever became
    of the workers) or FAILED (it was stopped, or could not start them). The workers' are START in each attempt, and
    those of the last one: SUCCEEDED, FAILED, or TERMINATED (ended because others have failed).

    Args:
        destination: The name of the handler, which there is.
        run_id: The id of the run.
        role: What the workers are called.
        backend: The name of the rendezvous' kind.
        entry_point: What they run.
        nprocs: How many there are.
    """

    def __init__(
        self, destination: str, *, run_id: str, role: str, backend: str, entry_point: str, nprocs: int
    ) -> None:
        self._destination = destination
        self._ranks = range(nprocs)
        self._same: dict[str, Any] = {
            "run_id": run_id,
            "role": role,
            "backend": backend,
            "entry_point": entry_point,
            "group_rank": 0,
            "group_world_size": 1,
        }
        self._first = self._role_first = 0  # the ranks of local rank 0: in the job, and among the workers of its role
        self._role_size = nprocs
        self._stopped: set[int] = set()  # workers that were ended, though none of this machine has failed
        self._began = clock.now_ns()
        self._attempt = 0
        self._pids: dict[int, int] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._errors: dict[int, str] = {}  # of workers on their own, by rank
        self._is_starting = self._has_failed_start = False  # of the latest attempt
        self._has_begun = self._is_stopped = self._is_single = False

    def __call__(self, events: list[Event]) -> None:
        """Post what follows from these: an observer of the run's events."""
        for event in events:
            if isinstance(event, kinds.WorkerStarted):
                self._pids[event.rank] = event.pid
            elif isinstance(event, kinds.GroupStarting | kinds.GroupNotStarted):
                self._is_starting = isinstance(event, kinds.GroupStarting)
            elif isinstance(event, kinds.GroupEnded):
                self._failures.update(event.result.failures)
                outcomes = event.result.outcomes
                self._stopped = {rank for rank, outcome in outcomes.items() if outcome.state != "succeeded"}
            elif isinstance(event, agent_kinds.Assigned):
                self._same |= {"group_rank": event.group_rank, "group_world_size": event.group_world_size}
                self._first = event.first_rank
                self._role_first, self._role_size = event.role_rank, event.role_world_size
            elif isinstance(event, agent_kinds.AttemptEnded) and event.worker is not None:
                self._errors[event.worker] = event.error
            elif isinstance(event, agent_kinds.AgentState):
                self._attempt = max(0, event.attempt)
                if event.worker is None:
                    self._on_state(event)
                else:
                    self._on_worker(event, event.worker)
            elif isinstance(event, agent_kinds.RunEnded):
                self._on_end(event)

    def close(self) -> None:
        """Wait until the handler has all events, for 5 s at most."""
        flush(_FLUSH)

    def _on_state(self, event: agent_kinds.AgentState) -> None:
        if event.state == "STARTING":
            self._pids, self._failures, self._is_starting = {}, {}, False
            self._stopped = set()
            self._tell_begin(event)
        elif event.state == "RUNNING":
            for rank in self._ranks:
                self._tell(event, "START", rank=rank)
        elif event.state == "STOPPED":
            self._tell(event, "FAILED", raw_error="stopped")
        elif event.state in ("SUCCEEDED", "FAILED"):
            self._has_failed_start = not self._is_starting
            if not self._has_failed_start:  # else the end of the run says why
                for rank in self._ranks:
                    if not self._tell_failure(event, rank):
                        is_ended = self._failures or rank in self._stopped
                        self._tell(event, "TERMINATED" if is_ended else "SUCCEEDED", rank=rank)
                self._tell(event, "SUCCEEDED")

    def _on_worker(self, event: agent_kinds.AgentState, rank: int) -> None:
        """Post what follows from what has become of a worker that is restarted by itself."""
        self._is_single = True
        if event.state == "STARTING":
            self._failures.pop(rank, None)
            if not self._has_begun:
                self._tell_begin(event)
        elif event.state == "RUNNING":
            self._tell(event, "START", rank=rank)
        elif event.state == "STOPPED":
            self._is_stopped = True
        elif event.state == "SUCCEEDED":
            self._tell(event, "SUCCEEDED", rank=rank)
        elif event.state == "FAILED" and rank in self._errors and not self._tell_failure(event, rank):
            self._tell(event, "FAILED", rank=rank, raw_error=self._errors[rank])  # not started; or its keeper was lost

    def _on_end(self, event: agent_kinds.RunEnded) -> None:
        """Post the end of the agent, if it has not been."""
        if self._has_failed_start or (self._is_single and not self._is_starting):
            self._tell(event, "FAILED", raw_error=event.cause)
        elif self._is_single:
            error = "stopped" if self._is_stopped else None
            self._tell(event, "FAILED" if error else "SUCCEEDED", raw_error=error)

    def _tell_begin(self, event: Event) -> None:
        self._has_begun = True
        self._tell(event, "RENDEZVOUS", duration=0.0)
        self._tell(event, "ASSIGN_WORKER_RANKS", duration=0.0)

    def _tell_failure(self, event: Event, rank: int) -> bool:
        """Post the failure of a worker. Returns whether it has failed."""
        failure = self._failures.get(rank)
        if failure is not None:
            error = json.dumps(failure.error_file_data, default=repr)
            self._tell(event, "FAILED", rank=rank, failure=failure, raw_error=error)
        return failure is not None

    def _tell(
        self, event: Event, state: str, rank: int | None = None, failure: ProcessFailure | None = None, **more: Any
    ) -> None:
        """Post one event: of the worker ``rank``, or of the agent."""
        worker = None
        if rank is not None:
            worker = WorkerFacts(
                str(self._pids.get(rank)), self._first + rank, rank, self._role_first + rank, self._role_size,
                None if failure is None else failure.exitcode, None if failure is None else failure.pid,
            )  # fmt: skip
        total = (event.moment - self._began) / clock.NS
        told = metadata(state, **self._same, total=total, restarts=self._attempt, worker=worker, **more)
        source = EventSource.AGENT if worker is None else EventSource.WORKER
        post(Posted(f"{NAME}.{state}", source, metadata=told), self._destination)


def run_events(destination: str, **facts: Any) -> RunEvents:
    """Return what posts events to a destination, see `RunEvents`. Raises UsageError."""
    try:
        get_logging_handler(destination)
    except (UnknownDestinationError, TypeError) as error:
        msg = f"--event-log-handler: {error}"
        raise click.UsageError(msg) from None
    except Exception as error:
        msg = f"--event-log-handler: {destination!r}: {type(error).__name__}: {error}"
        raise click.UsageError(msg) from error
    return RunEvents(destination, **facts)
