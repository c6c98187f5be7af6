"""The machine that the figures come from, in words."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import TYPE_CHECKING

from benchmarks.case import PEER

if TYPE_CHECKING:
    from collections.abc import Mapping

_PYTHON = "import platform; print(platform.python_version())"
_PEER = _PYTHON + "; import torch; print('torch', torch.__version__)"


def _versions(contender: str, python: str) -> str:
    snippet = _PEER if contender == PEER else _PYTHON
    return " ".join(subprocess.check_output([python, "-c", snippet], text=True).split())


def describe(interpreters: Mapping[str, str]) -> dict[str, str]:
    """Return what a reader must know to compare figures: cores, kernel, load, and the contenders' versions."""
    versions = {contender: _versions(contender, python) for contender, python in interpreters.items()}
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        **{f"python of {contender}": version for contender, version in versions.items()},
    }
