"""`phalanx run` in a real Slurm of three nodes: what its steps tell, and the batch script of the page on schedulers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.project.test_docs import ROOT, blocks
from tests.support import slurm as slurm_of
from tests.support.hosts import Hosts
from tests.support.slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Self

pytestmark = [pytest.mark.once, pytest.mark.slow]

SOON = 60.0
"""Seconds that a job may take; spent only by a test that fails."""

FOUND = """
import os
from phalanx.cli._scheduler import found
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
    while not phalanx.should_stop():
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


class Batch:
    """The batch script of the page, in a folder of its own. A context manager: what is left of its job is cancelled."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self._folder, self._slurm = folder, slurm
        (script,) = (text for _, text in blocks(ROOT / "docs" / "schedulers.md", "bash") if "#SBATCH" in text)
        assert "--nproc-per-node 8 " in script
        (folder / "train.sh").write_text(script.replace("--nproc-per-node 8 ", "--nproc-per-node 2 "))
        (folder / "train.py").write_text(TRAIN)
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


def test_the_batch_script_of_the_page(slurm: Slurm, tmp_path: Path) -> None:
    with Batch(tmp_path, slurm) as batch:
        batch.save()
        batch.wait_until(lambda: batch.state() == "COMPLETED")
        assert batch.run_of("goes on", f"slurm-{batch.job}.0"), batch.said
        for rank in range(3):
            assert f"3 nodes (h1, h2, h3), 6 workers; this is node {rank}" in batch.said


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
