"""A class that trains, as the libraries above torch have one: a DataLoader with worker processes, hooks, a last.pt."""

from __future__ import annotations

import os
from pathlib import Path

import fault
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset[tuple[torch.Tensor, torch.Tensor]]):  # type: ignore[misc] # torch is not followed
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((8,), index / 64)
        return x, x.square().sum().reshape(1)


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.last = folder / "last.pt"
        self.rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        self.data = Squares()
        self.model = DistributedDataParallel(torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.epoch = 0

    def fit(self) -> None:
        self.restore()
        fault.resumed(self.epoch)
        sampler = DistributedSampler(self.data)
        loader = DataLoader(self.data, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True)
        while self.epoch < fault.STEPS:
            sampler.set_epoch(self.epoch)
            for number, batch in enumerate(loader):
                self.training_step(number, *batch)
            self.epoch += 1
            self.on_epoch_end()
        dist.destroy_process_group()

    def training_step(self, number: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if number == 1:
            fault.strike(self.rank, self.epoch)
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def on_epoch_end(self) -> None:
        if self.rank == 0 and self.epoch % 2 == 0:
            torch.save({"model": self.model.module.state_dict(), "epoch": self.epoch}, self.last.with_suffix(".tmp"))
            os.replace(self.last.with_suffix(".tmp"), self.last)
        dist.barrier()

    def restore(self) -> None:
        if self.last.exists():
            saved = torch.load(self.last)
            self.model.module.load_state_dict(saved["model"])
            self.epoch = saved["epoch"]


if __name__ == "__main__":
    trainer = Trainer(Path.cwd())
    trainer.fit()
    fault.finished(trainer.rank)
