"""Rank 0 ends before rank 1 has read a last time from the store, which is at MASTER_PORT."""

from __future__ import annotations

import time

import fault
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - as clients take it: there is no other way
    if rank == 0:
        store.set("result", "42")
    dist.barrier()
    if rank == 1:
        time.sleep(2)
        print("result", store.get("result").decode())
    fault.finished(rank)


if __name__ == "__main__":
    main()
