"""Where the function of `spawn` is: in a module, or in the program's main module, by reference and by value."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from benchmarks.case import PHALANX, TORCH, Case, Sample, Target
from benchmarks.runner import ROOT

LIBRARY = {PHALANX: "phalanx.spawn", TORCH: "torch.multiprocessing"}
WAYS = {
    PHALANX: ("module", "reference", "value", "warm module", "warm reference", "warm value"),
    TORCH: ("module", "reference"),
}
SIZES = {PHALANX: (8, 64), TORCH: (8,)}
"""Each of the peer's processes imports torch: 64 of them take two minutes, see the case ``functions``."""


def _name(way: str, size: int) -> str:
    return f"{way}, {size}"


def _measure(contender: str, times: int) -> Sample:
    figures: dict[str, list[float]] = {}
    for way in WAYS[contender]:
        program = [sys.executable, str(ROOT / "benchmarks" / "main_noop.py"), LIBRARY[contender], way]
        command = [*program, str(times), *map(str, SIZES[contender])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        for size, took in json.loads(done.stdout).items():
            figures[_name(way, int(size))] = took
    return Sample(figures)


CASE = Case(
    name="spawn_main",
    measures="8 and 64 empty functions through spawn(), from the call to its end: of a module; of a main module that "
    "imports nothing, by reference and by value; as fresh interpreters, and as forks of a warm process",
    units=dict.fromkeys((_name(way, size) for way in WAYS[PHALANX] for size in SIZES[PHALANX]), "ms"),
    targets=(Target(_name("reference", 8), "<=", 1 / 20, of=TORCH),),
    contenders={PHALANX: partial(_measure, PHALANX, 3), TORCH: partial(_measure, TORCH, 1)},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=600.0,
)
