"""What survives: SIGKILL to the launcher, and SIGTERM to one whose programs, and their children, ignore it."""

from __future__ import annotations

import signal
import time
from functools import partial

from benchmarks.case import PHALANX, Case, Sample, Target
from benchmarks.jobs import IGNORES, SLEEPS, Started
from benchmarks.launchers import LAUNCHERS

SETTLE = 0.5
LIMITS = {"killed": 2.0, "deaf": 6.0}
"""Each launcher that can be told so kills 2 s after its SIGTERM; those that cannot have time for 5 s."""


def _measure(name: str, copies: int) -> Sample:
    figures: dict[str, float] = {}
    for what, script, number in (("killed", SLEEPS, signal.SIGKILL), ("deaf", IGNORES, signal.SIGTERM)):
        with Started(name, script, copies) as job:
            job.wait_ready()
            time.sleep(SETTLE)
            job.process.send_signal(number)
            took, left = job.end(LIMITS[what])
            figures[f"{what}, left"] = left
            if not left:
                figures[f"{what}, ended"] = took
    return Sample({figure: [value] for figure, value in figures.items()})


CASE = Case(
    name="kills",
    measures="N programs: SIGKILL to the launcher (killed); they and a child of each ignore SIGTERM, which the "
    f"launcher is sent (deaf): until nothing is left, and what is left after {LIMITS['killed']:g} and "
    f"{LIMITS['deaf']:g} s",
    units={"killed, ended": "ms", "killed, left": "processes", "deaf, ended": "ms", "deaf, left": "processes"},
    targets=(Target("killed, left", "<=", 0, worst=True), Target("deaf, left", "<=", 0, worst=True)),
    contenders={name: partial(_measure, name) for name in LAUNCHERS},
    sizes=(8, 64),
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    interpreter=PHALANX,
)
