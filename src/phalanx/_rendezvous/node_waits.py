"""What a node waits for, and how it leaves: the waits of `Participant`, each of which is bounded. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from phalanx._base.clock import format_duration
from phalanx._rendezvous import candidates, life, records, roll_call
from phalanx._rendezvous.effects import End, Finish, Heard, Missing, Start
from phalanx._rendezvous.leader import Leader
from phalanx._rendezvous.node_writes import NodeWrites
from phalanx._rendezvous.records import DamagedError, Job, Node, OtherVersionError, Stop, Verdict, Waiting, replace
from phalanx._rendezvous.roll_call import RollCall
from phalanx._rendezvous.rules import Rules
from phalanx._store.store import JOB, Entry, Put, Transaction, Unchanged

PATIENCE = 5.0
"""Seconds for which a node that leaves waits for the store, and the leader for the others."""

HURRY = 0.5
"""The same, where somebody does not want to wait: what is on its way comes in milliseconds."""

HOST_PATIENCE = 15.0
"""Seconds for which a node that hosts the store waits at the end for the others."""


class NodeWaits(NodeWrites):
    """What a node waits for: a base of `Participant`, which says what the arguments are."""

    def __init__(
        self,
        me: Node,
        rules: Rules,
        *,
        barrier: float,
        hosts: bool | None,
        away_timeout: float,
        chance: Callable[[], float],
    ) -> None:
        super().__init__(me, rules, hosts=hosts, chance=chance)
        self._barrier = math.inf if hosts else barrier
        self._away_timeout = away_timeout
        self._since = 0.0  # when the state was entered
        self._by = math.inf  # when the end that somebody wants is waited for no more
        self._cannot_start = ""  # why no worker can be started here, as far as is known
        self._is_led = False  # whether the others run, and this node waits
        self._roll, self._writing_roll = RollCall(), RollCall()  # of who is missing: what is said here, and written
        self._waiting = 0, 0.0  # which `Waiting` was seen last, and until when it lasts
        self._last: Job | None = None  # the job as it was last, that this node has part in
        self._wants_leave = False  # whether somebody has asked for its departure
        self._lost_why = ""  # why it is not known here how the job has ended, or will
        self._given_up: tuple[str, str] | None = None  # why the store is of no use to this node, see `Finish`

    def _see(self, event: str) -> None:
        before = self.state
        self.state, actions = life.step(before, event)
        if self.state != before:
            self._since = self._now
            self._roll, self._writing_roll = RollCall(), RollCall()
        for action in actions:
            if action == "START":
                job = self._job()
                assert job is not None
                self._me = replace(self._me, generation=job.generation, state="running")
                self._evidence, self._cannot_start = b"", ""
                self._stops.forget()
                self._effects.append(Start(job, job.rank_of(self._me.id)))
            elif action == "STOP":
                self._effects.append(End(self._asked or self._known_stop() or self._stops.own))
            elif action == "ENTER":
                self._me = replace(self._me, state="done" if self.state == "DONE" else "ready")
            elif action == "FINISH":
                self._leave()

    # --- waits

    def _wait(self) -> None:
        """See what has taken too long, and when the next thing will have."""
        now = self._now
        if self._away is not None and self.state in ("RUNNING", "DONE"):
            self._wait_for_store(self._away)
        if self.state == "DONE":
            self._wait_for_others()
        if self.state == "WAITING":
            job = None if self._is_new else self._job()
            if self._cannot_start and not self._hosts and job is not None and (job.phase == "running" or job.ends):
                self._leaves = self._leaves or self._cannot_start
            self._see("LEAVE") if self._leaves else self._wait_for_job()
        if self._asked is not None and self.state in ("WAITING", "DONE"):
            if now >= self._by or self._away is not None:  # there is nobody to wait for
                self._leaves = self._leaves or self._asked.error
                self._see("LEAVE")
                return
            self.wake = min(self.wake, self._by)
        if self.state == "LEAVING":
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Leave once all is read, and written; and, where this node ends the store, when the others have left.

        A signal shortens that, and changes nothing else.
        """
        now = self._now
        is_last = self._knows_nodes and self._hosts is not False
        others = is_last and not (self._view.told(records.NODES) and self._is_alone())
        until = min(self._since + (HOST_PATIENCE if self._hosts else PATIENCE), max(self._by, self._since + HURRY))
        back = self._since + self._rules.lease
        others = others or bool(is_last and self._hosts and now < back and self._awaits_lost())
        writes = self._writes.is_open("stop") or self._writes.is_open("enter") or bool(self._left_to_keep())
        is_lost = self._away is not None and (bool(self._leaves) or self._asked is not None or self._lost_job)
        if now >= until or is_lost or (self._read is not None and not others and not writes):
            self._see("READ")
            return
        self.wake = min(self.wake, until, back if back > now else math.inf)

    def _wait_for_store(self, away: float) -> None:
        """Leave if the store, which another node hosts, does not answer for too long."""
        until = away + self._away_timeout
        if self._now < until:
            self.wake = min(self.wake, until)
            return
        self._leaves = self._lost_why = f"its store has not answered for {format_duration(self._away_timeout)}"
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
        if self._entered == self._me or self._now >= until + PATIENCE:
            self._see("BARRIER")
        else:
            self.wake = min(self.wake, until + PATIENCE)

    def _wait_for_job(self) -> None:
        """Give up where nobody decides, or the store is not there: the leader's own waits are shorter than this."""
        job = self._job()
        if self._away is not None:
            since, why = max(self._away, self._since), ""
            stop = self._view.stop(self._me.generation)
            if job is not None and stop is not None and stop.kind == "signal":  # all nodes end their workers
                until, state, job = since + PATIENCE, "stopped", replace(job, verdict=Verdict("stopped", "", stop))
            else:
                known = self._rules.join_timeout if job is None else min(self._rules.join_timeout, self._away_timeout)
                until, state = since + known, "unreachable"
                if self._me.generation >= 0:
                    state, why = "unknown", f"its store has not answered for {format_duration(known)}"
            if self._now >= until:
                self._finish(Finish(state, why, job, self._own_evidence()))
            self.wake = min(self.wake, until)
            return
        is_led = job is not None and job.phase == "running" and bool(self._view.leader()[0])
        if is_led and job is not None and self._view.stop(job.generation) is None:
            self._is_led = True
            return  # a spare waits for as long as the others run; of their end, whoever leads has to make something
        self._since = self._now if self._is_led else self._since  # however long that was: it waits from now on
        self._is_led = False
        delay = 0.0 if job is None else job.delay
        until = self._since + delay + self._rules.join_timeout + self._rules.end_timeout + PATIENCE
        if self._now >= until:
            self._finish(Finish("timeout", "", job, self._own_evidence()))
        self.wake = min(self.wake, until)
        if not self._is_final and self._asked is None and job is not None and job.phase == "forming":
            self._call_roll(job, self._since + delay)

    def _call_roll(self, job: Job, since: float) -> None:
        """Have it said who is missing, if that has lasted for a while: the leader tells all nodes."""
        now = self._now
        if now < since + roll_call.FIRST:
            self.wake = min(self.wake, since + roll_call.FIRST)
            return
        if self._leader is not None and self._view.told(records.NODES) and not self._writes.is_open("waiting"):
            self._tell_missing(self._leader, job, since)
        waiting, told = self._view.waiting(job.generation)
        if waiting is None or told < self._entered_at:  # the latter: it was written before this node came
            return
        if told != self._waiting[0]:
            self._waiting = told, now + waiting.seconds
        if self._roll.call(waiting.words, since, now):
            left = max(0.0, self._waiting[1] - now)
            self._effects.append(Missing(waiting.words, waiting.rank, left, waiting.is_enough))
        self.wake = min(self.wake, self._roll.wake)

    def _tell_missing(self, leader: Leader, job: Job, since: float) -> None:
        """Write who is missing, if that has changed; and now and then, for how long it is still waited for."""
        nodes, now = self._view.nodes, self._now
        there = candidates.ready(job, nodes)
        is_enough = len(there) >= job.min_nodes
        until = leader.waits_until(job, is_enough=is_enough)
        if until == math.inf or (is_enough and (len(there) >= job.max_nodes or job.ends)):
            return  # it begins
        words, ranks = roll_call.call((nodes[name].node for name in there), job.min_nodes, job.max_nodes)
        if self._writing_roll.call("\n".join((words, *there)), since, now):  # who comes is to know how long it lasts
            rank = ranks[0] if ranks else -1
            told = Waiting(job.generation, records.one_line(words), rank, max(0.0, until - now), is_enough)
            put = Put(records.WAITING, records.write(told), JOB)
            self._submit("waiting", Transaction((Unchanged(records.STATE, self._view.job()[1]),), (put,)))
        self.wake = min(self.wake, self._writing_roll.wake)

    # --- the end

    def _leave(self) -> None:
        """Leave: the job is over, or goes on without this node."""
        if self._given_up is not None:
            state, why = ("stopped", "") if self._asked is not None else self._given_up
            self._finish(Finish(state, why, self._known_job(), self._own_evidence()))
            return
        job = None if self._is_new else self._last if self._lost_job else self._job()  # what is new is another one
        if job is None or (verdict := job.verdict) is None:
            state, why = self._how_left()
            self._finish(Finish(state, why, job, self._own_evidence()))
            return
        # Where another node hosts the store, that one is the last, though its entry may be gone: it has yet to read.
        is_last = self._knows_nodes and self._hosts is not False and not self._lost_job
        read = self._read or ()
        own = [entry for entry in self._own_evidence() if entry.key not in {other.key for other in read}]
        own = own if self._me.generation == job.with_evidence else []
        self._finish(Finish(verdict.state, verdict.why, job, (*read, *own), is_last and self._is_alone()))

    def _how_left(self) -> tuple[str, str]:
        """Return how this node leaves a job that has not ended, as far as is known, and why: see `Finish`."""
        if self._asked is not None:
            return "stopped", self._leaves
        has_succeeded = self._me.outcome == "succeeded" and self._me.state == "done"
        is_known = not (self._lost_job or self._lost_why)
        if has_succeeded and is_known:
            return "succeeded", self._leaves
        return ("left", self._leaves) if self._wants_leave or is_known else ("unknown", self._lost_why)

    def _give_up(self, state: str, why: str) -> None:
        """Leave, for nothing can be had of the store any more: when the workers here are gone."""
        if self._given_up is not None or self._is_final:
            return
        self._given_up = state, why
        if self.state == "RUNNING":
            me = self._me
            self._effects.append(Heard(Stop(me.generation, "left", me.id, me.host, records.one_line(why))))
        self._see("LEAVE")

    def _give_up_for(self, error: DamagedError) -> None:
        """Leave because of what the store holds."""
        self._give_up("refused" if isinstance(error, OtherVersionError) else "damaged", str(error))

    def _known_job(self) -> Job | None:
        try:
            return self._job()
        except DamagedError:
            return None

    def _known_stop(self) -> Stop | None:
        try:
            return None if self._given_up is not None else self._view.stop(self._me.generation)
        except DamagedError:
            return None

    def _is_alone(self) -> bool:
        """Whether no other node is there that has not left: who has come to an end waits for the next job."""
        job, modified = self._view.job()
        others = dict(self._view.nodes)
        others.pop(self._me.id, None)
        if job is not None and job.phase == "over":
            its = {*job.ids}
            others = {name: seen for name, seen in others.items() if seen.created < modified or name in its}
        return all(seen.node.state == "left" for seen in others.values())

    def _awaits_lost(self) -> bool:
        """Whether the job has ended with the loss of a node: if that was stopped or cut off, it may come back."""
        job = self._job()
        stop = None if job is None or job.verdict is None else job.verdict.stop
        return stop is not None and stop.kind == "lost" and stop.node not in self._view.nodes

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
