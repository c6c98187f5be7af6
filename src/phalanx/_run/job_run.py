"""The runner of a node of a job: tells the store and the workers what `node` decides, and the node what they say.

What is said about it is `NodeTeam`'s business, and so are the workers.
"""

from __future__ import annotations

import math
import os
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial

from phalanx._base import clock, interrupts
from phalanx._base.text import one_line
from phalanx._engine import host_signals
from phalanx._group.restart_policy import AttemptEnd
from phalanx._rendezvous import life, stack_report
from phalanx._rendezvous.life import Effect, Finish, Found, Missing
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.records import Job, Node, Stop
from phalanx._run.runner import Runner, Step, Team
from phalanx._store.store import Away, Back, Store, StoreEvent

CLOSE, HURRIED = 3.0, 0.5
"""Seconds for which the end waits for the store; and where somebody does not want to wait."""

EXPECTS = 3
"""How many times within the time that an agent may be stopped its keeper is told that it is not."""


def shortened(close: Callable[[float], object], seconds: float) -> None:
    """Call ``close`` with the seconds that it may take; once more, with none, if a signal has come."""
    while True:
        try:
            with host_signals.delivering():
                close(seconds)
        except host_signals.SignalException:
            host_signals.forget_raised()
            seconds = 0.0
        else:
            return


class NodeTeam(Team):
    """The workers of one node: a `Team` that is told who it is in each generation, and tells how its workers ended."""

    def come(self, later: Callable[[Callable[[], str]], None]) -> None:
        """Begin what the workers need and what asks for no part in the job. By default, nothing.

        ``later``: has a function called by the node's thread; any thread may call it. What that function returns is why
        no worker can be started here; "": some can be. Raises OSError.
        """

    @abstractmethod
    def assign(self, job: Job, rank: int) -> None:
        """Take the place of the node with that group rank in the job's generation. `begin` and `start` follow."""

    @abstractmethod
    def when_failed(self, call: Callable[[int, Stop], None]) -> None:
        """Have ``call`` called when a worker fails, with its generation and what is to be said, on any thread."""

    @abstractmethod
    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """Return how an attempt has ended.

        That is the node's entry, but for its state; why its generation is to end, if its workers failed; and the
        evidence that they left.
        """

    @abstractmethod
    def end(self, stop: Stop | None) -> None:
        """End the workers because of ``stop``; None: because the job has gone on without them. `ended` tells when."""

    def expect(self, seconds: float) -> None:
        """Have the workers ended, unless this is called again within so many seconds. By default, they go on."""

    @abstractmethod
    def heard(self, what: Job | Stop) -> None:
        """Say what has been decided, or what has happened."""

    def came_late(self) -> None:
        """Say that a job of this id is over, and that the next one is waited for. By default, it is not said."""

    def miss(self, missing: Missing) -> None:
        """Say for whom the job waits. By default, it is not said."""

    def look(self, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:  # noqa: ARG002 - see below
        """Take the stacks of the workers of a generation, and call ``then`` with them, once, on any thread.

        Returns at once. ``nodes``: how many there are in that generation, which share what may be written. ``then`` is
        called with what `stack_report.write` returns: by default, that no stack is shown here.
        """
        then(stack_report.write({}, 0, why=stack_report.NONE_SHOWN))

    @abstractmethod
    def store_is(self, why: str | None) -> None:
        """Say that the store does not answer, and why; None: it answers."""


class JobRun(Runner):
    """The run of a node, from its entry into the job to its end.

    Args:
        node: What decides.
        store: Where the nodes meet; it is opened, and closed.
        team: The workers.
        signals: Whether signals are handled while it is under way, if it runs on the main thread.
        away_timeout: Seconds for which the workers go on while this process is stopped.
    """

    _team: NodeTeam

    def __init__(
        self, node: Participant, store: Store, team: NodeTeam, *, signals: bool = True, away_timeout: float = math.inf
    ) -> None:
        super().__init__(team, signals=signals)
        self._node = node
        self._store = store
        self._away_timeout = away_timeout
        self._expected = math.inf  # when the keeper is told again that this process goes on
        self._is_open = self._has_failed = False
        self._order: tuple[int, float] | None = None  # a signal for the workers, and their grace
        self.patience = CLOSE
        """Seconds for which the end waits for the store, and for those that leave a store that is here."""
        self.finish: Finish | None = None
        """How it has ended; None: it has not."""

    # --- any thread

    def ask_stop(self, death_signal: int, error: str, grace: float) -> None:
        """Ask for the end of the whole job, on all nodes. Returns at once; `run` carries it out."""
        self._tell(self._see_stop, death_signal, error, grace)

    def ask_leave(self, why: str, *, kills: bool = False) -> None:
        """Ask for this node's departure. The job goes on without it, if there are nodes enough.

        ``kills``: the workers are killed; else they end as when the job goes on without this node.
        """
        self._tell(self._see_leave, why, kills)

    def ask_look(self, tell: Callable[[Found], None]) -> None:
        """Find out where all ranks of the job are. ``tell`` is called with it; not, if the run ends before.

        That is on the thread of `run`: it must not wait.
        """
        self._tell(self._node.ask_look, tell)

    @property
    def is_spare(self) -> bool:
        """Whether the job runs without this node, which waits. On the thread of `run`."""
        return self._node.is_spare

    def _hear(self, event: StoreEvent) -> None:
        self._tell(self._see_store, event)

    def _hear_team(self, look: Callable[[], str]) -> None:
        self._tell(self._see_team, look)

    def _hear_failure(self, generation: int, stop: Stop) -> None:
        self._tell(self._see_failure, generation, stop)

    def _hear_look(self, looks: tuple[str, ...], data: bytes) -> None:
        self._tell(self._node.has_looked, looks, data)

    # --- one thread

    def run(self) -> Finish:
        """Carry on until this node has left the job, and return how. See `carry`.

        Raises what opening the store raises, with nothing started.
        """
        self.carry()
        assert self.finish is not None
        return self.finish

    @property
    def is_over(self) -> bool:
        """See `Runner`."""
        return self.finish is not None

    def close(self) -> None:
        """Leave the store, and release the signals. `run` is not called again.

        How the node has ended is known by then: a signal shortens this, and changes nothing else.
        """
        if self._owner != os.getpid():
            return
        ends_job = self.finish is not None and self.finish.ends_job
        try:
            if self._is_open:
                shortened(lambda seconds: self._store.close(seconds, ends_job=ends_job), self.patience)
        finally:
            super().close()

    def _begin(self) -> None:
        self._team.when_failed(self._hear_failure)
        self._team.come(self._hear_team)
        self._store.open(self._hear)
        self._is_open = True
        self._decide(self._node.begin(clock.now()))

    def _next(self) -> float:
        return min(self._node.wake, self._expected if self._under_way else math.inf)

    def _tick(self) -> None:
        if clock.now() >= self._node.wake:
            self._decide(self._node.tick(clock.now()))
        else:
            self._expect()

    def _take_told(self) -> None:
        """Tell the node what has happened next; all that the store has told by now, at once."""
        call, args = self._told.popleft()
        if call == self._see_store:
            events = [*args]
            while self._told and self._told[0][0] == self._see_store:
                events += self._told.popleft()[1]
            args = (events,)
        self._decide(call(*args, clock.now()))

    def _decide(self, due: Iterable[Effect]) -> None:
        """Have done what the node has decided."""
        for effect in due:
            if isinstance(effect, life.Start):
                self._due.append(Step("start", partial(self._assign, effect), effect.job.generation))
            elif isinstance(effect, life.End):
                self._due.append(Step("end", partial(self._end_workers, effect.stop)))
            elif isinstance(effect, life.Finish):
                self._due.append(Step("finish", partial(setattr, self, "finish", effect)))
            else:
                self._due.append(Step("pass on", partial(self._pass_on, effect)))

    def _assign(self, effect: life.Start) -> None:
        self._has_failed, self._order = False, None
        self._team.assign(effect.job, effect.rank)

    def _pass_on(self, effect: Effect) -> None:
        if isinstance(effect, life.Submit):
            self._store.submit(effect.ticket, effect.transaction)
        elif isinstance(effect, life.Fetch):
            self._store.fetch(effect.ticket, effect.prefix)
        elif isinstance(effect, life.Watch):
            self._store.watch(effect.prefix)
        elif isinstance(effect, life.Unwatch):
            self._store.unwatch(effect.prefix)
        elif isinstance(effect, life.Heard):
            self._team.heard(effect.what)
        elif isinstance(effect, life.Earlier):
            self._team.came_late()
        elif isinstance(effect, life.Missing):
            self._team.miss(effect)
        elif isinstance(effect, life.Look):
            self._team.look(effect.generation, effect.nodes, partial(self._hear_look, effect.looks))
        elif isinstance(effect, life.Looked):
            effect.tell(effect.found)

    def _expect(self) -> None:
        """Have the keeper end the workers, should this process be stopped: the job goes on without it then."""
        if self._away_timeout < math.inf:
            self._team.expect(self._away_timeout)
            self._expected = clock.now() + self._away_timeout / EXPECTS

    def _acts_first(self) -> bool:
        return True  # the store may tell without end, and each answer may make something due

    def _up(self) -> None:
        self._expect()

    def _not_started(self, error: Exception) -> None:
        with interrupts.deferred():  # whatever it is, the other nodes hear of it
            self._under_way = False
            self._gone(AttemptEnd("not started", error=one_line(error)))

    def _gone(self, end: AttemptEnd) -> None:
        """Tell the node that no worker is left."""
        now = clock.now()
        me, stop, evidence = self._team.account(end)
        if stop is not None and not self._has_failed and self._node.state != "WAITING":
            self._decide(self._node.workers_failed(stop, now))
        self._decide(self._node.workers_gone(me, evidence, now))

    def _see_store(self, events: list[StoreEvent], now: float) -> list[Effect]:
        for event in events:
            if isinstance(event, Away | Back):
                self._team.store_is(event.why if isinstance(event, Away) else None)
        return self._node.all_told(events, now)

    def _see_stop(self, death_signal: int, error: str, grace: float, now: float) -> list[Effect]:
        """Ask the node for the end of the job; the workers here need not wait for what it says."""
        self._order = death_signal, grace
        self.patience = HURRIED if death_signal == signal.SIGKILL else self.patience
        due = self._node.ask_stop(death_signal, error, grace, now)
        ends = any(isinstance(effect, life.End) for effect in due)
        return due if ends or not self._under_way else [*due, life.End(None)]

    def _see_leave(self, why: str, kills: bool, now: float) -> list[Effect]:  # noqa: FBT001 - told by `_tell`
        due = self._node.ask_leave(why, now, at_once=kills)
        if kills:
            self._order, self.patience = (signal.SIGKILL, 0.0), HURRIED
            due.append(life.End(None))
        return due

    def _see_team(self, look: Callable[[], str], now: float) -> list[Effect]:
        why = look()
        return self._node.cannot_start(why, now) if why else []

    def _see_failure(self, generation: int, stop: Stop, now: float) -> list[Effect]:
        """Tell the node that a worker has failed: of the generation that runs, the first one."""
        if generation != self._number or not self._under_way or self._has_failed:
            return []
        self._has_failed = True
        return self._node.workers_failed(stop, now)

    def _end_workers(self, stop: Stop | None) -> None:
        if self._order is not None:
            self._team.stop(*self._order)
        else:
            self._team.end(stop)
