"""The same job by the command, by `elastic_launch` and by a `LocalElasticAgent`: reports, stacks, imports, spares."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.machines.test_stack import ask
from tests.support.jobs import SOON, Agent, Job, ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.hosts import Hosts

pytestmark = [pytest.mark.long, pytest.mark.slow]

SLOWLY = """
import os
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
print("the import finds", *(name for name in names if name in os.environ), flush=True)
PID = os.getpid()
if "BROKEN" in os.environ:
    raise ValueError("no such device")
"""

TRAIN = """
import os, sys, threading, time
from phalanx import timer

def read_batch():
    threading.Event().wait()

def all_reduce():
    threading.Event().wait()

def main(end):
    import slowly
    rank = os.environ["RANK"]
    print("worker", rank, os.environ["WORLD_SIZE"], "has what", slowly.PID, "imported", flush=True)
    while not os.path.exists(end):
        if os.path.exists(f"{end}.fail.{rank}"):
            raise ValueError(f"bad batch of rank {rank}")
        if os.path.exists(f"{end}.hang"):
            with timer.expires(after=1 if rank == "3" else 600, scope="step"):
                read_batch() if rank == "3" else all_reduce()
        time.sleep(0.05)

if __name__ == "__main__":
    main(sys.argv[1])
"""

PROGRAM = """
import sys
import train
from phalanx.agent import LocalElasticAgent, WorkerSpec
from phalanx.launcher import LaunchConfig, elastic_launch
from phalanx.multiprocessing import DefaultLogsSpecs, Std, warm
from phalanx.rendezvous import RendezvousParameters, rendezvous_handler_registry
from phalanx.timer import TimerSpecs

face, where, is_host, nodes, end, folder = sys.argv[1:]
if __name__ == "__main__":
    nodes, logs = int(nodes), DefaultLogsSpecs(folder, tee=Std.ALL)
    conf = {"lease_ttl": 2, "join_timeout": 60, "last_call_timeout": 1, "insecure": True, "is_host": is_host}
    if face == "elastic_launch":
        config = LaunchConfig(
            nodes, nodes, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint=where, rdzv_configs=conf,
            logs_specs=logs, max_restarts=0, shutdown_timeout=5, start_method="forkserver",
        )
        with warm(preload=["slowly"]):
            elastic_launch(config, train.main)(end)
    else:
        handler = rendezvous_handler_registry.create_handler(
            RendezvousParameters("c10d", where, "job", nodes, nodes, **conf)
        )
        spec = WorkerSpec("default", 2, handler, entrypoint=train.main, args=(end,), max_restarts=0)
        agent = LocalElasticAgent(
            spec, logs, "forkserver", timers=TimerSpecs(), preload=["slowly"], shutdown_timeout=5
        )
        try:
            result = agent.run()
        finally:
            handler.shutdown()
        sys.exit(result.is_failed())
"""

FACES = ("phalanx run", "elastic_launch", "LocalElasticAgent")


class FacedJob(Job):
    """A job of so many hosts, which one of `FACES` starts; what its workers need is imported before."""

    def __init__(self, folder: Path, hosts: Hosts, face: str, nodes: int) -> None:
        where = f"{hosts.address(1)}:29500"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--run-id", "job", "--insecure"]
        super().__init__(folder, hosts, str(nodes), lambda _: meeting)
        for name, text in (("slowly", SLOWLY), ("train", TRAIN), ("program", PROGRAM)):
            (folder / f"{name}.py").write_text(text)
        if face != "phalanx run":
            self.program = lambda number: [
                str(folder / "program.py"), face, where, str(number == 1), str(nodes), str(self.end),
                str(folder / f"home{number}" / "phalanx" / "runs"),
            ]  # fmt: skip

    def begin(self, number: int, **env: str) -> Agent:
        """Start the agent of a host. ``env``: of its environment."""
        imported = str(self.folder / f"imported{number}")
        return self.start(number, options=["--preload", "slowly"], IMPORTED=imported, **env)[0]

    def importer(self, number: int) -> int:
        """Wait until a process has imported for the workers of a host, and return which."""
        path, until = self.folder / f"imported{number}", time.monotonic() + SOON
        while not (path.exists() and path.read_text().endswith("\n")):
            assert time.monotonic() < until
            time.sleep(0.02)
        (pid,) = path.read_text().split()
        return int(pid)


@pytest.fixture(params=FACES)
def faced(request: pytest.FixtureRequest, tmp_path: Path, hosts: Hosts) -> Iterator[Callable[[int], FacedJob]]:
    """Makes a job of so many hosts, for each face."""
    with ending(hosts) as made:

        def make(nodes: int) -> FacedJob:
            made.append(job := FacedJob(tmp_path, hosts, request.param, nodes))
            return job

        yield make


def started(job: FacedJob) -> list[Agent]:
    """Start three agents, and wait until their workers run."""
    agents = [job.begin(number) for number in (1, 2, 3)]
    for agent in agents:
        agent.wait_for(r"worker \d 6 has what \d+ imported", 2)
    return agents


def reports(agents: list[Agent]) -> set[str]:
    """What agents have written into their reports, below what was run, and what their consoles show of it.

    The console of a `LocalElasticAgent` that returns the failure of its own workers is the business of who runs it.
    """
    found = {agent: agent.report.partition("Root Cause")[2] for agent in agents}
    shown = [agent for agent, report in found.items() if report in agent.said]
    assert len(shown) >= len(agents) - 1, [agent.said for agent in agents]
    return set(found.values())


def test_all_show_where_the_ranks_are_and_report_a_hang_alike(faced: Callable[[int], FacedJob]) -> None:
    job = faced(3)
    agents = started(job)
    ask(job, [1, 3], r"(?=.*\bh1\b)(?=.*\bh2\b)(?=.*\bh3\b)(?!.*no Python stack).*\bmain +/.*")
    (job.folder / "end.hang").touch()
    assert all(agent.end() for agent in agents)
    (report,) = reports(agents)
    host = re.findall(r"rank 3 on host (h\d) is in read_batch", report)
    assert re.findall(r" +host +: (h\d)\n +rank +: 3 \(local_rank: 1\)", report) == host
    assert f"5 of 6 ranks wait in all_reduce (train.py:9); rank 3 on host {host[0]} is in read_batch" in report
    assert "stopped by us (SIGTERM)" in report
    texts = [path.read_text() for path in job.folder.glob("home*/phalanx/runs/*/attempt_0/*/stacks-1.txt")]
    assert (len(texts), sum("in all_reduce" in text for text in texts)) == (6, 5)


def test_all_report_and_record_a_failure_alike(faced: Callable[[int], FacedJob]) -> None:
    job = faced(3)
    agents = started(job)
    (job.folder / "end.fail.3").touch()
    assert all(agent.end() for agent in agents)
    (report,) = reports(agents)
    assert re.search(r"rank +: 3 \(local_rank: 1\)\n +exitcode +: 1 .*(\n.*)+ValueError: bad batch of rank 3", report)
    assert "ranks 0-2, 4-5: stopped by us (SIGTERM)" in report
    for agent in agents:
        (path,) = agent.home.glob("phalanx/runs/*/run.json")
        run = json.loads(path.read_text())
        (attempt,) = run["attempts"]
        cause = "rank 3: ValueError: bad batch of rank 3"
        assert (run["state"], run["exit_code"], run["cause"]) == ("failed", 1, cause)
        assert (attempt["nodes"], len(attempt["ranks"])) == (3, 2)


def test_a_spare_imports_before_it_takes_over_or_leaves(faced: Callable[[int], FacedJob]) -> None:
    job = faced(2)
    agents = [job.begin(number) for number in (1, 2)]
    for agent in agents:
        agent.wait_for(r"worker \d 4 has what \d+ imported", 2)
    broken = job.begin(3, BROKEN="")
    assert broken.end() == 1
    assert "preload: 'slowly' could not be imported" in broken.said
    assert 'slowly.py", line 9, in <module>' in broken.said
    (job.folder / "imported3").unlink()
    spare = job.begin(3)
    importer = job.importer(3)
    assert "worker" not in spare.said
    if not job.program(3):
        spare.wait_for("this node has imported slowly\n")
        assert "the import finds LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID\n" in spare.said
    os.kill(agents[1].launcher(), signal.SIGKILL)
    agents[1].end()
    assert spare.wait_for(r"worker \d 4 has what (\d+) imported", 2) == [f"{importer}"] * 2
    agents[0].wait_for(rf"worker \d 4 has what {job.importer(1)} imported", 4)  # in both attempts
    job.finish(agents[0], spare)
    assert job.importer(3) == importer
