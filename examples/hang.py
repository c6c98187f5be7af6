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
STUCK = 3  # the step


def read_batch(step: int) -> list[int]:
    """Make a batch, under a lock."""
    with cache:
        if step == STUCK and rank == world_size - 1:
            return read_batch(step)  # which takes the lock again
        return list(range(step))


def all_reduce(batch: list[int]) -> int:
    """Sum up over all ranks, which have the same."""
    if len(batch) == STUCK:
        threading.Event().wait()  # for the rank that does not come
    return sum(batch) * world_size


def main() -> None:
    """Train for ten steps."""
    for step in range(10):
        with timer.expires(after=2, scope="step"):
            print(f"step {step}: {all_reduce(read_batch(step))}", flush=True)
        timer.progress(step)


if __name__ == "__main__":
    main()
