"""The command ``phalanx``, and what all commands below it have in common, each of which is loaded when it is called.

That is their settings, and errors that no terminal obeys and that name what was given.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from phalanx import __version__
from phalanx._base.linux import reader_is_gone
from phalanx._base.tty import printable
from phalanx.cli._declare import origin

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}

_COMMANDS = {
    "run": "run", "logs": "logs", "runs": "runs", "status": "status", "top": "top", "report": "report",
    "serve": "serve", "rerun": "runs", "stack": "stack", "debug": "debug", "attach": "attach", "stop": "control",
    "restart": "control", "signal": "control", "pause": "control", "resume": "control",
    "torchrun-shim": "torchrun_shim",
}  # fmt: skip
"""Each command, and its module in this package."""

_ELSEWHERE = {
    "ps": "status", "ls": "runs", "list": "runs", "history": "runs", "htop": "top", "watch": "top", "tail": "logs",
    "log": "logs", "cat": "logs", "start": "run", "launch": "run", "exec": "run", "spawn": "run", "python": "run",
    "torchrun": "run", "dump": "stack", "py-spy": "stack", "pdb": "debug", "breakpoint": "debug",
    "terminal": "attach", "prune": "runs prune", "rm": "runs prune",
    "clean": "runs prune", "gc": "runs prune", "repeat": "rerun", "kill": "stop", "freeze": "pause",
    "suspend": "pause", "continue": "resume", "version": "--version",
    "web": "serve", "dashboard": "serve", "ui": "serve", "server": "serve",
}  # fmt: skip
"""What commands are called in other tools, and here."""

_LIBRARIES = ("jinja2", "msgspec", "rich")
"""What single commands take, and may be missing: there may be no build for a new Python."""

_ARGV = "phalanx.cli.argv"
_MOST_MEANT = 3
_ALIKE = 0.65  # of two words that one may be meant by the other, see difflib
_AS_GOOD = 0.1  # how much less, and yet as likely as the best


class Command(click.Command):
    """A command whose errors show what a terminal would obey as escapes: they tell names that others have given.

    An error about an option that nobody has typed names the environment variable that has set it. An option that is not
    there is answered with those that may have been meant, or with why it is ``absent``, whole or shortened.

    Args:
        sections: How ``--help`` groups the options: a heading, and long names in the order in which they are shown.
        absent: Options that people know from elsewhere, and what to say of them.
    """

    def __init__(
        self,
        *args: Any,
        sections: Sequence[tuple[str, Sequence[str]]] = (),
        absent: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.sections = sections
        self.absent = absent or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Command`."""
        records = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):  # the text says what they are
                continue
            record = param.get_help_record(ctx)
            if record is not None:
                records[_long(param)] = record
        for heading, names in self.sections:
            with formatter.section(heading):
                formatter.write_dl([records.pop(name) for name in names])
        if records:
            with formatter.section("Other" if self.sections else "Options"):
                formatter.write_dl(list(records.values()))

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Read the arguments."""
        with _ends():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command."""
        with _ends(), _naming_variables(ctx):
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command`."""
        ctx.meta.setdefault(_ARGV, [*ctx.command_path.split(), *args])
        try:
            with _naming_variables(ctx):
                return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(self.not_there(ctx, error.option_name), ctx) from None

    def not_there(self, ctx: click.Context, name: str) -> str:
        """What to say to somebody who has typed an option that is not there."""
        known = [opt for param in self.get_params(ctx) for opt in param.opts if opt.startswith("--")]
        begun = next((opt for opt in (*known, *self.absent) if opt.startswith(name)), "")
        whole = name if name in self.absent else begun
        if whole in self.absent:
            return f"{whole}: {self.absent[whole]}"
        hint = meant(name, known) or meant(name, self.absent)
        reasons = (f" {option}: {why}" for option, why in self.absent.items() if repr(option) in hint)
        return f"there is no option {name!r}{hint}{next(reasons, '')}"


class Group(Command, click.Group):
    """A command that has others below it.

    Args:
        elsewhere: What these are called in other tools, and here.
    """

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.elsewhere = elsewhere or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Group`."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See `click.Group`. Raises UsageError that says what may have been meant."""
        name = args[0]
        if self.get_command(ctx, name) is not None or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        msg = f"there is no command {name!r}{self.hint(ctx, name)}"
        raise click.UsageError(msg, ctx)

    def hint(self, ctx: click.Context, name: str) -> str:
        """What to say to somebody who has typed a command that is not there."""
        if name in self.elsewhere:
            return f"; did you mean {self.elsewhere[name]!r}?"
        known = self.list_commands(ctx)
        return meant(name, known) or f"; there are {', '.join(known)}"


def meant(word: str, known: Iterable[str]) -> str:
    """A question for somebody who has mistyped a word: whether it is what begins so, or is close to it; else "".

    >>> meant("--nproc", ["--nice", "--nproc-per-node"]), meant("rn", ["logs", "run", "runs"]), meant("x", ["run"])
    ("; did you mean '--nproc-per-node'?", "; did you mean 'run'?", '')
    """
    import difflib

    def bare(name: str) -> str:  # dashes would make all options alike
        return name.lstrip("-").casefold()

    word = bare(word)
    alike = {name: difflib.SequenceMatcher(None, bare(name), word).ratio() for name in known if len(word) > 1}
    close = [name for name in alike if bare(name) == word] or [name for name in alike if bare(name).startswith(word)]
    if not close:
        least = max(_ALIKE, max(alike.values(), default=0.0) - _AS_GOOD)
        close = sorted((name for name in alike if alike[name] >= least), key=alike.__getitem__, reverse=True)
    return f"; did you mean {' or '.join(map(repr, close[:_MOST_MEANT]))}?" if close else ""


def argv_of(ctx: click.Context) -> list[str]:
    """Return the whole command line, as it was typed."""
    typed: list[str] = ctx.meta[_ARGV]
    return typed


def _long(param: click.Parameter) -> str:
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


@contextlib.contextmanager
def _ends() -> Iterator[None]:
    """How a command ends otherwise than well: errors that can be printed, and 130 for a Ctrl-C, at whatever moment.

    A command whose reader has gone (``| head``) ends as one that dies of SIGPIPE: 141 in a shell, without a word.
    """
    try:
        yield
    except BrokenPipeError:  # click would make it 1
        if not reader_is_gone(1):
            raise
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        why = error.strerror or str(error)
        raise click.ClickException(printable(f"{error.filename}: {why}" if error.filename else why)) from error
    except KeyboardInterrupt:  # click would make it 1, and say that it was aborted
        sys.exit(128 + signal.SIGINT)
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _LIBRARIES:
            raise
        msg = f"this takes {library}, which cannot be imported here ({error}): python -m pip install {library}"
        raise click.ClickException(msg) from error
    except click.ClickException as error:
        text = "\n".join(map(printable, error.message.split("\n")))
        error.message = text  # type: ignore[misc]  # what click shows is made of it in ways that differ by its class
        raise


@contextlib.contextmanager
def _naming_variables(ctx: click.Context) -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        set_by = _set_by_others(ctx)
        param = getattr(error, "param", None)
        if isinstance(error, click.BadParameter) and isinstance(param, click.Option):
            if param.opts[-1] in set_by:
                error.param_hint = f"'{_long(param)}' ({set_by[param.opts[-1]]})"
        else:
            found = [option for option in set_by if re.search(rf"{option}(?![\w-])", error.message)]
            text = ", ".join(f"{option} is {set_by[option]}" for option in found)
            if text:
                error.message = f"{error.message} ({text})"  # type: ignore[misc]  # as above
        raise


def _set_by_others(ctx: click.Context) -> dict[str, str]:
    """The options that nobody has typed, by their long names, and where each comes from."""
    found = {}
    for param in ctx.command.params:
        where = origin(ctx, param)
        if where:
            found.update(dict.fromkeys((opt for opt in param.opts if opt.startswith("--")), where))
    return found


def put(text: str) -> None:
    """Write text as it is to stdout, in UTF-8 where that takes bytes: for other programs to read.

    Raises ClickException that says what is wrong with stdout.
    """
    data = text.encode("utf-8", "backslashreplace")
    takes_bytes = sys.stdout is None or hasattr(sys.stdout, "buffer")  # an `io.StringIO` of who calls `main` does not
    try:
        click.echo(data if takes_bytes else data.decode(), nl=False)
    except BrokenPipeError:  # | head
        raise
    except OSError as error:
        raise click.ClickException(f"stdout: {error.strerror}") from None


class _Commands(Group):
    """Commands that are modules of this package: what one of them imports, the others do not wait for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name == help_.name:
            return help_
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"phalanx.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
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


@click.group(cls=_Commands, context_settings=SETTINGS, elsewhere=_ELSEWHERE)
@click.version_option(__version__, "-V", "--version", prog_name="phalanx")
@click.pass_obj
def cli(collects: bool | None) -> None:  # noqa: FBT001 - click gives it by position
    """Groups of processes that start together, live together and fall together, the true cause named."""
    if collects:  # `phalanx.cli.main` has called it; the command below it has been loaded
        gc.freeze()
        gc.enable()


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
