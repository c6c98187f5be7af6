"""`record=True`: a group of Python code is served by `phalanx runs`, `logs` and `stack`, like a run."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx._events import agent_kinds, kinds
from phalanx._runs import prune as pruning
from phalanx._runs import record as records
from phalanx._runs import recorder
from phalanx.multiprocessing import DefaultLogsSpecs, KeeperLostError, Std, start_processes
from tests.logs.test_logs import OneFolder
from tests.support.command import Place
from tests.support.forks import code_of_fork
from tests.support.helpers import TIMEOUT, Gate, Ready, pass_gate, tell, until
from tests.support.insides import helpers_of
from tests.support.timer_workers import wait_asleep

PHALANX = (sys.executable, "-m", "phalanx")


@pytest.fixture
def logs(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default place of runs, here and of commands."""
    state = place.folder / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    place.env["XDG_STATE_HOME"] = str(state)
    return state / "phalanx" / "runs"


def record(logs: Path) -> Any:
    (path,) = logs.glob("*/run.json")
    return json.loads(path.read_text())


def states(logs: Path) -> tuple[str, list[str]]:
    found = record(logs)
    return found["state"], [rank["state"] for rank in found["attempts"][-1]["ranks"]]


def completed(place: Place, command: str) -> list[str]:
    """The names of runs that a shell offers."""
    asking = ("_PHALANX_COMPLETE=bash_complete", f"COMP_WORDS=phalanx {command} 20", "COMP_CWORD=2")
    return [line.removeprefix("plain,") for line in place.program("env", *asking, *PHALANX).out.split()]


def work(address: str, rank: int, fails: int = -1, ready: str = "") -> int:
    print("here is", rank)  # noqa: T201 - what the logs are to have
    if ready:
        tell(ready, "")
    pass_gate(address)
    if rank == fails:
        raise ValueError("no luck")
    return rank


@pytest.mark.long
def test_a_group_is_a_run(logs: Path, place: Place, gate: Gate, ready: Ready) -> None:
    args = {rank: (gate.address, rank, -1, ready.address) for rank in range(2)}
    with start_processes("train", work, args, record=True) as group:
        ready.wait(2)
        for pid in group.pids().values():
            wait_asleep(pid)
        until(lambda: bool(list(logs.glob("*/run.json")) and record(logs)["attempts"][0]["ranks"]))
        (row,) = place.program(*PHALANX, "runs", "--json").out.splitlines()
        assert json.loads(row)["state"] == "running"
        stacks = place.program(*PHALANX, "stack")
        assert "both ranks are in pass_gate" in stacks.out, stacks
        (folder,) = logs.iterdir()
        assert completed(place, "stack") == completed(place, "logs") == [folder.name]
        gate.open(2)
        result = group.wait()
    assert result.return_values == {0: 0, 1: 1}
    assert states(logs) == ("succeeded", ["succeeded", "succeeded"])
    found = record(logs)
    assert (found["name"], found["exit_code"], found["nprocs"]) == ("train", 0, 2)
    assert found["command"] == [part for part in sys.argv if part]
    assert [rank["rank"] for rank in found["attempts"][-1]["ranks"]] == [0, 1]
    assert sorted(place.program(*PHALANX, "logs").out.splitlines()) == ["[0] here is 0", "[1] here is 1"]
    assert (completed(place, "stack"), completed(place, "logs")) == ([], [folder.name])


@pytest.mark.long
def test_nobody_has_to_wait_for_it(logs: Path, gate: Gate) -> None:
    """The record says how a group has ended as soon as it has."""
    args = {0: (gate.address, 0, 0)}
    with start_processes("train", work, args, record=True) as group:
        gate.open()
        until(lambda: group.is_open is False and states(logs) == ("failed", ["failed"]))
        assert record(logs)["cause"] == "rank 0: failed: exited with code 1"
        group.wait(TIMEOUT)
    assert record(logs)["cause"] == "rank 0: ValueError: no luck"


def test_one_that_is_closed_was_stopped(logs: Path, gate: Gate) -> None:
    with start_processes("train", work, {0: (gate.address, 0)}, record=True):
        pass
    assert states(logs) == ("stopped", ["stopped"])


@pytest.mark.long
def test_its_end_is_recorded_when_it_is_closed(logs: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    write = records.write

    def write_late(*args: Any) -> None:
        time.sleep(0.1)  # a disk that takes its time
        write(*args)

    monkeypatch.setattr(records, "write", write_late)
    monkeypatch.setattr(recorder, "PATIENCE", TIMEOUT)
    with start_processes("train", work, {0: (gate.address, 0)}, record=True) as group:
        gate.open()
        group.wait(TIMEOUT)
    assert states(logs) == ("succeeded", ["succeeded"])


@pytest.mark.slow
def test_exits_by_the_guard_are_recorded(logs: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with start_processes("train", work, {rank: (gate.address, rank) for rank in range(3)}, record=True) as group:
        os.kill(helpers_of(group)[1], signal.SIGKILL)
        with pytest.raises(KeeperLostError):
            group.wait(TIMEOUT)
    found = record(logs)
    assert (found["state"], found["exit_code"], "killed" in found["cause"]) == ("failed", 1, True)
    (attempt,) = found["attempts"]
    ends = [(rank["state"], rank["exitcode"], rank["signal_sent"]) for rank in attempt["ranks"]]
    assert (ends, attempt["leftovers"]) == ([("stopped", -9, 9)] * 3, [])
    assert not [text for text in caplog.messages if "left behind" in text]


def test_losing_the_keeper_after_success_is_no_failure(logs: Path, ready: Ready) -> None:
    left = f"import os, signal; os.fork() and os._exit(0); {ready.python()}; signal.pause()"
    command = ("-S", "-c", left)
    with start_processes("g", sys.executable, command, nprocs=1, linger=TIMEOUT, record=True) as group:
        ready.wait()
        until(lambda: group._started().mirror.state == "LINGERING")
        os.kill(helpers_of(group)[1], signal.SIGKILL)
        result = group.wait(TIMEOUT)
    assert result is not None
    assert result.succeeded
    assert states(logs) == ("succeeded", ["succeeded"])
    assert (record(logs)["exit_code"], record(logs)["cause"]) == (0, "")


@pytest.mark.slow
def test_one_that_is_dropped_ends_all_the_same(logs: Path, gate: Gate) -> None:
    """The record keeps nobody alive."""
    group = start_processes("train", work, {0: (gate.address, 0)}, record=True)
    supervisor = group._started()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del group
        gc.collect()
    supervisor.join()
    until(lambda: states(logs) == ("stopped", ["stopped"]))


ENDS = """
import os, sys
from phalanx.multiprocessing import start_processes

def work():
    if sys.argv[1] != "hangs":
        raise ValueError("no luck")
    os.read(os.pipe()[0], 1)

if __name__ == "__main__":
    group = start_processes("train", work, nprocs=1, start_method="fork", record=True)
    if sys.argv[1] == "waits":
        group.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "hangs"])
def test_what_was_said_last_is_written_where_the_program_ends(logs: Path, place: Place, how: str) -> None:
    """Nobody has closed the group. One that still runs is ended with the program."""
    place.program(sys.executable, place.write(ENDS), how)
    found = record(logs)
    if how == "waits":
        assert (found["state"], found["cause"]) == ("failed", "rank 0: ValueError: no luck")
    else:
        assert found["state"] == "running"
        (row,) = place.program(*PHALANX, "runs", "--json").out.splitlines()
        assert json.loads(row)["state"] == "lost"


@pytest.mark.long
def test_a_fork_of_the_program_writes_nothing(logs: Path, gate: Gate) -> None:
    with start_processes("train", work, {0: (gate.address, 0, 0)}, record=True) as group:
        gate.open()
        until(lambda: group.is_open is False and states(logs) == ("failed", ["failed"]))
        before = record(logs)
        threads = threading.enumerate
        assert code_of_fork(lambda: group.wait(0) is not None and not any(map(is_record, threads()))) == 0
        assert record(logs) == before
        group.wait(TIMEOUT)
        until(lambda: record(logs)["cause"] == "rank 0: ValueError: no luck")


def is_record(thread: threading.Thread) -> bool:
    """Whether it writes a record."""
    return thread.name == "phalanx-record"


@pytest.mark.long
def test_attempts_of_a_run_are_in_its_record(tmp_path: Path, place: Place, gate: Gate) -> None:
    gate.open()
    specs = DefaultLogsSpecs(str(tmp_path / "own"), Std.OUT, run_id="night")
    seen = []
    for attempt in range(2):
        envs = {0: {"TORCHELASTIC_RESTART_COUNT": str(attempt), "RANK": "7"}}
        args = {0: (gate.address, 0, attempt - 1)}
        with start_processes("train", work, args, envs, logs_specs=specs, record=True) as group:
            until(lambda: bool(list((tmp_path / "own").glob("*/run.json"))))
            until(lambda: record(tmp_path / "own")["state"] == "running" or not group.is_open)
            gate.open()
            group.wait(TIMEOUT)
        seen.append(record(tmp_path / "own"))
    assert [found["state"] for found in seen] == ["succeeded", "failed"]
    assert seen[0]["run_id"] == "night"
    assert [[attempt["number"] for attempt in found["attempts"]] for found in seen] == [[0], [0, 1]]
    assert seen[0]["attempts"] == seen[1]["attempts"][:1]
    assert seen[0]["started"] == seen[1]["started"] < seen[1]["attempts"][1]["started"]
    (folder,) = (tmp_path / "own").iterdir()
    assert place.program(*PHALANX, "logs", folder).out == "[7] here is 0\n"


@pytest.mark.slow
def test_a_run_whose_next_attempt_starts_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, ready: Ready
) -> None:
    """Not by what `prune` removes, long before there is a worker."""
    (tmp_path / "waits_at_a_gate.py").write_text(f"{ready.python()}; {gate.python()}")
    monkeypatch.syspath_prepend(str(tmp_path))
    specs = DefaultLogsSpecs(str(tmp_path / "own"), Std.OUT)
    pruned = []

    def prune() -> None:
        ready.wait()
        until(lambda: record(tmp_path / "own")["state"] == "running")
        pruned.append(pruning.prune(str(tmp_path / "own"), 0))
        gate.open()

    with start_processes("train", "true", nprocs=1, logs_specs=specs, record=True) as group:
        group.wait(TIMEOUT)
    thread = threading.Thread(target=prune)
    thread.start()
    options: dict[str, Any] = {"start_method": "forkserver", "preload": ["waits_at_a_gate"]}
    envs = {0: {"TORCHELASTIC_RESTART_COUNT": "1"}}
    with start_processes("train", print, ("x",), envs, specs, nprocs=1, record=True, **options) as group:
        result = group.wait(TIMEOUT)
    thread.join()
    assert pruned == [(0, 0, [])]
    assert result is not None
    assert not result.failures
    assert Path(group.stdouts[0]).read_text() == "x\n"


def test_one_that_does_not_start_has_failed(logs: Path) -> None:
    with pytest.raises(phalanx.multiprocessing.PreloadError):
        start_processes("train", print, nprocs=1, start_method="forkserver", preload=["no_such_module"], record=True)
    until(lambda: bool(list(logs.glob("*/run.json"))) and record(logs)["state"] == "failed")
    assert record(logs)["cause"] == "preload: 'no_such_module' could not be imported"


@pytest.mark.parametrize(
    "argv, command",
    [([""], ["echo"]), (["a.py", b"\xff", Path("b"), 0.1, float("nan")], ["a.py", "\\udcff", "b", "0.1", "nan"])],
)
def test_command_and_ranks_are_those_of_the_program(
    logs: Path, monkeypatch: pytest.MonkeyPatch, argv: Any, command: list[str]
) -> None:
    """`sys.argv` may hold anything, or nothing."""
    monkeypatch.setattr(sys, "argv", argv)
    envs = {rank: {"RANK": str(4 + rank)} for rank in range(2)}
    with start_processes("echo", "true", {0: (), 1: ()}, envs, record=True) as group:
        group.wait(TIMEOUT)
    found = record(logs)
    assert found["command"] == command
    assert [rank["rank"] for rank in found["attempts"][-1]["ranks"]] == [4, 5]


def test_who_did_not_end(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"run_id": "r", "command": ["x"], "warn": print}
    write = recorder.Recorder("x", {0: {}}, is_one_group=True, **facts)
    left: dict[str, Any] = {"rank": 0, "pid": 2, "command": "y", "age": 1.0, "signal": signal.SIGTERM, "exitcode": None}
    events: list[kinds.Event] = [
        kinds.GroupStarting(0, 1, nprocs=1, folder=str(tmp_path)),
        kinds.WorkerStarted(0, 2, rank=0, pid=1),
        kinds.Swept(0, 3, **left),
        kinds.GroupGone(0, 4, survivors=[0], lost=""),
    ]
    write(events)
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["state"], found["cause"]) == ("failed", "rank 0: abandoned: pid 1 still there")
    assert [rank["state"] for rank in found["attempts"][0]["ranks"]] == ["abandoned"]
    (leftover,) = found["attempts"][0]["leftovers"]
    assert leftover == {
        "pid": 2, "command": "y", "local_rank": 0, "age": 1.0, "signal_sent": signal.SIGTERM, "exitcode": None,
    }  # fmt: skip


def test_an_attempt_that_ends_without_a_failure_is_kept(tmp_path: Path) -> None:
    """As one that ends because another was asked for."""
    facts: dict[str, Any] = {"run_id": "r", "command": ["x"], "warn": print}
    write = recorder.Recorder("x", {0: {}}, **facts)

    def attempts() -> list[tuple[int, list[tuple[int, str]]]]:
        found = json.loads((tmp_path / "run.json").read_text())["attempts"]
        return [(each["number"], [(rank["pid"], rank["state"]) for rank in each["ranks"]]) for each in found]

    def group(attempt: int) -> list[kinds.Event]:
        return [
            kinds.GroupStarting(attempt, 1, nprocs=1, folder=str(tmp_path)),
            kinds.WorkerStarted(attempt, 2, rank=0, pid=100 + attempt),
            kinds.GroupRunning(attempt, 3),
        ]

    write([agent_kinds.AgentState(0, 0, state="STARTING"), *group(0)])
    assert attempts() == [(0, [(100, "running")])]
    exited: dict[str, Any] = dict.fromkeys(kinds.WorkerExited.__match_args__[4:])
    exited |= {"rank": 0, "pid": 100, "state": "stopped", "exitcode": -15, "signal_sent": 15}
    write([kinds.WorkerExited(0, 4, **exited), agent_kinds.AgentState(1, 5, state="STARTING"), *group(1)])
    assert attempts() == [(0, [(100, "stopped")]), (1, [(101, "running")])]


def test_two_groups_with_the_same_specs_have_two_records(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "own"), Std.OUT)
    for name in ("one", "two"):
        with start_processes(name, "true", nprocs=1, logs_specs=specs, record=True) as group:
            group.wait(TIMEOUT)
    records = [json.loads(path.read_text()) for path in (tmp_path / "own").glob("*/run.json")]
    assert sorted((found["name"], found["run_id"]) for found in records) == [("one", "one"), ("two", "two")]


def spawned(index: int, address: str) -> None:
    work(address, index)


@pytest.mark.long
def test_spawn(logs: Path, gate: Gate) -> None:
    gate.open(2)
    phalanx.spawn.spawn(spawned, (gate.address,), nprocs=2, record=True)
    assert states(logs) == ("succeeded", ["succeeded", "succeeded"])


@pytest.mark.parametrize("log_dir", [None, "/dev/null"])
def test_a_record_needs_a_folder(log_dir: str | None) -> None:
    for start in (
        lambda specs: start_processes("x", "true", nprocs=1, logs_specs=specs, record=True),
        lambda specs: phalanx.spawn.spawn(print, logs_specs=specs, record=True),
    ):
        with pytest.raises(ValueError, match="record: it is kept in a run's folder"):
            start(DefaultLogsSpecs(log_dir))
        with pytest.raises(ValueError, match="record: it is kept in a run's folder"):
            start(OneFolder("logs"))
    with pytest.raises(ValueError, match="record: it is kept in a run's folder"):
        start_processes("x", "true", nprocs=1, redirects=Std.OUT, record=True)


def test_a_clock_that_was_set_back_since_an_attempt_began() -> None:
    """No attempt ends before it begins."""
    facts: Any = {"run_id": "r", "name": "n", "command": ["n"], "nprocs": 1, "ranks": []}
    first = records.begin(started=time.time(), **facts)
    (earlier,) = records.end_attempt(first, ranks=[]).attempts
    second = records.begin(started=time.time() + 3600, number=1, earlier=[earlier], **facts)
    for run in (
        records.end_attempt(second, ranks=[]),
        records.end(second, state="succeeded", exit_code=0, cause="", ranks=[]),
    ):
        assert run.attempts[1].ended == run.attempts[1].started
