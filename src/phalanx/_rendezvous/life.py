"""The life of a node in a job, as a table, and the effects of it: what a node has done by whoever carries it out. Pure.

A node enters the job, takes part in one generation after another, and leaves when the job is over. An absent pair is a
mistake in the node: `step` raises. Effects go to the node's store, its workers, and the user's console.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from phalanx._rendezvous.records import Job, Missing, Stop
from phalanx._store.store import Entry, Transaction

__all__ = ["Missing"]  # with all that is defined here

STATES = {
    "WAITING": "no worker runs here; the node waits for a generation in which it takes part",
    "RUNNING": "the workers of a generation run, or are being started",
    "STOPPING": "the workers of a generation are being ended; the node goes on",
    "DONE": "all workers here have succeeded; those of other nodes are waited for",
    "CLOSING": "the workers are being ended; the node goes on with nothing",
    "LEAVING": "no worker runs here, and none will; what the workers of all nodes have left is read",
    "LEFT": "the node has no part in the job any more",
}

EVENTS = {
    "FORMED": "the job's generation runs, and this node takes part",
    "MISSED": "the same, but the generation was ended before the node had begun",
    "FAILED": "a worker here has failed, or the workers could not be started",
    "SUCCEEDED": "the workers here are gone; all have succeeded",
    "GONE": "the workers here are gone, or none was started",
    "ENDED": "the generation that runs here has been ended, or the job has gone on without it",
    "OVER": "the job is over",
    "BARRIER": "the others have been waited for long enough",
    "LEAVE": "this node is to have no part in the job any more",
    "READ": "what the workers have left is read, or cannot be",
}

ACTIONS = {
    "START": "start the workers of the generation",
    "STOP": "end the workers within the grace period",
    "TELL": "tell the other nodes why the generation is to end",
    "ENTER": "write the node's entry: how far it is",
    "READ": "read what the workers of all nodes have left",
    "FINISH": "end",
}

TABLE: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("WAITING", "FORMED"): ("RUNNING", ("START",)),
    ("WAITING", "MISSED"): ("WAITING", ("ENTER",)),
    ("WAITING", "OVER"): ("LEAVING", ("READ",)),
    ("WAITING", "LEAVE"): ("LEFT", ("FINISH",)),
    ("RUNNING", "FAILED"): ("STOPPING", ("TELL",)),  # the group here ends its workers by itself
    ("RUNNING", "SUCCEEDED"): ("DONE", ("ENTER",)),
    ("RUNNING", "GONE"): ("WAITING", ("TELL", "ENTER")),
    ("RUNNING", "ENDED"): ("STOPPING", ("STOP",)),
    ("RUNNING", "OVER"): ("CLOSING", ("STOP",)),
    ("RUNNING", "LEAVE"): ("CLOSING", ("TELL", "STOP")),
    ("STOPPING", "FAILED"): ("STOPPING", ()),
    ("STOPPING", "SUCCEEDED"): ("WAITING", ("ENTER",)),
    ("STOPPING", "GONE"): ("WAITING", ("ENTER",)),
    ("STOPPING", "ENDED"): ("STOPPING", ()),
    ("STOPPING", "OVER"): ("CLOSING", ()),
    ("STOPPING", "LEAVE"): ("CLOSING", ("TELL",)),
    ("DONE", "ENDED"): ("WAITING", ("ENTER",)),
    ("DONE", "OVER"): ("LEAVING", ("READ",)),
    ("DONE", "BARRIER"): ("LEFT", ("FINISH",)),
    ("DONE", "LEAVE"): ("LEFT", ("FINISH",)),
    ("CLOSING", "FAILED"): ("CLOSING", ()),
    ("CLOSING", "SUCCEEDED"): ("LEAVING", ("READ",)),
    ("CLOSING", "GONE"): ("LEAVING", ("READ",)),
    ("CLOSING", "ENDED"): ("CLOSING", ()),
    ("CLOSING", "OVER"): ("CLOSING", ()),
    ("CLOSING", "LEAVE"): ("CLOSING", ()),
    ("LEAVING", "READ"): ("LEFT", ("FINISH",)),
    ("LEAVING", "LEAVE"): ("LEFT", ("FINISH",)),
    ("LEAVING", "OVER"): ("LEAVING", ()),
    **{("LEFT", event): ("LEFT", ()) for event in EVENTS},
}


def step(state: str, event: str) -> tuple[str, tuple[str, ...]]:
    """Return what follows when ``event`` happens to a node in ``state``. Raises LookupError: that cannot be.

    >>> step("RUNNING", "ENDED")
    ('STOPPING', ('STOP',))
    """
    try:
        return TABLE[state, event]
    except KeyError:
        raise LookupError(f"a node that is {state} cannot see {event}") from None


class Watch(NamedTuple):
    """Watch the keys below a prefix."""

    prefix: str


class Unwatch(NamedTuple):
    """Watch them no more."""

    prefix: str


class Submit(NamedTuple):
    """Have a transaction made."""

    ticket: int
    transaction: Transaction


class Fetch(NamedTuple):
    """Read the keys below a prefix."""

    ticket: int
    prefix: str


class Start(NamedTuple):
    """Start the workers of the job's generation, as the node of that group rank."""

    job: Job
    rank: int


class End(NamedTuple):
    """End the workers. ``stop``: why; None: the job has gone on without this node."""

    stop: Stop | None


class Heard(NamedTuple):
    """Something is to be said: why a generation ends, or what the leader has decided."""

    what: Stop | Job


class Earlier(NamedTuple):
    """A job of this id is over; this node has come too late for it, and waits for the next one."""


class Answer(NamedTuple):
    """Find an answer to what is asked of a generation, of which there are so many nodes.

    `Participant.has_answered` is called with the answer, and the same ``names``: of those that ask this.
    """

    what: str
    generation: int
    nodes: int
    names: tuple[str, ...]


class Found(NamedTuple):
    """What the nodes of the job have answered to a question.

    Attributes:
        job: The generation that was asked; None: nobody could be asked.
        answers: What the nodes have answered, by their ids: `questions.tell` reads it, and `stack_report`.
        why: Why nobody could be asked, or why those that are missing have not answered; "": all have.
    """

    job: Job | None
    answers: Mapping[str, bytes]
    why: str = ""


class Answered(NamedTuple):
    """Call ``tell`` with what was found: somebody has asked."""

    tell: Callable[[Found], None]
    found: Found


class Finish(NamedTuple):
    """The node has left.

    Attributes:
        state: "succeeded", "failed" or "stopped": how the job ended. "left": it goes on without this node. "unknown":
            how it has ended cannot be learnt here any more. "refused": it did not take this node. "timeout": nothing
            was decided in time. "unreachable": the store was not there. "damaged": what the store holds cannot be.
        why: In one line, where there is something to be said.
        job: The job as it was last; None: there was none.
        evidence: What the workers of the last generation have left, if it has failed: of all nodes, if the store was
            there; else of this one.
        ends_job: Whether nobody else is left.
    """

    state: str
    why: str = ""
    job: Job | None = None
    evidence: tuple[Entry, ...] = ()
    ends_job: bool = False


Effect = Watch | Unwatch | Submit | Fetch | Start | End | Heard | Earlier | Missing | Answer | Answered | Finish
