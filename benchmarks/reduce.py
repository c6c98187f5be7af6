"""A rank that reduces over gloo again and again: says when it has done so first, and goes on until something breaks."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def main(said: str) -> None:
    """Reduce, and write a line to a FIFO: the process, its rank, and the moment (CLOCK_MONOTONIC, nanoseconds)."""
    dist.init_process_group("gloo")
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    out = os.open(said, os.O_WRONLY)
    os.write(out, b"%d %d %d\n" % (os.getpid(), dist.get_rank(), time.monotonic_ns()))
    while True:
        dist.all_reduce(ones)
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1])
