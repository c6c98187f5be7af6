"""The command ``phalanx``, and the commands below it."""

from __future__ import annotations

import click

from phalanx import __version__
from phalanx.cli.run import run

CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="phalanx")
def cli() -> None:
    """Groups of processes that start together, live together and fall together, the true cause named."""


cli.add_command(run)
