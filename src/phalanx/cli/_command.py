"""What all commands have in common: their settings, and errors that no terminal obeys."""

from __future__ import annotations

import contextlib

import click

from phalanx._core.terminal import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


class Command(click.Command):
    """A command whose errors show what a terminal would obey as escapes: they tell names that others have given."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Read the arguments."""
        with _printable_errors():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command."""
        with _printable_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _printable_errors() -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        text = "\n".join(map(printable, error.message.split("\n")))
        error.message = text  # type: ignore[misc]  # what click shows is made of it in ways that differ by its class
        raise
