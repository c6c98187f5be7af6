"""The machine that the figures come from, in words."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.runner import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

_PYTHON = "import platform; print(platform.python_version())"


def _commit() -> str:
    """Return which commit of this project was measured, and whether files differ from it."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe(interpreters: Mapping[str, str]) -> dict[str, str]:
    """Return what a reader must know to compare figures: cores, kernel, load, the commit, and the peers' versions."""
    python = interpreters["phalanx"]
    version = subprocess.check_output([python, "-c", _PYTHON], text=True).strip()
    return {
        "cores": f"{len(os.sched_getaffinity(0))} x {_processor()}",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "commit": _commit(),
        "python": version,
        "peers": ", ".join(peers.version(name) for name in interpreters if name not in ("phalanx", "floor")),
    }
