"""How nodes end: by SIGTERM, after a success, with their agents killed or stopped; and what their exit codes say."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.helpers import alive, descendants, wait_gone
from tests.support.jobs import TTL, UNKNOWN, Agent, EtcdJob, Job, at, everyone, together

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long

LEAVES = "SIGTERM: this node leaves the job"
HEAD = "10.77.0.2"
DEAF = """
import os, signal, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("worker", rank, os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"], "-", "attempt", attempt, flush=True)
while not os.path.exists(sys.argv[1]):
    if os.path.exists(f"{sys.argv[1]}.fail.{rank}.{attempt}"):
        sys.exit(7)
    time.sleep(0.05)
"""
"""Workers that SIGTERM does not end, and that fail with 7."""

NOTICED = """
import os, signal, sys, time
def save(*_):
    time.sleep(1)  # a SIGTERM would end it here
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
print("worker", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"], "-", "attempt",
      os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
"""Workers that save when they have notice, and end."""

UNEVEN = """
import os, sys, time
rank = os.environ["RANK"]
print("worker", rank, os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"], "-", "attempt",
      os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not os.path.exists(sys.argv[1]) and not os.path.exists(f"{sys.argv[1]}.{os.uname().nodename}"):
    time.sleep(0.05)
"""
"""Workers that end by host."""


def terminate(agent: Agent) -> None:
    os.kill(agent.launcher(), signal.SIGTERM)


def kill(*agents: Agent) -> None:
    for agent in agents:
        os.kill(agent.launcher(), signal.SIGKILL)
        agent.process.wait()


def runs(one: Job, script: str) -> None:
    """Have the workers run another script."""
    (one.folder / "train.py").write_text(script)


def cmdline(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def workers_of(agent: Agent) -> list[int]:
    """The pids of the workers alone: without their keeper."""
    return [pid for pid in descendants(agent.launcher()) if b"train.py" in cmdline(pid)]


# --- SIGTERM to one node


def test_sigterm_takes_a_node_out_of_a_job_of_a_range(any_job: Callable[..., Job]) -> None:
    one = any_job("1:3")
    one.conf[1] = "last_call_timeout=20"
    agents = one.start(2, 1, 3)
    everyone(agents, 0, 6)
    terminate(agents[1])
    assert agents[1].end() == 128 + signal.SIGTERM
    assert LEAVES in agents[1].said
    assert "this node has left the job: SIGTERM" in agents[1].said
    everyone([agents[0], agents[2]], 1, 4)
    agents[0].wait_for("host h1 leaves: SIGTERM; stopping the workers")
    one.finish(agents[0], agents[2])


def test_the_workers_of_a_node_that_leaves_have_their_notice(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("1:2", at("c10d", HEAD))
    one.conf[1] = "last_call_timeout=20"
    runs(one, NOTICED)
    agents = one.start(2, 1, options=["--notice", "USR1:30"])
    everyone(agents, 0, 4)
    terminate(agents[1])
    assert agents[1].end() == 128 + signal.SIGTERM
    agents[1].wait_for("saved", 2)
    everyone(agents[:1], 1, 2)
    one.finish(agents[0])


def test_sigterm_stops_all_where_that_is_wanted_and_at_the_store(any_job: Callable[..., Job]) -> None:
    one = any_job("1:2")
    one.conf[1] = "last_call_timeout=20"
    agents = one.start(2, 1, options=["--on-sigterm", "stop"])
    everyone(agents, 0, 4)
    terminate(agents[1])
    assert [agent.end() for agent in agents] == [128 + signal.SIGTERM] * 2
    assert "SIGTERM on host h1" in agents[0].said
    if not isinstance(one, EtcdJob):  # the store's host takes it with it
        agents = one.start(2, 1)
        everyone(agents, 0, 4)
        terminate(agents[0])
        assert [agent.end() for agent in agents] == [128 + signal.SIGTERM] * 2


# --- a signal once the end is known


def test_signals_at_the_end_lose_neither_the_report_nor_the_code(job: Callable[..., Job]) -> None:
    one = job("3")
    runs(one, DEAF)
    agents = one.start(2, 1, 3, options=["--grace", "1"])
    everyone(agents, 0, 6)
    one.fail(3, 0)
    for agent in agents:
        agent.wait_for("rank 3 on host .*; stopping the workers|exit code 7")
    while any(agent.process.poll() is None for agent in agents):
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.send_signal(signal.SIGINT)
        time.sleep(0.35)  # those within 0.3 s are one request
    assert [agent.end() for agent in agents] == [7, 7, 7]
    for agent in agents:
        assert "exitcode  : 7" in agent.report, agent.said


# --- success, and the loss of machines


def test_a_machine_that_dies_after_success_costs_nothing(job: Callable[..., Job]) -> None:
    one = job("3")
    runs(one, UNEVEN)
    agents = one.start(2, 1, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    workers = descendants(agents[2].launcher())
    (one.folder / "end.h3").touch()
    assert not wait_gone(workers)
    time.sleep(0.5)  # for what its agent writes then
    kill(agents[2])
    time.sleep(2.5 * TTL)  # its lease has ended
    assert not any("lost" in agent.said for agent in agents)
    one.finish(*agents[:2])
    assert [agent.last(6)[0] for agent in agents[:2]] == [0, 0]


# --- contact was lost


def test_a_node_stopped_beyond_its_lease_learns_of_the_end(any_job: Callable[..., Job]) -> None:
    one = any_job("3")
    agents = one.start(2, 1, 3)
    everyone(agents, 0, 6)
    os.kill(agents[2].launcher(), signal.SIGSTOP)
    assert agents[1].end() == 1
    os.kill(agents[2].launcher(), signal.SIGCONT)
    assert agents[0].end() == 1
    code = agents[2].end()
    known = code == 1 and re.search(r"Error: node \d is lost", agents[2].said)
    unknown = code == UNKNOWN and "Error: how the job ends is not known here: " in agents[2].said
    assert known or (unknown and isinstance(one, EtcdJob)), (code, agents[2].said)


def test_a_succeeded_node_without_its_store_exits_nonzero(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", HEAD))
    one.conf.append("away_timeout=1")
    runs(one, UNEVEN)
    agents = one.start(2, 1)
    everyone(agents, 0, 4)
    workers = descendants(agents[1].launcher())
    (one.folder / "end.h1").touch()
    assert not wait_gone(workers)
    kill(agents[0])
    assert agents[1].end() == UNKNOWN
    assert "how the job ends is not known here: its store has not answered for 1.0s" in agents[1].said


def test_a_worker_keeps_its_code_when_its_agent_is_killed(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", HEAD))
    runs(one, DEAF)
    agents = one.start(2, 1)
    everyone(agents, 0, 4)
    rank = agents[1].last(4)[1][0]
    one.fail(rank, 0)
    agents[0].wait_for(f"rank {rank} on host h1, exit code 7; stopping the workers")
    kill(agents[1])
    assert agents[0].end() == 7
    assert f"rank      : {rank}" in agents[0].report
    assert "exitcode  : 7" in agents[0].report
    assert "its agent has ended before it could tell more" in agents[0].report


# --- a store that is started again


def test_waiting_nodes_go_on_with_a_restarted_store(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", at("c10d", HEAD))
    agents = one.start(2, 1)
    agents[1].wait_for("2 of 3 nodes have come")
    kill(agents[0])
    agents[1].wait_for("does not answer")
    again = [*one.start(2), agents[1]]
    again[0].wait_for("2 of 3 nodes have come")
    again += one.start(3)
    everyone(again, 0, 6)
    one.finish(*again)


def test_workers_end_with_a_store_that_is_started_again(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", HEAD))
    agents = one.start(2, 1)
    everyone(agents, 0, 4)
    workers = descendants(agents[1].launcher())
    kill(agents[0])
    again = one.start(2)
    assert agents[1].end() == UNKNOWN
    why = "its store was started again, and knows nothing of it"
    assert f"Error: how the job ends is not known here: {why}" in agents[1].said
    assert not wait_gone(workers)
    again += one.start(1)
    everyone(again, 0, 4)
    one.finish(*again)


# --- what is left of an earlier launcher


def test_no_attempt_begins_while_workers_have_the_orphan_grace(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", HEAD))
    runs(one, DEAF)
    options = ["--orphan-grace", "6", "--max-restarts", "2"]
    agents = one.start(2, 1, options=options)
    everyone(agents, 0, 4)
    old = workers_of(agents[1])
    assert old
    kill(agents[1])
    again = [agents[0], *one.start(1, options=options)]
    together(again, 4, 0)
    assert not [pid for pid in old if alive(pid)]
    one.finish(*again)


def test_the_workers_of_an_agent_that_is_stopped_end_in_time(job: Callable[..., Job]) -> None:
    one = job("2:3")
    one.conf[1] = "last_call_timeout=20"
    one.conf.append("away_timeout=3")
    agents = one.start(2, 1, 3)
    everyone(agents, 0, 6)
    workers = workers_of(agents[2])
    assert len(workers) == 2
    os.kill(agents[2].launcher(), signal.SIGSTOP)
    everyone(agents[:2], 1, 4)
    assert not wait_gone(workers)
    os.kill(agents[2].launcher(), signal.SIGCONT)
    together(agents, 6, 1)
    one.finish(*agents)


def test_a_host_cut_off_from_etcd_ends_its_workers_in_time(job: Callable[..., EtcdJob]) -> None:
    one = job("2:3")
    one.conf[1] = "last_call_timeout=20"
    one.conf.append("away_timeout=3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    workers = workers_of(agents[2])
    one.hosts.cut(3)
    everyone(agents[:2], 1, 4)
    assert agents[2].end() == UNKNOWN, agents[2].said
    assert not wait_gone(workers)
    assert "how the job ends is not known here: its store has not answered for 3.0s" in agents[2].said
    one.finish(*agents[:2])


# --- the next job of the same id


def test_a_killed_job_is_over_for_the_next_of_its_id(job: Callable[..., EtcdJob]) -> None:
    """Though that has another number of nodes; and its attempts and restarts begin anew."""
    one = job("3")
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    one.fail(3, 0)
    everyone(agents, 1, 6)
    kill(*agents)
    one.nodes = "2"
    (one.folder / "end.fail.3.0").unlink()
    again = one.start(1, 2, options=["--max-restarts", "1"])
    everyone(again, 0, 4)
    one.fail(2, 0)
    everyone(again, 1, 4)
    one.finish(*again)


def test_a_run_that_begins_beside_a_stopped_one_is_the_next(job: Callable[..., EtcdJob]) -> None:
    one = job("2")
    runs(one, DEAF)
    agents = one.start(1, 2, options=["--grace", "4"])
    everyone(agents, 0, 4)
    os.kill(agents[0].launcher(), signal.SIGINT)
    agents[1].wait_for("SIGINT on host h1; stopping the workers")
    one.nodes = "1:2"
    again = one.start(3)
    assert [agent.end() for agent in agents] == [128 + signal.SIGINT] * 2
    everyone(again, 0, 2)
    one.finish(*again)
