"""The command line. Owns options, and what a person reads; the work is done by the library."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress


def main() -> None:
    """The entry point of the command ``phalanx``."""
    collects, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()  # what is loaded stays: until it is frozen, a collection would look through all of it for nothing
    atexit.register(gc.freeze)  # nor is the interpreter's end to look through it
    try:
        try:
            # Not above: `python -m phalanx.cli.run` warns if it is imported before.
            from phalanx.cli._commands import cli
        except KeyboardInterrupt:
            sys.exit(130)  # 128 + SIGINT, as later
        cli(prog_name="phalanx", obj=collects)
    finally:
        _give_up_what_is_refused()
        if collects:  # it may be a program that has called this, and goes on
            gc.enable()
        if not frozen:
            gc.unfreeze()


def _give_up_what_is_refused() -> None:
    """What stdout does not take (a full disk) has been said: written again at the end, it would make our exit code 120.

    See `sys.exit`.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except ValueError:  # closed
        return
    except OSError:
        with suppress(OSError, ValueError):  # no file, or no descriptor is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
