"""Starts a group, waits for its end, and starts it again for as long as the restart policy allows.

Carries out the table of `life`. Owns when an attempt begins, and the line that says why. What an attempt consists of is
a `Team`'s business; whether a failure is followed by another attempt is `restart_policy`'s.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque

from phalanx._agent import life
from phalanx._agent.attempt_end import AttemptEnd
from phalanx._agent.restart_policy import Decision, RestartPolicy, decide
from phalanx._base import clock
from phalanx._base.background import SerialExecutor
from phalanx._base.clock import format_duration, format_seconds
from phalanx._base.frozen import Value
from phalanx._base.latch import Latch
from phalanx._engine import host_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Self

_MINUTE = 60
_FLUSH = 5.0  # seconds that `close` waits for an observer


class Team(ABC):
    """What is started anew in each attempt. Its methods are called by the thread that calls `Attempts.run`.

    Attributes:
        poll_seconds: How often `ended` is asked, at least; None: only when `Attempts.wake` was called.
    """

    poll_seconds: float | None = None

    @abstractmethod
    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """Start every worker of an attempt, or none. Raises what went wrong.

        ``wake`` is to be called when `ended` may have something to say. Any thread may call it; it does not raise.
        """

    @abstractmethod
    def ended(self) -> AttemptEnd | None:
        """Return how the attempt ended, once no process of it is left; None before that. Does not wait."""

    @abstractmethod
    def stop(self, death_signal: int, grace: float) -> None:
        """End the workers: send ``death_signal``, and SIGKILL ``grace`` seconds later. `ended` tells when.

        It may be called again, to shorten the grace.
        """

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line of ours, after the lines of an attempt that has ended. Does not wait."""


class Ending(Value):
    """How it all ended.

    Attributes:
        state: "succeeded", "failed" or "stopped".
        ends: How each attempt ended, the latest last.
        why: Why no other attempt followed a failure; "": none was allowed in the first place.
    """

    __slots__ = ("state", "ends", "why")  # noqa: RUF023 - the order is that of the arguments

    state: str
    ends: tuple[AttemptEnd, ...]
    why: str

    def __init__(self, state: str, ends: tuple[AttemptEnd, ...], why: str = "") -> None:
        self._store(state=state, ends=ends, why=why)


class Attempts:
    """The attempts of one team, from the first start to the last end. A context manager, which `close`s it.

    Args:
        team: What is started.
        policy: When it is started again after a failure.
        signals: Whether signals to this process raise `SignalException` out of `run`, between two attempts, too.
        observe: Called with the name of each event and its facts, in order, on a thread of its own: it holds up nobody.
            ``agent.state`` (state, attempt), ``attempt.ended`` (the fields of `AttemptEnd`), ``restart.decided``
            (attempt, delay, counted, why) and ``agent.gave_up`` (attempt, why); moments are monotonic seconds.

    >>> from phalanx._agent.restart_policy import RestartPolicy
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
    ('failed', '1 restart, and no more')
    """

    def __init__(
        self,
        team: Team,
        policy: RestartPolicy,
        *,
        signals: bool = True,
        observe: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._team = team
        self._policy = policy
        self._signals = signals
        self._observe = observe
        self._observing = SerialExecutor("phalanx-events")
        self._state = "NEW"
        self._number = -1  # of the attempt that runs, or ran last
        self._began = 0.0
        self._started: list[float] = []  # when restarts were decided that count
        self._ends: list[AttemptEnd] = []
        self._why = ""
        self._until = 0.0  # of the delay
        self._asked: deque[tuple[str, int, float, str]] = deque()  # by any thread: event, signal, grace, why
        self._order = 0, 0.0  # the signal and the grace of the stop
        self._bell = Latch()

    # --- any thread

    @property
    def state(self) -> str:
        """The state, see `life.STATES`."""
        return self._state

    @property
    def number(self) -> int:
        """The attempt that runs, or ran last, from 0 on; -1: none was started."""
        return self._number

    @property
    def ends(self) -> list[AttemptEnd]:
        """How the attempts have ended that have."""
        return list(self._ends)

    def ask_stop(self, death_signal: int, grace: float) -> None:
        """Ask for an end: within ``grace`` seconds after ``death_signal``. Returns at once; `run` carries it out."""
        self._asked.append(("STOP", int(death_signal), float(grace), ""))
        self.wake()

    def ask_restart(self, death_signal: int, grace: float, why: str) -> None:
        """Ask for another attempt, though none has failed; it does not count as a restart. Returns at once."""
        self._asked.append(("RESTART", int(death_signal), float(grace), why))
        self.wake()

    def wake(self) -> None:
        """Have `run` look at once at what has become of the team."""
        self._bell.open()

    # --- one thread

    def run(self) -> Ending:
        """Carry on until no worker is left and none will be started, and return how it ended.

        When an exception leaves it (SignalException: a signal arrived; or what the team raises), nothing has been
        stopped by that: call `ask_stop`, and `run` again. If the very first start fails, that is raised, and all is
        over.
        """
        if self._state == "NEW" and self._signals:
            host_signals.acquire(self)
        while self._state not in life.TERMINAL:
            self._turn()
        return Ending(self._state.lower(), tuple(self._ends), self._why)

    def close(self) -> None:
        """Release the signals, and wait for the observer, 5 s at most. `run` is not called again."""
        host_signals.release(self)
        self._observing.drain(_FLUSH)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _turn(self) -> None:
        """Take the next event, or wait for one."""
        self._bell = Latch()  # before the looks: what changes after them opens it
        if self._asked:
            event, number, grace, why = self._asked.popleft()
            if event == "STOP" or self._state in ("STARTING", "RUNNING"):
                self._order = number, grace
            if event == "RESTART" and self._state == "RUNNING":
                self._say(f"restarting attempt {self._number + 1}: {why}")
            self._see(event)
            return
        wait = self._team.poll_seconds
        if self._state == "NEW":
            self._see("START")
            return
        if self._state == "WAITING":
            wait = self._until - clock.now()
            if wait <= 0:
                self._see("DELAY_OVER")
                return
        elif (end := self._team.ended()) is not None:
            self._note_end(end)
            return
        with host_signals.delivering():
            self._bell.wait(-1 if wait is None else wait)

    def _see(self, event: str) -> None:
        """Take the step of the table that ``event`` leads to."""
        self._state, actions = life.step(self._state, event)
        self._tell("agent.state", state=self._state, attempt=self._number)
        for action in actions:
            _ACTIONS[action](self)

    def _start_group(self) -> None:
        self._number += 1
        self._began = clock.now()
        try:
            self._team.start(self._number, self.wake)
        except host_signals.SignalException:  # the group is open, or none of it is left: `ended` will tell
            raise
        except Exception as error:
            if self._number == 0:
                self._see("GIVE_UP")
                raise
            self._note_end(AttemptEnd("not started", error=str(error) or repr(error)))
            return
        self._see("STARTED")

    def _stop_group(self) -> None:
        self._team.stop(*self._order)

    def _arm_delay(self) -> None:
        self._until = clock.now() + self._decision.delay

    def _note_end(self, end: AttemptEnd) -> None:
        """Note how the attempt ended, and see what follows."""
        now = clock.now()
        end = end.replace(number=self._number, began=self._began, ended=now)
        self._ends.append(end)
        self._tell("attempt.ended", **end.__getstate__())
        if self._state == "STARTING" and end.state != "not started":  # a signal came while it was being started
            self._see("STARTED")
        if end.state == "succeeded" and (self._state, "ALL_SUCCEEDED") in life.TABLE:
            self._see("ALL_SUCCEEDED")
        elif self._state in ("STOPPING", "RESTARTING") or not end.failed:
            self._see("GONE")
        else:
            self._follow(end, now)

    def _follow(self, end: AttemptEnd, now: float) -> None:
        """Decide what follows a failure."""
        chance = int.from_bytes(os.urandom(4)) / (1 << 32)  # `random` would take 3 ms to import
        decision = decide(self._policy, self._ends, self._started, now, chance)
        self._decision = decision
        number = self._number
        failed = f"attempt {number + 1}{self._policy.attempts} failed after {format_duration(end.uptime)}: "
        failed += end.describe()
        if decision.retries:
            if decision.counted:
                self._started.append(now)
            self._tell(
                "restart.decided", attempt=number, delay=decision.delay, counted=decision.counted, why=decision.why
            )
            delay = format_duration(decision.delay) if decision.delay >= _MINUTE else format_seconds(decision.delay)
            soon = f"restarting in {delay}" if decision.delay else "restarting"
            self._say(", ".join(filter(None, (failed, decision.why))) + f"; {soon}")
            self._see("RETRY")
            return
        self._why = decision.why
        self._tell("agent.gave_up", attempt=number, why=decision.why)
        if decision.why:
            self._say(f"{failed}; giving up: {decision.why}")
        self._see("GIVE_UP")

    def _say(self, text: str) -> None:
        self._team.say(f"phalanx: {text}")

    def _tell(self, name: str, **facts: Any) -> None:
        observe = self._observe
        if observe is not None:
            self._observing.submit(lambda: observe(name, facts))

    _decision = Decision(retries=False)


_ACTIONS: dict[str, Callable[[Attempts], None]] = {
    "START_GROUP": Attempts._start_group,
    "STOP_GROUP": Attempts._stop_group,
    "ARM_DELAY": Attempts._arm_delay,
}
