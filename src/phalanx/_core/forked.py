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
    *(f"phalanx._core.{name}" for name in ("culprit", "escalation", "evidence", "guard", "payload", "remains")),
    *(f"phalanx._core.{name}" for name in ("rotate", "starting", "worker")),
)
_HEAVY = ("cloudpickle", "linecache", "tokenize")
_OF_MULTIPROCESSING = ("multiprocessing.popen_fork", "multiprocessing.reduction", "multiprocessing.util")


def load() -> None:
    """Import it all; what takes long only where there are other threads."""
    from importlib import import_module

    names = [*_LIGHT]
    if len(os.listdir("/proc/self/task")) > 1:
        names += _HEAVY
    if "multiprocessing.process" in sys.modules:
        names += _OF_MULTIPROCESSING
    for name in names:
        if name not in sys.modules:
            import_module(name)
