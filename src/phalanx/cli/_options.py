"""How the values of options are read, as far as several commands have them."""

from __future__ import annotations

import re

import click

from phalanx._base import byte_size
from phalanx._base.durations import seconds
from phalanx._logs.specs import checked_mode
from phalanx._rendezvous import bounds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MOST_RANKS = 1 << 20
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def reading(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that reads an option's text, and says in click's way what is wrong with it."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else read(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


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


def time_of(*, zero: bool = True, endless: bool = True) -> Callable[[str], float]:
    """Return a function that reads seconds, and refuses what is no time, as the library does: see `seconds`."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            msg = f"{text!r}: expected seconds, like 60 or 0.5"
            raise ValueError(msg) from None
        try:
            return seconds("", number, zero=zero, endless=endless)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(": ")) from None

    return read


def text_of(most: int) -> Callable[[str], str]:
    """Return a function that reads a text, and refuses one of more than so many characters."""

    def read(text: str) -> str:
        return bounds.text(text, most)

    return read


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
