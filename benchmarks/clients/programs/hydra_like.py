"""A main under a decorator that makes the configuration, prints what main raises, and exits with 1, as hydra's does."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import fault
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def with_config(**defaults: object) -> Callable[[Callable[[SimpleNamespace], None]], Callable[[], None]]:
    def decorate(function: Callable[[SimpleNamespace], None]) -> Callable[[], None]:
        @functools.wraps(function)
        def run() -> None:
            words = dict(word.split("=", 1) for word in sys.argv[2:])
            try:
                function(SimpleNamespace(**(defaults | words)))
            except Exception:  # noqa: BLE001 - the decorator's whole point
                traceback.print_exc()
                sys.exit(1)

        return run

    return decorate


@with_config(backend="gloo", checkpoint="weights.pt", size=8)
def main(config: SimpleNamespace) -> None:
    dist.init_process_group(config.backend)
    rank = dist.get_rank()
    path = Path(config.checkpoint)
    saved = torch.load(path) if path.exists() else {"weights": torch.zeros(config.size), "step": 0}
    weights, first = saved["weights"], saved["step"]
    fault.resumed(first)
    for step in range(first, fault.STEPS):
        fault.strike(rank, step)
        gradient = torch.ones(config.size) * rank
        dist.all_reduce(gradient)
        weights -= gradient / dist.get_world_size()
        if rank == 0 and step % 2:
            torch.save({"weights": weights, "step": step + 1}, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        dist.barrier()
    dist.destroy_process_group()
    fault.finished(rank)


if __name__ == "__main__":
    main()
