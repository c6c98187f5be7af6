"""`ElasticAgent` and `SimpleElasticAgent`: an agent whose workers are started, watched and stopped by its hooks.

`_run.attempts` decides what follows the end of an attempt, and when; a team calls the hooks in their order.
"""

# ruff: noqa: SLF001 - the team calls hooks, which have the names that torch gave them

from __future__ import annotations

import signal
from _thread import allocate_lock
from abc import ABC, abstractmethod
from functools import wraps

from phalanx._base import clock, interrupts, stderr
from phalanx._base.text import one_line, seconds
from phalanx._engine import host_signals
from phalanx._engine.host_signals import SignalException
from phalanx._events import agent_kinds, kinds
from phalanx._events.stream import PATIENCE, EventStream
from phalanx._group.arguments import check_signal
from phalanx._group.restart_policy import AttemptEnd, RestartPolicy
from phalanx._run.attempts import Attempts
from phalanx._run.run_events import StatusEvents, StatusMetrics
from phalanx._run.runner import Runner, Team
from phalanx.agent._spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState, check_type
from phalanx.rendezvous import (
    ManyMachinesRendezvous,
    OneMachineRendezvous,
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from phalanx._run.attempts import Ending
    from phalanx._run.node_workers import NodeWorkers

    F = TypeVar("F", bound=Callable[..., Any])

EXIT_BARRIER_TIMEOUT = 300.0
"""Seconds that agents wait for each other at the end."""

SHUTDOWN_TIMEOUT = 30
"""Seconds between the death signal and SIGKILL."""


_ASKS_OTHERS = RestartPolicy(2**31 - 1, window=1e9)
"""Of an agent that does not decide alone: if no other attempt follows, the next rendezvous says so."""


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


class ElasticAgent(ABC):
    """What starts the workers of one machine, watches them, and starts them again when they fail."""

    __module__ = "phalanx.agent"

    @abstractmethod
    def run(self, role: str = "default") -> RunResult:
        """Run the workers of a ``role``, with restarts, and return what became of them."""

    @abstractmethod
    def get_worker_group(self, role: str = "default") -> WorkerGroup:
        """Return the workers of a ``role``. The object is the agent's own: it is not to be changed."""


class SimpleElasticAgent(ElasticAgent):
    """An agent of one group of workers. Subclass it for workers of your own kind, and write four methods.

    - ``_start_workers(self, worker_group)`` starts a worker for each of ``worker_group.workers``, and returns a dict
      from local rank to the id of the worker (any object), which becomes `Worker.id`.
    - ``_monitor_workers(self, worker_group)`` returns a `RunResult`, and does not wait. HEALTHY: they run. SUCCEEDED:
      all have ended well. FAILED or UNHEALTHY: the group is stopped and, if the policy allows, started again.
    - ``_stop_workers(self, worker_group)`` ends them, and returns when none is left. It is called after each attempt
      that has failed.
    - ``_shutdown(self, death_sig=signal.SIGTERM, timeout=30)`` ends what is left, with ``death_sig`` and SIGKILL
      ``timeout`` seconds later. It is called once, at the end of `run`, however that ends.

    They are called by the thread that calls `run`. An exception that one of them raises leaves `run`, after
    ``_shutdown``; but if a restart cannot be started, that is a failure of that attempt, and the policy decides.

    Args:
        spec: What the workers are.
        exit_barrier_timeout: Seconds (>= 0) that the agents of several machines wait for each other at the end. Without
            effect on one machine.
        shutdown_timeout: Seconds (>= 0) between the death signal and SIGKILL.
        policy: When the group is started again; default: ``RestartPolicy(spec.max_restarts)``.

    Raises:
        TypeError, ValueError: What is wrong with which argument.
    """

    __module__ = "phalanx.agent"

    _forks = False
    """Whether it starts its workers as forks of this process, which has no threads of ours the first time then."""
    _is_launched = False
    """Whether its end is that of a job, which `StatusEvents` tells."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = EXIT_BARRIER_TIMEOUT,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT,
        *,
        policy: RestartPolicy | None = None,
    ) -> None:
        check_type("spec", spec, WorkerSpec)
        if policy is not None:
            check_type("policy", policy, RestartPolicy)
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = seconds("exit_barrier_timeout", exit_barrier_timeout, negative=True)
        self._shutdown_timeout = seconds("shutdown_timeout", shutdown_timeout)
        self._policy = RestartPolicy(spec.max_restarts) if policy is None else policy
        handler = spec.rdzv_handler
        self._handler = handler if isinstance(handler, ManyMachinesRendezvous) else None
        """What brings it together with agents of other machines; None: there are none, or that is somebody else's."""
        self._node: NodeWorkers | None = None
        """What the agent's node of a job asks for its workers; None: they show no stacks."""
        self._remaining_restarts = self._policy.max_restarts
        self._attempt = 0
        self._wake: Callable[[], None] = lambda: None
        self._attempts: Attempts | None = None
        self._events: EventStream | None = None  # of the run that is under way
        self._run_lock = allocate_lock()
        self._is_shut_down = False
        self._run_began = 0.0

    def get_worker_group(self, role: str = "default") -> WorkerGroup:  # noqa: ARG002 - there is one
        """Return the workers, as of the latest attempt. There is one group, whatever the role."""
        return self._worker_group

    def run(self, role: str = "default") -> RunResult:  # noqa: ARG002 - there is one; its name is the spec's
        """Run the workers until all have succeeded, or until they have failed and the policy allows no restart.

        In the main thread, a SIGTERM, SIGINT, SIGHUP or SIGQUIT (see ``TORCHELASTIC_SIGNALS_TO_HANDLE``) ends the
        workers and then raises `SignalException`, during a delay between two attempts, too. A second signal kills them.

        Args:
            role: Accepted: the role is that of the spec.

        Returns:
            SUCCEEDED with the return values, FAILED (or UNHEALTHY) with the failures of the last attempt, both by
            global rank; or STOPPED after `stop`, or if the rendezvous has no need of this machine.

        Raises:
            SignalException: A signal arrived. No worker is left.
            RuntimeError: It runs already, in another thread.
            RendezvousError: The rendezvous failed. RendezvousClosedError: of several machines, the workers of another
                one have failed, and there was no restart left.
            phalanx.events.UnknownDestinationError: ``event_log_handler`` of the spec names no destination, which is a
                KeyError; nothing has been started.
            Exception: What the hooks raise; if the last attempt could not be started, why not.
        """
        if not self._run_lock.acquire(blocking=False):
            msg = f"the agent of {self._worker_group.spec.role!r} runs already"
            raise RuntimeError(msg)
        try:
            return self._observed_run()
        finally:
            self._attempts = self._events = None
            self._run_lock.release()

    def stop(self, death_sig: signal.Signals | int = signal.SIGTERM, timeout: float | None = None) -> None:
        """Ask `run`, in another thread, to end the workers. Returns at once; `run` returns STOPPED.

        If nothing runs, nothing happens.

        Args:
            death_sig: The first signal.
            timeout: Seconds until SIGKILL; None: those of ``shutdown_timeout``.
        """
        attempts = self._attempts
        if attempts is not None:
            grace = self._shutdown_timeout if timeout is None else seconds("timeout", timeout, negative=True)
            attempts.ask_stop(death_sig, grace)

    # --- to be written by subclasses

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start every worker, or none; return an id for each, by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End all workers, and return when none is left."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return how the workers are. Does not wait."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End what is left of the workers, and give back what the agent holds."""

    # --- may be overridden, too

    @step
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents, and note in the group who this one is, and its workers' ranks."""
        spec = worker_group.spec
        began = clock.now()
        info = spec.rdzv_handler.next_rendezvous()
        if self._handler is not None and self._attempt and self._events is not None:  # the machines have decided on it
            why, delay, counted, reason = self._handler.why_restarted
            self._events.emit(
                agent_kinds.RestartDecided, self._attempt - 1, clock.now_ns(), delay=delay, counted=counted, cause=why,
                step=None, why="", reason=reason,
            )  # fmt: skip
        where = info.bootstrap_store_info
        met = clock.now()
        self._emit_status("RENDEZVOUS", met - began)
        workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
        self._emit_status("ASSIGN_WORKER_RANKS", clock.now() - met)
        worker_group.workers = workers
        worker_group.store = info.store
        worker_group.group_rank, worker_group.group_world_size = info.rank, info.world_size
        worker_group.master_addr = spec.master_addr or (where.master_addr if where else None)
        worker_group.master_port = spec.master_port or (where.master_port if where else None)

    @step
    def _assign_worker_ranks(
        self,
        store: Any,  # noqa: ARG002 - for overrides
        group_rank: int,
        group_world_size: int,
        spec: WorkerSpec,
    ) -> list[Worker]:
        """Return the workers of this machine with their ranks: on one machine, all ranks are the local one.

        Raises:
            RuntimeError: There are several machines, and the rendezvous does not say how many workers each has.
        """
        if self._handler is not None:
            members = self._handler.members
            first = sum(count for _, count, _ in members[:group_rank])
            first_in_role = sum(count for _, count, role in members[:group_rank] if role == spec.role)
            size = sum(count for _, count, _ in members)
            size_of_role = sum(count for _, count, role in members if role == spec.role)
            return [
                Worker(rank, first + rank, first_in_role + rank, size, size_of_role)
                for rank in range(spec.local_world_size)
            ]
        if group_world_size != 1:
            msg = f"rdzv_handler: it has brought {group_world_size} machines together; this agent is for one"
            raise RuntimeError(msg)
        size = spec.local_world_size
        return [Worker(rank, rank, rank, size, size) for rank in range(size)]

    @step
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Begin an attempt: the rendezvous, and the start of the workers."""
        self._rendezvous(worker_group)
        ids = self._start_workers(worker_group)
        for worker in worker_group.workers:
            worker.id = ids.get(worker.local_rank)
        worker_group.state = WorkerState.HEALTHY

    # --- ours

    def _poll_seconds(self) -> float | None:
        """How often `_monitor_workers` is called; None: only when the attempt's ``wake`` was."""
        return self._worker_group.spec.monitor_interval

    def _report_failure(self, end: AttemptEnd) -> None:
        """Tell the other machines how the attempt has failed that has ended."""
        if self._handler is not None:
            self._handler.tell_failure(end.error, rank=end.rank, exitcode=end.exitcode)

    def _machines_may_come(self) -> bool:
        return not isinstance(self._worker_group.spec.rdzv_handler, OneMachineRendezvous)

    def _end_of(self, state: str, result: RunResult) -> AttemptEnd:
        """What the restart policy, and the line that tells of it, are to know of an attempt's end."""
        if state != "failed":
            return AttemptEnd(state)
        failures = result.failures
        if not failures:
            return AttemptEnd(state, error=f"the workers are {result.state.value}")
        rank = min(failures, key=lambda rank: getattr(failures[rank], "first_key", 0))
        message = str(getattr(failures[rank], "message", failures[rank]))
        exitcode = getattr(failures[rank], "exitcode", None)
        return AttemptEnd(state, rank, exitcode, next(iter(message.splitlines()), ""))

    def _say(self, text: str) -> None:
        """Print a line between those of the workers."""
        stderr.mention(text)

    def _shut_down(self, death_signal: int | None = None, grace: float | None = None) -> None:
        """Call `_shutdown`, as it takes its arguments: a ``timeout`` it has not always had."""
        import inspect

        self._is_shut_down = True
        taken = inspect.signature(self._shutdown).parameters
        takes_timeout = "timeout" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())
        timeout = self._shutdown_timeout if grace is None else grace
        options: dict[str, Any] = {"timeout": timeout} if takes_timeout else {}
        signals: list[Any] = [] if death_signal is None else [check_signal("death_signal", death_signal)]
        self._shutdown(*signals, **options)

    def _observe(self, events: EventStream) -> None:
        """Have the events of a run observed that begins."""
        spec = self._worker_group.spec
        if spec.event_log_handler != "null":
            from phalanx.events import UnknownDestinationError, get_logging_handler

            try:
                get_logging_handler(spec.event_log_handler)
            except UnknownDestinationError as error:
                msg = f"event_log_handler: {error}"
                raise UnknownDestinationError(msg) from None
            events.subscribe("phalanx-status", StatusEvents(
                spec.event_log_handler, run_id=spec.rdzv_handler.get_run_id(), role=spec.role,
                entry_point=spec.get_entrypoint_name(), backend=spec.rdzv_handler.get_backend(),
                is_job=self._is_launched,
            ))  # fmt: skip
        events.subscribe("phalanx-measures", StatusMetrics(spec.role, self._policy.max_restarts))

    def _emit(self, kind: type[kinds.Event], **fields: Any) -> None:
        """Emit an event of this agent that happens now. Outside `run`, nobody observes it."""
        if self._events is not None:
            self._events.emit(kind, self._attempt, clock.now_ns(), **fields)

    def _emit_status(self, status: str, seconds: float, workers: tuple[Worker, ...] = ()) -> None:
        group, restarts = self._worker_group, self._policy.max_restarts - self._remaining_restarts
        self._emit(
            agent_kinds.AgentStatus, status=status, seconds=seconds, restarts=restarts, group_rank=group.group_rank,
            group_world_size=group.group_world_size, workers=workers,
        )  # fmt: skip

    def _observed_run(self) -> RunResult:
        """Run, with a stream of events that all hear to whom this agent tells something.

        A signal that comes when no worker is left raises SignalException once all is written and given back.
        """
        events = EventStream(is_held=self._forks)
        host_signals.acquire(self)
        error: BaseException | None = None
        result = None
        try:
            try:
                self._observe(events)
                self._events, self._attempt, self._run_began = events, 0, clock.now()
                result = self._run()
            except BaseException as raised:
                error = raised
                raise
            finally:
                with interrupts.deferred():
                    self._conclude(events, result, error)
            return result
        finally:
            host_signals.release(self)

    def _conclude(self, events: EventStream, result: RunResult | None, error: BaseException | None) -> None:
        """Give back what the run has held, and have all observers take how it has ended."""
        if self._events is not None:
            self._emit_end(result, error)
        late = events.close()
        if late:
            stderr.mention(f"phalanx: not all events were taken in {PATIENCE:g} s by {', '.join(late)}")

    def _emit_end(self, result: RunResult | None, error: BaseException | None) -> None:
        """Emit how the run has ended: with a result, or with an exception."""
        text = ""
        if error is not None:
            from traceback import format_exception

            text = "".join(format_exception(error))
        failures = {} if result is None else result.failures
        ranks = {worker.global_rank for worker in self._worker_group.workers}
        self._emit(
            agent_kinds.AgentEnded, state="RAISED" if result is None else result.state.value, error=text,
            failures=failures, restarts=self._policy.max_restarts - self._remaining_restarts,
            terminated=ranks - failures.keys() if result is not None and result.is_failed() else (),
        )  # fmt: skip
        took = clock.now() - self._run_began
        self._emit(agent_kinds.AgentStep, step="SimpleElasticAgent.run", seconds=took, failed=result is None)

    def _run(self) -> RunResult:
        def stop(number: signal.Signals) -> None:
            attempts.ask_stop(number, 0.0 if number == signal.SIGKILL else self._shutdown_timeout)

        attempts = Attempts(self._policy if self._handler is None else _ASKS_OTHERS, decides=self._handler is None)
        team = _HookTeam(self, attempts)
        self._is_shut_down = False
        self._remaining_restarts = self._policy.max_restarts
        spec = self._worker_group.spec
        if self._handler is not None:
            self._handler.announce(
                nproc=spec.local_world_size, role=spec.role, policy=self._policy, grace=self._shutdown_timeout,
                barrier=max(0.0, self._exit_barrier_timeout), owner=self._node,
            )  # fmt: skip
            self._handler.when_ended(lambda: self._wake())  # noqa: PLW0108 - it is another one in each attempt
        lost = None
        self._ending: Ending | None = None
        with Runner(team, attempts, events=self._events) as runner:
            self._attempts = attempts
            try:
                # On a signal, the workers are ended first, and at the next one killed.
                if (first := runner.carry_to_end(stop)) is not None:
                    raise first
                ending = self._ending = attempts.ending
            except RendezvousGracefulExitError:
                ending = None
            except RendezvousClosedError as closed:  # the machines have decided that no other attempt follows this one
                ending, lost = None, team.failed
                if self._handler is None or lost is None:
                    raise closed from team.failed_start
            finally:
                self._finish()
        state = ("stopped" if lost is None else "failed") if ending is None else ending.state
        group = self._worker_group
        group.state = WorkerState(state.upper())
        if lost is not None:
            return lost
        if state == "failed" and (error := team.start_error or self._final_error()) is not None:
            raise error
        return RunResult(WorkerState.STOPPED) if state == "stopped" or team.result is None else team.result

    def _finish(self) -> None:
        """Call `_shutdown` if it has not been called, and give back the port; a signal meanwhile has it kill."""
        try:
            if not self._is_shut_down:
                self._shut_down()
        except SignalException:
            self._shut_down(signal.SIGKILL, 0.0)
            raise
        finally:
            handler = self._worker_group.spec.rdzv_handler
            if isinstance(handler, OneMachineRendezvous):
                handler.give_back()
            stderr.finish()

    def _final_error(self) -> Exception | None:
        """What `run` raises in place of a result that is not complete."""
        return None


class _HookTeam(Team):
    """Starts, watches and stops the workers of an agent through its hooks.

    Args:
        agent: Whose hooks are called.
        attempts: What decides.

    Attributes:
        result: What the last attempt has led to; None: it has not ended, or was stopped.
        start_error: Why the last attempt could not be started; None if it was.
        failed: What the attempt before the last has led to, if it has failed.
        failed_start: Why the attempt before the last could not be started; None if it was.
    """

    def __init__(self, agent: SimpleElasticAgent, attempts: Attempts) -> None:
        self.poll_seconds = agent._poll_seconds()
        self.result: RunResult | None = None
        self.start_error: Exception | None = None
        self.failed: RunResult | None = None
        self.failed_start: Exception | None = None
        self._agent, self._handler, self._attempts = agent, agent._handler, attempts
        self._is_restart = self._stopped = False
        self._fatal: RendezvousError | None = None

    def begin(self, attempt: int) -> None:  # noqa: ARG002 - `start` is told as well
        """See `Team`."""
        self.failed, self.failed_start = self.result, self.start_error
        self.result, self.start_error, self._stopped, self._is_restart = None, None, False, False

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """See `Team`. What a rendezvous raises ends it all: `ended` raises it."""
        agent = self._agent
        agent._wake, agent._attempt = wake, attempt
        if self.failed is not None or self.failed_start is not None:
            agent._remaining_restarts = max(0, agent._remaining_restarts - 1)
        if attempt:
            agent._worker_group.state = WorkerState.STOPPED
        try:
            agent._initialize_workers(agent._worker_group)
            agent._emit_status("START", 0.0, tuple(agent._worker_group.workers))
        except RendezvousError as error:
            if attempt == 0:
                raise
            self._fatal = error
            wake()
        except Exception as error:
            self.start_error = error
            agent._report_failure(AttemptEnd("failed", error=one_line(error)))
            raise
        finally:
            if agent._events is not None:
                agent._events.begin()

    def ended(self) -> AttemptEnd | None:
        """See `Team`. Raises what the hooks raise."""
        if self._stopped:
            return AttemptEnd("stopped")
        if self._fatal is not None:
            raise self._fatal
        agent = self._agent
        group = agent.get_worker_group()
        result = agent._monitor_workers(group)
        check_type("_monitor_workers", result, RunResult)
        group.state = result.state
        if result.state == WorkerState.SUCCEEDED:
            if not self._all_succeeded():
                return None
            self.result = result
            return agent._end_of("succeeded", result)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            agent._report_failure(agent._end_of("failed", result))
            agent._stop_workers(group)
            self.result = result
            return agent._end_of("failed", result)
        if result.state != WorkerState.HEALTHY:
            msg = f"_monitor_workers: a group that runs, or has ended, cannot be {result.state.value}"
            raise RuntimeError(msg)
        has_told = self._handler is not None and self._handler.failed_here  # the others are being ended by that
        if agent._machines_may_come() and not has_told and group.spec.rdzv_handler.num_nodes_waiting() > 0:
            self._restart()
        return None

    def _all_succeeded(self) -> bool:
        """Return whether the workers of all machines have succeeded; if they will not, ask for another attempt."""
        verdict = True if self._handler is None else self._handler.tell_success(wait=False)
        if verdict is False:
            self._restart()
        return bool(verdict)

    def _restart(self) -> None:
        if not self._is_restart:
            self._is_restart = True
            why = "" if self._handler is None else self._handler.why_ended
            self._attempts.ask_restart(signal.SIGTERM, self._agent._shutdown_timeout, why or "another machine waits")

    def stop(self, death_signal: int | None, grace: float) -> None:
        """See `Team`. Returns when the hook has."""
        agent = self._agent
        group = agent.get_worker_group()
        if self._attempts.state == "RESTARTING":
            if agent._node is not None:
                agent._node.last_look.wait()
            agent._stop_workers(group)
        else:
            agent._shut_down(death_signal, grace)
        group.state = WorkerState.STOPPED
        self._stopped = True

    def say(self, text: str) -> None:
        """See `Team`."""
        self._agent._say(text)
