"""Decides on one machine when an attempt begins, and whether another one follows. Pure: `runner` carries it out.

Owns the life of an agent, as a table. Whether a failure is a RETRY or a GIVE_UP is decided by `restart_policy`. A pair
that is absent from the table is a mistake in the agent: `step` raises.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

from phalanx._base.text import seconds
from phalanx._events import agent_kinds
from phalanx._events.kinds import Event
from phalanx._group.arguments import check_signal
from phalanx._group.restart_policy import (
    AttemptEnd,
    Decision,
    RestartPolicy,
    decide,
    describe_failure,
    describe_restart,
)
from phalanx._run.runner import Announce, Decider, Emit, End, NoAttemptError, Raise, Start

STATES = {
    "NEW": "nothing has been started",
    "STARTING": "a group is being started",
    "RUNNING": "the group runs",
    "WAITING": "the group has failed and is gone; the delay before the next attempt runs",
    "RESTARTING": "the group is being stopped, for another attempt to follow",
    "STOPPING": "the group is being stopped, and no other follows",
    "SUCCEEDED": "every worker of the last attempt has succeeded",
    "FAILED": "the last attempt has failed, and no other follows",
    "STOPPED": "a stop was asked for, and no worker is left",
}

TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
"""The states in which no worker is left, and none is started any more."""

EVENTS = {
    "START": "the first attempt is asked for",
    "STARTED": "every worker is up",
    "ALL_SUCCEEDED": "the group is gone, and every worker has succeeded",
    "RETRY": "the group has failed or could not be started, none of it is left, and the policy allows another attempt",
    "GIVE_UP": "the group has failed or could not be started, and the policy allows no other attempt",
    "GONE": "the group that was to be stopped is gone",
    "DELAY_OVER": "the delay before the next attempt is over",
    "RESTART": "another attempt is asked for, though the group has not failed",
    "STOP": "an end is asked for",
}

ACTIONS = {
    "START_GROUP": "start the workers of the next attempt",
    "STOP_GROUP": "end the workers within the grace period that was asked for",
    "ARM_DELAY": "start the delay before the next attempt",
}

_START = ("STARTING", ("START_GROUP",))
_DELAY = ("WAITING", ("ARM_DELAY",))
_STOP = ("STOPPING", ("STOP_GROUP",))
_RESTART = ("RESTARTING", ("STOP_GROUP",))
_SUCCEED: tuple[str, tuple[str, ...]] = ("SUCCEEDED", ())
_FAIL: tuple[str, tuple[str, ...]] = ("FAILED", ())
_END: tuple[str, tuple[str, ...]] = ("STOPPED", ())

TABLE: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("NEW", "START"): _START,
    ("NEW", "RESTART"): ("NEW", ()),
    ("NEW", "STOP"): _END,
    ("STARTING", "STARTED"): ("RUNNING", ()),
    ("STARTING", "RETRY"): _DELAY,
    ("STARTING", "GIVE_UP"): _FAIL,
    ("STARTING", "RESTART"): _RESTART,
    ("STARTING", "STOP"): _STOP,
    ("RUNNING", "ALL_SUCCEEDED"): _SUCCEED,
    ("RUNNING", "RETRY"): _DELAY,
    ("RUNNING", "GIVE_UP"): _FAIL,
    ("RUNNING", "GONE"): _END,
    ("RUNNING", "RESTART"): _RESTART,
    ("RUNNING", "STOP"): _STOP,
    ("WAITING", "DELAY_OVER"): _START,
    ("WAITING", "RESTART"): ("WAITING", ()),
    ("WAITING", "STOP"): _END,
    ("RESTARTING", "ALL_SUCCEEDED"): _SUCCEED,
    ("RESTARTING", "GIVE_UP"): _FAIL,  # a worker has outlived SIGKILL
    ("RESTARTING", "GONE"): _START,
    ("RESTARTING", "RESTART"): ("RESTARTING", ()),
    ("RESTARTING", "STOP"): _STOP,
    ("STOPPING", "GIVE_UP"): _FAIL,  # it had failed before the stop, and no other attempt would have followed
    ("STOPPING", "GONE"): _END,
    ("STOPPING", "RESTART"): ("STOPPING", ()),
    ("STOPPING", "STOP"): _STOP,
    **{(state, request): (state, ()) for state in TERMINAL for request in ("RESTART", "STOP")},
}


def step(state: str, event: str) -> tuple[str, tuple[str, ...]]:
    """What follows when ``event`` happens to an agent in ``state``. Raises LookupError for a pair that cannot be.

    >>> step("RUNNING", "RETRY")
    ('WAITING', ('ARM_DELAY',))
    """
    try:
        return TABLE[state, event]
    except KeyError:
        msg = f"an agent that is {state} cannot see {event}"
        raise LookupError(msg) from None


class Ending(NamedTuple):
    """How it all ended.

    Attributes:
        state: "succeeded", "failed" or "stopped".
        ends: How each attempt ended, the latest last.
        why: Why no other attempt followed a failure; "": none was allowed in the first place.
        error: Why the last attempt could not be started, if it is not the only one; None: it was.
    """

    state: str
    ends: tuple[AttemptEnd, ...]
    why: str = ""
    error: Exception | None = None


class Attempts(Decider):
    """The attempts of one team on one machine, from the first start to the last end.

    Args:
        policy: When it is started again after a failure.
        decides: Whether this decides alone; False: other machines decide what follows, and emit it.

    Attributes:
        state: See `STATES`.
        number: The attempt that is being started, runs, or ran last, from 0 on; -1: there was none.

    >>> from phalanx._group.restart_policy import RestartPolicy
    >>> attempts = Attempts(RestartPolicy(1))
    >>> attempts.step("START", 0.0)[-1], attempts.step("STARTED", 1.0)[-1].fields
    (Start(number=0), {'state': 'RUNNING'})
    >>> failed = AttemptEnd("failed", 2, 1, "exited with code 1", ended=5.0)
    >>> attempts.gone(failed, None, 5.0)[-1].text.partition("; ")[2]
    'attempt 1 follows (restart 1 of at most 1)'
    >>> attempts.step("LATE", 5.0)[-1]
    Start(number=1)
    """

    def __init__(self, policy: RestartPolicy, *, decides: bool = True) -> None:
        self.state = "NEW"
        self.number = -1
        self._policy = policy
        self._decides = decides
        self._counted: list[float] = []  # when restarts were decided that count
        self._ends: list[AttemptEnd] = []
        self._why = ""
        self._error: Exception | None = None  # why the last attempt could not be started
        self._order = End(None, 0.0)  # that was asked for last
        self._asked_why = ""  # why another attempt was asked for

    # --- any thread

    @property
    def ending(self) -> Ending:
        """How it has ended, as far as it has."""
        return Ending(self.state.lower(), tuple(self._ends), self._why, self._error)

    def ask_stop(self, death_signal: int, grace: float) -> None:
        """Ask for an end: within ``grace`` seconds after ``death_signal``. Returns at once; the runner carries it out.

        Raises TypeError or ValueError: ``death_signal`` is no signal, or ``grace`` is no time; less than 0 counts as 0.
        """
        self._ask("STOP", death_signal, grace, "")

    def ask_restart(self, death_signal: int, grace: float, why: str) -> None:
        """Ask for another attempt, though none has failed; it does not count as a restart. Returns at once.

        Raises as `ask_stop`.
        """
        self._ask("RESTART", death_signal, grace, why)

    def _ask(self, event: str, death_signal: int, grace: float, why: str) -> None:
        order = End(int(check_signal("death_signal", death_signal)), seconds("grace", grace, negative=True))
        self.submit(self._asked, event, order, why)

    # --- the runner's thread

    @property
    def is_over(self) -> bool:
        """See `Decider`."""
        return self.state in TERMINAL

    def step(self, event: str, now: float) -> list[object]:  # noqa: ARG002 - as `Decider` has it
        """See `Decider`."""
        self.number -= event == "DROPPED"
        return self._step({"DROPPED": "GONE", "LATE": "DELAY_OVER"}.get(event, event))

    def gone(self, end: AttemptEnd, error: Exception | None, now: float) -> list[object]:
        """See `Decider`. If the very first start fails, that is raised, and all is over."""
        if error is not None and not self.number:
            return [*self._step("GIVE_UP"), Raise(error)]
        if self.state in ("STOPPING", "RESTARTING") and end.state == "not started":  # because it was to be stopped
            end = end._replace(state="stopped")
        self._ends.append(end)
        self._error = error
        effects: list[object] = [
            self._emit(
                agent_kinds.AttemptEnded, state=end.state, rank=end.rank, exitcode=end.exitcode, error=end.error,
                step=end.step, survivors=end.survivors, seconds=end.uptime,
            )
        ]  # fmt: skip
        if self.state == "STARTING" and end.state != "not started":  # a signal came while it was being started
            effects += self._step("STARTED")
        if end.state == "succeeded" and (self.state, "ALL_SUCCEEDED") in TABLE:
            return effects + self._step("ALL_SUCCEEDED")
        if end.survivors if self.state == "RESTARTING" else end.failed:
            return effects + self._follow(end, now, is_last=isinstance(error, NoAttemptError))
        if self.state == "RESTARTING" and self._decides:
            effects.append(self._emit(
                agent_kinds.RestartDecided, delay=0.0, counted=False, cause=f"attempt {self.number}: {self._asked_why}",
                step=end.step, why="", reason="request",
            ))  # fmt: skip
        return effects + self._step("GONE")

    def _follow(self, end: AttemptEnd, now: float, *, is_last: bool) -> list[object]:
        """Decide what follows a failure: nothing, if it ``is_last``."""
        chance = int.from_bytes(os.urandom(4)) / (1 << 32)  # `random` would take 3 ms to import
        decision = decide(self._policy, self._ends, self._counted, now, chance)
        decision = Decision(retries=False) if is_last else decision
        failed = describe_failure(end)
        if decision.retries and self.state == "STOPPING":  # not this failure ends it, but the stop
            return [Announce(f"{failed}; it is stopped, and no other attempt follows"), *self._step("GONE")]
        if not decision.retries:
            self._why = decision.why
            effects = [self._emit(agent_kinds.GaveUp, why=decision.why), *self._step("GIVE_UP")]
            return effects + [Announce(f"{failed}; giving up: {decision.why}")] * bool(decision.why)
        self._counted += [now] * decision.counted
        count = self._policy.describe_count([now - moment for moment in self._counted], counted=decision.counted)
        follows, effects = "the machines decide what follows", []
        if self._decides:
            follows = describe_restart(self.number + 1, decision.delay, count)
            effects.append(self._emit(
                agent_kinds.RestartDecided, delay=decision.delay, counted=decision.counted,
                cause=f"attempt {self.number}: {end.describe()}", step=end.step, why=decision.why,
                reason="hang" if end.is_hang else "failure",
            ))  # fmt: skip
        effects += self._step("RETRY")
        self.wake = now + decision.delay
        return [*effects, Announce(f"{', '.join(filter(None, (failed, decision.why)))}; {follows}")]

    def _asked(self, event: str, order: End, why: str, _now: float) -> list[object]:
        self._order = order
        self._asked_why = why if event == "RESTART" else self._asked_why
        is_announced = event == "RESTART" and self.state == "RUNNING"
        return [Announce(f"ending attempt {self.number}: {why}")] * is_announced + self._step(event)

    def _step(self, event: str) -> list[object]:
        """Take the step of the table that ``event`` leads to."""
        self.state, actions = step(self.state, event)
        if self.state != "WAITING":
            self.wake = math.inf
        self.number += "START_GROUP" in actions
        started = [Start(self.number)] * ("START_GROUP" in actions)
        return [
            self._emit(agent_kinds.AgentState, state=self.state),
            *started,
            *[self._order] * ("STOP_GROUP" in actions),
        ]

    def _emit(self, kind: type[Event], **fields: Any) -> Emit:
        return Emit(kind, self.number, fields)
