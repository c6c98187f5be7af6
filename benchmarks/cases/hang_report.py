"""How soon a person can read why a group hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic_ns

from benchmarks.case import PHALANX, Case, Sample, Target
from benchmarks.runner import ROOT

WORKERS = 4
TIMES = 3
FINDING = "3 of 4 ranks wait in all_reduce"


def _report() -> dict[str, float]:
    folder = Path(tempfile.mkdtemp())
    phalanx = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(WORKERS), "--log-dir", str(folder)]
    run = subprocess.run([*phalanx, str(ROOT / "examples" / "hang.py")], capture_output=True, text=True, check=False)
    ended = monotonic_ns()
    if FINDING not in run.stderr:
        raise RuntimeError(f"the report has no {FINDING!r}: {run.stderr[-500:]}")
    (path,) = folder.glob("*/events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    deadline = min(
        event["monotonic_ns"] - event["overdue"] * 1e9 for event in events if event["name"] == "timer.expired"
    )
    reaped = min(
        event["monotonic_ns"] for event in events if event["name"] == "worker.reaped"
    )  # told after all of them
    return {"signalled": (reaped - deadline) / 1e6, "report": (ended - deadline) / 1e6}


def _measure() -> Sample:
    seen = [_report() for _ in range(TIMES)]
    return Sample({name: [figures[name] for figures in seen] for name in seen[0]})


CASE = Case(
    name="hang_report",
    measures=f"examples/hang.py with {WORKERS} workers under phalanx run: from the first deadline until those"
    " that hang have been signalled and the first is on record, and until phalanx run has ended, its report shown",
    units={"signalled": "ms", "report": "ms"},
    targets=(Target("report", "<", 1000, worst=True),),
    contenders={PHALANX: _measure},
    rounds=3,
    warm_up=False,
)
