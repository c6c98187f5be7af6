"""What tests look up inside of a group: its helpers, its thread, and what its launcher knows. No other module does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from phalanx._engine.supervisor import Supervisor
from phalanx.multiprocessing import PContext
from tests.support.helpers import TIMEOUT


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
    wait_until_stopped([pid])


def wait_until_stopped(pids: Iterable[int], *, stopped: bool = True) -> None:
    """Wait until all of these processes are stopped; or until none is."""
    deadline = time.monotonic() + TIMEOUT
    for pid in pids:
        while (_state(pid) == b"T") != stopped:
            assert time.monotonic() < deadline
            os.sched_yield()


def _state(pid: int) -> bytes:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0]
