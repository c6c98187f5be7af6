"""`--preload` on several hosts: a spare has imported before it takes over, and an import holds nobody up."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from tests.support.helpers import alive
from tests.support.jobs import SOON, Agent, EtcdJob, everyone

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long

MODULE = """
import os, time
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
print("the import finds", *(name for name in names if name in os.environ), flush=True)
while not os.path.exists(os.environ.get("GATE", "/")):
    time.sleep(0.01)
if "BROKEN" in os.environ:
    raise ValueError("no such device")
PID = os.getpid()
"""
FORK = """
import os, slowly
print("fork", os.environ["RANK"], os.getpid() != slowly.PID, "of", slowly.PID, flush=True)
"""


class Preloads:
    """A job whose agents preload a module, which takes as long as the test wants, or cannot be imported."""

    def __init__(self, job: EtcdJob) -> None:
        self.job = job
        self.gate = job.folder / "gate"
        (job.folder / "slowly.py").write_text(MODULE)
        script = job.folder / "train.py"
        script.write_text(FORK + script.read_text())

    def start(self, number: int, *options: str, **env: str) -> Agent:
        """Start an agent. ``env``: of its environment."""
        imported = str(self.job.folder / f"imported{len(self.job.agents)}")
        return self.job.start(number, options=["--preload", "slowly", *options], IMPORTED=imported, **env)[0]

    def pids(self, agent: Agent) -> list[int]:
        """Wait until an agent has begun to import; return the processes that have."""
        path = self.job.folder / f"imported{self.job.agents.index(agent)}"
        until = time.monotonic() + SOON
        while not (path.exists() and path.read_text().endswith("\n")):
            assert time.monotonic() < until, agent.said
            time.sleep(0.02)
        return [int(line) for line in path.read_text().split()]


def test_a_spare_that_cannot_import_leaves_the_job(job: Callable[..., EtcdJob]) -> None:
    preloads = Preloads(job("2"))
    agents = [preloads.start(number) for number in (1, 2)]
    everyone(agents, 0, 4)
    broken = preloads.start(3, "--rdzv-conf", "lease_ttl=2", BROKEN="")
    assert broken.end() == 1
    assert "Error: preload: 'slowly' could not be imported\n" in broken.said
    assert 'slowly.py", line 10, in <module>\n' in broken.said
    assert "Error: this node has left the job: preload: 'slowly' could not be imported\n" in broken.said
    hangs = preloads.start(3, "--rdzv-conf", "lease_ttl=2,join_timeout=1", GATE=str(preloads.gate))
    assert hangs.end() == 1
    assert "Error: this node has left the job: preload: 'slowly' is not imported after 1.0s\n" in hangs.said
    stopped = preloads.start(3, GATE=str(preloads.gate))
    stopped.wait_for("this node is a spare, and imports slowly\n")
    preloads.pids(stopped)
    os.kill(stopped.launcher(), signal.SIGINT)
    assert [agent.end() for agent in (*agents, stopped)] == [130, 130, 130]
    assert "the job was stopped: SIGINT on host h3" in agents[0].said
    assert not any(alive(pid) for agent in preloads.job.agents for pid in preloads.pids(agent))


def test_a_node_that_imports_late_hears_and_reports_failures(job: Callable[..., EtcdJob]) -> None:
    preloads = Preloads(job("2"))
    first = preloads.start(1, "--max-restarts", "1")
    second = preloads.start(2, "--max-restarts", "1", GATE=str(preloads.gate), BROKEN="")
    for attempt in (0, 1):
        rank, _ = first.workers(attempt, 4)
        second.wait_for("2 nodes", attempt + 1)
        if attempt:
            preloads.gate.touch()
        else:
            preloads.job.fail(int(rank), 0)
    assert [first.end(), second.end()] == [1, 1]
    for agent in (first, second):
        assert "host h2, preload: 'slowly' could not be imported" in agent.said
    assert re.search(r"FAILED\n-+\n  cause     : host h2, preload: 'slowly' could not be imported.*\n", first.report)
    assert re.search(r"Earlier Attempts:\n  attempt .*, ValueError: bad batch of rank \d\n", first.report)
    assert len(preloads.pids(second)) == 1
