"""What a fork of the host needs, loaded before the fork.

In a fork of a process with threads an import may wait for ever: for a lock that a thread held which is not there. So
whatever guard, keeper and workers of start method "fork" could come to import is imported here, in the host.
"""

from __future__ import annotations

import os
import sys

_LIGHT = (
    *("atexit", "errno", "faulthandler", "fcntl", "gc", "json", "resource", "select", "signal", "stat", "threading"),
    "traceback",
    *("phalanx._base.process", "phalanx._base.std_streams"),
    "phalanx._evidence.recording",
    "phalanx._timers.escalation",
    *(f"phalanx._engine.keeper.{name}" for name in ("child_scan", "guard", "orphans", "start_process")),
    *(f"phalanx._engine.pickling.{name}" for name in ("by_value", "payload", "picklers", "results", "unpicklable")),
    "phalanx._engine.rotation.log_writer",
    "phalanx._engine.worker.function",
)
_HEAVY = ("cloudpickle", "linecache", "tokenize")
_OF_MULTIPROCESSING = ("multiprocessing.popen_fork", "multiprocessing.reduction", "multiprocessing.util")
_ASKED = ("logging", "multiprocessing.resource_tracker")  # see `child`


def load() -> None:
    """Import it all; what takes long only where there are other threads."""
    from importlib import import_module

    names = [*_LIGHT]
    if _threads() != 1:
        names += _HEAVY
    if "multiprocessing" in sys.modules:
        names += _OF_MULTIPROCESSING
    if "torch" in sys.modules:
        names.append("phalanx._engine.pickling.tensors")
    names += filter(sys.modules.__contains__, _ASKED)
    for name in names:  # what another thread is loading is waited for: the fork would have half of it
        import_module(name)


def _threads() -> int:
    """How many there are; 0 when /proc does not show it."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
