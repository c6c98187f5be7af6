"""`NodeThread`: a node of a job on a thread of a program that starts and ends the workers itself.

It knows the workers' generation, and no process. No signal handler is set, and nothing is shown. After `leave`, no
thread and no descriptor is left. A fork of the process has no part in the job.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from phalanx._base import interrupts, unpatched
from phalanx._base.text import one_line
from phalanx._base.threads import Latch
from phalanx._group.restart_policy import AttemptEnd, RestartPolicy
from phalanx._outcomes.result import RunProcsResult
from phalanx._rendezvous.conclusion import told as in_words
from phalanx._rendezvous.conclusion import unreachable
from phalanx._rendezvous.entrance import Entrance, come
from phalanx._rendezvous.evidence import Left, account, stop_of
from phalanx._rendezvous.life import Finish, Missing
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.records import Job, Node, Stop, Verdict
from phalanx._rendezvous.settings import Machines, agent_id
from phalanx._run import master_port
from phalanx._run.job_run import CLOSE, JobRun, NodeTeam
from phalanx._run.master_port import ReservedPort
from phalanx._run.runner import Runner

LONGEST_END = 60.0
"""Seconds that the end of a node may take: the waits of the node, of the store, and of what it hosts are shorter."""

GONE = "its workers are gone"

ENDLESS = 2**31 - 1
"""So many restarts are those of a node that leaves it to others when there is an end."""


class Part:
    """The part of a node in one generation.

    Args:
        job: The job, as that generation has begun.
        rank: The node's group rank.

    Attributes:
        ended: Open: the generation has been ended, by whomever, or the job is over.
        why: Why, in one line; "": nobody has said.
        failure: What the owner has told of a worker's failure; None: nothing.
        end: How the workers ended, none of which is left; None: they may run.
        left: What they have left, for the report on the job: told before their end. None: nothing was told.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.ended = Latch()
        self.why = ""
        self.failure: AttemptEnd | None = None
        self.end: AttemptEnd | None = None
        self.left: Left | None = None


class NodeThread(NodeTeam):
    """A node of a job in somebody else's process; its team, whose workers that process starts and ends.

    Args:
        run_id: The id of the job.
        warn: Called with a line that the user should see. By any thread; it must not wait.
        machines: What the node is told of its job. It may be changed until the node has entered, as the next four.
        nproc: How many workers it has.
        role: What they are called.
        policy: When a failure is followed by another generation, while this node leads.
        grace: Seconds that its workers may take to end.

    Attributes:
        owner: What has the workers, a `NodeWorkers` or the like; None: they show no stacks, and go on while the process
            is stopped. It may be changed likewise.
        finish: How it has ended; None: it has not, or by `error`.
        error: What it has ended by, before it could take part; None: it has not.
        part: The part that `next_part` has returned last; None: there is none.
        away: Why the store does not answer; "": it does, or was not asked yet.
        is_spare: Whether the generation that began last runs, or ran, without this node.
    """

    def __init__(
        self,
        run_id: str,
        warn: Callable[[str], None],
        machines: Machines,
        nproc: int,
        role: str,
        policy: RestartPolicy,
        grace: float,
    ) -> None:
        self._run_id, self._warn = run_id, warn
        self.machines, self.nproc, self.role, self.policy, self.grace = machines, nproc, role, policy, grace
        self.owner: Any = None
        self._pid = 0  # of the process that has entered
        self._lock = threading.Lock()  # of the next two
        self._run: JobRun | None = None
        self._wishes: list[Callable[[JobRun], None]] = []  # of before there was a run
        self._thread: threading.Thread | None = None
        self._gone = Latch()
        self._over = Latch()  # opened when nothing more is to be waited for
        self._news = Latch()  # opened, and replaced by another one, when anything has changed
        self._calls: list[Callable[[], object]] = []  # at each end of a generation
        self._called: tuple[Part | None, bool] = None, False  # for which part, and whether for the end of all
        self._asks_end = self._is_leaving = self._is_told_of_end = False
        self._latest: Part | None = None  # the part in the latest generation that this node takes part in
        self._whys: set[str] = set()  # why the store does not answer, as was said since it did last
        self._wake: Callable[[], None] = lambda: None
        self._entrance: Entrance
        self._me: Node
        self._port: ReservedPort
        self.part: Part | None = None
        self.away = ""
        self.is_spare = False
        self.finish: Finish | None = None
        self.error: Exception | None = None

    # --- any thread

    @property
    def has_entered(self) -> bool:
        """Whether it has begun to enter the job."""
        return self._pid != 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has been entered by the process that this one is a fork of."""
        return self._pid not in (0, os.getpid())

    @property
    def has_ended(self) -> bool:
        """Whether it has no part in the job any more."""
        return self._is_leaving or self.finish is not None or self.error is not None

    @property
    def is_closing(self) -> bool:
        """Whether no other generation comes, as far as is known here."""
        return self.has_ended or self._asks_end or self._is_told_of_end

    def master(self, job: Job) -> tuple[str, int]:
        """Return where rank 0 of the workers of a generation listens. After `next_part` has returned it."""
        return self._entrance.master(job)

    def why(self, verdict: Verdict | None) -> str:
        """Return what the last generation has ended with, by a verdict, in one line; "": nothing is said."""
        return "" if verdict is None or verdict.stop is None else in_words(verdict.stop)

    def enter(self) -> None:
        """Begin to enter the job; a further call does nothing. Raises RuntimeError: no thread can be started."""
        with self._lock, interrupts.deferred():
            if self._pid:
                return
            thread = unpatched.thread(target=self._carry, name="phalanx-node")
            self._pid = os.getpid()
            try:
                thread.start()
            except BaseException:
                self._pid = 0
                raise
            self._thread = thread

    def next_part(self) -> Part | None:
        """Wait for the next generation in which this node takes part; one at a time. None: it has ended.

        What it has taken before is over: its workers are gone.
        """
        self.enter()
        before = self.part
        if before is not None and before.end is None:
            is_over = bool(before.ended) or self._asks_end
            self._conclude(
                before, before.failure or (AttemptEnd("stopped") if is_over else AttemptEnd("failed", error=GONE))
            )
        while True:
            news = self._news
            part = self._latest
            if self.has_ended:
                return None
            if part is not None and part.end is None and part is not before:
                if not part.ended:
                    self.part = part
                    return part
                self._conclude(part, AttemptEnd("stopped"))  # it had ended before anybody asked
            news.wait()

    def tell_failure(self, error: str, rank: int | None, exitcode: int | None, *, is_hang: bool = False) -> None:
        """Say that a worker has failed: the other nodes hear of it at once, in the words that are told first.

        The part ends with those that are told last. Nothing happens where no worker can run. ``is_hang``: a timer has
        found it.
        """
        part = self.part
        if part is None or part.end is not None or (part.failure is None and part.ended):
            return
        is_first = part.failure is None
        part.failure = AttemptEnd("failed", rank, exitcode, one_line(error))
        if is_first:
            generation = part.job.generation
            stop = stop_of(self._me, generation, error, rank, exitcode, is_hang=is_hang)
            self._wish(lambda run: run.worker_failed(generation, stop))

    def tell_left(self, left: Left) -> None:
        """Say what the workers have left, before their end is told. What is told last counts."""
        if self.part is not None:
            self.part.left = left

    def tell_success(self, *, wait: bool) -> bool | None:
        """Say that all workers here have succeeded, and wait for those of other nodes, if that is wanted.

        Returns whether the job has succeeded; or this node has waited for the others for long enough. False: there is
        to be another generation, or the job has ended in another way. None: it is not known yet.
        """
        part = self.part
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
        """Have ``call`` called when the generation that runs here is ended; at once, if it has been.

        Once for each, and once more if all is over. Exceptions of it are dropped.
        """
        self._calls.append(call)
        if self.part is not None and self.part.ended:
            self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        with suppress(Exception):  # the caller's: the node goes on
            call()

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
        part = self._latest
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
        """Say how the workers of a part have ended: none of them is left. The first word counts."""
        if part.end is None:
            part.end = end
            self._wake()

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
            if self._latest is not None:
                self._latest.ended.open()
            self._gone.open()
            self._see()

    def _carry_on(self, held: ExitStack) -> None:
        machines = self.machines
        self._entrance = entrance = come(machines, self._run_id, self._warn, self._over)
        if entrance.end is not None:
            held.callback(entrance.end, CLOSE)
        self._port = held.enter_context(master_port.reserve())
        host = os.uname().nodename
        self._me = Node(
            agent_id(host), host, entrance.address, self.nproc, self.role, self._port.number,
            order=machines.node_rank, min_nodes=machines.min_nodes, max_nodes=machines.max_nodes,
            policy="" if self.policy.max_restarts >= ENDLESS else self.policy.describe(),
        )  # fmt: skip
        node = Participant(
            self._me, machines.rules(self.policy, self.grace, 0.0), barrier=machines.barrier, hosts=entrance.hosts,
            away_timeout=machines.away_timeout, chance=random.random,
        )  # fmt: skip
        run = JobRun(node, entrance.store, self, away_timeout=machines.away_timeout)
        runner = held.enter_context(Runner(self, run, signals=False))
        with self._lock:
            self._run = run
            wishes, self._wishes = self._wishes, []
        for wish in wishes:
            wish(run)
        runner.carry()
        self.finish = run.finish
        self._see()

    def _see(self) -> None:
        """Tell all who wait that something has changed."""
        if self.finish is not None and self._latest is not None:
            self._latest.ended.open()
        ended = self._latest, self.finish is not None
        if self._latest is not None and self._latest.ended and ended != self._called:
            self._called = ended
            for call in list(self._calls):
                self._call(call)
        self._change()

    def come(self, run: JobRun) -> None:
        """See `NodeTeam`."""
        self._ask("come", run, self.machines.join_timeout)

    def assign(self, job: Job, rank: int) -> None:
        """See `NodeTeam`."""
        if wrong := unreachable(job):
            self._warn(wrong)
        self._latest = Part(job, rank)
        self.is_spare = False

    def start(self, attempt: int, wake: Callable[[], None]) -> None:  # noqa: ARG002 - `assign` was told
        """See `Team`. The owner of the workers starts them."""
        self._wake = wake
        self._see()

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        return None if self._latest is None else self._latest.end

    def stop(self, death_signal: int | None, grace: float) -> None:  # noqa: ARG002 - the owner of the workers knows theirs
        """See `Team`."""
        self._end_part()

    def expect(self, seconds: float) -> None:
        """See `NodeTeam`."""
        self._ask("expect", seconds)

    def answer(self, what: str, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:
        """See `NodeTeam`."""
        if self.owner is None:
            super().answer(what, generation, nodes, then)
        self._ask("answer", what, generation, nodes, then)

    def say(self, text: str) -> None:
        """See `Team`. Nothing is shown: the console is the owner's."""

    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """See `NodeTeam`."""
        part = self._latest
        assert part is not None
        left = part.left or Left(RunProcsResult())
        self._me, stop, told = account(self._me, part.job, part.rank, end, end.uptime, self._port.renew(), left)
        is_said = part.left is not None or end.failed
        return self._me, stop, told if is_said else b""

    def heard(self, what: Job | Stop) -> None:
        """See `NodeTeam`."""
        part, job = self._latest, what if isinstance(what, Job) else None
        if isinstance(what, Stop):
            self._is_told_of_end = self._is_told_of_end or what.kind == "signal"
            if part is not None and what.generation == part.job.generation:
                part.why = in_words(what)
            if what.kind == "hang" and what.node != self._me.id:
                self._ask("hangs_elsewhere")  # before their end, which follows
        elif job is not None:
            self._is_told_of_end = self._is_told_of_end or job.phase == "over"
            if job.phase == "running":
                self.is_spare = job.rank_of(self._me.id) < 0
        # A later generation, too: this one's end was not seen.
        if part is not None and (what.generation == part.job.generation if job is None else self._is_past(part, job)):
            self._end_part()

    def miss(self, missing: Missing) -> None:
        """See `NodeTeam`."""
        self._warn(missing.line)

    def store_is(self, why: str | None) -> None:
        """See `NodeTeam`."""
        self.away = why or ""
        if why is None:
            self._whys.clear()
        elif why not in self._whys:
            self._whys.add(why)
            self._warn(f"{self.machines.where} does not answer ({one_line(why)}); it is tried again")

    def _is_past(self, part: Part, job: Job) -> bool:
        return job.phase == "over" or job.generation > part.job.generation

    def _ask(self, name: str, *args: object) -> None:
        """Call a method of the owner. It waits for nothing."""
        with suppress(Exception):  # the owner's, or it has no such method: the node goes on
            getattr(self.owner, name)(*args)

    def _end_part(self) -> None:
        if self._latest is not None:
            self._latest.ended.open()
        self._see()
