"""Forks of a test's process that do one thing and end."""

from __future__ import annotations

import os
from collections.abc import Callable


def start_fork(work: Callable[[], object]) -> int:
    """Have a fork do something and exit: with 0 if that went well, and did not return False. Return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(work() is False)
        finally:
            os._exit(code)
    return pid


def code_of_fork(work: Callable[[], object]) -> int:
    """Do as `start_fork`, and return the exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(start_fork(work), 0)[1])
