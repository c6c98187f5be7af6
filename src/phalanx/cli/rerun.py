"""``phalanx rerun``: a run once more, with the options that it had: its `job.toml`, read by ``phalanx run``."""

from __future__ import annotations

import os
import shlex

import click

from phalanx._base import files
from phalanx._base.stderr import say
from phalanx._runs.record import CONFIG
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._declare import ignore_environment
from phalanx.cli._options import refusal, resolved, run_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._runs.catalog import RunDir


@click.command(cls=Command, context_settings=SETTINGS)
@run_argument()
@click.option("--here", is_flag=True, help="In the current folder, though the run was started in another one.")
@click.pass_context
def rerun(ctx: click.Context, run: str | None, *, log_dir: str | None, here: bool) -> None:
    """Start RUN again, with the same script, arguments and options.

    \b
    phalanx rerun                        the latest run
    phalanx rerun 20261120-1030

    It is phalanx run -f with the job.toml in the run's folder; environment variables set no option. Secrets are not in
    that file: they are taken from the environment, and nothing starts if one is not there. RUN is as for phalanx logs.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = resolved(log_dir, run)
    path = os.path.join(found.path, CONFIG)
    if not found.is_ours:
        msg = f"{found.name} belongs to uid {found.owner}: look at {path} before you run it, by phalanx run -f"
        raise click.ClickException(msg)
    if found.state == "running":
        raise click.ClickException(f"{found.name} still runs; a second one beside it: phalanx run -f {path}")
    _check_file(found, path)
    if not here:
        _check_folder(found)
    command = [] if found.run is None else found.run.argv or found.run.command
    ignore_environment(ctx)
    from phalanx.cli.run import run as command_run

    with command_run.make_context("run", ["-f", path], parent=ctx.parent) as inner:
        say(f"{found.name} again: {shlex.join(command)}" if command else f"{found.name} again")
        command_run.invoke(inner)


def _check_file(found: RunDir, path: str) -> None:
    """Refuse a run that has no job file, or another user's. Raises ClickException."""
    try:
        files.read(path, 1, owners={os.geteuid(), files.ROOT})
    except FileNotFoundError:
        msg = (
            f"{found.name} has no {CONFIG}: phalanx run has not started it, or an older version has, or with arguments "
            "that are not UTF-8, or the file could not be written"
        )
        raise click.ClickException(msg) from None
    except OSError as error:
        raise refusal(error) from None


def _check_folder(found: RunDir) -> None:
    """Refuse another current folder than the run's. Raises ClickException."""
    was = "" if found.run is None else found.run.cwd
    try:
        is_same = bool(was) and os.path.samefile(was, os.curdir)
    except OSError:
        is_same = False
    if not is_same:
        where = f"was started in {was}" if was else "does not say in which folder it was started"
        msg = f"{found.name} {where}: go there, or give --here to start it in the current folder"
        raise click.ClickException(msg)
