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

LOG_DIR: dict[str, Any] = {
    "type": Folder(),
    "envvar": ["PHALANX_LOG_DIR", "PET_LOG_DIR"],
    "help": "Folder of the runs. Default: ~/.local/state/phalanx/runs, as for phalanx run.",
}
"""The settings of the option ``--log-dir`` of commands that look for runs."""

MANY = 1000
"""Runs in a folder of which a person is told."""


def places(log_dir: str | None) -> tuple[str, ...]:
    """Those in which runs are looked for: ``log_dir``, or else the default ones. Raises UsageError."""
    if log_dir is not None:
        return (log_dir,)
    try:
        return paths.search_folders()
    except paths.NoHomeError as error:
        raise click.UsageError(f"--log-dir: {error}") from None


def run_argument(state: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the argument RUN, and ``--log-dir``. ``state``: that of the runs whose names complete it."""

    def names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        from phalanx._runs.catalog import find

        try:
            runs = find(places(ctx.params.get("log_dir")))
        except (OSError, click.UsageError):
            return []
        return [run.name for run in runs if state in ("", run.state) and run.name.startswith(incomplete)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        folder = click.option("--log-dir", **LOG_DIR)
        return click.argument("run", required=False, shell_complete=names)(folder(command))

    return decorate


def resolved(
    log_dir: str | None, text: str | None, latest: Callable[[tuple[str, ...]], RunDir] | None = None
) -> RunDir:
    """Find the run that a user means, see `catalog.resolve`; or the ``latest``. Raises ClickException."""
    from phalanx._runs.catalog import UnknownRunError, resolve

    where = places(log_dir)
    try:
        return latest(where) if latest is not None and text is None else resolve(where, text)
    except UnknownRunError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise refusal(error) from None


def refusal(error: OSError) -> click.ClickException:
    """Say what the system has said of a file."""
    return click.ClickException(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
