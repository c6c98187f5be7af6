"""Jobs whose store one of their agents has: ranks given by hand (static), and machines numbered as they come (c10d)."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.helpers import alive, descendants, wait_gone
from tests.support.jobs import UNKNOWN, WORKER, Job, ending, everyone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.hosts import Hosts

pytestmark = pytest.mark.long

SECRET = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of the tests
BACKENDS = ["static", "c10d"]
PORTS = {"static": 29501, "c10d": 29400}
"""Where the agent of host 1 listens."""


@pytest.fixture
def job(tmp_path: Path, hosts: Hosts) -> Iterator[Callable[..., Job]]:
    """Makes a job of so many nodes, whose first host has the store."""

    def make(backend: str, nodes: str) -> Job:
        first = hosts.address(1)
        meeting = {
            "static": lambda number: ["--node-rank", f"{number - 1}", "--master-addr", first, "--master-port", "29500"],
            "c10d": lambda _: ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORTS['c10d']}"],
        }
        made.append(Job(tmp_path, hosts, nodes, meeting[backend]))
        made[-1].env = {"PHALANX_JOB_SECRET": SECRET}
        return made[-1]

    with ending(hosts) as made:
        yield make


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_fails_and_all_start_again(job: Callable[..., Job], backend: str) -> None:
    one = job(backend, "3")
    agents = one.start(3, 2, options=["--max-restarts", "1"])
    agents[0].wait_for("does not answer .*; it is tried again")
    agents += one.start(1, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    if backend == "static":
        assert [sorted(agent.workers(0, 6)) for agent in agents] == [["4", "5"], ["2", "3"], ["0", "1"]]
    one.fail(3, 0)
    everyone(agents, 1, 6)
    below = [pid for agent in agents for pid in descendants(agent.process.pid)]
    one.finish(*agents)
    for agent in agents:
        early = r"rank 3 on host h\d, (?:exit code 1|ValueError: .*); stopping the workers"
        assert len(re.findall(early, agent.said)) == 1
        assert re.search(r"attempt 0 failed after \S+: rank 3 on host h\d, ValueError: bad batch", agent.said)
        assert re.search(r"SUCCEEDED\n(.*\n)+Earlier Attempts:\n.*: rank 3 on host h\d, ValueError: bad", agent.report)
        (job_file,) = agent.home.glob("phalanx/runs/*/job.toml")
        assert "\n# left out, a secret: PHALANX_JOB_SECRET\n" in job_file.read_text()
        assert SECRET not in job_file.read_text()
    assert not any(map(alive, below))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_of_the_store_is_lost(job: Callable[..., Job], backend: str) -> None:
    one = job(backend, "3")
    one.conf.append("away_timeout=1")
    agents = one.start(1, 2, 3, options=["--max-restarts", "3"])
    everyone(agents, 0, 6)
    workers = {pid for agent in agents for pid in descendants(agent.launcher())}
    os.kill(agents[0].launcher(), signal.SIGKILL)
    agents[0].process.wait()
    for agent in agents[1:]:
        assert agent.end() == UNKNOWN
        assert re.search(r"does not answer \(.*\); the workers go on, it is tried again", agent.said)
        why = "its store has not answered for 1.0s"
        assert f"host h{agent.number} leaves: {why}; stopping the workers" in agent.said
        assert f"Error: how the job ends is not known here: {why}" in agent.said
    assert not wait_gone(workers)


def test_attempts_that_ended_alike_share_a_line(job: Callable[..., Job]) -> None:
    one = job("static", "2")
    for attempt in range(4):
        one.fail(3, attempt)
    agents = one.start(1, 2, options=["--max-restarts", "3"])
    assert [agent.end() for agent in agents] == [1, 1]
    line = (
        r"Earlier Attempts:\n  attempts 0 to 2, after \S+( to \S+)?: rank 3 on host h2, ValueError: bad batch of .*\n"
    )
    for agent in agents:
        assert re.search(f"{line}  gave up", agent.report), agent.report
        assert re.search(line, agent.said), agent.said


def test_workers_that_are_being_stopped_are_not_said_to_go_on(job: Callable[..., Job]) -> None:
    """They ignore SIGTERM, and the host of the store is lost meanwhile."""
    one = job("c10d", "3")
    one.conf.append("away_timeout=1")
    script = Path(one.command[0])
    script.write_text(f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{script.read_text()}")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    one.fail(int(agents[1].workers(0, 6)[0]), 0)
    agents[2].wait_for("; stopping the workers")
    os.kill(agents[0].launcher(), signal.SIGKILL)
    for agent in agents[1:]:
        agent.wait_for("does not answer .*; it is tried again")
        assert "the workers go on" not in agent.said
        assert agent.end() in (1, UNKNOWN)  # that whose worker has failed reports it


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_host_that_is_cut_off_from_the_store_comes_back(job: Callable[..., Job], backend: str) -> None:
    """For less than its lease lasts, a host is not lost; for longer, it is, and has its part again when it is back."""
    one = job(backend, "3")
    one.conf[0] = "lease_ttl=6"
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    one.hosts.silence(2)
    one.hosts.cut(3)
    time.sleep(2.0)  # how long it lasts is what this is about
    for number in (2, 3):
        one.hosts.heal(number)
    agents[2].wait_for("answers again|nodes \\(")
    assert not any("lost" in agent.said for agent in agents)
    one.hosts.silence(2)
    agents[0].wait_for("node \\d is lost: its agent on host h2 is gone, or cut off; stopping the workers")
    agents[1].wait_for("does not answer .*; the workers go on")
    one.hosts.heal(2)
    everyone(agents, 1, 6)
    one.finish(*agents)


def test_an_agent_that_comes_back_has_its_rank_again(job: Callable[..., Job]) -> None:
    one = job("static", "3")
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    os.kill(agents[1].launcher(), signal.SIGKILL)
    agents[1].process.wait()
    agents[0].wait_for("node 1 is lost: its agent on host h2 is gone, or cut off; stopping the workers")
    agents[1] = one.start(2, options=["--max-restarts", "1"])[0]
    everyone(agents, 1, 6)
    assert sorted(agents[1].workers(1, 6)) == ["2", "3"]
    one.finish(*agents)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_agent_with_arguments_of_its_own_comes_back(job: Callable[..., Job], backend: str) -> None:
    one = job(backend, "2")
    shared, budget = one.command, ("--max-restarts", "1")
    one.command = [*shared, "--node-rank", "0"]
    agents = one.start(1, options=budget)
    one.command = [*shared, "--node-rank", "1"]
    agents += one.start(2, options=budget)
    everyone(agents, 0, 4)
    os.kill(agents[1].launcher(), signal.SIGKILL)
    agents[1].process.wait()
    agents[0].wait_for("is lost: its agent on host h2 is gone, or cut off; stopping the workers")
    agents[1] = one.start(2, options=budget)[0]
    everyone(agents, 1, 4)
    one.finish(*agents)
    for agent, rank in zip(agents, "01", strict=True):
        differ = "nodes of this job run train.py with different arguments; this one runs"
        assert len(re.findall(rf"{differ} \S+/train.py .* --node-rank {rank}\n", agent.said)) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_of_the_store_decides_what_the_job_is(job: Callable[..., Job], backend: str) -> None:
    one = job(backend, "2")
    (other,) = one.start(2, options=["--max-restarts", "3"])
    other.wait_for("does not answer .*; it is tried again")
    agents = one.start(1, options=["--max-restarts", "1"])
    assert other.end() == 1
    assert "not taken: the job has --max-restarts 1, and this node was told --max-restarts 3" in other.said
    agents += one.start(2, options=["--max-restarts", "1"])
    everyone(agents, 0, 4)
    one.finish(*agents)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_on_one_host_stops_the_job_on_all(job: Callable[..., Job], backend: str) -> None:
    one = job(backend, "2")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    os.kill(agents[0].launcher(), signal.SIGINT)
    assert [agent.end() for agent in agents] == [130, 130]
    for agent in agents:
        assert "the job was stopped: SIGINT on host h1" in agent.said
        assert re.search(r"STOPPED\n-+\n  cause     : SIGINT on host h1\n", agent.report)


def test_a_worker_that_alone_is_sent_sigterm_has_failed(job: Callable[..., Job]) -> None:
    """Another host hears of it, though not at once: the agent itself could have been sent the signal, too."""
    one = job("static", "2")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    script = one.command[0].encode()
    workers = [pid for pid in descendants(agents[1].launcher()) if script in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(min(workers), signal.SIGTERM)
    assert [agent.end() for agent in agents] == [143, 143]
    for agent in agents:
        assert re.search(r"Root Cause.*\n.*\n +host +: h2\n +rank +: [23] ", agent.said), agent.said
        assert "ranks 0-1" in agent.said
        assert "stopped by us (SIGTERM)" in agent.said
        assert agent.said.partition("phalanx: page: ")[0].endswith(agent.report)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_at_the_store_of_a_stopped_one_is_the_next(job: Callable[..., Job], backend: str) -> None:
    one = job(backend, "2")
    (one.folder / "train.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WORKER)
    agents = one.start(1, 2, options=["--grace", "3"])
    everyone(agents, 0, 4)
    os.kill(agents[0].launcher(), signal.SIGINT)
    agents[1].wait_for("SIGINT on host h1; stopping the workers")
    again = one.start(1, 2)
    again[0].wait_for("is in use on this machine by an earlier run of this id, which ends; it is tried again")
    assert [agent.end() for agent in agents] == [128 + signal.SIGINT] * 2
    everyone(again, 0, 4)
    one.finish(*again)
