"""The hammer of the tables of timers, for a moment: that it works, and what it finds within seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hammer import NAMES

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_table_that_is_hammered_kills_and_misses_nobody() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.hammer",
        "--blocks",
        "40000",
        "--processes",
        "4",
        "--one-in",
        "1000",
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.startswith("40000 blocks in 4 processes, ")
    assert all(f"'{name}': " in process.stdout for name in NAMES), process.stdout
