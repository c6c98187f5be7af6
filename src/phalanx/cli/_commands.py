"""The command ``phalanx``, and the commands below it, each loaded when it is called."""

from __future__ import annotations

import importlib
import os

import click

from phalanx import __version__
from phalanx.cli._command import Command, Group

_COMMANDS = ("run", "logs", "runs", "report", "rerun", "stack", "torchrun-shim")
_ELSEWHERE = {
    "ps": "runs", "ls": "runs", "list": "runs", "status": "runs", "history": "runs", "tail": "logs", "log": "logs",
    "cat": "logs", "start": "run", "launch": "run", "exec": "run", "spawn": "run", "python": "run", "torchrun": "run",
    "dump": "stack", "py-spy": "stack", "prune": "runs prune", "rm": "runs prune", "clean": "runs prune",
    "gc": "runs prune", "restart": "rerun", "repeat": "rerun", "version": "--version",
}  # fmt: skip
"""What commands are called in other tools, and here."""

_CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}


class _Commands(Group):
    """Commands that are modules of this package: what one of them imports, the others do not wait for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name == help_.name:
            return help_
        if cmd_name not in _COMMANDS:
            return None
        module = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"phalanx.cli.{module}"), module)
        return command

    def not_there(self, ctx: click.Context, name: str) -> str:
        """See `Command`. People forget the command."""
        having = [command for command in _COMMANDS if name in _options(self.get_command(ctx, command))]
        if not having:
            return super().not_there(ctx, name)
        return f"there is no option {name!r} here; it is one of phalanx {having[0]}, and stands after that"

    def hint(self, ctx: click.Context, name: str) -> str:
        """See `Group`."""
        if name not in self.elsewhere and (name.endswith(".py") or os.path.exists(name)):
            return f"; to run a script: phalanx run {name}"
        return super().hint(ctx, name)


def _options(command: click.Command | None) -> set[str]:
    return set() if command is None else {opt for param in command.params for opt in param.opts}


@click.group(cls=_Commands, context_settings=_CONTEXT, elsewhere=_ELSEWHERE)
@click.version_option(__version__, "-V", "--version", prog_name="phalanx")
def cli() -> None:
    """Groups of processes that start together, live together and fall together, the true cause named."""


@click.command(name="help", cls=Command)
@click.argument("names", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Print the help of phalanx, or of a command below it: what --help prints there."""
    above = ctx.parent
    assert above is not None
    command = above.command
    for name in names:
        if not isinstance(command, Group):
            msg = f"phalanx {command.name} has no commands below it"
            raise click.UsageError(msg, ctx)
        _, found, _ = command.resolve_command(above, [name])
        assert found is not None  # else it has been refused
        command = found
        above = click.Context(command, info_name=name, parent=above, **command.context_settings)
    click.echo(command.get_help(above), color=above.color)
