"""Agents of Phalanx: each a node with a store of its own, carried out by `JobRun` on a thread, with no processes.

Only what a node starts is left out: of its workers, this says when they would be started and ended.
"""

from __future__ import annotations

import traceback
from threading import Thread
from time import monotonic_ns
from typing import TYPE_CHECKING

from benchmarks.agents.say import CALLED, ERROR, FAILED, GONE, IN, RANK, TOLD, say
from phalanx._group.restart_policy import AttemptEnd, RestartPolicy
from phalanx._outcomes.failure import NOT_AVAILABLE, Outcome, ProcessFailure
from phalanx._outcomes.result import RunProcsResult
from phalanx._rendezvous import evidence, records
from phalanx._rendezvous.node import Participant
from phalanx._rendezvous.records import Node, Stop, replace
from phalanx._rendezvous.settings import Rules, prefix_of
from phalanx._run.job_run import JobRun, NodeTeam
from phalanx._run.runner import Runner
from phalanx._store.etcd import loop_thread
from phalanx._store.etcd.etcd_store import EtcdStore
from phalanx._store.etcd.settings import EtcdSettings
from phalanx._store.hub.addresses import HubSettings
from phalanx._store.hub.hub_store import HubStore
from phalanx._store.store import Changed, Done, Put, Snapshot, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._rendezvous.records import Job
    from phalanx._store.store import StoreEvent, Transaction

RESTARTS = 1000
HUB = "hub:"
TRACEBACK = "Traceback (most recent call last):\n" + 20 * f'  File "{"/x" * 20}.py", line 99, in step\n    {"y" * 40}\n'
FOLDER = "/home/ada/.local/state/phalanx/runs/20261120-144610_ibiu5pti"
SECRET = b"0123456789abcdef0123456789abcdef"
"""Of the store in an agent: what its agents say is authenticated, and encrypted where this Python can."""
TTL = 60
"""Seconds of a lease. More than the default: hundreds of agents share few processors, and none is to be lost."""


class OurAgents:
    """The agents of this process.

    Args:
        endpoint: Where the etcd is; or `HUB` and where the store in an agent is.
        workers: See `Crowd`.
    """

    def __init__(self, endpoint: str, workers: int) -> None:
        self._endpoint = endpoint
        self._workers = workers
        self._teams: dict[int, _Team] = {}
        loop_thread.acquire()  # it stays between two jobs: nobody else's process has so many, one after another

    def join(self, agent: int, run: str, nodes: int) -> None:
        """See `Agents`."""
        Thread(target=self._run, args=(agent, run, nodes), daemon=True).start()

    def fail(self, agent: int) -> None:
        """See `Agents`."""
        self._teams[agent].fail()

    def end(self) -> None:
        """See `Agents`."""
        for team in list(self._teams.values()):
            team.finish("succeeded")

    def _run(self, agent: int, run: str, nodes: int) -> None:
        try:
            say(CALLED, agent)
            nproc = max(1, self._workers)
            me = Node(
                f"n{agent}", f"host{agent}", "127.0.0.1", nproc, port=29500, min_nodes=nodes, max_nodes=nodes
            )  # fmt: skip
            store = _Counted(self._store(run), agent)
            team = self._teams[agent] = _Team(agent, me, store, self._workers)
            with Runner(team, JobRun(Participant(me, Rules(RestartPolicy(RESTARTS))), store, team)) as runner:
                runner.carry()
            say(GONE, agent)
        except BaseException:
            say(ERROR, agent)
            traceback.print_exc()
            raise

    def _store(self, run: str) -> Store:
        if not self._endpoint.startswith(HUB):
            return EtcdStore(EtcdSettings((self._endpoint,), prefix_of(run), ttl=TTL))
        host, _, port = self._endpoint.removeprefix(HUB).rpartition(":")
        return HubStore(HubSettings(host, int(port), run, SECRET, TTL, timeout=TTL))


class _Team(NodeTeam):
    """The workers of a node, which are none."""

    def __init__(self, agent: int, me: Node, store: _Counted, workers: int) -> None:
        self._agent = agent
        self._workers = workers
        self._job: Job | None = None
        self._me = me
        self._store = store
        self._generation = -1
        self._end: AttemptEnd | None = None
        self._wake: Callable[[], None] = lambda: None  # before the start, which is followed by a look

    def assign(self, job: Job, rank: int) -> None:
        """Say that the node knows its rank, with what that has taken."""
        self._generation, self._end, self._job = job.generation, None, job
        say(RANK, self._agent, rank, self._store.asked, self._store.heard, self._store.leads)

    def start(self, _attempt: int, wake: Callable[[], None]) -> None:
        """Start nothing."""
        self._wake = wake

    def ended(self) -> AttemptEnd | None:
        """See `Team`."""
        return self._end

    def stop(self, death_signal: int | None, _grace: float) -> None:
        """See `Team`. Say that the workers would be ended now, if the job ends them."""
        if death_signal is None:
            say(TOLD, self._agent)
        self.finish("stopped")

    def say(self, text: str) -> None:
        """Show nothing."""

    def come(self, run: JobRun) -> None:
        """See `NodeTeam`."""
        self._run = run

    def account(self, end: AttemptEnd) -> tuple[Node, Stop | None, bytes]:
        """See `NodeTeam`."""
        me = replace(self._me, outcome=end.state, uptime=1.0, error=end.error)
        return me, self._why() if end.failed else None, self._evidence(end) if self._workers else b""

    def _evidence(self, end: AttemptEnd) -> bytes:
        """Return what so many workers leave: one fails, with a traceback of `TRACEBACK`; the others are stopped."""
        assert self._job is not None
        outcomes = {rank: Outcome(rank, 4242 + rank, "stopped", -15, 15) for rank in range(self._workers)}
        failures = {}
        if end.failed:
            failed = ProcessFailure(0, 4242, 1, NOT_AVAILABLE, observed_ns=1)
            failures[0] = failed.replace(message="ValueError: bad batch", traceback=TRACEBACK, error_file=FOLDER)
            outcomes[0] = Outcome(0, 4242, "failed", 1)
        result, me = RunProcsResult(failures=failures, outcomes=outcomes), self._me
        first = self._agent * self._workers
        return evidence.write(me.id, me.host, FOLDER, result, first, nodes=len(self._job.members), machine=me.machine)

    def heard(self, what: Job | Stop) -> None:
        """Say nothing."""

    def store_is(self, why: str | None) -> None:
        """Say nothing."""

    def fail(self) -> None:
        """Have a worker fail: the moment is that in which `MachineTeam` would call, too."""
        moment = monotonic_ns()
        self._run.worker_failed(self._generation, self._why())
        say(FAILED, self._agent, moment=moment)
        self.finish("failed")

    def finish(self, state: str) -> None:
        """Let all workers be gone."""
        self._end = AttemptEnd(state, error="exited with code 1" if state == "failed" else "")
        self._wake()

    def _why(self) -> Stop:
        return Stop(self._generation, "failure", self._me.id, self._me.host, "exited with code 1", 0, 1)


class _Counted(Store):
    """A store that counts what is asked of it, and what it tells; and that says when the node has entered."""

    def __init__(self, store: Store, agent: int) -> None:
        self._store = store
        self._agent = agent
        self._ticket, self._is_in = -1, False  # of the entry as the node comes; whether it is made
        self.asked = self.heard = 0
        self.leads = 0
        """Whether it watches the nodes, as the leader does."""

    def open(self, deliver: Callable[[StoreEvent], None]) -> None:
        """See `Store`."""

        def take(event: StoreEvent) -> None:
            if isinstance(event, Done) and event.ticket == self._ticket and event.made:
                self._ticket, self._is_in = -1, True
                say(IN, self._agent)
            self.heard += isinstance(event, Changed | Snapshot)
            deliver(event)

        self._store.open(take)

    def watch(self, prefix: str) -> None:
        """See `Store`."""
        self.asked += 1
        self.leads |= prefix == records.NODES
        self._store.watch(prefix)

    def unwatch(self, prefix: str) -> None:
        """See `Store`."""
        self._store.unwatch(prefix)

    def submit(self, ticket: int, transaction: Transaction) -> None:
        """See `Store`."""
        self.asked += 1
        first = transaction.writes[0]
        if isinstance(first, Put) and first.key == f"{records.NODES}n{self._agent}" and not self._is_in:
            self._ticket = ticket
        self._store.submit(ticket, transaction)

    def fetch(self, ticket: int, prefix: str) -> None:
        """See `Store`."""
        self.asked += 1
        self._store.fetch(ticket, prefix)

    def close(self, seconds: float, *, ends_job: bool = False) -> None:
        """See `Store`."""
        self._store.close(seconds, ends_job=ends_job)
