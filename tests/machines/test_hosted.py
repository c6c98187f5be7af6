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
from tests.support.jobs import BACKENDS, SECRET, UNKNOWN, WORKER, Job, everyone

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long


def test_a_worker_fails_and_all_start_again(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", "static")
    agents = one.start(3, 2, options=["--max-restarts", "1"])
    agents[0].wait_for("does not answer .*; it is tried again")
    agents += one.start(1, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
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


def test_the_host_of_the_store_is_lost(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", "static")
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


def test_workers_that_are_being_stopped_are_not_said_to_go_on(hosted_job: Callable[..., Job]) -> None:
    """They ignore SIGTERM, and the host of the store is lost meanwhile."""
    one = hosted_job("3", "c10d")
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


def test_a_host_that_is_cut_off_from_the_store_comes_back(hosted_job: Callable[..., Job]) -> None:
    """For less than its lease lasts, a host is not lost; for longer, it is, and has its part again when it is back."""
    one = hosted_job("3", "c10d")
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_agent_with_arguments_of_its_own_comes_back(hosted_job: Callable[..., Job], backend: str) -> None:
    one = hosted_job("2", backend)
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
    if backend == "static":
        assert sorted(agents[1].workers(1, 4)) == ["2", "3"]
    one.finish(*agents)
    for agent, rank in zip(agents, "01", strict=True):
        differ = "nodes of this job run train.py with different arguments; this one runs"
        assert len(re.findall(rf"{differ} \S+/train.py .* --node-rank {rank}\n", agent.said)) == 1


def test_the_host_of_the_store_decides_what_the_job_is(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", "c10d")
    (other,) = one.start(2, options=["--max-restarts", "3"])
    other.wait_for("does not answer .*; it is tried again")
    agents = one.start(1, options=["--max-restarts", "1"])
    assert other.end() == 1
    assert "not taken: the job has --max-restarts 1, and this node was told --max-restarts 3" in other.said
    agents += one.start(2, options=["--max-restarts", "1"])
    everyone(agents, 0, 4)
    one.finish(*agents)


def test_a_worker_that_alone_is_sent_sigterm_has_failed(hosted_job: Callable[..., Job]) -> None:
    """Another host hears of it, though not at once: the agent itself could have been sent the signal, too."""
    one = hosted_job("2", "static")
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
def test_a_run_at_the_store_of_a_stopped_one_is_the_next(hosted_job: Callable[..., Job], backend: str) -> None:
    one = hosted_job("2", backend)
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
