"""``phalanx logs``: what the ranks of a run wrote, merged in the order of time, and followed while the run goes on.

Owns the options and which files they mean. Merging, following and showing are the library's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import datetime
from typing import Any

import click

from phalanx._base import durations
from phalanx.cli._command import SETTINGS, Command
from phalanx.cli._console import ConsoleOptions, console_specs
from phalanx.cli._declare import click_options, reading
from phalanx.cli._interrupts import Interrupts
from phalanx.cli._options import Whole
from phalanx.cli._reader import STREAMS, Reader, attempt_folders
from phalanx.cli._runs_folders import refusal, resolved, run_argument


def read_since(text: str) -> float:
    """Read a time: how long ago (90s, 10m, 2h, 3d), or ISO 8601. Returns seconds since the epoch. Raises ValueError.

    >>> read_since("2026-11-20T12:00:00+00:00")
    1795176000.0
    """
    with contextlib.suppress(ValueError):
        return time.time() - durations.parse(text)
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        msg = f"{text!r}: expected how long ago, like 90s, 10m or 2h, or a time, like 2026-11-20T12:00:00"
        raise ValueError(msg) from None


@click.command(cls=Command, context_settings=SETTINGS, absent={"--tail": "it is --lines here, or -n"})
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on as the run does; ends with it.")
@click.option(
    "-n",
    "--lines",
    type=Whole(min=0),
    metavar="N",
    help="Only the last N lines of what there is; with -f, and what comes.",
)
@click.option(
    "--since",
    callback=reading(read_since),
    metavar="TIME",
    help="Only what was written since: 90s, 10m, 2h ago, or a time, ISO 8601.",
)
@click.option("--until", callback=reading(read_since), metavar="TIME",
              help="Only what was written before: as of --since.")  # fmt: skip
@click.option(
    "--attempt",
    type=Whole(min=0),
    metavar="N",
    help="Which start of the workers, from 0. Default: the last.",
)
@click.option("--stderr", "stream", flag_value="stderr", help="Only stderr.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only stdout.")
@click_options(ConsoleOptions)
def logs(
    run: str | None,
    *,
    log_dir: str | None,
    follow: bool,
    lines: int | None,
    since: float | None,
    until: float | None,
    attempt: int | None,
    stream: str | None,
    **shown: Any,
) -> None:
    """Print what the ranks of RUN wrote, in the order of time.

    \b
    phalanx logs                         the latest run
    phalanx logs -f --rank 3             its rank 3, as it goes on
    phalanx logs 20261120-1030 --stderr --since 10m
    phalanx logs -n 100 --grep Error     the last 100 lines with an error

    RUN is the name of a run's folder, the beginning of one, a run id, or the path of a folder; phalanx runs lists them.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    console = console_specs(ConsoleOptions(**shown))
    if follow and until is not None:
        raise click.UsageError("--follow and --until exclude each other: what comes is later")
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--since, --until: there is no time between them; --until is the later one")
    found = resolved(log_dir, run)
    try:
        starting = follow and found.state == "running"  # what is not there yet may come
        attempts = attempt_folders(found.path)
        if not attempts and not starting:
            msg = f"{found.name} has no logs: its workers were never started"
            raise click.ClickException(msg)
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
    except OSError as error:
        raise refusal(error) from None
    try:
        with Interrupts(reader.interrupt):
            reader.read(since, until, last=lines)
    except OSError as error:
        raise refusal(error) from None
    finally:
        reader.close()
    _leave(reader)


def _leave(reader: Reader) -> None:
    """Say by the exit code how it ended. Raises ClickException, or SystemExit unless it has all been shown."""
    if reader.gone:
        msg = f"{reader.path}: the folder of this run is not there any more"
        raise click.ClickException(msg)
    if reader.interrupted:
        sys.exit(128 + signal.SIGINT)
    if reader.refusal is not None:
        msg = f"stdout: {getattr(reader.refusal, 'strerror', reader.refusal)}"
        raise click.ClickException(msg)
    if reader.broken:  # | head
        sys.exit(128 + signal.SIGPIPE)
