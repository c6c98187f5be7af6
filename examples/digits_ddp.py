"""The digits again, with torch's DistributedDataParallel over gloo. Plain torch code, for any launcher.

    phalanx run --nproc-per-node 2 examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py

With ``--checkpoint FILE``, rank 0 saves the state there every few steps, and a restart goes on from what it finds:

    phalanx run --nproc-per-node 4 --max-restarts 3 examples/digits_ddp.py --checkpoint digits.pt

Needs torch and scikit-learn; runs on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from phalanx.timer import progress  # reports then name the step that each rank has reached
except ImportError:

    def progress(step: int = 0) -> None:
        """Do without."""


SEED = 7
TEST_SIZE = 360
BATCH = 128  # over all ranks
SAVE_EVERY = 5  # steps


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scans and their digits, shuffled alike on every rank; the last ones are for testing."""
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(SEED))
    return torch.tensor(pixels / 16.0, dtype=torch.float32)[order], torch.tensor(digits)[order]


def indices(step: int, size: int) -> torch.Tensor:
    """Return the samples of this rank in a step. They follow from the step's number: a restart sees the same ones."""
    epoch, batch = divmod(step, size // BATCH)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(SEED + epoch))
    return order[batch * BATCH : (batch + 1) * BATCH][dist.get_rank() :: dist.get_world_size()]


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint in one step: a process that is killed before rename(2) leaves the old one as it was."""
    temporary = path.with_name(f"{path.name}.new")
    torch.save(state, temporary)
    temporary.replace(path)


def train(
    model: DistributedDataParallel, pixels: torch.Tensor, digits: torch.Tensor, steps: int, checkpoint: Path | None
) -> None:
    """Train `model` up to step `steps`, from the checkpoint if there is one; DDP averages the gradients over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    first = 0
    if checkpoint is not None and checkpoint.exists():
        # All read the same: each does so before its first step, which needs all ranks, and rank 0 saves after a step.
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"goes on at step {first}")
    # DDP lays the gradients out anew after the first backward pass of a process, and gloo adds them up in another order
    # then. A pass that counts for nothing goes first, so that each step is the same to the bit whoever begins with it.
    model(pixels[:1]).sum().backward()
    for step in range(first, steps):
        progress(step)
        mine = indices(step, len(digits))
        loss = nn.functional.cross_entropy(model(pixels[mine]), digits[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % 100 == 0 or done == 1:
            print(f"step {done} loss {loss.item():.3f}")
        if checkpoint is not None and dist.get_rank() == 0 and (done % SAVE_EVERY == 0 or done == steps):
            save(checkpoint, {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()})


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the weights, every bit of them."""
    return hashlib.sha256(b"".join(weights.numpy().tobytes() for weights in model.state_dict().values())).hexdigest()


def main() -> None:
    """Train, then let rank 0 test."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--steps", type=int, default=330)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group("gloo")  # env://: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say the rest
    pixels, digits = load()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    train(model, pixels[:-TEST_SIZE], digits[:-TEST_SIZE], options.steps, options.checkpoint)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size} done, weights {fingerprint(model.module)}")
    if rank == 0:
        with torch.no_grad():
            right = model.module(pixels[-TEST_SIZE:]).argmax(dim=1) == digits[-TEST_SIZE:]
        print(f"test accuracy {right.float().mean().item():.3f} over {TEST_SIZE} digits, {world_size} ranks")
    dist.destroy_process_group()
    # DistributedDataParallel keeps gloo's threads beyond that, and torch 2.13 aborts when one of them drops the last
    # step's tensors while Python exits: let it drop them now.
    time.sleep(0.1)


if __name__ == "__main__":
    main()
