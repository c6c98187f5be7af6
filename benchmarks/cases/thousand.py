"""A thousand workers: started, listed, closed, none left; and what each costs those who watch over it."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from time import perf_counter
from typing import NamedTuple

from benchmarks import procfs
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import start

WORKERS = 1000
COMMAND = ("/bin/sleep", "600")


class _Bare:
    """The floor, with the two verbs of a context that this case needs."""

    def __init__(self) -> None:
        self._workers = [subprocess.Popen(COMMAND) for _ in range(WORKERS)]

    def pids(self) -> dict[int, int]:
        return {rank: worker.pid for rank, worker in enumerate(self._workers)}

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait()


class _Weight(NamedTuple):
    """Descriptors, and memory in kB, of some processes together."""

    fds: int
    memory: float

    @classmethod
    def of(cls, pids: set[int]) -> _Weight:
        return cls(sum(map(procfs.fds, pids)), sum(map(procfs.pss_kb, pids)))


def _measure(contender: str) -> Sample:
    launcher = {os.getpid()}
    if contender != FLOOR:
        warm = start(contender, "/bin/true", [()])  # so that imports are not counted
        warm.wait()
        warm.close()
    before = _Weight.of(launcher)
    began = perf_counter()
    context = _Bare() if contender == FLOOR else start(contender, COMMAND[0], [COMMAND[1:]] * WORKERS)
    started = perf_counter()
    pids = set(context.pids().values())
    after = _Weight.of(launcher)
    helpers = _Weight.of(procfs.helpers(os.getpid(), pids))
    closing = perf_counter()
    context.close()
    closed = perf_counter()
    figures = {
        "start": started - began,
        "listed": len(pids),
        "close": closed - closing,
        "left": len(procfs.marked(os.environ[procfs.MARK])),
        "launcher fds": (after.fds - before.fds) / WORKERS,
        "helper fds": helpers.fds / WORKERS,
        "launcher memory": (after.memory - before.memory) / WORKERS,
        "helper memory": helpers.memory / WORKERS,
    }
    return Sample({name: [value] for name, value in figures.items()})


CASE = Case(
    name="thousand",
    measures=f"{WORKERS} x sleep 600, started and closed; descriptors and memory (PSS) are per worker",
    units={
        "start": "s",
        "listed": "workers",
        "close": "s",
        "left": "processes",
        "launcher fds": "each",
        "helper fds": "each",
        "launcher memory": "kB each",
        "helper memory": "kB each",
    },
    targets=(Target("listed", ">=", WORKERS, worst=True), Target("left", "<=", 0, worst=True)),
    contenders={name: partial(_measure, name) for name in (PHALANX, TORCH, FLOOR)},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=180.0,
)
