"""The runner of one machine: starts a group, waits for its end, and starts it again as the restart policy allows.

Owns the life of an agent, as a table, and carries it out: when an attempt begins, and the line with the reason. Whether
a failure is a RETRY or a GIVE_UP is decided by `restart_policy`. A pair that is absent from the table is a mistake in
the agent: `step` raises.
"""

from __future__ import annotations

import math
import os
from typing import Any

from phalanx._base import clock, interrupts
from phalanx._base.text import one_line, seconds
from phalanx._events import agent_kinds, kinds
from phalanx._events.stream import EventStream
from phalanx._group.arguments import check_signal
from phalanx._group.restart_policy import AttemptEnd, Decision, Ending, RestartPolicy, decide, describe_failure
from phalanx._run.runner import NoAttemptError, Runner, Step, Team

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


class Attempts(Runner):
    """The attempts of one team on one machine, from the first start to the last end.

    Args:
        team: What is started.
        policy: When it is started again after a failure.
        signals: Whether signals to this process raise `SignalException` out of `run`, between two attempts, too.
        events: Where it emits what it does: `AgentState`, `AttemptEnded`, `RestartDecided` and `GaveUp`.

    >>> from phalanx._group.restart_policy import RestartPolicy
    >>> from phalanx._run.runner import Team
    >>> class Fails(Team):
    ...     def start(self, attempt, wake): print("attempt", attempt)
    ...     def ended(self): return AttemptEnd("failed", rank=0, exitcode=1, error="exited with code 1")
    ...     def stop(self, death_signal, grace): pass
    ...     def say(self, text): pass
    >>> with Attempts(Fails(), RestartPolicy(1)) as attempts:
    ...     ending = attempts.run()
    attempt 0
    attempt 1
    >>> ending.state, ending.why
    ('failed', '1 of 1 restart used')
    """

    def __init__(
        self,
        team: Team,
        policy: RestartPolicy,
        *,
        signals: bool = True,
        events: EventStream | None = None,
    ) -> None:
        super().__init__(team, signals=signals)
        self._policy = policy
        self._events = events
        self._state = "NEW"
        self._began = 0.0
        self._started: list[float] = []  # when restarts were decided that count
        self._ends: list[AttemptEnd] = []
        self._why = ""
        self._decision = Decision(retries=False)
        self._until = 0.0  # of the delay
        self._order = 0, 0.0  # the signal and the grace of the stop

    # --- any thread

    @property
    def state(self) -> str:
        """The state, see `STATES`."""
        return self._state

    @property
    def number(self) -> int:
        """The attempt that is being started, runs, or ran last, from 0 on; -1: there was none."""
        return self._number

    @property
    def ends(self) -> list[AttemptEnd]:
        """How the attempts have ended that have."""
        return list(self._ends)

    @property
    def ending(self) -> Ending | None:
        """How it all ended; None: it has not."""
        over = self._state in TERMINAL
        return Ending(self._state.lower(), tuple(self._ends), self._why) if over else None

    def ask_stop(self, death_signal: int, grace: float) -> None:
        """Ask for an end: within ``grace`` seconds after ``death_signal``. Returns at once; `run` carries it out.

        Raises TypeError or ValueError: ``death_signal`` is no signal, or ``grace`` is no time; less than 0 counts as 0.
        """
        self._ask("STOP", death_signal, grace, "")

    def ask_restart(self, death_signal: int, grace: float, why: str) -> None:
        """Ask for another attempt, though none has failed; it does not count as a restart. Returns at once.

        Raises as `ask_stop`.
        """
        self._ask("RESTART", death_signal, grace, why)

    def _ask(self, event: str, death_signal: int, grace: float, why: str) -> None:
        number = int(check_signal("death_signal", death_signal))
        self._tell(self._take_request, event, number, seconds("grace", grace, negative=True), why)

    # --- one thread

    def run(self) -> Ending:
        """Carry on until no worker is left and none will be started, and return how it ended. See `carry`.

        If the very first start fails, that is raised, and all is over.
        """
        self.carry()
        ending = self.ending
        assert ending is not None
        return ending

    @property
    def is_over(self) -> bool:
        """See `Runner`."""
        return self._state in TERMINAL

    def _begin(self) -> None:
        while self._told:  # it may have been stopped before
            self._take_told()
        if self._state == "NEW":
            self._see("START")

    def _awaits_up(self) -> bool:
        return self._state == "STARTING"

    def _up(self) -> None:
        self._see("STARTED")

    def _next(self) -> float:
        return self._until if self._state == "WAITING" else math.inf

    def _tick(self) -> None:
        self._see("DELAY_OVER")

    def _take_request(self, event: str, number: int, grace: float, why: str) -> None:
        # Of two orders that nobody has carried out, the one with less time holds.
        if "STOP_GROUP" in step(self._state, event)[1] and (not self._ends_soon() or grace <= self._order[1]):
            self._order = number, grace
        if event == "RESTART" and self._state == "RUNNING":
            self._say(f"ending attempt {self._number}: {why}")
        self._see(event)

    def _ends_soon(self) -> bool:
        return any(step.kind == "end" for step in self._due)

    def _see(self, event: str) -> None:
        """Take the step of the table that ``event`` leads to."""
        with interrupts.deferred():
            self._state, actions = step(self._state, event)
            if "START_GROUP" in actions:
                self._number += 1
            self._emit(agent_kinds.AgentState, state=self._state)
            for action in actions:
                if action == "ARM_DELAY":
                    self._until = clock.now() + self._decision.delay
                elif action == "START_GROUP":
                    self._due.append(Step("start", self._note_begin, self._number))
                elif not self._under_way:  # that attempt's start has not begun
                    self._due.clear()
                    self._number -= 1
                    self._see("GONE")
                elif not self._ends_soon():
                    self._due.append(Step("end", lambda: self._team.stop(*self._order)))

    def _note_begin(self) -> None:
        self._began = clock.now()

    def _not_started(self, error: Exception) -> None:
        if self._number:
            end = AttemptEnd("not started", error=one_line(error))
            with interrupts.deferred():
                self._under_way = False
                self._note_end(end, is_last=isinstance(error, NoAttemptError))
            return
        with interrupts.deferred():
            self._under_way = False
            self._see("GIVE_UP")
        raise error

    def _gone(self, end: AttemptEnd) -> None:
        self._note_end(end)

    def _note_end(self, end: AttemptEnd, *, is_last: bool = False) -> None:
        """Note how the attempt ended, and see what follows: nothing, if it ``is_last``."""
        stopping = self._state in ("STOPPING", "RESTARTING")
        if stopping and end.state == "not started":  # because it was to be stopped
            end = end._replace(state="stopped")
        now = clock.now()
        end = end._replace(number=self._number, began=max(self._began, end.began), ended=now)
        self._ends.append(end)
        self._emit(
            agent_kinds.AttemptEnded, state=end.state, rank=end.rank, exitcode=end.exitcode, error=end.error,
            step=end.step, survivors=end.survivors, seconds=end.uptime,
        )  # fmt: skip
        if self._state == "STARTING" and end.state != "not started":  # a signal came while it was being started
            self._see("STARTED")
        if end.state == "succeeded" and (self._state, "ALL_SUCCEEDED") in TABLE:
            self._see("ALL_SUCCEEDED")
        elif end.survivors if self._state == "RESTARTING" else end.failed:
            self._follow(end, now, is_last=is_last)
        else:
            self._see("GONE")

    def _follow(self, end: AttemptEnd, now: float, *, is_last: bool) -> None:
        """Decide what follows a failure."""
        chance = int.from_bytes(os.urandom(4)) / (1 << 32)  # `random` would take 3 ms to import
        decision = decide(self._policy, self._ends, self._started, now, chance)
        self._decision = decision = Decision(retries=False) if is_last else decision
        failed = describe_failure(end)
        if decision.retries and self._state == "STOPPING":  # not this failure ends it, but the stop
            self._say(f"{failed}; it is stopped, and no other attempt follows")
            self._see("GONE")
            return
        if decision.retries:
            self._started += [now] * decision.counted
            if self._team.decides:
                self._emit(
                    agent_kinds.RestartDecided, delay=decision.delay, counted=decision.counted,
                    cause=f"attempt {self._number}: {end.describe()}", step=end.step, why=decision.why,
                )  # fmt: skip
            self._see("RETRY")
            ages = [now - moment for moment in self._started]
            count = self._policy.describe_count(ages, counted=decision.counted)
            follows = self._team.describe(self._number + 1, decision.delay, count)
            self._say(f"{', '.join(filter(None, (failed, decision.why)))}; {follows}")
            return
        self._why = decision.why
        self._emit(agent_kinds.GaveUp, why=decision.why)
        self._see("GIVE_UP")
        if decision.why:
            self._say(f"{failed}; giving up: {decision.why}")

    def _say(self, text: str) -> None:
        self._team.say(f"phalanx: {text}")

    def _emit(self, kind: type[kinds.Event], **fields: Any) -> None:
        if self._events is not None:
            self._events.emit(kind, self._number, clock.now_ns(), **fields)
