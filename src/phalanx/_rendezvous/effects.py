"""What a node of a job asks of whoever carries it out: of its store, of its workers, of the user's console."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from phalanx._base.clock import format_duration
from phalanx._rendezvous.records import Job, Stop
from phalanx._store.store import Entry, Transaction


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


class Missing(NamedTuple):
    """The job waits for nodes.

    Attributes:
        words: How many have come, which, and for whom it waits: see `roll_call`.
        rank: The first node rank that is missing, if they were given; -1: they were not.
        seconds: For how long it goes on waiting, at most.
        is_enough: Whether it begins then: those that have come are enough.
    """

    words: str
    rank: int
    seconds: float
    is_enough: bool = False

    @property
    def line(self) -> str:
        """What is said of it.

        >>> Missing("1 of 2 nodes has come: 0 (h1); node 1 is missing", 1, 597.2).line
        'waiting at most 9m57s more: 1 of 2 nodes has come: 0 (h1); node 1 is missing'
        """
        return f"waiting at most {format_duration(self.seconds)} more: {self.words}"


class Look(NamedTuple):
    """Take the stacks of the workers of a generation, of which there are so many nodes, for those who ask.

    `Participant.has_looked` is told what they are, and the same ``looks``.
    """

    generation: int
    nodes: int
    looks: tuple[str, ...]


class Found(NamedTuple):
    """Where all ranks of the job are, as far as its nodes have said.

    Attributes:
        job: The generation that was asked for; None: nobody could be asked.
        answers: What the nodes have said, by their ids: `stack_report` reads it.
        why: Why nobody could be asked, or why those that are missing have not answered; "": all have.
    """

    job: Job | None
    answers: Mapping[str, bytes]
    why: str = ""


class Looked(NamedTuple):
    """Tell somebody who has asked where all ranks are."""

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


Effect = Watch | Unwatch | Submit | Fetch | Start | End | Heard | Earlier | Missing | Look | Looked | Finish
