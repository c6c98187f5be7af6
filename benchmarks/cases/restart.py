"""How soon all workers are there again, once one of them has failed: whole launchers, side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target

if TYPE_CHECKING:
    from collections.abc import Callable

WARM = 8
"""The size at which the workers import the module, too: of 64, torchrun's would take minutes."""

SCRIPT = Path(__file__).parent.parent / "first_line.py"
MODULE = "torch"
RESTARTS = 3
RESTARTS_WITH_IMPORTS = 1
"""Of the peer, whose workers import the module in each attempt."""

OURS = ("phalanx", "run")
THEIRS = ("torch.distributed.run", "--standalone")
"""How the peer is run on one machine; torchrun's pages say the longer one, too."""

THEIRS_AT_LENGTH = ("torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def moments(text: str) -> list[float]:
    r"""Return, for each restart, the milliseconds from the exit of rank 0 until the last rank was at its first line.

    >>> moments("0 first 1.0\n0 exit 2.0\n1 first 2.25\n1 first 2.5\n")
    [500.0]
    """
    exits: dict[int, float] = {}
    firsts: dict[int, list[float]] = {}
    for line in text.splitlines():
        attempt, what, moment = line.split()
        if what == "exit":
            exits[int(attempt)] = float(moment)
        else:
            firsts.setdefault(int(attempt), []).append(float(moment))
    return [(max(firsts[attempt + 1]) - moment) * 1e3 for attempt, moment in sorted(exits.items())]


def _folder(restarts: int) -> str:
    folder = tempfile.mkdtemp()
    for attempt in range(restarts):
        os.mkfifo(f"{folder}/{attempt}")
    return folder


def _restarts(workers: int, launcher: tuple[str, ...], module: str = "", restarts: int = 0) -> list[float]:
    restarts = restarts or RESTARTS
    folder = _folder(restarts)
    options = ("--nproc-per-node", workers, "--max-restarts", restarts, "--log-dir", f"{folder}/logs")
    script = (SCRIPT, folder, module, restarts)
    command = [sys.executable, "-m", *map(str, (*launcher, *options, *script))]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    text = Path(folder, "moments").read_text() if not done.returncode else ""
    if text.count("first") != workers * (restarts + 1):
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()}")
    return moments(text)


def _phalanx(workers: int = WARM) -> Sample:
    preload = ("--preload", MODULE)
    at_once = ("--settle", "0")
    figures = {"cold": _restarts(workers, OURS)}
    if workers == WARM:
        figures["cold, settle 0"] = _restarts(workers, (*OURS, *at_once))
        figures["imports"] = _restarts(workers, (*OURS, *preload), MODULE)
        figures["imports, settle 0"] = _restarts(workers, (*OURS, *preload, *at_once), MODULE)
    return Sample(figures)


def _peer(workers: int = WARM) -> Sample:
    figures = {"cold": _restarts(workers, THEIRS)}
    if workers == WARM:
        figures["cold, c10d"] = _restarts(workers, THEIRS_AT_LENGTH)
        figures["imports"] = _restarts(workers, THEIRS, MODULE, RESTARTS_WITH_IMPORTS)
    return Sample(figures)


def _floor(size: int = WARM) -> Sample:
    folder = _folder(RESTARTS)
    command = [sys.executable, str(SCRIPT), folder, "", str(RESTARTS)]
    for attempt in range(RESTARTS + 1):
        env = os.environ | {"WORLD_SIZE": str(size), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        workers = [subprocess.Popen(command, env=env | {"RANK": str(rank)}) for rank in range(size)]
        workers[0].wait()
        for worker in workers if attempt < RESTARTS else ():
            worker.terminate()
        for worker in workers:
            worker.wait()
    return Sample({"cold": moments(Path(folder, "moments").read_text())})


CONTENDERS: dict[str, Callable[..., Sample]] = {PHALANX: _phalanx, TORCH: _peer, FLOOR: _floor}

CASE = Case(
    name="restart",
    measures="N Python workers, one exits with 1: from its exit until all of the next attempt are at their "
    f"first line; cold, and of {WARM} with import {MODULE} before it (phalanx: --preload {MODULE}); torchrun by "
    f"--standalone; the floor is kill, wait and N x Popen; {len(os.sched_getaffinity(0))} cores",
    units={
        "cold": "ms",
        "cold, settle 0": "ms",
        "cold, c10d": "ms",
        "imports": "ms",
        "imports, settle 0": "ms",
    },
    targets=(Target("cold", "<=", 1.0, of=TORCH), Target("imports", "<=", 0.05, of=TORCH, size=WARM)),
    contenders=CONTENDERS,
    sizes=(2, WARM, 64),
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
    interpreter=TORCH,
)
