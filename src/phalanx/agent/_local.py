"""`LocalElasticAgent`: an agent whose workers are processes of this machine."""

from __future__ import annotations

import os
import signal
import sys
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from phalanx._base import interrupts
from phalanx._base.text import one_line
from phalanx._engine.host_signals import SignalException
from phalanx._engine.start_errors import KeeperLostError
from phalanx._events import agent_kinds
from phalanx._events.stream import EventStream
from phalanx._evidence.error_file import is_of_timer
from phalanx._group import observers
from phalanx._group.arguments import check_options, checked_listener
from phalanx._group.command_group import SubprocessContext
from phalanx._group.context import PContext
from phalanx._group.function_group import MultiprocessContext
from phalanx._group.restart_policy import AttemptEnd, RestartPolicy, describe_attempts
from phalanx._group.warm import Warm, check_preload, choose
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.prefixes import checked_template
from phalanx._logs.specs import LogsSpecs
from phalanx._outcomes.failure import Outcome
from phalanx._outcomes.report import format_summary
from phalanx._outcomes.result import RunProcsResult, verdict
from phalanx._placement.placement import Placement
from phalanx._rendezvous.rdzv_conf import NOT_FOR_WORKERS
from phalanx._rendezvous.settings import ETCD, NO_FORK
from phalanx._run.control import Control
from phalanx._run.group_team import GroupTeam
from phalanx._run.run_events import FailureWatch, WorkerFailure
from phalanx._run.services import Services, address_of_environment
from phalanx._run.status import RunStatus
from phalanx._run.worker_env import OF_PART, with_local_rank, worker_env
from phalanx._runs.recorder import Recorder, observe
from phalanx._timers.specs import TimerSpecs
from phalanx.agent._simple import EXIT_BARRIER_TIMEOUT, SHUTDOWN_TIMEOUT, SimpleElasticAgent, step
from phalanx.agent._spec import RunResult, WorkerGroup, WorkerSpec, WorkerState, check_type, name_of
from phalanx.errors import ChildFailedError
from phalanx.rendezvous import RendezvousClosedError


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of a `WorkerSpec` as one group of processes, and starts them again when they fail.

    Each attempt is a group of its own, as `phalanx.multiprocessing.start_processes` starts one. No process of it is
    left when the next one begins. Nothing polls, unless a subclass has a `_monitor_workers` of its own.

    With ``TORCHELASTIC_ENABLE_FILE_TIMER=1``, the agent runs a `phalanx.timer.FileTimerServer`; workers find the path
    of its pipe as ``TORCHELASTIC_TIMER_FILE``.

    With ``TORCHELASTIC_HEALTH_CHECK_PORT``, a port or an address and a port, it answers there over HTTP how it is.

    Args:
        spec: What the workers are.
        logs_specs: Where output goes.
        start_method: How workers of a function are started: "spawn", "forkserver" or "fork". No effect on programs.
        exit_barrier_timeout: See `SimpleElasticAgent`.
        log_line_prefix_template: What stands before each line on the console, with ``${role_name}``, ``${rank}`` and
            ``${local_rank}``; None for ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``, or ``[rank] ``.
        shutdown_timeout: See `SimpleElasticAgent`.
        policy: See `SimpleElasticAgent`.
        settle: See `phalanx.multiprocessing.start_processes`, as of the others.
        linger: Likewise.
        console: Likewise.
        timers: Likewise.
        preload: Likewise; the process that imports them serves all attempts.
        warm: Likewise; it serves all attempts.
        writable: Likewise.
        main: Likewise.
        on_event: Called with each event of the run, a dict: a line of ``events.jsonl``, see the guide to logs. On a
            thread of its own, in order: it holds up neither a stop nor a restart, but the end of `run` waits for it,
            5 s at most. The first exception that it raises is logged.

    Raises:
        TypeError, ValueError: What is wrong with which argument.

    >>> from phalanx.multiprocessing import DefaultLogsSpecs
    >>> from phalanx.agent import WorkerSpec
    >>> spec = WorkerSpec("trainer", 2, None, entrypoint=pow, args=(2, 3))
    >>> LocalElasticAgent(spec, DefaultLogsSpecs()).run().return_values
    {0: 8, 1: 8}
    """

    __module__ = "phalanx.agent"

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = EXIT_BARRIER_TIMEOUT,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT,
        *,
        policy: RestartPolicy | None = None,
        settle: float | None = None,
        linger: float = 0.0,
        console: ConsoleSpecs | None = None,
        timers: TimerSpecs | None = None,
        preload: Sequence[str] | None = None,
        warm: Warm | None = None,
        writable: bool = False,
        main: str = "import",
        on_event: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout, policy=policy)
        check_type("logs_specs", logs_specs, LogsSpecs)
        options: dict[str, Any] = {"linger": linger, "console": console, "timers": timers}
        options |= {} if settle is None else {"settle": settle}
        check_options(
            spec.role, spec.entrypoint, start_method, options.get("settle", 0.0), self._shutdown_timeout, linger,
            console, spec.numa_options, timers, main, starts_warm=bool(preload or warm),
        )  # fmt: skip
        if log_line_prefix_template is not None:
            checked_template(log_line_prefix_template, "log_line_prefix_template")
            options["console"] = (console or ConsoleSpecs()).replace(template=log_line_prefix_template)
        options["placement"] = spec.numa_options
        if spec.virtual_local_rank:
            options["placement"] = (spec.numa_options or Placement()).replace(virtual_local_rank=True)
        options["grace"] = self._shutdown_timeout
        options["duplicate_stdout_filters"] = spec.duplicate_stdout_filters
        options["duplicate_stderr_filters"] = spec.duplicate_stderr_filters
        self._options = options
        self._timers, self._on_event = timers, checked_listener(on_event)
        self._function_options: dict[str, Any] = {"warm": warm, "writable": writable, "main": main}
        self._preload = check_preload(preload or ())
        self._held = ExitStack()  # until the end of `run`
        self._start_method = start_method
        self._forks = start_method == "fork" and not isinstance(spec.entrypoint, str)
        if self._forks and self._handler is not None and spec.rdzv_handler.get_backend() in ETCD:
            msg = f"start_method: {NO_FORK}"
            raise ValueError(msg)
        self._logs_specs = logs_specs
        self._services: Services | None = None  # of the run that is under way
        self._groups = GroupTeam(self._make_group)
        self._control: Control | None = None  # of the run that is under way
        self._group_end: AttemptEnd | None = None
        self._lock = allocate_lock()  # of the next one
        self._early = -1  # the attempt whose failures are told to other machines before its end; -1: none's
        self._recorder: Recorder | None = None  # None: nothing is kept beside the logs
        self._envs: dict[int, dict[str, str]] = {}  # of the workers of the latest attempt, by local rank
        self._report_name = name_of(spec)

    @step
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # noqa: ARG002 - there is one
        """Start the group of an attempt. Returns the process ids. Raises as `start_processes`."""
        self._group_end = None
        self._groups.begin(self._attempt)
        if self._node is not None and self._handler is not None:
            self._early = self._attempt
            self._node.begin(self._handler.generation, self._global_rank(0))
        self._groups.start(self._attempt, self._wake)
        assert self._groups.group is not None
        folder = "" if self._recorder is None else self._log_dir()
        if self._node is not None:
            self._node.started(folder)
        elif self._control is not None:
            self._control.open(folder)
        return dict(self._groups.group.pids())

    @step
    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - there is one
        """End the group's processes, and return when none is left. What they wrote may not be shown yet."""
        self._end_group(signal.SIGTERM, self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return at once how the group is."""
        groups = self._groups
        end = groups.ended()
        if end is None:
            return RunResult(WorkerState.HEALTHY)
        self._group_end = end
        self._tell_outcomes()
        number = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        result = groups.result
        if end.state == "succeeded" and result is not None:
            values = {number[rank]: value for rank, value in sorted(result.return_values.items())}
            return RunResult(WorkerState.SUCCEEDED, return_values=values)
        failures = {} if result is None else {number[rank]: each for rank, each in sorted(result.failures.items())}
        return RunResult(WorkerState.FAILED, failures=failures)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End what is left, show its last lines, and stop the timer server."""
        try:
            self._end_group(death_sig, timeout)
        finally:
            self._groups.close()
            self._held.close()

    def _run(self) -> RunResult:
        """Run, with the services that the environment asks for."""
        run_id, addresses = self._worker_group.spec.rdzv_handler.get_run_id(), address_of_environment()
        status = RunStatus(run_id, self._policy.max_restarts)
        status.name, status.group = self._report_name, lambda: self._groups.group
        self._control = Control(self._groups, self._warn)
        self._control.status = status.collect
        with Services(addresses, status) as self._services:
            if self._events is not None:
                self._events.subscribe("phalanx-state", status.observe)
                for name, observe in self._services.observers.items():
                    self._events.subscribe(name, observe)
            self._node, warm, is_own = None, None, False
            if self._handler is not None:
                from phalanx._run.node_workers import NodeWorkers

                if self._preload:  # the machines have yet to meet, and what follows from that is not known
                    envs = {
                        rank: {name: value for name, value in env.items() if name not in OF_PART}
                        for rank, env in self._make_envs(0).items()
                    }
                    warm, is_own = choose(self._preload, self._function_options["warm"], envs)
                count = self._worker_group.spec.local_world_size
                self._node = NodeWorkers(self._groups, count, self._warn, warm if is_own else None, None, self._control)
            return super()._run()

    def _conclude(self, events: EventStream, result: RunResult | None, error: BaseException | None) -> None:
        if self._control is not None:
            self._control.close()
        if self._node is not None:
            self._node.close()
        if isinstance(error, RendezvousClosedError) and (report := self._report_of_all()) is not None:
            error.__cause__ = report
        if self._recorder is not None and (result is not None or isinstance(error, RendezvousClosedError)):
            try:
                self._recorder.report = self._final_report(result)
            except Exception as raised:  # noqa: BLE001 - failures of a `_monitor_workers` of the user's may be anything
                self._warn(f"no report can be made of this run's end: {raised!r}")
        super()._conclude(events, result, error)

    def _end_group(self, death_sig: int, timeout: float) -> None:
        group = self._groups.group
        if self._node is not None:
            self._node.last_look.hurry(group)
        if group is not None and group.is_open:
            self._groups.stop(death_sig, timeout)
            with suppress(KeeperLostError, RuntimeError):  # with its keeper they are gone; or it was never up
                group.wait_gone()
            groups = self._groups
            if groups.ended() is not None:
                self._tell_outcomes()

    def _emit_end(self, result: RunResult | None, error: BaseException | None) -> None:
        super()._emit_end(result, error)
        if self._recorder is not None:
            state, code, cause = self._how_it_ended(result, error)
            self._emit(agent_kinds.RunEnded, state=state, exitcode=code, cause=cause)

    def _how_it_ended(self, result: RunResult | None, error: BaseException | None) -> tuple[str, int, str]:
        """Return how the run has ended, as `phalanx run` records it: the state, the exit code, the cause."""
        if isinstance(error, SignalException):
            return "stopped", 128 + error.sigval, error.sigval.name
        if result is not None and result.state == WorkerState.SUCCEEDED:
            return "succeeded", 0, ""
        ending = None if self._handler is None else self._handler.ending()
        if ending is not None:
            return ending
        if result is None:
            return "failed", 1, one_line(error or "")
        if result.state == WorkerState.STOPPED:
            return "stopped", *verdict(RunProcsResult(outcomes=self._outcomes()))
        end = super()._end_of("failed", result)
        code = end.exitcode or 1
        cause = end.error if end.rank is None else f"rank {end.rank}: {end.error}"
        if self._ending is not None and len(self._ending.ends) > 1:
            cause = f"attempt {self._ending.ends[-1].number}: {cause}"
        return "failed", 128 - code if code < 0 else code, cause

    def _final_report(self, result: RunResult | None) -> str:
        """Return the report; "": there is nothing to be said."""
        name = self._report_name
        if result is not None and result.is_failed() and result.failures:
            return self._failed(result).format_msg()
        if (report := self._report_of_all()) is not None:
            return report.format_msg()
        if result is None:
            return ""
        endings = {rank: outcome.describe() for rank, outcome in self._outcomes().items()}
        state, earlier = result.state.value.lower(), self._earlier()[0]
        return format_summary(name, state, endings=endings, log_dir=self._log_dir(), earlier=earlier)

    def _failed(self, result: RunResult) -> ChildFailedError:
        """Make the error of a run that has failed: with what became of every worker, and where its logs are."""
        own, name = result.failures, self._report_name
        report = self._report_of_all()
        if report is not None:
            for rank in own.keys() & report.failures.keys():  # the others are not sent the data of error files
                report.failures[rank] = report.failures[rank].replace(error_file_data=own[rank].error_file_data)
            return report
        earlier, why = self._earlier()
        return ChildFailedError(
            name, own, outcomes=self._outcomes(), log_dir=self._log_dir(), earlier=earlier, gave_up=why
        )

    def _earlier(self) -> tuple[list[str], str]:
        """Return a line on each attempt before the last one, and why no other followed."""
        if self._ending is None:
            return [], ""
        return describe_attempts(self._ending.ends[:-1]), self._ending.why

    def _outcomes(self) -> dict[int, Outcome]:
        """Return what became of every worker of the last attempt, by global rank."""
        found = {} if self._groups.result is None else self._groups.result.outcomes
        return {self._global_rank(rank): one for rank, one in found.items()}

    def _tell_outcomes(self) -> None:
        """Tell the other machines what became of the group, which is gone: before its end is told."""
        groups = self._groups
        if self._handler is not None and groups.group is not None and groups.result is not None:
            with interrupts.deferred(), self._lock:
                self._early = -1
            hangs = groups.group.hang_report
            self._handler.tell_outcomes(groups.result, log_dir=self._log_dir(), hangs=hangs)

    def _log_dir(self) -> str:
        """Where the logs of the group are; "": its folder is that of another job, with the same specs."""
        group, folder = self._groups.group, getattr(self._logs_specs, "run_log_dir", None) or ""
        files = [] if group is None else [*group.error_files.values()]
        is_its = os.path.isdir(folder) and all(file.startswith(os.path.join(folder, "")) for file in files)
        return folder if is_its else ""

    def _make_group(self, attempt: int, before: PContext | None) -> PContext:
        """Make the group of an attempt from the spec and the ranks of the rendezvous."""
        spec = self._worker_group.spec
        envs = self._make_envs(attempt)
        self._envs.update(envs)
        args = {rank: with_local_rank(spec.args, rank) for rank in envs}
        options = {**self._options, "follows": before, "events": self._events}
        options["announces"] = not self._is_launched  # `launch_agent` raises the report
        if isinstance(spec.entrypoint, str):
            return SubprocessContext(spec.role, spec.entrypoint, args, envs, self._logs_specs, **options)
        options |= self._function_options
        if self._preload:
            options["warm"] = self._warm(envs)
        return MultiprocessContext(
            spec.role, spec.entrypoint, args, envs, self._start_method, self._logs_specs, **options
        )

    def _warm(self, envs: dict[int, dict[str, str]]) -> Warm | None:
        """Return what has imported what is to be preloaded; None: each worker imports it."""
        warm, is_own = None if self._node is None else self._node.wait_for_imports(), True
        if warm is None:
            warm, is_own = choose(self._preload, self._function_options["warm"], envs)
        if is_own and warm is not None and not warm.is_open:  # the next attempt finds it: it is the innermost open one
            self._held.enter_context(warm)
        return warm

    def _make_envs(self, attempt: int) -> dict[int, dict[str, str]]:
        """Return the environments of the workers, by local rank, as far as the ranks are known."""
        assert self._services is not None
        own, spec = self._worker_group, self._worker_group.spec
        run_id = spec.rdzv_handler.get_run_id()
        more = self._services.variables | ({} if self._handler is None else NOT_FOR_WORKERS)
        return {
            worker.local_rank: worker_env(
                worker.global_rank, worker.world_size, role=spec.role, run_id=run_id,
                master_addr=str(own.master_addr), master_port=own.master_port or 0,
                local_rank=worker.local_rank, local_world_size=spec.local_world_size,
                group_rank=own.group_rank or 0, group_world_size=own.group_world_size or 1,
                role_rank=worker.role_rank, role_world_size=worker.role_world_size,
                attempt=attempt, max_restarts=spec.max_restarts,
                use_agent_store=bool(getattr(spec.rdzv_handler, "use_agent_store", False)),
            ) | more
            for worker in own.workers
        }  # fmt: skip

    def _observe(self, events: EventStream) -> None:
        super()._observe(events)
        if self._handler is not None:
            events.subscribe("phalanx-failure", FailureWatch(self._report_early))
        if observers.keeps_events(self._logs_specs):
            self._recorder = Recorder(
                self._report_name, self._envs, run_id=self._worker_group.spec.rdzv_handler.get_run_id(),
                command=[part for part in sys.argv if part] or [self._report_name], warn=self._warn,
            )  # fmt: skip
            observe(events, self._warn, self._recorder)
        observers.listen(events, self._timers, self._on_event)

    def _poll_seconds(self) -> float | None:
        """Nothing polls but what is somebody's own: a `_monitor_workers`, or a rendezvous."""
        own = type(self)._monitor_workers is not LocalElasticAgent._monitor_workers  # noqa: SLF001 - of a subclass
        theirs = self._handler is None and self._machines_may_come()
        return self._worker_group.spec.monitor_interval if own or theirs else None

    def _end_of(self, state: str, result: RunResult) -> AttemptEnd:
        end = self._group_end
        return super()._end_of(state, result) if end is None else end._replace(state=state)

    def _global_rank(self, local_rank: int) -> int:
        return self._worker_group.workers[local_rank].global_rank

    def _report_early(self, failure: WorkerFailure) -> None:
        """Tell the other machines of a failure, before the workers here have ended. On the thread of the events."""
        handler, attempt, rank = self._handler, failure.attempt, self._global_rank(failure.local_rank)
        assert handler is not None
        with interrupts.deferred(), self._lock:  # it knows less than what is told at the end, and comes first
            if attempt == self._early and self._node is not None and self._node.generation == handler.generation:
                handler.tell_failure(failure.error, rank=rank, exitcode=failure.exitcode, is_hang=failure.is_hang)

    def _report_failure(self, end: AttemptEnd) -> None:
        if self._handler is not None:
            # When a start has failed, the last result is that of the attempt before.
            result = None if end.rank is None else self._groups.result
            root = None if result is None else result.root_cause
            is_hang = root is not None and is_of_timer(root.error_file_data)
            with interrupts.deferred(), self._lock:
                self._early = -1
                self._handler.tell_failure(end.error, rank=end.rank, exitcode=end.exitcode, is_hang=is_hang)

    def _report_of_all(self) -> ChildFailedError | None:
        """Make the report of all machines on a job that has failed; None: it is about this one, or has not failed."""
        return None if self._handler is None else self._handler.report(self._report_name)

    def _warn(self, text: str) -> None:
        self._groups.say(f"phalanx: {text}")

    def _say(self, text: str) -> None:
        self._groups.say(text)

    def _final_error(self) -> Exception | None:
        return self._groups.lost
