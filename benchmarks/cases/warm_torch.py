"""Functions that import torch: the first start pays for one import, a second start on what is warm for none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import elapsed_ms, library_of, start
from benchmarks.ready import Listener, with_module

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 8
MODULE = "torch"
SECOND = 5
"""Starts on what is warm, in each run."""


def _until_ready(contender: str, **options: Any) -> float:
    """Return the milliseconds from the call until the last worker has said that it has the module."""
    library_of(contender)
    with Listener() as listener:
        began = perf_counter()
        context = start(contender, with_module, [(MODULE, listener.address)] * WORKERS, **options)
        listener.wait(WORKERS)
        took = (perf_counter() - began) * 1e3
        context.close(signal.SIGKILL)
    return took


def _phalanx() -> Sample:
    first = _until_ready(PHALANX, start_method="forkserver", preload=[MODULE])
    from phalanx.multiprocessing import warm

    with warm(preload=[MODULE]):
        later: Callable[[], float] = partial(_until_ready, PHALANX, start_method="forkserver")
        second = [later() for _ in range(SECOND)]
    return Sample({"first start": [first], "second start": second, "spawn": [_until_ready(PHALANX)]})


def _peer() -> Sample:
    return Sample({"first start": [_until_ready(TORCH)]})


def _floor() -> Sample:
    plain = [sys.executable, "-c", f"import os, {MODULE}; os._exit(0)"]  # without the interpreter's end
    first = elapsed_ms(partial(subprocess.run, plain, check=True))
    import_module(MODULE)
    return Sample({"first start": [first], "second start": [_forks() for _ in range(SECOND)]})


def _forks() -> float:
    """Return the milliseconds until the last of as many bare forks of this process has said that it is there."""
    pids = []
    with Listener() as listener:
        began = perf_counter()
        for _ in range(WORKERS):
            pid = os.fork()
            if pid == 0:
                with_module(MODULE, listener.address)
            pids.append(pid)
        listener.wait(WORKERS)
        took = (perf_counter() - began) * 1e3
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return took


CASE = Case(
    name="warm_torch",
    measures=f"{WORKERS} functions that import torch, from the call until all have it; preloaded, and again on what is "
    f"warm; the floor is one python -c 'import torch', and {WORKERS} bare forks of it; "
    f"{len(os.sched_getaffinity(0))} cores",
    units={"first start": "ms", "second start": "ms", "spawn": "ms"},
    targets=(Target("first start", "<=", 1.25, of=FLOOR), Target("second start", "<=", 4, of=FLOOR)),
    contenders={PHALANX: _phalanx, TORCH: _peer, FLOOR: _floor},
    peer_rounds=1,
    limit=300.0,
    interpreter=TORCH,
)
