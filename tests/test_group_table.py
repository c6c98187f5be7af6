"""The life of a group, told as scripts of events: what happens, and what is done about it."""

from __future__ import annotations

import itertools

import pytest

from phalanx._core.group import TABLE, Action, Event, State, step

S, E, A = State, Event, Action

Script = list[tuple[Event, State, tuple[Action, ...]]]
"""What happens, where that leads, and what is done."""

STOP = (A.SIGNAL, A.ARM_GRACE)

STARTED: Script = [(E.STARTED, S.RUNNING, ())]
FAILED: Script = [*STARTED, (E.ONE_FAILED, S.SETTLING, (A.ARM_SETTLE,))]
STOPPING: Script = [*FAILED, (E.SETTLED, S.STOPPING, STOP)]
CLOSED: Script = [*STARTED, (E.STOP, S.STOPPING, STOP)]
KILLED: Script = [*STARTED, (E.KILL, S.KILLING, (A.KILL,))]
SWEEPING: Script = [*STARTED, (E.ALL_ENDED, S.SWEEPING, (A.SWEEP,))]
SWEPT: Script = [(E.SWEPT, S.ENDED, (A.FINISH,))]
LOST: Script = [(E.KEEPER_LOST, S.ENDED, (A.FINISH_LOST,))]

SCRIPTS: dict[str, Script] = {
    "all succeed, one after the other": [
        *STARTED,
        (E.ONE_SUCCEEDED, S.RUNNING, ()),
        (E.ONE_SUCCEEDED, S.RUNNING, ()),
        (E.ALL_ENDED, S.SWEEPING, (A.SWEEP,)),
        *SWEPT,
    ],
    "one fails, its peers die of our signal": [
        *STOPPING,
        (E.ONE_FAILED, S.STOPPING, ()),
        (E.ALL_ENDED, S.SWEEPING, (A.SWEEP,)),
        *SWEPT,
    ],
    "one fails, a peer ends well when asked to": [
        *STOPPING,
        (E.ONE_SUCCEEDED, S.STOPPING, ()),
        (E.ALL_ENDED, S.SWEEPING, (A.SWEEP,)),
        *SWEPT,
    ],
    "peers end by themselves in the settle window, and none is left": [
        *FAILED,
        (E.ONE_FAILED, S.SETTLING, ()),
        (E.ONE_SUCCEEDED, S.SETTLING, ()),
        (E.ALL_ENDED, S.SWEEPING, (A.SWEEP,)),
        *SWEPT,
    ],
    "closed in the settle window": [*FAILED, (E.STOP, S.STOPPING, STOP), (E.ALL_ENDED, S.SWEEPING, (A.SWEEP,)), *SWEPT],
    "killed in the settle window": [*FAILED, (E.KILL, S.KILLING, (A.KILL,)), (E.ALL_ENDED, S.KILLING, ()), *SWEPT],
    "closed, and one ignores it": [
        *CLOSED,
        (E.GRACE_OVER, S.KILLING, (A.KILL,)),
        (E.ONE_FAILED, S.KILLING, ()),
        (E.ONE_SUCCEEDED, S.KILLING, ()),
        (E.ALL_ENDED, S.KILLING, ()),
        *SWEPT,
    ],
    "closed twice: the signal is sent again, the grace can only get shorter": [
        *CLOSED,
        (E.STOP, S.STOPPING, STOP),
        (E.KILL, S.KILLING, (A.KILL,)),
        (E.STOP, S.KILLING, ()),
        (E.KILL, S.KILLING, ()),
        *SWEPT,
        (E.STOP, S.ENDED, ()),
        (E.KILL, S.ENDED, ()),
    ],
    "killed, and a worker outlives it: the keeper gives it up": [*KILLED, (E.ONE_FAILED, S.KILLING, ()), *SWEPT],
    "closed while it sweeps": [*SWEEPING, (E.STOP, S.SWEEPING, ()), *SWEPT],
    "killed while it sweeps": [*SWEEPING, (E.KILL, S.KILLING, (A.KILL,)), *SWEPT],
    "what was left behind takes all of the grace": [*SWEEPING, (E.GRACE_OVER, S.KILLING, (A.KILL,)), *SWEPT],
    "it cannot be started": [(E.START_FAILED, S.ENDED, (A.FINISH,))],
    "closed before it is up": [(E.STOP, S.KILLING, (A.KILL,)), (E.STARTED, S.KILLING, (A.KILL,)), *SWEPT],
    "killed before it turns out that it cannot be started": [
        (E.KILL, S.KILLING, (A.KILL,)),
        (E.START_FAILED, S.ENDED, (A.FINISH,)),
    ],
    "the keeper is lost while it starts": LOST,
    "the keeper is lost while it runs": [*STARTED, *LOST],
    "the keeper is lost in the settle window": [*FAILED, *LOST],
    "the keeper is lost while it stops": [*CLOSED, *LOST],
    "the keeper is lost while it kills": [*KILLED, *LOST],
    "the keeper is lost while it sweeps": [*SWEEPING, *LOST],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_life(script: Script) -> None:
    state = S.STARTING
    for event, after, actions in script:
        assert step(state, event) == (after, actions), f"{event.name} in {state.name}"
        state = after
    assert state is S.ENDED


def test_the_scripts_reach_every_pair_of_the_table() -> None:
    reached = set()
    for script in SCRIPTS.values():
        state = S.STARTING
        for event, after, _actions in script:
            reached.add((state, event))
            state = after
    assert set(TABLE) - reached == set()


@pytest.mark.parametrize("state, event", sorted(set(itertools.product(S, E)) - set(TABLE), key=str))
def test_a_pair_that_is_absent_is_an_error(state: State, event: Event) -> None:
    with pytest.raises(LookupError, match=f"a group that is {state.name} cannot see {event.name}"):
        step(state, event)


def test_every_state_leads_to_the_end() -> None:
    ends = {S.ENDED}
    while more := {state for (state, _event), (after, _actions) in TABLE.items() if after in ends} - ends:
        ends |= more
    assert ends == set(S)


@pytest.mark.parametrize("state", [state for state in S if state is not S.ENDED])
def test_every_live_state_hears_its_owner_and_the_loss_of_the_keeper(state: State) -> None:
    assert step(state, E.KILL)[0] is S.KILLING
    assert (state, E.STOP) in TABLE
    assert step(state, E.KEEPER_LOST) == (S.ENDED, (A.FINISH_LOST,))


def test_nothing_is_done_after_the_end() -> None:
    assert {actions for (state, _event), (_after, actions) in TABLE.items() if state is S.ENDED} == {()}


def test_nobody_is_asked_to_stop_after_a_kill() -> None:
    # SIGKILL has been sent: every further word would come too late, and every wait is bounded by the keeper's own.
    actions = {action for (state, _event), (_after, done) in TABLE.items() if state is S.KILLING for action in done}
    assert actions == {A.KILL, A.FINISH, A.FINISH_LOST}


@pytest.mark.parametrize("action", A)
def test_every_action_is_taken_somewhere(action: Action) -> None:
    assert any(action in actions for _after, actions in TABLE.values())
