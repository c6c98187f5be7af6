"""A named pipe that all workers of a host write their timers to, as fast as they can."""

from __future__ import annotations

from functools import partial

from benchmarks import chatter, timers
from benchmarks.case import PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import start

WORKERS = 20
PAIRS = 5_000


def _measure(contender: str, max_interval: float) -> Sample:
    with timers.watching(contender, timers.FILE, max_interval) as handle, chatter.Meeting(WORKERS) as meeting:
        context = start(contender, timers.flood, [(contender, handle, meeting.paths, PAIRS)] * WORKERS)
        meeting.hear()
        began = meeting.release()
        ended = max(meeting.hear())
        result = context.wait()
        context.close()
    if result.is_failed():
        raise RuntimeError(f"workers failed: {result.failures}")
    return Sample({"wall": [(ended - began) / 1e9], "errors": [sum(result.return_values.values())]})


CASE = Case(
    name="timer_flood",
    measures=f"{WORKERS} workers take and release {PAIRS} timers each through the named pipe: until all have, and how"
    " many pairs raised an error in the worker",
    units={"wall": "s", "errors": "pairs"},
    targets=(Target("errors", "<=", 0, worst=True),),
    contenders={PHALANX: partial(_measure, PHALANX, 60.0), TORCH: partial(_measure, TORCH, 1.0)},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
)
