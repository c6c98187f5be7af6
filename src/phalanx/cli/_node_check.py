"""``--node-check``: what a machine runs before it takes part in a job, and the waits after failures."""

from __future__ import annotations

import os
import random
import tempfile

from phalanx._base import clock
from phalanx._base.clock import format_duration
from phalanx._base.latch import Latch
from phalanx._base.one_line import one_line
from phalanx._outcomes.outcome import signal_name
from phalanx.cli._rdzv_conf import NOT_FOR_WORKERS
from phalanx.cli._say import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.multiprocessing import RunProcsResult

LONGEST = 120.0
"""Seconds that a check may take."""

_FIRST, _MOST = 5.0, 600.0  # seconds between two checks: after the first failure, and at most
_GRACE = 5.0
_TAIL = 4096


def pass_check(command: str, patience: float, chance: Callable[[], float] = random.random) -> str:
    """Run a command until it succeeds. Returns "", or why it has not within ``patience`` seconds.

    After each failure it is waited for twice as long as before, less a random part: machines that fail together are
    not tried together.

    Args:
        command: What a shell (``sh -c``) runs. Its end with exit code 0 within `LONGEST` is success.
        patience: Seconds after which it is not tried again.
        chance: Returns a random number, 0 to 1.
    """
    deadline, pause, failures = clock.now() + patience, _FIRST, 0
    while (why := run_check(command)) is not None:
        failures += 1
        seconds = pause * (1 + chance()) / 2
        pause = min(2 * pause, _MOST)
        if clock.now() + seconds >= deadline:
            times = "once" if failures == 1 else f"{failures} times in {format_duration(patience)}"
            return f"this machine has failed its check {times}: {why}"
        say(f"--node-check: {why}; this machine takes no part, and is checked again in {format_duration(seconds)}")
        Latch().wait(seconds)
    return ""


def run_check(command: str) -> str | None:
    """Run a command once, and end all that it has started. Returns why it has failed; None: it has not."""
    from phalanx.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext

    with tempfile.TemporaryDirectory(prefix="phalanx-check-", ignore_cleanup_errors=True) as folder:
        logs = DefaultLogsSpecs(folder, redirects=Std.ALL)
        options: dict[str, Any] = {"grace": _GRACE, "announces": False}
        argv = {0: ("-c", command)}
        with SubprocessContext("node-check", "sh", argv, {0: NOT_FOR_WORKERS}, logs, **options) as group:
            group.start()
            result = group.wait(LONGEST)
        return f"it has not ended within {format_duration(LONGEST)}" if result is None else _failure(result)


def _failure(result: RunProcsResult) -> str | None:
    failure = next(iter(result.failures.values()), None)
    if failure is None:
        return None
    code = failure.exitcode
    how = f"exit code {code}" if code >= 0 else f"ended by {signal_name(-code)}"
    said = one_line(_last(failure.stderr_tail) or _last(_tail(failure.stdout_file)))
    return f"{how}: {said}" if said else how


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read(_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""
