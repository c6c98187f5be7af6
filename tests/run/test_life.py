"""The life of an agent, told as scripts of events: what happens, and what is done about it."""

from __future__ import annotations

import itertools

import pytest

from phalanx._run.attempts import ACTIONS, EVENTS, STATES, TABLE, TERMINAL, step

STARTING = "START>STARTING+START_GROUP "
RUNNING = f"{STARTING} STARTED>RUNNING "
WAITING = f"{RUNNING} RETRY>WAITING+ARM_DELAY "
AGAIN = "DELAY_OVER>STARTING+START_GROUP STARTED>RUNNING "
STOP = "STOP>STOPPING+STOP_GROUP "
RESTART = "RESTART>RESTARTING+STOP_GROUP "
STOPPED = "GONE>STOPPED "
WELL = "ALL_SUCCEEDED>SUCCEEDED "

SCRIPTS = {
    "it succeeds": f"{RUNNING} {WELL} STOP>SUCCEEDED RESTART>SUCCEEDED",
    "it fails twice, and succeeds": f"{WAITING} {AGAIN} RETRY>WAITING+ARM_DELAY {AGAIN} {WELL}",
    "it fails, and no other attempt is allowed": f"{RUNNING} GIVE_UP>FAILED STOP>FAILED RESTART>FAILED",
    "the first start fails": f"{STARTING} GIVE_UP>FAILED",
    "a later start fails, and the next one does not": (
        f"{WAITING} DELAY_OVER>STARTING+START_GROUP RETRY>WAITING+ARM_DELAY {AGAIN} {WELL}"
    ),
    "stopped before anything": "STOP>STOPPED STOP>STOPPED RESTART>STOPPED",
    "stopped in the start": f"{STARTING} {STOP} {STOPPED}",
    "stopped twice while it runs, the second time sooner": f"{RUNNING} {STOP} {STOP} {STOPPED}",
    "stopped in the delay": f"{WAITING} STOP>STOPPED",
    "stopped in a restart": f"{RUNNING} {RESTART} {STOP} {STOPPED}",
    "stopped, and a restart is asked for": f"{RUNNING} {STOP} RESTART>STOPPING {STOPPED}",
    "stopped when it has failed, and no other attempt is allowed": f"{RUNNING} {STOP} GIVE_UP>FAILED",
    "somebody else ends the group": f"{RUNNING} {STOPPED}",
    "a restart is asked for before anything": f"RESTART>NEW {RUNNING} {WELL}",
    "a restart is asked for while it starts": f"{STARTING} {RESTART} GONE>STARTING+START_GROUP",
    "a restart is asked for twice": f"{RUNNING} {RESTART} RESTART>RESTARTING GONE>STARTING+START_GROUP",
    "a restart is asked for, and the group succeeds all the same": f"{RUNNING} {RESTART} {WELL}",
    "a restart is asked for, and a worker outlives SIGKILL": f"{RUNNING} {RESTART} GIVE_UP>FAILED",
    "a restart is asked for in the delay": f"{WAITING} RESTART>WAITING {AGAIN}",
}
"""What happens, where that leads, and what is done: ``EVENT>STATE+ACTION``, from NEW on."""


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_life(script: str) -> None:
    state = "NEW"
    for told in script.split():
        event, _, after = told.partition(">")
        state, actions = step(state, event)
        assert "+".join((state, *actions)) == after, event


def test_the_scripts_reach_every_pair_of_the_table() -> None:
    reached = set()
    for script in SCRIPTS.values():
        state = "NEW"
        for told in script.split():
            event = told.partition(">")[0]
            reached.add((state, event))
            state = step(state, event)[0]
    assert set(TABLE) == reached


def test_a_pair_that_is_absent_is_an_error() -> None:
    for state, event in set(itertools.product(STATES, EVENTS)) - set(TABLE):
        with pytest.raises(LookupError, match=f"an agent that is {state} cannot see {event}"):
            step(state, event)


def test_every_name_in_the_table_has_a_meaning_and_is_in_use() -> None:
    assert {name for name, _event in TABLE} | {after for after, _actions in TABLE.values()} == set(STATES)
    assert {event for _name, event in TABLE} == set(EVENTS)
    assert {action for _after, actions in TABLE.values() for action in actions} == set(ACTIONS)


def test_nothing_is_started_after_a_stop() -> None:
    for state in STATES:
        stopped = {step(state, "STOP")[0]}
        while more := {after for (before, _event), (after, _actions) in TABLE.items() if before in stopped} - stopped:
            stopped |= more
        assert stopped <= {"STOPPING", *TERMINAL}


def test_a_group_is_started_only_where_none_can_be_left() -> None:
    starts = {pair for pair, (_after, actions) in TABLE.items() if "START_GROUP" in actions}
    assert starts == {("NEW", "START"), ("WAITING", "DELAY_OVER"), ("RESTARTING", "GONE")}
