"""What it costs to watch workers that take timers and release them all the time."""

from __future__ import annotations

import os
from functools import partial
from time import monotonic

from benchmarks import chatter, procfs, timers
from benchmarks.case import PHALANX, Case, Sample, Target
from benchmarks.group import start
from benchmarks.timers import GROUP

WORKERS = 64
DEPTH = 16
SECONDS = 10.0
SHORTEST = 5.0
"""Seconds of the innermost timer; each one outside it has a second more."""

PAUSE = 0.002
"""Seconds that a worker sleeps after each nest. Without that, 64 workers on few cores would measure the scheduler."""

MANY = 1000
"""Timers that each worker holds at once afterwards."""


def _measure() -> Sample:
    with chatter.Meeting(WORKERS) as meeting:
        worker = partial(timers.nest, depth=DEPTH, shortest=SHORTEST, pause=PAUSE, seconds=SECONDS, many=MANY)
        context = start(PHALANX, worker, [(meeting.paths,)] * WORKERS, **timers.options(GROUP))
        meeting.hear()
        used, began = procfs.cpu_seconds(os.getpid()), monotonic()
        meeting.release()
        meeting.hear()
        used, took = procfs.cpu_seconds(os.getpid()) - used, monotonic() - began
        result = context.wait()
        context.close()
    taken, left = zip(*result.return_values.values(), strict=True) if result.return_values else ((0,), (0,))
    figures = {"cpu": 100 * used / took, "timers": sum(taken) / took, "deaths": len(result.failures), "left": sum(left)}
    return Sample({f"{GROUP}, {name}": [value] for name, value in figures.items()})


_UNITS = {"cpu": "%", "timers": "/s", "deaths": "workers", "left": "slots"}

CASE = Case(
    name="timer_load",
    measures=f"{WORKERS} workers take {DEPTH} nested timers and release them, again and again, for {SECONDS:g} s: CPU"
    f" of the process that watches, in % of a core; and what {MANY} timers in each worker leave behind",
    units={f"{GROUP}, {name}": unit for name, unit in _UNITS.items()},
    targets=(
        Target(f"{GROUP}, cpu", "<", 3, worst=True),
        Target(f"{GROUP}, deaths", "<=", 0, worst=True),
        Target(f"{GROUP}, left", "<=", 0, worst=True),
    ),
    contenders={PHALANX: _measure},
    rounds=3,
    warm_up=False,
)
