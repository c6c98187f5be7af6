# faces: spawn
# methods: spawn forkserver fork
# why: its other face would cost the seconds of two more imports of torch for each worker
"""Models, tensors and whole objects of the script, saved by workers and loaded by the launcher, and the other way."""

from __future__ import annotations

from typing import Any

import faces
import torch
from torch import nn

torch.manual_seed(3)
scale = torch.ones(2)


class Cell(nn.Module):  # type: ignore[misc]  # torch is not followed
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.size = size


def save(rank: int, queue: Any) -> None:
    scale.add_(1)  # each worker's own
    before = torch.load("before.pt", weights_only=False)
    torch.save({"cell": Cell(rank + 1), "scale": scale, "step": rank}, f"{rank}.pt")
    torch.save(before.state_dict(), f"state-{rank}.pt")
    queue.put((rank, type(before) is Cell, before.size, scale.tolist(), round(torch.rand(1).item(), 6)))


def main() -> None:
    queue = faces.context().SimpleQueue()
    scale.mul_(3)
    cell = Cell(2)
    torch.save(cell, "before.pt")
    print(faces.run(save, (queue,)))
    for line in faces.drained(queue, 2):
        print(*line)
    for rank in range(2):
        loaded = torch.load(f"{rank}.pt", weights_only=False)
        print(rank, type(loaded["cell"]) is Cell, loaded["cell"].size, loaded["scale"].tolist(), loaded["step"])
        print(rank, round(loaded["cell"].layer.weight.sum().item(), 5))
        state = torch.load(f"state-{rank}.pt")
        print(rank, all(torch.equal(value, state[name]) for name, value in cell.state_dict().items()))
    print(scale.tolist())


if __name__ == "__main__":
    main()
