"""A node of a job: what its agent does as the store and its workers tell. Pure: it returns what is to be done.

Owns the node's part in each generation, and its waits. Any event may come at any time; what it wants the store to hold
is `node_writes`' business.
"""

from __future__ import annotations

import math

from phalanx._base.clock import format_duration
from phalanx._rendezvous import life, records
from phalanx._rendezvous.effects import Earlier, End, Finish, Heard, Start, Watch
from phalanx._rendezvous.node_writes import NodeWrites
from phalanx._rendezvous.records import DamagedError, Stop, Verdict, replace
from phalanx._store import store
from phalanx._store.store import JOB, OWN, Entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._rendezvous.effects import Effect
    from phalanx._rendezvous.records import Job, Node
    from phalanx._rendezvous.rules import Rules
    from phalanx._store.store import StoreEvent

PATIENCE = 5.0
"""Seconds for which a node that leaves waits for the store, and the leader for the others."""

HOST_PATIENCE = 15.0
"""Seconds for which a node that hosts the store waits at the end for the others."""


class Participant(NodeWrites):
    """A node of a job.

    Args:
        me: Its entry, as it enters.
        rules: What the job holds to, while this node leads.
        barrier: Seconds for which it waits, once its workers have succeeded, for those of other nodes.
        hosts: Whether this node hosts the store, and so leaves as the last one; False: another one does. None: none
            does; the leader leaves as the last one, then, and ends what the store has of the job.
        away_timeout: Seconds for which it goes on while the store does not answer; inf: for ever.
        chance: Returns a random number, 0 to 1.
    """

    def __init__(
        self,
        me: Node,
        rules: Rules,
        *,
        barrier: float = 300.0,
        hosts: bool | None = None,
        away_timeout: float = math.inf,
        chance: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(me, rules, hosts=hosts, chance=chance)
        self._barrier = math.inf if hosts else barrier
        self._away_timeout = away_timeout
        self._since = 0.0  # when the state was entered
        self._begun = False
        self._by = math.inf  # when the end that somebody wants is waited for no more
        self._ended = -1  # the generation whose end was said
        self._heard: tuple[int, str] = (-1, "")
        self._is_late = False  # whether an earlier job was met
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
            what = self._writes.end(event, now)
            if what == "read":
                self._read = event.entries  # None: it is tried again
            elif what == "cause":
                self._cause = event.entries
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

    def _look(self) -> None:
        """See what the store holds, and what that means for the workers here."""
        refused = self._view.refusal(self._me.id)
        if refused and self.state == "WAITING" and not self._hosts:
            self._finish(Finish("refused", refused, self._job()))
            return
        job = self._job()
        if self._waits_for_earlier(job):
            return
        if self._view.is_job_gone():
            self._see_gone()
        if job is None or self._lost_job:
            return
        mine, stop = self._me.generation, self._hear(job)
        if job.phase == "over":
            if self.state in ("WAITING", "RUNNING", "STOPPING", "DONE"):
                self._see("OVER")
            return
        if self.state in ("RUNNING", "DONE") and (stop is not None or job.generation > mine):
            self._see("ENDED")
        is_next = job.phase == "running" and job.generation > mine and job.rank_of(self._me.id) >= 0
        if self.state == "WAITING" and is_next:
            self._take_part(job)

    def _hear(self, job: Job) -> Stop | None:
        """Have what is new be said. Returns why the generation ends whose workers are here, or were last."""
        if self._heard != (job.generation, job.phase):
            self._heard = job.generation, job.phase
            self._effects.append(Heard(job))
        mine = self._me.generation
        stop = self._view.stop(mine) if mine >= 0 else None
        if stop is not None and self._ended < mine:
            self._ended = mine
            self._effects.append(Heard(stop))
        return stop

    def _waits_for_earlier(self, job: Job | None) -> bool:
        """Whether there is no job yet for this node: one that is over when it comes is an earlier one of its id."""
        self._is_new = self._is_new and (job is None or job.phase == "over")
        if self._is_new and job is not None and not self._is_late:
            self._is_late = True
            self._effects.append(Earlier())
        return self._is_new

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

    # --- waits

    def _wait(self) -> None:
        """See what has taken too long, and when the next thing will have."""
        now = self._now
        if self._away is not None and self.state in ("RUNNING", "DONE"):
            self._wait_for_store(self._away)
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
            is_last = self._knows_nodes and self._hosts is not False
            others = is_last and not (self._view.told(records.NODES) and self._is_alone())
            until = self._since + (HOST_PATIENCE if self._hosts else PATIENCE)
            writes = self._writes.is_open("stop") or self._writes.is_open("enter")
            is_lost = self._away is not None and bool(self._leaves)
            if now >= until or is_lost or (self._read is not None and not others and not writes):
                self._see("READ")
                return
            self.wake = min(self.wake, until)

    def _wait_for_store(self, away: float) -> None:
        """Leave if the store, which another node hosts, does not answer for too long."""
        until = away + self._away_timeout
        if self._now < until:
            self.wake = min(self.wake, until)
            return
        self._leaves = f"its store has not answered for {format_duration(self._away_timeout)}"
        if self.state == "RUNNING":
            me = self._me
            self._effects.append(Heard(Stop(me.generation, "left", me.id, me.host, self._leaves)))
        self._see("LEAVE")

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
        job = self._job()
        if self._away is not None:
            since = max(self._away, self._since)
            stop = self._view.stop(self._me.generation)
            if job is not None and stop is not None and stop.kind == "signal":  # all nodes end their workers
                until, state, job = since + PATIENCE, "stopped", replace(job, verdict=Verdict("stopped", "", stop))
            else:
                known = self._rules.join_timeout if job is None else min(self._rules.join_timeout, self._away_timeout)
                until, state = since + known, "unreachable"
            if self._now >= until:
                self._finish(Finish(state, "", job, self._own_evidence()))
            self.wake = min(self.wake, until)
            return
        if job is not None and job.phase == "running" and self._view.leader()[0]:
            self._is_led = True
            return  # a spare waits for as long as the others run
        self._since = self._now if self._is_led else self._since  # however long that was: it waits from now on
        self._is_led = False
        delay = 0.0 if job is None else job.delay
        until = self._since + delay + self._rules.join_timeout + self._rules.end_timeout + PATIENCE
        if self._now >= until:
            self._finish(Finish("timeout", "", job, self._own_evidence()))
        self.wake = min(self.wake, until)

    # --- the end

    def _leave(self) -> None:
        """Leave: the job is over, or goes on without this node."""
        job = self._job()
        if job is None or self._lost_job or (verdict := job.verdict) is None:
            has_succeeded = self._me.outcome == "succeeded" and self._me.state in ("done", "left")
            state = "stopped" if self._asked is not None else "succeeded" if has_succeeded else "left"
            self._finish(Finish(state, self._leaves, job, self._own_evidence()))
            return
        alone = self._knows_nodes and self._is_alone()
        self._finish(Finish(verdict.state, verdict.why, job, self._read or (), alone))

    def _is_alone(self) -> bool:
        """Whether no other node is there that has not left."""
        return all(name == self._me.id or seen.node.state == "left" for name, seen in self._view.nodes.items())

    def _own_evidence(self) -> tuple[Entry, ...]:
        """Return what the workers here have left, if they have failed: what the others have is not to be had."""
        me = self._me
        return (
            (Entry(records.evidence_of(me), self._evidence, 0, 0),)
            if self._evidence and me.outcome in ("failed", "not started")
            else ()
        )

    def _finish(self, finish: Finish) -> None:
        if not self._is_final:
            self._is_final, self.state, self.wake = True, "LEFT", math.inf
            self._effects.append(finish)
