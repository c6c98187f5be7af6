# faces: elastic
# methods: spawn forkserver fork
# why: its other face would cost the seconds of two more imports of torch for each worker
"""Distributed data parallel with gloo on this machine: gradients are averaged, both ranks end with one model."""

from __future__ import annotations

import os
import socket
from typing import Any

import faces
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


class Toy(nn.Module):  # type: ignore[misc]  # torch is not followed
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def train(rank: int, port: int) -> Any:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(rank)
    model = DistributedDataParallel(Toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.tensor([[1.0 + rank, 2.0 - step]])
        (model(x) ** 2).sum().backward()
        optimizer.step()
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, Toy.__qualname__ + str(rank))
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [round(value, 5) for value in model.module.layer.weight[0].tolist()], everybody, total.item()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def main() -> None:
    returned = faces.run(train, (free_port(),), WORLD) or {}
    for rank, values in returned.items():
        print(rank, *values)


if __name__ == "__main__":
    main()
