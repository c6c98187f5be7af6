"""What a job is held to, and what its leader has noted of when it saw what. Pure."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

from phalanx._agent.restart_policy import RestartPolicy
from phalanx._rendezvous.records import Job, Node

PATIENCE = 30.0
"""Seconds after which a node is refused whose rank another one has, see `Rules`."""


class Rules(NamedTuple):
    """What a job is to hold to.

    Attributes:
        policy: When a failure is followed by another generation.
        join_timeout: Seconds that a generation may be waited for while there are too few nodes.
        last_call: Seconds after the minimum is there in which more nodes may come, before the first generation.
        rejoin_delay: Seconds between the coming of a node and the end of the generation that runs without it.
        end_timeout: Seconds after which a node that has not ended its workers is not waited for.
        exclude_after: After so many root causes in a row a machine is left out; 0: never.
        rank_timeout: Seconds after which a node is refused whose rank another one has: longer than a lease lasts, for
            that may be the node's own entry of before.
        lost_after: Seconds after which a node is lost whose entry is gone: etcd may have ended its lease by mistake,
            and the node enters again then.
        return_timeout: The same, where the store was away, from the moment on at which the leader has it again: the
            others need some time to reach it, too.
        lease: Seconds after which an agent is lost that is not heard of: for so long a store that one of them has stays
            for those that are lost, which may come back.
        keep: Whether what the job was is kept when it is over, see `records.KEPT`: of the agent that makes the job.
    """

    policy: RestartPolicy
    join_timeout: float = 600.0
    last_call: float = 30.0
    rejoin_delay: float = 30.0
    end_timeout: float = 90.0
    exclude_after: int = 0
    rank_timeout: float = PATIENCE
    lost_after: float = 0.0
    return_timeout: float = 0.0
    lease: float = 0.0
    keep: bool = False


class Seen(NamedTuple):
    """A node as the store has it: its entry, and the revisions at which that was made, and last written."""

    node: Node
    created: int
    modified: int = 0


class Notes:
    """When a leader saw what, by its own clock: of one phase of one generation, but for the restarts.

    A decision may not be made, and be taken again: what it would change here is ``planned``, until the job is so.
    """

    def __init__(self, job: Job, now: float) -> None:
        self.restarts: list[float] = []
        """When restarts were decided that count."""
        self.twice: dict[str, float] = {}
        """Since when nodes have a rank that another one has: that one's lease may yet run out."""
        self.regained = -math.inf
        """When the leader had the store again that was away, or a lease in place of one that was lost."""
        self.planned: Notes | None = None
        self.of = -1, ""
        self.turn(job, now)

    def turn(self, job: Job, now: float) -> None:
        """Note in which phase the job is."""
        count = len(job.restarts)
        self.restarts = self.restarts[:count] + [now - age for age in job.restarts[len(self.restarts) :]]
        if self.of == (job.generation, job.phase):
            return
        if self.planned is not None and self.planned.of == (job.generation, job.phase):
            self.planned.regained = self.regained  # it may have been since then
            self.__dict__.update(self.planned.__dict__)
        else:
            self.of = job.generation, job.phase
            self.since = now
            self.enough: float | None = None  # since when the minimum is there
            self.more: float | None = None  # since when nodes wait that could take part
            self.ending: float | None = None  # since when a `Stop` is there
            self.missing: dict[str, float] = {}  # since when the entries are gone of nodes that take part
        self.planned = None

    def after(self, job: Job, now: float) -> Notes:
        """Return what is to be noted once the job is that."""
        planned = copy.copy(self)
        planned.planned = None
        planned.turn(job, now)
        return planned
