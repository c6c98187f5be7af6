"""The cases by name, each in a module of its own that is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from benchmarks.case import Case

_MODULES = {
    "launch": "launch",
    "programs": "programs",
    "functions": "functions",
    "stand": "stand",
    "failure": "failure",
    "watched": "watched",
    "kills": "kills",
    "lines": "lines",
    "spawn_main": "spawn_main",
    "warm_torch": "warm_torch",
    "restart": "restart",
    "rendezvous": "rendezvous",
    "store_use": "store_use",
    "broadcast": "broadcast",
    "two_hosts": "two_hosts",
    "big_argument": "big_argument",
    "exit_to_wait": "exit_to_wait",
    "import": "import_time",
    "memory": "memory",
    "thousand": "thousand",
    "log_throughput": "log_throughput",
    "log_delay": "log_delay",
    "slow_console": "slow_console",
    "flood": "flood",
    "timer_expiry": "timer_expiry",
    "timer_cost": "timer_cost",
    "timer_flood": "timer_flood",
    "timer_load": "timer_load",
    "hang_report": "hang_report",
}

NAMES = tuple(_MODULES)

SMOKE = (
    *("launch", "programs", "functions", "stand", "failure", "watched", "kills", "lines"),
    *("import", "thousand", "log_throughput", "timer_cost", "timer_flood"),
)
"""Those that take a few seconds, at 8 where they have sizes, and need no peer."""


def load(name: str) -> Case:
    """Return the case of this name (one of ``NAMES``; else ``KeyError``)."""
    return cast("Case", import_module(f"{__name__}.{_MODULES[name]}").CASE)
