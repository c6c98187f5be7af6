"""How the values of options are read, as far as several commands have them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from phalanx._base import byte_size, durations
from phalanx._logs.specs import checked_mode
from phalanx._rendezvous import bounds

_MOST_RANKS = 1 << 20


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


GONE = "the current folder has been removed, and there is nothing at a relative path"
"""Why what is relative is refused, if `is_here_gone`."""


def is_here_gone() -> bool:
    """Whether the current folder has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


class Folder(click.Path):
    """A folder, which need not be there yet."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        if value == "":  # a variable of a shell that is not set
            self.fail("'': expected the name of a folder", param, ctx)
        if not os.path.isabs(value) and is_here_gone():
            self.fail(f"{value!r}: {GONE}; give an absolute path", param, ctx)
        return super().convert(value, param, ctx)


def time_of(*, zero: bool = True, endless: bool = True) -> Callable[[str], float]:
    """Return a function that reads a time in seconds, and refuses what is none: see `durations.parse`."""
    return functools.partial(durations.parse, zero=zero, endless=endless)


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
