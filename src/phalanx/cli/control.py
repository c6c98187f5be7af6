"""``phalanx stop``, ``restart``, ``signal``, ``pause`` and ``resume``: a hand on a run from another terminal.

Owns the options, and what a person reads. `phalanx._run.control` does it, in the launcher.
"""

from __future__ import annotations

import os
import signal as signals
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from phalanx._base.text import how_many, name_ranks
from phalanx._base.tty import printable
from phalanx._run.attached import AttachedRun
from phalanx._runs import catalog
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._declare import reading
from phalanx.cli._options import live_run, read_ranks, run_argument
from phalanx.cli._restarts import signal_of

_RUNS = run_argument(state="running")


def read_signal(text: str) -> signals.Signals:
    """Read a signal: its number, or its name with or without SIG. Raises ValueError.

    >>> read_signal("usr1"), read_signal("SIGUSR1"), read_signal("10") == signals.SIGUSR1
    (<Signals.SIGUSR1: 10>, <Signals.SIGUSR1: 10>, True)
    """
    wrong = f"{text!r}: expected a signal, like USR1, SIGUSR1 or 10"
    if not text.strip().isdecimal():
        return signal_of(text, wrong)
    try:
        return signals.Signals(int(text))
    except ValueError:
        raise ValueError(wrong) from None


@contextmanager
def _asking(attached: AttachedRun) -> Iterator[None]:
    """Print which nodes have not answered. Raises ClickException: the launcher has not, or has refused."""
    try:
        yield
    except RuntimeError as error:
        raise click.ClickException(printable(str(error))) from None
    for host, why in attached.missing.items():
        click.echo(printable(f"phalanx: host {host}: {why}"), err=True)


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--now", is_flag=True, help="Kill the workers at once, as a second Ctrl-C does.")
@_RUNS
def stop(run: str | None, *, now: bool, log_dir: str | None) -> None:
    """Stop RUN as a signal to its launcher does: notice, SIGTERM, the grace period, SIGKILL.

    \b
    phalanx stop                         the latest run that runs
    phalanx stop 20261120-1030 --now

    Waits until the run has ended, and prints how; Ctrl-C ends only the wait. A command of the run's own --on-event does
    not wait. The report says who has asked. A job of many machines is stopped on all of them. A further stop kills the
    workers. The exit code is 0 if the run has ended.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    attached = AttachedRun(live_run(log_dir, run))
    with _asking(attached):
        attached.stop(now=now)
    if os.path.realpath(os.environ.get("PHALANX_EVENT_RUN_DIR") or os.devnull) == os.path.realpath(attached.path):
        click.echo(printable(f"{attached.name}: its end waits for this command of --on-event"))
        return
    state, found = attached.wait(), catalog.look(attached.path).run
    cause = f": {found.cause}" if found is not None and found.cause else ""
    click.echo(printable(f"{attached.name}: {state}{cause}"))


@click.command(cls=Command, context_settings=SETTINGS)
@_RUNS
def restart(run: str | None, *, log_dir: str | None) -> None:
    """End the workers of RUN within the grace period, and start all of them again: its next attempt.

    It counts as none of --max-restarts. A run that waits for its next attempt begins that when the delay is over.
    """
    attached = AttachedRun(live_run(log_dir, run))
    with _asking(attached):
        attached.restart()
    click.echo(printable(f"{attached.name}: its next attempt follows, once none of its workers is left"))


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("number", metavar="SIGNAL", callback=reading(read_signal))
@click.option("--rank", "ranks", metavar="RANK,...", callback=reading(read_ranks), help="Only these ranks, like 0,4-7.")
@_RUNS
def signal(run: str | None, *, number: signals.Signals, ranks: Any, log_dir: str | None) -> None:
    """Send SIGNAL to the workers of RUN that run; to each worker itself, not to what it has started.

    \b
    phalanx signal USR1                  all workers of the latest run that runs
    phalanx signal USR1 20261120-1030 --rank 3

    How a worker ends that the signal ends is its own failure: to stop a run, use phalanx stop.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    attached = AttachedRun(live_run(log_dir, run))
    with _asking(attached):
        got = attached.signal(number, ranks)
    missing = sorted(set(ranks or ()).difference(got))
    if missing:
        click.echo(printable(f"phalanx: {name_ranks(missing)}: no such worker runs"), err=True)
    if got:
        click.echo(printable(f"{attached.name}: {number.name} to {name_ranks(got)}"))
    sys.exit(not got or bool(missing))


@click.command(cls=Command, context_settings=SETTINGS)
@_RUNS
def pause(run: str | None, *, log_dir: str | None) -> None:
    """Stop the processes of RUN (SIGSTOP) until phalanx resume. Timers and heartbeats rest meanwhile.

    They keep their memory, and that of their GPUs; connections to other programs may time out. A stop of the run
    continues them first.
    """
    attached = AttachedRun(live_run(log_dir, run))
    with _asking(attached):
        ranks = attached.pause()
    _print(attached, ranks, "paused; phalanx resume continues")


@click.command(cls=Command, context_settings=SETTINGS)
@_RUNS
def resume(run: str | None, *, log_dir: str | None) -> None:
    """Continue the processes of RUN that phalanx pause has stopped."""
    attached = AttachedRun(live_run(log_dir, run))
    with _asking(attached):
        ranks = attached.resume()
    _print(attached, ranks, "continued")


def _print(attached: AttachedRun, ranks: list[int], what: str) -> None:
    """Print what has become of workers. Exit code 1: of none, for no node has done it, and why is printed."""
    if not ranks:
        sys.exit(1)
    click.echo(printable(f"{attached.name}: {how_many(len(ranks), 'worker')} {what}"))
