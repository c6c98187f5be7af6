"""An agent that tells of its life by events, and of its end by metrics, with the names that torch's have."""

from __future__ import annotations

import json
import os

from phalanx._base import clock
from phalanx.agent import LocalElasticAgent, RunResult, WorkerState
from phalanx.errors import ChildFailedError
from phalanx.events import post
from phalanx.metrics import put_metric

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent import Worker, WorkerGroup, WorkerSpec

_ENDS = ("run_success_with_retries", "run_success_no_retries", "run_failed_with_retries", "run_failed_no_retries")


class TellingAgent(LocalElasticAgent):
    """Posts events to the destination of its spec: of the agent, and of each worker.

    The agent's are RENDEZVOUS and ASSIGN_WORKER_RANKS before each attempt, and at the end SUCCEEDED (`run` has
    returned, whatever became of the workers) or FAILED (it has raised). The workers' are START in each attempt, and
    those of the last one: SUCCEEDED, FAILED, or TERMINATED (ended because others have failed).

    The metrics are put when `run` returns, and no worker is left: a handler holds up nobody.
    """

    _began = _step_began = 0.0

    def run(self, role: str = "default") -> RunResult:
        """See `SimpleElasticAgent.run`."""
        self._began = clock.now()
        try:
            result = super().run(role)
        except BaseException:
            from traceback import format_exc

            self._tell("FAILED", raw_error=format_exc())
            raise
        for worker in self._worker_group.workers if result.state != WorkerState.STOPPED else ():
            failure = result.failures.get(worker.global_rank)
            if failure is not None:
                self._tell(
                    "FAILED", worker, failure=failure, raw_error=json.dumps(failure.error_file_data, default=repr)
                )
            else:
                self._tell("TERMINATED" if result.is_failed() else "SUCCEEDED", worker)
        self._tell("SUCCEEDED")
        self._measure(result)
        return result

    def error(self, name: str, result: RunResult) -> ChildFailedError:
        """Make the error of a run that has failed: with what became of every worker, and where its logs are."""
        groups, folder = self._groups, getattr(self._logs_specs, "run_log_dir", None) or ""
        outcomes = {} if groups.result is None else groups.result.outcomes  # on one machine, local ranks are global
        files = [] if groups.group is None else [*groups.group.error_files.values()]
        if not (os.path.isdir(folder) and all(file.startswith(os.path.join(folder, "")) for file in files)):
            folder = ""  # of another job, with the same config
        return ChildFailedError(name, result.failures, outcomes=outcomes, log_dir=folder)

    def _measure(self, result: RunResult) -> None:
        """Put the metrics of a run that was not stopped."""
        if result.state == WorkerState.STOPPED:
            return
        failed, most = result.is_failed(), self._policy.max_restarts
        restarts = most - self._remaining_restarts
        ended = f"run_{'failed' if failed else 'success'}_{'with' if restarts else 'no'}_retries"
        metrics = {"flakiness": 100 if failed else 100 * restarts // (most + 1), "run_total": 1}
        for name in _ENDS:
            metrics[name] = int(name == ended)
        for name, value in metrics.items():
            put_metric(f"workers.{self._worker_group.spec.role}.{name}", value)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._step_began = clock.now()
        super()._rendezvous(worker_group)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        self._tell_step("RENDEZVOUS")
        workers = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        self._tell_step("ASSIGN_WORKER_RANKS")
        return workers

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        for worker in worker_group.workers:
            self._tell("START", worker)

    def _tell_step(self, state: str) -> None:
        now = clock.now()
        self._tell(state, duration=now - self._step_began)
        self._step_began = now

    def _tell(
        self,
        state: str,
        worker: Worker | None = None,
        failure: Any = None,
        raw_error: str | None = None,
        duration: float | None = None,
    ) -> None:
        """Post one event: of a worker, or of the agent."""
        group = self._worker_group
        spec = group.spec
        if spec.event_log_handler == "null":  # `Event` takes a while to load
            return
        from phalanx._agent.status_events import NAME, WorkerFacts, metadata
        from phalanx.events import Event, EventSource

        facts = None if worker is None else WorkerFacts(
            str(worker.id), worker.global_rank, worker.local_rank, worker.role_rank, worker.role_world_size,
            failure and failure.exitcode, failure and failure.pid,
        )  # fmt: skip
        told = metadata(
            state,
            run_id=spec.rdzv_handler.get_run_id(),
            role=spec.role,
            entry_point=spec.get_entrypoint_name(),
            backend=spec.rdzv_handler.get_backend(),
            group_rank=group.group_rank,
            group_world_size=group.group_world_size,
            total=clock.now() - self._began,
            restarts=self._policy.max_restarts - self._remaining_restarts,
            worker=facts,
            raw_error=raw_error,
            duration=duration,
        )
        source = EventSource.AGENT if worker is None else EventSource.WORKER
        post(Event(f"{NAME}.{state}", source, metadata=told), spec.event_log_handler)
