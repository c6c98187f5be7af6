"""How soon ``wait()`` returns once one worker of a group has failed and the others had to be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import PERIOD, repeat, start

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 8
SETTLE = {PHALANX: 0.03, TORCH: 0.0, FLOOR: 0.0}
"""Seconds that a contender, as it comes, lets the other workers go on after the first failure."""

# The peers say "ready" in a FIFO and wait for SIGTERM; rank 0 hears them all, lets the launcher settle in its wait,
# notes the moment (CLOCK_MONOTONIC is the same for all processes) and goes.
_WORKER = f"""
import os, signal, sys, time
rank, ready, moment = sys.argv[1:]
fifo = os.open(ready, os.O_RDWR)
if rank != "0":
    os.write(fifo, b".")
    signal.pause()
heard = 0
while heard < {WORKERS - 1}:
    heard += len(os.read(fifo, {WORKERS}))
out = os.open(moment, os.O_WRONLY | os.O_CREAT)
time.sleep(0.2)
os.write(out, repr(time.monotonic()).encode())
os._exit(1)
"""


def _beyond_settle(contender: str, group: Callable[[list[tuple[object, ...]]], float]) -> float:
    folder = Path(tempfile.mkdtemp())
    ready, moment = folder / "ready", folder / "moment"
    os.mkfifo(ready)
    returned = group([("-S", "-E", "-c", _WORKER, str(rank), str(ready), str(moment)) for rank in range(WORKERS)])
    return (returned - float(moment.read_text()) - SETTLE[contender]) * 1e3


def _group(contender: str, args: list[tuple[object, ...]], period: float = PERIOD) -> float:
    context = start(contender, sys.executable, args)
    result = context.wait(period=period)
    returned = monotonic()
    context.close()
    if 0 not in result.failures:
        raise RuntimeError(f"rank 0 was to fail: {result}")
    return returned


def _bare(args: list[tuple[object, ...]]) -> float:
    workers = [subprocess.Popen([sys.executable, *map(str, arg)]) for arg in args]
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        worker.wait()
    return monotonic()


def _measure(contender: str) -> Sample:
    group = _bare if contender == FLOOR else partial(_group, contender)
    figures = {"beyond settle": repeat(5, partial(_beyond_settle, contender, group))}
    if contender == TORCH:
        figures["by default"] = [_beyond_settle(contender, partial(_group, contender, period=1))]
    return Sample(figures)


CASE = Case(
    name="exit_to_wait",
    measures=f"{WORKERS} workers, one exits with 1: from its exit to the return of wait(), less the settle window; "
    f"torch looks every {PERIOD:g} s, by default once a second",
    units={"beyond settle": "ms", "by default": "ms"},
    targets=(Target("beyond settle", "<", 15),),
    contenders={name: partial(_measure, name) for name in (PHALANX, TORCH, FLOOR)},
    peer_rounds=1,
    warm_up=False,
)
