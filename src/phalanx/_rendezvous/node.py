"""A node of a job: what its agent does as the store and its workers tell. Pure: it returns what is to be done.

Owns the node's own entry, its part in each generation, and the decisions of the job while this node leads. Any event
may come at any time, and any write may have been made or not: `Participant` compares what it wants the store to hold
with what that holds, and writes what is missing.
"""

from __future__ import annotations

import math

from phalanx._rendezvous import life, records
from phalanx._rendezvous.effects import End, Fetch, Finish, Heard, Start, Submit, Unwatch, Watch
from phalanx._rendezvous.leader import Leader
from phalanx._rendezvous.records import DamagedError, Stop, replace
from phalanx._rendezvous.stops import Stops
from phalanx._rendezvous.store_view import StoreView
from phalanx._rendezvous.writes import Writes
from phalanx._store import store
from phalanx._store.store import JOB, OWN, Absent, Delete, Put, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._rendezvous.effects import Effect
    from phalanx._rendezvous.records import Job, Node
    from phalanx._rendezvous.rules import Rules
    from phalanx._store.store import Entry, StoreEvent

PATIENCE = 5.0
"""Seconds for which a node that leaves waits for the store, and the leader for the others."""


class Participant:
    """A node of a job.

    Args:
        me: Its entry, as it enters.
        rules: What the job holds to, while this node leads.
        barrier: Seconds for which it waits, once its workers have succeeded, for those of other nodes.
        chance: Returns a random number, 0 to 1.
    """

    def __init__(
        self, me: Node, rules: Rules, *, barrier: float = 300.0, chance: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.state = "WAITING"
        """See `life.STATES`."""
        self.wake = math.inf
        """When to call `tick`, though nothing has happened (monotonic seconds)."""
        self._me = me
        self._rules = rules
        self._barrier = barrier
        self._chance = chance
        self._view = StoreView()
        self._leader: Leader | None = None  # while this node leads
        self._effects: list[Effect] = []
        self._now = 0.0
        self._since = 0.0  # when the state was entered
        self._away: float | None = 0.0  # since when the store does not answer
        self._begun = self._is_final = False
        self._writes = Writes()
        self._entered: Node | None = None  # the entry that the store holds
        self._entry_lease = OWN
        self._evidence = b""
        self._stops = Stops()
        self._asked: Stop | None = None  # somebody wants the job to end
        self._by = math.inf  # when that is waited for no more
        self._ended = -1  # the generation whose end was said
        self._heard: tuple[int, str] = (-1, "")
        self._read: tuple[Entry, ...] | None = None
        self._lost_job = False  # whether the job has ended without this node, and nothing is left of it
        self._leaves = ""  # why this node goes
        self._is_led = False  # whether the others run, and this node waits

    # --- what happens

    def begin(self, now: float) -> list[Effect]:
        """Enter the job."""
        self._now = self._since = self._away = now
        self._begun = True
        self._effects.append(Watch(records.JOB))
        return self._settle()

    def store_told(self, event: StoreEvent, now: float) -> list[Effect]:
        """See what the store tells."""
        self._now = now
        if isinstance(event, store.Snapshot | store.Changed):
            self._view.take(event)
            if event.prefix == records.JOB:
                self._writes.reopen()
        elif isinstance(event, store.Done):
            self._note_done(event)
        elif isinstance(event, store.Fetched):
            if self._writes.end(event, now) == "read":
                self._read = event.entries  # None: it is tried again
        elif isinstance(event, store.Away):
            self._away = now if self._away is None else self._away
        elif isinstance(event, store.Back):
            self._away = None
            self._writes.reopen()
        elif isinstance(event, store.LeaseLost):
            self._entered = None
            self._writes.drop("enter")  # it may have been made with the lease that is lost
            self._writes.reopen()
        else:
            self._finish(Finish("refused", event.why, self._job()))
        return self._settle()

    def workers_failed(self, stop: Stop, now: float) -> list[Effect]:
        """See that a worker of this node has failed; the others are being ended. ``stop`` says who, and how."""
        self._now = now
        self._stops.say(stop)
        self._see("FAILED")
        return self._settle()

    def workers_gone(self, me: Node, evidence: bytes, now: float) -> list[Effect]:
        """See that the workers are gone. ``me``: the entry, with how they ended, and a port that is free."""
        self._now = now
        generation = self._me.generation
        succeeded = me.outcome == "succeeded"
        self._me = replace(me, state="left" if self._leaves else "ready", generation=generation)
        self._evidence = evidence
        if not succeeded and self.state == "RUNNING":
            self._stops.say(Stop(generation, "failure", me.id, me.host, "its workers are gone"))
        self._see("SUCCEEDED" if succeeded else "GONE")
        return self._settle()

    def ask_stop(self, signal: int, error: str, grace: float, now: float) -> list[Effect]:
        """End the whole job, because somebody here wants that: within ``grace``, or at once where no worker runs."""
        self._now = now
        me, runs = self._me, self.state in ("RUNNING", "STOPPING", "CLOSING")
        self._asked = Stop(max(0, me.generation), "signal", me.id, me.host, records.one_line(error), signal=signal)
        self._by = min(self._by, now + (grace if runs else 0.0) + PATIENCE)
        if self.state == "RUNNING":
            self._see("ENDED")
        return self._settle()

    def ask_leave(self, why: str, now: float) -> list[Effect]:
        """Take this node out of the job, which goes on without it if it can."""
        self._now = now
        me = self._me
        self._leaves = why
        if self.state == "RUNNING":
            self._stops.say(Stop(me.generation, "left", me.id, me.host, records.one_line(why)))
        self._by = min(self._by, now + PATIENCE)
        if self.state == "DONE":  # its success is to stay known
            self._barrier = min(self._barrier, now - self._since)
        else:
            self._see("LEAVE")
        return self._settle()

    def tick(self, now: float) -> list[Effect]:
        """See that it is `wake`, or later."""
        self._now = now
        return self._settle()

    @property
    def generation(self) -> int:
        """The generation whose workers run here, or have ended here last; -1: none."""
        return self._me.generation

    # --- what follows

    def _settle(self) -> list[Effect]:
        """Do all that follows from what is known now."""
        self.wake = math.inf
        if self._begun and not self._is_final:
            try:
                self._look()
                self._lead()
                self._write()
                self._wait()
            except DamagedError as error:
                self._finish(Finish("damaged", str(error)))
        effects, self._effects = self._effects, []
        return effects

    def _see(self, event: str) -> None:
        before = self.state
        self.state, actions = life.step(before, event)
        if self.state != before:
            self._since = self._now
        for action in actions:
            if action == "START":
                job = self._job()
                assert job is not None
                self._me = replace(self._me, generation=job.generation, state="running")
                self._evidence = b""
                self._stops.forget()
                self._effects.append(Start(job, job.rank_of(self._me.id)))
            elif action == "STOP":
                self._effects.append(End(self._asked or self._view.stop(self._me.generation)))
            elif action == "ENTER":
                self._me = replace(self._me, state="done" if self.state == "DONE" else "ready")
                self._entry_lease = OWN  # it goes on, though it may have been about to leave
            elif action == "FINISH":
                self._leave()

    def _job(self) -> Job | None:
        return self._view.job()[0]

    def _look(self) -> None:
        """See what the store holds, and what that means for the workers here."""
        refused = self._view.refusal(self._me.id)
        if refused and self.state == "WAITING":
            self._finish(Finish("refused", refused, self._job()))
            return
        job = self._job()
        if self._view.is_job_gone():
            self._see_gone()
        if job is None or self._lost_job:
            return
        if self._heard != (job.generation, job.phase):
            self._heard = job.generation, job.phase
            self._effects.append(Heard(job))
        mine = self._me.generation
        stop = self._view.stop(mine) if mine >= 0 else None
        if stop is not None and self._ended < mine:
            self._ended = mine
            self._effects.append(Heard(stop))
        if job.phase == "over":
            if self.state in ("WAITING", "RUNNING", "STOPPING", "DONE"):
                self._see("OVER")
            return
        if self.state in ("RUNNING", "DONE") and (stop is not None or job.generation > mine):
            self._see("ENDED")
        is_next = job.phase == "running" and job.generation > mine and job.rank_of(self._me.id) >= 0
        if self.state == "WAITING" and is_next:
            self._take_part(job)

    def _see_gone(self) -> None:
        self._lost_job = True
        if self.state in ("WAITING", "RUNNING", "STOPPING", "DONE"):
            self._see("OVER")

    def _take_part(self, job: Job) -> None:
        """Begin a generation, unless it has ended already."""
        if self._asked is None and not self._leaves and self._view.stop(job.generation) is None:
            self._see("FORMED")
            return
        self._me = replace(self._me, generation=job.generation, outcome="not started", uptime=0.0, step=None)
        self._evidence = b""
        self._see("MISSED")

    # --- the leader

    def _lead(self) -> None:
        """Decide what follows, if this node leads."""
        who, since = self._view.leader()
        since = since if who == self._me.id and not self._lost_job else 0
        if since != (self._leader.since if self._leader else 0):
            if since and self._leader is None:  # else another one has led meanwhile
                self._effects.append(Watch(records.NODES))
            self._leader = Leader(self._me, self._rules, self._chance, since) if since else None
            if not since:
                self._view.forget(records.NODES)
                self._effects.append(Unwatch(records.NODES))
        if self._leader is None or self._writes.is_open("decide"):
            return
        transaction, wake = self._leader.decide(self._view, self._now)
        self.wake = min(self.wake, wake)
        if transaction is not None:
            self._submit("decide", transaction)

    # --- the store

    def _write(self) -> None:
        """Have written what is to be in the store, and is not."""
        if self._away is not None or self._is_final:
            return
        me = self._me
        # That the workers run is not said but after a lost lease: the job's state says it, until they have ended.
        is_known = self._entered == me or (self._entered is not None and me.state == "running")
        if not is_known and not self._writes.is_open("enter"):
            writes: list[Put | Delete] = [Put(f"{records.NODES}{me.id}", records.write(me), self._entry_lease)]
            if self._evidence:
                its, old = records.evidence_of(me), records.evidence_of(me, before=1)
                writes += [Put(its, self._evidence, JOB), Delete(old)]
            self._submit("enter", Transaction((), tuple(writes)))
            self._entering = me
        if self._can_lead() and not self._writes.is_open("lead"):
            put = Put(records.LEADER, me.id.encode(), OWN)
            self._submit("lead", Transaction((Absent(records.LEADER),), (put,)))
        if not self._writes.is_open("stop") and (stop := self._stops.due(self._view, self._asked)):
            self._submit("stop", stop)
        if self.state == "LEAVING" and self._read is None and not self._writes.is_open("read"):
            job = self._job()
            generation = -1 if job is None or self._lost_job else job.with_evidence
            self._read = () if generation < 0 else None
            if generation >= 0 and self._is_due("read"):
                self._effects.append(Fetch(self._writes.begin("read"), f"{records.EVIDENCE}{generation}/"))

    def _can_lead(self) -> bool:
        """Whether nobody leads, and this node may."""
        is_here = self._entered is not None and self.state != "CLOSING" and not self._lost_job
        return is_here and self._view.told(records.JOB) > 0 and not self._view.leader()[0]

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
        if event.made and what == "enter":
            self._entered = self._entering
        elif event.made and what == "decide" and self._leader is not None:
            self._leader.decided = event.revision

    # --- waits

    def _wait(self) -> None:
        """See what has taken too long, and when the next thing will have."""
        now = self._now
        if self.state == "DONE":
            self._wait_for_others()
        if self.state == "WAITING":
            self._see("LEAVE") if self._leaves else self._wait_for_job()
        if self._asked is not None and self.state in ("WAITING", "DONE", "LEAVING"):
            if now >= self._by or self._away is not None:  # there is nobody to wait for
                self._leaves = self._leaves or self._asked.error
                self._see("LEAVE")
                return
            self.wake = min(self.wake, self._by)
        if self.state == "LEAVING":
            others = self._leader is not None and self._others()
            until = self._since + PATIENCE
            writes = self._writes.is_open("stop") or self._writes.is_open("enter")
            if now >= until or (self._read is not None and not others and not writes):
                self._see("READ")
                return
            self.wake = min(self.wake, until)

    def _wait_for_others(self) -> None:
        """Leave if the workers of other nodes go on for too long: this node's entry says that its own are done."""
        until = self._since + self._barrier
        if self._now < until:
            self.wake = min(self.wake, until)
            return
        if self._entry_lease == OWN:
            self._entry_lease, self._entered = JOB, None
            self._me = replace(self._me, state="left")
            self._writes.drop("enter")
            self._write()
        if self._entered == self._me or self._now >= until + PATIENCE:
            self._see("BARRIER")
        else:
            self.wake = min(self.wake, until + PATIENCE)

    def _wait_for_job(self) -> None:
        """Give up where nobody decides, or the store is not there: the leader's own waits are shorter than this."""
        if self._away is not None:
            until = max(self._away, self._since) + self._rules.join_timeout
            if self._now >= until:
                self._finish(Finish("unreachable", "", self._job()))
            self.wake = min(self.wake, until)
            return
        job = self._job()
        if job is not None and job.phase == "running" and self._view.leader()[0]:
            self._is_led = True
            return  # a spare waits for as long as the others run
        self._since = self._now if self._is_led else self._since  # however long that was: it waits from now on
        self._is_led = False
        delay = 0.0 if job is None else job.delay
        until = self._since + delay + self._rules.join_timeout + self._rules.end_timeout + PATIENCE
        if self._now >= until:
            self._finish(Finish("timeout", "", job))
        self.wake = min(self.wake, until)

    # --- the end

    def _leave(self) -> None:
        """Leave: the job is over, or goes on without this node."""
        job = self._job()
        if job is None or self._lost_job or (verdict := job.verdict) is None:
            has_succeeded = self._me.outcome == "succeeded" and self._me.state in ("done", "left")
            state = "stopped" if self._asked is not None else "succeeded" if has_succeeded else "left"
            self._finish(Finish(state, self._leaves, job))
            return
        alone = self._leader is not None and not self._others()
        self._finish(Finish(verdict.state, verdict.why, job, self._read or (), alone))

    def _others(self) -> bool:
        """Whether other nodes are there that have not left, as far as a leader knows."""
        return any(name != self._me.id and seen.node.state != "left" for name, seen in self._view.nodes.items())

    def _finish(self, finish: Finish) -> None:
        if not self._is_final:
            self._is_final, self.state, self.wake = True, "LEFT", math.inf
            self._effects.append(finish)

    _entering: Node
