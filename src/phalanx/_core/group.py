"""The life of a group, as a table. Pure: it decides, and touches nothing.

A group starts together, lives together and falls together: the first failure opens a short window in which peers
may leave evidence of their own, then all are asked to stop, then all are killed, and whatever any of them left behind
is swept away. `TABLE` is the whole of it; a pair that is absent is a mistake in the supervisor, and an error.
"""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """Where a group stands."""

    STARTING = auto()
    RUNNING = auto()
    SETTLING = auto()
    STOPPING = auto()
    KILLING = auto()
    SWEEPING = auto()
    ENDED = auto()


class Event(Enum):
    """What can happen to a group."""

    STARTED = "every worker is up"
    START_FAILED = "a worker could not be started; the keeper has removed the others"
    ONE_SUCCEEDED = "a worker ended well, others live"
    ONE_FAILED = "a worker failed by itself, others live"
    ALL_ENDED = "no worker is left"
    SETTLED = "the settle window is over"
    STOP = "the owner asks for a graceful end"
    KILL = "the owner asks for an end at once"
    GRACE_OVER = "the grace period is over"
    SWEPT = "no descendant is left, or the rest has been abandoned"
    KEEPER_LOST = "the keeper has died, or is silent beyond every deadline"


class Action(Enum):
    """What the supervisor does."""

    ARM_SETTLE = "open the settle window"
    SIGNAL = "send the death signal to the live workers"
    ARM_GRACE = "start the grace period, or shorten the one that runs"
    SWEEP = "have what the workers left behind removed, politely first"
    KILL = "have every process of the group killed"
    FINISH = "report, and let go of the keeper"
    FINISH_LOST = "remove what is left without the keeper, and report its loss"


S, E, A = State, Event, Action

TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (S.STARTING, E.STARTED): (S.RUNNING, ()),
    (S.STARTING, E.START_FAILED): (S.ENDED, (A.FINISH,)),
    (S.STARTING, E.STOP): (S.KILLING, (A.KILL,)),
    (S.STARTING, E.KILL): (S.KILLING, (A.KILL,)),
    (S.STARTING, E.KEEPER_LOST): (S.ENDED, (A.FINISH_LOST,)),
    (S.RUNNING, E.ONE_SUCCEEDED): (S.RUNNING, ()),
    (S.RUNNING, E.ONE_FAILED): (S.SETTLING, (A.ARM_SETTLE,)),
    (S.RUNNING, E.ALL_ENDED): (S.SWEEPING, (A.SWEEP,)),
    (S.RUNNING, E.STOP): (S.STOPPING, (A.SIGNAL, A.ARM_GRACE)),
    (S.RUNNING, E.KILL): (S.KILLING, (A.KILL,)),
    (S.RUNNING, E.KEEPER_LOST): (S.ENDED, (A.FINISH_LOST,)),
    (S.SETTLING, E.ONE_SUCCEEDED): (S.SETTLING, ()),
    (S.SETTLING, E.ONE_FAILED): (S.SETTLING, ()),
    (S.SETTLING, E.ALL_ENDED): (S.SWEEPING, (A.SWEEP,)),
    (S.SETTLING, E.SETTLED): (S.STOPPING, (A.SIGNAL, A.ARM_GRACE)),
    (S.SETTLING, E.STOP): (S.STOPPING, (A.SIGNAL, A.ARM_GRACE)),
    (S.SETTLING, E.KILL): (S.KILLING, (A.KILL,)),
    (S.SETTLING, E.KEEPER_LOST): (S.ENDED, (A.FINISH_LOST,)),
    (S.STOPPING, E.ONE_SUCCEEDED): (S.STOPPING, ()),
    (S.STOPPING, E.ONE_FAILED): (S.STOPPING, ()),
    (S.STOPPING, E.ALL_ENDED): (S.SWEEPING, (A.SWEEP,)),
    (S.STOPPING, E.STOP): (S.STOPPING, (A.SIGNAL, A.ARM_GRACE)),
    (S.STOPPING, E.GRACE_OVER): (S.KILLING, (A.KILL,)),
    (S.STOPPING, E.KILL): (S.KILLING, (A.KILL,)),
    (S.STOPPING, E.KEEPER_LOST): (S.ENDED, (A.FINISH_LOST,)),
    (S.KILLING, E.STARTED): (S.KILLING, (A.KILL,)),
    (S.KILLING, E.START_FAILED): (S.ENDED, (A.FINISH,)),
    (S.KILLING, E.ONE_SUCCEEDED): (S.KILLING, ()),
    (S.KILLING, E.ONE_FAILED): (S.KILLING, ()),
    (S.KILLING, E.ALL_ENDED): (S.KILLING, ()),
    (S.KILLING, E.STOP): (S.KILLING, ()),
    (S.KILLING, E.KILL): (S.KILLING, ()),
    (S.KILLING, E.SWEPT): (S.ENDED, (A.FINISH,)),
    (S.KILLING, E.KEEPER_LOST): (S.ENDED, (A.FINISH_LOST,)),
    (S.SWEEPING, E.STOP): (S.SWEEPING, ()),
    (S.SWEEPING, E.GRACE_OVER): (S.KILLING, (A.KILL,)),
    (S.SWEEPING, E.KILL): (S.KILLING, (A.KILL,)),
    (S.SWEEPING, E.SWEPT): (S.ENDED, (A.FINISH,)),
    (S.SWEEPING, E.KEEPER_LOST): (S.ENDED, (A.FINISH_LOST,)),
    (S.ENDED, E.STOP): (S.ENDED, ()),
    (S.ENDED, E.KILL): (S.ENDED, ()),
}


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """What follows when ``event`` happens to a group in ``state``. Raises LookupError for a pair that cannot be.

    >>> step(State.RUNNING, Event.ONE_FAILED)
    (<State.SETTLING: 3>, (<Action.ARM_SETTLE: 'open the settle window'>,))
    """
    try:
        return TABLE[state, event]
    except KeyError:
        msg = f"a group that is {state.name} cannot see {event.name}"
        raise LookupError(msg) from None
