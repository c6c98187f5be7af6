"""Forks of a test's process that do one thing and end."""

from __future__ import annotations

import os
from collections.abc import Callable


def code_of_fork(work: Callable[[], object]) -> int:
    """Have a fork do something, which may return False for a failure, and return its exit code: 0 if it went well."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(work() is False)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
