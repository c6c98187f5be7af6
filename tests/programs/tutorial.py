# faces: spawn elastic
# methods: spawn forkserver fork
"""Train a small model as the tutorials of torch do: classes, settings and a data set of the script's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import faces
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("high")
torch.manual_seed(1)

CONFIG = {"width": 3, "rate": 0.01, "epochs": 2}
CONFIG["batch"] = 4


class Squares(Dataset):  # type: ignore[misc]  # torch is not followed
    """Points of a line and a parabola."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = torch.tensor([index / 16])
        return x, x**2


class Net(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@dataclass(order=True)
class Report:
    """What a rank tells about an epoch."""

    rank: int
    epoch: int
    batches: int
    loss: float
    dtype: str
    precision: str


class DivergedError(Exception):
    """The loss has left the range of numbers."""


def descend(model: Any) -> None:
    """What an optimizer does: one of torch's would take a second to import."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(CONFIG["rate"] * parameter.grad)


def train(rank: int, shared: Any, steps: Any, lock: Any, reports: Any) -> Any:
    torch.manual_seed(rank)
    model = Net(int(CONFIG["width"]))
    readers = 1 if rank == 0 else 0  # it may take the seconds of importing torch
    loader = DataLoader(
        Squares(), batch_size=int(CONFIG["batch"]), num_workers=readers, persistent_workers=bool(readers)
    )
    for epoch in range(int(CONFIG["epochs"])):
        losses: list[float] = []
        for x, y in loader:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            descend(model)
            losses.append(loss.item())
            with lock:
                steps += 1
        precision = torch.get_float32_matmul_precision()
        reports.put(Report(rank, epoch, len(losses), round(losses[-1], 6), str(torch.tensor(losses).dtype), precision))
    with lock, torch.no_grad():
        for mine, everybodys in zip(model.parameters(), shared.parameters(), strict=True):
            everybodys.add_(mine)
    torch.save(model.state_dict(), f"model-{rank}.pt")
    return torch.full((2,), float(rank))


def diverge(rank: int, limit: float) -> None:
    loss = torch.tensor(limit) * 10
    if loss > limit:
        raise DivergedError(f"rank {rank}: the loss is {loss.item()}")


def main() -> None:
    context = faces.context()
    lock, reports = context.Lock(), context.SimpleQueue()
    shared, steps = Net(int(CONFIG["width"])), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.zero_()
    shared.share_memory()
    steps.share_memory_()

    returned = faces.run(train, (shared, steps, lock, reports))

    print("returned", returned)
    for report in faces.drained(reports, 2 * int(CONFIG["epochs"])):
        print(report)
    print("steps", steps.item())
    states = [torch.load(f"model-{rank}.pt") for rank in range(2)]
    for name, value in shared.state_dict().items():
        print(name, torch.allclose(value, states[0][name] + states[1][name]), round(value.sum().item(), 6))
    print(sorted(os.listdir()))

    print(faces.outcome(diverge, (5.0,), nprocs=1))


if __name__ == "__main__":
    main()
