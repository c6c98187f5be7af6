"""Records of runs that tests make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from phalanx._runs import record


def example(**changes: Any) -> record.Run:
    """The record of a run that this process has begun, with some fields changed."""
    rank = record.Rank(rank=0, local_rank=0, pid=os.getpid(), pid_started=0, state="running")
    run = record.begin(
        run_id="night", name="train.py", command=["train.py", "--lr", "0.1"], started=1e9, nprocs=1, ranks=[rank]
    )
    return run.replace(**changes)


def write(folder: Path, run: record.Run) -> None:
    """Write a record into a run's folder."""
    record.write(str(folder), run)
