"""One of N programs fails: how soon the launcher has ended the others, and itself."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.case import PHALANX, TORCH, Case, Sample, Target
from benchmarks.jobs import FAILS, Started
from benchmarks.launchers import LAUNCHERS

SETTLE, LIMIT = 0.5, 30.0


def _measure(name: str, copies: int) -> Sample:
    with Started(name, FAILS, copies) as job:
        job.wait_ready()
        time.sleep(SETTLE)
        job.let_go()
        code = job.wait(LIMIT)
        ended = time.time()
        left = len(job.left())
        moment = float((job.folder / "moment").read_text())
        return Sample(
            {"ended": [(ended - moment) * 1e3], "left": [left], "told as success": [int(code == 0)]},
        )


CASE = Case(
    name="failure",
    measures="one of N programs exits with 1, the others sleep: until the launcher has exited, and what is left then",
    units={"ended": "ms", "left": "processes", "told as success": "runs"},
    targets=(
        Target("ended", "<=", 0.2, of=TORCH, size=8),
        Target("left", "<=", 0, worst=True),
        Target("told as success", "<=", 0, worst=True),
    ),
    contenders={name: partial(_measure, name) for name, launcher in LAUNCHERS.items() if launcher.falls},
    sizes=(8, 64, 256),
    rounds=5,
    peer_rounds=3,
    warm_up=False,
    interpreter=PHALANX,
)
