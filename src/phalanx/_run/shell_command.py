"""A command of the user's that a shell runs beside the workers, within a time, as ``--node-check`` and ``--on-event``.

Owns its processes, which are a group of their own: none is left, whatever they do; and the end of its output.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from contextlib import ExitStack, suppress

from phalanx._base import clock, files, interrupts
from phalanx._base.clock import format_duration
from phalanx._base.stderr import say
from phalanx._base.text import one_line
from phalanx._logs.rotated import last_bytes, rotated_files
from phalanx._outcomes.failure import signal_name
from phalanx._outcomes.result import verdict as verdict_on
from phalanx._rendezvous.rdzv_conf import NOT_FOR_WORKERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx.multiprocessing import RunProcsResult, SubprocessContext

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""

_TAIL = 1 << 16  # bytes of each stream that are kept


class ShellCommand:
    """One run of a command by ``sh -c``.

    Args:
        name: What it is for: in lines on its processes, and in the name of its temporary folder.
        command: The command. Its end with exit code 0 within the time is success.
        longest: Seconds that it may take, with all that it starts.
        env: Variables beside those of this process, of which its secrets are left out.
        stdin: The descriptor that it reads; None: /dev/null.
        grace: Seconds between SIGTERM and SIGKILL.
        linger: Seconds for which processes may go on that it leaves behind when it has succeeded.
        can_be_mute: Whether it runs without output if there is no room for that.
        speak: Called with each line on its processes; default: it is printed.
    """

    def __init__(
        self, name: str, command: str, longest: float, *, env: Mapping[str, str] | None = None,
        stdin: int | None = None, grace: float = GRACE, linger: float = 0.0, can_be_mute: bool = False,
        speak: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._name, self._command, self._longest = name, command, longest
        self._env = {**(env or {}), **NOT_FOR_WORKERS}
        self._stdin = {} if stdin is None else {0: stdin}
        self._grace, self._linger, self._can_be_mute = grace, linger, can_be_mute
        self._speak: Callable[[str], None] = speak or (lambda text: say(f"[{name}] {text}"))
        self._group: SubprocessContext | None = None  # until its end is known
        self._held = ExitStack()
        self._wake: Callable[[], None] = lambda: None
        self._is_watched = False  # whether the end of the group calls that
        self._until = math.inf  # when it has taken too long
        self._ended_by_us = ""  # why it was ended before
        self._why = "it was not started"  # a signal may come before that
        self.output = ""
        """The last lines of its stdout, then those of its stderr, once it has ended."""

    def start(self, wake: Callable[[], None]) -> None:
        """Start it, and return. ``wake`` is called when it is over, by a thread. Raises OSError."""
        from phalanx.multiprocessing import DefaultLogsSpecs, Std

        self._wake, self._until = wake, clock.now() + self._longest
        try:
            with interrupts.deferred():
                folder = tempfile.TemporaryDirectory(prefix=f"phalanx-{self._name}-", ignore_cleanup_errors=True)
                self._held.callback(folder.cleanup)
            self._start(DefaultLogsSpecs(folder.name, redirects=Std.ALL, max_size=_TAIL, keep=1))
        except OSError:
            self.close()
            if not self._can_be_mute:
                raise
            self._start(DefaultLogsSpecs(os.devnull, redirects=Std.ALL))

    def _start(self, logs: Any) -> None:
        from phalanx.multiprocessing import SubprocessContext

        with interrupts.deferred():
            self._group = SubprocessContext(
                self._name, "sh", {0: ("-c", self._command)}, {0: self._env}, logs, stdin=self._stdin,
                grace=self._grace, linger=self._linger, announces=False, speak=self._speak,
            )  # fmt: skip
        try:
            self._group.start()
        except OSError:
            self.close()
            raise

    @property
    def seconds_left(self) -> float | None:
        """Seconds after which `verdict` is to be asked, though nobody was woken; None: there is no need."""
        is_bounded = self._group is not None and self._until < math.inf
        return max(0.0, self._until - clock.now()) if is_bounded else None

    def verdict(self) -> str | None:
        """Return "" if it has succeeded, or why it has not; None: a process of it is left. Does not wait."""
        group = self._group
        if group is None:  # it has ended, or was never started
            return self._why
        try:
            result = group.wait_gone(0)
        except RuntimeError as error:  # its keeper was lost; or it was never up, because a signal came
            return self._end(one_line(error.__cause__ or error))
        if result is not None:
            self.output = _output(result)
            return self._end("" if result.succeeded else self._ended_by_us or _failure(result))
        with interrupts.deferred():  # a signal between the two would leave nobody woken
            if not self._is_watched:
                self._is_watched = True
                group.when_gone(self._wake)
        if clock.now() >= self._until:
            self.stop(f"it has not ended within {format_duration(self._longest)}", signal.SIGTERM, self._grace)
        return None

    def stop(self, why: str, death_signal: int, grace: float) -> None:
        """Order its end. `verdict` returns ``why``, unless it ends well before, or was to be ended already."""
        if self._group is not None:
            self._ended_by_us, self._until = self._ended_by_us or why, math.inf
            self._group.order_close(death_signal, grace)

    def _end(self, why: str) -> str:
        with interrupts.deferred():
            self._why = why
            self.close()
        return why

    def close(self) -> None:
        """End what is left, and remove its files. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close(signal.SIGKILL)
        self._held.close()


def append_output(folder: str, name: str, entries: str) -> None:
    """Add text to a file in a run's folder. Raises OSError."""
    fd = files.opened(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(fd, "wb") as file:
        file.write(entries.encode())


def entry(when: str, why: str, output: str) -> str:
    r"""Return what is kept of a command: when it ran, how it has ended, and its output.

    >>> entry("attempt 0", "", "fine").endswith(": exit code 0\nfine")
    True
    """
    return f"== {when}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {why or 'exit code 0'}\n{output}"


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
