"""What a launcher costs as a whole: a program that does nothing, from the command line to the exit code."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from time import perf_counter

from benchmarks.case import FLOOR, PEER, PHALANX, Case, Sample, Target
from benchmarks.group import repeat

COMMAND = "/bin/true"
TIMES = {PHALANX: 10, PEER: 2, FLOOR: 10}
LAUNCHERS = {
    PHALANX: ("-m", "phalanx", "run", "--no-python"),
    PEER: ("-m", "torch.distributed.run", "--standalone", "--no-python"),
    FLOOR: ("-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[2:]))"),
}


def _measure(contender: str) -> Sample:
    peaks: list[float] = []

    def run() -> float:
        logs = () if contender == FLOOR else ("--log-dir", tempfile.mkdtemp())
        command = [sys.executable, *LAUNCHERS[contender], *(logs or ("-",)), COMMAND]
        began = perf_counter()
        pid = os.posix_spawn(command[0], command, os.environ)
        _, status, usage = os.wait4(pid, 0)
        took = (perf_counter() - began) * 1e3
        if status:
            raise RuntimeError(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
        # Of the launcher, or of what it waited for, whichever had more (getrusage(2), in kB).
        peaks.append(usage.ru_maxrss * 1024 / 1e6)
        return took

    return Sample({"elapsed": repeat(TIMES[contender], run), "memory": peaks[1:]})


CASE = Case(
    name="run_true",
    measures=f"phalanx run --no-python -- {COMMAND} and its like, as whole processes; memory is that of the largest "
    f"of their processes; the floor is a python that calls it",
    units={"elapsed": "ms", "memory": "MB"},
    targets=(Target("elapsed", "<=", 0.083, of=PEER), Target("memory", "<", 40, worst=True)),
    contenders={name: partial(_measure, name) for name in (PHALANX, PEER, FLOOR)},
    rounds=3,
    peer_rounds=2,
    warm_up=False,
)
