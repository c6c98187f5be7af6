"""The command ``phalanx``, and the commands below it, each loaded when it is called."""

from __future__ import annotations

import importlib

import click

from phalanx import __version__

_COMMANDS = ("run", "logs", "runs", "stack")
_CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}


class _Commands(click.Group):
    """Commands that are modules of this package: what one of them imports, the others do not wait for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"phalanx.cli.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Commands, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="phalanx")
def cli() -> None:
    """Groups of processes that start together, live together and fall together, the true cause named."""
