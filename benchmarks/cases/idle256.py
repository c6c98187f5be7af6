"""What a group costs while nothing happens in it."""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import procfs
from benchmarks.case import FLOOR, PEER, PHALANX, Case, Sample, Target
from benchmarks.group import start

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 256
SETTLE = 1.0
WINDOW = 10.0


def _idle(workers: set[int], wait: Callable[[float], object]) -> Sample:
    wait(SETTLE)  # what the start left to do is not idleness
    launcher = os.getpid()
    involved = {launcher} | procfs.helpers(launcher, workers)
    before, began = sum(map(procfs.cpu_seconds, involved)), time.monotonic()
    wait(WINDOW)
    used, took = sum(map(procfs.cpu_seconds, involved)) - before, time.monotonic() - began
    return Sample({"cpu": [100 * used / took], "threads": [procfs.threads(launcher)]})


def _measure(contender: str) -> Sample:
    context = start(contender, "/bin/sleep", [("600",)] * WORKERS, tee=True)
    try:
        return _idle(set(context.pids().values()), context.wait)
    finally:
        context.close()


def _floor() -> Sample:
    workers = [subprocess.Popen(["/bin/sleep", "600"]) for _ in range(WORKERS)]
    try:
        return _idle({worker.pid for worker in workers}, time.sleep)
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


CASE = Case(
    name="idle256",
    measures=f"{WORKERS} x sleep 600, teed, {WINDOW:g} s in wait(): CPU of launcher and helpers, in % of a core",
    units={"cpu": "%", "threads": "in launcher"},
    targets=(Target("cpu", "<", 0.2), Target("threads", "<=", 3, worst=True)),  # main, group, display
    contenders={PHALANX: partial(_measure, PHALANX), PEER: partial(_measure, PEER), FLOOR: _floor},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
)
