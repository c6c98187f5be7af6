"""``phalanx torchrun-shim``: a command whose torchrun is Phalanx, for tools that start it or call its module.

Owns the environment of that command. What it has on its paths lies in the folder ``_shim``.
"""

from __future__ import annotations

import os
import sys

import click

from phalanx.cli._commands import SETTINGS, Command

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_shim")
_NOT_FOUND, _NOT_STARTED = 127, 126  # as a shell has it
PYTHON_ENV = "PHALANX_SHIM_PYTHON"
"""The environment variable with the interpreter that the shim's ``torchrun`` runs."""


@click.command(cls=Command, context_settings={**SETTINGS, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="COMMAND")
def torchrun_shim(command: tuple[str, ...]) -> None:
    """Execute COMMAND with Phalanx in the place of torchrun, there and in all that it starts.

    \b
    phalanx torchrun-shim -- accelerate launch train.py
    phalanx torchrun-shim -- fabric run train.py --devices 2
    phalanx torchrun-shim -- ./launch.sh

    The first torchrun on PATH is phalanx run. In Pythons that have Phalanx, the modules torch.distributed.run and
    torch.distributed.launcher are those of Phalanx. Nothing is installed, and no file is changed.
    """  # noqa: D301 - the backslash is click's mark for lines to be left as they are
    torchrun = os.path.join(_FOLDER, "torchrun")
    if not os.access(torchrun, os.X_OK):
        raise click.ClickException(f"{torchrun} cannot be executed: install phalanx as files, and executable ones")
    path, modules = os.environ.get("PATH", os.defpath), os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "PATH": os.pathsep.join((_FOLDER, path)),
        "PYTHONPATH": os.pathsep.join(filter(None, (_FOLDER, modules))),
        PYTHON_ENV: sys.executable,
    }
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        click.echo(f"phalanx torchrun-shim: {command[0]}: {error.strerror}", err=True)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_STARTED)
