"""What it costs a run to be watched: nobody asks; `phalanx top` is open; `phalanx status` is called."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING

from benchmarks import procfs
from benchmarks.case import FLOOR, PHALANX, Case, Sample, Target
from benchmarks.group import elapsed_ms
from benchmarks.jobs import SLEEPS, Started

if TYPE_CHECKING:
    from collections.abc import Collection

SETTLE, IDLE, OPEN = 1.0, 4.0, 6.0
"""Seconds: until what the start left is done, with nobody there, and with `phalanx top`, which asks every 2 s."""

TIMES = 5

_READS = """
import sys
for pid in sys.argv[1:]:
    for name in ("stat", "smaps_rollup"):
        with open(f"/proc/{pid}/{name}") as file:
            print(file.read())
"""


def _cpu(pids: Collection[int], seconds: float) -> float:
    """Return the per cent of a core that these processes use while we sleep."""
    before, began = sum(map(procfs.cpu_seconds, pids)), time.monotonic()
    time.sleep(seconds)
    return 100 * (sum(map(procfs.cpu_seconds, pids)) - before) / (time.monotonic() - began)


def _drain(fd: int) -> None:
    with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more, see pty(7)
        while os.read(fd, 1 << 16):
            pass


def _phalanx(copies: int) -> Sample:
    with Started(PHALANX, SLEEPS, copies) as job:
        job.wait_ready()
        time.sleep(SETTLE)
        beside = job.beside()
        figures = {"cpu": [_cpu(beside, IDLE)]}
        command = [sys.executable, "-m", "phalanx"]
        where = ["--log-dir", str(job.folder / "logs")]
        screen, terminal = os.openpty()
        termios.tcsetwinsize(terminal, (50, 120))
        drain = threading.Thread(target=_drain, args=(screen,))
        drain.start()
        env = os.environ | {"TERM": "xterm-256color"}
        top = subprocess.Popen([*command, "top", *where], stdin=terminal, stdout=terminal, stderr=terminal, env=env)
        os.close(terminal)
        time.sleep(SETTLE)
        began = procfs.cpu_seconds(top.pid)
        figures["cpu, top"] = [_cpu(beside, OPEN)]
        figures["top itself"] = [100 * (procfs.cpu_seconds(top.pid) - began) / OPEN]
        if top.poll() is not None:
            raise RuntimeError(f"phalanx top has ended, with {top.returncode}")
        top.terminate()
        top.wait()
        drain.join()
        os.close(screen)
        status = [*command, "status", *where]
        before = sum(map(procfs.cpu_seconds, beside))
        figures["status"] = [elapsed_ms(lambda: subprocess.check_output(status)) for _ in range(TIMES)]
        figures["status, asked"] = [(sum(map(procfs.cpu_seconds, beside)) - before) * 1e3 / TIMES]
    return Sample(figures)


def _floor(copies: int) -> Sample:
    with Started(FLOOR, SLEEPS, copies) as job:
        job.wait_ready()
        time.sleep(SETTLE)
        beside = job.beside()
        command = [sys.executable, "-c", _READS, *map(str, job.left() - beside)]
        cpu = _cpu(beside, IDLE)
        return Sample(
            {"cpu": [cpu], "status": [elapsed_ms(lambda: subprocess.check_output(command)) for _ in range(TIMES)]}
        )


CASE = Case(
    name="watched",
    measures="a run of N x sleep: CPU (in % of a core) of all that is no copy, nobody asking and with `phalanx top` on "
    "a terminal, and that of the latter; `phalanx status` from its start to its end, and the CPU time that its "
    "question takes of the run; the floor reads stat and smaps_rollup of each copy",
    units={"cpu": "%", "cpu, top": "%", "top itself": "%", "status": "ms", "status, asked": "ms"},
    targets=(Target("cpu", "<", 0.2, size=64), Target("cpu, top", "<", 2, size=64)),
    contenders={PHALANX: _phalanx, FLOOR: _floor},
    sizes=(8, 64),
    rounds=2,
    warm_up=False,
)
