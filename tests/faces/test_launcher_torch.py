"""A program that launches jobs with torch needs other imports, prints the same, and tells the same events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parents[1] / "programs" / "launchers.py"

ITS_OWN = ("hostname", "worker_id", "total_run_time", "duration_ms", "raw_error")
"""What is different each time, or has another text: whether there is one is compared."""


def run(library: str, folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    assert phalanx.__file__
    env = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(Path(phalanx.__file__).parents[1])}
    command = [sys.executable, str(PROGRAM), library]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told = [event(line) for line in done.stderr.splitlines() if line.startswith('{"name"')]
    return done.stdout.splitlines(), told


def event(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    metadata = found["metadata"]
    metadata |= {name: metadata[name] is not None for name in ITS_OWN}
    more = metadata["metadata"] = json.loads(metadata["metadata"])
    if "worker_pid" in more:
        more["worker_pid"] = [pid is not None for pid in more["worker_pid"]]
    return found


def test_the_same_program_prints_the_same(tmp_path: Path) -> None:
    here, there = (run(library, tmp_path) for library in ("phalanx", "torch"))
    assert here[0] == there[0]
    assert here[1] == there[1]
    assert len(here[0]) > 15
    assert len(here[1]) > 30
