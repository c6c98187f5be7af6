"""A launcher of one's own, as video and detection training repositories have it (SlowFast, Detectron2 and their kin).

One such launcher runs on each machine (a shard) and starts `--num-proc` processes; each process works out its rank from
the shard and from its place in it, and joins the others at `--init-method`. Two shards can share a machine:

    python examples/launch_slowfast_style.py --shard-id 0 --num-shards 2 --init-method tcp://127.0.0.1:29400 &
    python examples/launch_slowfast_style.py --shard-id 1 --num-shards 2 --init-method tcp://127.0.0.1:29400

Needs torch; runs on the CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import phalanx.spawn as mp  # where ``import torch.multiprocessing as mp`` stood

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Config:
    """What a training repository reads from its YAML files."""

    steps: int = 50
    learning_rate: float = 0.5


def train(cfg: Config) -> None:
    """Find the slope of y = 3x: every rank has points of its own, and the gradients are averaged."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.rand(100, generator=torch.Generator().manual_seed(rank))
    y = 3 * x
    slope = torch.zeros(())
    for _ in range(cfg.steps):
        gradient = (2 * (slope * x - y) * x).mean()
        dist.all_reduce(gradient)
        slope -= cfg.learning_rate * gradient / world_size
    ranks = torch.tensor(rank)
    dist.all_reduce(ranks)
    print(f"rank {rank} of {world_size}: slope {slope.item():.2f}, sum of ranks {ranks.item()}", flush=True)


def run(
    local_rank: int,
    num_proc: int,
    func: Callable[[Config], None],
    init_method: str,
    shard_id: int,
    num_shards: int,
    backend: str,
    cfg: Config,
) -> None:
    """Be one process: join the others, then call `func(cfg)`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=init_method,
        world_size=num_proc * num_shards,
        rank=shard_id * num_proc + local_rank,
    )
    func(cfg)
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and start this shard's processes."""
    parser = argparse.ArgumentParser(description="Start one shard of a training job.")
    parser.add_argument("--shard-id", type=int, default=0, help="this launcher's number, from 0")
    parser.add_argument("--num-shards", type=int, default=1, help="how many launchers there are")
    parser.add_argument("--num-proc", type=int, default=2, help="processes that each launcher starts")
    parser.add_argument("--init-method", default="tcp://127.0.0.1:29400", help="tcp://HOST:PORT or file:///PATH")
    parser.add_argument("--backend", default="gloo")
    opts = parser.parse_args()
    mp.spawn(
        run,
        nprocs=opts.num_proc,
        args=(opts.num_proc, train, opts.init_method, opts.shard_id, opts.num_shards, opts.backend, Config()),
    )


if __name__ == "__main__":
    main()
