#!/usr/bin/env python3
"""Write the manual page of `phalanx`, docs/man/phalanx.1, which a wheel installs.

    python tools/render_man.py            # bring the page up to date
    python tools/render_man.py --check    # exit code 1 if it is not

It has what `--help` prints, of `phalanx` and of each command: click writes both, this one by another formatter.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PAGE = Path(__file__).resolve().parent.parent / "docs" / "man" / "phalanx.1"


class Roff(click.HelpFormatter):
    """Writes a help as a part of a manual page, see man(7)."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:  # noqa: ARG002 - click's signature
        """Begin the command's section."""
        self.write(f'.SH "{prog.upper()}"\n.B {_escaped(prog)}\n{_escaped(args)}\n')

    def write_heading(self, heading: str) -> None:
        """Begin a section of options."""
        self.write(f'.SS "{_escaped(heading)}"\n')

    def write_paragraph(self) -> None:
        """Separate nothing: what follows begins a paragraph of its own."""

    def write_text(self, text: str) -> None:
        r"""Write paragraphs. Lines of one that begins with ``\b`` are left as they are."""
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            kept = paragraph.startswith("\b")
            lines = paragraph.strip("\b\n").splitlines()
            body = "\n".join(_escaped(line.strip()) for line in lines)
            self.write(f".PP\n.nf\n{body}\n.fi\n" if kept else f".PP\n{body}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:  # noqa: ARG002 - click's signature
        """Write options, or commands, and what each does."""
        for name, text in rows:
            self.write(f".TP\n\\fB{_escaped(name)}\\fR\n{_escaped(text)}\n")


def _escaped(text: str) -> str:
    r"""Escape what roff would obey: ``\``, ``-``, and a point or a quote at the beginning.

    >>> _escaped("--a \\b"), _escaped(".x")
    ('\\-\\-a \\eb', '\\&.x')
    """
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def contexts(command: click.Command, name: str, above: click.Context | None = None) -> Iterator[click.Context]:
    """A context for a command and for each below it."""
    context = click.Context(command, info_name=name, parent=above, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from contexts(found, below, context)


def render() -> str:
    """Return the page."""
    from phalanx import __version__
    from phalanx.cli._commands import cli

    parts = [
        f'.\\" Written by tools/render_man.py.\n.TH PHALANX 1 "" "phalanx {__version__}" "User Commands"\n',
        ".SH NAME\nphalanx \\- run a group of processes as one\n",
        *map(_part, contexts(cli, "phalanx")),
    ]
    return "".join(parts)


def _part(context: click.Context) -> str:
    formatter = Roff(width=1000)  # else click cuts what it says of each command
    context.command.format_help(context, formatter)
    return formatter.getvalue()


def main(arguments: Iterable[str]) -> int:
    """Do what the command line asks for and return the exit code."""
    if list(arguments) not in ([], ["--check"]):
        sys.stderr.write("usage: python tools/render_man.py [--check]\n")
        return 2
    new = render()
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != new)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
