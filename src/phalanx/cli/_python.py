"""Which interpreter runs the script, and what is said when somebody may have meant another.

A tool install (``pipx``, ``uv tool``) has an environment of its own, without what the script imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

CHOICE = "PYTHON_EXEC"
"""The variable that chooses, as for torchrun."""

_FOLDERS = (".venv", "venv")


def executable() -> str:
    """The interpreter that the workers run."""
    return os.environ.get(CHOICE) or sys.executable


def doubts(script: str) -> list[str]:
    """What is to be said when another environment than ours is active, or stands beside the script."""
    if os.environ.get(CHOICE):
        return []
    ours = os.path.realpath(sys.prefix)
    for where, folder in _others(script):
        python = os.path.join(folder, "bin", "python")
        if os.path.realpath(folder) != ours and os.access(python, os.X_OK):
            choice = f"set {CHOICE}={python}, or install phalanx there"
            return [f"workers run {sys.executable}, and {where} {folder}: if they are to run that, {choice}"]
    return []


def _others(script: str) -> Iterator[tuple[str, str]]:
    active = os.environ.get("VIRTUAL_ENV")
    if active:
        yield "VIRTUAL_ENV is", active
        return  # the one that was activated is the one that is meant
    conda = os.environ.get("CONDA_PREFIX")  # of the base, mostly, and nobody's choice; but if it is ours, it is meant
    if conda and os.path.realpath(conda) == os.path.realpath(sys.prefix):
        return
    folder = os.path.dirname(os.path.abspath(script))  # of a module, the working directory
    for name in _FOLDERS:
        path = os.path.join(folder, name)
        if os.path.exists(os.path.join(path, "pyvenv.cfg")):
            yield "beside the script is", path
