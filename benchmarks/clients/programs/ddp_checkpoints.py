"""Distributed data parallel as torch's tutorials do it: rank 0 saves a checkpoint, and all resume from it."""

from __future__ import annotations

import os
from pathlib import Path

import fault
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = Path("checkpoint.pt")


@record  # type: ignore[untyped-decorator] # torch is not followed
def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    fault.resumed(first)
    for step in range(first, fault.STEPS):
        fault.strike(rank, step)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if rank == 0 and step % 2:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(saved, "checkpoint.tmp")
            os.replace("checkpoint.tmp", CHECKPOINT)
        dist.barrier()
    dist.destroy_process_group()
    fault.finished(rank)


if __name__ == "__main__":
    main()
