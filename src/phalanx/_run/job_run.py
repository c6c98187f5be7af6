"""The part of a node in a job of many machines: `node` decides, and `JobRun` has store and workers do it.

What is printed about it is `NodeTeam`'s business, and so are the workers.
"""

from __future__ import annotations

import math
import signal
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from phalanx._base import clock
from phalanx._engine import host_signals
from phalanx._group.restart_policy import AttemptEnd
from phalanx._rendezvous import life, questions
from phalanx._rendezvous.life import Finish, Found, Missing
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.records import Job, Node, Stop
from phalanx._rendezvous.stack_report import NONE_SHOWN
from phalanx._run.runner import Decider, End, Start, Team
from phalanx._store.store import Away, Back, Store, StoreEvent

CLOSE, HURRIED = 3.0, 0.5
"""Seconds for which the end waits for the store; and where somebody does not want to wait."""

EXPECTS = 3
"""How many times within the time that an agent may be stopped it shows its keeper that it is not."""


class NodeTeam(Team):
    """The workers of one node: a `Team` with a place in each generation, which returns how its workers ended.

    Attributes:
        cause: Why the job ends the workers, when it does: see `Team.stop`; None: it has gone on without them.
    """

    cause: Stop | None = None

    @abstractmethod
    def come(self, run: JobRun) -> None:
        """Begin what the workers need and what asks for no part in the job. Raises OSError.

        ``run``: any thread may ask it; `JobRun.worker_failed` is to be called when a worker fails.
        """

    @abstractmethod
    def assign(self, job: Job, rank: int) -> None:
        """Take the place of the node with that group rank in the job's generation. `begin` and `start` follow."""

    @abstractmethod
    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """Return how an attempt has ended.

        That is the node's entry, but for its state; why its generation is to end, if its workers failed; and the
        evidence that they left.
        """

    def expect(self, seconds: float) -> None:
        """Have the workers ended, unless this is called again within so many seconds. By default, they go on."""

    @abstractmethod
    def heard(self, what: Job | Stop) -> None:
        """Print what has been decided, or what has happened."""

    def came_late(self) -> None:
        """Print that a job of this id is over, and that the node waits for the next one. By default, nothing."""

    def miss(self, missing: Missing) -> None:
        """Print for whom the job waits. By default, nothing."""

    def answer(self, what: str, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:  # noqa: ARG002 - see below
        """Answer what is asked of the workers of a generation: call ``then`` with it, once, on any thread.

        Returns at once. ``nodes``: how many there are in that generation: see `records.share`. ``then`` is called
        with what `stack_report.write` returns for `questions.STACKS`, else with a JSON object: by default, with why
        there is none here.
        """
        then(questions.refuse(NONE_SHOWN if what == questions.STACKS else questions.NOT_KNOWN))

    @abstractmethod
    def store_is(self, why: str | None) -> None:
        """Print that the store does not answer, and why; None: it answers."""


class JobRun(Decider):
    """A node's part in a job, from its entry to its end.

    Args:
        node: What decides.
        store: Where the nodes meet; it is opened, and closed.
        team: The workers.
        away_timeout: Seconds for which the workers go on while this process is stopped.

    Attributes:
        patience: Seconds for which the end waits for the store, and for those that leave a store that is here.
        finish: How it has ended; None: it has not.
    """

    acts_first = True  # the store may have events without end, and each may make something due

    def __init__(self, node: Participant, store: Store, team: NodeTeam, *, away_timeout: float = math.inf) -> None:
        self._node, self._store, self._team = node, store, team
        self._away_timeout = away_timeout
        self._expected = math.inf  # when `NodeTeam.expect` is to be called again
        self._is_open = self._has_failed = False
        self._generation = -1  # whose workers run; -1: none do
        self._order: End | None = None  # for the workers, asked for here
        self.patience = CLOSE
        self.finish: Finish | None = None

    # --- any thread

    def ask_stop(self, death_signal: int, error: str, grace: float) -> None:
        """Ask for the end of the whole job, on all nodes. Returns at once; the runner carries it out."""
        self.submit(self._asked_to_stop, death_signal, error, grace)

    def ask_restart(self, why: str) -> None:
        """Ask for another generation, on all nodes; it counts as no restart. Returns at once."""
        self.submit(self._node.ask_restart, why)

    def ask_leave(self, why: str, *, kills: bool = False) -> None:
        """Ask for this node's departure. The job goes on without it, if there are nodes enough.

        ``kills``: the workers are killed; else they end as when the job goes on without this node.
        """
        self.submit(self._asked_to_leave, why, kills)

    def ask(self, what: str, tell: Callable[[Found], None]) -> None:
        """Ask all nodes of the job something, see `questions`. Not, if the run ends before: `tell` is not called then.

        ``tell`` is called once, on the runner's thread: it must not wait.
        """
        self.submit(self._node.ask, what, tell)

    def worker_failed(self, generation: int, stop: Stop) -> None:
        """Tell the other nodes that a worker of a generation has failed: of the one that runs, the first one."""
        self.submit(self._worker_failed, generation, stop)

    def imported(self, why_not: Callable[[], str]) -> None:
        """Handle the end of an import. ``why_not`` returns why no worker can be started here; "": some can be."""
        self.submit(self._imported, why_not)

    @property
    def is_spare(self) -> bool:
        """Whether the job runs without this node, which waits. On the runner's thread."""
        return self._node.is_spare

    # --- the runner's thread

    @property
    def is_over(self) -> bool:
        """See `Decider`."""
        return self.finish is not None

    def close(self) -> None:
        """Leave the store. How the node has ended is known: a signal shortens this, and changes nothing else."""
        ends_job = self.finish is not None and self.finish.ends_job
        if self._is_open:
            host_signals.shortened(lambda seconds: self._store.close(seconds, ends_job=ends_job), self.patience)

    @property
    def wake(self) -> float:  # type: ignore[override]  # it follows from two others
        """See `Decider`."""
        return min(self._node.wake, self._expected)

    def step(self, event: str, now: float) -> Iterable[object]:
        """See `Decider`. Raises what opening the store raises, with nothing started."""
        if event == "START":
            self._team.come(self)
            self._store.open(lambda event: self.submit(self._store_events, event))
            self._is_open = True
            return self._node.begin(now)
        if event == "LATE" and now >= self._node.wake:
            return self._node.tick(now)
        if self._away_timeout < math.inf:  # the keeper ends the workers, should this process be stopped
            self._team.expect(self._away_timeout)
            self._expected = now + self._away_timeout / EXPECTS
        return ()

    def gone(self, end: AttemptEnd, error: Exception | None, now: float) -> Iterable[object]:  # noqa: ARG002 - ``end`` has it
        """See `Decider`. Whatever has gone wrong, the other nodes learn it."""
        me, stop, evidence = self._team.account(end)
        self._expected, self._generation = math.inf, -1
        failed = stop is not None and not self._has_failed and self._node.state != "WAITING"
        effects = self._node.workers_failed(stop, now) if failed and stop is not None else []
        return [*effects, *self._node.workers_gone(me, evidence, now)]

    def handle(self, submitted: deque[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterable[object]:
        """See `Decider`. All events of the store that are there by now are handled at once."""
        if submitted[0][0] != self._store_events:
            return super().handle(submitted)
        events: list[StoreEvent] = []
        while submitted and submitted[0][0] == self._store_events:
            events += submitted.popleft()[1]
        return self._store_events(events, clock.now())

    def carry_out(self, effect: object) -> Iterable[object]:
        """See `Decider`."""
        match effect:
            case life.Start(job, rank):
                self._has_failed, self._order, self._generation = False, None, job.generation
                self._team.assign(job, rank)
                return [Start(job.generation)]
            case life.End(stop):
                self._team.cause = stop
                kills = stop is not None and stop.kind == "signal" and stop.signal == signal.SIGKILL
                return [self._order or (End(signal.SIGKILL, 0.0) if kills else End(None, 0.0))]
            case life.Finish():
                self.finish = effect
            case life.Heard(what):
                self._team.heard(what)
            case life.Earlier():
                self._team.came_late()
            case life.Missing():
                self._team.miss(effect)
            case life.Answer(what, generation, nodes, names):
                self._team.answer(what, generation, nodes, partial(self.submit, self._node.has_answered, names))
            case life.Answered(tell, found):
                tell(found)
            case _:
                self._ask_store(effect)
        return ()

    def _ask_store(self, effect: object) -> None:
        match effect:
            case life.Submit(ticket, transaction):
                self._store.submit(ticket, transaction)
            case life.Fetch(ticket, prefix):
                self._store.fetch(ticket, prefix)
            case life.Watch(prefix):
                self._store.watch(prefix)
            case life.Unwatch(prefix):
                self._store.unwatch(prefix)

    def _store_events(self, events: list[StoreEvent], now: float) -> Iterable[object]:
        for event in events:
            if isinstance(event, Away | Back):
                self._team.store_is(event.why if isinstance(event, Away) else None)
        return self._node.all_told(events, now)

    def _asked_to_stop(self, death_signal: int, error: str, grace: float, now: float) -> Iterable[object]:
        """Ask the node for the end of the job; the workers here need not wait for what it says."""
        self._order = End(death_signal, grace)
        self.patience = HURRIED if death_signal == signal.SIGKILL else self.patience
        return [*self._node.ask_stop(death_signal, error, grace, now), self._order]

    def _asked_to_leave(self, why: str, kills: bool, now: float) -> Iterable[object]:  # noqa: FBT001 - see `submit`
        effects = self._node.ask_leave(why, now, at_once=kills)
        if not kills:
            return effects
        self._order, self.patience = End(signal.SIGKILL, 0.0), HURRIED
        return [*effects, self._order]

    def _imported(self, why_not: Callable[[], str], now: float) -> Iterable[object]:
        why = why_not()
        return self._node.cannot_start(why, now) if why else ()

    def _worker_failed(self, generation: int, stop: Stop, now: float) -> Iterable[object]:
        if generation != self._generation or self._has_failed:
            return ()
        self._has_failed = True
        return self._node.workers_failed(stop, now)
