"""`phalanx status` as a person and as a program use it: of runs that run, that have ended, and that are lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.command import Done, Launcher, Place, sh, start_sh
from tests.support.helpers import TIMEOUT, Gate, Ready, wait_gone

SCRIPT = """\
import os, subprocess, sys
from phalanx.timer import progress
rank = int(os.environ["RANK"])
if rank == 1:
    child = subprocess.Popen(["sleep", "1000"])
print("loss", rank, flush=True)
progress(7 + rank)
{ready}
{gate}
"""


def phalanx(place: Place, command: str, *options: object) -> Done:
    """What a command says of the runs here."""
    return place.program(sys.executable, "-m", "phalanx", command, "--log-dir", place.logs, *options)


def status(place: Place, *options: object) -> Done:
    return phalanx(place, "status", *options)


def until_answered(place: Place, shown: str = "") -> Done:
    """What is said once the launcher answers, and that has `shown`: its socket is there soon after the workers."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        done = status(place)
        if not done.status and shown in done.out:
            return done
        assert time.monotonic() < deadline, done


HEADS = ["RANK", "PID", "STATE", "UPTIME", "CPU%", "MEM", "BEAT", "STEP", "STEP/S", "LAST", "LINE"]
STAYS = "echo line of $RANK; exec sleep 1000"


@contextlib.contextmanager
def start(
    place: Place, *options: object, n: int = 2, code: str = STAYS, shown: str = "line of 0"
) -> Iterator[Launcher]:
    """A run of shells, which answers."""
    with start_sh(place, code, *options, n=n) as launcher:
        until_answered(place, shown)
        yield launcher


def node_of(place: Place) -> dict[str, Any]:
    done = status(place, "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["state"], found["version"]) == ("running", 1)
    (node,) = found["nodes"]
    return dict(node)


@pytest.mark.long
def test_a_run_that_runs_shows_each_rank(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(SCRIPT.format(ready=ready.python(), gate=gate.python()), "train.py")
    before = time.time()
    with place.start("--nproc-per-node", 2, "--hang-timeout", 600, "--max-restarts", 3, script) as launcher:
        pids = ready.pids(2)
        done = until_answered(place, "running for")
        head, where, empty, heads, *rows = done.out.splitlines()
        (run,) = place.logs.iterdir()
        assert re.fullmatch(rf"{run.name}: running for [\d.]+s, attempt 0, 0 of 3 restarts", head)
        assert where == f"2 ranks on {os.uname().nodename}, launcher {launcher.process.pid}: {script}"
        assert (empty, heads.split()) == ("", HEADS)
        assert [row.split()[0] for row in rows] == ["0", "1"]
        assert [row.split()[2] for row in rows] == ["running"] * 2
        assert [row.endswith(f"  loss {rank}") for rank, row in enumerate(rows)] == [True] * 2

        node = node_of(place)
        assert (node["host"], node["name"], node["pid"]) == (os.uname().nodename, script, launcher.process.pid)
        assert (node["state"], node["attempt"], node["restarts"], node["max_restarts"]) == ("RUNNING", 0, 0, 3)
        assert (node["group_rank"], node["paused"]) == (0, False)
        one, two = node["ranks"]
        assert {one["pid"], two["pid"]} == set(pids)
        assert (one["rank"], one["local_rank"], one["state"], one["exitcode"]) == (0, 0, "running", None)
        assert (one["step"], two["step"], one["breakpoint"], one["line"]) == (7, 8, None, "loss 0")
        assert before - 1 < one["started"] <= node["time"] <= time.time() + 1
        assert 0 <= one["beat"] < TIMEOUT
        assert 0 < one["cpu"] < TIMEOUT
        assert (one["threads"], two["threads"]) == (1, 2)  # with that of its child
        assert 1 << 20 < one["memory"] < 1 << 30
        gate.open(2)
        assert launcher.end().status == 0


@pytest.mark.slow
def test_what_ranks_write_harms_no_terminal(place: Place) -> None:
    code = r"printf '\033[31mred\033[0m\n10%%\r20%%\033[2J\007%0300d' 0; exec sleep 1000"
    with start(place, n=1, code=code, shown="20%"):
        line = node_of(place)["ranks"][0]["line"]
    assert line == r"20%\x07".ljust(200, "0")


@pytest.mark.slow
def test_a_second_attempt_is_counted_and_a_pause_shown(place: Place) -> None:
    code = f'[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && exit 3; {STAYS}'
    with start(place, "--max-restarts", 2, n=1, code=code):
        done = until_answered(place, "attempt 1")
        assert ", attempt 1, 1 of 2 restarts\n" in done.out
        assert node_of(place)["restarts"] == 1
        assert phalanx(place, "pause").status == 0
        done = until_answered(place, "paused")
        assert ": running, paused for " in done.out
        assert done.out.splitlines()[4].split()[2] == "paused"
        assert phalanx(place, "resume").status == 0


@pytest.mark.slow
def test_a_run_that_has_ended_shows_how(place: Place) -> None:
    assert sh(place, "exit 3", n=2).status == 3
    done = status(place, "night")
    assert (done.status, done.out, done.err.startswith("Error: there is no run 'night' in ")) == (1, "", True)
    done = status(place)
    head, cause, _, heads, *rows = done.out.splitlines()
    (run,) = place.logs.iterdir()
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(rf"{run.name}: failed with exit code 3 after [\dms.]+", head)
    assert re.fullmatch(r"rank \d: exited with code 3; no error was recorded", cause)
    assert heads.split() == ["RANK", "PID", "STATE"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert {" ".join(row.split()[2:]) for row in rows} <= {"exit 3", "stopped"}
    found = json.loads(status(place, "--json").out)
    assert (found["state"], found["run"]["exit_code"], "nodes" in found) == ("failed", 3, False)
    assert sh(place, "exit 0").status == 0
    done = status(place)  # the latest
    assert (done.status, ": succeeded after " in done.out, "succeeded" in done.out.splitlines()[-1]) == (0, True, True)
    assert status(place, run.name).out.splitlines()[0] == head


@pytest.mark.slow
def test_a_run_is_lost_whose_launcher_was_killed(place: Place) -> None:
    with start(place) as launcher:
        pids = [rank["pid"] for rank in node_of(place)["ranks"]]
        launcher.send(signal.SIGKILL)
        launcher.process.wait()
    assert wait_gone(pids) == set()
    done = status(place)
    pid = launcher.process.pid
    assert (done.status, done.err) == (1, "")
    why = f"lost: its launcher, process {pid} on {os.uname().nodename}, was killed, or the machine went down"
    assert done.out.splitlines()[0].partition(": ")[2] == why
    assert done.out.splitlines()[-1].split()[-1] == "lost"
    assert json.loads(status(place, "--json").out)["state"] == "lost"


@pytest.mark.slow
def test_the_list_of_runs_has_the_steps_of_live_ones(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(SCRIPT.format(ready=ready.python(), gate=gate.python()), "train.py")
    with place.start("--nproc-per-node", 2, "--hang-timeout", 600, script) as launcher:
        ready.wait(2)
        until_answered(place)
        deadline = time.monotonic() + TIMEOUT
        while (cells := phalanx(place, "runs").out.splitlines()[1].split())[8] != "8":  # on a busy machine, not at once
            assert time.monotonic() < deadline
        assert (cells[1], cells[4:8]) == ("running", ["2", "-", str(launcher.process.pid), "0"])
        gate.open(2)
        assert launcher.end().status == 0
    assert phalanx(place, "runs").out.splitlines()[1].split()[4:9] == ["2", "0", "-", "0", "8"]
