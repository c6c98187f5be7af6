"""SIGKILL to the launcher at any moment of start, run, delay, restart and stop: no worker is left.

``PHALANX_ROUNDS`` says how many moments are tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from phalanx._base import procfs
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = int(os.environ.get("PHALANX_ROUNDS", "5"))

LAUNCHER = """
import os, signal, sys
from phalanx.multiprocessing import Std
from phalanx.agent import RestartPolicy
from tests.support.attempt_groups import LocalRunner, shells
from tests.support.streams import observed_by

folder, states = sys.argv[1], int(sys.argv[2])

def script(attempt):
    if attempt == 0:
        return "exit 1"
    return "trap '' TERM; setsid sleep 600 & sleep 600 & wait; wait"

def observe(name, facts):
    if name == "agent.state":
        os.write(states, f"{facts['state']}\\n".encode())
        if (facts["state"], facts["attempt"]) == ("RUNNING", 1):
            attempts.ask_restart(signal.SIGTERM, 0.05, "asked for")
        elif facts["state"] == "RUNNING" and facts["attempt"] == 2:
            attempts.ask_stop(signal.SIGTERM, 0.05)

for run in range(1000):
    team = shells(script, 2, os.path.join(folder, str(run)), record=True, specs={"redirects": Std.ALL})
    with observed_by(observe) as events:
        with LocalRunner(team, RestartPolicy(3, backoff=0.05), events=events) as attempts:
            attempts.run()
    team.close()
"""


def marked(mark: str) -> set[int]:
    """Who carries the mark in its environment, and is no zombie."""
    return {stat.pid for stat in procfs.processes() if stat.state != "Z" and mark.encode() in procfs.environ(stat.pid)}


def left(mark: str, seconds: float = 10.0) -> set[int]:
    """Who carries the mark after that long; the empty set as soon as nobody does."""
    until = time.monotonic() + seconds
    while found := marked(mark):
        if time.monotonic() > until:
            return found
    return found


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * ROUNDS)
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    path = os.pathsep.join([ROOT, *filter(None, sys.path)])
    states: Counter[str] = Counter()
    slowest = 0.0
    for count in range(ROUNDS):
        mark = f"KILLED_LAUNCHER={os.getpid()}-{count}"
        name, _, value = mark.partition("=")
        temporary, folder = tmp_path / f"t{count}", tmp_path / f"l{count}"
        temporary.mkdir()
        env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary), name: value}
        out, into = os.pipe()
        command = [sys.executable, "-c", LAUNCHER, str(folder), str(into)]
        with subprocess.Popen(command, env=env, pass_fds=(into,), stderr=subprocess.DEVNULL) as launcher:
            os.close(into)
            seen = os.read(out, 64)  # it has begun
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(random.uniform(0, 1.0))  # noqa: S311 - no secret
            launcher.kill()
        began = time.monotonic()
        assert left(mark) == set()
        slowest = max(slowest, time.monotonic() - began)
        while part := os.read(out, 65536):
            seen += part
        os.close(out)
        states[seen.decode().split()[-1]] += 1
        for record in folder.rglob("run.json"):
            assert json.loads(record.read_text())["state"], record
    print(f"killed while {dict(states)}; all gone within {1000 * slowest:.0f} ms")  # noqa: T201 - shown with -rP
