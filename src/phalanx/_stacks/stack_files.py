"""Writes stacks to files ``stacks-<n>.txt``, and removes the oldest of a folder."""

from __future__ import annotations

import contextlib
import os

from phalanx._base import files

KEPT = 20
"""How many files of stacks are kept in a folder, the newest ones."""


def write(folder: str, text: str) -> str:
    """Write to ``stacks-<n>.txt`` in a folder, n being one more than the highest there. Returns the path.

    Of such files the newest `KEPT` are kept. Raises OSError.
    """
    numbers = sorted(int(name[7:-4]) for name in os.listdir(folder) if _is_ours(name))
    number = numbers[-1] + 1 if numbers else 1
    path = os.path.join(folder, f"stacks-{number}.txt")
    fd = files.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        files.write_all(fd, text.encode("utf-8", "backslashreplace"))
    finally:
        os.close(fd)
    for old in numbers[: len(numbers) + 1 - KEPT] if len(numbers) >= KEPT else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, f"stacks-{old}.txt"))
    return path


def _is_ours(name: str) -> bool:
    return name.startswith("stacks-") and name.endswith(".txt") and name[7:-4].isdecimal() and name.isascii()
