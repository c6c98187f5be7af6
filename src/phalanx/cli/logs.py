"""``phalanx logs``: what the ranks of a run wrote, merged in the order of time, and followed while the run goes on.

Owns the options, which files they mean, and Ctrl-C while lines are shown. Merging and following are `_reader`'s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Self

import click

from phalanx._base.text import parse_duration
from phalanx._run.config import ConsoleConfig, console_specs
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._declare import click_options, reading
from phalanx.cli._options import ConsoleOptions, Whole, resolved, run_argument
from phalanx.cli._reader import STREAMS, Reader, attempt_folders

_SI_KERNEL = 0x80  # sigaction(2): the terminal has sent it, not a process


def read_since(text: str) -> float:
    """Read a time: how long ago (90s, 10m, 2h, 3d), or ISO 8601. Returns seconds since the epoch. Raises ValueError.

    >>> read_since("2026-11-20T12:00:00+00:00")
    1795176000.0
    """
    with contextlib.suppress(ValueError):
        return time.time() - parse_duration(text)
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        msg = f"{text!r}: expected how long ago, like 90s, 10m or 2h, or a time, like 2026-11-20T12:00:00"
        raise ValueError(msg) from None


@click.command(cls=Command, context_settings=SETTINGS, absent={"--tail": "it is --lines here, or -n"})
@run_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on as the run does; ends with it.")
@click.option("-n", "--lines", type=Whole(min=0), metavar="N",
              help="Only the last N lines of what there is; with -f, and what comes.")  # fmt: skip
@click.option("--since", callback=reading(read_since), metavar="TIME",
              help="Only what was written since: 90s, 10m, 2h ago, or a time, ISO 8601.")  # fmt: skip
@click.option("--until", callback=reading(read_since), metavar="TIME",
              help="Only what was written before: as of --since.")  # fmt: skip
@click.option("--attempt", type=Whole(min=0), metavar="N",
              help="Which start of the workers, from 0. Default: the last.")  # fmt: skip
@click.option("--stderr", "stream", flag_value="stderr", help="Only stderr.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only stdout.")
@click_options(ConsoleOptions)
def logs(
    run: str | None, *, log_dir: str | None, follow: bool, lines: int | None, since: float | None, until: float | None,
    attempt: int | None, stream: str | None, **shown: Any,
) -> None:  # fmt: skip
    """Print what the ranks of RUN wrote, in the order of time.

    \b
    phalanx logs                         the latest run
    phalanx logs -f --rank 3             its rank 3, as it goes on
    phalanx logs 20261120-1030 --stderr --since 10m
    phalanx logs -n 100 --grep Error     the last 100 lines with an error

    RUN is the name of a run's folder, the beginning of one, a run id, or the path of a folder; phalanx runs lists them.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    try:
        console = console_specs(ConsoleConfig(**shown))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if follow and until is not None:
        raise click.UsageError("--follow and --until exclude each other: what comes is later")
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--since, --until: there is no time between them; --until is the later one")
    found = resolved(log_dir, run)
    starting = follow and found.state == "running"  # what is not there yet may come
    attempts = attempt_folders(found.path)
    if not attempts and not starting:
        raise click.ClickException(f"{found.name} has no logs: its workers were never started")
    number = attempt if attempt is not None else max(attempts, default=0)
    known = ", ".join(map(str, sorted(attempts)))
    if number not in attempts and number < max(attempts, default=0):
        msg = f"--attempt: {found.name}: the logs of attempt {number} are not kept; there are those of {known}"
        raise click.UsageError(msg)
    if number not in attempts and not starting:
        msg = f"--attempt: {found.name} has no attempt {number}; its attempts are {known}"
        raise click.UsageError(msg)
    folder = attempts.get(number) or os.path.join(found.path, f"attempt_{number}")
    streams = (stream,) if stream else STREAMS
    reader = Reader(found, number, folder, console, streams, chosen=attempt is not None, follow=follow)
    try:
        with Interrupts(reader.interrupt):
            reader.read(since, until, last=lines)
    finally:
        reader.close()
    _leave(reader, found.path)


def _leave(reader: Reader, folder: str) -> None:
    """Say by the exit code how it ended. Raises ClickException, or SystemExit unless it has all been shown."""
    if reader.gone:
        raise click.ClickException(f"{folder}: the folder of this run is not there any more")
    if reader.interrupted:
        sys.exit(128 + signal.SIGINT)
    if reader.refusal is not None:
        raise click.ClickException(f"stdout: {getattr(reader.refusal, 'strerror', reader.refusal)}")
    if reader.broken:  # | head
        sys.exit(128 + signal.SIGPIPE)


class Interrupts:
    """Calls ``stop`` when SIGINT comes, in a thread of its own. A context manager, of the main thread.

    A Ctrl-C goes to all processes of a pipeline. Where stdout is a pipe its reader decides: most end by it, and then
    nobody reads any more; a pager does not, and goes on to show what there is, and what comes. So a SIGINT of the
    terminal's does nothing there; one that a process has sent always counts.

    SIGINT that is ignored (a shell's background) stays so.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._thread: threading.Thread | None = None
        self._over = False

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # threads that start from now on inherit that
            self._thread = threading.Thread(target=self._wait, name="phalanx-interrupts", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and thread.ident is not None:
            self._over = True
            signal.pthread_kill(thread.ident, signal.SIGINT)
            thread.join()
            # One that came just before, while the thread had its own to read, is still pending.
            if (found := signal.sigtimedwait({signal.SIGINT}, 0)) is not None:
                self._obey(found)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _wait(self) -> None:
        while True:
            found = signal.sigwaitinfo({signal.SIGINT})
            if self._over:
                return
            self._obey(found)

    def _obey(self, found: signal.struct_siginfo) -> None:
        is_piped = False
        with contextlib.suppress(OSError):  # closed
            is_piped = stat.S_ISFIFO(os.fstat(1).st_mode)
        if not (found.si_code == _SI_KERNEL and is_piped):
            self._stop()
