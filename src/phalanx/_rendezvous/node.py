"""A node of a job: what its agent does as the store and its workers tell. Pure: it returns what is to be done.

Owns the node's part in each generation. Any event may come at any time. What it wants the store to hold is the business
of `node_writes`; what it waits for, and how it leaves, of `node_waits`; where the ranks are, if somebody asks, of
`looks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from signal import SIGKILL

from phalanx._rendezvous import records
from phalanx._rendezvous.effects import Earlier, Effect, Finish, Found, Heard, Watch
from phalanx._rendezvous.looks import Looks
from phalanx._rendezvous.node_waits import HURRY, PATIENCE, NodeWaits
from phalanx._rendezvous.records import DamagedError, Job, Node, Stop, replace
from phalanx._rendezvous.rules import Rules
from phalanx._rendezvous.store_view import StoreView
from phalanx._store import store
from phalanx._store.store import StoreEvent


class Participant(NodeWaits):
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
        super().__init__(me, rules, barrier=barrier, hosts=hosts, away_timeout=away_timeout, chance=chance)
        self._begun = False
        self._ended = -1  # the generation whose end was said
        self._heard: tuple[int, str] = (-1, "")
        self._is_late = False  # whether an earlier job was met
        self._has_reached = False  # whether the store has answered at all
        self._was_away = False  # whether it has not, for a while
        self._store = b""  # which one that was
        self._looks = Looks(me.id)

    # --- what happens

    def begin(self, now: float) -> list[Effect]:
        """Enter the job."""
        self._now = self._since = self._away = now
        self._begun = True
        self._effects.append(Watch(records.JOB))
        return self._settle()

    def store_told(self, event: StoreEvent, now: float) -> list[Effect]:
        """See what the store tells."""
        return self.all_told((event,), now)

    def all_told(self, events: Iterable[StoreEvent], now: float) -> list[Effect]:
        """See all that the store has told meanwhile, in its order, before anything is decided.

        What a leader decides costs time for each node there is: of many that come at once, it costs that once.
        """
        self._now = now
        self._prove_life()  # by what was known until now
        for event in events:
            if not self._looks.hear(event, now):
                self._take(event)
        return self._settle()

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
            if what == "read":
                self._read = event.entries  # None: it is tried again
            elif what == "cause":
                self._cause = event.entries
        elif isinstance(event, store.Away):
            self._was_away = True
            self._away = now if self._away is None else self._away
        elif isinstance(event, store.Back):
            self._see_back(event)
        elif isinstance(event, store.LeaseLost):
            self._regained = now
            self._entered = None
            self._writes.drop("enter")  # it may have been made with the lease that is lost
            self._writes.reopen()
        else:
            self._give_up("refused", event.why)

    def _see_back(self, event: store.Back) -> None:
        self._regained = self._now if self._has_reached or self._was_away else self._regained
        if self._has_reached and event.store != self._store:
            self._forget_store()
        self._has_reached, self._away, self._store = True, None, event.store
        self._seen = 0, self._now
        self._writes.reopen()

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
        patience = HURRY if signal == SIGKILL else PATIENCE
        self._by = min(self._by, now + (grace if runs else 0.0) + patience)
        if self.state == "RUNNING":
            self._see("ENDED")
        return self._settle()

    def ask_leave(self, why: str, now: float, *, at_once: bool = False) -> list[Effect]:
        """Take this node out of the job, which goes on without it if it can. ``at_once``: nobody wants to wait."""
        self._now = now
        me = self._me
        job = self._known_job()
        if self.state == "LEAVING" or (job is not None and job.phase == "over" and not self._is_new):
            self._by = min(self._by, now + (HURRY if at_once else PATIENCE))
            return self._settle()
        self._leaves, self._wants_leave = self._leaves or why, True
        if self.state == "RUNNING":
            self._stops.say(Stop(me.generation, "left", me.id, me.host, records.one_line(why)))
        self._by = min(self._by, now + HURRY) if at_once else self._by
        if self.state == "DONE":  # its success is to stay known
            self._barrier = min(self._barrier, now - self._since)
        else:
            self._see("LEAVE")
        return self._settle()

    def cannot_start(self, why: str, now: float) -> list[Effect]:
        """See that no worker can be started here. A node that waits leaves a job that has begun to others.

        Before that, and if it hosts the store, it stays: the others hear of it when a generation begins with it.
        """
        self._now = now
        self._cannot_start = why if self.state == "WAITING" else ""
        return self._settle()

    def ask_look(self, tell: Callable[[Found], None], now: float) -> list[Effect]:
        """Find out where all ranks of the job are: `Looked` has ``tell`` called, unless this node leaves before."""
        self._now = now
        self._looks.ask(tell)
        return self._settle()

    def has_looked(self, looks: tuple[str, ...], data: bytes, now: float) -> list[Effect]:
        """See where the workers here are, as `Look` has asked: ``data`` is to be told to those who ask."""
        self._now = now
        self._looks.answer(looks, data, self._view)
        return self._settle()

    def tick(self, now: float) -> list[Effect]:
        """See that it is `wake`, or later."""
        self._now = now
        return self._settle()

    @property
    def is_spare(self) -> bool:
        """Whether the job runs without this node, which waits."""
        job = self._known_job()
        return self.state == "WAITING" and job is not None and job.phase == "running" and job.rank_of(self._me.id) < 0

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
                if self._given_up is None:
                    self._look()
                    self._lead()
                    self._write()
                    self._wait()
            except DamagedError as error:
                self._give_up_for(error)
            if self._given_up is not None and self.state == "LEAVING":
                self._see("READ")
            if not self._is_final:
                is_away = self._away is not None or self._given_up is not None
                self._effects += self._looks.settle(self._view, self._known_job(), self._now, is_away=is_away)
                self.wake = min(self.wake, self._looks.wake)
        effects, self._effects = self._effects, []
        return effects

    def _look(self) -> None:
        """See what the store holds, and what that means for the workers here."""
        job = self._job()  # first: of a job of another version, nothing else is understood
        self._prove_life()
        is_early = self._waits_for_earlier(job)
        refused = self._view.refusal(self._me.id)
        if refused and self.state == "WAITING" and not self._hosts and (job is None or not is_early):
            self._finish(Finish("refused", refused, job))
            return
        if is_early:
            return
        if self._lost_job or self._view.is_job_gone():
            self._see_gone()
        if job is None or self._lost_job:
            return
        self._last = job
        mine, stop = self._me.generation, self._hear(job)
        if job.phase == "over":
            if self.state in ("WAITING", "RUNNING", "STOPPING", "DONE"):
                self._see("OVER")
            return
        if self.state in ("RUNNING", "DONE") and (stop is not None or job.generation > mine):
            self._see("ENDED")
        is_next = job.phase == "running" and job.generation > mine and job.rank_of(self._me.id) >= 0
        if self.state == "WAITING" and is_next and self._entered is not None:  # else it is about to be lost
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

    def _prove_life(self) -> None:
        """See whether the job is one that lives: what was written by agents that were killed may outlive them a while.

        It lives if this node takes part; if its leader has changed it since this node came; or if it has had the same
        leader for longer than such a one takes to find that nobody is left, see `Leader`.
        """
        job, now = self._known_job(), self._now
        leader, since = self._view.leader()
        if self._seen[0] != since:
            self._seen = since, now
        if job is None or job.phase == "over" or self._view.is_job_gone():  # the last: it is another one
            return
        is_led = leader not in ("", self._me.id) and self._away is None
        is_changed = self._entered is not None and self._view.job()[1] > self._entered_at
        lives = job.rank_of(self._me.id) >= 0 or is_changed
        self._has_lived = self._has_lived or lives or (is_led and now >= self._seen[1] + 3 * self._rules.return_timeout)

    def _waits_for_earlier(self, job: Job | None) -> bool:
        """Whether there is no job yet for this node: one that ends when it comes is an earlier one of its id."""
        is_over = job is not None and job.phase == "over"
        is_ending = is_over if self._has_lived else self._view.is_ending()
        self._is_new = self._is_new and (job is None or is_ending)
        if not self._has_lived and self._view.is_job_gone():  # nobody was left of it
            self._view.forget_job()
            self._is_new = job is None or is_ending
        if self._is_new and job is not None and not self._is_late:
            self._is_late = True
            self._effects.append(Earlier())
        return self._is_new

    def _see_gone(self) -> None:
        self._lost_job = True
        if self.state in ("WAITING", "RUNNING", "STOPPING", "DONE"):
            self._see("OVER")

    def _forget_store(self) -> None:
        """See that the store is another one, which knows nothing of what was in the one before.

        A node that waits enters the job that is made there; the workers of another node end with the job that was.
        """
        self._view = StoreView()
        self._entered, self._entered_at, self._seen = None, 0, (0, self._now)
        self._waiting, self._heard = (0, 0.0), (-1, "")
        if self.state == "WAITING" and self._asked is None and not self._leaves:
            self._me = replace(_without_end(self._me), generation=-1, outcome="")
            self._ended, self._evidence = -1, b""
            self._is_new, self._has_lived, self._is_late = True, False, False
            self._stops.forget()
            self._since, self._by = self._now, math.inf
        else:
            self._lost_job = True
            self._lost_why = "its store was started again, and knows nothing of it"

    def _take_part(self, job: Job) -> None:
        """Begin a generation, unless it has ended already."""
        if self._asked is None and not self._leaves and self._view.stop(job.generation) is None:
            self._see("FORMED")
            return
        self._me = replace(_without_end(self._me), generation=job.generation, outcome="not started")
        self._evidence = b""
        self._see("MISSED")


def _without_end(me: Node) -> Node:
    """Return a node's entry without what it says of the end of its workers."""
    return replace(me, uptime=0.0, step=None, survivors=0, error="", rank=None, exitcode=None, is_cut_off=False)
