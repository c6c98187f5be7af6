"""Jobs of several hosts: `phalanx run` on each, and what a user sees of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx._rendezvous.settings import prefix_of
from phalanx._store.etcd.settings import EtcdSettings
from tests.support.etcd import Etcd, Member
from tests.support.helpers import descendants, wait_gone
from tests.support.hosts import Hosts

SOON = 40.0
"""Seconds that a line may take; spent only by a test that fails."""

TTL = 2
UNKNOWN = 69
"""The exit code of a node that cannot learn how its job has ended."""

SECRET = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of the tests
BACKENDS = ["static", "c10d"]
"""Those of jobs whose store one of their agents has."""

WORKER = """
import os, signal, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
print("worker", *(os.environ[name] for name in names), "attempt", attempt, flush=True)
while not os.path.exists(sys.argv[1]):
    if os.path.exists(f"{sys.argv[1]}.fail.{rank}.{attempt}"):
        raise ValueError(f"bad batch of rank {rank}")
    time.sleep(0.05)
"""


class Agent:
    """`phalanx run` on a host."""

    def __init__(self, job: Job, number: int, options: Sequence[str], env: dict[str, str]) -> None:
        self.number = number
        self.path = job.folder / f"{number}.{len(job.agents)}.log"
        self.home = home = job.folder / f"home{number}"
        home.mkdir(exist_ok=True)
        command = [
            "-m", "phalanx", "run", "--nnodes", job.nodes, *job.meeting(number),
            "--rdzv-conf", ",".join(job.conf), "--rejoin-delay", "0.2", "--nproc-per-node", "2", "--grace", "5",
            *options, *job.command,
        ]  # fmt: skip
        command = [*job.hosts.on(number), sys.executable, *(job.program(number) or command)]
        with self.path.open("wb") as console:
            env = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home), **job.env, **env}
            self.process = subprocess.Popen(command, stdout=console, stderr=console, env=env)

    @property
    def said(self) -> str:
        """What its console shows."""
        return self.path.read_text()

    def wait_for(self, pattern: str, count: int = 1, seconds: float = SOON) -> list[str]:
        """Wait until its console shows something."""
        until = time.monotonic() + seconds
        while len(found := re.findall(pattern, self.said)) < count:
            assert time.monotonic() < until, (pattern, self.said)
            assert self.process.poll() is None or len(re.findall(pattern, self.said)) >= count, (pattern, self.said)
            time.sleep(0.02)
        return found

    def workers(self, attempt: int, size: int) -> list[str]:
        """Wait until its workers run in an attempt, among so many."""
        self.wait_for(rf"worker \d+ {size} \d+ \S+ attempt {attempt}\n", 2)
        return re.findall(rf"worker (\d+) {size} \d+ \S+ attempt {attempt}\n", self.said)

    def last(self, size: int) -> tuple[int, list[int]]:
        """The last attempt in which its workers run, among so many, and their ranks."""
        found = re.findall(rf"worker (\d+) {size} \d+ \S+ attempt (\d+)\n", self.said)
        last = max((int(attempt) for _, attempt in found), default=-1)
        return last, [int(rank) for rank, attempt in found if int(attempt) == last]

    @property
    def report(self) -> str:
        """The report in its run's folder."""
        (path,) = self.home.glob("phalanx/runs/*/report.txt")
        return path.read_text()

    def launcher(self) -> int:
        """The pid of the agent itself: ip and unshare have become it."""
        return self.process.pid

    def end(self, seconds: float = SOON) -> int:
        """Wait until it has ended, and return its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(self.said)


class Job:
    """A job: its hosts and its agents.

    Args:
        folder: A folder of its own.
        hosts: Where it runs.
        nodes: What ``--nnodes`` is.
        meeting: Returns the options that say to a host how it meets the others.
    """

    def __init__(self, folder: Path, hosts: Hosts, nodes: str, meeting: Callable[[int], Sequence[str]]) -> None:
        self.folder, self.hosts, self.nodes, self.meeting = folder, hosts, nodes, meeting
        self.conf = [f"lease_ttl={TTL}", "last_call_timeout=1", "join_timeout=60"]
        self.env = {"PHALANX_JOB_SECRET": SECRET}
        self.end = folder / "end"
        script = folder / "train.py"
        script.write_text(WORKER)
        self.command = [str(script), str(self.end)]
        self.program: Callable[[int], list[str]] = lambda _: []
        """Returns what a host runs in place of `phalanx run`; by default, nothing."""
        self.agents: list[Agent] = []

    def start(self, *numbers: int, options: Sequence[str] = (), **env: str) -> list[Agent]:
        """Start agents. ``env``: further variables of their environment."""
        found = [Agent(self, number, options, env) for number in numbers]
        self.agents += found
        return found

    def fail(self, rank: int, attempt: int) -> None:
        """Have a worker fail."""
        (self.folder / f"end.fail.{rank}.{attempt}").touch()

    def finish(self, *agents: Agent) -> None:
        """Let all workers succeed, and see that the job does, and that no process of it is left."""
        below = [pid for agent in agents for pid in descendants(agent.process.pid)]
        self.end.touch()
        for agent in agents:
            assert agent.end() == 0, agent.said
        assert not wait_gone(below)

    def close(self) -> None:
        """End what is left."""
        for agent in self.agents:
            if agent.process.poll() is None:
                below = descendants(agent.process.pid)
                agent.process.send_signal(signal.SIGCONT)
                agent.process.kill()
                agent.process.wait()
                for pid in below:
                    with suppress(ProcessLookupError):  # they end by themselves, too: at any moment
                        os.kill(pid, signal.SIGKILL)


def by_master(host: str) -> Callable[[int], Sequence[str]]:
    """The options by which machines meet at the first one, as torchrun's users type them."""
    return lambda number: ["--node-rank", f"{number - 1}", "--master-addr", host]


def at(backend: str, host: str, port: int = 29400) -> Callable[[int], Sequence[str]]:
    """The options by which machines meet at an endpoint."""

    def options(number: int) -> Sequence[str]:
        if backend == "static":
            return ["--node-rank", f"{number - 1}", "--rdzv-endpoint", f"{host}:{port}"]
        return ["--rdzv-backend", backend, "--rdzv-endpoint", f"{host}:{port}"]

    return options


@contextmanager
def ending(hosts: Hosts) -> Iterator[list[Job]]:
    """Return a list for jobs: afterwards the hosts are healed, and what is left of the jobs is ended."""
    made: list[Job] = []
    try:
        yield made
    finally:
        for number in hosts.numbers:
            hosts.heal(number)
        for one in made:
            one.close()
        hosts.names.clear()


STORE = 4
"""The host of the etcd of an `EtcdJob`; those before it run the workers."""


class EtcdJob(Job):
    """A job that meets at an etcd of its own. ``endpoints``: its members, in the order in which agents ask them."""

    def __init__(self, folder: Path, hosts: Hosts, etcd: Etcd, nodes: str) -> None:
        super().__init__(folder, hosts, nodes, self._meet)
        self.env.clear()
        self.etcd = etcd
        self.endpoints = [member.endpoint for member in etcd.members]

    def _meet(self, _number: int) -> Sequence[str]:
        where = ",".join(self.endpoints)
        return ["--rdzv-backend", "etcd", "--rdzv-endpoint", where, "--run-id", self.folder.name]

    def ask(self, path: str, body: str = "{}", times: int = 1) -> list[dict[str, Any]]:
        """Ask each member, on a host, by its gateway. Returns the last answer of each that is there."""
        script = (
            "import sys, urllib.request\n"
            "path, body, times, *endpoints = sys.argv[1:]\n"
            "for endpoint in endpoints:\n"
            "    request = urllib.request.Request(f'http://{endpoint}/v3/{path}', data=body.encode())\n"
            "    for _ in range(int(times)):\n"
            "        answer = urllib.request.urlopen(request, timeout=5).read().decode()\n"
            "    print(answer)\n"
        )
        where = [member.endpoint for member in self.etcd.members if member.process is not None]
        command = [*self.hosts.on(1), sys.executable, "-c", script, path, body, str(times), *where]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def leases(self, count: int) -> list[str]:
        """Wait until there are so many leases of agents, and return their ids."""
        job = str(EtcdSettings((), prefix_of(self.folder.name)).job_lease)
        until = time.monotonic() + SOON
        while True:
            found = [lease["ID"] for lease in self.ask("kv/lease/leases")[0]["leases"] if lease["ID"] != job]
            if len(found) == count:
                return found
            assert time.monotonic() < until, found

    def leader(self) -> Member:
        """The member that leads, of all that there are."""
        told = [status["leader"] == status["header"]["member_id"] for status in self.ask("maintenance/status")]
        return self.etcd.members[told.index(True)]


def together(agents: list[Agent], size: int, after: int = -1, seconds: float = SOON) -> int:
    """Wait until the workers of all run in one attempt that comes ``after`` another, each rank once. Returns which."""
    until = time.monotonic() + seconds
    while True:
        lasts = [agent.last(size) for agent in agents]
        attempts = {attempt for attempt, _ in lasts}
        if (
            len(attempts) == 1
            and min(attempts) > after
            and sorted(rank for _, ranks in lasts for rank in ranks) == list(range(size))
        ):
            return attempts.pop()
        for agent in agents:
            assert time.monotonic() < until, [each.said for each in agents]
            assert agent.process.poll() is None, agent.said
        time.sleep(0.05)


def everyone(agents: list[Agent], attempt: int, size: int) -> None:
    """See that the workers of all run in an attempt: each rank once."""
    ranks = [rank for agent in agents for rank in agent.workers(attempt, size)]
    assert sorted(map(int, ranks)) == list(range(size))
