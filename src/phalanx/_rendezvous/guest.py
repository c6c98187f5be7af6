"""`Guest`: a node of a job in somebody else's process: a thread carries it, and the workers are somebody else's, too.

No signal handler is set, and nothing is shown. After `leave`, no thread and no descriptor is left. A fork of the
process has no part in the job.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from phalanx._agent import master_port
from phalanx._agent.attempt_end import AttemptEnd
from phalanx._agent.restart_policy import RestartPolicy
from phalanx._base import interrupts, unpatched
from phalanx._base.latch import Latch
from phalanx._rendezvous.effects import Finish
from phalanx._rendezvous.entrance import Entrance, come
from phalanx._rendezvous.evidence import Left
from phalanx._rendezvous.guest_team import Calls, GuestTeam, Owner, Part
from phalanx._rendezvous.job_run import CLOSE, JobRun
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.records import Job, Node, Verdict
from phalanx._rendezvous.settings import Machines, agent_id
from phalanx._rendezvous.words import told

LONGEST_END = 60.0
"""Seconds that the end of a guest may take: the waits of the node, of the store, and of what it hosts are shorter."""

GONE = "its workers are gone"

ENDLESS = 2**31 - 1
"""So many restarts are those of a node that leaves it to others when there is an end."""


class Terms(NamedTuple):
    """What a node enters its job with.

    Attributes:
        machines: What it is told of its job.
        nproc: How many workers it has.
        role: What they are called.
        policy: When a failure is followed by another generation, while this node leads.
        grace: Seconds that its workers may take to end.
    """

    machines: Machines
    nproc: int
    role: str
    policy: RestartPolicy
    grace: float


class Guest:
    """A node of a job in somebody else's process.

    Args:
        run_id: The id of the job.
        terms: What it enters that with. Whoever has it may change it until then.
        warn: Called with a line that the user should see. By any thread; it must not wait.

    Attributes:
        finish: How it has ended; None: it has not, or by `error`.
        error: What it has ended by, before it could take part; None: it has not.
        owner: Whoever has the workers. It may be changed until it has entered.
        was_spare: Whether it had no part in the generation that ran last.
    """

    def __init__(self, run_id: str, terms: Terms, warn: Callable[[str], None]) -> None:
        self._run_id = run_id
        self.terms = terms
        self.owner = Owner()
        self._warn = warn
        self._owner = 0  # the process that has entered
        self._lock = threading.Lock()  # of the next two
        self._run: JobRun | None = None
        self._wishes: list[Callable[[JobRun], None]] = []  # of before there was a run
        self._thread: threading.Thread | None = None
        self._gone = Latch()
        self._over = Latch()  # opened when nothing more is to be waited for
        self._news = Latch()  # opened, and replaced by another one, when anything has changed
        self._team: GuestTeam | None = None
        self._entrance: Entrance | None = None
        self._calls = Calls()
        self._taken: Part | None = None
        self._asks_end = self._is_leaving = False
        self.finish: Finish | None = None
        self.error: Exception | None = None

    # --- any thread

    @property
    def has_entered(self) -> bool:
        """Whether it has begun to enter the job."""
        return self._owner != 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has been entered by the process that this one is a fork of."""
        return self._owner not in (0, os.getpid())

    @property
    def has_ended(self) -> bool:
        """Whether it has no part in the job any more."""
        return self._is_leaving or self.finish is not None or self.error is not None

    @property
    def is_closing(self) -> bool:
        """Whether no other generation comes, as far as is known here."""
        return self.has_ended or self._asks_end or (self._team is not None and self._team.is_closing)

    @property
    def away(self) -> str:
        """Why the store does not answer; "": it does, or was not asked yet."""
        return "" if self._team is None else self._team.away

    @property
    def was_spare(self) -> bool:
        """Whether the generation that ran last ran without it."""
        return self._team is not None and self._team.is_spare

    @property
    def part(self) -> Part | None:
        """The part that `next_part` has returned last; None: there is none."""
        return self._taken

    def master(self, job: Job) -> tuple[str, int]:
        """Return where rank 0 of the workers of a generation listens. After `next_part` has returned it."""
        assert self._entrance is not None
        return self._entrance.master(job)

    def why(self, verdict: Verdict | None) -> str:
        """Return what the last generation has ended with, by a verdict, in one line; "": nothing is said."""
        return "" if verdict is None or verdict.stop is None else told(verdict.stop)

    def enter(self) -> None:
        """Begin to enter the job; a further call does nothing. Raises RuntimeError: no thread can be started."""
        with self._lock, interrupts.deferred():
            if self._owner:
                return
            thread = unpatched.thread(target=self._carry, name="phalanx-node")
            self._owner = os.getpid()
            try:
                thread.start()
            except BaseException:
                self._owner = 0
                raise
            self._thread = thread

    def next_part(self) -> Part | None:
        """Wait for the next generation in which this node takes part; one at a time. None: it has ended.

        What it has taken before is over: its workers are gone.
        """
        self.enter()
        before = self._taken
        if before is not None and before.end is None:
            is_over = bool(before.ended) or self._asks_end
            self._conclude(before, before.failure or (AttemptEnd("stopped") if is_over else _gone()))
        while True:
            news = self._news
            part = None if self._team is None else self._team.part
            if self.has_ended:
                return None
            if part is not None and part.end is None and part is not before:
                if not part.ended:
                    self._taken = part
                    return part
                self._conclude(part, AttemptEnd("stopped"))  # it had ended before anybody asked
            news.wait()

    def tell_failure(self, error: str, rank: int | None, exitcode: int | None, *, is_hang: bool = False) -> None:
        """Say that a worker has failed. Nothing happens where none can run. ``is_hang``: a timer has found it."""
        if self._taken is not None and self._team is not None:
            self._team.tell_failure(self._taken, error, rank, exitcode, is_hang=is_hang)

    def tell_left(self, left: Left) -> None:
        """Say what the workers have left, before their end is told. What is told last counts."""
        if self._taken is not None:
            self._taken.left = left

    def tell_success(self, *, wait: bool) -> bool | None:
        """Say that all workers here have succeeded, and wait for those of other nodes, if that is wanted.

        Returns whether the job has succeeded; or this node has waited for the others for long enough. False: there is
        to be another generation, or the job has ended in another way. None: it is not known yet.
        """
        part = self._taken
        if part is None:
            return False
        self._conclude(part, AttemptEnd("succeeded"))
        while True:
            news = self._news
            if self.has_ended:
                return self.finish is not None and self.finish.state == "succeeded"
            if part.ended and not self.is_closing:
                return False
            if not wait:
                return None
            news.wait()

    def when_ended(self, call: Callable[[], object]) -> None:
        """Have ``call`` called when the generation that runs here is ended."""
        self._calls.add(call, self._taken)

    def ask_end(self, error: str) -> None:
        """Ask for the end of the job, on all nodes. It is entered for that, if it has not been."""
        self._asks_end = True
        self._over.open()
        self._wish(lambda run: run.ask_stop(signal.SIGTERM, error, 0.0))
        self.enter()

    def leave(self, why: str) -> bool:
        """Leave the job, and give everything back. Returns whether that went well. Waits at most `LONGEST_END`."""
        if not self.has_entered:
            self._is_leaving = True
            return True
        if self.finish is None:
            self._wish(lambda run: run.ask_leave(why))
        self._is_leaving = True  # `next_part` ends
        self._over.open()
        part = None if self._team is None else self._team.part
        if part is not None and part.end is None:  # after the wish: else it would be a failure
            self._conclude(part, AttemptEnd("stopped"))
        self._change()
        thread = self._thread
        if unpatched.is_current(thread) or not self._gone.wait(LONGEST_END):
            return False
        if thread is not None:
            thread.join(1.0)
        return self.error is None and self.finish is not None

    def _wish(self, wish: Callable[[JobRun], None]) -> None:
        with self._lock, interrupts.deferred():
            if self._run is None:
                self._wishes.append(wish)
                return
        wish(self._run)

    def _conclude(self, part: Part, end: AttemptEnd) -> None:
        if self._team is not None:
            self._team.conclude(part, end)

    def _change(self) -> None:
        old, self._news = self._news, Latch()
        old.open()

    # --- the node's thread

    def _carry(self) -> None:
        """Take part in the job until the end."""
        try:
            with ExitStack() as held:
                self._carry_on(held)
        except Exception as error:  # noqa: BLE001 - `next_part` tells
            self.error = error
        finally:
            if self._team is not None and self._team.part is not None:
                self._team.part.ended.open()
            self._gone.open()
            self._see()

    def _carry_on(self, held: ExitStack) -> None:
        terms = self.terms
        machines = terms.machines
        entrance = come(machines, self._run_id, self._warn, self._over)
        if entrance.end is not None:
            held.callback(entrance.end, CLOSE)
        self._entrance = entrance
        port = held.enter_context(master_port.reserve())
        host = os.uname().nodename
        me = Node(
            agent_id(host), host, entrance.address, terms.nproc, terms.role, port.number,
            order=machines.node_rank, min_nodes=machines.min_nodes, max_nodes=machines.max_nodes,
            policy="" if terms.policy.max_restarts >= ENDLESS else terms.policy.describe(),
        )  # fmt: skip
        team = GuestTeam(me, port, self._see, self._warn, machines, self.owner)
        node = Participant(
            me, machines.rules(terms.policy, terms.grace, 0.0), barrier=machines.barrier,
            hosts=entrance.hosts,
            away_timeout=machines.away_timeout, chance=random.random,
        )  # fmt: skip
        run = held.enter_context(JobRun(node, entrance.store, team, signals=False, away_timeout=machines.away_timeout))
        team.run = run
        with self._lock:
            self._team, self._run = team, run
            wishes, self._wishes = self._wishes, []
        for wish in wishes:
            wish(run)
        self.finish = run.run()
        self._see()

    def _see(self) -> None:
        """Tell all who wait that something has changed."""
        if self._team is not None:
            if self.finish is not None and self._team.part is not None:
                self._team.part.ended.open()
            self._calls.tell(self._team.part, is_over=self.finish is not None)
        self._change()


def _gone() -> AttemptEnd:
    return AttemptEnd("failed", error=GONE)
