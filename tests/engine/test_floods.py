"""What a worker sends to those above it, as fast as it can, takes none of their time: a group ends as it would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from phalanx._base import procfs
from phalanx.multiprocessing import start_processes
from tests.support.helpers import PYTHON, TIMEOUT, Ready, wait_gone
from tests.support.insides import helpers_of, supervisor_of
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

UNSTOPPABLE = {signal.SIGKILL, signal.SIGSTOP}
DEADLY = UNSTOPPABLE | {signal.SIGCHLD, signal.SIGCONT}  # or heeded: all others are ignored

FLOOD = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
for number in numbers:
    os.kill(TARGET, number)
READY
while True:
    for number in numbers:
        os.kill(TARGET, number)
"""


def flood(ready: Ready, target: str) -> str:
    return FLOOD.replace("TARGET", target).replace("READY", ready.python())


@pytest.mark.slow
@pytest.mark.parametrize("who", ["keeper", "guard"])
def test_a_flood_of_signals_from_a_worker_holds_up_no_helper(who: str, tmp_path: Path) -> None:
    parent = "os.getppid()"
    if who == "guard":
        parent = f"int(open(f'/proc/{{{parent}}}/stat').read().rpartition(')')[2].split()[1])"
    with Ready(tmp_path / "ready") as ready:
        code = flood(ready, "target").replace("numbers =", f"target = {parent}; numbers =", 1)
        args = dict.fromkeys(range(2), ("-c", code))
        group = start_processes("flood", sys.executable, args, {0: {}, 1: {}})
        try:
            workers = ready.pids(2)
            group.close(timeout=0.1)
        finally:
            group.close()
        assert not wait_gone(workers, 0)
        result = group.wait(0)  # raises KeeperLostError where the guard had to finish it
        assert result is None or not result.failures
        assert not supervisor_of(group).link.keeper_error


def test_no_signal_reaches_the_code_of_a_helper(tmp_path: Path) -> None:
    with Ready(tmp_path / "ready") as ready:
        code = ready.python() + "; import time; time.sleep(60)"
        group = start_processes("deaf", sys.executable, {0: ("-c", code)}, {0: {}})
        try:
            [worker] = ready.pids()
            for who, pid in zip(("guard", "keeper"), helpers_of(group), strict=True):
                ignored, caught, blocked = (
                    procfs.signal_set(procfs.status(pid), name) for name in ("SigIgn", "SigCgt", "SigBlk")
                )
                assert not caught, who
                assert blocked == 1 << signal.SIGCHLD - 1, who
                expected = signal.valid_signals() - DEADLY
                assert {number for number in expected if ignored >> number - 1 & 1} == expected, who
            # A worker has none of it.
            assert procfs.signal_set(procfs.status(worker), "SigBlk") == 0
            ignored = procfs.signal_set(procfs.status(worker), "SigIgn")
            here = {number for number in signal.valid_signals() if ignored >> number - 1 & 1}
            assert here == {signal.SIGPIPE, signal.SIGXFSZ}  # Python's own
        finally:
            group.close(timeout=0)


@pytest.mark.slow
def test_a_flood_of_requests_to_end_is_announced_once(tmp_path: Path) -> None:
    with Ready(tmp_path / "ready") as ready:
        script = tmp_path / "flood.py"
        script.write_text(
            f"import os, signal\nlauncher = int(os.environ['LAUNCHER'])\n{ready.python()}\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "while True:\n    os.kill(launcher, signal.SIGTERM)\n"
        )
        command = f"LAUNCHER=$$ exec {PYTHON} -m phalanx run --nproc-per-node 2 --log-dir logs {script}"
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}
        argv = ["/bin/sh", "-c", command]
        ended = subprocess.run(
            argv, check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=3 * TIMEOUT
        )
        assert ended.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), ended.stderr
        assert ended.stderr.count("killing the workers") <= 1, ended.stderr
        assert not wait_gone(ready.pids(1))
