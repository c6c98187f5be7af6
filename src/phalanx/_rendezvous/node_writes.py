"""What a node wants its store to hold, compared with what that holds: the writes that are missing are asked for. Pure.

Owns the node's own entry, why a generation is to end, and the decisions of the job while this node leads. Any write may
have been made or not: no answer has to arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from phalanx._rendezvous import records
from phalanx._rendezvous.effects import Effect, Fetch, Submit, Unwatch, Watch
from phalanx._rendezvous.leader import Leader
from phalanx._rendezvous.records import Job, Node, Stop, replace
from phalanx._rendezvous.rules import Rules
from phalanx._rendezvous.stops import Stops
from phalanx._rendezvous.store_view import StoreView
from phalanx._rendezvous.writes import Writes
from phalanx._store import store
from phalanx._store.store import JOB, KEPT, OWN, Absent, Delete, Entry, Put, Transaction, Unchanged

CONCEDED = 1.0
"""Seconds for which a node that has just come leaves it to the others to lead: they know whether the job lives."""


class NodeWrites:
    """What a node has written: the base of `Participant`, which says what happens.

    Args:
        me: Its entry, as it enters.
        rules: What the job holds to, while this node leads.
        hosts: See `Participant`.
        chance: Returns a random number, 0 to 1.
    """

    def __init__(self, me: Node, rules: Rules, *, hosts: bool | None, chance: Callable[[], float]) -> None:
        self.state = "WAITING"
        """See `life.STATES`."""
        self.wake = math.inf
        """When to call `Participant.tick`, though nothing has happened (monotonic seconds)."""
        self._me = me
        self._rules = rules
        self._hosts = hosts
        self._chance = chance
        self._view = StoreView()
        self._leader: Leader | None = None  # while this node leads
        self._knows_nodes = False  # whether the entries of the nodes are watched
        self._effects: list[Effect] = []
        self._now = 0.0
        self._away: float | None = 0.0  # since when the store does not answer
        self._regained = -math.inf  # when it was there again, or a lease in place of one that was lost
        self._is_final = False
        self._writes = Writes()
        self._entered: Node | None = None  # the entry that the store holds
        self._entered_at = 0  # the revision at which it was written
        self._entering = me  # the one that is being written
        self._has_succeeded = False  # whether the store may hold that: see `records.success_of`
        self._evidence = b""
        self._stops = Stops()  # why generations are to end: to be written
        self._asked: Stop | None = None  # somebody wants the job to end
        self._read: tuple[Entry, ...] | None = None
        self._cause: tuple[Entry, ...] | None = None  # evidence that the leader has asked for
        self._is_new = True  # whether it has not seen a job that goes on
        self._has_lived = False  # whether it has seen that somebody is left of that
        self._seen = 0, 0.0  # since which revision the leader leads, and since when this node knows
        self._leaves = ""  # why this node goes
        self._kept: tuple[Put, ...] = ()  # what is kept of the job, of this node
        self._keeping: tuple[Put, ...] = ()  # the same, and what is being written of it
        self._lost_job = False  # whether the job has ended without this node, and nothing is left of it

    def _job(self) -> Job | None:
        return self._view.job()[0]

    # --- the leader

    def _lead(self) -> None:
        """Decide what follows, if this node leads."""
        who, since = self._view.leader()
        # Who leaves decides nothing more: the others do not wait for what it makes of them, nor it for them.
        since = since if who == self._me.id and not self._lost_job and not self._leaves else 0
        if since != (self._leader.since if self._leader else 0):  # another one may have led meanwhile
            self._leader = Leader(self._me, self._rules, self._chance, since) if since else None
            self._writes.drop("cause")
            self._cause = None
        knows = since > 0 or (bool(self._hosts) and self.state == "LEAVING")
        if knows != self._knows_nodes:
            self._knows_nodes = knows
            if not knows:
                self._view.forget(records.NODES)
            self._effects.append(Watch(records.NODES) if knows else Unwatch(records.NODES))
        if self._leader is None or self._writes.is_open("decide"):
            return
        if self._cause is not None:
            self._leader.learn(self._cause, self._view)
            self._cause = None
        transaction, wake = self._leader.decide(
            self._view, self._now, is_new=self._is_new, has_lived=self._has_lived, regained=self._regained
        )
        self._has_lived = self._has_lived or self._leader.lives
        self.wake = min(self.wake, wake)
        if transaction is not None:
            self._submit("decide", transaction)
        if self._leader.asks >= 0 and not self._writes.is_open("cause") and self._is_due("cause"):
            self._effects.append(Fetch(self._writes.begin("cause"), f"{records.EVIDENCE}{self._leader.asks}/"))

    # --- the store

    def _write(self) -> None:
        """Have written what is to be in the store, and is not."""
        if self._away is not None or self._is_final:
            return
        if self.state == "LEAVING" and self._read is None and not self._writes.is_open("read"):
            self._read_left()
        if self._lost_job:
            return  # another job of this id may be there
        me = self._me
        # That the workers run is not said but after a lost lease: the job's state says it, until they have ended; or
        # until the job goes on without them. Who has not ended them by then cannot take part in what follows.
        is_said = me.state == "running" and not self._is_left_behind()
        is_known = self._entered == me or (self._entered is not None and is_said)
        if not is_known and not self._writes.is_open("enter"):
            self._submit("enter", Transaction((), self._entry_of(me)))
            self._entering = me
        if self._can_lead() and not self._writes.is_open("lead"):
            put = Put(records.LEADER, me.id.encode(), OWN)
            self._submit("lead", Transaction((Absent(records.LEADER),), (put,)))
        if not self._writes.is_open("stop") and (stop := self._stops.due(self._view, self._asked)):
            self._submit("stop", stop)
        if (left := self._left_to_keep()) and not self._writes.is_open("keep"):
            self._submit("keep", Transaction((Unchanged(records.STATE, self._view.job()[1]),), left))
            self._keeping = (*self._kept, *left)

    def _read_left(self) -> None:
        """Read what the workers of all nodes have left, if there is anything to be read."""
        job = self._job()
        generation = -1 if job is None or self._lost_job else job.with_evidence
        self._read = () if generation < 0 else None
        if generation >= 0 and self._is_due("read"):
            self._effects.append(Fetch(self._writes.begin("read"), f"{records.EVIDENCE}{generation}/"))

    def _entry_of(self, me: Node) -> tuple[Put | Delete, ...]:
        """Return the writes of how far this node is. That its workers have succeeded stays, if its machine goes."""
        writes: list[Put | Delete] = [Put(f"{records.NODES}{me.id}", records.write(me), OWN)]
        success = records.success_of(me.id)
        if me.state == "done":
            self._has_succeeded = True
            writes.append(Put(success, records.write(replace(me, state="left")), JOB))
        elif self._has_succeeded:
            writes.append(Delete(success))
        if self._evidence:
            its, old = records.evidence_of(me), records.evidence_of(me, before=1)
            writes += [Put(its, self._evidence, JOB), Delete(old)]
        return tuple(writes)

    def _is_left_behind(self) -> bool:
        job = self._job()
        return job is not None and job.generation > self._me.generation

    def _left_to_keep(self) -> tuple[Put, ...]:
        """Return what is to be kept of the job, and is not yet: each node keeps its evidence, the leader the job.

        These are writes of their own: the last decision and its copy may be more than one request can hold.
        """
        job, state = self._job(), self._view.entry(records.STATE)
        if self.state != "LEAVING" or self._lost_job or job is None or state is None or not job.is_kept:
            return ()
        found = []
        if self._evidence and self._me.generation == job.with_evidence:
            found.append(Put(f"{records.KEPT}{records.evidence_of(self._me)}", self._evidence, KEPT))
        if self._leader is not None:
            found.append(Put(f"{records.KEPT}{records.STATE}", state.value, KEPT))
        return tuple(put for put in found if put not in self._kept)

    def _can_lead(self) -> bool:
        """Whether nobody leads, and this node may."""
        is_here = self._entered is not None and self.state != "CLOSING" and not self._lost_job and not self._leaves
        if not is_here or self._view.told(records.JOB) == 0 or self._view.leader()[0]:
            return False
        job = self._job()
        if job is None and self._hosts is False:
            return False  # what it is to be, the node says that hosts the store: it is there, and stays if refused
        if self._has_lived or job is None or job.phase == "over" or self._now >= self._seen[1] + CONCEDED:
            return True
        self.wake = min(self.wake, self._seen[1] + CONCEDED)
        return False

    def _submit(self, what: str, transaction: Transaction) -> None:
        if self._is_due(what):
            self._effects.append(Submit(self._writes.begin(what), transaction))

    def _is_due(self, what: str) -> bool:
        """Whether something may be asked for now; if it was just now in vain, it is tried again in a while."""
        until = self._writes.closed_until(what)
        if self._now < until:
            self.wake = min(self.wake, until)
        return self._now >= until

    def _note_done(self, event: store.Done) -> None:
        what = self._writes.end(event, self._now)
        if what == "keep" and event.made is not None:  # False: the job has gone, and with it what was to be kept
            self._kept = self._keeping
        if event.made and what == "enter":
            self._entered, self._entered_at = self._entering, event.revision
        elif event.made and what == "decide" and self._leader is not None:
            self._leader.decided = event.revision
