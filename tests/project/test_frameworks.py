"""Training scripts, written as the tutorials of their libraries would have them, under `phalanx run`.

Each runs to its end, and fails in one rank; plain torch hangs in one, too. Where accelerate is not installed, its
script is left out: nothing else here needs it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.support.command import Done, Launcher, Place
from tests.timers.test_hang_scenarios import first_of

pytestmark = pytest.mark.torch

COMMON = """
import os, sys, threading, time
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))

def read_batch(step):
    if step == 3 and os.environ["RANK"] == "1" and sys.argv[1] == "fail":
        raise ValueError("loss is nan in step 3")
    if step == 3 and os.environ["RANK"] == "1" and sys.argv[1] == "hang":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
"""

DDP = f"""
{COMMON}
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from phalanx import timer
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(DataLoader(data, batch_size=4, sampler=DistributedSampler(data))):
    dist.barrier()
    with timer.expires(after=10 if sys.argv[1] == "hang" and step == 3 else 60, scope="step"):
        read_batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
total = sum(p.sum() for p in model.parameters()).reshape(1)
all_ = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(all_, total.detach())
print("done", dist.get_rank(), dist.get_world_size(), all(one == total for one in all_))
dist.destroy_process_group()
time.sleep(0.5)  # gloo's threads outlive that; torch 2.13 aborts when one drops the last tensors while Python exits
"""

ACCELERATE = f"""
{COMMON}
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
for step, (x, y) in enumerate(loader):
    read_batch(step)
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
all_ = accelerator.gather(sum(p.sum() for p in model.parameters()).detach().reshape(1))
print("done", accelerator.process_index, accelerator.num_processes, bool((all_ == all_[0]).all()))
accelerator.end_training()
time.sleep(0.5)  # as above
"""

# As `phalanx run`, but that on a machine that is busy the ranks have more time to give their stacks.
PATIENT = """
from phalanx._stacks import snapshot
from phalanx.cli import main
snapshot.WAIT, snapshot._FRESH = 8.0, 60.0
main()
"""


NO_ACCELERATE = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed in this environment"
)
SCRIPTS = [pytest.param(DDP, id="plain"), pytest.param(ACCELERATE, marks=NO_ACCELERATE, id="accelerate")]


@pytest.fixture(autouse=True)
def home(place: Place, tmp_path: Path) -> None:
    """Caches of the libraries are the test's own, and no leak of ours."""
    folder = tmp_path / "home"
    folder.mkdir()
    place.env |= {"HOME": str(folder), "TMPDIR": str(folder), "HF_HOME": str(folder)}


def run(place: Place, script: str, how: str, *options: str) -> Done:
    path = place.write(script, "train.py")
    command = [sys.executable, "-c", PATIENT, "run", "--log-dir", str(place.logs), "--nproc-per-node", "2", *options]
    with Launcher([*command, path, how], cwd=place.folder, env=place.env) as launcher:
        return launcher.end()


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs(place: Place, script: str) -> None:
    """As one group: each rank has the number and the size that we gave it, and the same parameters at the end."""
    done = run(place, script, "run")
    assert done.status == 0, done.err
    assert sorted(line for line in done.out.splitlines() if "done" in line) == [
        "[0] done 0 2 True",
        "[1] done 1 2 True",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_fails(place: Place, script: str) -> None:
    done = run(place, script, "fail")
    # torch's own threads can abort an interpreter that leaves with a process group (SIGABRT; SIGBUS was seen once)
    aborted = done.status == 135 and "terminate called without an active exception" in done.err
    assert done.status in (1, 134) or aborted, done.err
    report = done.err[done.err.index("Root Cause") :]
    assert report.index("  rank      : 1 ") < report.index("  error     : ValueError: loss is nan in step 3")
    assert report.index("  error     : ValueError") < report.index("----")


def test_it_hangs(place: Place) -> None:
    """Rank 0 waits in the backward pass for rank 1, and both are over the same deadline."""
    done = run(place, DDP, "hang", "--settle", "60")
    rank, text = first_of(done.err)
    assert rank == "1", done.err
    assert "rank 1 is in read_batch (train.py:" in text
