"""The digits again, with torch's DistributedDataParallel over gloo. Plain torch code: it knows nothing of its launcher.

    phalanx run --nproc-per-node 2 examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py

Needs torch and scikit-learn; runs on the CPU.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

SEED = 7
TEST_SIZE = 360
BATCH = 128  # over all ranks
EPOCHS = 30


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the scans and their digits, for training and for testing; the same split on every rank."""
    pixels, digits = load_digits(return_X_y=True)
    everything = TensorDataset(torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(digits))
    chance = torch.Generator().manual_seed(SEED)
    rest, test = random_split(everything, [len(everything) - TEST_SIZE, TEST_SIZE], generator=chance)
    return TensorDataset(*rest[:]), TensorDataset(*test[:])


def train(model: nn.Module, data: TensorDataset) -> None:
    """Train `model` on this rank's share of `data`; DDP averages the gradients over the ranks."""
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        total = 0.0
        for pixels, digits in loader:
            loss = nn.functional.cross_entropy(model(pixels), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if epoch % 10 == 0 or epoch == 1:
            print(f"epoch {epoch} loss {total / len(loader):.3f}")


def main() -> None:
    """Train, then let rank 0 test."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group("gloo")  # env://: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say the rest
    rest, test = load()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    train(model, rest)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size} done")
    if rank == 0:
        pixels, digits = test.tensors
        with torch.no_grad():
            accuracy = (model.module(pixels).argmax(dim=1) == digits).float().mean().item()
        print(f"test accuracy {accuracy:.3f} over {TEST_SIZE} digits, {world_size} ranks")
    dist.destroy_process_group()
    # DistributedDataParallel keeps gloo's threads beyond that, and torch 2.13 aborts when one of them drops the last
    # step's tensors while Python exits: let it drop them now.
    time.sleep(0.1)


if __name__ == "__main__":
    main()
