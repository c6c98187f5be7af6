"""The function of a worker that runs a script by `runpy.run_path`: ``phalanx run --run-path``."""

from __future__ import annotations

import sys


def run_path(script: str, *args: str) -> None:
    """Run a script as ``__main__`` in this interpreter: its ``sys.argv`` is as given, and ``sys.path`` as it is."""
    import runpy

    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
