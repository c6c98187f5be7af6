"""Posts the events of a run to the destination of ``--event-log-handler``, those that torchrun's agent records."""

from __future__ import annotations

import json

import click

from phalanx._agent.status_events import NAME, WorkerFacts, metadata
from phalanx._base import clock
from phalanx.events import Event, EventSource, UnknownDestinationError, flush, get_logging_handler, post

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._outcomes.failure import ProcessFailure
    from phalanx.cli._run_group import RunTeam

_FLUSH = 5.0  # seconds that the end waits for the handler


class RunEvents:
    """Posts events: of the agent, and of each worker.

    The agent's are RENDEZVOUS and ASSIGN_WORKER_RANKS before each attempt, and at the end SUCCEEDED (whatever became
    of the workers) or FAILED (it was stopped, or could not start them). The workers' are START in each attempt, and
    those of the last one: SUCCEEDED, FAILED, or TERMINATED (ended because others have failed).

    Args:
        destination: The name of the handler, which there is.
        run_id: The id of the run.
        role: What the workers are called.
        backend: The name of the rendezvous' kind.
    """

    def __init__(self, destination: str, *, run_id: str, role: str, backend: str) -> None:
        self.team: RunTeam | None = None
        self._destination = destination
        self._same: dict[str, Any] = {
            "run_id": run_id,
            "role": role,
            "backend": backend,
            "group_rank": 0,
            "group_world_size": 1,
        }
        self._began = clock.now()
        self._attempt = 0

    def observe(self, name: str, facts: dict[str, Any]) -> None:
        """Post what follows from what has happened, see `Attempts`."""
        if name != "agent.state" or self.team is None:
            return
        state, self._attempt = facts["state"], max(0, facts["attempt"])
        if state == "STARTING":
            self._tell("RENDEZVOUS", duration=0.0)
            self._tell("ASSIGN_WORKER_RANKS", duration=0.0)
        elif state == "RUNNING":
            for rank in self.team.envs:
                self._tell("START", rank=rank)
        elif state == "STOPPED":
            self._tell("FAILED", raw_error="stopped")
        elif state in ("SUCCEEDED", "FAILED"):
            self._tell_end()

    def close(self) -> None:
        """Wait until the handler has all events, for 5 s at most."""
        flush(_FLUSH)

    def _tell_end(self) -> None:
        assert self.team is not None
        if self.team.not_started is not None:
            self._tell("FAILED", raw_error=str(self.team.not_started))
            return
        result = self.team.result
        failures = {} if result is None else result.failures
        for rank in self.team.envs:
            failure = failures.get(rank)
            if failure is not None:
                error = json.dumps(failure.error_file_data, default=repr)
                self._tell("FAILED", rank=rank, failure=failure, raw_error=error)
            else:
                self._tell("TERMINATED" if failures else "SUCCEEDED", rank=rank)
        self._tell("SUCCEEDED")

    def _tell(self, state: str, rank: int | None = None, failure: ProcessFailure | None = None, **more: Any) -> None:
        """Post one event: of the worker ``rank``, or of the agent."""
        assert self.team is not None
        worker = None
        if rank is not None:
            world = len(self.team.envs)
            worker = WorkerFacts(
                str(self.team.pids().get(rank)), rank, rank, rank, world, None if failure is None else failure.exitcode,
                None if failure is None else failure.pid,
            )  # fmt: skip
        total = clock.now() - self._began
        told = metadata(
            state, **self._same, entry_point=self.team.name, total=total, restarts=self._attempt, worker=worker, **more
        )  # fmt: skip
        source = EventSource.AGENT if worker is None else EventSource.WORKER
        post(Event(f"{NAME}.{state}", source, metadata=told), self._destination)


def run_events(destination: str, **facts: str) -> RunEvents:
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
