"""How soon the failure of one rank is acted on while others write faster than can be shown."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.case import PHALANX, Case, Sample, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = 8
RATE = 25_000_000
"""Bytes a second of each."""

TIMES = 20
SETTLE = 0.1
WAYS = {
    "terminal": (),
    "json": ("--log-format", "json"),
    "fold": ("--fold",),
    "grep": ("--grep", "^[0-9]+ (s|t)"),
}

# Rank 8 fails when all others have written for a while; each of these notes when it was sent SIGTERM
# (CLOCK_MONOTONIC is the same for all processes).
_TRAIN = f"""
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
def note(name):
    with open(f"{{folder}}/{{name}}", "w") as file:
        file.write(repr(time.monotonic()))
if rank == {WORKERS}:
    while len(os.listdir(folder)) < {WORKERS}:
        time.sleep(0.01)
    time.sleep(0.3)
    note("failed")
    os._exit(3)
def stop(*_):
    note(f"stopped{{rank}}")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
line = b"%d short line of eighty bytes, as a training would write one, and that is it now...\\n"
block = b"".join(line % number for number in range(3000))
began, written = time.monotonic(), 0
open(f"{{folder}}/ready{{rank}}", "w").close()
while True:
    os.write(1, block)
    written += len(block)
    time.sleep(max(0.0, began + written / {RATE} - time.monotonic()))
"""


@contextlib.contextmanager
def _console(*, terminal: bool) -> Iterator[int]:
    """A terminal or a pipe whose reader drops what it reads."""
    ours, theirs = pty.openpty() if terminal else os.pipe()

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(ours, 1 << 16):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def _once(way: str) -> float:
    """Return the milliseconds beyond the settle window until the last of the others had its SIGTERM."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a disk would be measured otherwise
    try:
        moments, script = folder / "moments", folder / "train.py"
        moments.mkdir()
        script.write_text(_TRAIN)
        command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(WORKERS + 1), "--drain", "0"]
        command += ["--settle", str(SETTLE), "--log-dir", str(folder / "logs"), *WAYS[way], str(script), str(moments)]
        with _console(terminal=way == "terminal") as console:
            env = {**os.environ, "TERM": "xterm"}
            code = subprocess.run(command, stdout=console, stderr=subprocess.DEVNULL, env=env, check=False).returncode
        if code != 3:
            raise RuntimeError(f"exit code {code} instead of 3")
        failed = float((moments / "failed").read_text())
        stopped = [float((moments / f"stopped{rank}").read_text()) for rank in range(WORKERS)]
        return (max(stopped) - failed - SETTLE) * 1e3
    finally:
        shutil.rmtree(folder)


def _measure() -> Sample:
    return Sample({way: [_once(way) for _ in range(TIMES)] for way in WAYS})


CASE = Case(
    name="flood",
    measures=f"{WORKERS} ranks of phalanx run write {WORKERS * RATE / 1e6:g} MB/s together to a terminal, as JSON,"
    f" folded, and through a pattern; a ninth fails: from its exit until the last of the others has its SIGTERM,"
    f" less the settle window; {TIMES} times each",
    units=dict.fromkeys(WAYS, "ms"),
    targets=tuple(Target(way, "<", 50, worst=True) for way in WAYS),
    contenders={PHALANX: partial(_measure)},
    rounds=1,
    warm_up=False,
    limit=1800.0,
)
