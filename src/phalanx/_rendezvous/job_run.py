"""Carries out what `node` decides: tells the store and the workers what to do, and the node what they say.

The counterpart of `phalanx._agent.attempts` for a job of many machines. Owns the one thread on which a node decides,
and what it waits for; what is said about it is `NodeTeam`'s business, and so are the workers.
"""

from __future__ import annotations

import math
import os
import signal
from abc import abstractmethod
from collections import deque
from functools import partial

from phalanx._agent.attempts import Team
from phalanx._base import clock, interrupts
from phalanx._base.latch import Latch
from phalanx._base.one_line import one_line
from phalanx._engine import host_signals
from phalanx._rendezvous import effects
from phalanx._store.store import Away, Back

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Self

    from phalanx._agent.attempt_end import AttemptEnd
    from phalanx._rendezvous.effects import Effect, Finish, Found, Missing
    from phalanx._rendezvous.node import Participant
    from phalanx._rendezvous.records import Job, Node, Stop
    from phalanx._store.store import Store, StoreEvent

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
        from phalanx._rendezvous import stack_report

        then(stack_report.write({}, 0, why="its agent is a program that shows no stacks"))

    @abstractmethod
    def store_is(self, why: str | None) -> None:
        """Say that the store does not answer, and why; None: it answers."""


class JobRun:
    """The run of a node, from its entry into the job to its end. A context manager, which `close`s it.

    Args:
        node: What decides.
        store: Where the nodes meet; it is opened, and closed.
        team: The workers.
        signals: Whether signals are handled while it is under way, if it runs on the main thread.
        away_timeout: Seconds for which the workers go on while this process is stopped.
    """

    def __init__(
        self, node: Participant, store: Store, team: NodeTeam, *, signals: bool = True, away_timeout: float = math.inf
    ) -> None:
        self._node = node
        self._store = store
        self._team = team
        self._signals = signals
        self._away_timeout = away_timeout
        self._expected = math.inf  # when the keeper is told again that this process goes on
        self._owner = os.getpid()
        self._told: deque[tuple[Callable[..., list[Effect]], tuple[Any, ...]]] = deque()  # by any thread
        self._due: deque[Effect] = deque()  # what is to be carried out
        self._bell = Latch()
        self._entered = self._has_begun = self._is_open = False
        self._number = -1  # the generation whose workers are there, or were last
        self._under_way = self._is_up = self._has_failed = False
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

    def wake(self) -> None:
        """Have `run` look at once at what has become of the workers."""
        self._bell.open()

    def _tell(self, call: Callable[..., list[Effect]], *args: Any) -> None:
        self._told.append((call, args))
        self.wake()

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
        """Carry on until this node has left the job, and return how.

        When an exception leaves it (SignalException: a signal has arrived), nothing has been stopped by that: call
        `ask_stop`, and `run` again. Raises what opening the store raises, with nothing started.
        """
        if self._entered:
            host_signals.forget_raised()
        self._entered = True
        if self._signals:
            host_signals.acquire(self)
        while self.finish is None:
            self._turn()
        return self.finish

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
            if self._signals:
                host_signals.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # A signal may raise between any two lines of these: see `Attempts`.

    def _turn(self) -> None:
        self._bell = Latch()  # before the looks: what changes after them opens it
        seconds = self._step()
        if seconds is not None:
            with host_signals.delivering():
                self._bell.wait(-1 if seconds == math.inf else seconds)

    def _step(self) -> float | None:
        """Take one step; or return for how many seconds none can be taken unless `wake` is called, inf: for ever."""
        if not self._has_begun:
            self._begin()
        elif self._due:
            self._carry_out()
        elif self._told:
            with interrupts.deferred():
                self._take_told()
        elif self._under_way and self._look():
            pass
        elif clock.now() >= self._node.wake:
            with interrupts.deferred():
                self._due += self._node.tick(clock.now())
        elif self._under_way and clock.now() >= self._expected:
            self._expect()
        else:
            left = max(0.0, min(self._node.wake, self._expected if self._under_way else math.inf) - clock.now())
            polls = self._team.poll_seconds if self._under_way else None
            return left if polls is None else min(left, polls)
        return None

    def _begin(self) -> None:
        with interrupts.deferred():
            self._has_begun = True
            self._team.when_failed(self._hear_failure)
            self._team.come(self._hear_team)
            self._store.open(self._hear)
            self._is_open = True
            self._due += self._node.begin(clock.now())

    def _take_told(self) -> None:
        """Tell the node what has happened next; all that the store has told by now, at once."""
        call, args = self._told.popleft()
        if call != self._see_store:
            self._due += call(*args, clock.now())
            return
        events = [*args]
        while self._told and self._told[0][0] == self._see_store:
            events += self._told.popleft()[1]
        self._due += self._see_store(events, clock.now())

    def _carry_out(self) -> None:
        """Carry out what is due first. What may take long is not done with signals deferred."""
        with interrupts.deferred():
            effect = self._due.popleft()
            if isinstance(effect, effects.Start):
                self._number, self._under_way = effect.job.generation, True
                self._is_up = self._has_failed = False
                self._order = None
                self._team.assign(effect.job, effect.rank)
                self._team.begin(self._number)
            elif isinstance(effect, effects.Finish):
                self.finish = effect
            else:
                self._pass_on(effect)
        if isinstance(effect, effects.Start):
            self._start()
        elif isinstance(effect, effects.End):
            self._end_workers(effect.stop)

    def _pass_on(self, effect: Effect) -> None:
        if isinstance(effect, effects.Submit):
            self._store.submit(effect.ticket, effect.transaction)
        elif isinstance(effect, effects.Fetch):
            self._store.fetch(effect.ticket, effect.prefix)
        elif isinstance(effect, effects.Watch):
            self._store.watch(effect.prefix)
        elif isinstance(effect, effects.Unwatch):
            self._store.unwatch(effect.prefix)
        elif isinstance(effect, effects.Heard):
            self._team.heard(effect.what)
        elif isinstance(effect, effects.Earlier):
            self._team.came_late()
        elif isinstance(effect, effects.Missing):
            self._team.miss(effect)
        elif isinstance(effect, effects.Look):
            self._team.look(effect.generation, effect.nodes, partial(self._hear_look, effect.looks))
        elif isinstance(effect, effects.Looked):
            effect.tell(effect.found)

    def _start(self) -> None:
        try:
            self._team.start(self._number, self.wake)
        except host_signals.SignalException:  # the group is open, or none of it is left: `ended` will tell
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the other nodes hear of it
            self._note_failed_start(error)

    def _expect(self) -> None:
        """Have the keeper end the workers, should this process be stopped: the job goes on without it then."""
        if self._away_timeout < math.inf:
            self._team.expect(self._away_timeout)
            self._expected = clock.now() + self._away_timeout / EXPECTS

    def _look(self) -> bool:
        """See what has become of the workers. Returns whether anything has."""
        if not self._is_up:
            try:
                self._is_up = self._team.is_up()
                if self._is_up:
                    self._expect()
            except host_signals.SignalException:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._note_failed_start(error)
                return True
        end = self._team.ended()
        if end is None:
            return False
        self._note_end(end)
        return True

    def _note_failed_start(self, error: Exception) -> None:
        from phalanx._agent.attempt_end import AttemptEnd

        self._note_end(AttemptEnd("not started", error=one_line(error)))

    def _note_end(self, end: AttemptEnd) -> None:
        """Tell the node that no worker is left."""
        with interrupts.deferred():
            self._under_way = False
            now = clock.now()
            me, stop, evidence = self._team.account(end)
            if stop is not None and not self._has_failed and self._node.state != "WAITING":
                self._due += self._node.workers_failed(stop, now)
            self._due += self._node.workers_gone(me, evidence, now)

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
        ends = any(isinstance(effect, effects.End) for effect in due)
        return due if ends or not self._under_way else [*due, effects.End(None)]

    def _see_leave(self, why: str, kills: bool, now: float) -> list[Effect]:  # noqa: FBT001 - told by `_tell`
        due = self._node.ask_leave(why, now, at_once=kills)
        if kills:
            self._order, self.patience = (signal.SIGKILL, 0.0), HURRIED
            due.append(effects.End(None))
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
        if not self._under_way:
            return
        if self._order is not None:
            self._team.stop(*self._order)
        else:
            self._team.end(stop)
