"""Starts its own workers, as torch's tutorials do. The second argument is the module that `spawn` is taken from."""

from __future__ import annotations

import importlib
import os
import sys

import fault
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(fault.STEPS):
        fault.strike(rank, step)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        dist.barrier()
    dist.destroy_process_group()
    fault.finished(rank)


if __name__ == "__main__":
    importlib.import_module(sys.argv[2]).spawn(train, args=(2,), nprocs=2)
