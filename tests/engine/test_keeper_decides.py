"""What must happen happens on time though the launcher is stopped, or busy; and it reports it truly when it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._base import procfs
from phalanx._timers.escalation import EVIDENCE_WAIT
from tests.support.helpers import TIMEOUT, alive, wait_gone
from tests.support.insides import stop
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.slow

SLACK = TIMEOUT
"""Seconds beyond what is promised that a loaded machine may take."""

BUSY = 100.0
"""Seconds of a call that holds the GIL, unless a signal ends it before."""

LAUNCHER = """
import json, sys
from phalanx.multiprocessing import start_processes
from phalanx.timer import TimerSpecs
from tests.support import workers

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    timers = TimerSpecs() if options.pop("timers", False) else None
    busy = options.pop("busy", 0)
    with start_processes("g", getattr(workers, options.pop("function")), timers=timers, **options) as group:
        if busy:
            workers.hold_the_gil(options["args"]["0"][0], busy)
        result = group.wait()
    print(json.dumps({
        "state": result.state,
        "root": None if result.root_cause is None else [result.root_cause.local_rank, result.root_cause.message],
        "outcomes": [[outcome.state, outcome.exitcode, outcome.signal_sent] for outcome in result.outcomes.values()],
    }))
"""


@contextlib.contextmanager
def launched(
    tmp_path: Path, ready: Ready, gate: Gate, function: str, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A launcher of three workers in a process of its own. It prints what became of them."""
    args = {rank: (ready.address, gate.address, rank) for rank in range(3)}
    script = tmp_path / "launcher.py"
    script.write_text(
        LAUNCHER.replace("**options)", '**{**options, "args": {int(k): tuple(v) for k, v in options["args"].items()}})')
    )
    command = [sys.executable, "-W", "error", str(script), json.dumps({"function": function, "args": args, **options})]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([ROOT, *filter(None, sys.path)])}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            yield launcher
        except AssertionError as error:
            launcher.kill()
            error.add_note(f"the launcher ({launcher.wait()}) said: {launcher.communicate()}")
            raise
        finally:
            launcher.send_signal(signal.SIGCONT)
            launcher.kill()


def goes_on(launcher: subprocess.Popen[str], expected: str = "", *, busy: bool = False) -> dict[str, Any]:
    """What the launcher says in the end."""
    if busy:
        launcher.send_signal(signal.SIGUSR1)
    launcher.send_signal(signal.SIGCONT)
    out, err = launcher.communicate(timeout=TIMEOUT)
    err, announced = re.subn("phalanx: the group 'g' has failed: rank 0, .*\n", "", err)
    assert announced == 1
    assert re.fullmatch(expected, err), err
    said: dict[str, Any] = json.loads(out)
    for outcome in said["outcomes"]:
        if outcome == ["stopped", -15, 9]:  # it had died of SIGTERM, but was not gone yet when the grace was over
            outcome[2] = 15
    return said


FAILED = {
    "state": "failed",
    "root": [0, "exited with code 3; no error was recorded"],
    "outcomes": [["failed", 3, None], ["stopped", -15, 15], ["stopped", -9, 9]],
}


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_launcher_that_is_stopped_holds_up_no_stop_and_no_kill(
    tmp_path: Path, ready: Ready, gate: Gate, method: str
) -> None:
    settle, grace = 0.1, 0.5
    with launched(tmp_path, ready, gate, "one_fails", start_method=method, settle=settle, grace=grace) as launcher:
        pids = ready.pids(3)
        stop(launcher.pid)
        gate.open()
        assert wait_gone(pids, settle + grace + SLACK) == set()
        assert procfs.Stat(launcher.pid).state == "T"
        assert goes_on(launcher) == FAILED


@pytest.mark.parametrize("when", ["settling", "stopping"])
def test_a_launcher_that_is_stopped_meanwhile(tmp_path: Path, ready: Ready, gate: Gate, when: str) -> None:
    settle, grace = (2.0, 0.3) if when == "settling" else (0.0, 2.0)
    with launched(tmp_path, ready, gate, "one_fails", settle=settle, grace=grace) as launcher:
        first, *others = sorted(ready.pids(3))
        gate.open()
        assert wait_gone([first]) == set()
        stop(launcher.pid)  # in time, unless this machine has kept us waiting: then it has ended, as it should
        in_time = any(map(alive, others))
        assert wait_gone(others, settle + grace + SLACK) == set()
        assert not in_time or procfs.Stat(launcher.pid).state == "T"
        assert goes_on(launcher) == FAILED


def test_a_launcher_in_a_call_that_holds_the_gil(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    settle, grace = 0.1, 0.5
    with launched(tmp_path, ready, gate, "one_fails", settle=settle, grace=grace, busy=BUSY) as launcher:
        messages = ready.wait(4)
        pids = [int(message) for message in messages if message != "busy"]
        gate.open()
        assert wait_gone(pids, settle + grace + SLACK) == set()
        assert launcher.poll() is None
        assert goes_on(launcher, busy=True) == FAILED


def stopped(launcher: subprocess.Popen[str], _ready: Ready) -> None:
    stop(launcher.pid)


def busy(launcher: subprocess.Popen[str], _ready: Ready) -> None:
    """It has said so."""
    assert launcher.poll() is None


@pytest.mark.long
@pytest.mark.parametrize("how", [stopped, busy])
def test_a_hung_rank_is_killed_at_its_deadline(
    tmp_path: Path, ready: Ready, gate: Gate, how: Callable[[subprocess.Popen[str], Ready], None]
) -> None:
    options = {"timers": True, "settle": 0.1, "grace": 0.5, "busy": BUSY if how is busy else 0}
    with launched(tmp_path, ready, gate, "one_hangs", **options) as launcher:
        pids = {int(message) for message in ready.wait(5 if how is busy else 4) if message != "busy"}
        how(launcher, ready)
        gate.open()
        assert wait_gone(pids, 0.3 + EVIDENCE_WAIT + 0.1 + 0.5 + SLACK) == set()
        assert launcher.poll() is None
        expected = r"rank 0: 'load' \(.*\) was not left within 0.3 s; [\d.]+m?s over; .*; SIGKILL\n"
        said = goes_on(launcher, expected, busy=how is busy)
    rank, message = said["root"]
    assert rank == 0
    assert message.startswith("Hang: 'load' (")
    assert said["outcomes"] == [["failed", -9, None], ["stopped", -15, 15], ["stopped", -15, 15]]
