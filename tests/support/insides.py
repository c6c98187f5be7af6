"""What tests look up inside of a group: its helpers, its thread, and what its launcher knows. No other module does."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from tests.support.helpers import TIMEOUT

if TYPE_CHECKING:
    from phalanx._engine.supervisor import Supervisor
    from phalanx.multiprocessing import PContext


def supervisor_of(group: PContext) -> Supervisor:
    """The launcher's end of a group that has been started."""
    return group._started()


def state_of(group: PContext) -> str:
    """The state of a group (`_engine.lifecycle`), as its launcher knows it."""
    return group._started().mirror.state


def guard_of(group: PContext) -> int:
    """The pid of a group's guard."""
    return group._started()._keeper._guard


def helpers_of(group: PContext) -> tuple[int, int]:
    """The pids of a group's guard and of its keeper."""
    guard = guard_of(group)
    with open(f"/proc/{guard}/task/{guard}/children") as file:
        [kept] = map(int, file.read().split())
    return guard, kept


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has taken effect."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT
    while True:
        with open(f"/proc/{pid}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] == b"T":
                return
        assert time.monotonic() < deadline
