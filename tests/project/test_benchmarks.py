"""The benchmarks' harness: that it runs and says what it saw. No figure is judged here."""

from __future__ import annotations

import contextlib
import doctest
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import case as vocabulary
from benchmarks import chatter, compare, etcd, page, peers, procfs, report, runner, timers, two_launchers
from benchmarks.__main__ import PEERS, find, main
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.cases import (
    NAMES,
    big_argument,
    broadcast,
    hang_report,
    lines,
    load,
    log_delay,
    log_throughput,
    rendezvous,
    restart,
    slow_console,
    timer_cost,
    timer_expiry,
    timer_flood,
    timer_load,
    warm_torch,
)
from benchmarks.peers import VARIABLE, PeerError, find_or_make
from benchmarks.runner import ROOT, Result, RunError, run_contender
from tests.support.helpers import until


@pytest.mark.parametrize("name", NAMES)
def test_cases_are_whole(name: str) -> None:
    case = load(name)
    assert case.name == name
    assert set(case.contenders) <= {PHALANX, *PEERS, FLOOR}
    assert {target.size for target in case.targets} <= {0, *case.sizes}
    assert {target.figure for target in case.targets} <= set(case.units)
    assert len(case.targets_text()) == len(case.targets) > 0


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in heads] == list(NAMES)


@pytest.mark.long
def test_one_case_one_round_without_peer(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "memory", "--rounds", "1", "--peers", "none", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stderr  # 1: a target was missed, which is not judged here
    assert "memory: peak resident memory" in done.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"cores", "kernel", "load", "commit", "python", "peers"} == set(found["machine"])
    (memory,) = found["cases"]["memory"]["runs"]
    assert memory["errors"] == {}
    assert memory["rounds"] == 1
    assert set(memory["took"]) == {PHALANX, FLOOR}
    assert set(memory["figures"]) == {PHALANX, FLOOR}
    for figures in memory["figures"].values():
        assert set(figures) == {"launcher", "helper", "helpers"}
        assert figures["launcher"][0][0] > 0
    assert all(verdict["met"] in {True, False} for verdict in memory["targets"])


def test_a_failure_is_shown_with_what_its_launcher_printed(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho 'too many open files' >&2\nexec '{sys.executable}' \"$@\"\n")
    script.chmod(0o755)
    with pytest.raises(RunError, match=r"exit code 1: KeyError: 'nobody' / too many open files$"):
        run_contender(load("memory"), "nobody", str(script))


@pytest.mark.parametrize("contender", [PHALANX, FLOOR])
def test_a_process_left_behind_is_a_failure_of_phalanx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contender: str
) -> None:
    monkeypatch.setattr(procfs, "LEAVE", 0.1)
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nsleep 600 &\necho \'{"figures": {"elapsed": [1.0]}, "notes": []}\'\n')
    script.chmod(0o755)
    result = runner.run_case(load("programs"), {contender: str(script), PHALANX: str(script)}, 1, 8)
    assert result.missed()
    assert result.errors == {PHALANX: "left 1 processes behind"}
    assert result.notes.get(FLOOR, ("left 1 processes behind",)) == ("left 1 processes behind",)


def test_a_count_that_is_not_delivered_fails_the_smoke_alone() -> None:
    result = Result(load("lines"), 1, {PHALANX: {"speed": [[1.0]]}}, {}, {}, 8).only_counts()
    assert not result.missed()
    assert result.missed(unmeasured=True)


@pytest.mark.parametrize(
    "words,error",
    [
        (["no_such_case"], "no such case: no_such_case (there are launch"),
        (["failure", "--sizes", "7"], "argument --sizes: failure has 8, 64, 256"),
        (["launch", "watched", "--sizes", "1"], "argument --sizes: watched has 8, 64"),
        (["--sizes", "8,9"], "argument --sizes: no case that is asked for has 9"),
        (["launch", "--json", "/"], "argument --json: / is no file"),
        (["launch", "--json", "/dev/full"], "argument --json: /dev/full is no file"),
        (["profile", "functions", "--contender", "nobody"], "argument --contender: functions has phalanx, torch"),
        (["compare", "--trees", "/", "/", "launch"], "/ has no src/phalanx"),
        (["compare", "/dev/null", "/dev/null", "nothing"], "no such case: nothing"),
    ],
)
def test_what_would_measure_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert error in capsys.readouterr().err


def test_a_result_that_cannot_be_written_leaves_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result"
    report.write(out, {"version": 1})
    kept = out.read_text()

    def full(path: Path, text: str, **_options: str) -> int:
        path.touch()
        raise OSError(28, "No space left on device", text)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report.write(out, {"version": 2})
    assert out.read_text() == kept
    assert os.listdir(tmp_path) == ["result"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_runner_that_is_told_to_end_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    mark, temporary = f"MARK={uuid.uuid4()}", tmp_path / "temporary"
    temporary.mkdir()
    command = ["-m", "benchmarks", "stand", "--sizes", "8", "--rounds", "1", "--peers", "none"]
    env = os.environ | dict([mark.split("=")]) | {"TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stderr=subprocess.DEVNULL)

    def count() -> int:
        found = 0
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += mark in environ.read_text(errors="replace").split("\0")
        return found

    until(lambda: count() > 9)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert count() == 0
    assert os.listdir(temporary) == []


def test_another_version_than_the_pinned_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FOLDER", Path("/dev/null"))  # where no environment can be made
    monkeypatch.setattr(peers, "python", lambda _name: sys.executable)
    monkeypatch.setitem(peers.PINS, "pytest", f"pytest=={pytest.__version__}")
    assert peers.find_or_make("pytest") == sys.executable
    monkeypatch.setitem(peers.PINS, "pytest", "pytest==0.1")
    assert peers.version("pytest") == f"pytest=={pytest.__version__}"
    with pytest.raises(PeerError, match="/dev/null/pytest could not be made"):
        peers.find_or_make("pytest")


def test_peers_of_python_itself_have_the_chosen_interpreter() -> None:
    assert find(["Pool"], "/another/python")[0] == dict.fromkeys((PHALANX, FLOOR, "Pool"), "/another/python")


def test_contender_that_hangs_is_ended_with_all_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: mark)
    monkeypatch.setattr(procfs, "LEAVE", 0.2)
    with pytest.raises(RunError, match=r"not done after 1 s"):
        run_contender(load("stand")._replace(limit=1.0), FLOOR, sys.executable, 8)
    until(lambda: procfs.marked(mark.hex) == set())  # killed they are, but their end takes a processor


def test_absent_peer_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/no/such/python")
    with pytest.raises(PeerError, match="/no/such/python"):
        find_or_make(TORCH)


@pytest.mark.parametrize("module", [vocabulary, report, restart, lines, compare])
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
    (restart, {"MODULE": "json", "RESTARTS": 1}, set(), {"cold"}),
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
    for nodes in (2, 4):
        ours, floor = (rendezvous.CASE.contenders[contender](nodes).figures for contender in (PHALANX, FLOOR))
        assert min(floor["last"][0], floor["together"][0], ours["last"][0], ours["together"][0]) > 0
        assert 2 <= ours["asked"][0] <= 4


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

    def note(_case: Case, contender: str, python: str, _size: int) -> Sample:
        used.append((contender, python))
        return Sample({"elapsed": [1.0]})

    monkeypatch.setattr(runner, "run_contender", note)
    contenders = dict.fromkeys((PHALANX, FLOOR), lambda: Sample({}))
    case = Case("case", "something", {"elapsed": "ms"}, (), contenders, warm_up=False, interpreter=TORCH)
    runner.run_case(case, {PHALANX: "ours", FLOOR: "ours", TORCH: "theirs"}, 1)
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


def nothing(_size: int = 0) -> Sample:
    return Sample({})


def test_report_of_a_miss_and_of_a_failure() -> None:
    target = Target("elapsed", "<=", 2, of=FLOOR)
    contenders = dict.fromkeys((PHALANX, TORCH, FLOOR), nothing)
    case = Case("case", "something", {"elapsed": "ms"}, (target,), contenders)
    seen = {PHALANX: {"elapsed": [[3.0], [2.5, 4.0]]}, FLOOR: {"elapsed": [[1.0]]}}
    missed = Result(case, 3, seen, {}, {TORCH: "exit code 1: no torch"})
    assert missed.missed()
    assert report.table([missed]).splitlines() == [
        "case: something (3 rounds)",
        "           unit  phalanx     torch   floor  x best peer  x floor",
        "  elapsed  ms    3 (2.5..4)  FAILED  1      -            3.00",
        "  target: phalanx elapsed <= 2 x floor: MISSED (3 x floor)",
        "  torch: FAILED: exit code 1: no torch",
        "  rounds: 2 of phalanx; 1 of floor",
    ]
    assert not Result(case, 3, {FLOOR: seen[FLOOR]}, {}, {}).missed()


def test_sizes_have_a_best_peer_and_an_exponent() -> None:
    targets = (Target("elapsed", "<=", 2, of="one", size=64), Target("lost", "<=", 0, worst=True))
    contenders = dict.fromkeys((PHALANX, "one", "other"), nothing)
    units = {"elapsed": "ms", "lost": "lines", "speed": "MB/s"}
    case = Case("case", "something", units, targets, contenders, sizes=(8, 64))
    results = [
        Result(
            case,
            1,
            {
                PHALANX: {"elapsed": [[size / 2]], "lost": [[0]], "speed": [[10]]},
                "one": {"elapsed": [[size]], "lost": [[0]], "speed": [[20]]},
                "other": {"elapsed": [[2 * size]], "lost": [[3]], "speed": [[40]]},
            },
            {},
            {},
            size,
        )
        for size in (8, 64)
    ]
    rows = [line.split() for line in report.table(results).splitlines()]
    assert rows[2] == ["elapsed", "8", "ms", "4", "8", "16", "0.50", "one", "-"]
    assert rows[7] == ["speed", "64", "MB/s", "10", "20", "40", "0.25", "other", "-"]
    assert "grows with N to the power of: elapsed: phalanx 1.00, one 1.00, other 1.00" in report.markdown(results)
    assert [len(result.verdicts()) for result in results] == [1, 2]
    assert not any(result.missed() for result in results)
    slow = Result(case, 1, {**results[1].seen, PHALANX: {"elapsed": [[1000]], "lost": [[0]]}}, {}, {}, 64)
    assert slow.missed()
    assert not slow.only_counts().missed()
    assert Result(case, 1, {PHALANX: {"lost": [[0, 1]]}}, {}, {}, 64).only_counts().missed()


def test_nothing_is_compared_with_one_that_failed_in_a_round() -> None:
    case = Case("case", "something", {"elapsed": "ms"}, (), dict.fromkeys((PHALANX, "hung", "other"), nothing))
    seen = {PHALANX: {"elapsed": [[20.0]]}, "hung": {"elapsed": [[10.0]]}, "other": {"elapsed": [[30.0]]}}
    hung = Result(case, 1, seen, {}, {"hung": "not done"}, 64)
    assert report.best_peer(hung, "elapsed") == "other"
    assert "| 0.67 other | - |" in report.markdown([hung])
    found = report.as_json({}, {}, [[hung]])
    assert page.behind(found).count("\n") == 1
    found["cases"]["case"]["runs"][0]["errors"] = {PHALANX: "ended with 1"}
    assert "| `case` | elapsed | phalanx FAILED (N = 64) | phalanx FAILED (N = 64) |" in page.behind(found)


def test_the_page_shows_missed_targets_and_all_commits() -> None:
    case = Case("case", "something", {"elapsed": "ms"}, (Target("elapsed", "<", 15),), {PHALANX: nothing})
    machine = {"cores": "2 x One", "commit": "one", "peers": "a==1, b"}
    results = [
        report.as_json(machine | facts, {}, [[Result(case, 1, {PHALANX: {"elapsed": [[value]]}}, {}, {}, size)]])
        for size, value, facts in ((8, 14.0, {}), (64, 26.0, {"commit": "two", "peers": "b, c"}))
    ]
    found = page.merged([json.loads(json.dumps(one)) for one in results])
    assert page.missed(found).splitlines()[2:] == ["| `case` | 64 | elapsed < 15 ms | 26 ms |"]
    assert found["machine"] == {"cores": "2 x One", "commit": "one, two", "peers": "a==1, b, c"}
    results[1]["machine"]["cores"] = "2 x Other"
    with pytest.raises(ValueError, match="different machines, cores: 2 x One and 2 x Other"):
        page.merged(results)


def result(factor: float, floor: float = 1.0, rounds: int = 7, left: int = 0, **run: Any) -> dict[str, Any]:
    """Return a result of two figures, whose rounds drift, as the floor does."""
    drift = [floor * (1 + turn / 10) for turn in range(rounds)]
    figures = {
        PHALANX: {"elapsed": [[100 * factor * one] for one in drift], "left": [[0]] * (rounds - 1) + [[left]]},
        FLOOR: {"elapsed": [[10 * one] for one in drift]},
    }
    runs = [{"size": 8, "figures": figures, "errors": {}, "targets": []} | run]
    units = {"elapsed": "ms", "left": "processes"}
    return {"version": report.VERSION, "cases": {"case": {"units": units, "runs": runs}}}


def compared(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> int:
    for name, found in (("before", before), ("after", after)):
        (tmp_path / name).write_text(json.dumps(found))
    return main(["compare", "--all", str(tmp_path / "before"), str(tmp_path / "after")])


def test_compare_tells_a_change_from_a_slow_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tmp_path, result(1), result(2)) == 1
    worse, alike, counts = capsys.readouterr().out.splitlines()
    assert worse.startswith("WORSE: case of 8, elapsed: 130 to 260 ms (x 2.00, p = 0.000")
    assert "; 10 to 20 floors of their rounds (x 2.00, p = 0.000" in worse
    assert alike == "not told apart: case of 8, left: at most 0, then at most 0 processes"
    assert counts == "1 WORSE, 0 better, 1 not told apart, 0 not compared"
    assert compared(tmp_path, result(2), result(1)) == 0
    assert capsys.readouterr().out.startswith("better: case of 8, elapsed: 260 to 130 ms (x 0.50")
    # A slow machine; a slow floor beside the same Phalanx; and a small change.
    for other in (result(1, floor=2), result(0.5, floor=2), result(1.05)):
        assert compared(tmp_path, result(1), other) == 0
        assert capsys.readouterr().out.startswith("not told apart: case of 8, elapsed")
    assert compared(tmp_path, result(1), result(2, rounds=3)) == 0
    assert "not compared: case of 8, elapsed: fewer than 5 rounds" in capsys.readouterr().out


def test_compare_takes_floors_only_if_both_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = result(1)
    del after["cases"]["case"]["runs"][0]["figures"][FLOOR]
    assert compared(tmp_path, result(1), after) == compared(tmp_path, after, result(1)) == 0
    assert capsys.readouterr().out.count("elapsed: 130 to 130 ms (x 1.00, p = 1.0000)\n") == 2


@pytest.mark.parametrize(
    "after,found",
    [
        (result(1, left=1), "case of 8, left: at most 0, then at most 1 processes"),
        (result(1, errors={PHALANX: "ended with 1"}), "case of 8: FAILED: ended with 1"),
        (result(1, size=64), "case of 8: gone"),
        (result(1, figures={}), "case of 8, left: gone"),
        ({"version": report.VERSION, "cases": {}}, "case of 8: gone"),
    ],
)
def test_compare_takes_what_is_lost_for_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: dict[str, Any], found: str
) -> None:
    assert compared(tmp_path, result(1), after) == 1
    assert f"WORSE: {found}\n" in capsys.readouterr().out


def test_compare_measures_two_trees_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = [tmp_path / "before", tmp_path / "after"]
    for tree in trees:
        (tree / "src" / "phalanx").mkdir(parents=True)
    seen: list[Path] = []

    def drifting(_case: Case, _contender: str, _python: str, _size: int, tree: Path) -> Sample:
        seen.append(tree)
        return Sample({"elapsed": [(10 + len(seen)) * (1.2 if tree == trees[1] else 1)]})

    monkeypatch.setattr(compare, "run_contender", drifting)
    words = ["compare", "--trees", *map(str, trees), "programs", "--sizes", "8", "--rounds", "8"]
    assert main(words) == 1
    assert capsys.readouterr().out.startswith("WORSE: programs of 8, elapsed: 20.5 to 24.6 ms (x 1.")
    assert seen == [*trees, *trees[::-1]] * 4 + trees
    assert main([*words, "--at-least", "50"]) == 0


def test_the_library_is_that_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "src" / "phalanx").mkdir(parents=True)
    (tmp_path / "src" / "phalanx" / "__init__.py").write_text("raise RuntimeError('the other tree')")
    with pytest.raises(RunError, match="RuntimeError: the other tree"):
        run_contender(load("import"), PHALANX, sys.executable, tree=tmp_path)


@pytest.mark.parametrize("text", ["nothing", "[]", '{"version": 1}'])
@pytest.mark.parametrize("words", [("page",), ("compare", "/dev/null")])
def test_what_is_no_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    (tmp_path / "result").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main([words[0], str(tmp_path / "result"), *words[1:]])
    assert f"error: {tmp_path}/result: expected a result" in capsys.readouterr().err


def test_the_table_hides_no_figure_that_is_behind() -> None:
    units = {"near": "ms", "behind": "ms", "slow": "MB/s", "left": "processes", "none": "processes"}
    figures = {
        PHALANX: {"near": [[10]], "behind": [[30]], "slow": [[10]], "left": [[3]], "none": [[0]]},
        "other": {"near": [[10]], "behind": [[20]], "slow": [[20]], "left": [[0]], "none": [[0]]},
        FLOOR: {"near": [[8]], "behind": [[10]], "slow": [[15]]},
    }
    run = {"size": 8, "rounds": 1, "figures": figures, "notes": {}, "errors": {}}
    case = {"measures": "something", "units": units, "contenders": list(figures), "runs": [run]}
    assert page.behind({"cases": {"case": case}}).splitlines()[2:] == [
        "| `case` | behind | 1.5 (other, N = 8) | 3 (N = 8) |  |",
        "| `case` | slow | 2 (other, N = 8) | 1.5 (N = 8) |  |",
        "| `case` | left | 3 for 0 (other, N = 8) | - |  |",
    ]


def test_the_documentation_shows_the_result() -> None:
    folder = ROOT / "docs" / page.FOLDER
    found = json.loads((folder / page.RESULT).read_text())
    assert page.between_marks(ROOT / "docs" / "benchmarks.md", "behind")[1] == page.behind(found).strip()
    assert page.between_marks(ROOT / "docs" / "benchmarks.md", "missed")[1] == page.missed(found).strip()
    assert page.between_marks(ROOT / "docs" / "benchmarks.md", "cases")[1] == page.section(found).strip()
    assert page.between_marks(ROOT / "README.md", "rows")[1] == page.rows(found).strip()
    drawn = {name for name, _, _ in page.pictures(found)}
    assert drawn == {path.name for path in folder.glob("*.svg")}
    assert len(drawn) >= 8


@pytest.mark.long
def test_the_smoke_finds_nothing_lost_or_left() -> None:
    command = [sys.executable, "-m", "benchmarks", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert done.stdout.count(": met (0 ") >= 7
