"""The one loop of a run: it starts a team's workers, waits for what becomes of them, and does what is decided of them.

A `Decider` decides: `attempts` by the restart policy on one machine, `job_run` by the rules of a job on many. What an
attempt consists of is a `Team`'s.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from signal import SIGKILL, Signals
from types import TracebackType
from typing import Any, NamedTuple, Self

from phalanx._base import clock, interrupts
from phalanx._base.text import one_line
from phalanx._base.threads import Latch
from phalanx._engine import host_signals
from phalanx._events.kinds import Event
from phalanx._events.stream import EventStream
from phalanx._group.restart_policy import AttemptEnd


class NoAttemptError(Exception):
    """Raised by `Team.start` or `Team.is_up`: this attempt cannot be started, and none follows, whatever the policy."""


class Team(ABC):
    """What is started anew in each attempt. Its methods are called by the thread that calls `Runner.carry`.

    Attributes:
        poll_seconds: How often `ended` is asked, at least; None: only when `Runner.wake` was called.
    """

    poll_seconds: float | None = None

    def begin(self, attempt: int) -> None:  # noqa: B027 - there may be nothing to forget
        """Forget the attempt before: from now on, `ended` is asked about this one. `start` follows, or a stop.

        No signal interrupts it. Does not wait, and does not raise.
        """

    @abstractmethod
    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """Start every worker of an attempt, or none. Raises what went wrong.

        A signal may interrupt it: what has been started by then is for `ended` and `stop`.

        ``wake`` is to be called when `ended` or `is_up` may return something else. Any thread may; it does not raise.
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
    def stop(self, death_signal: int | None, grace: float) -> None:
        """End the workers: send ``death_signal``, and SIGKILL ``grace`` seconds later. `ended` returns when.

        It may be called again, to shorten the grace. None: a job ends them, see `NodeTeam.cause`.
        """

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line of ours, after the lines of an attempt that has ended. Does not wait."""


class Start(NamedTuple):
    """Start the workers of an attempt."""

    number: int


class End(NamedTuple):
    """End the workers, see `Team.stop`. Of two ends that are due, the one with less time holds."""

    death_signal: int | None
    grace: float


class Announce(NamedTuple):
    """Print a line."""

    text: str


class Emit(NamedTuple):
    """Emit an event of an attempt."""

    kind: type[Event]
    attempt: int
    fields: dict[str, Any]


class Raise(NamedTuple):
    """Raise out of `Runner.carry`."""

    error: Exception


class Decider(ABC):
    """Decides what is done with the workers: each method returns effects, which the runner carries out in their order.

    All are called by the thread of `Runner.carry`, with signals deferred. ``now``: the present moment (seconds,
    monotonic).

    Attributes:
        wake: When it is to decide, though nothing has happened (seconds, monotonic); inf: never.
        acts_first: Whether what is due is done before anything else is handled. By default it is not: it may no longer
            be wanted.
        submit: Has a function called by the thread of `Runner.carry`, with the arguments and ``now``, and its effects
            carried out. Any thread may call it. Set by the runner.
    """

    wake = math.inf
    acts_first = False
    submit: Callable[..., None]

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether no worker is left, and none will be started."""

    @abstractmethod
    def step(self, event: str, now: float) -> Iterable[object]:
        """Decide what follows an event.

        "START": it begins. "STARTED": every worker runs. "LATE": it is as late as `wake`. "DROPPED": an attempt was to
        end whose start had not begun, and is not started.
        """

    @abstractmethod
    def gone(self, end: AttemptEnd, error: Exception | None, now: float) -> Iterable[object]:
        """Decide what follows as no worker is left. ``error``: why none could be started; None: they were."""

    def handle(self, submitted: deque[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterable[object]:
        """Call what was submitted first, and remove it from ``submitted``."""
        call, args = submitted.popleft()
        return call(*args, clock.now())  # type: ignore[no-any-return]  # see `submit`

    def carry_out(self, effect: Any) -> Iterable[object]:
        """Carry out an effect that the runner does not know. Returns effects that it does."""
        raise TypeError(effect)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what is held: it is not carried on."""


class Runner:
    """Carries a team as a decider decides. A context manager, which `close`s it.

    Args:
        team: What is started, and ended.
        decider: What decides when.
        signals: Whether signals to this process raise `SignalException` out of `carry`, if it runs on the main thread.
        events: Where `Emit`s go; None: nowhere.
    """

    def __init__(
        self, team: Team, decider: Decider, *, signals: bool = True, events: EventStream | None = None
    ) -> None:
        self._team, self._decider = team, decider
        self._signals, self._events = signals, events
        self._owner = os.getpid()
        self._entered = False  # whether `carry` has been called
        self._has_begun = False
        self._submitted: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()  # by any thread
        self._due: deque[Start | End] = deque()
        self._bell = Latch()
        self._number, self._began = -1, 0.0  # of the attempt that runs, or ran last
        self._under_way = False  # whether its start has begun, and its end is not handled
        self._awaits_up = False  # whether its start has been ordered, and `Team.is_up` is to be asked
        decider.submit = self._submit

    # --- any thread

    def wake(self) -> None:
        """Have `carry` ask the team at once."""
        self._bell.open()

    def _submit(self, call: Callable[..., object], *args: Any) -> None:
        self._submitted.append((call, args))
        self.wake()

    # --- one thread

    def carry(self) -> None:
        """Carry on until the decider `is_over`.

        When an exception leaves it (SignalException: a signal arrived; or what the team raises), nothing has been
        stopped by that: ask for a stop, and carry on. Raises RuntimeError in a fork of the process that made this.
        """
        again, self._entered = self._entered, True
        if again:  # what left an earlier call has been delivered, and is not raised again
            host_signals.forget_raised()
        if self._owner != os.getpid():
            msg = "the attempts are not this process's: it is a fork of the one that makes them"
            raise RuntimeError(msg)
        if self._signals and not self._decider.is_over:
            host_signals.acquire(self)
        while not self._decider.is_over:
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
        """Close the decider, and release the signals. It is not carried on."""
        if self._owner == os.getpid():
            try:
                self._decider.close()
            finally:
                with interrupts.deferred():
                    host_signals.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # A signal may raise between any two lines of these. What belongs together is done with signals deferred; what may
    # take long (the team's start, stop and end, the waits) is not, and stays in `_due` until it is done.

    def _turn(self) -> None:
        """Take one step, or wait for what leads to one."""
        self._bell = Latch()  # before the questions: what changes after them opens it
        seconds = self._step()
        if seconds is not None:
            self._wait(None if seconds == math.inf else seconds)

    def _wait(self, most: float | None) -> None:
        """Wait until `wake` is called, for ``most`` seconds; None: without limit."""
        with host_signals.delivering():
            self._bell.wait(-1 if most is None else most)

    def _step(self) -> float | None:
        """Take one step; or return for how many seconds none can be taken unless `wake` is called, inf: for ever."""
        decider = self._decider
        if self._submitted and not (decider.acts_first and (self._due or not self._has_begun)):
            with interrupts.deferred():
                self._carry_out(decider.handle(self._submitted))
        elif not self._has_begun:
            with interrupts.deferred():
                self._has_begun = True
                self._carry_out(decider.step("START", clock.now()))
        elif self._due:
            self._do(self._due[0])
        elif self._under_way and ((self._awaits_up and self._start()) or self._has_ended()):
            pass
        elif clock.now() >= decider.wake:
            with interrupts.deferred():
                self._carry_out(decider.step("LATE", clock.now()))
        else:
            left = max(0.0, decider.wake - clock.now())
            polls = self._team.poll_seconds if self._under_way else None
            return left if polls is None else min(left, polls)
        return None

    def _carry_out(self, effects: Iterable[object]) -> None:
        """Carry out what takes no time, and note what else is due."""
        for effect in effects:
            match effect:
                case Start():
                    self._due.append(effect)
                case End():
                    self._order_end(effect)
                case Announce():
                    self._team.say(f"phalanx: {effect.text}")
                case Emit():
                    if self._events is not None:
                        self._events.emit(effect.kind, effect.attempt, clock.now_ns(), **effect.fields)
                case Raise():
                    raise effect.error
                case _:
                    self._carry_out(self._decider.carry_out(effect))

    def _order_end(self, end: End) -> None:
        if not any(isinstance(step, Start) for step in self._due):
            if not any(step.grace < end.grace for step in self._due if isinstance(step, End)):
                self._due = deque([end])
        elif self._decider.acts_first:
            self._due.append(end)
        else:
            self._due.clear()
            self._carry_out(self._decider.step("DROPPED", clock.now()))

    def _do(self, step: Start | End) -> None:
        if isinstance(step, End):
            self._awaits_up = False
            if self._under_way:
                self._team.stop(*step)
            self._due.popleft()
            return
        with interrupts.deferred():
            self._due.popleft()
            self._number, self._began, self._under_way, self._awaits_up = step.number, clock.now(), True, False
            self._team.begin(step.number)
        self._start()

    def _start(self) -> bool:
        """Start the workers, unless that was done. Returns whether every worker runs, or none could be started."""
        try:
            if not self._awaits_up:
                self._team.start(self._number, self.wake)
                self._awaits_up = True
            is_up = self._team.is_up()
        except host_signals.SignalException:  # the group is open, or none of it is left: `ended` returns that
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the decider handles it
            self._gone(AttemptEnd("not started", error=one_line(error)), error)
        else:
            if is_up:
                with interrupts.deferred():
                    self._awaits_up = False
                    self._carry_out(self._decider.step("STARTED", clock.now()))
            return is_up
        return True  # not in the handler: what a tracer raises at its end would leave ``error`` as a context for ever

    def _has_ended(self) -> bool:
        """Ask the team for its end. Returns whether it has ended."""
        end = self._team.ended()
        if end is not None:
            self._gone(end, None)
        return end is not None

    def _gone(self, end: AttemptEnd, error: Exception | None) -> None:
        with interrupts.deferred():
            self._under_way = self._awaits_up = False
            now = clock.now()
            end = end._replace(number=self._number, began=max(self._began, end.began), ended=now)
            self._carry_out(self._decider.gone(end, error, now))
