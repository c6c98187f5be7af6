"""The events of a run, and who takes them: the files in the run's folder, what watches for failures, torch's names.

Torch's agents tell of their lives by `phalanx.events` and `phalanx.metrics`; names and metadata are those of torch's.
All observe the stream on a thread of their own: a handler holds up neither the agent nor another one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phalanx._base import clock
from phalanx._events import agent_kinds, kinds
from phalanx._events.kinds import Event

Observer = Callable[[list[Event]], object]
Observers = Mapping[str, Observer]


class WorkerFailure(NamedTuple):
    """The failure of a worker.

    Attributes:
        attempt: In which attempt.
        local_rank: Whose.
        error: What happened, in one line.
        exitcode: Its exit code, negative for a signal: also that which it is about to have.
        is_hang: Whether a timer has found it.
    """

    attempt: int
    local_rank: int
    error: str
    exitcode: int
    is_hang: bool


class FailureWatch:
    """An observer of a run's events that reports each failure as soon as it is known.

    A worker that a timer kills is reported when it is sent SIGKILL, since it may take long to exit; and again then.

    Args:
        report: Called with each failure, on the thread of the events.
    """

    def __init__(self, report: Callable[[WorkerFailure], None]) -> None:
        self._report = report
        self._hung: dict[tuple[int, int], str] = {}  # by attempt and rank: what its timer has said of a hang

    def __call__(self, events: list[Event]) -> None:
        """Report the failures among these."""
        for event in events:
            if isinstance(event, kinds.WorkerReaped):
                self._hung.setdefault((event.attempt, event.rank), event.what)
                if event.signal == signal.SIGKILL:
                    self._report(WorkerFailure(event.attempt, event.rank, event.what, -signal.SIGKILL, is_hang=True))
            elif isinstance(event, kinds.TimerLeft):
                self._hung.pop((event.attempt, event.rank), None)
            elif isinstance(event, kinds.WorkerExited) and event.state == "failed":
                what = self._hung.get((event.attempt, event.rank), "")
                error = what or event.how
                self._report(WorkerFailure(event.attempt, event.rank, error, event.exitcode, is_hang=bool(what)))


class Asked(NamedTuple):
    """What was asked for."""

    argv: list[str]
    """The whole command line."""
    config: str
    """All options that hold, as a job file; "": no job file can hold them."""


NAME = "torchelastic.worker.status"
_MS = 1000
_ENDS = ("run_success_with_retries", "run_success_no_retries", "run_failed_with_retries", "run_failed_no_retries")


class StatusWorker(NamedTuple):
    """A worker, for its events; `phalanx.agent.Worker` has the same names."""

    id: Any
    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int


class StatusEvents:
    """Posts events to a destination of `phalanx.events`: of the agent, and of each worker.

    The agent's are RENDEZVOUS and ASSIGN_WORKER_RANKS before each attempt; and, of a job, SUCCEEDED (its end is known,
    whatever became of the workers) or FAILED (it was stopped, or could not start them) at the end. The workers' are
    START in each attempt, and those of the last one: SUCCEEDED, FAILED, or TERMINATED (ended because others have
    failed).

    Args:
        destination: Its name; there is one.
        run_id: The id of the run.
        role: What the workers are called.
        entry_point: What they run.
        backend: The name of the rendezvous' kind.
        is_job: Whether the end of the agent is that of a job.
    """

    def __init__(
        self, destination: str, *, run_id: str, role: str, entry_point: str, backend: str, is_job: bool
    ) -> None:
        self._destination = destination
        self._same: dict[str, Any] = {
            "run_id": run_id,
            "role": role,
            "rdzv_backend": backend,
            "hostname": os.uname().nodename,
        }
        self._entry_point = os.path.basename(entry_point)
        self._is_job = is_job
        self._began = clock.now_ns()
        self._restarts = 0
        self._group_rank: int | None = None
        self._group_world_size: int | None = None
        self._workers: tuple[StatusWorker, ...] = ()

    def __call__(self, events: list[Event]) -> None:
        """Post what these mean."""
        for event in events:
            if isinstance(event, agent_kinds.AgentStatus):
                self._on_status(event)
            elif isinstance(event, agent_kinds.AgentEnded):
                self._on_end(event)

    def _on_status(self, event: agent_kinds.AgentStatus) -> None:
        self._restarts = event.restarts
        self._group_rank, self._group_world_size = event.group_rank, event.group_world_size
        if event.status != "START":
            self._post(event, event.status, duration=event.seconds)
            return
        self._workers = event.workers
        for worker in self._workers:
            self._post(event, "START", worker)

    def _on_end(self, event: agent_kinds.AgentEnded) -> None:
        self._restarts = event.restarts
        has_raised = event.state == "RAISED"
        for worker in () if has_raised or event.state == "STOPPED" else self._workers:
            failure = event.failures.get(worker.global_rank)
            if failure is not None:
                error = json.dumps(getattr(failure, "error_file_data", str(failure)), default=repr)
                self._post(event, "FAILED", worker, failure=failure, raw_error=error)
            else:
                self._post(event, "TERMINATED" if worker.global_rank in event.terminated else "SUCCEEDED", worker)
        if self._is_job:
            self._post(event, "FAILED" if has_raised else "SUCCEEDED", raw_error=event.error or None)

    def _post(
        self,
        event: Event,
        state: str,
        worker: StatusWorker | None = None,
        failure: Any = None,
        raw_error: str | None = None,
        duration: float | None = None,
    ) -> None:
        """Post one event: of a worker, or of the agent."""
        from phalanx.events import Event as Posted
        from phalanx.events import EventSource, record

        more: dict[str, Any] = {"group_world_size": self._group_world_size, "entry_point": self._entry_point}
        if worker is not None:
            more |= {
                "local_rank": [worker.local_rank],
                "role_rank": [worker.role_rank],
                "role_world_size": [worker.role_world_size],
                "exit_code": [getattr(failure, "exitcode", None)],
                "worker_pid": [getattr(failure, "pid", None)],
            }
        told = self._same | {
            "global_rank": None if worker is None else worker.global_rank,
            "group_rank": self._group_rank,
            "worker_id": None if worker is None else str(worker.id),
            "state": state,
            "total_run_time": int((event.moment - self._began) / clock.NS),
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": self._restarts,
            "duration_ms": None if duration is None else duration * _MS,
        }
        source = EventSource.AGENT if worker is None else EventSource.WORKER
        record(Posted(f"{NAME}.{state}", source, metadata=told), self._destination)


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
            elif isinstance(event, agent_kinds.AgentEnded) and event.state not in ("RAISED", "STOPPED"):
                self._restarts = event.restarts
                self._measure(failed=event.state != "SUCCEEDED")

    def _put_state(self, state: str) -> None:
        self._put(f"{self._prefix}.remaining_restarts", self._max_restarts - self._restarts)
        self._put(f"{self._prefix}.{state}", 1)

    def _measure(self, *, failed: bool) -> None:
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
