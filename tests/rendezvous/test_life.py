"""The life of a node, told as scripts of events: what happens, and what is done about it."""

from __future__ import annotations

import pytest

from phalanx._rendezvous.life import ACTIONS, EVENTS, STATES, TABLE, step

Script = list[tuple[str, str, tuple[str, ...]]]
"""What happens, where that leads, and what is done."""

RUNNING: Script = [("FORMED", "RUNNING", ("START",))]
OVER: Script = [("OVER", "LEAVING", ("READ",)), ("READ", "LEFT", ("FINISH",)), ("LEAVE", "LEFT", ())]

SCRIPTS: dict[str, Script] = {
    "it succeeds": [*RUNNING, ("SUCCEEDED", "DONE", ("ENTER",)), *OVER],
    "a worker fails here": [*RUNNING, ("FAILED", "STOPPING", ("TELL",)), ("GONE", "WAITING", ("ENTER",)), *RUNNING],
    "a worker fails elsewhere": [*RUNNING, ("ENDED", "STOPPING", ("STOP",)), ("GONE", "WAITING", ("ENTER",)), *RUNNING],
    "a worker fails elsewhere, then here": [
        *RUNNING, ("ENDED", "STOPPING", ("STOP",)), ("FAILED", "STOPPING", ()), ("GONE", "WAITING", ("ENTER",)),
    ],
    "all have succeeded here as they were to be ended": [
        *RUNNING, ("ENDED", "STOPPING", ("STOP",)), ("SUCCEEDED", "WAITING", ("ENTER",)),
    ],
    "a worker fails elsewhere after all have succeeded here": [
        *RUNNING, ("SUCCEEDED", "DONE", ("ENTER",)), ("ENDED", "WAITING", ("ENTER",)), *RUNNING,
    ],
    "the others go on for too long": [
        *RUNNING, ("SUCCEEDED", "DONE", ("ENTER",)), ("BARRIER", "LEFT", ("FINISH",)),
    ],
    "the generation has ended before the node had begun": [("MISSED", "WAITING", ("ENTER",)), *RUNNING],
    "a spare, as the job ends": OVER,
    "the job ends without it": [
        *RUNNING, ("OVER", "CLOSING", ("STOP",)), ("GONE", "LEAVING", ("READ",)), *OVER[1:],
    ],
    "the node goes while its workers run": [
        *RUNNING, ("LEAVE", "CLOSING", ("TELL", "STOP")), ("ENDED", "CLOSING", ()), ("GONE", "LEAVING", ("READ",)),
        *OVER[1:],
    ],
    "the node goes while it waits": [("LEAVE", "LEFT", ("FINISH",))],
    "the workers are gone, and nobody knows why": [*RUNNING, ("GONE", "WAITING", ("TELL", "ENTER"))],
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_life(name: str) -> None:
    state = "WAITING"
    for event, after, actions in SCRIPTS[name]:
        assert step(state, event) == (after, actions), (name, state, event)
        state = after


def test_all_has_a_meaning() -> None:
    assert {state for state, _ in TABLE} == STATES.keys()
    assert {event for _, event in TABLE} == EVENTS.keys()
    assert {action for _, actions in TABLE.values() for action in actions} == ACTIONS.keys()
    assert {state for state, _ in TABLE.values()} <= STATES.keys()


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(LookupError, match="a node that is WAITING cannot see SUCCEEDED"):
        step("WAITING", "SUCCEEDED")
