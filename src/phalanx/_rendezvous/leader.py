"""The leader of a job: makes the decisions of `membership` transactions of the store. Pure.

The agent whose id ``job/leader`` holds leads, for as long as that key is there: it goes with the agent's lease. Each
transaction has the condition that it is the same key still, and that the job is as the decision has found it: a leader
that was stopped or cut off, and does not know that another one leads, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from phalanx._rendezvous import candidates, membership, records, roll_call
from phalanx._rendezvous.evidence import JobEvidence
from phalanx._rendezvous.liveness import Liveness
from phalanx._rendezvous.records import Job, Node, Refusal, Stop, Waiting
from phalanx._rendezvous.rules import Notes, Rules
from phalanx._rendezvous.store_view import StoreView
from phalanx._store.store import JOB, Absent, Created, Delete, Entry, Put, Transaction, Unchanged

MOST_REFUSED = 64
"""Nodes that are refused in one transaction: etcd takes 128 operations at most."""


class Leader:
    """What a leader has noted, and decides.

    Args:
        me: Its own entry: a job that is not there yet is made with its numbers of nodes, and its policy.
        rules: What the job holds to.
        chance: Returns a random number, 0 to 1.
        since: The revision at which it became the leader.

    Attributes:
        decided: The revision that its last decision has made; nothing is decided before that is told.
        asks: The generation whose evidence is to be read for its next decision, see `learn`; -1: none.
    """

    def __init__(self, me: Node, rules: Rules, chance: Callable[[], float], since: int) -> None:
        self._nodes, self._policy = (me.min_nodes, me.max_nodes), me.policy
        self._rules = rules
        self._chance = chance
        self.since = since
        self._notes: Notes | None = None
        self._began: float | None = None  # when it could decide first
        self.decided = 0
        self.asks = -1
        self._cause: tuple[int, str] = -1, ""  # of which generation which machine is the root cause

    def learn(self, entries: Iterable[Entry], view: StoreView) -> None:
        """See the evidence of the generation that it `asks` for. Raises DamagedError."""
        job, _ = view.job()
        if job is not None and job.generation == self.asks:
            self._cause = job.generation, JobEvidence(entries, view.stop(job.generation), job.members).machine

    def waiting(self, view: StoreView, now: float) -> tuple[Transaction, str] | None:
        """Return the write of who is missing in a generation that waits, and a text that changes when that does.

        As of the last `decide`. None: it waits for nobody, as far as is known. Raises DamagedError.
        """
        (job, modified), notes = view.job(), self._notes
        if job is None or notes is None or not view.told(records.NODES):
            return None
        there = candidates.ready(job, view.nodes)
        is_enough = len(there) >= job.min_nodes
        if is_enough and (len(there) >= job.max_nodes or job.ends):
            return None  # it begins
        since = notes.since + job.delay
        enough = since if notes.enough is None else notes.enough
        until = max(since, enough + self._rules.last_call) if is_enough else since + self._rules.join_timeout
        if until == math.inf:
            return None
        words, ranks = roll_call.call((view.nodes[name].node for name in there), job.min_nodes, job.max_nodes)
        rank = ranks[0] if ranks else -1
        waiting = Waiting(job.generation, records.one_line(words), rank, max(0.0, until - now), is_enough)
        transaction = Transaction((Unchanged(records.STATE, modified),), (_put(records.WAITING, waiting),))
        return transaction, "\n".join((words, *there))  # who comes is to know how long it lasts

    def decide(
        self, view: StoreView, liveness: Liveness, now: float, regained: float = -math.inf
    ) -> tuple[Transaction | None, float]:
        """Return what is to be written now, and when to ask again. None: nothing. Raises DamagedError.

        A job that is over is of others where this node has found none that goes on: what is left of it is removed, once
        none of them is there. One that goes on may have had its agents killed until somebody is found to be left of it.
        ``regained``: when this node had the store again that was away.
        """
        if not view.told(records.NODES) or self.decided > view.told(records.JOB):
            return None, math.inf
        mine = Created(records.LEADER, self.since)
        job, modified = view.job()
        if job is None:
            first = _put(records.STATE, Job(0, "forming", *self._nodes, keep=self._rules.keep, policy=self._policy))
            return Transaction((mine, Absent(records.STATE)), (first,)), math.inf
        self._began = now if self._began is None else self._began
        if liveness.is_new if job.phase == "over" else not liveness.has_lived:
            until = self._of_others_until(job, view, regained)
            if now < until or not _is_left(job, view):
                return (None, until) if now < until else (_remove_job(mine, modified, view), math.inf)
            liveness.has_lived = liveness.has_lived or job.phase != "over"
        if self._notes is None:
            self._notes = Notes(job, now)
        self._notes.regained = regained
        stop = view.stop(job.generation)
        cause = self._cause[1] if self._cause[0] == job.generation else None
        made = membership.decide(job, stop, view.nodes, self._notes, now, self._rules, self._chance(), cause)
        self.asks = job.generation if made.asks else -1
        conditions: list[Absent | Created | Unchanged] = [mine, Unchanged(records.STATE, modified)]
        refused = [(node, why) for node, why in made.refused if not view.refusal(node)]
        # The others with the next decision, which follows when this one is told.
        writes: list[Put | Delete] = [
            _put(f"{records.REFUSED}{node}", Refusal(why)) for node, why in refused[:MOST_REFUSED]
        ]
        if made.job is not None:
            writes.append(_put(records.STATE, made.job))
            old = f"{records.STOP}{job.generation - 1}"  # a node that has not seen it sees a later generation
            writes += [Delete(old)] if view.entry(old) else []
            if made.job.is_kept:  # in the place of an earlier one, see `Kept`
                writes.append(Delete(records.KEPT, below=True))
        if made.stop is not None:
            key = f"{records.STOP}{job.generation}"
            conditions.append(Absent(key))
            writes.append(_put(key, made.stop))
            entry = f"{records.NODES}{made.stop.node}"
            if made.stop.kind == "lost" and view.entry(entry) is None:  # it may have come back just now
                conditions.append(Absent(entry))
        return Transaction(tuple(conditions), tuple(writes)) if writes else None, made.wake

    def _of_others_until(self, job: Job, view: StoreView, regained: float) -> float:
        """Return until when nothing is decided of a job that this node has had no part in: see `decide`."""
        assert self._began is not None
        patience = self._rules.return_timeout
        longest = max(self._began, min(regained, self._began + patience)) + patience
        if not _is_left(job, view):  # they may come back
            return longest if regained > -math.inf else self._began + self._rules.lost_after
        if job.phase == "over":
            return math.inf  # they leave
        return longest if job.ids else self._began  # those that were killed a moment ago are gone then


def _is_left(job: Job, view: StoreView) -> bool:
    """Whether a node is there that takes part in a job; if none has yet, one that was told the same of it."""
    if not job.ids:
        return any(candidates.was_told_the_same(job, seen.node) for seen in view.nodes.values())
    return any(name in view.nodes and view.nodes[name].node.state != "left" for name in job.ids)


def _remove_job(mine: Created, modified: int, view: StoreView) -> Transaction:
    """Return the end of what is left of a job of which nobody is: the next one is new."""
    keys = (records.STATE, *view.keys(records.STOP), *view.keys(records.REFUSED)[:MOST_REFUSED])
    return Transaction((mine, Unchanged(records.STATE, modified)), tuple(Delete(key) for key in keys))


def _put(key: str, record: Job | Stop | Refusal | Waiting) -> Put:
    return Put(key, records.write(record), JOB)
