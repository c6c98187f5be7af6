"""Looks at the workers of a group that goes on, and returns their stacks. Waits meanwhile; nothing is written."""

from __future__ import annotations

import contextlib

from phalanx._base import clock
from phalanx._base.process import Process
from phalanx._stacks.collect import Collection
from phalanx._stacks.dump import EXITED
from phalanx._stacks.request import Target
from phalanx._stacks.wrappers import working_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

AT_ONCE = 128
"""Ranks that are looked at at a time, each of which takes a descriptor."""


def take(alive: Callable[[], Mapping[int, int]], error_files: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Return the stacks of the workers, by rank, as `Collection.finish` does; `EXITED`, if one has exited meanwhile.

    Args:
        alive: Returns the pids of the workers that have not exited, by rank, as the group's supervisor knows them.
        error_files: Each rank's.
        seconds: How long that may take, at the most.

    Raises OSError: no descriptor is left.
    """
    from phalanx._stacks.py_spy import preload

    preload()
    until = clock.now() + seconds
    ranks = sorted(alive())
    texts: dict[int, str] = {}
    for first in range(0, len(ranks), AT_ONCE):
        texts |= _look(ranks[first : first + AT_ONCE], alive, error_files, max(0.0, until - clock.now()))
    return texts


def _look(
    ranks: Sequence[int], alive: Callable[[], Mapping[int, int]], error_files: Mapping[int, str], seconds: float
) -> dict[int, str]:
    texts = dict.fromkeys(ranks, EXITED)
    with contextlib.ExitStack() as held:
        processes: dict[int, Process] = {}
        for rank, pid in alive().items():
            if rank in texts:
                with contextlib.suppress(ProcessLookupError):
                    processes[rank] = held.enter_context(Process(pid))
        there = alive()  # of the others, the pid may have been another process's when it was held
        targets = [_target(rank, process, error_files[rank]) for rank, process in processes.items() if rank in there]
        collection = held.enter_context(Collection(targets, seconds))
        collection.begin()
        collection.wait()
        return texts | collection.finish()


def _target(rank: int, worker: Process, error_file: str) -> Target:
    pid = working_process(worker.pid)
    return Target(rank, pid, error_file, process=worker if pid == worker.pid else None)
