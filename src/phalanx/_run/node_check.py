"""``--node-check``: what a machine runs before each attempt, and the waits after failures of one that comes to a job.

Owns the processes of the command, its output and its time. What follows a failure is the team's business.
"""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
import time
from collections import deque
from contextlib import suppress

from phalanx._base import clock, files, interrupts
from phalanx._base.clock import format_duration
from phalanx._base.stderr import say
from phalanx._base.text import one_line
from phalanx._base.threads import Latch
from phalanx._base.tty import sanitise
from phalanx._engine import host_signals
from phalanx._logs.rotated import last_bytes, rotated_files
from phalanx._outcomes.failure import signal_name
from phalanx._outcomes.result import verdict as verdict_on
from phalanx._rendezvous.rdzv_conf import NOT_FOR_WORKERS
from phalanx._run.runner import NoAttemptError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

    from phalanx.multiprocessing import RunProcsResult, SubprocessContext

LONGEST = 120.0
"""Seconds that a check may take."""

FILE = "node-check.log"
"""What checks have written, in the run's folder."""

_FIRST, _MOST = 5.0, 600.0  # seconds between two checks: after the first failure, and at most
_GRACE = 5.0
_TAIL = 1 << 16  # bytes of each stream that are kept
_MOST_KEPT = 16  # checks whose output is kept until there is a folder for it
_MOST_SHOWN = 20  # lines


class NodeCheck:
    """The check of this machine, one at a time. A context manager, which `close`s it.

    Args:
        command: What a shell (``sh -c``) runs. Its end with exit code 0 within `LONGEST` is success.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._group: SubprocessContext | None = None  # of the check that is under way
        self._files: tempfile.TemporaryDirectory[str] | None = None
        self._is_watched = False  # whether the end of that calls `_wake`
        self._wake: Callable[[], None] = lambda: None
        self._until = math.inf  # when that has taken too long
        self._ended_by_us = ""  # why it was ended before
        self._when = ""
        self._why = ""  # the latest check has failed
        self._folder = ""  # of the run, as far as is known
        self._kept: deque[str] = deque(maxlen=_MOST_KEPT)

    def begin(self, when: str, wake: Callable[[], None]) -> None:
        """Start the command, and return. ``wake`` is called when it is over, by a thread.

        ``when``: what it is for, to be noted with its output. Raises OSError: it cannot be started.
        """
        from phalanx.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext

        try:
            with interrupts.deferred():
                self._wake = wake
                self._is_watched, self._when = False, when
                self._why, self._ended_by_us, self._until = "", "", clock.now() + LONGEST
                self._files = tempfile.TemporaryDirectory(prefix="phalanx-check-", ignore_cleanup_errors=True)
                logs: Any = DefaultLogsSpecs(self._files.name, redirects=Std.ALL, max_size=_TAIL, keep=1)
                self._group = SubprocessContext(
                    "node-check", "sh", {0: ("-c", self._command)}, {0: dict(NOT_FOR_WORKERS)}, logs,
                    grace=_GRACE, announces=False, speak=_speak,
                )  # fmt: skip
            self._group.start()
        except OSError as error:
            self.close()
            msg = f"--node-check: {error.strerror or error}"
            raise OSError(msg) from None

    @property
    def is_under_way(self) -> bool:
        """Whether a process of it is left."""
        return self.verdict() is None

    @property
    def seconds_left(self) -> float | None:
        """Seconds after which `verdict` is to be asked, though nobody was woken; None: there is no need."""
        is_bounded = self._group is not None and self._until < math.inf
        return max(0.0, self._until - clock.now()) if is_bounded else None

    def verdict(self) -> str | None:
        """Return "" if the latest check has succeeded, or why it has not; None: it is under way. Does not wait."""
        group = self._group
        if group is None:
            return self._why
        try:
            result = group.wait_gone(0)
        except RuntimeError as error:  # its keeper was lost; or it was never up, because a signal came
            return self._end(one_line(error.__cause__ or error), "")
        if result is not None:
            why = "" if result.succeeded else self._ended_by_us or _failure(result)
            return self._end(why, _output(result))
        with interrupts.deferred():  # a signal between the two would leave nobody woken
            if not self._is_watched:
                self._is_watched = True
                group.when_gone(self._wake)
        if clock.now() >= self._until:
            self._end_early(f"it has not ended within {format_duration(LONGEST)}", signal.SIGTERM, _GRACE)
        return None

    def has_passed(self) -> bool:
        """Return whether the latest check has succeeded; False: it is under way. Raises NoAttemptError: it failed."""
        why = self.verdict()
        if why:
            msg = f"--node-check: {why}{self._tell_output()}"
            raise NoAttemptError(msg)
        return why is not None

    def stop(self, death_signal: int, grace: float) -> None:
        """Order the end of what is under way, within 5 s."""
        if self.verdict() is None:  # which also sees to it that its end is told
            # A shell that is sent SIGINT waits for the command that it runs, which was not sent it.
            number = signal.SIGKILL if death_signal == signal.SIGKILL else signal.SIGTERM
            self._end_early("it was stopped", number, min(grace, _GRACE))

    def wait(self) -> str:
        """Run it, and return its `verdict`. Raises as `begin`; SignalException: a signal has come."""
        bell = Latch()
        self.begin("before this machine takes part", bell.open)
        while (why := self.verdict()) is None:
            with host_signals.delivering():
                bell.wait(-1 if self.seconds_left is None else self.seconds_left)
        return why

    def write(self, folder: str) -> None:
        """Add the output of checks that are over to the file in a run's folder; "": there is none, or not yet."""
        self._folder = folder
        if not (folder and self._kept):
            return
        with interrupts.deferred():
            text = "".join(self._kept)
            self._kept.clear()
        try:
            fd = files.opened(os.path.join(folder, FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with open(fd, "wb") as file:
                file.write(text.encode())
        except OSError as error:
            say(f"--node-check: its output is lost: {os.path.join(folder, FILE)}: {error.strerror}")

    def close(self) -> None:
        """End what is left, and remove its files. Idempotent."""
        group, temporary = self._group, self._files
        if group is not None:
            group.close(signal.SIGKILL)
            self._group = None
        if temporary is not None:
            temporary.cleanup()
            self._files = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show_output(self) -> None:
        """Show the last lines of the latest check, if the one that its verdict has is not all of it."""
        lines = self._kept[-1].splitlines()[1:] if self._kept else []
        for line in lines[-_MOST_SHOWN:] if len(lines) > 1 else []:
            _speak(sanitise(line))

    def _tell_output(self) -> str:
        """Return where the output of the latest check is; or show it, where there is no folder for it."""
        if not self._folder:
            self.show_output()
            return ""
        self.write(self._folder)
        return f"; its output is in {os.path.join(self._folder, FILE)}"

    def _end_early(self, why: str, death_signal: int, grace: float) -> None:
        assert self._group is not None
        self._ended_by_us, self._until = self._ended_by_us or why, math.inf
        self._group.order_close(death_signal, grace)

    def _end(self, why: str, output: str) -> str:
        with interrupts.deferred():
            self._why = why
            moment = time.strftime("%Y-%m-%d %H:%M:%S")
            self._kept.append(f"== {self._when}, {moment}: {why or 'exit code 0'}\n{output}")
            self.close()
        return why


def pass_check(check: NodeCheck, patience: float, chance: Callable[[], float] = random.random) -> str:
    """Run the check until it succeeds. Returns "", or why it has not within ``patience`` seconds.

    After each failure it is waited for twice as long as before, less a random part: machines that fail together are
    not tried together.

    Args:
        check: The check.
        patience: Seconds after which it is not tried again.
        chance: Returns a random number, 0 to 1.
    """
    deadline, pause, failures = clock.now() + patience, _FIRST, 0
    while why := check.wait():
        failures += 1
        seconds = pause * (1 + chance()) / 2
        pause = min(2 * pause, _MOST)
        if failures == 1:
            check.show_output()
        if clock.now() + seconds >= deadline:
            times = "once" if failures == 1 else f"{failures} times in {format_duration(patience)}"
            return f"this machine has failed its check {times}: {why}"
        say(f"--node-check: {why}; this machine takes no part, and is checked again in {format_duration(seconds)}")
        Latch().wait(seconds)
    return ""


def _speak(text: str) -> None:
    """Show a line of the check, or on its processes: no rank is meant."""
    say(f"[node-check] {text}")


def _failure(result: RunProcsResult) -> str:
    failure = next(iter(result.failures.values()), None)
    if failure is None:
        return verdict_on(result)[1]
    code = failure.exitcode
    how = f"exit code {code}" if code >= 0 else f"ended by {signal_name(-code)}"
    said = one_line(_last(failure.stderr_tail) or _last(_tail(failure.stdout_file)))
    return f"{how}: {said}" if said else how


def _output(result: RunProcsResult) -> str:
    """Return the last lines of stdout, and those of stderr."""
    found = [_tail(path) for streams in (result.stdouts, result.stderrs) for path in streams.values()]
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in found if text)


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _tail(path: str) -> str:
    data = b""
    for name in (*rotated_files(path), path):
        with suppress(OSError):
            data += last_bytes(name, _TAIL)[1]
    return data[-_TAIL:].decode("utf-8", "replace")
