"""Jobs of several hosts that meet at a real etcd, and what becomes of them when something is killed or cut off.

What a user sees is looked at on every host: its console, its exit code, its workers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from tests.support import hosts as hosts_of
from tests.support.etcd import Etcd, Member
from tests.support.helpers import alive, descendants
from tests.support.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.once, pytest.mark.slow]

SOON = 40.0
"""Seconds that a line may take; spent only by a test that fails."""

TTL = 2
STORE = 4
"""The host of the etcd; those before it run the workers."""

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


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts for agents, and one for the etcd."""
    hosts_of.check()
    with Hosts(STORE) as it:
        yield it


class Agent:
    """`phalanx run` on a host."""

    def __init__(self, job: Job, number: int, options: list[str]) -> None:
        self.number = number
        self.path = job.folder / f"{number}.{len(job.agents)}.log"
        home = job.folder / f"home{number}"
        home.mkdir(exist_ok=True)
        command = [
            *job.hosts.on(number), sys.executable, "-m", "phalanx", "run", "--nnodes", job.nodes,
            "--rdzv-backend", "etcd", "--rdzv-endpoint", job.etcd.endpoints, "--run-id", job.name,
            "--rdzv-conf", f"lease_ttl={TTL},last_call_timeout=1,join_timeout=60", "--rejoin-delay", "0.2",
            "--nproc-per-node", "2", "--grace", "5", *options, str(job.script), str(job.end),
        ]  # fmt: skip
        with self.path.open("wb") as console:
            env = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home)}
            self.process = subprocess.Popen(command, stdout=console, stderr=console, env=env)

    @property
    def said(self) -> str:
        """What its console shows."""
        return self.path.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Wait until its console shows something."""
        until = time.monotonic() + SOON
        while len(found := re.findall(pattern, self.said)) < count:
            assert time.monotonic() < until, (pattern, self.said)
            assert self.process.poll() is None or len(re.findall(pattern, self.said)) >= count, (pattern, self.said)
            time.sleep(0.02)
        return found

    def workers(self, attempt: int, size: int) -> list[str]:
        """Wait until its workers run in an attempt, among so many."""
        self.wait_for(rf"worker \d+ {size} \d+ \S+ attempt {attempt}\n", 2)
        return re.findall(rf"worker (\d+) {size} \d+ \S+ attempt {attempt}\n", self.said)

    def launcher(self) -> int:
        """The pid of the agent itself: ip and unshare have become it."""
        return self.process.pid

    def end(self) -> int:
        """Wait until it has ended, and return its exit code."""
        try:
            return self.process.wait(SOON)
        except subprocess.TimeoutExpired:
            pytest.fail(self.said)


class Job:
    """A job: its hosts, its etcd and its agents. A context manager."""

    def __init__(self, folder: Path, hosts: Hosts, etcd: Etcd, nodes: str) -> None:
        self.folder, self.hosts, self.etcd, self.nodes = folder, hosts, etcd, nodes
        self.name = folder.name
        self.script, self.end = folder / "train.py", folder / "end"
        self.script.write_text(WORKER)
        self.agents: list[Agent] = []

    def start(self, *numbers: int, options: list[str] | None = None) -> list[Agent]:
        """Start agents."""
        found = [Agent(self, number, options or []) for number in numbers]
        self.agents += found
        return found

    def fail(self, rank: int, attempt: int) -> None:
        """Have a worker fail."""
        (self.folder / f"end.fail.{rank}.{attempt}").touch()

    def finish(self, *agents: Agent) -> None:
        """Let all workers succeed, and see that the job does."""
        self.end.touch()
        for agent in agents:
            assert agent.end() == 0, agent.said

    def close(self) -> None:
        """End what is left."""
        for agent in self.agents:
            if agent.process.poll() is None:
                below = descendants(agent.process.pid)
                agent.process.send_signal(signal.SIGCONT)
                agent.process.kill()
                agent.process.wait()
                for pid in below:
                    if alive(pid):
                        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path, hosts: Hosts) -> Iterator[Callable[..., Job]]:
    """Makes a job of so many nodes, with an etcd of its own."""
    made: list[tuple[Etcd, Job]] = []

    def make(nodes: str, members: int = 1) -> Job:
        etcd = Etcd(members, hosts.address(STORE), hosts.on(STORE))
        made.append((etcd, Job(tmp_path, hosts, etcd, nodes)))
        etcd.start()
        return made[-1][1]

    try:
        yield make
    finally:
        for number in hosts.numbers:
            hosts.heal(number)
        for etcd, one in made:
            one.close()
            etcd.close()


def everyone(agents: list[Agent], attempt: int, size: int) -> None:
    """See that the workers of all run in an attempt: each rank once."""
    ranks = [rank for agent in agents for rank in agent.workers(attempt, size)]
    assert sorted(map(int, ranks)) == list(range(size))


def test_a_worker_fails_and_all_start_again(job: Callable[..., Job]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    one.fail(3, 0)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents:
        assert len(re.findall(r"rank 3 on host h\d, exit code 1; stopping the workers", agent.said)) == 1
        cause = r"rank 3 on host h\d, ValueError: bad batch of rank 3"
        assert re.search(rf"attempt 1 of 2 failed after \S+: {cause}; restarting", agent.said)
        assert "attempt 2 of 2 has succeeded" in agent.said


def test_one_report_is_the_same_on_every_host(job: Callable[..., Job]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    one.fail(4, 0)
    assert [agent.end() for agent in agents] == [1, 1, 1]
    reports = {agent.said[agent.said.index("=" * 72) :] for agent in agents}
    assert len(reports) == 1
    report = reports.pop()
    assert re.search(r"host      : h\d\n  rank      : 4 \(local_rank: 0\)", report)
    assert "ValueError: bad batch of rank 4" in report
    assert "ranks 0-3, 5: stopped by us (SIGTERM)" in report


def test_an_agent_that_is_killed_is_gone_on_without(job: Callable[..., Job]) -> None:
    one = job("2:3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    began = time.monotonic()
    os.kill(agents[0].launcher(), signal.SIGKILL)
    agents[0].process.wait()
    everyone(agents[1:], 1, 4)
    assert time.monotonic() - began < SOON
    for agent in agents[1:]:
        assert re.search(r"node \d is lost: its agent on host h1 is gone, or cut off; stopping the workers", agent.said)
    one.finish(*agents[1:])


def test_a_spare_takes_the_place_of_a_host_that_is_lost(job: Callable[..., Job]) -> None:
    one = job("2")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    spare = one.start(3)
    spare[0].wait_for("this node is a spare")
    os.kill(agents[0].launcher(), signal.SIGKILL)
    agents[0].process.wait()
    everyone([agents[1], *spare], 1, 4)
    one.finish(agents[1], *spare)


@pytest.mark.parametrize("how", ["cut", "silence", "deafen"])
def test_a_host_that_is_cut_off_comes_back(job: Callable[..., Job], how: str) -> None:
    one = job("2:3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    getattr(one.hosts, how)(2)
    everyone([agents[0], agents[2]], 1, 4)
    agents[1].wait_for("does not answer .*; the workers go on")
    one.hosts.heal(2)
    agents[1].wait_for("answers again")
    everyone(agents, 2, 6)
    one.finish(*agents)


def test_a_host_that_is_cut_off_for_a_moment_goes_on(job: Callable[..., Job]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    one.hosts.silence(2)
    time.sleep(0.5)  # how long it is cut off is what the test is about
    one.hosts.heal(2)
    one.finish(*agents)
    assert all("lost" not in agent.said for agent in agents)


def test_a_host_that_comes_takes_part(job: Callable[..., Job]) -> None:
    one = job("2:3")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    agents += one.start(3)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents[:2]:
        assert "host h3 can take part, and takes part from now on; stopping the workers" in agent.said


def test_an_etcd_that_is_killed_and_starts_again(job: Callable[..., Job]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    one.etcd.members[0].kill()
    for agent in agents:
        agent.wait_for("does not answer .*; the workers go on")
    one.etcd.start()
    for agent in agents:
        agent.wait_for("answers again")
        assert "stopping" not in agent.said
    one.fail(0, 0)
    everyone(agents, 1, 6)
    one.finish(*agents)


def test_three_members_lose_their_leader_and_then_the_quorum(job: Callable[..., Job]) -> None:
    one = job("3", members=3)
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    leader = _leader(one)
    leader.kill()
    one.fail(1, 0)
    everyone(agents, 1, 6)
    rest = [member for member in one.etcd.members if member.process is not None]
    rest[0].signal(signal.SIGSTOP)
    for agent in agents:
        agent.wait_for("does not answer .*; the workers go on")
    rest[0].signal(signal.SIGCONT)
    for agent in agents:
        agent.wait_for("answers again")
    one.finish(*agents)


def _leader(job: Job) -> Member:
    """The member that leads: asked on the etcd's own host."""
    script = (
        "import json, sys, urllib.request\n"
        "for endpoint in sys.argv[1:]:\n"
        "    url = f'http://{endpoint}/v3/maintenance/status'\n"
        "    status = json.load(urllib.request.urlopen(urllib.request.Request(url, data=b'{}'), timeout=5))\n"
        "    print(status['leader'] == status['header']['member_id'])\n"
    )
    endpoints = [member.endpoint for member in job.etcd.members]
    done = subprocess.run(
        [*job.hosts.on(STORE), sys.executable, "-c", script, *endpoints], check=True, capture_output=True, text=True
    )
    return job.etcd.members[done.stdout.split().index("True")]


def test_a_host_that_is_stopped_for_longer_than_its_lease(job: Callable[..., Job]) -> None:
    one = job("2:3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    stopped = [agents[1].launcher(), *descendants(agents[1].launcher())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    everyone([agents[0], agents[2]], 1, 4)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    everyone(agents, 2, 6)
    one.finish(*agents)


def test_ctrl_c_on_one_host_stops_the_job_on_all(job: Callable[..., Job]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    os.kill(agents[1].launcher(), signal.SIGINT)
    assert [agent.end() for agent in agents] == [130, 130, 130]
    assert "SIGINT: stopping the job on all nodes" in agents[1].said
    for agent in agents:
        assert "the job was stopped: SIGINT on host h2" in agent.said
    assert not any(descendants(agent.process.pid) for agent in agents)


def test_who_was_told_another_number_of_nodes_is_refused(job: Callable[..., Job]) -> None:
    one = job("2")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    one.nodes = "3"
    stranger = one.start(3)[0]
    assert stranger.end() == 1
    assert "Error: this node is not taken: the job is one of 2 nodes, and this node was told 3" in stranger.said
    one.finish(*agents)


def test_two_jobs_after_each_other_with_one_name(job: Callable[..., Job]) -> None:
    one = job("2")
    for _ in range(2):
        agents = one.start(1, 2)
        everyone(agents, 0, 4)
        one.finish(*agents)
        one.end.unlink()
