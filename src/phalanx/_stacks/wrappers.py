"""Finds the process that does a worker's work where the worker itself only waits for it: ``sh run.sh``, ``numactl``."""

from __future__ import annotations

import os

from phalanx._base import procfs

_DEEPEST = 4  # wrappers, one in another


def working_process(pid: int) -> int:
    """Find the process whose stacks tell of the worker ``pid``: itself, or the one below it. Never raises.

    It is one below where the worker is no Python program, has a single child, and that child is the same user's (it is
    not below ``sudo``).
    """
    for _ in range(_DEEPEST):
        try:
            if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                break
            below = procfs.children(pid)
        except OSError:
            break
        if len(below) != 1 or not _have_one_owner(pid, below[0]):
            break
        (pid,) = below
    return pid


def _have_one_owner(*pids: int) -> bool:
    try:
        return len({os.stat(f"/proc/{pid}").st_uid for pid in pids}) == 1
    except OSError:
        return False
