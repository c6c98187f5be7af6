"""Imports, before a fork of the host, what that fork will need.

In a fork of a process with threads an import may wait without end, for a lock that a thread of the parent held. So what
guard, keeper and workers of start method "fork" may import is imported here, in the host.
"""

from __future__ import annotations

import os
import sys

_LIGHT = (
    *("atexit", "errno", "faulthandler", "fcntl", "gc", "json", "resource", "select", "signal", "stat", "threading"),
    "traceback",
    *(f"multiprocessing.{name}" for name in ("context", "popen_fork", "reduction", "resource_tracker", "util")),
    *("phalanx._base.process", "phalanx._base.std_streams"),
    "phalanx._evidence.recording",
    *("phalanx._timers.escalation", "phalanx._timers.table"),
    *(f"phalanx._engine.keeper.{name}" for name in ("fork_process", "guard", "rotated_logs", "start_group", "sweep")),
    *(f"phalanx._engine.pickling.{name}" for name in ("by_value", "picklers", "rebuild", "results", "unpicklable")),
    "phalanx._engine.rotation.log_writer",
    "phalanx._engine.worker.forked",
)
_HEAVY = ("cloudpickle", "linecache", "phalanx._engine.pickling.pack", "tokenize")


def load() -> None:
    """Import all of it; what takes long only where there are other threads."""
    from importlib import import_module

    names = [*_LIGHT]
    if _threads() != 1:
        names += _HEAVY
    if "torch" in sys.modules:
        names.append("phalanx._engine.pickling.tensors")
    for name in names:  # an import that another thread has begun is waited for
        import_module(name)


def _threads() -> int:
    """The number of threads; 0 when /proc does not show it."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
