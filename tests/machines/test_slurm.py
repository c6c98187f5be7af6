"""`phalanx run` in a real Slurm of three nodes: what its steps tell, and the batch script of the page on schedulers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.project.test_docs import ROOT, blocks
from tests.support import hosts as hosts_of
from tests.support import slurm as slurm_of
from tests.support.etcd import program
from tests.support.hosts import Hosts
from tests.support.slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Self

pytestmark = pytest.mark.long

SOON = 60.0
"""Seconds that a job may take; spent only by a test that fails."""

FOUND = """
import os
from phalanx._run.scheduler import found
print(os.uname().nodename, *(found(os.environ) or ["alone"])[:6])
"""

TRAIN = """
import os, pathlib, phalanx, signal, sys, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # of a Slurm that sends signals to all processes of a step
signal.signal(signal.SIGTERM, signal.SIG_IGN)
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
saved = pathlib.Path("saved." + os.environ["RANK"])
if not saved.exists():
    print("begins", *(os.environ[name] for name in names), flush=True)
    while not phalanx.should_stop() and not saved.exists():
        time.sleep(0.02)
    saved.touch()
else:
    print("goes on", *(os.environ[name] for name in names), flush=True)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A Slurm of three nodes."""
    slurm_of.check()
    with Hosts(3) as hosts, Slurm(hosts, 3) as it:
        yield it


UNPREPARED = """
import os, time
print("begins", os.environ["WORLD_SIZE"], flush=True)
while True:
    time.sleep(60)
"""

ELASTIC = "--nnodes 2:3 --rdzv-backend c10d --rdzv-endpoint h1 --rdzv-conf lease_ttl=2,last_call_timeout=60"


class Batch:
    """The batch script of the page, in a folder of its own. A context manager: what is left of its job is cancelled.

    Args:
        folder: That folder.
        slurm: Where it is submitted.
        train: What the workers run.
        changes: What is put in place of what in the script.
    """

    def __init__(self, folder: Path, slurm: Slurm, train: str = TRAIN, changes: Mapping[str, str] = {}) -> None:
        self._folder, self._slurm = folder, slurm
        (script,) = (text for _, text in blocks(ROOT / "docs" / "schedulers.md", "bash") if "#SBATCH" in text)
        for old, new in {"--nproc-per-node 8 ": "--nproc-per-node 2 ", **changes}.items():
            assert old in script
            script = script.replace(old, new)
        (folder / "train.sh").write_text(script)
        (folder / "train.py").write_text(train)
        (folder / "bin").mkdir()
        (folder / "bin" / "phalanx").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m phalanx "$@"\n')
        (folder / "bin" / "phalanx").chmod(0o755)
        env = {
            **slurm.env, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
            "HOME": str(folder), "XDG_STATE_HOME": "",
        }  # fmt: skip
        command = [*slurm.on(1), "sbatch", "--parsable", "--output=job.out", f"--chdir={folder}", "train.sh"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=folder)
        self.job = done.stdout.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._slurm.command("scancel", "--full", "--signal=KILL", self.job)
        self.wait_until(lambda: self.state() not in ("RUNNING", "COMPLETING", "PENDING"))

    @property
    def said(self) -> str:
        """What it has written."""
        path = self._folder / "job.out"
        return path.read_text() if path.exists() else ""

    def state(self) -> str:
        """What Slurm says of the job."""
        shown = self._slurm.command("scontrol", "show", "job", "-o", self.job)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def save(self) -> None:
        """Let the workers find that they have saved."""
        for rank in range(6):
            (self._folder / f"saved.{rank}").touch()

    def saved(self) -> int:
        """How many workers have saved."""
        return len(list(self._folder.glob("saved.*")))

    def send(self, *options: str) -> None:
        """Have Slurm signal the job's steps."""
        self._slurm.command("scancel", *options, self.job)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        until = time.monotonic() + SOON
        while not is_so():
            assert time.monotonic() < until, (self.state(), self.said)
            time.sleep(0.1)

    def lines(self, begin: str) -> list[list[str]]:
        """The words of the workers' lines, by rank."""
        found = [line.partition(begin)[2].split() for line in self.said.splitlines() if f"] {begin} " in line]
        return sorted(found, key=lambda words: int(words[0]))

    def run_of(self, begin: str, name: str) -> bool:
        """Whether six workers on three nodes have said that they are those of a run, and meet on the first node."""
        found = self.lines(begin)
        meet = {words.pop(3) for words in found}
        assert meet in ({"h1"}, {self._slurm.hosts.address(1)})
        return found == [[str(rank), "6", str(rank // 2), name] for rank in range(6)]


def found_by(slurm: Slurm, *options: str) -> list[list[str]]:
    """What is read of the environment in each task of a step."""
    env = {**slurm.env, "PYTHONPATH": str(ROOT / "src")}
    command = [*slurm.on(1), "srun", *options, sys.executable, "-c", FOUND]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=SOON)
    return sorted(line.split() for line in done.stdout.splitlines())


def test_all_nodes_of_a_step_are_told_the_same_and_their_ranks(slurm: Slurm) -> None:
    told = found_by(slurm, "--nodes=3", "--ntasks-per-node=1")
    assert [words[:5] for words in told] == [[f"h{rank + 1}", "Slurm", "3", str(rank), "h1"] for rank in range(3)]
    assert len({(job, port) for *_, job, port in told}) == 1
    assert told[0][5].startswith("slurm-")
    assert found_by(slurm, "--nodes=1", "--ntasks=2") == [["h1", "alone"]] * 2


def test_a_job_that_is_told_of_its_end_saves_and_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    with Batch(tmp_path, slurm) as batch:
        batch.wait_until(lambda: len(batch.lines("begins")) == 6)
        batch.send("--signal=USR1")
        batch.wait_until(lambda: batch.saved() == 6)
        batch.wait_until(lambda: batch.state() == "PENDING")
        # The next run begins when what was handed out for this one has expired: some 15 s later.
        batch.wait_until(lambda: batch.state() == "COMPLETED")
        assert batch.run_of("begins", f"slurm-{batch.job}.0"), batch.said
        assert batch.run_of("goes on", f"slurm-{batch.job}.0-restart1"), batch.said


def test_a_job_that_is_cancelled_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    with Batch(tmp_path, slurm) as batch:
        batch.wait_until(lambda: len(batch.lines("begins")) == 6)
        batch.send()
        batch.wait_until(lambda: batch.state() == "CANCELLED")
        assert batch.saved() == 6
        assert "FAILED" not in batch.said


def test_a_job_whose_workers_get_the_signal_too_was_stopped(slurm: Slurm, tmp_path: Path) -> None:
    with Batch(tmp_path, slurm, UNPREPARED) as batch:
        batch.wait_until(lambda: batch.said.count("] begins 6\n") == 6)
        batch.send()  # with proctrack/linuxproc, to all processes of the step
        batch.wait_until(lambda: batch.state() == "CANCELLED")
        batch.wait_until(lambda: batch.said.count("phalanx: the job was stopped: SIGTERM on host h") == 3)
        assert "FAILED" not in batch.said


def test_a_drained_node_keeps_its_job_and_takes_no_other(slurm: Slurm, tmp_path: Path) -> None:
    def update(*what: str) -> None:
        slurm.command("scontrol", "update", "nodename=h3", *what)

    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with (
        Batch(folders[0], slurm) as batch,
        Batch(folders[1], slurm, changes={"--nodes=3": "--nodes=3 --hold"}) as next_one,
    ):
        batch.wait_until(lambda: len(batch.lines("begins")) == 6)
        try:
            update("state=drain", "reason=test")
            batch.wait_until(lambda: slurm.command("sinfo", "-h", "-n", "h3", "-o", "%T").strip() == "draining")
            slurm.command("scontrol", "release", next_one.job)
            assert batch.state() == "RUNNING"
            batch.save()
            batch.wait_until(lambda: batch.state() == "COMPLETED")
            assert "stopp" not in batch.said
            batch.wait_until(lambda: slurm.command("sinfo", "-h", "-n", "h3", "-o", "%T").strip() == "drained")
            assert next_one.state() == "PENDING"
            next_one.save()
        finally:
            update("state=resume")
        next_one.wait_until(lambda: next_one.state() == "COMPLETED")
        assert next_one.run_of("goes on", f"slurm-{next_one.job}.0"), next_one.said
        for rank in range(3):
            assert f"3 nodes (h1, h2, h3), 6 workers; this is node {rank}" in next_one.said


def test_a_job_goes_on_without_a_node_that_is_down(slurm: Slurm, tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("the extra `etcd` is not installed")
    program()
    changes = {
        "#SBATCH --requeue": "#SBATCH --no-kill",
        "srun ": "srun --no-kill ",
        "phalanx run ": f"phalanx run {ELASTIC} ",
    }
    with Batch(tmp_path, slurm, UNPREPARED, changes) as batch:
        batch.wait_until(lambda: batch.said.count("] begins 6\n") == 6)
        slurm.command("scontrol", "update", "nodename=h3", "state=down", "reason=test")
        batch.wait_until(lambda: batch.said.count("] begins 4\n") == 4)
        assert batch.state() == "RUNNING"
        lost = r"phalanx: node \d is lost: its agent on host h3 is gone, or cut off; stopping the workers\n"
        assert len(re.findall(lost, batch.said)) == 2
        batch.send()
        batch.wait_until(lambda: batch.said.count("phalanx: the job was stopped: SIGTERM") == 2)


WAITS = """
import os, sys, time
print("begins", os.path.basename(sys.argv[0]), os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def start_in_step(hosts: Hosts, node: int, folder: Path, script: str, said: Path) -> subprocess.Popen[bytes]:
    """Start `phalanx run` in a folder on one of the two hosts of a step."""
    told = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NODEID": f"{node - 1}", "SLURM_STEP_NODELIST": "10.77.0.[1-2]"}  # fmt: skip
    rest = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [sys.executable, "-P", "-m", "phalanx", "run", "--nproc-per-node", "1", script]
    with said.open("wb") as out:
        return subprocess.Popen(
            [*hosts.on(node), *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder,
            env={**rest, **told, "PHALANX_JOB_SECRET": "0123456789abcdef", "XDG_STATE_HOME": str(folder)},
        )  # fmt: skip


def test_one_of_two_scripts_in_a_step_runs_on_all_machines(tmp_path: Path) -> None:
    """Both have the step's name and port. Which of them runs is chance."""
    hosts_of.check()
    scripts = ["train.py", "evaluate.py"]
    for script in scripts:
        (tmp_path / script).write_text(WAITS)
    with Hosts(2) as hosts, ExitStack() as left:
        started = {
            (script, node): start_in_step(hosts, node, tmp_path, script, tmp_path / f"{script}.{node}")
            for script in scripts
            for node in (1, 2)
        }
        for one in started.values():
            left.callback(one.kill)
        until = time.monotonic() + SOON
        while not (lost := [script for script in scripts if started[script, 1].poll() is not None]):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert started[lost[0], 2].wait(SOON) == 1
        (tmp_path / "end").touch()
        (won,) = set(scripts) - set(lost)
        assert [started[script, node].wait(SOON) for script in (won, *lost) for node in (1, 2)] == [0, 0, 1, 1]
    said = {key: (tmp_path / f"{key[0]}.{key[1]}").read_text() for key in started}
    assert all(f"begins {won} 2\n" in said[won, node] for node in (1, 2))
    assert "slurm-7.0 (several `phalanx run` in one step need a --run-id each): " in said[lost[0], 1]
    assert f"the job of this id runs {won}, and this node was told {lost[0]}: another job needs" in said[lost[0], 2]


def test_a_step_tells_equal_names_in_two_folders_apart(tmp_path: Path) -> None:
    hosts_of.check()
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text("")
    with Hosts(2) as hosts, ExitStack() as left:
        started = [
            start_in_step(hosts, node, folder, "train.py", folder / "said") for node, folder in enumerate(folders, 1)
        ]
        for one in started:
            left.callback(one.kill)
        assert [one.wait(SOON) for one in started] == [0, 0]
    for folder in folders:
        assert "nodes of this job run train.py with different arguments" in (folder / "said").read_text()
