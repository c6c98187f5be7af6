"""What it costs a worker to take a timer and to release it."""

from __future__ import annotations

import mmap
import os
import subprocess
from functools import partial
from itertools import repeat
from time import monotonic_ns, perf_counter_ns
from typing import TYPE_CHECKING

from benchmarks import timers
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import start
from benchmarks.timers import FILE, GROUP, LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BATCHES = 5
PAIRS = {GROUP: 50_000, FILE: 4_000, LOCAL: 4_000}
"""Pairs in a batch. Both of a pipe's kind send more than its 64 KiB hold, so that the server must keep up."""

WRITTEN = "local, until written"
"""The peer's client puts requests into a buffer, which a thread of the worker's empties: that is part of the cost."""

NAMES = {GROUP: "expires", FILE: "file", LOCAL: "local"}


def _measure(contender: str, kinds: Sequence[str], max_interval: float) -> Sample:
    figures: dict[str, list[float]] = {}
    for kind in kinds:
        with timers.watching(contender, kind, max_interval) as handle:
            args = (contender, kind, handle, BATCHES, PAIRS[kind])
            context = start(contender, timers.cost, [args], **timers.options(kind))
            result = context.wait()
            context.close()
        if result.is_failed():
            raise RuntimeError(f"{kind}: {result.failures}")
        took, until_written, errors = result.return_values[0]
        figures |= {NAMES[kind]: took, f"{NAMES[kind]}, errors": [errors]}
        if kind == LOCAL:
            figures[WRITTEN] = [until_written]
    return Sample(figures)


def _batches(one: Callable[[int], None], pairs: int) -> list[float]:
    took = []
    for _ in range(BATCHES):
        began = perf_counter_ns()
        one(pairs)
        took.append((perf_counter_ns() - began) / pairs / 1e3)
    return took


def _floor() -> Sample:
    words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    now, never = monotonic_ns, (1 << 63) - 1

    def stores(pairs: int) -> None:
        for _ in repeat(None, pairs):
            words[8] = now() + 60_000_000_000
            words[8] = never

    line = b'{"pid": 424242, "scope_id": "step", "expiration_time": 1795184205.5, "signal": 9}\n'

    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        assert reader.stdin is not None
        write = partial(os.write, reader.stdin.fileno(), line)

        def writes(pairs: int) -> None:
            for _ in repeat(None, pairs):
                write()
                write()

        in_memory, in_pipe = _batches(stores, PAIRS[GROUP]), _batches(writes, PAIRS[FILE])
    return Sample({"expires": in_memory, "file": in_pipe, "local": in_pipe, WRITTEN: in_pipe})


CASE = Case(
    name="timer_cost",
    measures="a timer taken and released, while a server runs in another process: of the group (with expires(60)), and"
    " acquire and release of each client; the floor is a clock call and two stores, or two writes to a pipe",
    units=dict.fromkeys((*NAMES.values(), WRITTEN), "us") | {f"{name}, errors": "pairs" for name in NAMES.values()},
    targets=(
        Target("expires", "<", 1.5),
        *(Target(f"{name}, errors", "<=", 0, worst=True) for name in NAMES.values()),
    ),
    contenders={
        PHALANX: partial(_measure, PHALANX, timers.KINDS, 60.0),
        TORCH: partial(_measure, TORCH, (FILE, LOCAL), 1.0),
        FLOOR: _floor,
    },
    rounds=3,
    peer_rounds=2,
    warm_up=False,
)
