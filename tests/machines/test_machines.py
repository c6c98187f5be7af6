"""Jobs of several hosts that meet at a real etcd, and what becomes of them when something is killed or cut off.

What a user sees is looked at on every host: its console, its exit code, its workers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from tests.support.etcd import Etcd
from tests.support.helpers import descendants, wait_gone
from tests.support.jobs import EtcdJob, everyone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.hosts import Hosts

pytestmark = [pytest.mark.once, pytest.mark.slow]

STORE = 4
"""The host of the etcd; those before it run the workers."""


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


def test_an_agent_that_is_killed_is_gone_on_without(job: Callable[..., EtcdJob]) -> None:
    one = job("2:3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    below = descendants(agents[0].launcher())
    os.kill(agents[0].launcher(), signal.SIGKILL)
    agents[0].process.wait()
    assert not wait_gone(below)
    everyone(agents[1:], 1, 4)
    one.finish(*agents[1:])
    for agent in agents[1:]:
        lost = r"node \d is lost: its agent on host h1 is gone, or cut off"
        assert re.search(rf"{lost}; stopping the workers", agent.said)
        assert re.search(rf"attempt 1 ended after \S+: {lost}; restarting", agent.said)  # and has not failed
        assert "attempt 2 has succeeded" in agent.said


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
    lost = r"node \d is lost: its agent on host h1 is gone, or cut off"
    assert re.search(rf"{lost}; stopping the workers", agents[1].said)
    for agent in (agents[1], *spare):
        assert re.search(r"attempt 2 of 1: 2 nodes \(.*h3.*\), 4 workers", agent.said)
        assert "attempt 2 of 1 has succeeded" in agent.said


def test_a_host_that_comes_takes_part(job: Callable[..., EtcdJob]) -> None:
    one = job("2:3")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    agents += one.start(3)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents[:2]:
        assert "host h3 can take part, and takes part from now on; stopping the workers" in agent.said
    assert "the job runs on 2 nodes; this node takes part soon" in agents[2].said
    for agent in agents:
        assert re.search(r"attempt 2: 3 nodes \(\w+, \w+, h3\), 6 workers; this is node \d, with ranks", agent.said)
        assert "attempt 2 has succeeded" in agent.said


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
    for agent in agents:
        assert re.search(r"attempt 1 of 2 failed after \S+: rank 0 on host h\d, ValueError: bad batch", agent.said)
        assert "lost" not in agent.said


def test_leases_that_etcd_ends_by_mistake_cost_no_node(job: Callable[..., EtcdJob]) -> None:
    """As it does, before 3.5.13, when a leader goes on that was stopped for longer than their ttl: all, or some."""
    one = job("3")
    one.conf[0] = "lease_ttl=5"
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    for count in (1, 3):
        for lease in one.leases(3)[:count]:
            one.ask("kv/lease/revoke", json.dumps({"ID": lease}))
    one.fail(3, 0)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents:
        assert re.search(r"attempt 1 of 2 failed after \S+: rank 3 on host h\d, ValueError: bad batch", agent.said)
        assert not re.search("lost|answer", agent.said)


def test_an_etcd_that_comes_back_without_its_data_is_not_taken_for_the_jobs(job: Callable[..., EtcdJob]) -> None:
    """Also where others have written into it as often as was written before. The workers go on, and end."""
    one = job("3")
    agents = one.start(1, 2, 3, options=["--exit-barrier-timeout", "0.5"])
    everyone(agents, 0, 6)
    (member,) = one.etcd.members
    member.kill()
    member.wipe()
    one.etcd.start()
    one.ask("kv/put", '{"key": "eA=="}', times=200)
    for agent in agents:
        agent.wait_for(r"does not answer \(.*: it has lost what it held: it has not written .* at revision \d+\)")
        assert not re.search("stopping|answers again|lost:", agent.said.replace("it has lost what it held", ""))
    one.finish(*agents)


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
    for agent in agents:
        assert re.search(r"node \d is lost: its agent on host h2 is gone, or cut off; stopping the workers", agent.said)
        assert "attempt 3 has succeeded" in agent.said


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
