"""What a group adds to starting N commands that do nothing, through the API that Phalanx and torch share."""

from __future__ import annotations

import subprocess
from functools import partial

from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import PERIOD, elapsed_ms, repeat, run_ms

COMMAND = "/bin/true"
BY_DEFAULT = 8
"""The size at which the peer's default is measured, too."""


def _times(size: int) -> int:
    return 5 if size <= 64 else 1


def _measure(contender: str, size: int) -> Sample:
    figures = {"elapsed": repeat(_times(size), partial(run_ms, contender, COMMAND, size))}
    if contender == TORCH and size == BY_DEFAULT:
        figures["by default"] = [run_ms(contender, COMMAND, size, period=1)]
    return Sample(figures)


def _floor(size: int) -> Sample:
    def run() -> None:
        for process in [subprocess.Popen([COMMAND]) for _ in range(size)]:
            process.wait()

    return Sample({"elapsed": repeat(_times(size), partial(elapsed_ms, run))})


CASE = Case(
    name="programs",
    measures=f"N x {COMMAND} by `start_processes`, from the call to the result; torch looks whether they have ended "
    f"every {PERIOD:g} s, by default once a second; the floor: N x Popen, wait for each",
    units={"elapsed": "ms", "by default": "ms"},
    targets=(Target("elapsed", "<=", 1.5, of=FLOOR, size=64),),
    contenders={PHALANX: partial(_measure, PHALANX), TORCH: partial(_measure, TORCH), FLOOR: _floor},
    sizes=(1, 8, 64, 256, 1024),
    warm_up=False,
)
