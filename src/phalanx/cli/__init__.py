"""The command line. Owns options, and what a person reads; the work is done by the library."""

from __future__ import annotations

import click

import phalanx
from phalanx.cli.run import run

CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}


@click.group(context_settings=CONTEXT)
@click.version_option(phalanx.__version__, prog_name="phalanx")
def cli() -> None:
    """Groups of processes that start together, live together and fall together, the true cause named."""


cli.add_command(run)


def main() -> None:
    """The entry point of the command ``phalanx``."""
    cli(prog_name="phalanx")
