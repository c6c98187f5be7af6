"""Functions for the workers of `benchmarks.scale`. Imports next to nothing: each spawned worker imports it, too."""

import os
import signal


def say(fifo: str) -> None:
    """Write one byte to a named pipe: this worker runs."""
    fd = os.open(fifo, os.O_WRONLY)
    os.write(fd, b".")
    os.close(fd)


def wait_here(fifo: str) -> None:
    """Say that this worker runs, and stay."""
    say(fifo)
    while True:
        signal.pause()


def fail_here(fifo: str, rank: int, size: int) -> None:
    """Say that this worker runs, and fail with a text of ``size`` bytes that no other rank has."""
    say(fifo)
    line = f"rank {rank} has read a tensor of another shape than it was to have: {'x' * 20}\n"
    raise ValueError(line * (size // len(line)))
