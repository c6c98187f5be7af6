"""How long a function that does nothing takes in N processes, with ``torch.multiprocessing.spawn`` beside it."""

from __future__ import annotations

import importlib
from functools import partial

from benchmarks.case import PEER, PHALANX, Case, Sample, Target
from benchmarks.group import elapsed_ms, repeat
from benchmarks.noop import noop

LIBRARY = {PHALANX: "phalanx.spawn", PEER: "torch.multiprocessing"}
SIZES = {"of 8": 8, "of 64": 64}


def _measure(contender: str, times: int) -> Sample:
    spawn = importlib.import_module(LIBRARY[contender]).spawn
    figures = {}
    for figure, workers in SIZES.items():
        one = partial(elapsed_ms, partial(spawn, noop, nprocs=workers))
        figures[figure] = repeat(times, one) if times else [one()]
    return Sample(figures)


CASE = Case(
    name="spawn_noop",
    measures="8 and 64 empty functions through spawn(), from the call to its return",
    units=dict.fromkeys(SIZES, "ms"),
    targets=(Target("of 8", "<=", 1 / 20, of=PEER), Target("of 64", "<=", 1 / 25, of=PEER)),
    # The peer goes once: each of its processes imports torch, the first of them a torch that is in the page cache.
    contenders={PHALANX: partial(_measure, PHALANX, 3), PEER: partial(_measure, PEER, 0)},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
)
