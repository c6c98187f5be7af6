"""A node of a job: what its agent does as the store and its workers tell. Pure: it returns what is to be done.

Owns the node's part in each generation, and its waits, each of which is bounded. Any event may come at any time. What
it knows and has to write stands in `store_view`, what it decides while it leads in `membership`, and what the nodes ask
each other in `questions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from signal import SIGKILL

from phalanx._base.clock import format_duration
from phalanx._rendezvous import candidates, life, records
from phalanx._rendezvous.candidates import RollCall
from phalanx._rendezvous.life import Effect, Finish, Found, Heard
from phalanx._rendezvous.membership import Leader
from phalanx._rendezvous.questions import Questions
from phalanx._rendezvous.records import DamagedError, Job, Node, OtherVersionError, Stop, Verdict, replace
from phalanx._rendezvous.settings import Rules
from phalanx._rendezvous.store_view import Liveness, OwnEntry, StoreView, Writes
from phalanx._store import store
from phalanx._store.store import OWN, Absent, Entry, Put, StoreEvent, Transaction

PATIENCE = 5.0
"""Seconds for which a node that leaves waits for the store, and the leader for the others."""

HURRY = 0.5
"""The same, where somebody does not want to wait: what is on its way comes in milliseconds."""

HOST_PATIENCE = 15.0
"""Seconds for which a node that hosts the store waits at the end for the others."""


class Participant:
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
        self.state = "WAITING"
        """See `life.STATES`."""
        self.wake = math.inf
        """When to call `tick`, though nothing has happened (monotonic seconds)."""
        self._id = me.id
        self._rules = rules
        self._barrier = math.inf if hosts else barrier
        self._hosts = hosts
        self._away_timeout = away_timeout
        self._chance = chance
        self._effects: list[Effect] = []
        self._now = 0.0
        self._since = 0.0  # when the state was entered
        self._begun = False
        self._view = StoreView()
        self._writes = Writes()
        self._entry = OwnEntry(me)
        self._liveness = Liveness(rules.return_timeout)
        self._roll, self._writing_roll = RollCall(), RollCall()  # of who is missing: what is reported, and written
        self._waiting = 0, 0.0  # which `Missing` was read last, and until when it lasts
        self._questions = Questions(me.id)
        self._leader: Leader | None = None  # while this node leads
        self._knows_nodes = False  # whether the entries of the nodes are watched
        self._heard: tuple[int, str] = (-1, "")
        self._ended = -1  # the generation whose end was said
        self._last: Job | None = None  # the job as it was last, that this node has part in
        self._read: tuple[Entry, ...] | None = None
        self._cause: tuple[Entry, ...] | None = None  # evidence that the leader has asked for
        self._is_led = False  # whether the others run, and this node waits
        self._store: bytes | None = None  # which one has answered last
        self._away: float | None = 0.0  # since when it does not answer
        self._was_away = False  # whether it has not, for a while
        self._regained = -math.inf  # when it was there again, or a lease in place of one that was lost
        self._asked: Stop | None = None  # somebody wants the job to end
        self._by = math.inf  # when the end that somebody wants is waited for no more
        self._leaves = ""  # why this node goes
        self._wants_leave = False  # whether somebody has asked for its departure
        self._cannot_start = ""  # why no worker can be started here, as far as is known
        self._lost_job = False  # whether the job has ended without this node, and nothing is left of it
        self._lost_why = ""  # why it is not known here how the job has ended, or will
        self._given_up: tuple[str, str] | None = None  # why the store is of no use to this node, see `Finish`

    # --- what happens

    def begin(self, now: float) -> list[Effect]:
        """Enter the job."""
        self._since = self._away = now
        self._begun = True
        self._effects.append(life.Watch(records.JOB))
        return self._settle(now)

    def all_told(self, events: Iterable[StoreEvent], now: float) -> list[Effect]:
        """See all that the store has told meanwhile, in its order, before anything is decided.

        What a leader decides costs time for each node there is: of many that come at once, it costs that once.
        """
        self._now = now
        self._liveness.prove(self._view, self._entry, now, is_away=self._away is not None)  # as known until now
        for event in events:
            if not self._questions.hear(event, now):
                self._take(event)
        return self._settle(now)

    def _take(self, event: StoreEvent) -> None:
        now = self._now
        if isinstance(event, store.Snapshot | store.Changed):
            self._view.take(event)
            if event.prefix == records.JOB:
                self._writes.reopen()
        elif isinstance(event, store.Done):
            self._note_done(event)
        elif isinstance(event, store.Fetched):
            what = self._writes.end(event, now)
            self._read = event.entries if what == "read" else self._read  # None: it is tried again
            self._cause = event.entries if what == "cause" else self._cause
        elif isinstance(event, store.Away):
            self._was_away = True
            self._away = now if self._away is None else self._away
        elif isinstance(event, store.Back):
            self._see_back(event)
        elif isinstance(event, store.LeaseLost):
            self._regained = now
            self._entry.entered = None
            self._writes.drop("enter")  # it may have been made with the lease that is lost
            self._writes.reopen()
        else:
            self._give_up("refused", event.why)

    def _note_done(self, event: store.Done) -> None:
        what = self._writes.end(event, self._now)
        if what == "keep" and event.made is not None:  # False: the job has gone
            self._entry.kept()
        elif what == "enter" and event.made:
            self._entry.written(event.revision)
        elif what == "decide" and event.made and self._leader is not None:
            self._leader.decided = event.revision

    def _see_back(self, event: store.Back) -> None:
        self._regained = self._regained if self._store is None and not self._was_away else self._now
        if self._store not in (None, event.store):
            self._forget_store()
        self._away, self._store = None, event.store
        self._liveness.reach_store(self._now)
        self._writes.reopen()

    def workers_failed(self, stop: Stop, now: float) -> list[Effect]:
        """See that a worker of this node has failed; the others are being ended. ``stop`` says who, and how."""
        self._now = now
        own = self._entry.stop
        self._entry.stop = stop if own is None or own.kind == "grow" else own
        self._see("FAILED")
        return self._settle(now)

    def workers_gone(self, me: Node, evidence: bytes, now: float) -> list[Effect]:
        """See that the workers are gone. ``me``: the entry, with how they ended, and a port that is free."""
        self._now = now
        succeeded = me.outcome == "succeeded"
        self._entry.node = replace(me, state="left" if self._leaves else "ready", generation=self.generation)
        self._entry.evidence = evidence
        if not succeeded and self.state == "RUNNING":
            self._entry.stop = self._entry.stop or self._stop("failure", "its workers are gone")
        self._see("SUCCEEDED" if succeeded else "GONE")
        return self._settle(now)

    def ask_stop(self, signal: int, error: str, grace: float, now: float) -> list[Effect]:
        """End the whole job, because somebody here wants that: within ``grace``, or at once where no worker runs."""
        self._now = now
        runs = self.state in ("RUNNING", "STOPPING", "CLOSING")
        self._asked = replace(self._stop("signal", error), generation=max(0, self.generation), signal=signal)
        patience = HURRY if signal == SIGKILL else PATIENCE
        self._by = min(self._by, now + (grace if runs else 0.0) + patience)
        if self.state == "RUNNING":
            self._see("ENDED")
        return self._settle(now)

    def ask_restart(self, why: str, now: float) -> list[Effect]:
        """End the generation that runs, on all nodes, for another one: it has not failed. Else, nothing happens."""
        self._now = now
        job = self._view.known_job()
        if job is not None and job.phase == "running" and not self._liveness.is_new:
            stop = self._stop("grow", f"{why}, on host {self._entry.node.host}")
            self._entry.stop = self._entry.stop or replace(stop, generation=job.generation)
        return self._settle(now)

    def ask_leave(self, why: str, now: float, *, at_once: bool = False) -> list[Effect]:
        """Take this node out of the job, which goes on without it if it can. ``at_once``: nobody wants to wait."""
        self._now = now
        job = self._view.known_job()
        if self.state == "LEAVING" or (job is not None and job.phase == "over" and not self._liveness.is_new):
            self._by = min(self._by, now + (HURRY if at_once else PATIENCE))
            return self._settle(now)
        self._leaves, self._wants_leave = self._leaves or why, True
        if self.state == "RUNNING":
            self._entry.stop = self._entry.stop or self._stop("left", why)
        self._by = min(self._by, now + HURRY) if at_once else self._by
        if self.state == "DONE":  # its success is to stay known
            self._barrier = min(self._barrier, now - self._since)
        else:
            self._see("LEAVE")
        return self._settle(now)

    def cannot_start(self, why: str, now: float) -> list[Effect]:
        """See that no worker can be started here. A node that waits leaves a job that has begun to others.

        Before that, and if it hosts the store, it stays: the others hear of it when a generation begins with it.
        """
        self._cannot_start = why if self.state == "WAITING" else ""
        return self._settle(now)

    def ask(self, what: str, tell: Callable[[Found], None], now: float) -> list[Effect]:
        """Ask all nodes of the job: `Answered` has ``tell`` called, unless this node leaves before. See `questions`."""
        self._questions.ask(what, tell)
        return self._settle(now)

    def has_answered(self, names: tuple[str, ...], data: bytes, now: float) -> list[Effect]:
        """Answer what is asked with ``data``, which was found as `Answer` has asked."""
        self._questions.answer(names, data, self._view)
        return self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """See that it is `wake`, or later."""
        return self._settle(now)

    @property
    def is_spare(self) -> bool:
        """Whether the job runs without this node, which waits."""
        job = self._view.known_job()
        return self.state == "WAITING" and job is not None and job.phase == "running" and job.rank_of(self._id) < 0

    @property
    def generation(self) -> int:
        """The generation whose workers run here, or have ended here last; -1: none."""
        return self._entry.node.generation

    # --- what follows

    def _settle(self, now: float) -> list[Effect]:
        """Do all that follows from what is known now."""
        self._now, self.wake = now, math.inf
        if self._begun and self.state != "LEFT":
            try:
                if self._given_up is None:
                    self._look()
                    self._lead()
                    self._write()
                    self._wait()
            except DamagedError as error:
                self._give_up("refused" if isinstance(error, OtherVersionError) else "damaged", str(error))
            if self._given_up is not None and self.state == "LEAVING":
                self._see("READ")
            if self.state != "LEFT":
                is_away = self._away is not None or self._given_up is not None
                self._effects += self._questions.settle(self._view, self._view.known_job(), now, is_away=is_away)
                self.wake = min(self.wake, self._questions.wake)
        due, self._effects = self._effects, []
        return due

    def _see(self, event: str) -> None:
        before = self.state
        self.state, actions = life.step(before, event)
        if self.state != before:
            self._since = self._now
            self._roll, self._writing_roll = RollCall(), RollCall()
        for action in actions:
            if action == "START":
                job = self._view.job()[0]
                assert job is not None
                self._entry.start(job.generation)
                self._cannot_start = ""
                self._effects.append(life.Start(job, job.rank_of(self._id)))
            elif action == "STOP":
                known = None if self._given_up is not None else self._view.known_stop(self.generation)
                self._effects.append(life.End(self._asked or known or self._entry.stop))
            elif action == "ENTER":
                self._entry.node = replace(self._entry.node, state="done" if self.state == "DONE" else "ready")
            elif action == "FINISH":
                self._leave()

    def _look(self) -> None:
        """See what the store holds, and what that means for the workers here."""
        job = self._view.job()[0]  # first: of a job of another version, nothing else is understood
        self._liveness.prove(self._view, self._entry, self._now, is_away=self._away is not None)
        if self._liveness.find_earlier(self._view):
            self._effects.append(life.Earlier())
        refused = self._view.refusal(self._id)
        if refused and self.state == "WAITING" and not self._hosts and (job is None or not self._liveness.is_new):
            self._finish(Finish("refused", refused, job))
            return
        if self._liveness.is_new:
            return
        if self._lost_job or self._view.is_job_gone():
            self._lost_job = True
            self._see("OVER")
        if job is None or self._lost_job:
            return
        self._last = job
        mine, stop = self.generation, self._hear(job)
        if job.phase == "over":
            self._see("OVER")
            return
        if self.state in ("RUNNING", "DONE") and (stop is not None or job.generation > mine):
            self._see("ENDED")
        is_next = job.phase == "running" and job.generation > mine and job.rank_of(self._id) >= 0
        if self.state == "WAITING" and is_next and self._entry.entered is not None:  # else it is about to be lost
            self._take_part(job)

    def _hear(self, job: Job) -> Stop | None:
        """Have what is new be said. Returns why the generation ends whose workers are here, or were last."""
        if self._heard != (job.generation, job.phase):
            self._heard = job.generation, job.phase
            self._effects.append(Heard(job))
        mine = self.generation
        stop = self._view.stop(mine) if mine >= 0 else None
        if stop is not None and self._ended < mine:
            self._ended = mine
            self._effects.append(Heard(stop))
        return stop

    def _forget_store(self) -> None:
        """See that the store is another one, which knows nothing of what was in the one before.

        A node that waits enters the job that is made there; the workers of another node end with the job that was.
        """
        self._view = StoreView()
        self._entry.entered, self._entry.revision = None, 0
        self._waiting, self._heard = (0, 0.0), (-1, "")
        if self.state == "WAITING" and self._asked is None and not self._leaves:
            self._entry.miss(-1)
            self._ended = -1
            self._liveness = Liveness(self._rules.return_timeout)
            self._entry.stop = None
            self._since, self._by = self._now, math.inf
        else:
            self._lost_job = True
            self._lost_why = "its store was started again, and knows nothing of it"

    def _take_part(self, job: Job) -> None:
        """Begin a generation, unless it has ended already."""
        takes_part = self._asked is None and not self._leaves and self._view.stop(job.generation) is None
        if not takes_part:
            self._entry.miss(job.generation)
        self._see("FORMED" if takes_part else "MISSED")

    def _stop(self, kind: records.Kind, error: str) -> Stop:
        """Return why the generation of this node is to end, because of this node."""
        me = self._entry.node
        return Stop(me.generation, kind, me.id, me.host, records.one_line(error))

    # --- the leader

    def _lead(self) -> None:
        """Decide what follows, if this node leads."""
        who, since = self._view.leader()
        # Who leaves decides nothing more: the others do not wait for what it makes of them, nor it for them.
        since = since if who == self._id and not self._lost_job and not self._leaves else 0
        if since != (self._leader.since if self._leader else 0):  # another one may have led meanwhile
            self._leader = Leader(self._entry.node, self._rules, self._chance, since) if since else None
            self._writes.drop("cause")
            self._cause = None
        knows = since > 0 or (bool(self._hosts) and self.state == "LEAVING")
        if knows != self._knows_nodes:
            self._knows_nodes = knows
            if not knows:
                self._view.forget(records.NODES)
            self._effects.append(life.Watch(records.NODES) if knows else life.Unwatch(records.NODES))
        if self._leader is None or self._writes.is_open("decide"):
            return
        if self._cause is not None:
            self._leader.learn(self._cause, self._view)
            self._cause = None
        transaction, wake = self._leader.decide(self._view, self._liveness, self._now, self._regained)
        self.wake = min(self.wake, wake)
        if transaction is not None:
            self._submit("decide", transaction)
        if self._leader.asks >= 0 and not self._writes.is_open("cause"):
            self._fetch("cause", self._leader.asks)

    # --- the store

    def _write(self) -> None:
        """Have written what is to be in the store, and is not."""
        if self._away is not None or self.state == "LEFT":
            return
        writes, view, own = self._writes, self._view, self._entry
        if self.state == "LEAVING" and self._read is None and not writes.is_open("read"):
            job = view.job()[0]
            generation = -1 if job is None or self._lost_job else job.with_evidence
            self._read = () if generation < 0 else None
            if generation >= 0:
                self._fetch("read", generation)
        if self._lost_job:
            return  # another job of this id may be there
        if own.is_due(view) and not writes.is_open("enter"):
            self._submit("enter", own.write())
        may_lead = own.entered is not None and self.state != "CLOSING" and not self._leaves
        conceded = self._liveness.conceded_until(view, hosts=self._hosts) if may_lead else math.inf
        if may_lead and not self._waits_until(conceded) and not writes.is_open("lead"):  # if none does
            put = Put(records.LEADER, self._id.encode(), OWN)
            self._submit("lead", Transaction((Absent(records.LEADER),), (put,)))
        if not writes.is_open("stop") and (stop := own.write_stop(view, self._asked)):
            self._submit("stop", stop)
        if (left := self._left_to_keep()) and not writes.is_open("keep"):
            self._submit("keep", own.keep(left, view))

    def _left_to_keep(self) -> tuple[Put, ...]:
        """Return what is to be kept of the job, and is not yet."""
        if self.state != "LEAVING" or self._lost_job:
            return ()
        return self._entry.to_keep(self._view, leads=self._leader is not None)

    def _submit(self, what: str, transaction: Transaction) -> None:
        if self._is_due(what):
            self._effects.append(life.Submit(self._writes.begin(what), transaction))

    def _fetch(self, what: str, generation: int) -> None:
        if self._is_due(what):
            self._effects.append(life.Fetch(self._writes.begin(what), f"{records.EVIDENCE}{generation}/"))

    def _is_due(self, what: str) -> bool:
        """Whether something may be asked for now; if it was just now in vain, it is tried again in a while."""
        return not self._waits_until(self._writes.closed_until(what))

    # --- waits

    def _waits_until(self, moment: float) -> bool:
        """Whether a moment has yet to come: the node wakes then."""
        if self._now < moment:
            self.wake = min(self.wake, moment)
        return self._now < moment

    def _wait(self) -> None:
        """See what has taken too long, and when the next thing will have."""
        if self._away is not None and self.state in ("RUNNING", "DONE"):
            self._wait_for_store(self._away)
        if self.state == "DONE":
            self._wait_for_others()
        if self.state == "WAITING":
            job = None if self._liveness.is_new else self._view.job()[0]
            if self._cannot_start and not self._hosts and job is not None and (job.phase == "running" or job.ends):
                self._leaves = self._leaves or self._cannot_start
            self._see("LEAVE") if self._leaves else self._wait_for_job()
        asked = self._asked if self.state in ("WAITING", "DONE") else None
        if asked is not None and (self._away is not None or not self._waits_until(self._by)):  # nobody is waited for
            self._leaves = self._leaves or asked.error
            self._see("LEAVE")
        if self.state == "LEAVING":
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Leave once all is read, and written; and, where this node ends the store, when the others have left.

        A signal shortens that, and changes nothing else.
        """
        now = self._now
        is_last = self._knows_nodes and self._hosts is not False
        others = is_last and not (self._view.told(records.NODES) and self._view.is_alone(self._id))
        until = min(self._since + (HOST_PATIENCE if self._hosts else PATIENCE), max(self._by, self._since + HURRY))
        back = self._since + self._rules.lease
        others = others or bool(is_last and self._hosts and now < back and self._view.awaits_lost())
        writes = self._writes.is_open("stop") or self._writes.is_open("enter") or bool(self._left_to_keep())
        is_lost = self._away is not None and (bool(self._leaves) or self._asked is not None or self._lost_job)
        if now >= until or is_lost or (self._read is not None and not others and not writes):
            self._see("READ")
            return
        self.wake = min(self.wake, until, back if back > now else math.inf)

    def _wait_for_store(self, away: float) -> None:
        """Leave if the store, which another node hosts, does not answer for too long."""
        if self._waits_until(away + self._away_timeout):
            return
        self._leaves = self._lost_why = f"its store has not answered for {format_duration(self._away_timeout)}"
        self._leave_unheard(self._leaves)

    def _wait_for_others(self) -> None:
        """Leave if the workers of other nodes go on for too long: this node's entry says that its own are done."""
        until = self._since + self._barrier
        is_entered = self._entry.entered == self._entry.node
        if not self._waits_until(until) and (is_entered or not self._waits_until(until + PATIENCE)):
            self._see("BARRIER")

    def _wait_for_job(self) -> None:
        """Give up where nobody decides, or the store is not there: the leader's own waits are shorter than this."""
        job = self._view.job()[0]
        if self._away is not None:
            self._wait_for_answer(job, max(self._away, self._since))
            return
        is_led = job is not None and job.phase == "running" and bool(self._view.leader()[0])
        if is_led and job is not None and self._view.stop(job.generation) is None:
            self._is_led = True
            return  # a spare waits for as long as the others run; of their end, whoever leads has to make something
        self._since = self._now if self._is_led else self._since  # however long that was: it waits from now on
        self._is_led = False
        since = self._since + (0.0 if job is None else job.delay)
        if not self._waits_until(since + self._rules.join_timeout + self._rules.end_timeout + PATIENCE):
            self._finish(Finish("timeout", "", job, self._entry.failure))
        elif self._asked is None and job is not None and job.phase == "forming":
            self._call_roll(job, since)

    def _wait_for_answer(self, job: Job | None, since: float) -> None:
        """Give up where the store does not answer for too long."""
        state, why = "unreachable", ""
        stop = self._view.stop(self.generation)
        if job is not None and stop is not None and stop.kind == "signal":  # all nodes end their workers
            until, state, job = since + PATIENCE, "stopped", replace(job, verdict=Verdict("stopped", "", stop))
        else:
            known = self._rules.join_timeout if job is None else min(self._rules.join_timeout, self._away_timeout)
            until = since + known
            if self.generation >= 0:
                state, why = "unknown", f"its store has not answered for {format_duration(known)}"
        if not self._waits_until(until):
            self._finish(Finish(state, why, job, self._entry.failure))

    def _call_roll(self, job: Job, since: float) -> None:
        """Report who is missing, if that has lasted for a while. The leader writes it, for all nodes."""
        now, view = self._now, self._view
        if self._waits_until(since + candidates.ROLL_CALL_AFTER):
            return
        leader = None if self._writes.is_open("waiting") else self._leader
        if leader is not None and (waits := leader.missing(view, now)) is not None:
            write, text = waits
            if self._writing_roll.call(text, since, now):
                self._submit("waiting", write)
            self.wake = min(self.wake, self._writing_roll.wake)
        missing, told = view.missing(job.generation)
        if missing is None or told < self._entry.revision:  # the latter: it was written before this node came
            return
        if told != self._waiting[0]:
            self._waiting = told, now + missing.seconds
        if self._roll.call(missing.words, since, now):
            self._effects.append(replace(missing, seconds=max(0.0, self._waiting[1] - now)))
        self.wake = min(self.wake, self._roll.wake)

    # --- the end

    def _leave(self) -> None:
        """Leave: the job is over, or goes on without this node."""
        own = self._entry.failure
        if self._given_up is not None:
            state, why = ("stopped", "") if self._asked is not None else self._given_up
            self._finish(Finish(state, why, self._view.known_job(), own))
            return
        # What is new is another one.
        job = None if self._liveness.is_new else self._last if self._lost_job else self._view.job()[0]
        if job is None or (verdict := job.verdict) is None:
            state, why = self._how_left()
            self._finish(Finish(state, why, job, own))
            return
        # Where another node hosts the store, that one is the last, though its entry may be gone: it has yet to read.
        is_last = self._knows_nodes and self._hosts is not False and not self._lost_job
        read = self._read or ()
        if self.generation != job.with_evidence or {entry.key for entry in own} & {entry.key for entry in read}:
            own = ()
        ends_job = is_last and self._view.is_alone(self._id)
        self._finish(Finish(verdict.state, verdict.why, job, (*read, *own), ends_job))

    def _how_left(self) -> tuple[str, str]:
        """Return how this node leaves a job that has not ended, as far as is known, and why: see `Finish`."""
        me = self._entry.node
        if self._asked is not None:
            return "stopped", self._leaves
        is_known = not (self._lost_job or self._lost_why)
        if is_known and me.outcome == "succeeded" and me.state == "done":
            return "succeeded", self._leaves
        return ("left", self._leaves) if self._wants_leave or is_known else ("unknown", self._lost_why)

    def _give_up(self, state: str, why: str) -> None:
        """Leave, for nothing can be had of the store any more: when the workers here are gone."""
        if self._given_up is not None or self.state == "LEFT":
            return
        self._given_up = state, why
        self._leave_unheard(why)

    def _leave_unheard(self, why: str) -> None:
        """Leave without the store: why is reported here alone."""
        if self.state == "RUNNING":
            self._effects.append(Heard(self._stop("left", why)))
        self._see("LEAVE")

    def _finish(self, finish: Finish) -> None:
        self.state, self.wake = "LEFT", math.inf
        self._effects.append(finish)
