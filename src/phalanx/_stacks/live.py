"""Takes the stacks of the workers of a group that goes on, and returns them. Waits meanwhile; nothing is written."""

from __future__ import annotations

import contextlib

from phalanx._base import clock
from phalanx._base.process import Process
from phalanx._stacks.collect import BOUND, Collection
from phalanx._stacks.dump import EXITED, Frame, Halted, is_starter, location
from phalanx._stacks.processes import working_process
from phalanx._stacks.request import Target

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


def locate(alive: Callable[[], Mapping[int, int]], error_files: Mapping[int, str]) -> dict[int, str]:
    """Return where these workers are, by rank, in words, as far as their stacks have a frame; at most `BOUND` later.

    See `take`. Nothing is raised: what has no stack has none here.
    """
    try:
        found = {rank: location(text) for rank, text in take(alive, error_files, BOUND).items()}
    except OSError:  # no descriptor is left
        return {}
    frames = {rank: where.frame if isinstance(where, Halted) else where for rank, where in found.items()}
    is_theirs = {rank: isinstance(frame, Frame) and not is_starter(frame) for rank, frame in frames.items()}
    return {rank: str(where) for rank, where in found.items() if is_theirs[rank]}


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
