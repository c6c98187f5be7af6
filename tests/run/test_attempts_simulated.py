"""`Attempts` with a team, a clock and waits that are simulated: whatever happens, in whatever order."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx._base import clock
from phalanx.agent import RestartPolicy
from phalanx.multiprocessing import SignalException
from tests.support.attempt_groups import AttemptEnd, Ending, Interrupter, LocalRunner, Team, interrupted_at_each_line
from tests.support.fake_clock import FakeClock
from tests.support.streams import observed_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Workers(Team):
    """Workers of a test: their start can fail or be interrupted, and they end when they are told to.

    Attributes:
        up: The attempt whose workers run.
        started: The attempts that were started.
        orders: With which signal and which grace they were to be ended.
        said: What was shown.
    """

    def __init__(self) -> None:
        self.up: int | None = None
        self.started: list[int] = []
        self.orders: list[tuple[int | None, float]] = []
        self.said: list[str] = []
        self.end: AttemptEnd | None = AttemptEnd("stopped")
        self.at_start: Callable[[int], None] = lambda _attempt: None

    def begin(self, attempt: int) -> None:
        assert self.up is None, "an attempt begins while one runs"
        assert attempt not in self.started
        self.end = AttemptEnd("stopped")

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        assert self.up is None, "two attempts run"
        self.at_start(attempt)
        self.up, self.end = attempt, None
        self.started.append(attempt)
        self.wake = wake

    def ended(self) -> AttemptEnd | None:
        return self.end

    def over(self, end: AttemptEnd) -> None:
        """They end."""
        self.up, self.end = None, end

    def stop(self, death_signal: int | None, grace: float) -> None:
        self.orders.append((death_signal, grace))

    def say(self, text: str) -> None:
        self.said.append(text)


class Obedient(Workers):
    """Workers that end as soon as they are told to."""

    def stop(self, death_signal: int | None, grace: float) -> None:
        super().stop(death_signal, grace)
        self.over(AttemptEnd("stopped"))


class Simulated(LocalRunner):
    """Attempts whose waits are a call of the test's: it lets something happen."""

    def __init__(self, team: Workers, policy: RestartPolicy, happens: Callable[[float | None], None]) -> None:
        super().__init__(team, policy, signals=False)
        self._happens = happens

    def _wait(self, most: float | None) -> None:
        self._happens(most)


FAILED = AttemptEnd("failed", 0, 1, "exited with code 1")
POLICIES = st.builds(
    RestartPolicy,
    st.integers(0, 3),
    window=st.none() | st.just(60.0),
    backoff=st.sampled_from([0.0, 5.0]),
    never_on=st.just([3]),
    always_on=st.sampled_from([[], [75]]),
    without_progress=st.none() | st.just(4),
)
ENDS = st.sampled_from(
    [
        *(AttemptEnd("failed", 0, code, "failed") for code in (1, 1, 1, 3, 75, -9)),
        AttemptEnd("failed", survivors=1),
        AttemptEnd("succeeded"),
        AttemptEnd("stopped"),
    ]
)
HAPPENINGS = st.sampled_from(["end", "end", "end", "time", "stop", "restart", "signal", "wake"])
AT_START = st.sampled_from(["up", "up", "up", "fails", "interrupted before", "interrupted after", "asked to stop"])


class World:
    """Lets things happen to attempts, as hypothesis draws them."""

    def __init__(self, data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = data
        self.clock = FakeClock()
        monkeypatch.setattr(clock, "now", self.clock)
        self.policy = data.draw(POLICIES)
        self.team = Workers()
        self.team.at_start = self.at_start
        self.attempts = Simulated(self.team, self.policy, self.happen)
        self.left = 25  # happenings, before it is stopped for good
        self.stop_asked = False
        self.starts: list[float] = []

    def ask_stop(self) -> None:
        self.stop_asked = True
        self.attempts.ask_stop(signal.SIGTERM, 5)

    def at_start(self, attempt: int) -> None:
        assert not self.stop_asked, "started after a stop was asked for"
        self.starts.append(self.clock())
        how = self.data.draw(AT_START)
        if how == "fails":
            raise OSError(11, "no process can be started")
        if how == "asked to stop":  # by another thread
            self.ask_stop()
        if how == "interrupted after":
            self.team.up, self.team.end = attempt, None
            self.team.started.append(attempt)
        if how.startswith("interrupted"):
            raise SignalException("Process got signal: 15", signal.SIGTERM)

    def happen(self, most: float | None) -> None:
        team, what = self.team, self.data.draw(HAPPENINGS)
        self.left -= 1
        assert self.left > -20, "it does not end after a stop"
        if most is None and team.up is None:
            pytest.fail("it waits for nothing")
        if self.left < 0 and not self.stop_asked:
            self.ask_stop()
        elif what == "time" or (most is not None and self.left < 0):
            self.clock.advance(most if most is not None else 1.0)
        elif team.up is not None and (what == "end" or self.left < 0):
            stopped = bool(team.orders) and self.data.draw(st.booleans())
            team.over(AttemptEnd("stopped") if stopped else self.data.draw(ENDS))
        elif what == "stop":
            self.ask_stop()
        elif what == "restart":
            self.attempts.ask_restart(signal.SIGTERM, 5, "a new machine is there")
        elif what == "signal":
            raise SignalException("Process got signal: 15", signal.SIGTERM)

    def run(self) -> Ending:
        while True:
            try:
                return self.attempts.run()
            except SignalException:
                if self.data.draw(st.booleans()):
                    self.ask_stop()
            except OSError:
                assert self.attempts.number == 0

    def check(self, ending: Ending) -> None:
        team, policy, ends = self.team, self.policy, ending.ends
        assert team.up is None, "a worker is left"
        assert ending.state.upper() == self.attempts.state
        assert [end.number for end in ends] == sorted({end.number for end in ends}), "an end is noted twice"
        assert set(team.started) <= {end.number for end in ends}, "an end is not noted"
        counted = self.attempts.attempts._counted
        if policy.window is None:
            assert len(counted) <= policy.max_restarts
        else:
            for moment in counted:
                inside = [each for each in counted if moment - policy.window < each <= moment]
                assert len(inside) <= policy.max_restarts
        if ending.state == "succeeded":
            assert ends[-1].state == "succeeded"
        for end in ends[:-1]:
            assert end.survivors == 0, "another attempt beside a worker that outlived SIGKILL"
            assert end.state != "succeeded"
        again = self.attempts.run()
        assert again == ending


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=400)
def test_whatever_happens(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(data, monkeypatch)
        world.check(world.run())


# --- what follows what


class Scripted(Workers):
    """Workers whose every attempt ends at once, as told."""

    def __init__(self, *ends: AttemptEnd | Exception) -> None:
        super().__init__()
        self.ends = list(ends)

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        super().start(attempt, wake)
        self.over(end)


def observed(team: Team, policy: RestartPolicy) -> tuple[Ending, list[tuple[str, dict[str, Any]]]]:
    events: list[tuple[str, dict[str, Any]]] = []

    def observe(name: str, facts: dict[str, Any]) -> None:
        events.append((name, facts))

    with observed_by(observe) as stream, LocalRunner(team, policy, events=stream) as attempts:
        ending = attempts.run()
    return ending, events


def test_it_fails_twice_and_succeeds() -> None:
    team = Scripted(FAILED, FAILED, AttemptEnd("succeeded"))
    ending, events = observed(team, RestartPolicy(3))
    assert (ending.state, ending.why) == ("succeeded", "")
    assert [(end.number, end.state) for end in ending.ends] == [(0, "failed"), (1, "failed"), (2, "succeeded")]
    assert [line.partition(" after ")[0] for line in team.said] == [
        "phalanx: attempt 0 failed",
        "phalanx: attempt 1 failed",
    ]
    assert [line.partition("s: rank 0, exited with code 1; ")[2] for line in team.said] == [
        "attempt 1 follows (restart 1 of at most 3)",
        "attempt 2 follows (restart 2 of at most 3)",
    ]
    states = [(facts["state"], facts["attempt"]) for name, facts in events if name == "agent.state"]
    assert states == [
        *[("STARTING", 0), ("RUNNING", 0), ("WAITING", 0)],
        *[("STARTING", 1), ("RUNNING", 1), ("WAITING", 1)],
        *[("STARTING", 2), ("RUNNING", 2), ("SUCCEEDED", 2)],
    ]
    decided = [facts for name, facts in events if name == "restart.decided"]
    assert decided[0] == {
        "attempt": 0, "delay": 0.0, "counted": True, "why": "", "step": None,
        "cause": "attempt 0: rank 0, exited with code 1", "reason": "failure",
    }  # fmt: skip
    assert [name for name, _facts in events if name != "agent.state"] == [
        *["attempt.ended", "restart.decided"] * 2,
        "attempt.ended",
    ]


def test_it_gives_up() -> None:
    team = Scripted(FAILED, FAILED)
    ending, events = observed(team, RestartPolicy(1))
    assert (ending.state, ending.why) == ("failed", "1 of 1 restart used")
    assert team.said[1].endswith("exited with code 1; giving up: 1 of 1 restart used")
    assert events[-2:] == [
        ("agent.gave_up", {"attempt": 1, "why": "1 of 1 restart used"}),
        ("agent.state", {"attempt": 1, "state": "FAILED"}),
    ]
    team = Scripted(FAILED)  # without restarts, there is nothing to be said of them
    ending, _events = observed(team, RestartPolicy())
    assert (ending.state, ending.why, team.said) == ("failed", "", [])


def test_the_first_start_fails() -> None:
    with LocalRunner(Scripted(OSError("no more processes")), RestartPolicy(5)) as attempts:
        with pytest.raises(OSError, match="no more processes"):
            attempts.run()
        assert attempts.state == "FAILED"
        assert attempts.run() == Ending("failed", ())


def test_a_later_start_fails_which_counts_as_a_failure() -> None:
    team = Scripted(FAILED, OSError("no more processes\nat all"), AttemptEnd("succeeded"))
    ending, _events = observed(team, RestartPolicy(2))
    assert ending.state == "succeeded"
    assert [(end.state, end.error) for end in ending.ends[1:]] == [
        ("not started", "no more processes"),
        ("succeeded", ""),
    ]
    assert team.said[1].startswith("phalanx: attempt 1 not started after ")
    assert team.said[1].endswith(": no more processes; attempt 2 follows (restart 2 of at most 2)")
    ending, _events = observed(Scripted(FAILED, KeyError()), RestartPolicy(1))
    assert (ending.state, ending.ends[-1].error) == ("failed", "KeyError()")


def test_the_line_of_a_delay_and_of_a_step() -> None:
    stuck = FAILED._replace(step=10)
    team = Scripted(stuck, stuck, AttemptEnd("succeeded"))
    ending, _events = observed(team, RestartPolicy(3, backoff=0.01, jitter=0))
    assert ending.state == "succeeded"
    assert team.said[0].endswith("exited with code 1, step 10; attempt 1 follows in 10ms (restart 1 of at most 3)")
    assert ", step 10, same step as attempt 0; " in team.said[1]
    assert team.said[1].endswith("; attempt 2 follows in 20ms (restart 2 of at most 3)")


def test_a_worker_that_outlived_sigkill_prevents_a_restart() -> None:
    team = Workers()

    def happen(_most: float | None) -> None:
        if not team.orders:
            attempts.ask_restart(signal.SIGTERM, 5, "asked for")
        if team.orders:
            team.over(AttemptEnd("stopped", survivors=1))

    attempts = Simulated(team, RestartPolicy(5), happen)
    ending = attempts.run()
    assert ending.state == "failed"
    assert ending.why == "1 worker outlived SIGKILL, and may hold what another attempt needs"
    assert team.started == [0]
    assert team.said[0] == "phalanx: ending attempt 0: asked for"


def test_of_two_stops_the_shorter_grace_holds() -> None:
    """Requests are checked when they are made."""
    attempts = LocalRunner(Workers(), RestartPolicy(), signals=False)
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (999, 1, ValueError, r"expected a signal, like signal\.SIGTERM or 15, got 999"),
        (15, "a", TypeError, "grace: expected seconds, got 'a'"),
        (15, float("nan"), ValueError, "grace: expected 0 seconds or more, got nan"),
    ]
    for number, grace, kind, says in wrong:
        with pytest.raises(kind, match=says):
            attempts.ask_stop(number, grace)
        with pytest.raises(kind, match=says):
            attempts.ask_restart(number, grace, "")
    for graces in ((30, 5), (5, 30)):
        team = Obedient()
        attempts = LocalRunner(team, RestartPolicy(), signals=False)

        def ask(_attempt: int, attempts: LocalRunner = attempts, graces: tuple[int, int] = graces) -> None:
            for grace in graces:
                attempts.ask_stop(signal.SIGTERM, grace)

        team.at_start = ask
        assert attempts.run().state == "stopped"
        assert team.orders == [(15, 5)]


# --- forks, handlers


def test_a_fork_of_the_host_has_no_attempts() -> None:
    codes: list[int] = []

    def fork(_attempt: int) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                attempts.run()
            except RuntimeError as error:
                attempts.close()
                code = 0 if "not this process's" in str(error) else 2
            finally:
                os._exit(code if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    team = Scripted(AttemptEnd("succeeded"))
    team.at_start = fork
    with observed_by(lambda *_event: None) as stream, LocalRunner(team, RestartPolicy(), events=stream) as attempts:
        assert attempts.run().state == "succeeded"
    assert codes == [0]


def test_who_asks_from_a_signal_handler_is_heard() -> None:
    """With ``signals=False``, the host's own handlers stay; one that asks and returns is enough."""
    team = Obedient()
    attempts = LocalRunner(team, RestartPolicy(), signals=False)
    before = signal.signal(signal.SIGUSR1, lambda *_: attempts.ask_stop(signal.SIGTERM, 1))
    try:
        team.at_start = lambda _attempt: os.kill(os.getpid(), signal.SIGUSR1)
        assert attempts.run().state == "stopped"
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- a signal between any two lines


class Fails(Workers):
    """Fails in each attempt but the last; the start of the third fails."""

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        if attempt == 2:
            raise OSError(11, "no process can be started")
        super().start(attempt, wake)
        self.over(AttemptEnd("succeeded") if attempt == 3 else FAILED)


def asks(*requests: str) -> Callable[[LocalRunner], Callable[[int], None]]:
    """Return what makes the start of each attempt ask for something: "stop", "restart" or nothing."""

    def at_start(attempts: LocalRunner) -> Callable[[int], None]:
        def ask(attempt: int) -> None:
            if requests[attempt] == "stop":
                attempts.ask_stop(signal.SIGTERM, 5)
            elif requests[attempt]:
                attempts.ask_restart(signal.SIGTERM, 5, "asked for")

        return ask

    return at_start


@pytest.mark.slow
@pytest.mark.parametrize(
    "team, requests, then_stops, states",
    [
        (Fails, ("", "", "", ""), True, {"stopped", "succeeded"}),
        (Fails, ("", "", "", ""), False, {"stopped", "succeeded"}),
        (Obedient, ("stop",), True, {"stopped"}),
        (Obedient, ("restart", "stop"), True, {"stopped"}),
    ],
)
def test_a_signal_between_any_two_lines(
    team: type[Workers], requests: tuple[str, ...], then_stops: bool, states: set[str]
) -> None:
    """Whatever the line, and whether a stop follows: each end is noted once, and no worker is left."""

    def run(interrupter: Interrupter) -> None:
        workers = team()
        with LocalRunner(workers, RestartPolicy(3)) as attempts:
            workers.at_start = asks(*requests)(attempts)
            with interrupter:
                try:
                    ending = attempts.run()
                except SignalException:
                    sys.settrace(None)
                    if then_stops:
                        attempts.ask_stop(signal.SIGTERM, 1)
                    ending = attempts.run()
        where, numbers = interrupter.fired, [end.number for end in ending.ends]
        assert ending.state in states, where
        assert numbers == list(range(len(numbers))), where
        assert len(numbers) <= len(requests), where
        assert set(workers.started) <= set(numbers), where
        assert workers.up is None, where
        assert len(attempts.attempts._counted) <= 3, where
        if then_stops:
            assert ending.state == "stopped" or len(numbers) == len(requests), where
        else:
            assert ending.state == "succeeded" or ending.ends[-1].state == "stopped", where

    seen = interrupted_at_each_line(run)
    assert {"carry", "_turn", "_do", "_start", "_gone", "gone", "_step"} <= seen
    assert ("_follow" in seen) == (team is Fails)
