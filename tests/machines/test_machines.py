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

from tests.support.etcd import Etcd, Member
from tests.support.helpers import descendants
from tests.support.jobs import SOON, Job, everyone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.hosts import Hosts

pytestmark = [pytest.mark.once, pytest.mark.slow]

STORE = 4
"""The host of the etcd; those before it run the workers."""


LAUNCHES = """
import os, signal, sys
from phalanx.errors import ChildFailedError
from phalanx.launcher import LaunchConfig, elastic_launch

def train():
    if os.environ["RANK"] == "3":
        raise ValueError("bad batch")
    signal.pause()

if __name__ == "__main__":
    where = {"rdzv_backend": "etcd", "rdzv_endpoint": sys.argv[1], "run_id": sys.argv[2]}
    try:
        elastic_launch(LaunchConfig(2, 2, 2, max_restarts=0, **where), train)()
    except ChildFailedError as error:
        print(error)
        sys.exit(7)
"""
"""A program that launches a job, which fails on the second host, and prints the error."""


class EtcdJob(Job):
    """A job that meets at an etcd of its own."""

    def __init__(self, folder: Path, hosts: Hosts, etcd: Etcd, nodes: str) -> None:
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints, "--run-id", folder.name]
        super().__init__(folder, hosts, nodes, lambda _: where)
        self.etcd = etcd


@pytest.fixture
def job(tmp_path: Path, hosts: Hosts) -> Iterator[Callable[..., EtcdJob]]:
    """Makes a job of so many nodes, with an etcd of its own."""
    made: list[tuple[Etcd, EtcdJob]] = []

    def make(nodes: str, members: int = 1) -> EtcdJob:
        etcd = Etcd(members, hosts.address(STORE), hosts.on(STORE))
        made.append((etcd, EtcdJob(tmp_path, hosts, etcd, nodes)))
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


def test_a_worker_fails_and_all_start_again(job: Callable[..., EtcdJob]) -> None:
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


def test_one_report_is_the_same_on_every_host(job: Callable[..., EtcdJob]) -> None:
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


def test_programs_that_launch_a_job_raise_the_same_report_on_every_host(job: Callable[..., EtcdJob]) -> None:
    one = job("2")
    script = one.folder / "launches.py"
    script.write_text(LAUNCHES)
    command = [sys.executable, str(script), one.etcd.endpoints, one.folder.name]
    env = {**os.environ, "HOME": str(one.folder), "TMPDIR": str(one.folder)}
    launchers = [
        subprocess.Popen([*one.hosts.on(number), *command], stdout=subprocess.PIPE, text=True, env=env)
        for number in (1, 2)
    ]
    reports = {launcher.communicate(timeout=SOON)[0] for launcher in launchers}
    assert [launcher.returncode for launcher in launchers] == [7, 7]
    (report,) = reports
    assert re.search(r"host      : h[12]\n  rank      : 3 \(local_rank: 1\)\n  exitcode  : 1 ", report), report
    assert 'raise ValueError("bad batch")\n    ValueError: bad batch\n' in report
    assert "ranks 0-2: stopped by us (SIGTERM)" in report


def test_an_agent_that_is_killed_is_gone_on_without(job: Callable[..., EtcdJob]) -> None:
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


def test_a_spare_takes_the_place_of_a_host_that_is_lost(job: Callable[..., EtcdJob]) -> None:
    one = job("2")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    spare = one.start(3)
    spare[0].wait_for("this node is a spare")
    os.kill(agents[0].launcher(), signal.SIGKILL)
    agents[0].process.wait()
    everyone([agents[1], *spare], 1, 4)
    one.finish(agents[1], *spare)
    for agent in (agents[1], *spare):  # that restart is not counted among those that there may be, which is none
        assert re.search(r"phalanx: attempt 2: 2 nodes \(h\d, h\d\), 4 workers", agent.said)
        assert "attempt 2 has succeeded" in agent.said
    assert re.search(r"attempt 1 ended after \S+: node \d is lost: .*; restarting", agents[1].said)


@pytest.mark.parametrize("how", ["cut", "silence", "deafen"])
def test_a_host_that_is_cut_off_comes_back(job: Callable[..., EtcdJob], how: str) -> None:
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


def test_a_host_that_is_cut_off_for_a_moment_goes_on(job: Callable[..., EtcdJob]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    one.hosts.silence(2)
    time.sleep(0.5)  # how long it is cut off is what the test is about
    one.hosts.heal(2)
    one.finish(*agents)
    assert all("lost" not in agent.said for agent in agents)


def test_a_host_that_comes_takes_part(job: Callable[..., EtcdJob]) -> None:
    one = job("2:3")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    agents += one.start(3)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents[:2]:
        assert "host h3 can take part, and takes part from now on; stopping the workers" in agent.said


def test_an_etcd_that_is_killed_and_starts_again(job: Callable[..., EtcdJob]) -> None:
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


def test_three_members_lose_their_leader_and_then_the_quorum(job: Callable[..., EtcdJob]) -> None:
    one = job("3", members=3)
    one.conf[0] = "lease_ttl=5"  # the default: agents reach a store that is back within a second or two
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


def _leader(job: EtcdJob) -> Member:
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


def test_a_host_that_is_stopped_for_longer_than_its_lease(job: Callable[..., EtcdJob]) -> None:
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


def test_ctrl_c_on_one_host_stops_the_job_on_all(job: Callable[..., EtcdJob]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    os.kill(agents[1].launcher(), signal.SIGINT)
    assert [agent.end() for agent in agents] == [130, 130, 130]
    assert "SIGINT: stopping the job on all nodes" in agents[1].said
    for agent in agents:
        assert "the job was stopped: SIGINT on host h2" in agent.said
    assert not any(descendants(agent.process.pid) for agent in agents)


def test_who_was_told_another_number_of_nodes_is_refused(job: Callable[..., EtcdJob]) -> None:
    one = job("2")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    one.nodes = "3"
    stranger = one.start(3)[0]
    assert stranger.end() == 1
    assert "Error: this node is not taken: the job is one of 2 nodes, and this node was told 3" in stranger.said
    one.finish(*agents)


def test_two_jobs_after_each_other_with_one_name(job: Callable[..., EtcdJob]) -> None:
    one = job("2")
    for _ in range(2):
        agents = one.start(1, 2)
        everyone(agents, 0, 4)
        one.finish(*agents)
        one.end.unlink()
