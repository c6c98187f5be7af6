"""Text on stdout, as it is: commands that print what other programs read."""

from __future__ import annotations

import click


def put(text: str) -> None:
    """Write to stdout, in UTF-8. Raises ClickException that says what is wrong with stdout."""
    try:
        click.echo(text.encode("utf-8", "backslashreplace"), nl=False)
    except BrokenPipeError:  # | head
        raise
    except OSError as error:
        msg = f"stdout: {error.strerror}"
        raise click.ClickException(msg) from None
