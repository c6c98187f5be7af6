"""What options of several commands have in common: how they are declared and read, and those of the console."""

from __future__ import annotations

import re

import click

from phalanx._base import byte_size
from phalanx._base.durations import seconds
from phalanx._logs.prefixes import TEMPLATE_ENV, template_of_environment
from phalanx._logs.specs import checked_mode
from phalanx.multiprocessing import ConsoleSpecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

_MOST_RANKS = 1 << 20
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def option(*names: str, also: Sequence[str] = (), **settings: Any) -> Callable[[Any], Any]:
    """An option that the environment can set, as PHALANX_NAME, or as PET_NAME, where torchrun's users have it.

    ``also`` are further variables, which are read where neither of these is set.
    """
    long = next(name for name in names if name.startswith("--")).lstrip("-").upper().replace("-", "_")
    return click.option(*names, envvar=[f"PHALANX_{long}", f"PET_{long}", *also], show_envvar=False, **settings)


def reading(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that reads an option's text, and says in click's way what is wrong with it."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else read(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


class _Each(click.types.StringParamType):
    """The value of an option that can be given again; in the environment, one a line: patterns have spaces in them."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """See `click.ParamType`."""
        return [line for line in rv.split("\n") if line]


def repeatable(
    *names: str, read: Callable[[str], Iterable[Any]] = lambda text: (text,), **settings: Any
) -> Callable[[Any], Any]:
    """An option that adds to what was selected before. ``read`` gives what one value selects; the whole is a list."""

    def read_all(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Any] | None:
        found = [reading(read)(ctx, param, value) for value in values]
        return [*dict.fromkeys(item for items in found for item in items)] if found else None

    return option(*names, type=_Each(), multiple=True, callback=read_all, **settings)


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
    """A folder, which need not be there yet."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        if value == "":  # a variable of a shell that is not set
            self.fail("'': expected the name of a folder", param, ctx)
        return super().convert(value, param, ctx)


def checking_seconds(*, zero: bool = True, endless: bool = True) -> Callable[..., Any]:
    """A callback that reads seconds, and refuses what is no time, as the library does: see `seconds`."""

    def check(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            msg = f"{text!r}: expected seconds, like 60 or 0.5"
            raise ValueError(msg) from None
        try:
            return seconds("", number, zero=zero, endless=endless)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(": ")) from None

    return reading(check)


def read_ranks(text: str) -> set[int]:
    """Read ranks, and ranges of ranks. Raises ValueError.

    >>> sorted(read_ranks("0,4-6"))
    [0, 4, 5, 6]
    """
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            msg = f"{text!r}: expected ranks, like 0,1 or 0,4-7; the trouble is with {part!r}"
            raise ValueError(msg)
        if int(last or first) >= _MOST_RANKS:  # a slip of the finger would fill the memory
            msg = f"{text!r}: there can be no rank {int(last or first)}"
            raise ValueError(msg)
        ranks.update(range(int(first), int(last or first) + 1))
    if not ranks:  # a variable of a shell that is not set: nobody wants to see nothing
        msg = f"{text!r}: expected ranks, like 0,1 or 0,4-7"
        raise ValueError(msg)
    return ranks


def read_size(text: str) -> int:
    """Read a number of bytes, 1 or more, with a unit or without. Raises ValueError.

    >>> read_size("100MB"), read_size("1GiB"), read_size("4096")
    (100000000, 1073741824, 4096)
    """
    number = byte_size.parse(text)
    if number < 1:
        msg = f"{text!r}: expected a size, like 500000, 100MB or 1GiB"
        raise ValueError(msg)
    return number


def read_age(text: str) -> float:
    """Read how long ago something was, in seconds; without a unit they are. Raises ValueError.

    >>> read_age("90"), read_age("1.5h"), read_age("30d"), read_age(" 2w ")
    (90.0, 5400.0, 2592000.0, 1209600.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if not found:
        msg = f"{text!r}: expected a time, like 90s, 10m, 2h, 30d or 2w"
        raise ValueError(msg)
    return float(found[1]) * _UNITS[found[2] or "s"]


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
        msg = f"{text!r}: expected one or more, between commas"
        raise ValueError(msg)
    return parts


def console_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the options of how lines are shown; `console_specs` reads their values."""
    lines = Whole(min=0)
    declarations = [
        repeatable("--ranks", "--rank", read=read_ranks, metavar="RANK,...",
                   help="Global ranks whose output is shown, like 0,4-7."),
        repeatable("--grep", metavar="REGEX",
                   help="Show only lines in which this regular expression (or another --grep's) is found."),
        repeatable("--exclude", metavar="REGEX", help="Show no line in which this is found. Can be repeated."),
        option("-i", "--ignore-case", is_flag=True, help="Have --grep and --exclude take large letters for small."),
        option("-A", "--after-context", type=lines, metavar="N",
               help="Show N lines of the same rank and stream after each that --grep finds."),
        option("-B", "--before-context", type=lines, metavar="N", help="Show N before it."),
        option("-C", "--context", type=lines, metavar="N", help="Show N before and after it."),
        option("--fold", is_flag=True, help="Show lines that are equal across ranks once, as [0-7] ..."),
        option("--timestamps", is_flag=True, help="Put the time before each line, ISO 8601 with milliseconds."),
        option("--elapsed", is_flag=True, help="Put the seconds since the start before each line."),
        option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
               help="json: one JSON object a line, with time, rank, stream and text."),
        option("--log-line-prefix-template", metavar="TEXT",
               help="What stands before each line: ${role_name} ${rank} ${local_rank} ${host} ${time}."),
        option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
               help="Colours. auto: not with NO_COLOR, else with FORCE_COLOR, else on a terminal."),
        option("--raw", is_flag=True,
               help="Send a terminal what it would obey (titles, moves of the cursor), instead of showing it."),
    ]  # fmt: skip
    for declare in reversed(declarations):
        command = declare(command)
    return command


def console_specs(
    *,
    ranks: list[int] | None,
    grep: list[str] | None,
    exclude: list[str] | None,
    ignore_case: bool,
    after_context: int | None,
    before_context: int | None,
    context: int | None,
    fold: bool,
    timestamps: bool,
    elapsed: bool,
    log_format: str,
    log_line_prefix_template: str | None,
    color: str,
    **more: Any,
) -> ConsoleSpecs:
    """What the console options say. Raises UsageError."""
    if timestamps and elapsed:
        raise click.UsageError("--timestamps and --elapsed exclude each other")
    try:
        if log_line_prefix_template is None:
            log_line_prefix_template = template_of_environment()
        return ConsoleSpecs(
            ranks=ranks,
            grep=grep,
            exclude=exclude,
            ignore_case=ignore_case,
            before=(context or 0) if before_context is None else before_context,
            after=(context or 0) if after_context is None else after_context,
            fold=fold,
            timestamps="iso" if timestamps else "elapsed" if elapsed else None,
            format=log_format,
            template=log_line_prefix_template,
            color=color,
            **more,
        )
    except ValueError as error:
        named = {
            "format:": "--log-format:",
            "template:": "--log-line-prefix-template:",
            "fold, format:": "--fold:",
            "before:": "--before-context:" if before_context else "--context:",
            "after:": "--after-context:" if after_context else "--context:",
            "ignore_case:": "--ignore-case:",
        }
        text = str(error)
        head = next((name for name in named if text.startswith(name)), "")
        text = named[head] + text[len(head) :] if head else text if text.startswith(TEMPLATE_ENV) else f"--{text}"
        raise click.UsageError(text) from None
