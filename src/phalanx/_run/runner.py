"""The one loop that starts a team's workers, waits for what becomes of them, and does what is decided of them.

What is decided is a subclass's business: by the restart policy on one machine (`attempts`), by the rules of a job on
many (`phalanx._run.job_run`). What an attempt consists of is a `Team`'s.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from signal import SIGKILL, Signals
from types import TracebackType
from typing import Any, NamedTuple, Self

from phalanx._base import clock, interrupts
from phalanx._base.threads import Latch
from phalanx._engine import host_signals
from phalanx._group.restart_policy import AttemptEnd, describe_restart


class NoAttemptError(Exception):
    """Raised by `Team.start` or `Team.is_up`: this attempt cannot be started, and none follows, whatever the policy."""


class Team(ABC):
    """What is started anew in each attempt. Its methods are called by the thread that calls `Runner.carry`.

    Attributes:
        poll_seconds: How often `ended` is asked, at least; None: only when `Runner.wake` was called.
        describe: Returns what is said of the attempt that follows, see `describe_restart`.
        decides: Whether the restart policy alone decides what follows; False: it asks other machines.
    """

    poll_seconds: float | None = None
    describe: Callable[[int, float, str], str] = staticmethod(describe_restart)
    decides = True

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


class Step(NamedTuple):
    """What is to be done: "start" the workers of attempt ``number``, "end" them, or something else that takes no time.

    ``act``: of a start, called before the team is told of it.
    """

    kind: str
    act: Callable[[], object]
    number: int = -1


class Runner(ABC):
    """Carries a team. A context manager, which `close`s it.

    Args:
        team: What is started, and ended.
        signals: Whether signals to this process raise `SignalException` out of `carry`, if it runs on the main thread.
    """

    def __init__(self, team: Team, *, signals: bool = True) -> None:
        self._team = team
        self._signals = signals
        self._owner = os.getpid()
        self._entered = False  # whether `carry` has been called
        self._has_begun = False
        self._told: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()  # by any thread
        self._due: deque[Step] = deque()
        self._bell = Latch()
        self._number = -1  # of the attempt that runs, or ran last
        self._under_way = False  # whether its start has begun, and its end is not noted
        self._ordered = False  # whether its start has been ordered
        self._is_up = False

    # --- any thread

    def wake(self) -> None:
        """Have `carry` look at once at what has become of the team."""
        self._bell.open()

    def _tell(self, call: Callable[..., object], *args: Any) -> None:
        """Have ``call`` called by the thread of `carry`, see `_acts_first`."""
        self._told.append((call, args))
        self.wake()

    # --- one thread

    def carry(self) -> None:
        """Carry on until `is_over`.

        When an exception leaves it (SignalException: a signal arrived; or what the team raises), nothing has been
        stopped by that: ask for a stop, and carry on. Raises RuntimeError in a fork of the process that made this.
        """
        again, self._entered = self._entered, True
        if again:  # what left an earlier call has been delivered, and is not raised again
            host_signals.forget_raised()
        if self._owner != os.getpid():
            msg = "the attempts are not this process's: it is a fork of the one that makes them"
            raise RuntimeError(msg)
        if self._signals and not self.is_over:
            host_signals.acquire(self)
        while not self.is_over:
            self._turn()

    def carry_to_end(
        self, stop: Callable[[Signals], None], owner: object = None
    ) -> host_signals.SignalException | None:
        """Carry on to the end, whatever signals come: ``stop`` is called with the first one, and asks for a stop.

        On a further signal it is called with SIGKILL. Cleanup is never abandoned. ``owner``: signals are handled until
        that is released, see `host_signals`; None: as `carry` has it. Returns what the first signal has raised.
        """
        first: host_signals.SignalException | None = None
        asked: Signals | None = None
        while True:
            try:
                if owner is not None:
                    host_signals.acquire(owner)
                if asked is not None:
                    host_signals.forget_raised()  # it is handled here: asking a group would raise it again
                    stop(asked)
                self.carry()
            except host_signals.SignalException as error:
                asked = error.sigval if asked is None else SIGKILL
                first = first or error
            else:
                return first

    def close(self) -> None:
        """Release the signals. It is not carried on."""
        if self._owner == os.getpid():
            host_signals.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what decides

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether no worker is left, and none will be started."""

    @abstractmethod
    def _begin(self) -> None:
        """Decide what comes first. With signals deferred, as the others of these."""

    @abstractmethod
    def _up(self) -> None:
        """See that every worker runs."""

    @abstractmethod
    def _not_started(self, error: Exception) -> None:
        """See that no worker could be started. It may raise that."""

    @abstractmethod
    def _gone(self, end: AttemptEnd) -> None:
        """See that no worker is left."""

    @abstractmethod
    def _next(self) -> float:
        """Return when `_tick` is to be called, though nothing has happened (monotonic seconds); inf: never."""

    @abstractmethod
    def _tick(self) -> None:
        """See that it is that late."""

    def _awaits_up(self) -> bool:
        """Whether it matters that the workers run."""
        return True

    def _acts_first(self) -> bool:
        """Whether what is due is done before anything else is heard. By default it is not: it may not be wanted."""
        return False

    # A signal may raise between any two lines of these. What belongs together is done with signals deferred; what may
    # take long (the team's start, stop and look, the waits) is not, and stays in `_due` until it is done.

    def _turn(self) -> None:
        """Take one step, or wait for what leads to one."""
        self._bell = Latch()  # before the looks: what changes after them opens it
        seconds = self._step()
        if seconds is not None:
            self._wait(None if seconds == math.inf else seconds)

    def _wait(self, most: float | None) -> None:
        """Wait until `wake` is called, for ``most`` seconds; None: without limit."""
        with host_signals.delivering():
            self._bell.wait(-1 if most is None else most)

    def _step(self) -> float | None:
        """Take one step; or return for how many seconds none can be taken unless `wake` is called, inf: for ever."""
        if not self._has_begun:
            with interrupts.deferred():
                self._has_begun = True
                self._begin()
        elif self._told and not (self._due and self._acts_first()):
            with interrupts.deferred():
                self._take_told()
        elif self._due:
            self._do(self._due[0])
        elif self._under_way and self._look():
            pass
        elif clock.now() >= self._next():
            with interrupts.deferred():
                self._tick()
        else:
            left = max(0.0, self._next() - clock.now())
            polls = self._team.poll_seconds if self._under_way else None
            return left if polls is None else min(left, polls)
        return None

    def _take_told(self) -> None:
        """Call what was told next."""
        call, args = self._told.popleft()
        call(*args)

    def _do(self, step: Step) -> None:
        if step.kind == "start":
            with interrupts.deferred():
                self._due.popleft()
                self._number, self._under_way, self._ordered, self._is_up = step.number, True, False, False
                step.act()
                self._team.begin(step.number)
            self._start()
        elif step.kind == "end":
            if self._under_way:
                step.act()
            self._due.popleft()
        else:
            with interrupts.deferred():
                self._due.popleft()
                step.act()

    def _start(self) -> None:
        try:
            self._team.start(self._number, self.wake)
        except host_signals.SignalException:  # the group is open, or none of it is left: `ended` will tell
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, who decides is told
            self._not_started(error)
        else:
            self._ordered = True
            self._see_up()

    def _see_up(self) -> bool:
        """See that every worker runs, or that none does. Returns whether either is so."""
        try:
            is_up = self._team.is_up()
        except host_signals.SignalException:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._not_started(error)
            return True
        if is_up:
            with interrupts.deferred():
                self._is_up = True
                self._up()
        return is_up

    def _look(self) -> bool:
        """See what has become of the workers. Returns whether anything has."""
        if self._ordered and not self._is_up and self._awaits_up() and self._see_up():
            return True
        end = self._team.ended()
        if end is None:
            return False
        with interrupts.deferred():
            self._under_way = False
            self._gone(end)
        return True
