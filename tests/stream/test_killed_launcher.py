"""A launcher that is killed: `events.jsonl` has every line up to then, each whole. And it agrees with `run.json`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx._runs import record
from tests.support.command import Place
from tests.support.disks import fill
from tests.support.helpers import TIMEOUT, Gate, Ready, until, wait_gone

ROUNDS = int(os.environ.get("PHALANX_ROUNDS", "4"))

FAILS_AND_HANGS = """
import phalanx.timer, sys, os
{ready}
if os.environ["RANK"] == "1":
    sys.exit(0)
with phalanx.timer.expires(after=0.005):
    {gate}
"""


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of the file, each of which must be whole."""
    text = (folder / "events.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def count(folder: Path, text: str) -> int:
    paths = list(folder.glob("*/events.jsonl"))
    return paths[0].read_text().count(text) if paths else 0


@pytest.mark.slow
@pytest.mark.parametrize("lines", range(0, 5 * ROUNDS, 5))
def test_what_happened_before_a_kill_is_in_the_file(lines: int, place: Place, ready: Ready, gate: Gate) -> None:
    """Events come without end: in each of six ranks a timer expires every tenth of a second, and is reported on."""
    script = place.write(FAILS_AND_HANGS.format(ready=ready.python(), gate=gate.python()))
    with place.start("--nproc-per-node", 7, "--on-expiry", "report", "-r", "3", script) as launcher:
        pids = ready.pids(7)
        until(lambda: count(place.logs, '"worker.exited"') == 1 and count(place.logs, '"timer.expired"') > lines)
        launcher.process.send_signal(signal.SIGKILL)
        launcher.process.wait(TIMEOUT)
    assert wait_gone(pids) == set()
    (folder,) = place.logs.iterdir()
    found = events_of(folder)
    names = [event["name"] for event in found]
    assert names[:4] == ["agent.state", "agent.status", "agent.status", "group.starting"]
    assert {event["pid"] for event in found if event["name"] == "worker.started"} == set(pids)
    assert names.count("worker.exited") == 1
    assert names.count("timer.expired") > lines
    assert "run.ended" not in names
    assert record.state_now(record.read(str(folder))) == "lost"


@pytest.mark.slow
def test_the_events_and_the_record_agree(place: Place) -> None:
    script = place.write("""
        import os, sys, time
        rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
        if rank == 1:
            sys.exit({"0": 3, "1": 4, "2": 0}[attempt])
        if rank == 2 and attempt != "2":
            time.sleep(600)
    """)
    assert place.run("--nproc-per-node", 3, "--max-restarts", 2, script).status == 0
    (folder,) = place.logs.iterdir()
    found, run = events_of(folder), record.read(str(folder))
    assert [attempt.number for attempt in run.attempts] == [0, 1, 2]
    for attempt in run.attempts:
        own = [event for event in found if event["attempt"] == attempt.number]
        exits = {event["rank"]: event for event in own if event["name"] == "worker.exited"}
        starting, ended = (
            next(event for event in own if event["name"] == name) for name in ("group.starting", "attempt.ended")
        )
        for rank in attempt.ranks:
            event = exits[rank.local_rank]
            assert (rank.pid, rank.exitcode, rank.state) == (event["pid"], event["exitcode"], event["state"])
            assert rank.signal_sent == event["signal_sent"]
            assert rank.ended == pytest.approx(event["timestamp"], abs=0.01)
        # Of an attempt before the latest two, only those are kept that neither succeeded nor were stopped.
        assert len(attempt.ranks) == (1 if attempt.number == 0 else 3)
        assert attempt.started == starting["timestamp"]
        assert attempt.ended == pytest.approx(ended["timestamp"], abs=5)
        decided = [event["cause"] for event in own if event["name"] == "restart.decided"]
        assert [attempt.cause] == (decided or [""])
    (last,) = [event for event in found if event["name"] == "run.ended"]
    assert (run.state, run.exit_code, run.cause) == (last["state"], last["exitcode"], last["cause"])


def test_a_disk_that_is_full_for_a_while_harms_nobody(small_disk: Path, place: Place, ready: Ready, gate: Gate) -> None:
    """The run goes on, and the lines that are there are whole."""
    logs = small_disk / "logs"
    script = place.write(f"{ready.python()}; {gate.python()}")
    with place.start("--log-dir", logs, "-t", "0", "-r", "0", script) as launcher:
        ready.wait()
        until(lambda: count(logs, '"agent.state"') == 2)
        fill(small_disk)
        gate.open()
        done = launcher.end()
    assert done.status == 0
    (folder,) = logs.iterdir()
    names = [event["name"] for event in events_of(folder)]
    names = [name for name in names if name != "agent.status"]
    assert names[:3] == ["agent.state", "group.starting", "worker.started"]
    assert sorted(names[3:5]) == ["agent.state", "group.running"]
    assert done.err.count("events.jsonl cannot be written") == (names[-1] != "run.ended")
