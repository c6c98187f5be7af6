"""A large array as the argument of several workers: how much memory that takes, and whether more take longer."""

from __future__ import annotations

import os
import signal
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import procfs
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import library_of, start
from benchmarks.ready import Listener, with_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 512_000_000
"""Bytes of the array."""

WORKERS = 8
REPEATS = 3


class _Seen(NamedTuple):
    """One start: milliseconds until all had the array, and by what the memory of all processes had grown, in arrays."""

    ready: float
    memory: float


class _Forks:
    """The floor: forks of the launcher, which have the array by being what they are."""

    def __init__(self, array: Any, address: str, workers: int) -> None:
        self._pids = []
        for _ in range(workers):
            pid = os.fork()
            if pid == 0:
                try:
                    with_array(array, address)
                finally:
                    os._exit(1)
            self._pids.append(pid)

    def pids(self) -> dict[int, int]:
        return dict(enumerate(self._pids))

    def close(self, death: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, death)
            os.waitpid(pid, 0)


def _measure(begin: Callable[[Any, str, int], Any], array: Any, workers: int) -> _Seen:
    before = procfs.pss_kb(os.getpid())
    with Listener() as listener:
        began = perf_counter()
        context = begin(array, listener.address, workers)
        listener.wait(workers)
        ready = (perf_counter() - began) * 1e3
        listener.wait(workers)  # they have read all of it
        pids = set(context.pids().values())
        everybody = {os.getpid(), *pids, *procfs.helpers(os.getpid(), pids)}
        grown = sum(map(procfs.pss_kb, everybody)) - before
        context.close(signal.SIGKILL)
    return _Seen(ready, grown * 1024 / array.nbytes)


def _figures(method: str, begin: Callable[[Any, str, int], Any], repeats: int) -> Iterator[tuple[str, list[float]]]:
    import numpy as np

    array = np.ones(SIZE // 8)
    if repeats > 1:
        _measure(begin, array, 1)  # memory that a virtual machine has to ask its host for is nobody's business here
    seen = [(_measure(begin, array, 1), _measure(begin, array, WORKERS)) for _ in range(repeats)]
    one, many = median(one.ready for one, _ in seen), median(many.ready for _, many in seen)
    yield f"{method}: 1 worker", [one]
    yield f"{method}: {WORKERS} workers", [many]
    yield f"{method}: {WORKERS} to 1", [many / one]
    yield f"{method}: memory", [many.memory for _, many in seen]


def _start(contender: str, array: Any, address: str, workers: int, **options: Any) -> Any:
    return start(contender, with_array, [(array, address)] * workers, **options)


def _phalanx() -> Sample:
    warm: dict[str, Any] = {"start_method": "forkserver", "preload": ["numpy"]}
    figures = dict(_figures("forkserver", partial(_start, PHALANX, **warm), REPEATS))
    return Sample(figures | dict(_figures("spawn", partial(_start, PHALANX), REPEATS)))


def _peer() -> Sample:
    library_of(TORCH)
    return Sample(dict(_figures("spawn", partial(_start, TORCH), 1)))


def _floor() -> Sample:
    return Sample(dict(_figures("forkserver", _Forks, REPEATS)))


_UNITS = {"1 worker": "ms", f"{WORKERS} workers": "ms", f"{WORKERS} to 1": "x", "memory": "arrays"}

CASE = Case(
    name="big_argument",
    measures=f"an array of {SIZE / 1e6:.0f} MB for 1 and for {WORKERS} workers: from the call until all have it, and "
    "the memory (PSS) of all processes, grown by so many arrays; forkserver has numpy preloaded; the floor: bare forks",
    units={f"{method}: {name}": unit for method in ("forkserver", "spawn") for name, unit in _UNITS.items()},
    targets=tuple(
        target
        for method in ("forkserver", "spawn")
        for target in (
            Target(f"{method}: memory", "<", 1.3, worst=True),
            Target(f"{method}: {WORKERS} to 1", "<=", 1.5),
        )
    ),
    contenders={PHALANX: _phalanx, TORCH: _peer, FLOOR: _floor},
    rounds=2,
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
    interpreter=TORCH,
)
