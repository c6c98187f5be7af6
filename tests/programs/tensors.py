# faces: elastic
# methods: spawn forkserver fork
# why: its other face would cost the seconds of two more imports of torch for each worker
"""Tensors as arguments of several ranks and groups, through queues and as return values, shared by file name."""

from __future__ import annotations

from typing import Any

import faces
import torch
import torch.multiprocessing

torch.multiprocessing.set_sharing_strategy("file_system")

ones = torch.ones(3)


def work(rank: int, shared: Any, views: list[Any], there: Any, back: Any, barrier: Any) -> Any:
    ones.add_(1)
    shared[rank] += rank + 1
    views[rank].mul_(2)
    tensor = there.get()
    back.put((rank, tensor.sum().item(), ones.tolist(), torch.multiprocessing.get_sharing_strategy()))
    tensor.add_(10)  # the launcher sees it
    barrier.wait()
    return {"mine": torch.arange(3) * rank, "shared": shared, "gradient": torch.nn.Parameter(torch.ones(1))}


def main() -> None:
    context = torch.multiprocessing.get_context(faces.context().get_start_method())
    there, back, barrier = context.SimpleQueue(), context.SimpleQueue(), context.Barrier(2)
    shared = torch.zeros(4)
    whole = torch.ones(4).share_memory_()
    for round_number in range(2):
        sent = [torch.full((2,), 1.0 * round_number) for _ in range(2)]
        for tensor in sent:
            there.put(tensor)
        returned = faces.run(work, (shared, [whole[:2], whole[2:]], there, back, barrier)) or {}
        for line in faces.drained(back, 2):
            print(*line)
        print("shared", shared.tolist(), "whole", whole.tolist(), "sent", [tensor.tolist() for tensor in sent])
        for rank, values in returned.items():
            values["shared"][3] += 1
            print(rank, values["mine"].tolist(), type(values["gradient"]).__name__, values["gradient"].requires_grad)
        print("shared", shared.tolist(), shared.is_shared(), "ones", ones.tolist())


if __name__ == "__main__":
    main()
