"""The life of a group, told as scripts of events: what happens, and what is done about it."""

from __future__ import annotations

import itertools
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx._engine.keeper import keeper
from phalanx._engine.lifecycle import ACTIONS, EVENTS, STATES, TABLE, step

Script = list[tuple[str, str, tuple[str, ...]]]
"""What happens, where that leads, and what is done."""

STOP = ("SIGNAL", "ARM_GRACE")
KILL = ("KILL", "SWEEP")
SWEEP = ("ARM_PATIENCE", "SWEEP")

STARTED: Script = [("START", "STARTING", ("START_WORKERS",)), ("STARTED", "RUNNING", ("REPORT_STARTED",))]
FAILED: Script = [*STARTED, ("ONE_FAILED", "SETTLING", ("ARM_SETTLE",))]
CLOSED: Script = [*STARTED, ("STOP", "STOPPING", STOP)]
NOTICED: Script = [*STARTED, ("STOP_WITH_NOTICE", "NOTICED", ("GIVE_NOTICE",))]
KILLED: Script = [*STARTED, ("KILL", "KILLING", KILL)]
LINGERING: Script = [*STARTED, ("ALL_SUCCEEDED", "LINGERING", ("ARM_LINGER", "SWEEP"))]
SWEEPING: Script = [*STARTED, ("ALL_ENDED", "SWEEPING", SWEEP)]
PURGING: Script = [*SWEEPING, ("PATIENCE_OVER", "PURGING", ("SWEEP",))]
DONE: Script = [("DRAINED", "ENDED", ("REPORT_END",)), ("REPORTED", "GONE", ("LEAVE",))]
EMPTY: Script = [("EMPTY", "DRAINING", ("DRAIN",)), *DONE]

SCRIPTS: dict[str, Script] = {
    "all succeed, one after the other": [
        *STARTED,
        ("ONE_ENDED", "RUNNING", ()),
        ("ONE_ENDED", "RUNNING", ()),
        ("ALL_SUCCEEDED", "LINGERING", ("ARM_LINGER", "SWEEP")),
        *EMPTY,
    ],
    "peers end by themselves in the settle window, and none is left": [
        *FAILED,
        ("ONE_FAILED", "SETTLING", ()),
        ("ONE_ENDED", "SETTLING", ()),
        ("ALL_ENDED", "SWEEPING", SWEEP),
        *EMPTY,
    ],
    "one fails and does not exit, and nor does a peer": [
        *STARTED,
        ("ONE_LEAVES", "SETTLING", ("ARM_SETTLE",)),
        ("SETTLED", "STOPPING", STOP),
        ("ONE_FAILED", "STOPPING", ()),
        ("GRACE_OVER", "KILLING", KILL),
        ("ALL_ENDED", "KILLING", ()),
        *EMPTY,
    ],
    "closed in the settle window": [*FAILED, ("STOP", "STOPPING", STOP), ("ALL_ENDED", "SWEEPING", SWEEP), *EMPTY],
    "killed in the settle window": [*FAILED, ("KILL", "KILLING", KILL), ("ALL_ENDED", "KILLING", ()), *EMPTY],
    "closed, and one ignores it": [
        *CLOSED,
        ("GRACE_OVER", "KILLING", KILL),
        ("ONE_FAILED", "KILLING", ()),
        ("ONE_ENDED", "KILLING", ()),
        ("ALL_ENDED", "KILLING", ()),
        *EMPTY,
    ],
    "closed, and all end well": [*CLOSED, ("ALL_SUCCEEDED", "SWEEPING", SWEEP), *EMPTY],
    "closed twice: the signal is sent again, the grace can only get shorter": [
        *CLOSED,
        ("STOP", "STOPPING", STOP),
        ("KILL", "KILLING", KILL),
        ("STOP", "KILLING", ()),
        ("KILL", "KILLING", ()),
        ("ALL_SUCCEEDED", "KILLING", ()),
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("STOP", "DRAINING", ()),
        ("KILL", "DRAINING", ()),
        ("DRAINED", "ENDED", ("REPORT_END",)),
        ("STOP", "ENDED", ()),
        ("KILL", "ENDED", ()),
        ("REPORTED", "GONE", ("LEAVE",)),
    ],
    "closed with notice, and all end well before it is over": [
        *NOTICED,
        ("ONE_ENDED", "NOTICED", ()),
        ("ALL_SUCCEEDED", "SWEEPING", ("ARM_GRACE", *SWEEP)),
        *EMPTY,
    ],
    "closed with notice, and one fails: the others keep their time": [
        *NOTICED,
        ("ONE_FAILED", "NOTICED", ()),
        ("ONE_ENDED", "NOTICED", ()),
        ("ALL_ENDED", "SWEEPING", ("ARM_GRACE", *SWEEP)),
        *EMPTY,
    ],
    "closed with notice, which one ignores": [
        *NOTICED,
        ("ONE_ENDED", "NOTICED", ()),
        ("NOTICE_OVER", "STOPPING", STOP),
        ("ALL_ENDED", "SWEEPING", SWEEP),
        *EMPTY,
    ],
    "closed with notice, and again": [*NOTICED, ("STOP", "STOPPING", STOP), ("GRACE_OVER", "KILLING", KILL), *EMPTY],
    "closed with notice, and killed": [*NOTICED, ("KILL", "KILLING", KILL), *EMPTY],
    "closed with notice, and then the launcher goes, and the workers have the orphan grace": [
        *NOTICED,
        ("ORPHANED_WITH_GRACE", "STOPPING", STOP),
        ("ALL_ENDED", "SWEEPING", SWEEP),
        *EMPTY,
    ],
    "killed, and a worker outlives it": [
        *KILLED,
        ("ONE_FAILED", "KILLING", ()),
        ("KILL_OVER", "DRAINING", ("ABANDON", "DRAIN")),
        *DONE,
    ],
    "what successful workers left behind takes too long": [*LINGERING, ("LINGER_OVER", "SWEEPING", SWEEP), *EMPTY],
    "closed while it lingers": [*LINGERING, ("STOP", "SWEEPING", ("ARM_GRACE", *SWEEP)), *EMPTY],
    "killed while it lingers": [*LINGERING, ("KILL", "KILLING", KILL), *EMPTY],
    "closed while it sweeps": [*SWEEPING, ("STOP", "SWEEPING", ("ARM_GRACE",)), *EMPTY],
    "killed while it sweeps": [*SWEEPING, ("KILL", "KILLING", KILL), *EMPTY],
    "what was left behind takes all of a grace that is over before its moment": [
        *SWEEPING,
        ("GRACE_OVER", "KILLING", KILL),
        *EMPTY,
    ],
    "closed while it purges": [*PURGING, ("STOP", "PURGING", ("ARM_GRACE",)), *EMPTY],
    "killed while it purges": [*PURGING, ("KILL", "KILLING", KILL), *EMPTY],
    "what was left behind takes all of the grace": [*PURGING, ("GRACE_OVER", "KILLING", KILL), *EMPTY],
    "it cannot be started": [STARTED[0], ("START_FAILED", "KILLING", KILL), *EMPTY],
    "closed before it was told what to start, which comes too late": [
        ("STOP", "KILLING", KILL),
        ("START", "KILLING", ("REFUSE",)),
        *EMPTY,
    ],
    "killed before it was told what to start, which comes later still": [
        ("KILL", "KILLING", KILL),
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("START", "DRAINING", ("REFUSE",)),
        ("DRAINED", "ENDED", ("REPORT_END",)),
        ("START", "ENDED", ("REFUSE",)),
        ("REPORTED", "GONE", ("LEAVE",)),
    ],
    "closed in the midst of the start": [STARTED[0], ("STOP", "KILLING", KILL), *EMPTY],
    "killed in the midst of the start": [STARTED[0], ("KILL", "KILLING", KILL), *EMPTY],
    "a log file cannot be written": [
        *LINGERING,
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("DRAIN_OVER", "ENDED", ("ABANDON_LOGS", "REPORT_END")),
        ("REPORTED", "GONE", ("LEAVE",)),
    ],
    "the launcher goes while the log files are written": [
        *LINGERING,
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("ORPHANED", "GONE", ("LEAVE",)),
    ],
    "the launcher goes without reading the last word": [
        *LINGERING,
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("DRAINED", "ENDED", ("REPORT_END",)),
        ("ORPHANED", "GONE", ("LEAVE",)),
    ],
    "the launcher goes, and the workers have the orphan grace": [
        *STARTED,
        ("ORPHANED_WITH_GRACE", "STOPPING", STOP),
        ("ONE_FAILED", "STOPPING", ()),
        ("ONE_ENDED", "STOPPING", ()),
        ("ALL_ENDED", "SWEEPING", SWEEP),
        *EMPTY,
    ],
    "the launcher goes in the midst of the start, where nobody can have begun to work": [
        STARTED[0],
        ("ORPHANED_WITH_GRACE", "KILLING", KILL),
        *EMPTY,
    ],
    "the launcher goes in the settle window, and one ignores the orphan grace": [
        *FAILED,
        ("ORPHANED_WITH_GRACE", "STOPPING", STOP),
        ("GRACE_OVER", "KILLING", KILL),
        *EMPTY,
    ],
    "the launcher goes while it stops: nobody is asked twice, and the grace can only get shorter": [
        *CLOSED,
        ("ORPHANED_WITH_GRACE", "STOPPING", ("ARM_GRACE",)),
        ("HELPER_LOST", "KILLING", KILL),
        *EMPTY,
    ],
    "the launcher goes while it lingers, and what was left has the orphan grace": [
        *LINGERING,
        ("ORPHANED_WITH_GRACE", "SWEEPING", ("ARM_GRACE", *SWEEP)),
        ("PATIENCE_OVER", "PURGING", ("SWEEP",)),
        *EMPTY,
    ],
    "the launcher goes while it sweeps, and would have given time": [
        *SWEEPING,
        ("ORPHANED_WITH_GRACE", "SWEEPING", ("ARM_GRACE",)),
        *EMPTY,
    ],
    "the launcher goes while it purges, and would have given time": [
        *PURGING,
        ("ORPHANED_WITH_GRACE", "PURGING", ("ARM_GRACE",)),
        *EMPTY,
    ],
    "the launcher goes when all are killed already, and would have given time": [
        *KILLED,
        ("ORPHANED_WITH_GRACE", "KILLING", ()),
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("ORPHANED_WITH_GRACE", "GONE", ("LEAVE",)),
    ],
    "the launcher would have given time, and goes without reading the last word": [
        *LINGERING,
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("DRAINED", "ENDED", ("REPORT_END",)),
        ("ORPHANED_WITH_GRACE", "GONE", ("LEAVE",)),
    ],
    "a helper goes when there is nothing left to do": [
        *LINGERING,
        ("EMPTY", "DRAINING", ("DRAIN",)),
        ("HELPER_LOST", "DRAINING", ()),
        ("DRAINED", "ENDED", ("REPORT_END",)),
        ("HELPER_LOST", "ENDED", ()),
        ("REPORTED", "GONE", ("LEAVE",)),
    ],
    **{
        f"{who} goes, {when}": [*before, (event, "KILLING", KILL), (event, "KILLING", ()), *EMPTY]
        for who, event in (("the launcher", "ORPHANED"), ("a helper", "HELPER_LOST"))
        for when, before in (
            ("before anything is started", []),
            ("in the midst of the start", STARTED[:1]),
            ("while it runs", STARTED),
            ("in the settle window", FAILED),
            ("during a notice", NOTICED),
            ("while it stops", CLOSED),
            ("while it lingers", LINGERING),
            ("while it sweeps", SWEEPING),
            ("while it purges", PURGING),
        )
    },
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_life(script: Script) -> None:
    state = "WAITING"
    for event, after, actions in script:
        assert step(state, event) == (after, actions), f"{event} in {state}"
        state = after
    assert state == "GONE"


def test_the_scripts_reach_every_pair_of_the_table() -> None:
    reached = set()
    for script in SCRIPTS.values():
        state = "WAITING"
        for event, after, _actions in script:
            reached.add((state, event))
            state = after
    assert set(TABLE) - reached == set()


def test_a_pair_that_is_absent_is_an_error() -> None:
    for state, event in set(itertools.product(STATES, EVENTS)) - set(TABLE):
        with pytest.raises(LookupError, match=f"a group that is {state} cannot see {event}"):
            step(state, event)


def test_every_name_in_the_table_has_a_meaning_and_is_in_use() -> None:
    assert {name for name, _event in TABLE} | {after for after, _actions in TABLE.values()} == set(STATES)
    assert {event for _name, event in TABLE} == set(EVENTS)
    assert {action for _after, actions in TABLE.values() for action in actions} == set(ACTIONS) == set(keeper._ACTIONS)


def test_every_state_leads_to_the_end() -> None:
    ends = {"GONE"}
    while more := {state for (state, _event), (after, _actions) in TABLE.items() if after in ends} - ends:
        ends |= more
    assert ends == set(STATES)


@pytest.mark.parametrize("state", [state for state in STATES if state != "GONE"])
def test_every_state_handles_its_owner_and_every_loss(state: str) -> None:
    late = ("KILLING", "DRAINING", "ENDED")
    assert step(state, "KILL")[0] == (state if state in late else "KILLING")
    assert (state, "STOP") in TABLE
    assert step(state, "ORPHANED")[0] == ("GONE" if state in ("DRAINING", "ENDED") else "KILLING")
    assert step(state, "HELPER_LOST")[0] == (state if state in late else "KILLING")
    assert state == "WAITING" or (state, "ORPHANED_WITH_GRACE") in TABLE  # the policy comes with the order to start


def test_a_life_never_goes_back() -> None:
    before = {state: {after for (here, _event), (after, _) in TABLE.items() if here == state} for state in STATES}
    assert [*TopologicalSorter({state: after - {state} for state, after in before.items()}).static_order()]


def test_an_order_to_start_is_obeyed_in_one_state_only() -> None:
    obeyed = {
        state for (state, event), (_after, actions) in TABLE.items() if "START_WORKERS" in actions and event == "START"
    }
    refused = {state for (state, event), (_after, actions) in TABLE.items() if actions == ("REFUSE",)}
    assert obeyed == {"WAITING"}
    assert refused == {"KILLING", "DRAINING", "ENDED"}


def test_nobody_is_asked_to_stop_after_a_kill() -> None:
    # SIGKILL has been sent: every further word would come too late, and every wait is bounded by one deadline.
    states = ("KILLING", "DRAINING", "ENDED", "GONE")
    actions = {action for (state, _event), (_after, done) in TABLE.items() if state in states for action in done}
    assert actions == {"REFUSE", "ABANDON", "DRAIN", "REPORT_END", "ABANDON_LOGS", "LEAVE"}


@settings(max_examples=500)
@given(st.lists(st.integers(0, 63), max_size=60))
def test_whatever_comes_a_stop_is_never_taken_back(history: list[int]) -> None:
    """Any history of events: a group that is asked to end is given notice once at most, never runs again, and ends."""
    state, asked, notices = "WAITING", False, 0
    for number in history:
        events = [event for before, event in TABLE if before == state]
        if not events:
            break
        event = events[number % len(events)]
        state, actions = step(state, event)
        asked |= event.startswith(("STOP", "KILL", "ORPHANED", "HELPER_LOST"))
        notices += "GIVE_NOTICE" in actions
        assert not asked or state not in ("WAITING", "STARTING", "RUNNING", "SETTLING", "LINGERING")
        assert notices == 1 if state == "NOTICED" else notices <= 1
        if event in ("ORPHANED", "HELPER_LOST", "KILL"):
            assert state in ("KILLING", "DRAINING", "ENDED", "GONE")
    assert not asked or ends_by_itself(state) == "GONE"


def ends_by_itself(state: str) -> str:
    """Where a group comes to by time alone: no worker ends, nobody orders anything, and SIGKILL is of no use."""
    times = ("SETTLED", "NOTICE_OVER", "LINGER_OVER", "PATIENCE_OVER", "GRACE_OVER", "KILL_OVER", "DRAIN_OVER")
    for _ in STATES:
        event = next((event for event in (*times, "REPORTED") if (state, event) in TABLE), None)
        if event is None:
            return state
        state = step(state, event)[0]
    return state


def test_time_alone_ends_a_group_unless_it_runs() -> None:
    assert {state: ends_by_itself(state) for state in STATES} == {
        state: state if state in ("WAITING", "STARTING", "RUNNING") else "GONE" for state in STATES
    }


def test_a_deadline_means_something_in_the_state_that_arms_it() -> None:
    arms = {"ARM_SETTLE": "SETTLED", "ARM_GRACE": "GRACE_OVER", "ARM_LINGER": "LINGER_OVER", "KILL": "KILL_OVER"}
    arms |= {"ARM_PATIENCE": "PATIENCE_OVER", "DRAIN": "DRAIN_OVER", "GIVE_NOTICE": "NOTICE_OVER"}
    for after, actions in TABLE.values():
        for action in actions:
            assert action not in arms or (after, arms[action]) in TABLE
