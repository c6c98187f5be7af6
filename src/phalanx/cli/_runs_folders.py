"""The run that a command is about, and the folders in which it is looked for."""

from __future__ import annotations

import click

from phalanx._runs import paths
from phalanx.cli._options import Folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx._runs.catalog import RunDir

MANY = 1000
"""Runs in a folder of which a person is told."""


def places(log_dir: str | None) -> tuple[str, ...]:
    """Those in which runs are looked for: ``log_dir``, or else the default ones. Raises UsageError."""
    if log_dir is not None:
        return (log_dir,)
    try:
        return paths.search_folders()
    except paths.NoHomeError as error:
        msg = f"--log-dir: {error}"
        raise click.UsageError(msg) from None


def names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a run."""
    from phalanx._runs.catalog import find

    try:
        return [run.name for run in find(places(ctx.params.get("log_dir"))) if run.name.startswith(incomplete)]
    except (OSError, click.UsageError):
        return []


def run_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument RUN, and ``--log-dir``."""
    folder = click.option(
        "--log-dir",
        type=Folder(),
        envvar=["PHALANX_LOG_DIR", "PET_LOG_DIR"],
        help="Folder of the runs. Default: as of phalanx run.",
    )
    return click.argument("run", required=False, shell_complete=names)(folder(command))


def resolved(log_dir: str | None, text: str | None) -> RunDir:
    """Find the run that a user means, see `catalog.resolve`. Raises ClickException."""
    from phalanx._runs.catalog import UnknownRunError, resolve

    try:
        return resolve(places(log_dir), text)
    except UnknownRunError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise refusal(error) from None


def refusal(error: OSError) -> click.ClickException:
    """Say what the system has said of a file."""
    return click.ClickException(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
