"""A worker that notes when it has come to its first line: ``first_line.py FOLDER MODULE RESTARTS``.

It imports MODULE before that, unless it is empty. In each attempt but the last, rank 0 fails once all ranks are there.
"""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep

RUNS = 1.0
"""Seconds for which all ranks run before rank 0 fails, as in the midst of a job."""

LOOKS = 0.1
"""Seconds between the looks of a launcher that polls: rank 0 fails at moments that are spread over them."""

PARTS = 3


def note(folder: str, attempt: int, what: str) -> None:
    """Append to the file of moments: attempt, what, when (CLOCK_MONOTONIC, the same for all processes)."""
    moment = monotonic()
    out = os.open(f"{folder}/moments", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(out, f"{attempt} {what} {moment!r}\n".encode())
    os.close(out)


def main(folder: str, module: str, restarts: int) -> None:
    """Say that this rank is there; fail, or wait for the end."""
    if module:
        __import__(module)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    note(folder, attempt, "first")
    if attempt == restarts:
        return
    fifo = os.open(f"{folder}/{attempt}", os.O_RDWR)
    if os.environ["RANK"] != "0":
        os.write(fifo, b".")
        import signal  # after the first line

        signal.pause()
    ranks = int(os.environ["WORLD_SIZE"])
    heard = 1
    while heard < ranks:
        heard += len(os.read(fifo, ranks))
    sleep(RUNS + LOOKS * (attempt % PARTS) / PARTS)
    note(folder, attempt, "exit")
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
