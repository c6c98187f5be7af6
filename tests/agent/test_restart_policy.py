"""What the restart policy decides, rule by rule, and the arguments that it refuses."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._group.restart_policy import AttemptEnd, Decision, decide
from phalanx.agent import RestartPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def ends(*facts: dict[str, Any]) -> list[AttemptEnd]:
    """Failures, ten seconds each, unless told otherwise; numbered, one after the other."""
    made: list[AttemptEnd] = []
    moment = 0.0
    for number, given_facts in enumerate(facts):
        fact: dict[str, Any] = {
            "state": "failed",
            "rank": 0,
            "exitcode": 1,
            "error": "exited with code 1",
            "uptime": 10.0,
        }
        fact |= given_facts
        uptime = fact.pop("uptime")
        made.append(AttemptEnd(**fact, number=number, began=moment, ended=moment + uptime))
        moment += uptime
    return made


def decided(
    policy: RestartPolicy, *facts: dict[str, Any], restarts: Sequence[float] = (), chance: float = 0.0
) -> Decision:
    history = ends(*facts)
    return decide(policy, history, restarts, history[-1].ended, chance)


def refused(why: str) -> Decision:
    return Decision(retries=False, why=why)


# --- in total, and in a window


def test_none_is_allowed_and_there_is_nothing_to_say_of_it() -> None:
    assert decided(RestartPolicy(), {}) == refused("")


def test_whether_anything_is_ever_restarted() -> None:
    assert [RestartPolicy(most).may_restart for most in (0, 1)] == [False, True]
    assert [RestartPolicy(most, window=60).may_restart for most in (0, 1)] == [False, True]
    assert RestartPolicy(0, always_on=[75]).may_restart


def test_so_many_in_all() -> None:
    policy = RestartPolicy(2)
    assert decided(policy, {}) == Decision(retries=True)
    assert decided(policy, {}, {}, restarts=[10]) == Decision(retries=True)
    assert decided(policy, {}, {}, {}, restarts=[10, 20]) == refused("2 of 2 restarts used")
    assert decided(RestartPolicy(1), {}, {}, restarts=[10]) == refused("1 of 1 restart used")


def test_so_many_in_a_window() -> None:
    policy = RestartPolicy(2, window=3600)
    late = {"uptime": 4000.0}
    assert decided(policy, {}, {}, {}, restarts=[10, 20]) == refused("2 of 2 restarts within 1h00m used")
    assert decided(policy, {}, {}, late, restarts=[10, 20]) == Decision(retries=True)
    assert decided(policy, {}, {}, {"uptime": 3590.0}, restarts=[10, 20]).retries, "one is exactly an hour old"
    assert not decided(policy, {}, {}, {"uptime": 3589.0}, restarts=[10, 20]).retries


def test_restarts_that_do_not_count_are_named() -> None:
    policy = RestartPolicy(2, window=60, always_on=[75])
    assert policy.describe_count([0], counted=True) == "restart 1 of at most 2 within 1m00s"
    assert policy.describe_count([60, 59, 0], counted=True) == "restart 2 of at most 2 within 1m00s"
    assert policy.describe_count([60, 59, 0], counted=False) == "not counted as a restart"


# --- the delay


def delays(policy: RestartPolicy, *uptimes: float) -> list[float]:
    facts = [{"uptime": uptime} for uptime in uptimes]
    return [decided(policy, *facts[: count + 1]).delay for count in range(len(facts))]


def test_the_delay_is_doubled_with_each_failure_up_to_the_cap() -> None:
    policy = RestartPolicy(100, backoff=2, backoff_cap=15)
    assert delays(policy, 1, 1, 1, 1, 1) == [2, 4, 8, 15, 15]
    assert delays(RestartPolicy(100), 1, 1, 1) == [0, 0, 0]


def test_an_attempt_that_ran_for_long_begins_a_new_row() -> None:
    policy = RestartPolicy(100, backoff=2, backoff_cap=15)
    assert delays(policy, 1, 1, 15.5, 1, 1, 16) == [2, 4, 2, 4, 8, 2]
    assert delays(policy, 16, 1, 1) == [2, 4, 8]
    assert delays(policy, 15, 15) == [2, 4], "not longer than the cap"


def test_the_cap_is_at_least_the_first_delay() -> None:
    assert delays(RestartPolicy(100, backoff=20, backoff_cap=5), 1, 1) == [20, 20]


def test_thousands_of_failures_do_not_overflow() -> None:
    assert decided(RestartPolicy(10**6, backoff=1), *({} for _ in range(3000))).delay == 300


def test_jitter_shortens_the_delay_by_a_part_at_most() -> None:
    policy = RestartPolicy(1, backoff=10, jitter=0.4)
    assert decided(policy, {}, chance=0.0).delay == 10
    assert decided(policy, {}, chance=0.5).delay == 8
    assert decided(policy, {}, chance=1.0).delay == 6
    assert decided(RestartPolicy(1, backoff=10, jitter=1), {}, chance=1.0).delay == 0
    assert decided(RestartPolicy(1, backoff=10, jitter=0), {}, chance=1.0).delay == 10


# --- failing on start


def test_a_crash_loop_is_not_restarted() -> None:
    policy = RestartPolicy(100, min_uptime=5, failing_starts=2)
    early, late = {"uptime": 4.9}, {"uptime": 5.0}
    assert decided(policy, early).retries
    assert decided(policy, early, late).retries
    assert decided(policy, early, late, early).retries
    assert decided(policy, early, early) == refused("failing on start: 2 attempts ended within 5.0s")
    assert decided(RestartPolicy(9, min_uptime=60, failing_starts=1), {}) == refused(
        "failing on start: 1 attempt ended within 1m00s"
    )


def test_one_that_was_not_started_has_failed_early() -> None:
    policy = RestartPolicy(100, min_uptime=5, failing_starts=2)
    unstarted = {"state": "not started", "exitcode": None, "uptime": 0.1}
    assert not decided(policy, {"uptime": 1.0}, unstarted).retries


def test_one_that_was_restarted_on_request_is_passed_over() -> None:
    policy = RestartPolicy(100, min_uptime=5, failing_starts=2)
    asked = {"state": "stopped", "exitcode": None, "uptime": 1.0}
    assert decided(policy, asked, asked, {"uptime": 1.0}).retries
    assert not decided(policy, {"uptime": 1.0}, asked, {"uptime": 1.0}).retries


# --- exit codes


@pytest.mark.parametrize(
    "code, name", [(3, "exit code 3"), (-9, "signal SIGKILL"), (-64, "signal SIGRTMAX"), (255, "exit code 255")]
)
def test_exit_codes_that_end_it(code: int, name: str) -> None:
    policy = RestartPolicy(100, never_on=[code, 77])
    assert decided(policy, {"exitcode": code}) == refused(f"{name} is one after which nothing is restarted")
    assert decided(policy, {"exitcode": 1}).retries
    assert decided(policy, {"exitcode": None}).retries


def test_exit_codes_that_do_not_count() -> None:
    policy = RestartPolicy(0, always_on={75, -15})
    assert decided(policy, {"exitcode": 75}) == Decision(retries=True, counted=False)
    assert decided(policy, {"exitcode": -15}) == Decision(retries=True, counted=False)
    assert decided(policy, {"exitcode": 15}) == refused("")
    assert decided(policy, {"exitcode": None}) == refused("")


def test_other_rules_hold_for_exit_codes_that_do_not_count() -> None:
    policy = RestartPolicy(0, always_on=[75], min_uptime=60, failing_starts=2)
    assert decided(policy, {"exitcode": 75}).retries
    assert not decided(policy, {"exitcode": 75}, {"exitcode": 75}).retries
    policy = RestartPolicy(0, always_on=[75], without_progress=2)
    assert not decided(policy, {"exitcode": 75}, {"exitcode": 75}).retries


# --- progress


def steps(policy: RestartPolicy, *values: int | None) -> Decision:
    return decided(policy, *({"step": value} for value in values))


def test_failures_without_progress_end_it() -> None:
    policy = RestartPolicy(100, without_progress=2)
    assert steps(policy, None).retries
    assert steps(policy, None, None) == refused("no progress in 2 attempts: no step was reported")
    assert steps(policy, 10, 10).retries
    assert steps(policy, 10, 9, 10) == refused("no progress in 2 attempts: step 10 was not passed")
    assert steps(policy, 10, 9, 11).retries
    assert steps(policy, 10, 9, 11, 11).retries
    assert steps(policy, 10, None, 5) == refused("no progress in 2 attempts: step 10 was not passed")


def test_progress_of_an_attempt_without_failure_counts() -> None:
    policy = RestartPolicy(100, without_progress=1)
    assert decided(policy, {"state": "stopped", "step": 50}, {"step": 60}).retries
    assert not decided(policy, {"state": "stopped", "step": 50}, {"step": 50}).retries


def test_progress_is_not_asked_for_unless_told() -> None:
    assert steps(RestartPolicy(100), *[None] * 50).retries


def test_the_same_step_as_in_the_failure_before_is_said() -> None:
    policy = RestartPolicy(100)
    assert steps(policy, 10, 10).why == "same step as attempt 0"
    assert steps(policy, 10, 20, 20).why == "same step as attempt 1"
    assert steps(policy, 20, 10, 20).why == ""
    assert steps(policy, None, None).why == ""
    assert decided(policy, {"step": 7}, {"state": "stopped", "step": 9}, {"step": 7}).why == "same step as attempt 0"


# --- what SIGKILL did not end


@pytest.mark.parametrize("count, what", [(1, "1 worker"), (2, "2 workers")])
def test_nothing_starts_beside_a_worker_that_outlived_sigkill(count: int, what: str) -> None:
    policy = RestartPolicy(100, always_on=[1])
    assert decided(policy, {"survivors": count}) == refused(
        f"{what} outlived SIGKILL, and may hold what another attempt needs"
    )


# --- arguments


def test_a_policy_keeps_its_arguments() -> None:
    policy = RestartPolicy(
        5, window=60, backoff=1, backoff_cap=30, jitter=0.5, min_uptime=2, failing_starts=4, never_on=(3,),
        always_on=dict.fromkeys([75, -10]), without_progress=6,
    )  # fmt: skip
    assert policy.__getstate__() == {
        "max_restarts": 5, "window": 60.0, "backoff": 1.0, "backoff_cap": 30.0, "jitter": 0.5, "min_uptime": 2.0,
        "failing_starts": 4, "never_on": {3}, "always_on": {75, -10}, "without_progress": 6,
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert {type(value) for value in (policy.window, policy.backoff, policy.jitter)} == {float}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_restarts": -1}, ValueError, "max_restarts: expected a whole number, 0 or more, got -1"),
    ({"max_restarts": 1.5}, TypeError, "max_restarts: expected a whole number, 0 or more, got 1.5"),
    ({"max_restarts": True}, TypeError, "max_restarts: expected a whole number, 0 or more, got True"),
    ({"max_restarts": None}, TypeError, "max_restarts: expected a whole number, 0 or more, got None"),
    ({"window": 0}, ValueError, "window: expected more than 0 seconds, got 0"),
    ({"window": float("inf")}, ValueError, "window: expected more than 0 seconds, got inf"),
    ({"window": "1h"}, TypeError, "window: expected seconds, got '1h'"),
    ({"backoff": -1}, ValueError, "backoff: expected a time of 0 seconds or more, got -1"),
    ({"backoff": float("nan")}, ValueError, "backoff: expected a time of 0 seconds or more, got nan"),
    ({"backoff_cap": -1}, ValueError, "backoff_cap: expected a time of 0 seconds or more, got -1"),
    ({"backoff_cap": float("inf")}, ValueError, "backoff_cap: expected a time of 0 seconds or more, got inf"),
    ({"jitter": 1.1}, ValueError, "jitter: expected a part of the delay, 0 to 1, got 1.1"),
    ({"jitter": -0.1}, ValueError, "jitter: expected a part of the delay, 0 to 1, got -0.1"),
    ({"jitter": float("nan")}, ValueError, "jitter: expected a part of the delay, 0 to 1, got nan"),
    ({"jitter": "a"}, TypeError, "jitter: expected a part of the delay, 0 to 1, got 'a'"),
    ({"min_uptime": -1}, ValueError, "min_uptime: expected a time of 0 seconds or more, got -1"),
    ({"failing_starts": 0}, ValueError, "failing_starts: expected a whole number, 1 or more, got 0"),
    ({"failing_starts": None}, TypeError, "failing_starts: expected a whole number, 1 or more, got None"),
    ({"without_progress": 0}, ValueError, "without_progress: expected a whole number, 1 or more, got 0"),
    ({"without_progress": "3"}, TypeError, "without_progress: expected a whole number, 1 or more, got '3'"),
    ({"never_on": 3}, TypeError, r"never_on: expected exit codes, like \[1, 75\], got 3"),
    ({"never_on": "12"}, TypeError, r"never_on: expected exit codes, like \[1, 75\], got '12'"),
    ({"never_on": ["1"]}, TypeError, r"never_on: expected exit codes, like \[1, 75\]; '1' is none"),
    ({"never_on": [[]]}, TypeError, r"never_on: expected exit codes, like \[1, 75\]; \[\] is none"),
    ({"always_on": [True]}, TypeError, r"always_on: expected exit codes, like \[1, 75\]; True is none"),
    ({"always_on": [0]}, ValueError, "always_on: expected exit codes, 1 to 255, or -1 to -64 for signals, got 0"),
    ({"always_on": [256]}, ValueError, "always_on: expected exit codes, 1 to 255, or -1 to -64 for signals, got 256"),
    ({"always_on": [-65]}, ValueError, "always_on: expected exit codes, 1 to 255, or -1 to -64 for signals, got -65"),
    ({"never_on": [5, 3], "always_on": [3]}, ValueError, "never_on, always_on: exit code 3 is in both"),
]


@pytest.mark.parametrize("arguments, kind, text", WRONG, ids=[str(arguments) for arguments, _, _ in WRONG])
def test_what_is_wrong_is_refused_by_its_name(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{text}$"):
        RestartPolicy(**arguments)


@pytest.mark.parametrize(
    "end, text",
    [
        (AttemptEnd("failed", 2, 1, "ValueError: bad batch", 120), "rank 2, ValueError: bad batch, step 120"),
        (AttemptEnd("failed", 2, 1), "rank 2"),
        (AttemptEnd("failed"), "failed"),
        (AttemptEnd("not started", error="no such file"), "no such file"),
        (AttemptEnd("stopped", step=3), "stopped, step 3"),
    ],
)
def test_an_end_in_one_line(end: AttemptEnd, text: str) -> None:
    assert end.describe() == text


# --- whatever happens


@given(
    window=st.none() | st.floats(1, 100),
    most=st.integers(0, 4),
    gaps=st.lists(st.tuples(st.floats(0, 50), st.sampled_from([1, 75])), max_size=30),
)
def test_the_budget_is_never_exceeded(window: float | None, most: int, gaps: list[tuple[float, int]]) -> None:
    policy = RestartPolicy(most, window=window, always_on=[75])
    counted: list[float] = []
    history: list[AttemptEnd] = []
    now = 0.0
    for number, (gap, code) in enumerate(gaps):
        history.append(AttemptEnd("failed", 0, code, number=number, began=now, ended=now + gap))
        now += gap
        decision = decide(policy, history, counted, now)
        if not decision.retries:
            break
        counted += [now] * decision.counted
    if window is None:
        assert len(counted) <= most
    for moment in counted:
        assert sum(moment - (window or 0) < each <= moment for each in counted) <= most or window is None
