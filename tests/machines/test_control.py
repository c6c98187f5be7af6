"""`phalanx signal`, `pause`, `resume`, `restart` and `stop` on one host of a job: what becomes of all hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import until
from tests.support.helpers import descendants
from tests.support.jobs import SOON, Agent, Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.long

WORKER = """
import os, signal, sys
rank = os.environ["RANK"]
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"got it\\n"))
if sys.argv[1] == "stays":
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"stays\\n"))
os.write(1, b"there in attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"].encode() + b"\\n")
while True:
    signal.pause()
"""

WHO = r"user \w+, pid \d+"


@pytest.fixture
def job(tmp_path: Path, hosted_job: Callable[..., Job]) -> Job:
    one = hosted_job("3", "static")
    one.conf.append("lease_ttl=30")  # an agent that is stopped is not lost
    (tmp_path / "train.py").write_text(WORKER)
    return one


def started(job: Job, *options: str) -> list[Agent]:
    agents = job.start(1, 2, 3, options=options)
    for agent in agents:
        agent.wait_for("there in attempt 0", 2)
    return agents


def phalanx(job: Job, number: int, *words: str) -> tuple[int, str, str]:
    """What a command on a host exits with, and what it writes."""
    home = str(job.folder / f"home{number}")
    env = {**os.environ, "HOME": home, "XDG_STATE_HOME": home}
    command = [*job.hosts.on(number), sys.executable, "-m", "phalanx", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=SOON, cwd=job.folder)
    return done.returncode, done.stdout, done.stderr


def count_stopped(agents: list[Agent]) -> int:
    """How many processes of agents are stopped."""
    count = 0
    for pid in {pid for agent in agents for pid in descendants(agent.process.pid)}:
        with open(f"/proc/{pid}/stat") as stat:
            count += stat.read().rpartition(")")[2].split()[0] == "T"
    return count


def test_one_host_reaches_the_ranks_of_all(job: Job) -> None:
    agents = started(job)
    code, out, err = phalanx(job, 3, "signal", "USR1", "--rank", "0,3")
    assert (code, out.split(": ")[1], err) == (0, "SIGUSR1 to ranks 0, 3\n", "")
    for agent, rank in zip(agents, ("rank 0", "rank 3", ""), strict=True):
        if rank:
            agent.wait_for(rf"phalanx signal \({WHO}, host h3\): SIGUSR1 to {rank}\n")
            agent.wait_for("got it\n")
    assert phalanx(job, 1, "signal", "USR1", "--rank", "5,6")[0] == 1
    agents[2].wait_for("got it\n")

    assert phalanx(job, 2, "pause")[1].endswith(": 6 workers paused; phalanx resume continues\n")
    for agent in agents:
        agent.wait_for(rf"phalanx pause \({WHO}, host h2\): the workers are paused until phalanx resume\n")
    until(lambda: count_stopped(agents) == 6)
    assert phalanx(job, 1, "resume")[1].endswith(": 6 workers continued\n")
    until(lambda: count_stopped(agents) == 0)
    assert [agent.said.count("got it") for agent in agents] == [1, 1, 1]  # each was signalled once

    os.kill(agents[1].launcher(), signal.SIGSTOP)
    code, out, err = phalanx(job, 1, "signal", "USR1")
    os.kill(agents[1].launcher(), signal.SIGCONT)
    assert phalanx(job, 3, "signal", "USR1", "--rank", "2")[0] == 0
    agents[1].wait_for(rf"phalanx signal \({WHO}, host h3\): SIGUSR1 to rank 2\n")
    assert "SIGUSR1 to ranks 2-3" not in agents[1].said  # nobody has waited for that any more
    assert (code, out.split(": ")[1]) == (0, "SIGUSR1 to ranks 0-1, 4-5\n")
    assert err == "phalanx: host h2: its agent has not answered within 5.0s\n"


def test_one_host_restarts_and_stops_the_job(job: Job) -> None:
    agents = started(job, "--max-restarts", "0")
    assert phalanx(job, 3, "restart")[0] == 0
    for agent in agents:
        agent.wait_for("there in attempt 1", 2)
        agent.wait_for(rf"attempt 0 ended after \S+: phalanx restart \({WHO}\), on host h3; attempt 1")
    code, out, _ = phalanx(job, 2, "stop")
    assert code == 0
    assert re.fullmatch(rf"\S+: stopped: phalanx stop \({WHO}\) on host h2\n", out)
    assert [agent.end() for agent in agents] == [143] * 3
    for agent in agents:
        assert re.search(rf"the job was stopped: phalanx stop \({WHO}\) on host h2\n", agent.said)


def test_one_host_kills_the_job(job: Job) -> None:
    job.command[1:] = ["stays"]
    agents = started(job, "--grace", "600")
    assert phalanx(job, 3, "stop", "--now")[0] == 0
    assert [agent.end() for agent in agents] == [137] * 3
    for agent in agents:
        assert re.search(rf"the job was stopped: phalanx stop \({WHO}\) on host h3\n", agent.said)


def test_one_host_shows_the_ranks_of_all(job: Job) -> None:
    agents = started(job)
    code, out, err = phalanx(job, 2, "status")
    _, where, _, heads, *rows = out.splitlines()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"6 ranks on h1, h2, h3, launcher \d+: \S+train.py", where)
    assert heads.split()[:4] == ["RANK", "HOST", "PID", "STATE"]
    shown = [(rank, host, state) for rank, host, _, state, *_ in map(str.split, rows)]
    assert shown == [(str(rank), f"h{rank // 2 + 1}", "running") for rank in range(6)]
    os.kill(agents[1].launcher(), signal.SIGSTOP)
    code, out, err = phalanx(job, 1, "status")
    os.kill(agents[1].launcher(), signal.SIGCONT)
    *rows, last = out.splitlines()[4:]
    assert (code, [row.split()[0] for row in rows], err) == (0, ["0", "1", "4", "5"], "")
    assert last == "host h2: its agent has not answered within 5.0s"


def test_a_terminal_of_another_host_is_attached_to_there(job: Job) -> None:
    agents = started(job, "--pty", "1-3")
    assert "rank 2 runs on h2: attach to it there" in phalanx(job, 1, "attach", "--rank", "2")[2]
    (log,) = (job.folder / "home1").glob("**/attempt_0/1/stdout.log")
    assert log.read_bytes() == b"there in attempt 0\r\n"
    (log,) = (job.folder / "home3").glob("**/attempt_0/0/stdout.log")
    assert log.read_bytes() == b"there in attempt 0\n"
    assert phalanx(job, 1, "stop", "--now")[0] == 0
    assert [agent.end() for agent in agents] == [137] * 3


STEPS = """
import os, time
from phalanx import timer
rank = int(os.environ["RANK"])
os.write(1, b"there in attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"].encode() + b"\\n")
for step in range(1, 10_000):
    time.sleep(0.4 if rank == 5 else 0.2)
    timer.progress(step)
"""


def metrics(job: Job, number: int) -> str:
    """What a host's agent has for Prometheus."""
    code = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
    command = [*job.hosts.on(number), sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SOON).stdout


def test_a_rank_of_another_host_that_is_slow_is_named_once(job: Job) -> None:
    """By the agent of the first node, which has asked all: of two ranks of a host, nobody can say which one is slow."""
    (job.folder / "train.py").write_text(STEPS)
    job.env["PHALANX_METRICS_PORT"] = "127.0.0.1:9100"
    agents = started(job)
    agents[0].wait_for("is slow", seconds=2 * SOON)
    (line,) = re.findall(r"^phalanx: (.*slow.*)$", agents[0].said, re.MULTILINE)
    assert re.fullmatch(r"rank 5 \(host .+\) is slow: (1\.[89]|2\.[012]) x the median step for 3\d s", line)
    _, out, _ = phalanx(job, 2, "status")
    assert [row.split()[0] for row in out.splitlines() if re.search(r"slow \d\.\dx", row)] == ["5"]
    assert [re.findall(r'^phalanx_rank_slow_ratio{rank="(.+)"} ', metrics(job, number), re.MULTILINE)
            for number in (1, 2, 3)] == [["5"], [], []]  # fmt: skip
    assert phalanx(job, 2, "restart")[0] == 0
    for agent in agents:
        agent.wait_for("there in attempt 1", 2)
    _, out, _ = phalanx(job, 2, "status")
    assert "slow" not in out  # nobody knows yet
    assert phalanx(job, 1, "stop")[0] == 0
    assert {agent.end() for agent in agents} == {128 + signal.SIGTERM}
    assert [agent.said.count("slow") for agent in agents] == [1, 0, 0]
