"""`record=True`: a group of Python code is served by `phalanx runs`, `logs` and `stack`, like a run."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import phalanx
from phalanx.multiprocessing import DefaultLogsSpecs, KeeperLostError, Std, start_processes
from tests.helpers import TIMEOUT, pass_gate
from tests.test_lost_helpers import helpers_of, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers import Gate, Ready
    from tests.test_run import Place

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


def work(address: str, rank: int, fails: int = -1) -> int:
    print("here is", rank)  # noqa: T201 - what the logs are to have
    pass_gate(address)
    if rank == fails:
        raise ValueError("no luck")
    return rank


def test_a_group_is_a_run(logs: Path, place: Place, gate: Gate) -> None:
    args = {rank: (gate.address, rank) for rank in range(2)}
    with start_processes("train", work, args, record=True) as group:
        until(lambda: bool(list(logs.glob("*/run.json"))))
        (row,) = place.program(*PHALANX, "runs", "--json").out.splitlines()
        assert json.loads(row)["state"] == "running"
        stacks = place.program(*PHALANX, "stack")
        assert "both ranks are in pass_gate" in stacks.out, stacks
        gate.open(2)
        result = group.wait()
    assert result.return_values == {0: 0, 1: 1}
    assert states(logs) == ("succeeded", ["succeeded", "succeeded"])
    found = record(logs)
    assert (found["name"], found["exit_code"], found["nprocs"]) == ("train", 0, 2)
    assert sorted(place.program(*PHALANX, "logs").out.splitlines()) == ["[0] here is 0", "[1] here is 1"]


def test_its_failure_is_the_cause(logs: Path, gate: Gate) -> None:
    gate.open(2)
    args = {rank: (gate.address, rank, 1) for rank in range(2)}
    with start_processes("train", work, args, record=True, settle=TIMEOUT) as group:
        group.wait(TIMEOUT)
    found = record(logs)
    assert (found["state"], found["exit_code"], found["cause"]) == ("failed", 1, "rank 1: ValueError: no luck")
    assert states(logs) == ("failed", ["succeeded", "failed"])


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


def test_one_that_loses_its_keeper_has_failed(logs: Path, gate: Gate) -> None:
    with start_processes("train", work, {0: (gate.address, 0)}, record=True) as group:
        for pid in helpers_of(group):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(KeeperLostError):
            group.wait(TIMEOUT)
    found = record(logs)
    assert found["state"] == "failed"
    assert "killed" in found["cause"]


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


def test_logs_of_ones_own(logs: Path, tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "own"), Std.OUT, run_id="night")
    with start_processes("echo", "echo", ("x",), nprocs=2, logs_specs=specs, record=True) as group:
        group.wait(TIMEOUT)
    (folder,) = (tmp_path / "own").iterdir()
    assert folder.name.startswith("night_")
    assert json.loads((folder / "run.json").read_text())["run_id"] == "night"
    assert not logs.exists()


def test_two_groups_with_the_same_specs_have_two_records(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "own"), Std.OUT)
    for name in ("one", "two"):
        with start_processes(name, "true", nprocs=1, logs_specs=specs, record=True) as group:
            group.wait(TIMEOUT)
    names = [json.loads(path.read_text())["name"] for path in (tmp_path / "own").glob("*/run.json")]
    assert sorted(names) == ["one", "two"]


def spawned(index: int, address: str) -> None:
    work(address, index)


def test_spawn(logs: Path, gate: Gate, ready: Ready) -> None:
    del ready
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
