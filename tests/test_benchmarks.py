"""The benchmarks' harness: that it runs and says what it saw. No figure is judged here."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import case as vocabulary
from benchmarks import procfs, report
from benchmarks.__main__ import main
from benchmarks.case import FLOOR, PEER, PHALANX, Case, Sample, Target
from benchmarks.cases import NAMES, load
from benchmarks.peer import VARIABLE, PeerError, find_or_make
from benchmarks.runner import ROOT, Result, RunError, run_contender

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.mark.parametrize("name", NAMES)
def test_cases_are_whole(name: str) -> None:
    case = load(name)
    assert case.name == name
    assert set(case.contenders) <= {PHALANX, PEER, FLOOR}
    assert {target.figure for target in case.targets} <= set(case.units)
    assert len(case.targets_text()) == len(case.targets) > 0


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[::2]] == list(NAMES)


def test_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no_such_case"])
    assert "no such case: no_such_case (there are true64" in capsys.readouterr().err


def test_one_case_one_round_without_peer(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "memory", "--rounds", "1", "--no-peer", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stderr  # 1: a target was missed, which is not judged here
    assert "memory: peak resident memory" in done.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"cores", "kernel", "load", f"python of {PHALANX}"} <= set(found["machine"])
    memory = found["cases"]["memory"]
    assert memory["errors"] == {}
    assert memory["rounds"] == 1
    assert set(memory["figures"]) == {PHALANX, FLOOR}
    for figures in memory["figures"].values():
        assert set(figures) == {"launcher", "helper", "helpers"}
        assert figures["launcher"][0] > 0
    assert all(verdict["met"] in {True, False} for verdict in memory["targets"])


def test_contender_that_fails_is_said_to() -> None:
    with pytest.raises(RunError, match=r"exit code 1: KeyError: 'nobody'"):
        run_contender(load("memory"), "nobody", sys.executable)


def test_contender_that_hangs_is_ended_with_all_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: mark)
    monkeypatch.setattr(procfs, "LEAVE", 0.2)
    with pytest.raises(RunError, match=r"not done after 1 s"):
        run_contender(load("idle256")._replace(limit=1.0), FLOOR, sys.executable)
    assert procfs.marked(mark.hex) == set()


def test_absent_peer_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/no/such/python")
    with pytest.raises(PeerError, match="/no/such/python"):
        find_or_make()


@pytest.mark.parametrize("module", [vocabulary, report])
def test_docstrings_are_true(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_report_of_a_miss_and_of_a_failure() -> None:
    def nothing() -> Sample:
        return Sample({})

    target = Target("elapsed", "<=", 2, of_floor=True)
    case = Case("case", "something", {"elapsed": "ms"}, (target,), {PHALANX: nothing})
    figures = {PHALANX: {"elapsed": [3.0, 2.5, 4.0]}, FLOOR: {"elapsed": [1.0]}}
    missed = Result(case, 3, figures, {}, {PEER: "exit code 1: no torch"})
    assert missed.missed()
    assert report.table(missed).splitlines() == [
        "case: something (3 rounds)",
        "           unit  phalanx     peer  floor  phalanx/peer  phalanx/floor",
        "  elapsed  ms    3 (2.5..4)  -     1      -             3.00",
        "  target: phalanx elapsed <= 2 x floor: MISSED (3 x floor)",
        "  peer: FAILED: exit code 1: no torch",
    ]
    assert not Result(case, 3, {FLOOR: figures[FLOOR]}, {}, {}).missed()
