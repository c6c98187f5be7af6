"""``phalanx stop``, ``restart``, ``signal``, ``pause`` and ``resume``: a hand on a run from another terminal.

Owns the options, and what a person reads. `phalanx._run.control` does it, in the launcher.
"""

from __future__ import annotations

import signal as signals
import sys
from contextlib import suppress
from typing import Any

import click

from phalanx._base.text import how_many, name_ranks
from phalanx._base.tty import printable
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._options import live_run, read_ranks, run_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._runs.catalog import RunDir

_RUNS = run_argument(state="running")
_LONGEST_WAIT = 1e6  # seconds that poll(2) can wait


def read_signal(text: str) -> signals.Signals:
    """Read a signal: its number, or its name with or without SIG. Raises ValueError.

    >>> read_signal("usr1"), read_signal("SIGUSR1"), read_signal("10") == signals.SIGUSR1
    (<Signals.SIGUSR1: 10>, <Signals.SIGUSR1: 10>, True)
    """
    name = text.strip().upper()
    with suppress(ValueError, KeyError):
        return signals.Signals(int(name)) if name.isdecimal() else signals.Signals[f"SIG{name.removeprefix('SIG')}"]
    msg = f"{text!r}: expected a signal, like USR1, SIGUSR1 or 10"
    raise ValueError(msg)


def _read(read: Any) -> Any:
    def convert(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else read(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def _ask(found: RunDir, question: str, **arguments: Any) -> list[dict[str, Any]]:
    """Ask the launcher of a run. Returns what each node has answered. Raises ClickException."""
    from phalanx._run.control_socket import NotAnsweredError, RefusedError, ask_for

    assert found.run is not None
    try:
        answer = ask_for(found.path, found.run, found.owner, question, **arguments)
    except (NotAnsweredError, RefusedError) as error:
        raise click.ClickException(printable(f"{found.name}: {error}")) from None
    for host, why in answer.get("why", {}).items():
        click.echo(printable(f"phalanx: host {host}: {why}"), err=True)
    nodes: list[dict[str, Any]] = answer["nodes"]
    return nodes


def _ranks(nodes: list[dict[str, Any]]) -> list[int]:
    return sorted(rank for node in nodes for rank in node["ranks"])


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--now", is_flag=True, help="Kill the workers at once, as a second Ctrl-C does.")
@_RUNS
def stop(run: str | None, *, now: bool, log_dir: str | None) -> None:
    """Stop RUN as a signal to its launcher does: notice, SIGTERM, the grace period, SIGKILL.

    \b
    phalanx stop                         the latest run that runs
    phalanx stop 20261120-1030 --now

    Returns when the run has ended, and prints how; Ctrl-C ends only the wait. The report says who has asked. A job of
    many machines is stopped on all of them. A further stop kills the workers. The exit code is 0 if the run has ended.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    from phalanx._base.process import Process
    from phalanx._runs import catalog

    found = live_run(log_dir, run)
    assert found.run is not None
    with suppress(ProcessLookupError), Process(found.run.pid, start=found.run.pid_started) as launcher:
        _ask(found, "stop", now=now)
        while not launcher.wait(_LONGEST_WAIT):
            pass
    found = catalog.look(found.path)
    cause = "" if found.run is None else found.run.cause
    click.echo(printable(f"{found.name}: {found.state}" + f" ({cause})" * bool(cause)))


@click.command(cls=Command, context_settings=SETTINGS)
@_RUNS
def restart(run: str | None, *, log_dir: str | None) -> None:
    """End the workers of RUN within the grace period, and start all of them again: its next attempt.

    It counts as none of --max-restarts. A run that waits for its next attempt begins that when the delay is over.
    """
    found = live_run(log_dir, run)
    _ask(found, "restart")
    click.echo(printable(f"{found.name}: its workers are stopped, and another attempt follows"))


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("number", metavar="SIGNAL", callback=_read(read_signal))
@click.option("--rank", "ranks", metavar="RANK,...", callback=_read(read_ranks), help="Only these ranks, like 0,4-7.")
@_RUNS
def signal(run: str | None, *, number: signals.Signals, ranks: Any, log_dir: str | None) -> None:
    """Send SIGNAL to the workers of RUN that run; to each worker itself, not to what it has started.

    \b
    phalanx signal USR1                  all workers of the latest run
    phalanx signal USR1 20261120-1030 --rank 3

    How a worker ends that the signal ends is its own failure: to stop a run, use phalanx stop.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = live_run(log_dir, run)
    got = _ranks(_ask(found, "signal", number=int(number), ranks=None if ranks is None else sorted(ranks)))
    missing = sorted(set(ranks or ()).difference(got))
    if missing:
        click.echo(printable(f"phalanx: {name_ranks(missing)}: no such worker runs"), err=True)
    if got:
        click.echo(printable(f"{found.name}: {number.name} to {name_ranks(got)}"))
    sys.exit(not got or bool(missing))


@click.command(cls=Command, context_settings=SETTINGS)
@_RUNS
def pause(run: str | None, *, log_dir: str | None) -> None:
    """Stop the processes of RUN (SIGSTOP) until phalanx resume. Timers and heartbeats rest meanwhile.

    They keep their memory, and that of their GPUs; connections to other programs may time out. A stop of the run
    continues them first.
    """
    found = live_run(log_dir, run)
    ranks = _ranks(_ask(found, "pause"))
    click.echo(printable(f"{found.name}: {how_many(len(ranks), 'worker')} paused; phalanx resume continues"))


@click.command(cls=Command, context_settings=SETTINGS)
@_RUNS
def resume(run: str | None, *, log_dir: str | None) -> None:
    """Continue the processes of RUN that phalanx pause has stopped."""
    found = live_run(log_dir, run)
    ranks = _ranks(_ask(found, "resume"))
    click.echo(printable(f"{found.name}: {how_many(len(ranks), 'worker')} continued"))
