"""An agent by itself tells the same events and metrics as torch's: `WorkerSpec(event_log_handler=...)` is enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(650)]

PROGRAM = Path(__file__).parents[1] / "programs" / "agent_events.py"

OF_LOOKS = ("LocalElasticAgent._monitor_workers.", "SimpleElasticAgent._restart_workers.")
"""What only torch's agent does: it looks at its workers again and again, and restarts them within one method."""


def run(library: str, which: str, folder: Path) -> tuple[list[str], set[str]]:
    """The events, in order; and the metrics but for those of looks: torch's agent puts some again at each look."""
    assert phalanx.__file__
    env = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(Path(phalanx.__file__).parents[1])}
    command = [sys.executable, str(PROGRAM), library, which]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    metrics = {line for line in lines if line.startswith("metric") and not any(name in line for name in OF_LOOKS)}
    return [line for line in lines if line.startswith("event")], metrics


@pytest.mark.parametrize("which", ["succeed", "fail_once", "fail"])
def test_events_and_metrics(which: str, tmp_path: Path) -> None:
    here, there = (run(library, which, tmp_path) for library in ("phalanx", "torch"))
    assert here[0] == there[0]
    assert here[1] == there[1]
    assert len(here[0]) >= 4
    assert len(here[1]) >= 15
