"""A simulated job: nodes that decide as real ones do, a store like an etcd, and what goes wrong, all by a seed.

`python -m tests.rendezvous.simulator 0 1000` runs the seeds from 0 to 999, and names the rules that were broken;
`python -m tests.rendezvous.simulator 17` tells the story of one. The same seed is always the same story.

Time is simulated. What goes wrong: nodes crash, are stopped and go on, are cut off, return as new ones; all are killed,
and others come; their leases run out while they live; the store is away, or starts again, which one that a node hosts
does empty, and with earlier revisions; answers are lost though a write was made; what a watch tells comes late, twice,
or out of order; workers fail, several at once, succeed, and take long to end; somebody presses Ctrl-C, and once more,
takes a node out, asks for another generation or where the ranks are, or has something done on all nodes; a node finds
that it can start no worker; or is killed while it gives its lease back. Each node's end is concluded as `phalanx run`
does: its exit code is checked.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from phalanx._rendezvous import conclusion, evidence, life, questions, records
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.records import Job, Refusal, Stop, first_rank, replace
from phalanx._rendezvous.settings import Rules
from phalanx._store.hub.keys import JOB_LEASE, Change, Keys
from phalanx._store.store import OWN, Away, Back, Changed, Done, Entry, Fetched, LeaseLost, Put, Snapshot
from phalanx.agent import RestartPolicy
from phalanx.multiprocessing import ProcessFailure, RunProcsResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._store.store import StoreEvent, Transaction

TTL = 5.0
"""Seconds of a lease."""

GRACE = 3.0
"""Seconds that workers take to end, at most."""

CALM = 60.0
"""Seconds after which nothing goes wrong any more."""

END = 9000.0
"""Seconds after which every node has left, or is broken."""

AGAIN = 4000.0
"""Seconds after which nodes come for another job of the same id, where what the first was is kept."""

TOLD = 60.0
"""Seconds after which somebody who asks all nodes something has an answer, though his node is stopped meanwhile."""

HOSTED, KEEPING = 0.25, 0.2
"""The chances that a node hosts the store; and that what the job was is kept, where none does."""

MIXED = 0.25
"""The chance that nodes of different kinds come."""

SOON = 0.4
"""Seconds that a node takes to read what the workers have left, if nothing goes wrong: less than it waits for that."""

MOST_REQUESTS = 60
"""Of one node within a second."""


class BrokenError(AssertionError):
    """A rule was broken."""


class Setting(NamedTuple):
    """A job: how many nodes there are, and what it holds to."""

    least: int
    most: int
    nodes: int
    restarts: int = 3
    faults: int = 0
    failing: float = 0.0
    """The chance that workers of a node fail."""
    ordered: bool = False
    """Whether nodes are given their ranks."""
    exclude_after: int = 0
    lasts: float = 8.0
    """Seconds for which workers run, at most."""
    barrier: float = 500.0
    """Seconds for which a node that has succeeded waits for the others."""
    hosted: bool = False
    """Whether the first node hosts the store, which is stopped with it, and gone with it."""
    keep: bool = False
    """Whether what the job was is kept; there is another one of its id then."""
    mixed: float = 0.0
    """The chance that a node has another role, was told another number of nodes or restarts, or runs something else."""
    questions: int = 0
    """How many times somebody asks on a node where all ranks are, or to have something done."""


class Simulation:
    """One job, from the first node's coming to the last one's leaving; two, where what the first was is kept."""

    def __init__(self, setting: Setting, seed: int, tell: Callable[[str], None] = lambda _: None) -> None:
        self.setting = setting
        self.random = random.Random(seed)  # noqa: S311 - a story is the same each time
        self.now = 0.0
        self._tell = tell
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self.store = SimulatedStore(self)
        self.nodes: list[SimulatedNode] = []
        self.formed: dict[int, Job] = {}
        self.latest = 0.0  # when the last generation was formed
        self.stops: dict[int, bytes] = {}
        self.all_formed: list[Job] = []  # of earlier jobs of the same id, too
        self.all_stops: set[bytes] = set()
        self.last = b""  # the job that was over last, of those that are to be kept
        self.succeeded: set[tuple[str, int]] = set()  # of which nodes the store has held that, in which generations
        self.failed: dict[int, set[int]] = {}  # the exit codes with which workers have failed, by generation
        self.made = math.inf  # when the job was
        self.is_asked = False  # whether somebody has pressed Ctrl-C

    def tell(self, text: str) -> None:
        """Tell what happens."""
        self._tell(f"{self.now:9.3f} {text}")

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Have something happen in so many seconds."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, action))

    def chance(self, probability: float) -> bool:
        """Whether something happens of that probability."""
        return self.random.random() < probability

    def add(self, order: int = -1, *, hosts: bool = False) -> SimulatedNode:
        """Make a node, which comes at once. ``hosts``: with a store of its own, in the place of one that is gone."""
        number = len(self.nodes)
        setting = self.setting
        me = records.Node(
            f"n{number}", f"h{number}", f"10.0.0.{number}", 1 + number % 3, port=1000 + number, order=order,
            min_nodes=setting.least, max_nodes=setting.most, program="train.py" if setting.mixed else "",
        )  # fmt: skip
        if setting.mixed:
            me = replace(
                me, role="reader" if self.chance(setting.mixed) else me.role,
                max_nodes=setting.most + self.chance(setting.mixed / 3),
                program=self.random.choice([f"{me.id}.py", ""]) if self.chance(setting.mixed) else me.program,
                args=me.id if self.chance(setting.mixed / 3) else "all",
                policy=f"--max-restarts {setting.restarts + self.chance(setting.mixed / 3)}",
            )  # fmt: skip
            me = me if me.program else replace(me, args="")
        node = SimulatedNode(self, me)
        self.nodes.append(node)
        if hosts:
            node.hosts = True
            node.node = node.participant(hosts=True)
            self.store.restart()
        node.begin()
        return node

    def run(self) -> Simulation:
        """Carry on until nothing is left to happen. Raises BrokenError."""
        setting, calm = self.setting, CALM if self.setting.faults else 0.0
        for number in range(setting.nodes):
            order = number if setting.ordered else -1
            self.at(self.random.uniform(0, 12 if setting.mixed else 3), partial(self.add, order))
            if setting.keep:
                self.at(AGAIN + self.random.uniform(0, 3), partial(self.add, order))
        for _ in range(setting.faults):
            self.at(self.random.uniform(0, calm), self._go_wrong)
        self.at(calm, self._calm_down)
        for _ in range(setting.questions):
            self.at(self.random.uniform(0, calm + setting.lasts), self._ask)
        while self._queue and self.now < END:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        for node in self.nodes:
            if node.is_alive and node.finish is None:
                raise BrokenError(f"{node.name} has not left: {node.node.state} of generation {node.node.generation}")
        # Else a job may have been followed by another one, of those that came late, or some have left before its end.
        is_plain = not setting.faults and not setting.mixed and setting.barrier > setting.lasts
        if is_plain:
            for first in range(0, len(self.nodes), setting.nodes):
                self._see_ends(self.nodes[first : first + setting.nodes])
        self._see_kept(is_plain=is_plain)
        return self

    def _see_ends(self, nodes: list[SimulatedNode]) -> None:
        """Check that the nodes of a job agree on how it has ended."""
        took_part = [node for node in nodes if node.node.generation >= 0 or not self.setting.hosted]
        ends = {node.finish.state for node in took_part if node.finish is not None} - {"refused"}
        if len(ends) > 1:
            raise BrokenError(f"the nodes disagree on how the job has ended: {ends}")
        if ends == {"timeout"}:
            raise BrokenError("nobody has decided")

    def _see_kept(self, *, is_plain: bool) -> None:
        """Check that what is left in the store is the last job that was to be kept; of a plain story, all of it."""
        left = {entry.key: entry.value for entry in self.store.below("")[1]}
        state, prefix = left.pop(f"{records.KEPT}{records.STATE}", b""), f"{records.KEPT}{records.EVIDENCE}"
        if state not in (self.last, b"") or (is_plain and state != self.last):
            raise BrokenError(f"what is kept is {state!r}, and the last job was {self.last!r}")
        job = records.read(Job, Entry("", self.last, 1, 1)) if self.last else Job(0, "forming", 1, 1)
        due = {f"{prefix}{job.with_evidence}/{name}" for name in job.ids} if job.with_evidence >= 0 else set()
        found = {key for key in left if key.startswith(records.KEPT)}
        # Who had not begun when the generation was ended has no evidence; who is left out keeps none.
        stay = [node for node in self.nodes if node.finish is None or node.finish.state != "refused"]
        began = {f"{prefix}{job.with_evidence}/{node.name}" for node in stay if node.ran == job.with_evidence}
        if not found <= due or (is_plain and not due & began <= found):
            raise BrokenError(f"the evidence of {found} is kept, and {due} was to be")

    def _go_wrong(self) -> None:
        live = [node for node in self.nodes if node.is_alive and node.finish is None]
        if not live:
            return
        node, span = self.random.choice(live), self.random.choice([0.5, 3.0, 8.0, 20.0])
        troubles: dict[str, Callable[[], object]] = {
            "crash": node.crash,
            "return": lambda: (node.crash(), self.at(span, lambda: self.add(node.order, hosts=bool(node.hosts)))),  # type: ignore[func-returns-value] # a tuple of both
            "killed": lambda: self._kill_all(live, span),
            "stop": lambda: node.pause(span),
            "cut": lambda: node.cut(span),
            "store": lambda: self.store.go_away(span),
            "restart": lambda: self.store.go_away(0.2),
            "interrupt": node.interrupt,
            "leave": node.go,
            "unfit": lambda: node.do(node.node.cannot_start("no module", self.now)),
            "expire": lambda: self.store.expire(node),
            "fail": lambda: [each.fail() for each in live if each is node or self.chance(0.5)],  # type: ignore[func-returns-value] # several may
        }
        what = self.random.choices(list(troubles), weights=[1, 1, 0.2, 2, 2, 1, 1, 0.3, 0.3, 0.5, 1, 1])[0]
        self.tell(f"{node.name}: {what} ({span} s)")
        troubles[what]()

    def _kill_all(self, live: list[SimulatedNode], span: float) -> None:
        """Kill all nodes, and have others come in their places."""
        for node in live:
            node.crash()
            self.at(span + self.random.uniform(0, 2), partial(self.add, node.order, hosts=bool(node.hosts)))

    def _ask(self) -> None:
        live = [node for node in self.nodes if node.is_alive and node.finish is None]
        if live:
            what = self.random.choice([questions.STACKS, questions.STATUS, "do", "restart"])
            for _ in range(self.random.choice([1, 1, 1, 4, 20])):
                node = self.random.choice(live)
                node.restart() if what == "restart" else node.question(what)

    def _calm_down(self) -> None:
        """End what has gone wrong; and see that the job has nodes enough."""
        self.tell("calm")
        for node in self.nodes:
            node.heal()

    # --- what must hold

    def see_write(self, key: str, value: bytes) -> None:
        """Check what is written."""
        self._see_succeeded(key, value)
        if key.startswith(records.STOP):
            self._see_stop(int(key.removeprefix(records.STOP)), value)
        if key.startswith(records.REFUSED):
            self._see_refused(key.removeprefix(records.REFUSED), records.read(Refusal, Entry(key, value, 1, 1)).why)
        if key != records.STATE:
            return
        job = records.read(Job, Entry(key, value, 1, 1))
        self.made = self.now if self.made == math.inf else self.made
        self.store.is_fresh = False
        before = max(self.formed, default=-1)
        if job.generation < before or (job.phase == "forming" and job.generation == before):
            raise BrokenError(f"the job goes back to generation {job.generation}, {job.phase}, from {before}")
        if job.phase == "running" and self.formed.get(job.generation, job).members != job.members:
            raise BrokenError(f"generation {job.generation} is formed twice")
        if job.phase == "running" and job.generation not in self.formed:
            if job.generation <= before:
                raise BrokenError(f"generation {job.generation} is formed after {before}")
            if before >= 0 and before not in self.stops:
                raise BrokenError(f"generation {job.generation} is formed, and {before} has not been ended")
            self._see_formed(job)
        self._see_restarts(job)
        if job.is_kept:
            self.last = value

    def _see_succeeded(self, key: str, value: bytes) -> None:
        node = records.read(records.Node, Entry(key, value, 1, 1)) if key.startswith(records.NODES) else None
        if node is not None and node.state == "done":
            self.succeeded.add((node.id, node.generation))
        if node is not None and node.generation >= 0 and self.store.is_fresh:
            raise BrokenError(f"{node.id} brings generation {node.generation} of a store that is gone")

    def _see_stop(self, generation: int, value: bytes) -> None:
        self.all_stops.add(value)
        if self.stops.setdefault(generation, value) != value:
            raise BrokenError(f"why generation {generation} ends was written twice")
        stop = records.read(Stop, Entry("", value, 1, 1))
        if stop.kind == "lost" and self.store.entry(f"{records.NODES}{stop.node}"):
            raise BrokenError(f"{stop.node} is called lost, and is there")
        if stop.kind == "lost" and (stop.node, generation) in self.succeeded:
            raise BrokenError(f"{stop.node} is called lost, and its workers have succeeded")

    def _see_refused(self, name: str, why: str) -> None:
        job = self.store.job()
        if job is None:
            return
        if job.phase == "running" and name in job.ids:
            raise BrokenError(f"{name} is refused, and takes part in generation {job.generation}")
        said = {program for _, program in job.programs}
        said |= {node.program for node in self.nodes if node.program and node.most == job.max_nodes}
        if " runs " in why and not any(f" runs {program}{end}" in why for program in said for end in (",", " with")):
            raise BrokenError(f"{name} is refused for what a node runs that takes no part: {why}")

    def _see_restarts(self, job: Job) -> None:
        failed = sum(end.failed for end in job.ends)
        if failed > self.setting.restarts + 1 or len(job.restarts) > self.setting.restarts:
            raise BrokenError(
                f"{failed} failures, {len(job.restarts)} restarts, and {self.setting.restarts} are allowed"
            )
        if len(job.restarts) > failed:
            raise BrokenError(f"{len(job.restarts)} restarts are counted, and there were {failed} failures")

    def forget(self) -> None:
        """Forget a job of which nothing is left."""
        self.formed, self.stops, self.made = {}, {}, math.inf
        self.succeeded.clear()
        self.failed.clear()

    def see_finish(self, node: SimulatedNode, finish: life.Finish, end: conclusion.Conclusion) -> None:
        """Check how a node concludes: that its exit code tells the truth."""
        job, verdict = finish.job, None if finish.job is None else finish.job.verdict
        if end.code == 0 and (verdict is None or verdict.state != "succeeded"):
            has_waited = self.now - node.succeeded_at >= self.setting.barrier - 0.01
            if verdict is not None or finish.state != "succeeded" or not (has_waited or node.left):
                raise BrokenError(f"{node.name} exits with 0, and the job has not succeeded: {finish}")
        if finish.state in ("unknown", "left", "timeout", "unreachable") and end.code == 0:
            raise BrokenError(f"{node.name} exits with 0: {finish.state}")
        if finish.state == "stopped" and not self.is_asked:
            raise BrokenError(f"{node.name} says that the job was stopped, and nobody has stopped it")
        if job is None or verdict is None:
            return
        codes = self.failed.get(job.with_evidence, set())
        if finish.state == "failed" and verdict.stop and verdict.stop.exitcode in codes and end.code not in codes:
            raise BrokenError(f"{node.name} exits with {end.code}, and workers have failed with {codes}")
        key, span = f"{records.EVIDENCE}{job.with_evidence}/", self.now - node.since
        is_there = node.is_connected and not self.store.is_away and job.with_evidence >= 0
        is_there = is_there and any(records.read(Job, each) == job for each in self.store.below(records.STATE)[1])
        others = [each.key for each in self.store.below(key)[1] if each.key != f"{key}{node.name}"]
        if finish.state == "failed" and is_there and not finish.evidence and others and span < SOON:
            raise BrokenError(f"{node.name} leaves without what the workers have left")
        is_lost = verdict.stop is not None and verdict.stop.kind == "lost" and not self.store.has_any(verdict.stop.node)
        if node.hosts and is_lost and span < TTL - 0.01 and not node.asked:
            raise BrokenError(f"{node.name} ends the store {span:.1f} s after the end, and the lost one may come back")

    def _see_formed(self, job: Job) -> None:
        ids = [member.id for member in job.members]
        self._see_haunted(job)
        if len(set(ids)) != len(ids):
            raise BrokenError(f"generation {job.generation} has a node twice: {ids}")
        if not self.setting.least <= len(ids) <= self.setting.most + bool(self.setting.mixed):
            raise BrokenError(f"generation {job.generation} has {len(ids)} nodes")
        run = {(member.role, node.program) for member, node in self._members(job) if node.program}
        if len(run) > len({role for role, _ in run}):
            raise BrokenError(f"workers of one role run several programs: {run}")
        told = {node.policy for _, node in self._members(job)}
        if told != {job.policy}:
            raise BrokenError(f"a job with {job.policy!r} has nodes that were told {told}")
        # Where things go wrong, what a node has said of that may be late, or lost.
        for _, node in [] if self.setting.faults else self._members(job):
            if node.workers is not None:
                raise BrokenError(f"generation {job.generation} has {node.name}, whose workers of before are there")
        last = self.formed.get(max(self.formed, default=-1))
        names = {node.name: node for node in self.nodes}
        for member in [] if last is None else last.members:
            node = names[member.id]
            is_there = node.has_lease and node.leased < node.started
            if node.workers is not None and is_there and not node.is_late:
                raise BrokenError(f"generation {job.generation} is formed, and the workers of {node.name} are there")
        first = names[ids[0]]
        if job.address != first.address:
            raise BrokenError(f"generation {job.generation} meets at {job.address}, and rank 0 is on {first.address}")
        self.formed[job.generation], self.latest = job, self.now
        self.all_formed.append(job)

    def _see_haunted(self, job: Job) -> None:
        """Check that no job goes on of which nobody was left when those came that would take part."""
        last = self.formed.get(max(self.formed, default=-1))
        names = {node.name: node for node in self.nodes}
        if last is None or min(names[name].came for name in job.ids) < self.made:
            return
        died = max(names[name].died for name in last.ids)
        if died < self.latest:  # it was formed of nodes whose leases outlived them, by one that waits
            return
        came = min(node.came for node in self.nodes if node.came > -1 and (node.is_alive or node.died > died))
        if came >= self.made and died < min(came, *(names[name].came for name in job.ids)):  # else it made the job
            raise BrokenError(f"generation {job.generation} follows a job of which nobody is left")

    def _members(self, job: Job) -> list[tuple[records.Member, SimulatedNode]]:
        names = {node.name: node for node in self.nodes}
        return [(member, names[member.id]) for member in job.members]

    def see_start(self, node: SimulatedNode, job: Job, rank: int) -> None:
        """Check that a node may start workers."""
        if node.workers is not None:
            raise BrokenError(f"{node.name} starts generation {job.generation}, and has workers of {node.workers}")
        if not any(
            (job.members, job.address, job.port) == (one.members, one.address, one.port)
            for one in self.all_formed
            if one.generation == job.generation
        ):
            raise BrokenError(f"{node.name} starts another generation {job.generation} than was formed")
        now = self.store.job()  # another one, if the node was stopped meanwhile
        node.part_of = 0 if now is None or now.rank_of(node.name) != rank else self.store.job_made()
        if job.members[rank].id != node.name:
            raise BrokenError(f"{node.name} takes rank {rank} of {job.members[rank].id}")

    def see_end(self, node: SimulatedNode, stop: Stop | None) -> None:
        """Check that a node has to end its workers."""
        if node.asked or (stop is None and self.setting.hosted):  # the latter: the store is away for too long
            return
        job = self.store.job()
        if node.part_of != self.store.job_made():  # that one is over, and this is another
            return
        if stop is None and job is not None and job.generation <= node.node.generation and job.phase != "over":
            raise BrokenError(f"{node.name} ends its workers, and the job has not gone on without it")
        if stop is not None and records.write(stop) not in self.all_stops:
            raise BrokenError(f"{node.name} has heard of another end of generation {stop.generation} than was written")


class SimulatedStore:
    """The keys of a store, as an agent has them; where none hosts it, they are those of an etcd."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._keys = Keys(1)
        self.is_away = self._is_gone = False
        self.name = 0  # which one it is
        self.is_fresh = False  # whether it was started again, and no job was made since

    def entry(self, key: str) -> Entry | None:
        """A key, if it is there."""
        return next((entry for entry in self._keys.below(key) if entry.key == key), None)

    def job(self) -> Job | None:
        """The job, if it is there."""
        entry = self.entry(records.STATE)
        return None if entry is None else records.read(Job, entry)

    def job_made(self) -> int:
        """The revision at which the job was made; 0: there is none."""
        entry = self.entry(records.STATE)
        return 0 if entry is None else entry.created

    def below(self, prefix: str) -> tuple[int, tuple[Entry, ...]]:
        """The revision, and the keys below a prefix."""
        return self._keys.revision, self._keys.below(prefix)

    def make(self, node: SimulatedNode, transaction: Transaction) -> tuple[bool, int]:
        """Make a transaction, if its conditions hold."""
        made, change = self._keys.make(node.name.encode(), transaction)
        self._tell(change)
        return made, self._keys.revision

    def _tell(self, change: Change | None) -> None:
        if change is None:
            return
        for entry in change.written:
            self._simulation.see_write(entry.key, entry.value)
        if records.STATE in change.deleted:  # the job is over, and gone: what comes now is another one
            self._simulation.forget()
        for each in self._simulation.nodes:
            each.see_changed(change)

    def expire(self, node: SimulatedNode) -> None:
        """End a node's lease."""
        self._simulation.tell(f"{node.name}: its lease has run out")
        self._tell(self._keys.end_lease(node.name.encode()))
        node.has_lease = False

    def has_any(self, node: str) -> bool:
        """Whether the entry of a node is there, or that of its success."""
        return any(self.entry(key) for key in (f"{records.NODES}{node}", records.success_of(node)))

    def restart(self) -> None:
        """Be another one: without keys, and with earlier revisions, as of a clock that was set back."""
        revision = self._keys.revision
        self._keys = Keys(self._simulation.random.choice([1, revision // 2, revision + 100]))
        self.name += 1
        self.is_fresh = True
        self.is_away = self._is_gone = False
        self._simulation.forget()
        for node in self._simulation.nodes:
            node.has_lease = False
            node.find_store()

    def end_job(self) -> None:
        """Delete what goes with the job's lease."""
        self._tell(self._keys.end_lease(JOB_LEASE))

    def go_away(self, span: float) -> None:
        """Answer nobody for a while, or for ever (inf). Leases begin anew then."""
        if span == math.inf:
            self._is_gone = True
        if self.is_away:
            return
        self.is_away = True
        for node in self._simulation.nodes:
            node.lose_store()

        def back() -> None:
            if self._is_gone:
                return
            self.is_away = False
            for node in self._simulation.nodes:
                node.heard = self._simulation.now
                node.find_store()

        if span < math.inf:
            self._simulation.at(span, back)


class SimulatedNode:
    """A node: what it decides is a real `Participant`'s; its workers, its store and its troubles are simulated."""

    def __init__(self, simulation: Simulation, me: records.Node) -> None:
        self._simulation = simulation
        self._me = me
        self.name, self.address, self.order, self.program = me.id, me.address, me.order, me.program
        self.most, self.policy = me.max_nodes, me.policy
        setting = simulation.setting
        rules = Rules(
            RestartPolicy(setting.restarts), join_timeout=120.0, last_call=5.0, rejoin_delay=5.0, end_timeout=30.0,
            exclude_after=setting.exclude_after, lost_after=0.0 if setting.hosted else 0.5, return_timeout=TTL + 5.0,
            keep=setting.keep, lease=TTL,
        )  # fmt: skip
        self.hosts = me.id == "n0" if setting.hosted else None
        self._rules = rules
        self.node = self.participant(hosts=self.hosts)
        self.came, self.died = simulation.now, math.inf
        self.succeeded_at, self.since, self._state = math.inf, simulation.now, ""
        self.left = False  # whether somebody has taken it out of the job
        self.is_alive, self.is_late, self.asked, self.failed = True, False, False, False
        self.job: Job | None = None  # in whose generation it runs workers, or has
        self.code = 0  # with which a worker has failed
        self.workers: int | None = None  # the generation whose workers are there
        self.ran = -1  # that whose workers were started last
        self.finish: life.Finish | None = None
        self.part_of = 0  # the job in which it has started workers: when that was made
        self.submitted = self.submitted_for_questions = self.questions = 0
        self.done: set[str] = set()  # of what it was asked
        self.leased = self.started = simulation.now  # since when it has its lease, and its workers
        self.has_lease = True
        self.heard = simulation.now  # when the store has heard of it last
        self._is_cut = self._is_stopped = self._is_connected = False
        self._missed: list[Callable[[], object]] = []  # while it was stopped
        self._watches: dict[str, int] = {}
        self._told: list[StoreEvent] = []
        self._recent: list[float] = []

    def participant(self, *, hosts: bool | None) -> Participant:
        """Return what decides."""
        setting = self._simulation.setting
        return Participant(
            self._me, self._rules, barrier=setting.barrier, hosts=hosts,
            away_timeout=20.0 if setting.hosted else math.inf, chance=self._simulation.random.random,
        )  # fmt: skip

    @property
    def is_connected(self) -> bool:
        """Whether it reaches the store."""
        return self._is_connected

    def begin(self) -> None:
        """Come."""
        self._simulation.tell(f"{self.name} comes")
        self.do(self.node.begin(self._simulation.now))
        self.find_store()
        self._keep()

    def _keep(self) -> None:
        """Keep the lease alive, and see it end if it is not."""
        if not (self.is_alive and self.finish is None) and not self.has_lease:
            return
        now = self._simulation.now
        if self._is_connected and self.is_alive and self.finish is None and not self._is_stopped:
            self.heard = now
        elif now - self.heard > TTL and not self._simulation.store.is_away and self.has_lease:
            self._simulation.store.expire(self)
        self._simulation.at(TTL / 3, self._keep)

    # --- the store

    def find_store(self) -> None:
        """Reach the store, after a while."""
        if self._is_connected or self._is_cut or self._simulation.store.is_away or not self.is_alive:
            return
        self._is_connected = True
        delay = self._delay()
        if not self.has_lease:
            self.has_lease, self.leased = True, self._simulation.now
            if self._simulation.setting.hosted:  # it says first that a connection has ended
                self._later(lambda: self._see(Away("closed")), delay)
            self._later(lambda: self._see(LeaseLost()), delay)
        name = str(self._simulation.store.name).encode()
        self._later(lambda: self._see(Back(name)), delay)
        for prefix in self._watches:
            self._snapshot(prefix, delay)

    def lose_store(self) -> None:
        """Reach the store no more; in a while, the node knows."""
        if self._is_connected:
            self._is_connected = False
            self._later(self._miss_store, self._simulation.random.uniform(0, 3))

    def _miss_store(self) -> None:
        if not self._is_connected:
            self._see(Away("cut"))

    def _see(self, event: StoreEvent) -> None:
        self._told.append(event)
        if self._simulation.chance(0.2):  # it hears of several at once
            self._later(self._hear, 0.004)
        else:
            self._hear()

    def _hear(self) -> None:
        told, self._told = self._told, []
        if told and self.is_alive and self.finish is None:
            self.do(self.node.all_told(told, self._simulation.now))

    def _later(self, action: Callable[[], object], seconds: float | None = None) -> None:
        """Have something happen here, once it has come so far; if the node is stopped, when it goes on."""

        def arrive() -> None:
            if self._is_stopped:
                self._missed.append(action)
            else:
                action()

        self._simulation.at(self._delay() if seconds is None else seconds, arrive)

    def _delay(self) -> float:
        chance = self._simulation.random
        return chance.uniform(0.3, 1.5) if chance.random() < 0.02 else chance.uniform(0.001, 0.01)

    def _snapshot(self, prefix: str, after: float = 0.0) -> None:
        revision, entries = self._simulation.store.below(prefix)
        self._later(lambda: self._see(Snapshot(prefix, revision, entries)), after + self._delay())

    def see_changed(self, change: Change) -> None:
        """Be told what was written, if it is watched: now and then late, or twice."""
        for prefix in self._watches if self._is_connected else ():
            if part := change.below(prefix):
                for _ in range(2 if self._simulation.chance(0.02) else 1):
                    self._later(partial(self._see, Changed(prefix, *part)))

    def _submit(self, effect: life.Submit) -> None:
        simulation = self._simulation
        self.submitted += 1
        keys = [write.key for write in effect.transaction.writes]
        self.submitted_for_questions += any(key.startswith((records.QUESTION, records.ANSWERS)) for key in keys)
        self._recent = [moment for moment in self._recent if moment > simulation.now - 1] + [simulation.now]
        if len(self._recent) > MOST_REQUESTS:
            raise BrokenError(f"{self.name} asks the store for {len(self._recent)} things within a second")

        name = simulation.store.name

        def arrive() -> None:
            is_here = self._is_connected and self.is_alive and name == simulation.store.name  # the store that was asked
            if not is_here or self.finish is not None or simulation.store.is_away:
                self._later(lambda: self._see(Done(effect.ticket, None, 0)))
                return
            leases = {write.lease for write in effect.transaction.writes if isinstance(write, Put)}
            if not self.has_lease and OWN in leases:  # etcd refuses a lease that is not there
                self.has_lease = True
                self.heard = self.leased = simulation.now
                self._later(lambda: self._see(LeaseLost()))
                self._later(lambda: self._see(Done(effect.ticket, None, 0)))
                return
            made, revision = simulation.store.make(self, effect.transaction)
            is_lost = simulation.setting.faults and simulation.chance(0.01)
            self._later(lambda: self._see(Done(effect.ticket, None if is_lost else made, 0 if is_lost else revision)))

        is_late = simulation.setting.faults and simulation.chance(0.03)
        simulation.at(simulation.random.uniform(1, 20) if is_late else self._delay(), arrive)

    def _fetch(self, effect: life.Fetch) -> None:
        def arrive() -> None:
            away = simulation.store.is_away or not self._is_connected
            entries = None if away else simulation.store.below(effect.prefix)[1]
            self._later(lambda: self._see(Fetched(effect.ticket, entries)))

        simulation = self._simulation
        simulation.at(self._delay(), arrive)

    # --- what the node asks for

    def do(self, due: list[life.Effect]) -> None:
        """Carry out what the node has decided."""
        for effect in due:
            if isinstance(effect, life.Start):
                self._start(effect.job, effect.rank)
            elif isinstance(effect, life.End):
                self._simulation.see_end(self, effect.stop)
                self._end()
            elif isinstance(effect, life.Finish):
                self._leave(effect)
            else:
                self._ask(effect)
        if self.node.state != self._state:
            self._state, self.since = self.node.state, self._simulation.now
            if self._state == "LEAVING" and self._simulation.setting.faults and self._simulation.chance(0.05):
                self._later(self.interrupt, self._simulation.random.uniform(0, 0.01))
        wake = self.node.wake
        if wake < math.inf and self.finish is None:
            self._later(self._tick, max(0.0, wake - self._simulation.now))

    def _ask(self, effect: life.Effect) -> None:
        """Ask the store for something."""
        if isinstance(effect, life.Submit):
            self._submit(effect)
        elif isinstance(effect, life.Fetch):
            self._fetch(effect)
        elif isinstance(effect, life.Watch):
            self._watches[effect.prefix] = 0
            if self._is_connected:
                self._snapshot(effect.prefix)
        elif isinstance(effect, life.Unwatch):
            self._watches.pop(effect.prefix, None)
        elif isinstance(effect, life.Answer):
            self._answer(effect)
        elif isinstance(effect, life.Answered):
            effect.tell(effect.found)

    def _answer(self, asked: life.Answer) -> None:
        """Do what is asked, once; and answer in a while."""
        if asked.what.startswith("do "):
            if asked.what in self.done:
                raise BrokenError(f"{self.name} does once more what it has done: {asked.what}")
            self.done.add(asked.what)
            self._simulation.tell(f"{self.name}: {asked.what}")
        span = self._simulation.random.uniform(0, 2)
        self._later(partial(self._has_answered, asked, f"{self.name} {asked.what}".encode()), span)

    def _has_answered(self, asked: life.Answer, data: bytes) -> None:
        if self.is_alive and self.finish is None:
            self.do(self.node.has_answered(asked.names, data, self._simulation.now))

    def question(self, what: str = questions.STACKS) -> None:
        """Have somebody ask all nodes; and see that he has an answer once, and what the nodes have answered."""
        told: list[life.Found] = []
        if what == "do":
            what = f"do {self.name} {self.questions}"

        def tell(found: life.Found) -> None:
            told.append(found)
            wrong = [node for node, data in found.answers.items() if data != f"{node} {what}".encode()]
            if len(told) > 1 or wrong or (found.job is not None and not set(found.answers) <= set(found.job.ids)):
                raise BrokenError(f"{self.name}: who has asked {what} has {told}")
            if found.job is not None and bool(found.why) == (set(found.answers) == set(found.job.ids)):
                raise BrokenError(f"{self.name}: {found.why!r} is said, and {list(found.answers)} have answered")

        def check() -> None:
            if self.is_alive and self.finish is None and not told:
                raise BrokenError(f"{self.name}: who has asked {what} has no answer")

        if not self._is_stopped:
            self._simulation.tell(f"{self.name} is asked {what}")
            self.questions += 1
            self.do(self.node.ask(what, tell, self._simulation.now))
            self._later(check, TOLD)

    def restart(self) -> None:
        """Have somebody ask for another generation."""
        if not self._is_stopped:
            self._simulation.tell(f"{self.name}: another generation is asked for")
            self.do(self.node.ask_restart("asked", self._simulation.now))

    def _tick(self) -> None:
        if self.is_alive and self.finish is None and self.node.wake <= self._simulation.now:
            self.do(self.node.tick(self._simulation.now))

    def _leave(self, finish: life.Finish) -> None:
        self._simulation.tell(f"{self.name} leaves: {finish.state} {finish.why}")
        if self.workers is not None:
            raise BrokenError(f"{self.name} leaves, and has workers of generation {self.workers}")
        self.finish = finish
        self.since = self.since if self._state == "LEAVING" else self._simulation.now
        end = conclusion.conclude(finish, 15 if self.left else 2 if self.asked else 0, "why")
        self._simulation.tell(f"{self.name} exits with {end.code}")
        self._simulation.see_finish(self, finish, end)
        self._simulation.at(self._delay(), partial(self._close, ends_job=finish.ends_job))

    def _close(self, *, ends_job: bool) -> None:
        """Give the lease back; unless it is killed meanwhile: it runs out then."""
        simulation = self._simulation
        if simulation.setting.faults and simulation.now < CALM and simulation.chance(0.05) and not self.hosts:
            return
        if self.hosts:
            simulation.store.go_away(math.inf)
        elif self._is_connected and not simulation.store.is_away:
            simulation.store.expire(self)
            if ends_job:
                simulation.store.end_job()

    # --- the workers

    def _start(self, job: Job, rank: int) -> None:
        simulation = self._simulation
        simulation.tell(f"{self.name} starts generation {job.generation} as {rank} of {len(job.members)}")
        simulation.see_start(self, job, rank)
        self.ran = self.workers = job.generation
        self.job = job
        self.is_late, self.started = False, simulation.now
        self.failed = False
        lasts = simulation.random.uniform(0.1, simulation.setting.lasts)
        fails = simulation.chance(simulation.setting.failing)
        generation = job.generation
        self._later(lambda: self.fail(generation) if fails else self._succeed(generation), lasts)

    def fail(self, generation: int | None = None) -> None:
        """Have a worker fail."""
        runs = self.workers if generation is None else generation
        if not self.is_alive or self.workers is None or self.workers != runs or self.node.state != "RUNNING":
            return
        self._simulation.tell(f"{self.name}: a worker fails")
        self.code = 10 + len(self._simulation.nodes) * 7 % 90 + self._simulation.nodes.index(self)
        rank = 0 if self.job is None else first_rank(self.job, self.job.rank_of(self.name))
        stop = Stop(runs, "failure", self.name, self._me.host, "ValueError", rank, self.code)
        self._simulation.failed.setdefault(runs, set()).add(self.code)
        self.failed = True
        self.do(self.node.workers_failed(stop, self._simulation.now))
        self._end()

    def _succeed(self, generation: int) -> None:
        if self.is_alive and self.workers == generation and self.node.state == "RUNNING":
            self._go("succeeded")

    def _end(self) -> None:
        generation = self.workers
        span = self._simulation.random.uniform(0, GRACE)
        if self._simulation.chance(0.02):  # beyond what the leader waits for
            span, self.is_late = 40.0, True
        self._later(partial(self._go_of, generation), span)

    def _go_of(self, generation: int | None) -> None:
        if self.workers == generation:
            self._go("stopped")

    def _go(self, outcome: str) -> None:
        if not self.is_alive or self.workers is None:
            return
        self.workers = None
        if outcome == "succeeded":
            self.succeeded_at = self._simulation.now
        error = "ValueError" if self.failed else ""
        is_cut_off = self.failed and self._simulation.chance(0.4)
        rank = 0 if self.job is None else first_rank(self.job, self.job.rank_of(self.name))
        failed = {0: ProcessFailure(0, 1, self.code, "<N/A>")} if self.failed else {}
        me = replace(
            self._me, outcome="failed" if self.failed else outcome, uptime=1.0, error=error, is_cut_off=is_cut_off,
            rank=rank if self.failed else None, exitcode=self.code if self.failed else None,
        )  # fmt: skip
        left = evidence.write(me, evidence.Left(RunProcsResult(failures=failed)), rank)
        self.do(self.node.workers_gone(me, left, self._simulation.now))

    # --- what goes wrong

    def interrupt(self) -> None:
        """Have somebody press Ctrl-C here; and now and then once more."""
        if not self.is_alive or self.finish is not None:
            return
        self.asked = self._simulation.is_asked = True
        self.do(self.node.ask_stop(2, "SIGINT", GRACE, self._simulation.now))
        if self._simulation.chance(0.3):
            self._later(self._kill, self._simulation.random.uniform(0.3, 2))

    def _kill(self) -> None:
        if self.is_alive and self.finish is None:
            self.do(self.node.ask_stop(9, "SIGINT", 0.0, self._simulation.now))

    def go(self) -> None:
        """Have somebody take the node out of the job."""
        self.asked = self.left = True
        self.do(self.node.ask_leave("drained", self._simulation.now))

    def crash(self) -> None:
        """Be gone: the workers end with their agent, and so does what it hosts."""
        if self.hosts:
            self._simulation.store.go_away(math.inf)
        self.is_alive, self.workers, self._is_connected = False, None, False
        self.died = self._simulation.now

    def pause(self, span: float) -> None:
        """Be stopped, the workers with it, for a while."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self.hosts:
            self._simulation.store.go_away(span)
        self._simulation.at(span, self._continue)

    def _continue(self) -> None:
        if not self._is_stopped:
            return
        self._is_stopped = False
        if not self.has_lease and self._is_connected:
            self._is_connected = False
            self.find_store()
        missed, self._missed = self._missed, []
        for action in missed:
            action()

    def cut(self, span: float) -> None:
        """Reach nobody for a while."""
        self._is_cut = True
        self.lose_store()
        self._simulation.at(span, self._join)

    def _join(self) -> None:
        self._is_cut = False
        self.find_store()

    def heal(self) -> None:
        """Be well again."""
        self._continue()
        self._join()


def setting_of(seed: int) -> Setting:
    """The job of a seed."""
    chance = random.Random(-seed - 1)  # noqa: S311 - as above
    most = chance.randint(1, 6)
    least = chance.choice([most, chance.randint(1, most)])
    setting = Setting(
        least, most, max(1, most + chance.choice([-1, 0, 0, 1, 2])), chance.choice([0, 1, 3, 10]),
        chance.choice([0, 1, 3, 8, 16]), chance.choice([0.0, 0.05, 0.3]), least == most and chance.random() < 0.3,
        chance.choice([0, 0, 2]), chance.choice([8.0, 8.0, 8.0, 8.0, 8.0, 400.0]),
        chance.choice([500.0, 500.0, 5.0]), hosted=chance.random() < HOSTED,
    )  # fmt: skip
    setting = setting._replace(keep=not setting.hosted and chance.random() < KEEPING)
    return setting._replace(mixed=chance.choice([0.2, 0.6]) if chance.random() < MIXED else 0.0)


def play(seed: int, tell: Callable[[str], None] = lambda _: None) -> Simulation:
    """Play the story of a seed. Raises BrokenError."""
    return Simulation(setting_of(seed), seed, tell).run()


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def main(args: list[str]) -> int:
    """Play the seeds between two numbers, or tell the story of one."""
    if len(args) == 1:
        _say(setting_of(int(args[0])))
        play(int(args[0]), _say)
        return 0
    broken = 0
    for seed in range(int(args[0]), int(args[1])):
        try:
            play(seed)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told with its seed
            broken += 1
            _say(f"seed {seed}: {type(error).__name__}: {error}")
    _say(f"{broken} of {int(args[1]) - int(args[0])} stories broke a rule")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
