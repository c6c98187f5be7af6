"""``--node-check``: what a machine runs before each attempt, and the waits after failures of one that comes to a job.

Owns when the command runs, its verdict and its output. What follows a failure is the team's business.
"""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Callable
from typing import Self

from phalanx._base import clock, interrupts
from phalanx._base.clock import format_duration
from phalanx._base.stderr import say
from phalanx._base.threads import Latch
from phalanx._base.tty import sanitise
from phalanx._engine import host_signals
from phalanx._run.runner import NoAttemptError
from phalanx._run.shell_command import GRACE, ShellCommand, append_output, entry

LONGEST = 120.0
"""Seconds that a check may take."""

FILE = "node-check.log"
"""What checks have written, in the run's folder."""

_FIRST, _MOST = 5.0, 600.0  # seconds between two checks: after the first failure, and at most
_NAME = "node-check"
_MOST_KEPT = 16  # checks whose output is kept until there is a folder for it
_MOST_SHOWN = 20  # lines


class NodeCheck:
    """The check of this machine, one at a time. A context manager, which `close`s it.

    Args:
        command: What a shell (``sh -c``) runs. Its end with exit code 0 within `LONGEST` is success.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._run: ShellCommand | None = None  # that is under way
        self._when = ""
        self._why = ""  # the latest check has failed
        self._folder = ""  # of the run, as far as is known
        self._kept: deque[str] = deque(maxlen=_MOST_KEPT)

    def begin(self, when: str, wake: Callable[[], None]) -> None:
        """Start the command, and return. ``wake`` is called when it is over, by a thread.

        ``when``: what it is for, to be noted with its output. Raises OSError: it cannot be started.
        """
        self._when, self._why = when, ""
        with interrupts.deferred():
            self._run = ShellCommand(_NAME, self._command, LONGEST)
        try:
            self._run.start(wake)
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
        return None if self._run is None else self._run.seconds_left

    def verdict(self) -> str | None:
        """Return "" if the latest check has succeeded, or why it has not; None: it is under way. Does not wait."""
        run = self._run
        if run is None:
            return self._why
        why = run.verdict()
        if why is not None:
            with interrupts.deferred():
                self._why, self._run = why, None
                self._kept.append(entry(self._when, why, run.output))
        return why

    def has_passed(self) -> bool:
        """Return whether the latest check has succeeded; False: it is under way. Raises NoAttemptError: it failed."""
        why = self.verdict()
        if why:
            msg = f"--node-check: {why}{self._tell_output()}"
            raise NoAttemptError(msg)
        return why is not None

    def stop(self, death_signal: int, grace: float) -> None:
        """Order the end of what is under way, within 5 s."""
        if self.verdict() is None and self._run is not None:  # which also sees to it that its end is told
            # A shell that is sent SIGINT waits for the command that it runs, which was not sent it.
            number = signal.SIGKILL if death_signal == signal.SIGKILL else signal.SIGTERM
            self._run.stop("it was stopped", number, min(grace, GRACE))

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
            append_output(folder, FILE, text)
        except OSError as error:
            say(f"--node-check: its output is lost: {os.path.join(folder, FILE)}: {error.strerror}")

    def close(self) -> None:
        """End what is left, and remove its files. Idempotent."""
        run = self._run
        if run is not None:
            run.close()
            self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show_output(self) -> None:
        """Show the last lines of the latest check, if the one that its verdict has is not all of it."""
        lines = self._kept[-1].splitlines()[1:] if self._kept else []
        for line in lines[-_MOST_SHOWN:] if len(lines) > 1 else []:
            say(f"[{_NAME}] {sanitise(line)}")

    def _tell_output(self) -> str:
        """Return where the output of the latest check is; or show it, where there is no folder for it."""
        if not self._folder:
            self.show_output()
            return ""
        self.write(self._folder)
        return f"; its output is in {os.path.join(self._folder, FILE)}"


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
