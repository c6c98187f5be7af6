"""The life of an agent, told as scripts of events: what happens, and what is done about it."""

from __future__ import annotations

import itertools

import pytest

from phalanx._run.attempts import ACTIONS, EVENTS, STATES, TABLE, TERMINAL, step

Script = list[tuple[str, str, tuple[str, ...]]]
"""What happens, where that leads, and what is done."""

STARTING: Script = [("START", "STARTING", ("START_GROUP",))]
RUNNING: Script = [*STARTING, ("STARTED", "RUNNING", ())]
WAITING: Script = [*RUNNING, ("RETRY", "WAITING", ("ARM_DELAY",))]
AGAIN: Script = [("DELAY_OVER", "STARTING", ("START_GROUP",)), ("STARTED", "RUNNING", ())]
STOP = ("STOP", "STOPPING", ("STOP_GROUP",))
RESTART = ("RESTART", "RESTARTING", ("STOP_GROUP",))
STOPPED = ("GONE", "STOPPED", ())
AFTERWARDS = {state: [("STOP", state, ()), ("RESTART", state, ())] for state in TERMINAL}

SCRIPTS: dict[str, Script] = {
    "it succeeds": [*RUNNING, ("ALL_SUCCEEDED", "SUCCEEDED", ()), *AFTERWARDS["SUCCEEDED"]],
    "it fails twice, and succeeds": [
        *WAITING,
        *AGAIN,
        ("RETRY", "WAITING", ("ARM_DELAY",)),
        *AGAIN,
        ("ALL_SUCCEEDED", "SUCCEEDED", ()),
    ],
    "it fails, and no other attempt is allowed": [*RUNNING, ("GIVE_UP", "FAILED", ()), *AFTERWARDS["FAILED"]],
    "the first start fails": [*STARTING, ("GIVE_UP", "FAILED", ())],
    "a later start fails, and the next one does not": [
        *WAITING,
        AGAIN[0],
        ("RETRY", "WAITING", ("ARM_DELAY",)),
        *AGAIN,
        ("ALL_SUCCEEDED", "SUCCEEDED", ()),
    ],
    "a later start fails, and no other is allowed": [*WAITING, AGAIN[0], ("GIVE_UP", "FAILED", ())],
    "stopped before anything": [("STOP", "STOPPED", ()), *AFTERWARDS["STOPPED"]],
    "stopped in the start": [*STARTING, STOP, STOPPED],
    "stopped while it runs": [*RUNNING, STOP, STOPPED],
    "stopped twice, the second time sooner": [*RUNNING, STOP, STOP, STOPPED],
    "stopped in the delay": [*WAITING, ("STOP", "STOPPED", ())],
    "stopped in a restart": [*RUNNING, RESTART, STOP, STOPPED],
    "stopped, and a restart is asked for": [*RUNNING, STOP, ("RESTART", "STOPPING", ()), STOPPED],
    "stopped when it has failed, and no other attempt is allowed": [*RUNNING, STOP, ("GIVE_UP", "FAILED", ())],
    "somebody else ends the group": [*RUNNING, STOPPED],
    "a restart is asked for before anything": [("RESTART", "NEW", ()), *RUNNING, ("ALL_SUCCEEDED", "SUCCEEDED", ())],
    "a restart is asked for while it starts": [*STARTING, RESTART, ("GONE", "STARTING", ("START_GROUP",))],
    "a restart is asked for while it runs": [
        *RUNNING,
        RESTART,
        ("GONE", "STARTING", ("START_GROUP",)),
        ("STARTED", "RUNNING", ()),
        ("ALL_SUCCEEDED", "SUCCEEDED", ()),
    ],
    "a restart is asked for twice": [
        *RUNNING,
        RESTART,
        ("RESTART", "RESTARTING", ()),
        ("GONE", "STARTING", ("START_GROUP",)),
    ],
    "a restart is asked for, and the group succeeds all the same": [
        *RUNNING,
        RESTART,
        ("ALL_SUCCEEDED", "SUCCEEDED", ()),
    ],
    "a restart is asked for, and a worker outlives SIGKILL": [*RUNNING, RESTART, ("GIVE_UP", "FAILED", ())],
    "a restart is asked for in the delay": [*WAITING, ("RESTART", "WAITING", ()), *AGAIN],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_life(script: Script) -> None:
    state = "NEW"
    for event, after, actions in script:
        assert step(state, event) == (after, actions), f"{event} in {state}"
        state = after


def test_the_scripts_reach_every_pair_of_the_table() -> None:
    reached = set()
    for script in SCRIPTS.values():
        state = "NEW"
        for event, after, _actions in script:
            reached.add((state, event))
            state = after
    assert set(TABLE) - reached == set()


def test_a_pair_that_is_absent_is_an_error() -> None:
    for state, event in set(itertools.product(STATES, EVENTS)) - set(TABLE):
        with pytest.raises(LookupError, match=f"an agent that is {state} cannot see {event}"):
            step(state, event)


def test_every_name_in_the_table_has_a_meaning_and_is_in_use() -> None:
    assert {name for name, _event in TABLE} | {after for after, _actions in TABLE.values()} == set(STATES)
    assert {event for _name, event in TABLE} == set(EVENTS)
    assert {action for _after, actions in TABLE.values() for action in actions} == set(ACTIONS)


def test_every_state_can_be_reached_and_leads_to_an_end() -> None:
    reached, ends = {"NEW"}, set(TERMINAL)
    while more := {after for (state, _event), (after, _actions) in TABLE.items() if state in reached} - reached:
        reached |= more
    while more := {state for (state, _event), (after, _actions) in TABLE.items() if after in ends} - ends:
        ends |= more
    assert reached == ends == set(STATES)


@pytest.mark.parametrize("state", TERMINAL)
def test_an_end_is_final(state: str) -> None:
    cells = {event: cell for (before, event), cell in TABLE.items() if before == state}
    assert cells == {"STOP": (state, ()), "RESTART": (state, ())}


@pytest.mark.parametrize("state", STATES)
def test_every_state_takes_requests(state: str) -> None:
    assert {(state, "STOP"), (state, "RESTART")} <= set(TABLE)


def test_nothing_is_started_after_a_stop() -> None:
    for state in STATES:
        stopped = {step(state, "STOP")[0]}
        while more := {after for (before, _event), (after, _actions) in TABLE.items() if before in stopped} - stopped:
            stopped |= more
        assert stopped <= {"STOPPING", *TERMINAL}


def test_a_group_is_started_only_where_none_can_be_left() -> None:
    starts = {pair for pair, (_after, actions) in TABLE.items() if "START_GROUP" in actions}
    assert starts == {("NEW", "START"), ("WAITING", "DELAY_OVER"), ("RESTARTING", "GONE")}


def test_where_a_group_may_be_left_a_stop_ends_it() -> None:
    for state in ("STARTING", "RUNNING", "RESTARTING", "STOPPING"):
        assert step(state, "STOP") == ("STOPPING", ("STOP_GROUP",))
