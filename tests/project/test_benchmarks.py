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


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_throughput_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_throughput, "LINES", 1000)
    ours, floor = (log_throughput.CASE.contenders[contender]() for contender in (PHALANX, FLOOR))
    assert set(ours.figures) == set(log_throughput.CASE.units)
    assert set(floor.figures) == set(log_throughput.SPEEDS)
    assert ours.figures["wrong"] == [0]
    assert ours.notes == ()
    assert all(sample.figures[name][0] > 0 for sample in (ours, floor) for name in log_throughput.SPEEDS)


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_delay_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_delay, "SECONDS", 0.3)
    for contender in (PHALANX, FLOOR):
        figures = log_delay.CASE.contenders[contender]().figures
        assert set(figures) == set(log_delay.CASE.units)
        assert figures["missing"] == [0]
        assert 0 < figures["median"][0] <= figures["p99"][0] <= figures["most"][0]


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_slow_console_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_console, "LINES", 10)  # which fit into the pipe: nothing is left to be said
    ours, floor = (slow_console.CASE.contenders[contender]() for contender in (PHALANX, FLOOR))
    assert set(ours.figures) == set(slow_console.CASE.units)
    assert ours.notes == ()
    for none in ("files not whole", "files spoken of", "lines unaccounted for"):
        assert ours.figures[none] == [0], none
    assert floor.figures["writing"][0] > 0


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_warm_starts_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_torch, "MODULE", "json")
    monkeypatch.setattr(warm_torch, "WORKERS", 2)
    ours, floor = (warm_torch.CASE.contenders[contender]() for contender in (PHALANX, FLOOR))
    assert set(ours.figures) == set(warm_torch.CASE.units)
    assert len(ours.figures["second start"]) == warm_torch.SECOND
    assert floor.figures["first start"][0] > 0


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_restarts_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "MODULE", "json")
    monkeypatch.setattr(restart, "WORKERS", 2)
    monkeypatch.setattr(restart, "RESTARTS", 2)
    ours, floor = (restart.CASE.contenders[contender]() for contender in (PHALANX, FLOOR))
    assert set(ours.figures) | {"cold, c10d"} == set(restart.CASE.units)
    for values in (*ours.figures.values(), floor.figures["cold"]):
        assert len(values) == 2
        assert min(values) > 0


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


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_a_whole_launcher_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for contender in (PHALANX, FLOOR):
        monkeypatch.setitem(run_true.TIMES, contender, 1)
        figures = run_true.CASE.contenders[contender]().figures
        assert set(figures) == set(run_true.CASE.units)
        assert all(len(values) == 1 and values[0] > 0 for values in figures.values())


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_a_big_argument_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big_argument, "SIZE", 8_000_000)
    monkeypatch.setattr(big_argument, "REPEATS", 1)
    ours, floor = (big_argument.CASE.contenders[contender]() for contender in (PHALANX, FLOOR))
    assert set(ours.figures) == set(big_argument.CASE.units)
    assert set(floor.figures) < set(ours.figures)
    assert all(min(values) > 0 for values in ours.figures.values())


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_expiry_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timer_expiry.TIMES, PHALANX, 1)
    monkeypatch.setattr(timer_expiry, "FAR", 0.3)
    monkeypatch.setattr(timer_expiry, "FAR_TIMES", 1)
    figures = timer_expiry.CASE.contenders[PHALANX]().figures
    assert set(figures) == set(timer_expiry.CASE.units)
    for kind in timers.KINDS:
        assert figures[f"{kind}, sent"][0] > 0  # perhaps more than the other: a worker may be dead before we have noted
        assert figures[f"{kind}, dead"][0] > 0


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_cost_of_timers_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_cost, "PAIRS", dict.fromkeys(timers.KINDS, 100))
    ours, floor = (timer_cost.CASE.contenders[contender]() for contender in (PHALANX, FLOOR))
    assert set(ours.figures) == set(timer_cost.CASE.units)
    assert set(floor.figures) == {*timer_cost.NAMES.values(), timer_cost.WRITTEN}
    for name in timer_cost.NAMES.values():
        assert ours.figures[f"{name}, errors"] == [0]
        assert len(ours.figures[name]) == len(floor.figures[name]) == timer_cost.BATCHES


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_flood_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_flood, "WORKERS", 2)
    monkeypatch.setattr(timer_flood, "PAIRS", 50)
    figures = timer_flood.CASE.contenders[PHALANX]().figures
    assert figures["errors"] == [0]
    assert figures["wall"][0] > 0


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_load_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_load, "WORKERS", 2)
    monkeypatch.setattr(timer_load, "SECONDS", 0.2)
    figures = timer_load.CASE.contenders[PHALANX]().figures
    assert set(figures) == set(timer_load.CASE.units)
    assert figures["group, deaths"] == figures["group, left"] == [0]
    assert figures["group, timers"][0] > 0


@pytest.mark.long
@pytest.mark.usefixtures("own_temporary_folder")
def test_report_of_a_hang_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_report, "TIMES", 1)
    figures = hang_report.CASE.contenders[PHALANX]().figures
    assert set(figures) == set(hang_report.CASE.units)
    assert 0 < figures["signalled"][0] < figures["report"][0]


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
