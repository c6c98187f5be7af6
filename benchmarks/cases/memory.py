"""The peak memory of the launcher and of what stands between it and its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from benchmarks import procfs
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import start

WORKERS = 8


def _sample(workers: set[int]) -> Sample:
    helpers = procfs.helpers(os.getpid(), workers)
    peaks = [procfs.peak_mb(pid) for pid in helpers]
    return Sample(
        {"launcher": [procfs.peak_mb(os.getpid())], "helper": peaks or [0.0], "helpers": [len(helpers)]},
        tuple(sorted(f"helper: {procfs.command(pid).replace(sys.executable, 'python')[:60]}" for pid in helpers)),
    )


def _measure(contender: str) -> Sample:
    context = start(contender, "/bin/sleep", [("600",)] * WORKERS)
    try:
        return _sample(set(context.pids().values()))
    finally:
        context.close()


def _floor() -> Sample:
    workers = [subprocess.Popen(["/bin/sleep", "600"]) for _ in range(WORKERS)]
    try:
        return _sample({worker.pid for worker in workers})
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


CASE = Case(
    name="memory",
    measures=f"peak resident memory with {WORKERS} workers; helpers are the processes between launcher and workers",
    units={"launcher": "MB", "helper": "MB", "helpers": "processes"},
    targets=(Target("launcher", "<", 40, worst=True), Target("helper", "<", 15, worst=True)),
    contenders={PHALANX: partial(_measure, PHALANX), TORCH: partial(_measure, TORCH), FLOOR: _floor},
    rounds=3,
    warm_up=False,
)
