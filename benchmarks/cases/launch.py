"""What a launcher costs as a whole: N programs that do nothing, from the command line to the exit code."""

from __future__ import annotations

import subprocess
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.case import PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import repeat
from benchmarks.launchers import LAUNCHERS, Job

COMMAND = ["/bin/true"]


def _measure(name: str, copies: int) -> Sample:
    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = LAUNCHERS[name].command(Job(COMMAND, copies, Path(folder)))
            began = perf_counter()
            code = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            took = (perf_counter() - began) * 1e3
        if code:
            raise RuntimeError(f"{command[:4]} ended with {code}")
        return took

    times = 1 if name == TORCH or copies > 64 else 5
    return Sample({"elapsed": repeat(times, run) if times > 1 else [run()]})


CASE = Case(
    name="launch",
    measures=f"N x {COMMAND[0]} by a command, from its start to its exit",
    units={"elapsed": "ms"},
    targets=(Target("elapsed", "<=", 0.083, of=TORCH, size=1),),
    contenders={name: partial(_measure, name) for name, launcher in LAUNCHERS.items() if launcher.runs},
    sizes=(1, 8, 64, 256, 1024),
    rounds=5,
    peer_rounds=3,
    warm_up=False,
    limit=30.0,
    interpreter=PHALANX,
)
