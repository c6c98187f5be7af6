"""The peer's interpreter: a virtual environment of its own with torch in it, made when it is first needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.runner import ROOT

TORCH = "torch==2.13.0"
NEEDS = (
    "filelock",
    "typing-extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "numpy",
    "setuptools>=77.0.3",
    "click",
    "msgspec",
)
"""What ``import torch`` needs, and ``phalanx run``, which runs there where its workers import torch, on many machines
too. torch's CUDA packages, gigabytes of them, are what ``--no-deps`` leaves out."""

VARIABLE = "PHALANX_PEER_PYTHON"
FOLDER = ROOT / ".venv-peer"


class PeerError(Exception):
    """There is no peer to compare with; the message says why."""


def named() -> str:
    """Return the interpreter that ``PHALANX_PEER_PYTHON`` names, else the one in ``.venv-peer``, there or not."""
    return os.environ.get(VARIABLE) or str(FOLDER / "bin" / "python")


def find_or_make() -> str:
    """Return the interpreter that is ``named``; raise ``PeerError`` when it has no torch and none can be made."""
    if chosen := os.environ.get(VARIABLE):
        if fault := _fault(chosen):
            raise PeerError(f"{VARIABLE}={chosen}: {fault}")
        return chosen
    python = Path(named())
    if _fault(str(python)):
        _make(python)
    if fault := _fault(str(python)):
        raise PeerError(f"{TORCH} was installed, but: {fault}. {VARIABLE} may name another interpreter that has torch")
    return str(python)


def _fault(python: str) -> str | None:
    """Return what is wrong with an interpreter as the peer, or nothing."""
    command = [python, "-c", "import click, torch.distributed.elastic.multiprocessing"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed and said nothing"])[-1]


def _make(python: Path) -> None:
    sys.stderr.write(f"making {FOLDER} with {TORCH}\n")
    install = [str(python), "-m", "pip", "install", "--quiet"]
    try:
        subprocess.run([_base(), "-m", "venv", "--clear", str(FOLDER)], check=True, stdout=sys.stderr)
        subprocess.run([*install, "--no-deps", TORCH], check=True, stdout=sys.stderr)
        subprocess.run([*install, *NEEDS], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{FOLDER} could not be made: {error}") from error


def _base() -> str:
    """Return a Python 3.11 if one is there and works, else this one: a wheel may exist for the former only."""
    found = shutil.which("python3.11")
    works = found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0
    return found if found and works else sys.executable
