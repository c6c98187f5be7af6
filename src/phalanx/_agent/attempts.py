"""Starts a group, waits for its end, and starts it again for as long as the restart policy allows.

Carries out the table of `life`. Owns when an attempt begins, and the line that says why. What an attempt consists of is
a `Team`'s business; whether a failure is followed by another attempt is `restart_policy`'s.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque

from phalanx._agent import life
from phalanx._agent.attempt_end import AttemptEnd, Ending
from phalanx._agent.history import describe_failure, describe_restart
from phalanx._agent.restart_policy import Decision, RestartPolicy, decide
from phalanx._base import clock, interrupts
from phalanx._base.durations import seconds
from phalanx._base.latch import Latch
from phalanx._base.one_line import one_line
from phalanx._engine import host_signals
from phalanx._events import agent_kinds, kinds
from phalanx._group.arguments import check_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Self

    from phalanx._events.stream import EventStream


class NoAttemptError(Exception):
    """Raised by `Team.start` or `Team.is_up`: this attempt cannot be started, and none follows, whatever the policy."""


class Team(ABC):
    """What is started anew in each attempt. Its methods are called by the thread that calls `Attempts.run`.

    Attributes:
        poll_seconds: How often `ended` is asked, at least; None: only when `Attempts.wake` was called.
        describe: Returns what is said of the attempt that follows, see `describe_restart`.
    """

    poll_seconds: float | None = None
    describe: Callable[[int, float, str], str] = staticmethod(describe_restart)

    def begin(self, attempt: int) -> None:  # noqa: B027 - there may be nothing to forget
        """Forget the attempt before: from now on, `ended` is asked about this one. `start` follows, or a stop.

        No signal interrupts it. Does not wait, and does not raise.
        """

    @abstractmethod
    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """Start every worker of an attempt, or none. Raises what went wrong.

        A signal may interrupt it: what has been started by then is for `ended` and `stop`.

        ``wake`` is to be called when `ended` or `is_up` may have something to say. Any thread may; it does not raise.
        """

    def is_up(self) -> bool:
        """Return whether every worker runs, after a `start` that has not waited for that. Raises as `start`."""
        return True

    @abstractmethod
    def ended(self) -> AttemptEnd | None:
        """Return how the attempt ended, once no process of it is left; None before that. Does not wait.

        "stopped" if it was never started. It may be asked again, and returns the same. A ``began`` of its own holds.
        """

    @abstractmethod
    def stop(self, death_signal: int, grace: float) -> None:
        """End the workers: send ``death_signal``, and SIGKILL ``grace`` seconds later. `ended` tells when.

        It may be called again, to shorten the grace.
        """

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line of ours, after the lines of an attempt that has ended. Does not wait."""


class Attempts:
    """The attempts of one team, from the first start to the last end. A context manager, which `close`s it.

    Args:
        team: What is started.
        policy: When it is started again after a failure.
        signals: Whether signals to this process raise `SignalException` out of `run`, between two attempts, too.
        events: Where it emits what it does: `AgentState`, `AttemptEnded`, `RestartDecided` and `GaveUp`.

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
        events: EventStream | None = None,
    ) -> None:
        self._team = team
        self._policy = policy
        self._signals = signals
        self._events = events
        self._owner = os.getpid()
        self._entered = False  # whether `run` has been called
        self._state = "NEW"
        self._due = ""  # the action that the last step has left to be done, where a signal may interrupt it
        self._number = -1  # of the attempt that runs, or ran last
        self._under_way = False  # whether that has begun, and its end is not noted
        self._ordered = False  # whether its start has been ordered
        self._began = 0.0
        self._started: list[float] = []  # when restarts were decided that count
        self._ends: list[AttemptEnd] = []
        self._why = ""
        self._decision = Decision(retries=False)
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
        """The attempt that is being started, runs, or ran last, from 0 on; -1: there was none."""
        return self._number

    @property
    def ends(self) -> list[AttemptEnd]:
        """How the attempts have ended that have."""
        return list(self._ends)

    @property
    def ending(self) -> Ending | None:
        """How it all ended; None: it has not."""
        over = self._state in life.TERMINAL
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
        self._asked.append((event, number, seconds("grace", grace, negative=True), why))
        self.wake()

    def wake(self) -> None:
        """Have `run` look at once at what has become of the team."""
        self._bell.open()

    # --- one thread

    def run(self) -> Ending:
        """Carry on until no worker is left and none will be started, and return how it ended.

        When an exception leaves it (SignalException: a signal arrived; or what the team raises), nothing has been
        stopped by that: call `ask_stop`, and `run` again. If the very first start fails, that is raised, and all is
        over. Raises RuntimeError in a fork of the process that made this.
        """
        again, self._entered = self._entered, True
        if again:  # what left an earlier call has been delivered, and is not raised again
            host_signals.forget_raised()
        if self._owner != os.getpid():
            msg = "the attempts are not this process's: it is a fork of the one that makes them"
            raise RuntimeError(msg)
        if self._state == "NEW" and self._signals:
            host_signals.acquire(self)
        while (ending := self.ending) is None:
            self._turn()
        return ending

    def close(self) -> None:
        """Release the signals. `run` is not called again."""
        if self._owner == os.getpid():
            host_signals.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # A signal may raise between any two lines of these. What belongs together is done with signals deferred; what may
    # take long (the team's start, stop and look, the waits) is not, and is left in `_due` until it is done.

    def _turn(self) -> None:
        """Take one step, or wait for what leads to one."""
        self._bell = Latch()  # before the looks: what changes after them opens it
        seconds = self._step()
        if seconds is not None:
            self._wait(None if seconds == math.inf else seconds)

    def _step(self) -> float | None:
        """Take one step; or return for how many seconds none can be taken unless `wake` is called, inf: for ever."""
        if self._asked:
            self._take_request()
        elif self._due == "START_GROUP":
            self._start_group()
        elif self._due:
            self._stop_group()
        elif self._state == "NEW":
            self._see("START")
        elif self._state == "WAITING":
            left = self._until - clock.now()
            if left > 0:
                return left
            self._see("DELAY_OVER")
        elif not self._under_way:
            self._skip_start()
        elif not (self._ordered and self._state == "STARTING" and self._see_up()):
            end = self._team.ended()
            if end is None:
                return math.inf if self._team.poll_seconds is None else self._team.poll_seconds
            self._note_end(end)
        return None

    def _wait(self, most: float | None) -> None:
        """Wait until `wake` is called, for ``most`` seconds; None: without limit."""
        with host_signals.delivering():
            self._bell.wait(-1 if most is None else most)

    def _take_request(self) -> None:
        with interrupts.deferred():
            event, number, grace, why = self._asked.popleft()
            stops = "STOP_GROUP" in life.step(self._state, event)[1]
            # Of two orders that nobody has carried out, the one with less time holds.
            if stops and (self._due != "STOP_GROUP" or grace <= self._order[1]):
                self._order = number, grace
            if event == "RESTART" and self._state == "RUNNING":
                self._say(f"ending attempt {self._number}: {why}")
            self._see(event)

    def _see(self, event: str) -> None:
        """Take the step of the table that ``event`` leads to."""
        with interrupts.deferred():
            self._state, actions = life.step(self._state, event)
            if "START_GROUP" in actions:
                self._number += 1
            self._emit(agent_kinds.AgentState, state=self._state)
            for action in actions:
                if action == "ARM_DELAY":
                    self._until = clock.now() + self._decision.delay
                else:
                    self._due = action

    def _start_group(self) -> None:
        with interrupts.deferred():
            self._due, self._under_way, self._ordered = "", True, False
            self._began = clock.now()
            self._team.begin(self._number)
        try:
            self._team.start(self._number, self.wake)
        except host_signals.SignalException:  # the group is open, or none of it is left: `ended` will tell
            raise
        except Exception as error:
            if self._note_failed_start(error):
                raise
        else:
            self._ordered = True
            self._see_up()

    def _see_up(self) -> bool:
        """See that every worker runs, or that none does. Returns whether either is so."""
        try:
            is_up = self._team.is_up()
        except host_signals.SignalException:
            raise
        except Exception as error:
            if self._note_failed_start(error):
                raise
            return True
        if is_up:
            self._see("STARTED")
        return is_up

    def _note_failed_start(self, error: Exception) -> bool:
        """See that a start has failed. Returns whether it was the first: then all is over."""
        if self._number:
            self._note_end(AttemptEnd("not started", error=one_line(error)), is_last=isinstance(error, NoAttemptError))
            return False
        self._under_way = False
        self._see("GIVE_UP")
        return True

    def _skip_start(self) -> None:
        """See the end of an attempt that was to be stopped before its start had begun."""
        with interrupts.deferred():
            self._number -= 1
            self._see("GONE")

    def _stop_group(self) -> None:
        if self._under_way:
            self._team.stop(*self._order)
        self._due = ""

    def _note_end(self, end: AttemptEnd, *, is_last: bool = False) -> None:
        """Note how the attempt ended, and see what follows: nothing, if it ``is_last``."""
        with interrupts.deferred():
            stopping = self._state in ("STOPPING", "RESTARTING")
            if stopping and end.state == "not started":  # because it was to be stopped
                end = end.replace(state="stopped")
            now = clock.now()
            end = end.replace(number=self._number, began=max(self._began, end.began), ended=now)
            self._under_way = False
            self._ends.append(end)
            self._emit(
                agent_kinds.AttemptEnded, state=end.state, rank=end.rank, exitcode=end.exitcode, error=end.error,
                step=end.step, survivors=end.survivors, seconds=end.uptime,
            )  # fmt: skip
            if self._state == "STARTING" and end.state != "not started":  # a signal came while it was being started
                self._see("STARTED")
            if end.state == "succeeded" and (self._state, "ALL_SUCCEEDED") in life.TABLE:
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
            cause = f"attempt {self._number}: {end.describe()}"
            self._emit(
                agent_kinds.RestartDecided, delay=decision.delay, counted=decision.counted, cause=cause,
                step=end.step, why=decision.why,
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
