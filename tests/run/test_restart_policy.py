"""What the restart policy decides, rule by rule, and the arguments that it refuses."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._group.restart_policy import AttemptEnd, Decision, decide
from phalanx.agent import RestartPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence


def decided(
    policy: RestartPolicy, *facts: dict[str, Any], restarts: Sequence[float] = (), chance: float = 0.0
) -> Decision:
    """Decide on failures, ten seconds each unless their facts say otherwise, one after the other."""
    ends: list[AttemptEnd] = []
    moment = 0.0
    for number, given_facts in enumerate(facts):
        fact: dict[str, Any] = {"state": "failed", "rank": 0, "exitcode": 1, "uptime": 10.0} | given_facts
        began, moment = moment, moment + fact.pop("uptime")
        ends.append(AttemptEnd(**fact, number=number, began=began, ended=moment))
    return decide(policy, ends, restarts, moment, chance)


FAILED: dict[str, Any] = {}
EARLY, LATE = {"uptime": 4.9}, {"uptime": 5.0}
UNSTARTED = {"state": "not started", "exitcode": None, "uptime": 0.1}
ASKED = {"state": "stopped", "exitcode": None, "uptime": 1.0}
RETRIES = Decision(retries=True)
HOUR = RestartPolicy(2, window=3600)
CRASHES = RestartPolicy(100, min_uptime=5, failing_starts=2)
STUCK = RestartPolicy(100, without_progress=2)
ENDLESS = RestartPolicy(100)
FREE = RestartPolicy(0, always_on={75, -15})


def code(number: int | None) -> dict[str, Any]:
    return {"exitcode": number}


def steps(*values: int | None) -> list[dict[str, Any]]:
    return [{"step": value} for value in values]


RULES: list[tuple[RestartPolicy, list[dict[str, Any]], list[float], Decision | str]] = [
    # in total, and in a window; the last number of a restart is a moment
    (RestartPolicy(), [FAILED], [], ""),
    (RestartPolicy(2), [FAILED], [], RETRIES),
    (RestartPolicy(2), [FAILED] * 2, [10], RETRIES),
    (RestartPolicy(2), [FAILED] * 3, [10, 20], "2 of 2 restarts used"),
    (RestartPolicy(1), [FAILED] * 2, [10], "1 of 1 restart used"),
    (HOUR, [FAILED] * 3, [10, 20], "2 of 2 restarts within 1h00m used"),
    (HOUR, [FAILED, FAILED, {"uptime": 3590.0}], [10, 20], RETRIES),  # one is exactly an hour old
    (HOUR, [FAILED, FAILED, {"uptime": 3589.0}], [10, 20], "2 of 2 restarts within 1h00m used"),
    # failing on start; one that was restarted on request is passed over
    (CRASHES, [EARLY], [], RETRIES),
    (CRASHES, [EARLY, LATE, EARLY], [], RETRIES),
    (CRASHES, [EARLY, EARLY], [], "failing on start: 2 attempts ended within 5.0s"),
    (RestartPolicy(9, min_uptime=60, failing_starts=1), [FAILED], [], "failing on start: 1 attempt ended within 1m00s"),
    (CRASHES, [EARLY, UNSTARTED], [], "failing on start: 2 attempts ended within 5.0s"),
    (CRASHES, [ASKED, ASKED, EARLY], [], RETRIES),
    (CRASHES, [EARLY, ASKED, EARLY], [], "failing on start: 2 attempts ended within 5.0s"),
    # exit codes; other rules hold for those that do not count
    *[
        (RestartPolicy(9, never_on=[number, 77]), [code(number)], [], f"{name} is one after which nothing is restarted")
        for number, name in ((3, "exit code 3"), (-9, "signal SIGKILL"), (-64, "signal SIGRTMAX"))
    ],
    (RestartPolicy(100, never_on=[3]), [code(1)], [], RETRIES),
    (RestartPolicy(100, never_on=[3]), [code(None)], [], RETRIES),
    *[(FREE, [code(number)], [], RETRIES._replace(counted=False)) for number in (75, -15)],
    *[(FREE, [code(number)], [], "") for number in (15, None)],
    (RestartPolicy(0, always_on=[1], min_uptime=60, failing_starts=2), [FAILED] * 2, [],
     "failing on start: 2 attempts ended within 1m00s"),
    (RestartPolicy(0, always_on=[1], without_progress=2), [FAILED] * 2, [],
     "no progress in 2 attempts: no step was reported"),
    # progress; that of an attempt without failure counts; the same step as before is named
    (STUCK, steps(None), [], RETRIES),
    (STUCK, steps(None, None), [], "no progress in 2 attempts: no step was reported"),
    (STUCK, steps(10, 10), [], RETRIES._replace(why="same step as attempt 0")),
    (STUCK, steps(10, 9, 10), [], "no progress in 2 attempts: step 10 was not passed"),
    (STUCK, steps(10, 9, 11), [], RETRIES),
    (STUCK, steps(10, None, 5), [], "no progress in 2 attempts: step 10 was not passed"),
    (RestartPolicy(9, without_progress=1), [ASKED | {"step": 50}, {"step": 60}], [], RETRIES),
    (RestartPolicy(9, without_progress=1), [ASKED | {"step": 50}, {"step": 50}], [],
     "no progress in 1 attempt: step 50 was not passed"),
    (ENDLESS, steps(*[None] * 50), [], RETRIES),
    (ENDLESS, steps(10, 20, 20), [], RETRIES._replace(why="same step as attempt 1")),
    (ENDLESS, steps(20, 10, 20), [], RETRIES),
    (ENDLESS, [{"step": 7}, ASKED | {"step": 9}, {"step": 7}], [], RETRIES._replace(why="same step as attempt 0")),
    # nothing starts beside a worker that has outlived SIGKILL
    (RestartPolicy(9, always_on=[1]), [{"survivors": 1}], [],
     "1 worker outlived SIGKILL, and may hold what another attempt needs"),
    (RestartPolicy(9, always_on=[1]), [{"survivors": 2}], [],
     "2 workers outlived SIGKILL, and may hold what another attempt needs"),
]  # fmt: skip
"""A policy, how the attempts have failed, when restarts were decided that count, and what follows; or why nothing."""


@pytest.mark.parametrize("policy, facts, restarts, expected", RULES)
def test_what_follows_a_failure(
    policy: RestartPolicy, facts: list[dict[str, Any]], restarts: list[float], expected: Decision | str
) -> None:
    expected = Decision(retries=False, why=expected) if isinstance(expected, str) else expected
    assert decided(policy, *facts, restarts=restarts) == expected


def test_whether_anything_is_ever_restarted() -> None:
    assert [RestartPolicy(most, window=window).may_restart for most in (0, 1) for window in (None, 60)] == [
        *[False, False],
        *[True, True],
    ]
    assert RestartPolicy(0, always_on=[75]).may_restart


def test_restarts_that_do_not_count_are_named() -> None:
    policy = RestartPolicy(2, window=60, always_on=[75])
    assert policy.describe_count([0], counted=True) == "restart 1 of at most 2 within 1m00s"
    assert policy.describe_count([60, 59, 0], counted=True) == "restart 2 of at most 2 within 1m00s"
    assert policy.describe_count([60, 59, 0], counted=False) == "not counted as a restart"


@pytest.mark.parametrize(
    "backoff, cap, uptimes, expected",
    [
        (2, 15, [1, 1, 1, 1, 1], [2, 4, 8, 15, 15]),
        (0, 300, [1, 1, 1], [0, 0, 0]),
        # an attempt that ran for longer than the cap begins a new row
        (2, 15, [1, 1, 15.5, 1, 1, 16], [2, 4, 2, 4, 8, 2]),
        (2, 15, [16, 1, 1], [2, 4, 8]),
        (2, 15, [15, 15], [2, 4]),
        (20, 5, [1, 1], [20, 20]),  # the cap is at least the first delay
    ],
)
def test_the_delay_doubles_in_a_row(backoff: float, cap: float, uptimes: list[float], expected: list[float]) -> None:
    policy = RestartPolicy(100, backoff=backoff, backoff_cap=cap)
    facts = [{"uptime": uptime} for uptime in uptimes]
    assert [decided(policy, *facts[: count + 1]).delay for count in range(len(facts))] == expected
    assert decided(RestartPolicy(10**6, backoff=1), *[FAILED] * 3000).delay == 300  # nothing overflows


@pytest.mark.parametrize("jitter, chance, delay", [(0.4, 0, 10), (0.4, 0.5, 8), (0.4, 1, 6), (1, 1, 0), (0, 1, 10)])
def test_jitter_shortens_the_delay_by_a_part_at_most(jitter: float, chance: float, delay: float) -> None:
    assert decided(RestartPolicy(1, backoff=10, jitter=jitter), FAILED, chance=chance).delay == delay


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


WHOLE = "expected a whole number"
CODES = "expected exit codes, like [1, 75]"
RANGE = "expected exit codes, 1 to 255, or -1 to -64 for signals"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_restarts": -1}, ValueError, f"max_restarts: {WHOLE}, 0 or more, got -1"),
    ({"max_restarts": 1.5}, TypeError, f"max_restarts: {WHOLE}, 0 or more, got 1.5"),
    ({"max_restarts": True}, TypeError, f"max_restarts: {WHOLE}, 0 or more, got True"),
    ({"window": 0}, ValueError, "window: expected more than 0 seconds, got 0"),
    ({"window": float("inf")}, ValueError, "window: expected more than 0 seconds, got inf"),
    ({"window": "1h"}, TypeError, "window: expected seconds, got '1h'"),
    ({"backoff": float("nan")}, ValueError, "backoff: expected a time of 0 seconds or more, got nan"),
    ({"backoff_cap": float("inf")}, ValueError, "backoff_cap: expected a time of 0 seconds or more, got inf"),
    ({"jitter": 1.1}, ValueError, "jitter: expected a part of the delay, 0 to 1, got 1.1"),
    ({"jitter": float("nan")}, ValueError, "jitter: expected a part of the delay, 0 to 1, got nan"),
    ({"jitter": "a"}, TypeError, "jitter: expected a part of the delay, 0 to 1, got 'a'"),
    ({"min_uptime": -1}, ValueError, "min_uptime: expected a time of 0 seconds or more, got -1"),
    ({"failing_starts": 0}, ValueError, f"failing_starts: {WHOLE}, 1 or more, got 0"),
    ({"without_progress": "3"}, TypeError, f"without_progress: {WHOLE}, 1 or more, got '3'"),
    ({"never_on": 3}, TypeError, f"never_on: {CODES}, got 3"),
    ({"never_on": "12"}, TypeError, f"never_on: {CODES}, got '12'"),
    ({"never_on": [[]]}, TypeError, f"never_on: {CODES}; [] is none"),
    ({"always_on": [True]}, TypeError, f"always_on: {CODES}; True is none"),
    *[({"always_on": [number]}, ValueError, f"always_on: {RANGE}, got {number}") for number in (0, 256, -65)],
    ({"never_on": [5, 3], "always_on": [3]}, ValueError, "never_on, always_on: exit code 3 is in both"),
]


@pytest.mark.parametrize("arguments, kind, text", WRONG, ids=[str(arguments) for arguments, _, _ in WRONG])
def test_what_is_wrong_is_refused_by_its_name(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        RestartPolicy(**arguments)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    "end, text",
    [
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
    for number, (gap, exitcode) in enumerate(gaps):
        history.append(AttemptEnd("failed", 0, exitcode, number=number, began=now, ended=now + gap))
        now += gap
        decision = decide(policy, history, counted, now)
        if not decision.retries:
            break
        counted += [now] * decision.counted
    for moment in counted:
        assert window is None or sum(moment - window < each <= moment for each in counted) <= most
    assert window is not None or len(counted) <= most
