"""How much a group adds to starting 64 commands that do nothing."""

from __future__ import annotations

import subprocess
from functools import partial

from benchmarks.case import FLOOR, PEER, PHALANX, Case, Sample, Target
from benchmarks.group import elapsed_ms, repeat, run_ms

WORKERS = 64
COMMAND = "/bin/true"


def _measure(contender: str) -> Sample:
    return Sample({"elapsed": repeat(5, partial(run_ms, contender, COMMAND, WORKERS))})


def _floor() -> Sample:
    def run() -> None:
        for process in [subprocess.Popen([COMMAND]) for _ in range(WORKERS)]:
            process.wait()

    return Sample({"elapsed": repeat(5, partial(elapsed_ms, run))})


CASE = Case(
    name="true64",
    measures=f"{WORKERS} x {COMMAND}, from the call to the result; the floor is {WORKERS} x Popen, then wait for each",
    units={"elapsed": "ms"},
    targets=(Target("elapsed", "<=", 1.5, of=FLOOR),),
    contenders={PHALANX: partial(_measure, PHALANX), PEER: partial(_measure, PEER), FLOOR: _floor},
)
