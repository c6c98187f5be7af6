"""Training that hangs: one rank waits for a lock that it holds itself, the others wait for that rank.

    phalanx run --nproc-per-node 4 examples/hang.py

Every step has two seconds. When they are over, Phalanx takes the stacks of all ranks, ends the group, and says who was
where. `--on-expiry report,dump:5,kill:30` would have it wait; `--hang-timeout 10` finds what has no timer.
"""

import os
import threading

from phalanx import timer

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cache = threading.Lock()


def read_batch(step: int) -> list[int]:
    with cache:
        if step == 3 and rank == world_size - 1:
            return read_batch(step)  # which takes the lock again
        return list(range(step))


def all_reduce(batch: list[int]) -> int:
    if len(batch) == 3:
        threading.Event().wait()  # for the rank that does not come
    return sum(batch) * world_size


def main() -> None:
    for step in range(10):
        with timer.expires(after=2, scope="step"):
            print(f"step {step}: {all_reduce(read_batch(step))}", flush=True)
        timer.progress(step)


if __name__ == "__main__":
    main()
