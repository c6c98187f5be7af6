"""The peers that are Python packages: each in a virtual environment of its own, pinned, made when it is needed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.case import FLOOR, PHALANX, TORCH
from benchmarks.runner import ROOT

_NEEDS_OF_TORCH = (
    "filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy", "setuptools>=77.0.3", "click",
    "msgspec",
)  # fmt: skip
"""What ``import torch`` needs, and ``phalanx run``, which runs there where its workers import torch, on many machines
too. torch's CUDA packages, gigabytes of them, are what ``--no-deps`` leaves out."""

PINS = {
    TORCH: "torch==2.13.0",
    "loky": "loky==3.7.0",
    "pebble": "pebble==5.2.3",
    "mpire": "mpire==2.10.2",
    "joblib": "joblib==1.6.0",
    "honcho": "honcho==2.0.0",
    "supervisord": "supervisor==4.3.0",
    "circus": "circus==0.19.0",
}
"""What is installed for a peer. The others are in Python itself, or programs of Debian's."""

_IMPORTS = {TORCH: "click, torch.distributed.elastic.multiprocessing", "supervisord": "supervisor"}

VARIABLE = "PHALANX_PEER_PYTHON"
"""Names an interpreter that has torch, in place of an environment of its own."""

FOLDER = ROOT / ".venv-peers"


PROGRAMS = {"parallel": "parallel", "mpirun": "mpirun", "s6": "s6-svscan"}
"""The peers that are programs of Debian's."""


class PeerError(Exception):
    """There is no such peer to compare with; the message says why."""


def python(name: str, own: str = sys.executable) -> str:
    """Return the interpreter of a peer, there or not; ``own``, of those that need no package."""
    if name == TORCH and (chosen := os.environ.get(VARIABLE)):
        return chosen
    return str(FOLDER / name / "bin" / "python") if name in PINS else own


def program(name: str, file: str) -> str:
    """Return the path of a program that a peer's environment has."""
    return str(Path(python(name)).with_name(file))


@functools.cache
def missing(name: str) -> str:
    """Return why there is no such peer here; nothing if there is one. Makes its environment if it must."""
    try:
        find_or_make(name)
    except PeerError as error:
        return str(error)
    return ""


def find_or_make(name: str) -> str:
    """Return the interpreter of a peer. Raises PeerError: it has not what it needs, and that cannot be installed."""
    if name in (PHALANX, FLOOR) or name not in PINS:
        return sys.executable
    if name == TORCH and (chosen := os.environ.get(VARIABLE)):
        if fault := _fault(name, chosen):
            raise PeerError(f"{VARIABLE}={chosen}: {fault}")
        return chosen
    found = python(name)
    if _fault(name, found, pinned=True):
        _make(name, found)
    if fault := _fault(name, found, pinned=True):
        raise PeerError(f"{PINS[name]} was installed, but: {fault}")
    return found


def version(name: str) -> str:
    """Return a peer with the version of it that is there: of its package, or of Debian's that has its program."""
    if name in PINS:
        package = PINS[name].partition("==")[0]
        asked = [python(name), "-c", f"import importlib.metadata as m; print('{package}==' + m.version('{package}'))"]
        return _answer(asked) or package
    if name not in PROGRAMS:
        return name  # of Python itself
    owner = _answer(["dpkg-query", "-S", str(Path(shutil.which(PROGRAMS[name]) or "/").resolve())])
    package = owner.rpartition("\n")[2].partition(":")[0]  # lines before it are of diversions
    return f"{name} {_answer(['dpkg-query', '-W', '-f', '${Version}', package])}".strip() if package else name


def _answer(command: list[str]) -> str:
    """Return what a command prints, or nothing if it cannot be asked."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _fault(name: str, interpreter: str, *, pinned: bool = False) -> str | None:
    """Return what is wrong with an interpreter as a peer's, or nothing."""
    command = [interpreter, "-c", f"import {_IMPORTS.get(name, name)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed and said nothing"])[-1]
    found = version(name)
    return f"{found} is there" if pinned and found.partition("+")[0] != PINS[name] else None


def _make(name: str, interpreter: str) -> None:
    folder = FOLDER / name
    sys.stderr.write(f"making {folder} with {PINS[name]}\n")
    install = [interpreter, "-m", "pip", "install", "--quiet"]
    wanted = [["--no-deps", PINS[name]], list(_NEEDS_OF_TORCH)] if name == TORCH else [[PINS[name]]]
    try:
        subprocess.run([_base(), "-m", "venv", "--clear", str(folder)], check=True, stdout=sys.stderr)
        for packages in wanted:
            subprocess.run([*install, *packages], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{folder} could not be made: {error}") from error


def _base() -> str:
    """Return a Python 3.11 if one is there and works, else this one: a wheel may exist for the former only."""
    found = shutil.which("python3.11")
    works = found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0
    return found if found and works else sys.executable
