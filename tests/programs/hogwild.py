# faces: spawn
# methods: spawn forkserver fork
# why: its other face would cost the seconds of two more imports of torch for each worker
"""Hogwild: ranks train one model in shared memory, without a lock, until it fits."""

from __future__ import annotations

from typing import Any

import faces
import torch
from torch import nn

torch.set_num_threads(1)
RATE = 0.1


class Line(nn.Module):  # type: ignore[misc]  # torch is not followed
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        return self.weight[0] * x + self.weight[1]


def train(rank: int, model: Line) -> None:
    x = torch.linspace(-1, 1, 8) + rank / 100
    for _ in range(300):
        model.zero_grad()
        nn.functional.mse_loss(model(x), 2 * x - 1).backward()
        with torch.no_grad():  # what an optimizer does: one of torch's would take a second to import
            for parameter in model.parameters():
                parameter.sub_(RATE * parameter.grad)
        model.steps[rank] += 1


def main() -> None:
    model = Line()
    model.share_memory()
    print(model.weight.is_shared(), model.steps.is_shared())
    faces.run(train, (model,))
    print(model.steps.tolist(), [round(value, 2) for value in model.weight.tolist()])


if __name__ == "__main__":
    main()
