"""Functions that the tests of timers run as workers, in a module that their processes import."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

from phalanx import timer
from phalanx.timer import LocalTimerClient
from tests.helpers import pass_gate, tell


def trainer_func(mp_queue: Any, address: str, after: float) -> None:
    """The example of the original's documentation, with a child that must not survive it."""
    timer.configure(LocalTimerClient(mp_queue))
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    tell(address, str(os.getpid()))
    tell(address, str(child.pid))
    with timer.expires(after=after, scope="forward pass"):
        threading.Event().wait()


def hold(mp_queue: Any, address: str, gate: str, *timers: tuple[str, float]) -> None:
    """Take timers, say so, and go on when the gate opens, without giving one back."""
    client = LocalTimerClient(mp_queue)
    for scope, after in timers:
        client._acquire(scope, _now() + after)
    tell(address, str(os.getpid()))
    pass_gate(gate)


def flood(mp_queue: Any, address: str, pairs: int) -> None:
    """Take a timer and give it back, many times; say how many of them raised."""
    client = LocalTimerClient(mp_queue)
    errors = 0
    for number in range(pairs):
        try:
            client._acquire(f"scope {number % 7}", _now() + 60)
            client.release(f"scope {number % 7}")
        except OSError:
            errors += 1
    tell(address, str(errors))


def _now() -> float:
    from phalanx._core import clock

    return clock.now()
