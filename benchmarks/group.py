"""Starting a group through the API that Phalanx and its peer share by name.

One function serves both contenders, so that a difference in the figures is a difference of the libraries and not of
two pieces of benchmark code.
"""

from __future__ import annotations

import importlib
import tempfile
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.case import PHALANX, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARY = {PHALANX: "phalanx.multiprocessing", TORCH: "torch.distributed.elastic.multiprocessing"}


def library_of(contender: str) -> Any:
    """Import what starts a contender's groups. To be called before the clock is, where the first start counts."""
    return importlib.import_module(LIBRARY[contender])


def start(
    contender: str,
    entrypoint: Callable[..., object] | str,
    args: list[tuple[object, ...]],
    *,
    tee: bool = False,
    **options: Any,
) -> Any:
    """Start one worker per item of ``args`` and return the started context.

    With ``tee``, all streams are teed, each line with the prefix ``[rank] ``, whatever the contender's own would be.
    """
    library = library_of(contender)
    logs = library.DefaultLogsSpecs(log_dir=tempfile.mkdtemp(), tee=library.Std.ALL if tee else library.Std.NONE)
    ranks = range(len(args))
    prefixes = {rank: f"[{rank}] " for rank in ranks} if tee else None
    return library.start_processes(
        "benchmark", entrypoint, dict(enumerate(args)), {rank: {} for rank in ranks}, logs, log_line_prefixes=prefixes,
        **options,
    )  # fmt: skip


PERIOD = 0.01
"""Seconds between the looks of a peer's ``wait(period=...)``; its default, 1, would be most of the figure."""


def run_ms(contender: str, entrypoint: Callable[..., object] | str, workers: int, period: float = PERIOD) -> float:
    """Return the milliseconds from the call to the result for workers without arguments, all of which must succeed."""
    began = perf_counter()
    context = start(contender, entrypoint, [()] * workers)
    result = context.wait(period=period)
    took = (perf_counter() - began) * 1e3
    context.close()
    if result.is_failed():
        raise RuntimeError(f"{entrypoint} failed: {result.failures}")
    return took


def repeat(times: int, measure: Callable[[], float]) -> list[float]:
    """Measure once to warm up, then ``times`` times more, and return these."""
    measure()
    return [measure() for _ in range(times)]


def elapsed_ms(action: Callable[[], object]) -> float:
    """Return how long an action takes, in milliseconds."""
    began = perf_counter()
    action()
    return (perf_counter() - began) * 1e3
