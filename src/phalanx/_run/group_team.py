"""A team of `attempts` whose every attempt is a group of processes.

Owns which ends of workers are failures. A scheduler, an init system or a user may send a signal to the launcher and to
its workers at once. Which of them gets it first is chance: a worker may have died of it, and its end may have been
observed, before the launcher knows that the job is to stop. So the launcher waits a moment before it calls such a death
a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from phalanx._base import clock, interrupts
from phalanx._base.stderr import mention
from phalanx._base.text import one_line
from phalanx._engine.host_signals import SignalException
from phalanx._engine.start_errors import KeeperLostError
from phalanx._evidence.error_file import is_of_timer
from phalanx._group.context import PContext
from phalanx._group.restart_policy import AttemptEnd
from phalanx._outcomes.failure import ProcessFailure
from phalanx._outcomes.result import RunProcsResult, verdict
from phalanx._run.runner import Team

COMMON_STOP_SECONDS = 0.5
"""Seconds between a worker's end by a common signal and that of the launcher, at most.

Who sends a signal to many processes does so in some milliseconds."""

_COMMON_STOP_NS = int(COMMON_STOP_SECONDS * clock.NS)
_SHELL = 128  # a shell's exit code for a signal is this much more


class CommonStop:
    """Whether a signal has stopped this process, and what that explains. Moments: nanoseconds, monotonic.

    Several signals may be sent at once (systemd's ``SendSIGHUP=yes``): a worker may die of another one of them than the
    one that this process has acted on.

    Args:
        signals: Those that stop this process. By default there are none, and nothing is explained.

    >>> stop = CommonStop([15])
    >>> stop.seconds_left(-15, 1_000_000_000, now_ns=1_100_000_000), stop.seconds_left(1, 1_000_000_000, now_ns=0)
    (0.4, 0.0)
    >>> stop.note(1_200_000_000)
    >>> stop.seconds_left(-15, 1_000_000_000, now_ns=1_200_000_000), stop.explains(-15, 1_000_000_000)
    (0.0, True)
    >>> stop.explains(1, 1_000_000_000), stop.explains(-1, 1_000_000_000), stop.explains(-15, 100_000_000)
    (False, False, False)
    """

    def __init__(self, signals: Iterable[int] = ()) -> None:
        self._signals = frozenset(signals)
        self._got: int | None = None

    def note(self, now_ns: int) -> None:
        """Note that this process was sent one of the signals. Those after the first say nothing new."""
        if self._got is None:
            self._got = now_ns

    @property
    def has_come(self) -> bool:
        """Whether this process was sent one of the signals."""
        return self._got is not None

    def may_explain(self, exitcode: int) -> bool:
        """Whether an exit (negative: by a signal) may come from a signal that this process has not got yet."""
        return self._got is None and self._is_by_one(exitcode)

    def seconds_left(self, exitcode: int, moment_ns: int, now_ns: int) -> float:
        """Return for how long it is not known whether an exit is a failure; 0: it is known.

        Args:
            exitcode: Negative: by a signal.
            moment_ns: When it came.
            now_ns: The present moment.
        """
        left_ns = moment_ns + _COMMON_STOP_NS - now_ns if self.may_explain(exitcode) else 0
        return max(0, left_ns) / clock.NS

    def explains(self, exitcode: int, moment_ns: int) -> bool:
        """Whether an exit is the effect of what was sent to this process, too."""
        return self._got is not None and self._is_by_one(exitcode) and moment_ns >= self._got - _COMMON_STOP_NS

    def _is_by_one(self, exitcode: int) -> bool:
        return -exitcode in self._signals or exitcode - _SHELL in self._signals


MOST_SHOWN = 3
"""How many groups may have ended whose lines a slow console has not taken, when another is started.

With the one that is made before these are closed, their files are needed: see `phalanx._logs.specs.LEAST_ATTEMPTS`."""


class GroupTeam(Team):
    """Makes a group for each attempt. The lines of an attempt are shown before those of the next.

    A subclass may have a start wait for something: see `_may_start`.

    Args:
        make: Makes the group of an attempt: its number, and the group of the attempt before, to be given as
            ``follows``; None: there is none. It is not started.
        common: What tells workers that have failed from those that were stopped with this process; default: nothing
            does. With it, `stop` is called for signals to this process alone.

    Attributes:
        group: The group of the attempt that runs, or ran last; None: none was made.
        result: How it ended; None: it has not.
        lost: Why its result is not complete: its keeper was lost; else None.
        common: See the arguments.
        is_put_off: Whether all workers have ended, and it is not known yet whether they have failed.
    """

    def __init__(
        self,
        make: Callable[[int, PContext | None], PContext],
        *,
        common: CommonStop | None = None,
    ) -> None:
        self.group: PContext | None = None
        self.result: RunProcsResult | None = None
        self.lost: KeeperLostError | None = None
        self.is_put_off = False
        self._make = make
        self.common = common or CommonStop()
        self._wake: Callable[[], None] = lambda: None
        self._wakes = False  # whether `wake` is called at the end of `group`
        self._before: list[PContext] = []  # groups that are gone, and not closed
        self._pending = -1  # the attempt whose group is to be started; -1: none
        self._began = 0.0  # when the latest start of a group was (seconds, monotonic)

    def begin(self, attempt: int) -> None:  # noqa: ARG002 - as `Team` has it
        """See `Team`."""
        if self.group is not None:
            self._before.append(self.group)
        self.group, self.result, self.lost, self._wakes = None, None, None, False
        self.is_put_off, self.poll_seconds = False, None
        self._pending = -1

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        """Make a group, and start it: now, or in `is_up` once it may be. Raises what these raise."""
        self._wake, self._pending = wake, attempt
        self._start_pending()

    def is_up(self) -> bool:
        """See `Team`."""
        if self._pending >= 0:
            self._start_pending()
        return self._pending < 0

    def _may_start(self) -> bool:
        """Return whether the group of an attempt can be started now; if not, `_wake` is called when it can.

        Does not wait. Raises: it never can.
        """
        return True

    def _start_pending(self) -> None:
        try:
            may_start = self._may_start()
        except SignalException:
            raise
        except Exception:
            self._pending = -1
            raise
        if may_start:
            with interrupts.deferred():
                attempt, self._pending, self._began = self._pending, -1, clock.now()
            self._start_group(attempt)

    def _start_group(self, attempt: int) -> None:
        before = self._before[-1] if self._before else None
        group = self.group = self._make(attempt, before)
        group.start()
        self._wake_at_end(group)
        self._close_before(MOST_SHOWN)  # after the start: it waits until the guard has ended, which takes 5 to 10 ms

    def _wake_at_end(self, group: PContext) -> None:
        group.when_gone(self._wake)
        self._wakes = True

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        group = self.group
        if group is None or self._pending >= 0:
            return AttemptEnd("stopped") if self._pending < 0 else None
        try:
            result = group.wait_gone(0)
        except KeeperLostError as error:
            self.lost = error
            self.result = RunProcsResult(failures=dict(error.failures))
            return self._end("failed", self.result, str(error))
        except RuntimeError as error:  # a signal came while it was being started
            why = error.__cause__
            return AttemptEnd("stopped") if why is None else AttemptEnd("not started", error=one_line(why))
        if result is None:
            if not self._wakes:
                self._wake_at_end(group)
            return None
        if result.root_cause is not None:
            root, left = result.root_cause, 0.0
            if _says_nothing(root):
                left = self.common.seconds_left(root.exitcode, root.first_key, clock.now_ns())
            self.is_put_off = left > 0
            if left > 0:
                self.poll_seconds = left
                return None
            result = _without_stopped(self.common, result)
        self.result = result
        return self._end({"abandoned": "failed"}.get(result.state, result.state), result)

    def stop(self, death_signal: int | None, grace: float) -> None:
        """See `Team`."""
        self._pending = -1
        self.common.note(clock.now_ns())
        if self.group is not None:
            self.group.order_close(death_signal, grace)

    def signal(self, number: int) -> None:
        """Send a signal to every worker that runs, see `PContext.signal`."""
        group = self.group
        if group is not None:
            group.signal(number)

    def say(self, text: str) -> None:
        """See `Team`."""
        group = self.group or (self._before[-1] if self._before else None)

        def speak() -> None:
            # The lines of the next group wait for those of `group`, and must come after this one.
            groups = [*self._before, *filter(None, (self.group,))]
            later = groups[groups.index(group) + 1 :] if group in groups else []
            if not any(each.say_before(text) for each in later):
                self._speak(text)

        if group is None or group.say(text):
            if group is None:
                self._speak(text)
            return
        try:
            group.when_shown(speak)
        except RuntimeError:  # it was never up
            self._speak(text)

    def _speak(self, text: str) -> None:
        """Show a line while no group does. Does not wait."""
        mention(text)

    def close(self) -> None:
        """Close all groups: what has not ended is killed. Returns when their lines are shown, or after 10 s each."""
        if self.group is not None:
            self.group.order_close(9)  # before the waits for consoles
        self._close_before(0)
        if self.group is not None:
            self.group.close(9)

    def _end(self, state: str, result: RunProcsResult, error: str = "") -> AttemptEnd:
        assert self.group is not None
        rank, exitcode, root = None, None, result.root_cause
        if root is not None:
            rank, exitcode = root.local_rank if root.rank is None else root.rank, root.exitcode
            error = one_line(root.message)
        elif state == "failed":
            error = one_line(error or verdict(result)[1])
        survivors = sum(outcome.state == "abandoned" for outcome in result.outcomes.values())
        is_hang = root is not None and is_of_timer(root.error_file_data)
        step = self.group.last_step
        return AttemptEnd(state, rank, exitcode, error, step, survivors, began=self._began, is_hang=is_hang)

    def _close_before(self, most: int) -> None:
        """Close groups that are gone, but for the ``most`` latest, whose lines may yet be shown."""
        while len(self._before) > most or (self._before and not self._before[0].is_open):
            self._before[0].close(9)
            del self._before[0]  # not before: a signal may interrupt the wait


def _without_stopped(common: CommonStop, result: RunProcsResult) -> RunProcsResult:
    """Return a result in which nobody has failed, if the root cause is a worker that was stopped with this process."""
    root = result.root_cause
    if root is None or not _says_nothing(root) or not common.explains(root.exitcode, root.first_key):
        return result
    # Those that have failed after it may have lost their connections to it, or were sent the signal as well.
    outcomes = {
        rank: outcome.replace(state="stopped") if outcome.state == "failed" else outcome
        for rank, outcome in result.outcomes.items()
    }
    return result.replace(failures={}, root_cause=None, outcomes=outcomes)


def _says_nothing(failure: ProcessFailure) -> bool:
    """Whether a worker has left nothing that says why it has ended, but for what Python says of SIGINT."""
    return failure.evidence_ns is None or failure.message.startswith("KeyboardInterrupt")
