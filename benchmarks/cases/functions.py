"""N functions that do nothing, each in a new process of its own, by every library that offers that, under ``spawn``."""

from __future__ import annotations

import importlib
import multiprocessing
import subprocess
import sys
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import elapsed_ms
from benchmarks.noop import noop

if TYPE_CHECKING:
    from collections.abc import Callable


def meet(barrier: Any) -> None:
    """Initialise a worker of a pool: wait until all are there, so that each function has a process of its own."""
    barrier.wait()


def meet_given(barrier: Any, *_others: Any) -> None:
    """Do the same for mpire, whose workers are given the barrier as a shared object."""
    barrier.wait()


def _spawn(library: str, size: int) -> None:
    importlib.import_module(library).spawn(noop, nprocs=size)


def _processes(size: int) -> None:
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=noop) for _ in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process ended with {process.exitcode}")


def _pool(size: int) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(size, meet, (context.Barrier(size),)) as pool:
        pool.starmap(noop, [()] * size, chunksize=1)


def _executor(size: int) -> None:
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(size, context, meet, (context.Barrier(size),)) as pool:
        for future in [pool.submit(noop) for _ in range(size)]:
            future.result()


def _loky(size: int) -> None:
    from loky import ProcessPoolExecutor

    with ProcessPoolExecutor(size) as pool:
        for future in [pool.submit(noop) for _ in range(size)]:
            future.result()


def _joblib(size: int) -> None:
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

    if size == 1:
        raise RuntimeError("joblib starts no process for one job")
    Parallel(n_jobs=size, batch_size=1)(delayed(noop)() for _ in range(size))
    get_reusable_executor().shutdown(wait=True)


def _pebble(size: int) -> None:
    from pebble import ProcessPool

    context = multiprocessing.get_context("spawn")
    with ProcessPool(max_workers=size, context=context, initializer=meet, initargs=(context.Barrier(size),)) as pool:
        for future in [pool.schedule(noop) for _ in range(size)]:
            future.result()


def _mpire(size: int) -> None:
    from mpire import WorkerPool

    barrier = multiprocessing.get_context("spawn").Barrier(size)
    with WorkerPool(size, start_method="spawn", shared_objects=barrier) as pool:
        pool.map(given_noop, range(size), chunk_size=1, worker_init=meet_given)


def given_noop(*_given: Any) -> None:
    """Do nothing, as mpire calls it: with the shared object and an item."""


def _floor(size: int) -> None:
    for process in [subprocess.Popen([sys.executable, "-c", "import pickle"]) for _ in range(size)]:
        process.wait()


def _measure(run: Callable[[int], None], size: int, *, once: bool = False) -> Sample:
    run(2)  # what a library imports when it is first used is not part of it
    times = 1 if once or size > 8 else 3
    return Sample({"elapsed": [elapsed_ms(partial(run, size)) for _ in range(times)]})


CASE = Case(
    name="functions",
    measures="N empty functions in N new interpreters, from the call to all results; the floor is N x "
    "(python -c 'import pickle'), which are waited for. loky's and joblib's have no barrier: they start all N at once",
    units={"elapsed": "ms"},
    targets=(
        Target("elapsed", "<=", 1.6, of=FLOOR, size=64),
        Target("elapsed", "<=", 1 / 20, of=TORCH, size=8),
    ),
    contenders={
        PHALANX: partial(_measure, partial(_spawn, "phalanx.spawn")),
        TORCH: partial(_measure, partial(_spawn, "torch.multiprocessing"), once=True),
        "multiprocessing": partial(_measure, _processes),
        "Pool": partial(_measure, _pool),
        "futures": partial(_measure, _executor),
        "loky": partial(_measure, _loky),
        "joblib": partial(_measure, _joblib),
        "pebble": partial(_measure, _pebble),
        "mpire": partial(_measure, _mpire),
        FLOOR: partial(_measure, _floor),
    },
    sizes=(1, 8, 64, 256),
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=100.0,
)
