"""The commands of torchrun's pages for two hosts, with torchrun and with phalanx run: begin, and death of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.case import PHALANX, TORCH, Case, Sample, Target
from benchmarks.etcd import free_port
from benchmarks.two_launchers import hear

SCRIPT = Path(__file__).parent.parent / "reduce.py"
UP, CAP = 120.0, 60.0
"""Seconds within which both ranks have reduced; and within which both launchers have ended after a death."""

LAUNCHER = {PHALANX: ("phalanx", "run"), TORCH: ("torch.distributed.run",)}


def _static(contender: str) -> list[list[str]]:
    command = [
        sys.executable, "-m", *LAUNCHER[contender], "--nnodes", "2", "--nproc-per-node", "1",
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--log-dir", tempfile.mkdtemp(),
    ]  # fmt: skip
    return [[*command, "--node-rank", str(rank)] for rank in range(2)]


def _c10d(contender: str) -> list[list[str]]:
    command = [
        sys.executable, "-m", *LAUNCHER[contender], "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", uuid.uuid4().hex, "--local-addr", "127.0.0.1",
        "--log-dir", tempfile.mkdtemp(),
    ]  # fmt: skip
    return [[*command, "--rdzv-conf", f"is_host={int(first)}"] for first in (True, False)]


def _run(commands: list[list[str]]) -> tuple[float, float]:
    """Return the ms from the start until both ranks have reduced, and from the death of one until both have ended."""
    folder = Path(tempfile.mkdtemp())
    os.mkfifo(folder / "said")
    pipe = os.open(folder / "said", os.O_RDWR)
    began = time.monotonic_ns()
    launchers = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"launcher-{number}").open("wb") as out:
                launchers.append(subprocess.Popen([*command, SCRIPT, folder / "said"], stdout=out, stderr=out))
        heard = [line.split() for line in hear(pipe, 2, UP)]
        if len(heard) < len(commands):
            texts = [(folder / f"launcher-{number}").read_text(errors="replace") for number in range(len(commands))]
            raise RuntimeError(f"{len(heard)} ranks have reduced: {' | '.join(text[-500:] for text in texts)}")
        reduced = max(int(moment) for _, _, moment in heard)
        killed = time.monotonic_ns()
        os.kill(next(int(pid) for pid, rank, _ in heard if rank == "1"), signal.SIGKILL)
        for launcher in launchers:
            launcher.wait(CAP)
        return (reduced - began) / 1e6, (time.monotonic_ns() - killed) / 1e6
    finally:
        os.close(pipe)
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()


def _sample(contender: str) -> Sample:
    figures: dict[str, list[float]] = {}
    for name, commands in (("static", _static), ("c10d", _c10d)):
        begin, end = _run(commands(contender))
        figures[f"{name}, first all_reduce"] = [begin]
        figures[f"{name}, report"] = [end]
    return Sample(figures)


def _phalanx() -> Sample:
    return _sample(PHALANX)


def _peer() -> Sample:
    return _sample(TORCH)


FIGURES = [f"{name}, {what}" for name in ("static", "c10d") for what in ("first all_reduce", "report")]

CASE = Case(
    name="two_hosts",
    measures="two launchers of one job, as on two hosts, with one rank of torch (gloo) each, by the commands of"
    " torchrun's pages (static; c10d), with torchrun and with phalanx run: from the start until both ranks have"
    " reduced, and from SIGKILL to one rank until both launchers have reported and ended;"
    f" {len(os.sched_getaffinity(0))} cores",
    units=dict.fromkeys(FIGURES, "ms"),
    targets=tuple(Target(figure, "<=", 1.0, of=TORCH) for figure in FIGURES),
    contenders={PHALANX: _phalanx, TORCH: _peer},
    rounds=3,
    warm_up=False,
    limit=300.0,
    interpreter=TORCH,
)
