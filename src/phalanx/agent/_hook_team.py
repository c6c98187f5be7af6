"""An agent's workers as a team of `attempts`: each step of an attempt is a call of one of the agent's hooks."""

# ruff: noqa: SLF001 - the hooks have the names that torch gave them

from __future__ import annotations

from phalanx._base.stderr import mention
from phalanx._base.text import one_line
from phalanx._group.restart_policy import AttemptEnd, describe_restart
from phalanx._run.runner import Team
from phalanx.agent._spec import RunResult, WorkerState, check_type
from phalanx.rendezvous import ManyMachinesRendezvous, RendezvousError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from phalanx.agent._spec import WorkerGroup

    class Hooks(Protocol):
        """What a `SimpleElasticAgent` has for this."""

        _stopping: bool
        _handler: ManyMachinesRendezvous | None

        def get_worker_group(self) -> WorkerGroup: ...
        def _begin_attempt(self, attempt: int, wake: Callable[[], None], *, after_failure: bool) -> None: ...
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult: ...
        def _report_failure(self, end: AttemptEnd) -> None: ...
        def _await_stacks(self) -> None: ...
        def _stop_workers(self, worker_group: WorkerGroup) -> None: ...
        def _shut_down(self, death_signal: int | None, grace: float | None) -> None: ...
        def _end_of(self, state: str, result: RunResult) -> AttemptEnd: ...
        def _say(self, text: str) -> bool: ...


_FAILED = (WorkerState.FAILED, WorkerState.UNHEALTHY)


class HookTeam(Team):
    """Starts, watches and stops the workers of an agent through its hooks.

    Args:
        agent: Whose hooks are called.
        poll_seconds: See `Team`.
        machines_may_come: Whether the rendezvous is asked if another machine waits.
        ask_restart: Asks for another attempt, though none has failed. Given why.

    Attributes:
        result: What the last attempt has led to; None: it has not ended, or was stopped.
        start_error: Why the last attempt could not be started; None if it was.
        failed: What the attempt before the last has led to, if it has failed.
        failed_start: Why the attempt before the last could not be started; None if it was.
    """

    def __init__(
        self,
        agent: Hooks,
        poll_seconds: float | None,
        *,
        machines_may_come: bool,
        ask_restart: Callable[[str], None],
    ) -> None:
        self.poll_seconds = poll_seconds
        self.result: RunResult | None = None
        self.start_error: Exception | None = None
        self.failed: RunResult | None = None
        self.failed_start: Exception | None = None
        self._handler = handler = agent._handler
        self.decides = handler is None
        self.describe = describe_restart if handler is None else lambda *_: "the machines decide what follows"
        self._agent = agent
        self._machines_may_come = machines_may_come
        self._ask_restart = ask_restart
        self._after_failure = False
        self._is_restart = False
        self._stopped = False
        self._fatal: RendezvousError | None = None

    def begin(self, attempt: int) -> None:  # noqa: ARG002 - `start` is told as well
        """See `Team`."""
        self._after_failure = self.result is not None or self.start_error is not None
        self.failed, self.failed_start = self.result, self.start_error
        self.result, self.start_error, self._stopped, self._is_restart = None, None, False, False

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """See `Team`. What a rendezvous raises ends it all: `ended` raises it."""
        try:
            self._agent._begin_attempt(attempt, wake, after_failure=self._after_failure)
        except RendezvousError as error:
            if attempt == 0:
                raise
            self._fatal = error
            wake()
        except Exception as error:
            self.start_error = error
            self._agent._report_failure(AttemptEnd("failed", error=one_line(error)))
            raise

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
        if result.state in _FAILED:
            agent._report_failure(agent._end_of("failed", result))
            agent._stop_workers(group)
            self.result = result
            return agent._end_of("failed", result)
        if result.state != WorkerState.HEALTHY:
            msg = f"_monitor_workers: a group that runs, or has ended, cannot be {result.state.value}"
            raise RuntimeError(msg)
        has_told = self._handler is not None and self._handler.failed_here  # the others are being ended by that
        if self._machines_may_come and not has_told and group.spec.rdzv_handler.num_nodes_waiting() > 0:
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
            self._ask_restart(why or "another machine waits")

    def stop(self, death_signal: int, grace: float) -> None:
        """See `Team`. Returns when the hook has."""
        group = self._agent.get_worker_group()
        if self._is_restart and not self._agent._stopping:
            self._agent._await_stacks()
            self._agent._stop_workers(group)
        else:
            self._agent._shut_down(death_signal, grace)
        group.state = WorkerState.STOPPED
        self._stopped = True

    def say(self, text: str) -> None:
        """See `Team`."""
        if not self._agent._say(text):
            mention(text)
