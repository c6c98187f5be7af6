"""The command line. Owns options, and what a person reads; the work is done by the library."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of the command ``phalanx``."""
    try:
        from phalanx.cli._commands import cli  # not above: `python -m phalanx.cli.run` warns if it is imported before
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as later
    cli(prog_name="phalanx")
