"""N programs that sleep, under each launcher: until all are up, what it costs while nothing happens, and their end."""

from __future__ import annotations

import signal
import time
from functools import partial

from benchmarks import procfs
from benchmarks.case import PHALANX, Case, Sample, Target
from benchmarks.jobs import SLEEPS, Started
from benchmarks.launchers import LAUNCHERS

SETTLE, WINDOW, LIMIT = 1.0, 3.0, 20.0


def _measure(name: str, copies: int) -> Sample:
    with Started(name, SLEEPS, copies) as job:
        up = job.wait_ready()
        time.sleep(SETTLE)  # what the start left to do is not idleness
        beside = job.beside()
        before, began = sum(map(procfs.cpu_seconds, beside)), time.monotonic()
        time.sleep(WINDOW)
        used, took = sum(map(procfs.cpu_seconds, beside)) - before, time.monotonic() - began
        figures = {
            "up": up,
            "cpu": 100 * used / took,
            "threads": sum(map(procfs.threads, beside)),
            "memory": sum(map(procfs.pss_kb, beside)) * 1024 / 1e6,
        }
        job.process.send_signal(signal.SIGTERM)
        figures["ended"], figures["left"] = job.end(LIMIT)
    return Sample({figure: [value] for figure, value in figures.items()})


CASE = Case(
    name="stand",
    measures=f"N x sleep: until all are up; CPU (in % of a core, for {WINDOW:g} s), threads and memory (PSS) of all "
    f"that is no copy; from SIGTERM to the launcher until nothing is left, and what is left after {LIMIT:g} s",
    units={
        "up": "ms",
        "cpu": "%",
        "threads": "threads",
        "memory": "MB",
        "ended": "ms",
        "left": "processes",
    },
    targets=(Target("cpu", "<", 0.2, size=256), Target("left", "<=", 0, worst=True)),
    contenders={name: partial(_measure, name) for name in LAUNCHERS},
    sizes=(8, 64, 256),
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    interpreter=PHALANX,
)
