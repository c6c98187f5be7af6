"""How much a function worker costs under ``spawn`` beyond the interpreter that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from benchmarks.case import FLOOR, PEER, PHALANX, Case, Sample, Target
from benchmarks.group import elapsed_ms, repeat, run_ms
from benchmarks.noop import noop

WORKERS = 64


def _phalanx() -> Sample:
    return Sample({"elapsed": repeat(3, partial(run_ms, PHALANX, noop, WORKERS))})


def _peer() -> Sample:
    # Once, and cold: each of its workers imports torch.
    return Sample({"elapsed": [run_ms(PEER, noop, WORKERS)]})


def _floor() -> Sample:
    interpreter = [sys.executable, "-c", "import pickle"]
    one = partial(elapsed_ms, partial(subprocess.run, interpreter, check=True))
    return Sample({"elapsed": [took * WORKERS / len(os.sched_getaffinity(0)) for took in repeat(20, one)]})


CASE = Case(
    name="spawn64",
    measures=f"{WORKERS} empty functions under spawn; the floor is {WORKERS} x (python -c 'import pickle') / cores",
    units={"elapsed": "ms"},
    targets=(Target("elapsed", "<=", 1.6, of=FLOOR),),
    contenders={PHALANX: _phalanx, PEER: _peer, FLOOR: _floor},
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
)
