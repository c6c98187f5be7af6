"""What several commands have: how values of options are read, how lines are shown, which run a command is about."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from phalanx._base.text import parse_duration, parse_size
from phalanx._base.tty import printable
from phalanx._logs.specs import checked_mode
from phalanx._rendezvous import settings
from phalanx._run.config import GONE, is_here_gone
from phalanx._runs import paths
from phalanx.cli._declare import CONSOLE, NUMBER, TEXT, WHOLE, Declared, Flag, Many, Maybe, Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._runs.catalog import RunDir

MOST_RANKS = 1 << 20


class Whole(click.IntRange):
    """A whole number. What is none, or too large, is told what would be right."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            right = f"{self.min} or more" if self.max is None else f"{self.min} to {self.max}"
            self.fail(f"{value!r}: expected a whole number, {right}", param, ctx)


class Folder(click.Path):
    """A folder, which need not be there yet; or ``other``."""

    def __init__(self, other: str = "") -> None:
        super().__init__(file_okay=False)
        self._other = other

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        if value == "":  # a variable of a shell that is not set
            self.fail("'': expected the name of a folder", param, ctx)
        if not os.path.isabs(value) and is_here_gone():
            self.fail(f"{value!r}: {GONE}; give an absolute path", param, ctx)
        return value if value == self._other else super().convert(value, param, ctx)


def time_of(*, zero: bool = True, endless: bool = True) -> Callable[[str], float]:
    """Return a function that reads a time in seconds, and refuses what is none: see `parse_duration`."""
    return functools.partial(parse_duration, zero=zero, endless=endless)


class Time(Option):
    """The declaration of an option that is a time in seconds."""

    def __init__(
        self, *names: str, zero: bool = True, endless: bool = True, default: str | None = None, **settings: Any
    ) -> None:
        read = time_of(zero=zero, endless=endless)
        super().__init__(read, *names, metavar="TIME", written=TEXT + NUMBER, default=default, **settings)


class Count(Maybe):
    """The declaration of an option that is a whole number, ``least`` or more, without a default."""

    def __init__(self, *names: str, least: int, metavar: str = "N", **settings: Any) -> None:
        super().__init__(int, *names, kind=Whole(min=least), metavar=metavar, written=WHOLE, **settings)


def text_of(most: int) -> Callable[[str], str]:
    """Return a function that reads a text, and refuses one of more than so many characters."""
    return functools.partial(settings.check_text, most=most)


def read_ranks(text: str) -> set[int]:
    """Read ranks, and ranges of ranks. Raises ValueError.

    >>> sorted(read_ranks("0,4-6"))
    [0, 4, 5, 6]
    """
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"{text!r}: expected ranks, like 0,1 or 0,4-7; the trouble is with {part!r}")
        if int(last or first) >= MOST_RANKS:  # a slip of the finger would fill the memory
            raise ValueError(f"{text!r}: there can be no rank {int(last or first)}")
        ranks.update(range(int(first), int(last or first) + 1))
    if not ranks:  # a variable of a shell that is not set: nobody wants to see nothing
        raise ValueError(f"{text!r}: expected ranks, like 0,1 or 0,4-7")
    return ranks


def read_size(text: str) -> int:
    """Read a number of bytes, 1 or more, with a unit or without. Raises ValueError.

    >>> read_size("100MB"), read_size("1GiB"), read_size("4096")
    (100000000, 1073741824, 4096)
    """
    number = parse_size(text)
    if number < 1:
        raise ValueError(f"{text!r}: expected a size, like 500000, 100MB or 1GiB")
    return number


def read_mode(text: str) -> int:
    """Read permissions of folders, in octal digits. Raises ValueError.

    >>> oct(read_mode("750")), oct(read_mode("0o2770"))
    ('0o750', '0o2770')
    """
    try:
        return checked_mode(int(text, 8))
    except ValueError:
        msg = f"{text!r}: expected permissions of folders, like 750 or 755, in which the owner has all"
        raise ValueError(msg) from None


def read_strings(text: str) -> list[str]:
    """Read strings between commas. Raises ValueError: there is none, as of a shell's variable that is not set.

    >>> read_strings("loss,error")
    ['loss', 'error']
    """
    parts = [part for part in text.split(",") if part]
    if not parts:
        raise ValueError(f"{text!r}: expected one or more, between commas")
    return parts


LOG_DIR: dict[str, Any] = {
    "type": Folder(),
    "envvar": ["PHALANX_LOG_DIR", "PET_LOG_DIR"],
    "help": "Folder of the runs. Default: ~/.local/state/phalanx/runs, as for phalanx run.",
}
"""The settings of the option ``--log-dir`` of commands that look for runs."""


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


def resolved(log_dir: str | None, text: str | None) -> RunDir:
    """Find the run that a user means, see `catalog.resolve`. Raises ClickException, OSError."""
    from phalanx._runs.catalog import UnknownRunError, resolve

    try:
        return resolve(places(log_dir), text)
    except UnknownRunError as error:
        raise click.ClickException(str(error)) from None


def live_run(log_dir: str | None, text: str | None) -> RunDir:
    """Return the run that a user means, or the latest: one that runs, and here. Raises ClickException, OSError."""
    from phalanx._runs.catalog import UnknownRunError, live

    try:
        return live(places(log_dir), text, lambda note: click.echo(f"phalanx: {printable(note)}", err=True))
    except UnknownRunError as error:
        raise click.ClickException(str(error)) from None


class ConsoleOptions(Declared, section=CONSOLE):
    """How lines are shown."""

    ranks = Many(read_ranks, "--rank", metavar="RANK,...", sentence="Global ranks whose output to show, like 0,4-7.")
    grep = Many(
        lambda text: [text],
        metavar="REGEX",
        sentence="Show only lines in which this regular expression (or another --grep's) is found.",
    )
    exclude = Many(lambda text: [text], metavar="REGEX", sentence="Hide lines in which this is found. Can be repeated.")
    ignore_case = Flag("-i", sentence="Ignore case in --grep and --exclude.")
    after_context = Count(
        "-A", least=0, sentence="Show N lines of the same rank and stream after each that --grep finds."
    )
    before_context = Count("-B", least=0, sentence="Show N lines before each.")
    context = Count("-C", least=0, sentence="Show N lines before and after each.")
    fold = Flag(sentence="Show lines that are equal across ranks once, as [0-7] ...")
    timestamps = Flag(sentence="Put the time before each line, ISO 8601 with milliseconds.")
    elapsed = Flag(sentence="Put the seconds since the start before each line.")
    log_format = Option(
        str,
        kind=click.Choice(["text", "json"]),
        default="text",
        sentence="json: one JSON object a line, with time, rank, stream and text.",
    )
    log_line_prefix_template = Maybe(
        str, metavar="TEXT", sentence="Prefix of each line: ${role_name} ${rank} ${local_rank} ${hostname} ${time}."
    )
    color = Option(
        str,
        kind=click.Choice(["auto", "always", "never"]),
        default="auto",
        sentence="Colours. auto: not with NO_COLOR, else with FORCE_COLOR, else on a terminal.",
    )
    raw = Flag(sentence="Send control sequences to the terminal instead of printing them as text.")
