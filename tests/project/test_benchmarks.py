"""The benchmarks' harness: that it runs and says what it saw. No figure is judged here."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import case as vocabulary
from benchmarks import chatter, etcd, procfs, report, runner, timers, two_launchers
from benchmarks.__main__ import main
from benchmarks.case import FLOOR, PEER, PHALANX, Case, Sample, Target
from benchmarks.cases import (
    NAMES,
    big_argument,
    broadcast,
    hang_report,
    load,
    log_delay,
    log_throughput,
    rendezvous,
    restart,
    run_true,
    slow_console,
    timer_cost,
    timer_expiry,
    timer_flood,
    timer_load,
    warm_torch,
)
from benchmarks.peer import VARIABLE, PeerError, find_or_make
from benchmarks.runner import ROOT, Result, RunError, run_contender
from tests.engine.test_lost_helpers import until


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


@pytest.mark.long
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
    until(lambda: procfs.marked(mark.hex) == set())  # killed they are, but their end takes a processor


def test_absent_peer_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/no/such/python")
    with pytest.raises(PeerError, match="/no/such/python"):
        find_or_make()


@pytest.mark.parametrize("module", [vocabulary, report, restart])
def test_docstrings_are_true(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


SMALL: list[tuple[ModuleType, dict[str, Any], set[str], set[str]]] = [
    (log_throughput, {"LINES": 1000}, {"wrong"}, set(log_throughput.SPEEDS)),
    (log_delay, {"SECONDS": 0.3}, {"missing"}, {"median", "p99", "most"}),
    # Lines which fit into the pipe: nothing is left to be said.
    (slow_console, {"LINES": 10}, {"files not whole", "files spoken of", "lines unaccounted for"}, {"writing"}),
    (warm_torch, {"MODULE": "json", "WORKERS": 2}, set(), {"first start", "second start"}),
    (restart, {"MODULE": "json", "WORKERS": 2, "RESTARTS": 2}, set(), {"cold"}),
    (run_true, {"TIMES": {PHALANX: 1, FLOOR: 1}}, set(), set(run_true.CASE.units)),
    (big_argument, {"SIZE": 8_000_000, "REPEATS": 1}, set(), set(big_argument.CASE.units)),
    (
        timer_expiry,
        {"TIMES": {PHALANX: 1}, "FAR": 0.3, "FAR_TIMES": 1},
        set(),
        {f"{kind}, {what}" for kind in timers.KINDS for what in ("sent", "dead")},
    ),
    (
        timer_cost,
        {"PAIRS": dict.fromkeys(timers.KINDS, 100)},
        {f"{name}, errors" for name in timer_cost.NAMES.values()},
        set(timer_cost.NAMES.values()),
    ),
    (timer_flood, {"WORKERS": 2, "PAIRS": 50}, {"errors"}, {"wall"}),
    (timer_load, {"WORKERS": 2, "SECONDS": 0.2}, {"group, deaths", "group, left"}, {"group, timers"}),
    (hang_report, {"TIMES": 1}, set(), {"signalled", "report"}),
]
"""A case, what makes it small, its figures that are to be 0, and those that are more, where they are there."""


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
@pytest.mark.parametrize("module,small,zero,more", SMALL, ids=[row[0].CASE.name for row in SMALL])
def test_a_case_measures_in_small(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, small: dict[str, Any], zero: set[str], more: set[str]
) -> None:
    for name, value in small.items():
        whole = {**getattr(module, name), **value} if isinstance(value, dict) else value
        monkeypatch.setattr(module, name, whole)
    contenders = module.CASE.contenders
    ours = contenders[PHALANX]()
    assert ours.notes == ()
    assert set(ours.figures) | {"cold, c10d"} == set(module.CASE.units) | {"cold, c10d"}
    floor = contenders[FLOOR]().figures if FLOOR in contenders else {}
    assert set(floor) <= set(module.CASE.units)
    assert all(ours.figures[name] == [0] for name in zero)
    for figures in (ours.figures, floor):
        assert all(min(figures[name]) > 0 for name in more & set(figures))


@pytest.fixture
def there_is_an_etcd() -> None:
    try:
        etcd.program()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder", "there_is_an_etcd")
def test_rendezvous_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TIMES", {2: 1, 4: 1})
    ours, floor = (rendezvous.CASE.contenders[contender]().figures for contender in (PHALANX, FLOOR))
    for nodes in (2, 4):
        assert floor[f"last, {nodes}"][0] > 0
        assert ours[f"last, {nodes}"][0] > 0
        assert ours[f"together, {nodes}"][0] > 0
        assert 2 <= ours[f"asked, {nodes}"][0] <= 4


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder", "there_is_an_etcd")
def test_broadcast_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "NODES", 3)
    monkeypatch.setattr(broadcast, "FAILURES", 2)
    monkeypatch.setattr(broadcast, "FATES", {"none left": (0, 1)})
    monkeypatch.setitem(broadcast.TIMES, PHALANX, 1)
    monkeypatch.setattr(two_launchers, "RUNS", 0.0)
    ours, floor = (broadcast.CASE.contenders[contender]() for contender in (PHALANX, FLOOR))
    assert ours.notes == ()
    assert ours.figures["launchers, none left"][0] > 0
    for figures in (ours.figures, floor.figures):
        assert len(figures["told"]) == 4
        assert len(figures["regrouped"]) == 2
        assert 0 < min(figures["told"]) <= max(figures["told"]) <= max(figures["regrouped"])


def test_a_case_may_want_the_interpreter_of_another_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def note(_case: Case, contender: str, python: str) -> Sample:
        used.append((contender, python))
        return Sample({"elapsed": [1.0]})

    monkeypatch.setattr(runner, "run_contender", note)
    contenders = dict.fromkeys((PHALANX, FLOOR), lambda: Sample({}))
    case = Case("case", "something", {"elapsed": "ms"}, (), contenders, warm_up=False, interpreter=PEER)
    runner.run_case(case, {PHALANX: "ours", FLOOR: "ours", PEER: "theirs"}, 1)
    assert used == [(PHALANX, "theirs"), (FLOOR, "theirs")]
    result = runner.run_case(case, {PHALANX: "ours", FLOOR: "ours"}, 1)
    assert len(used) == 2
    assert not result.missed()


def test_what_a_console_was_given_is_compared_with_the_files(tmp_path: Path) -> None:
    files = {}
    for rank in range(3):
        path = tmp_path / f"{rank}.log"
        path.write_text("one\ntwo\n")
        files[rank] = str(path)
    shown = tmp_path / "shown"
    shown.write_text("[1] one\n[0] one\n[2] one\n[2] two\n[1] two\n[0] two\n")
    assert chatter.differing(str(shown), files, 2) == []
    shown.write_text("[1] one\n[0] two\n[0] one\n[2] one\n[1] two\ntwo\n")
    assert chatter.differing(str(shown), files, 2) == [
        "1 lines without a rank's prefix",
        "rank 0: other bytes than in the file: 2 lines of 2",
        "rank 2: other lines than in the file: 1 lines of 2",
    ]


def test_what_a_launcher_said_of_the_rest_is_understood() -> None:
    stderr = "… 12,304 more lines in /tmp/a b/run/0/stdout.log\n… 7 more lines in /tmp/a b/run/1/stdout.log\n"
    assert slow_console.said(stderr) == {"0": 12304, "1": 7}


def test_report_of_a_miss_and_of_a_failure() -> None:
    def nothing() -> Sample:
        return Sample({})

    target = Target("elapsed", "<=", 2, of=FLOOR)
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
