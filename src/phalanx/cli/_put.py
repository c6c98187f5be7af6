"""Text on stdout, as it is: commands that print what other programs read."""

from __future__ import annotations

import sys

import click


def put(text: str) -> None:
    """Write to stdout, in UTF-8 where that takes bytes. Raises ClickException that says what is wrong with stdout."""
    data = text.encode("utf-8", "backslashreplace")
    takes_bytes = sys.stdout is None or hasattr(sys.stdout, "buffer")  # an `io.StringIO` of who calls `main` does not
    try:
        click.echo(data if takes_bytes else data.decode(), nl=False)
    except BrokenPipeError:  # | head
        raise
    except OSError as error:
        msg = f"stdout: {error.strerror}"
        raise click.ClickException(msg) from None
