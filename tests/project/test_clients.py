"""The table of clients: its rows are read from what launchers print, and the page has them all."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.clients import runs
from benchmarks.clients.runs import CASES, CLIENTS, LAUNCHERS, PHALANX, TORCHRUN, Came, Client, run
from benchmarks.clients.table import times
from benchmarks.page import BEGIN, END, between_marks
from benchmarks.runner import ROOT

three_runs = pytest.mark.timeout(3 * 120 + 30)  # two interpreters import torch in each, beside other tests
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def test_docstrings_are_true() -> None:
    found = doctest.testmod(runs)
    assert found.attempted > 0
    assert found.failed == 0


def test_the_page_has_each_program_and_case_once() -> None:
    page = ROOT / "docs" / "compatibility.md"
    table = between_marks(page, "clients")[1]
    assert [row[:2] for row in ROW.findall(table)] == [
        (client.name, CASES[case]) for client in CLIENTS for case in client.cases
    ]
    assert f"| program | case | {' | '.join(launcher.name for launcher in LAUNCHERS)} |" in table
    timed = between_marks(page, "times of clients")[1]
    assert set(re.findall(r"^\| `(\w+)`", timed, re.MULTILINE)) == {client.name for client in CLIENTS if client.timed}
    assert {path.stem for path in runs.PROGRAMS.glob("*.py")} == {"fault", *(client.name for client in CLIENTS)}


def test_a_program_whose_imports_are_missing_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.clients.table.CLIENTS", (Client("jax_initialize", ("no_such_module",)),))
    assert main(["clients", "--python", sys.executable]) == 0
    assert "| `jax_initialize` | not run: no_such_module is not installed | - | - | - |" in capsys.readouterr().out


def test_times_are_medians_beside_the_better_torchrun() -> None:
    came = {
        ("one", "restart", "torchrun"): [Came(0, finished=2, started=2, again=4), Came(None, started=4)],
        ("one", "restart", "Phalanx"): [Came(0, finished=2, started=1.5, again=1)],
    }
    assert list(times([(Client("one", timed=True), "restart"), (Client("other"), "restart")], came))[1:] == [
        ("`one`", "start to first step", "3.0", "-", "1.5", "0.50"),
        (
            "`one`",
            "exception to the first step of the restart",
            "4.0, 1 of 2 went on",
            "-",
            "1.0, 1 of 1 went on",
            "0.25",
        ),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("own_temporary_folder")
def test_a_run_that_does_not_end_is_ended_and_counts_as_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PROGRAMS", tmp_path)
    (tmp_path / "late_reader.py").write_text("import time\nprint('is here', flush=True)\ntime.sleep(3600)\n")
    came = run(Client("late_reader"), "run", PHALANX, sys.executable, limit=3, consoles=tmp_path)
    assert came.code is None
    assert "is here" in (tmp_path / "late_reader-run-Phalanx.txt").read_text()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    marks = "".join(f"{BEGIN.format(name)}\n{END}\n" for name in ("clients", "times of clients"))
    page.write_text(f"before\n{marks}after\n")
    return page


@pytest.mark.torch
@pytest.mark.long
@three_runs
def test_an_exception_beside_torchrun(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ddp_checkpoints", "--case", "exception", "--limit", "120", "--page", str(page)]
    assert main(["clients", *words, "--python", sys.executable]) == 0
    table = between_marks(page, "clients")[1]
    assert table == capsys.readouterr().out.strip()
    ((_, case, *cells),) = ROW.findall(table)
    assert case == "exception"
    for cell in cells:
        assert re.fullmatch(r"code 1, rank 1, ValueError, \d+\.\d s", cell)


@pytest.mark.torch
@pytest.mark.long
@three_runs
def test_the_times_of_an_exception_beside_torchrun(page: Path) -> None:
    words = ["ddp_checkpoints", "--case", "exception", "--limit", "120", "--page", str(page)]
    assert main(["clients", *words, "--times", "--rounds", "1", "--python", sys.executable]) == 0
    timed = between_marks(page, "times of clients")[1]
    assert re.findall(r"^\| `ddp_checkpoints` \| (.+?) \|(?: \d+\.\d \|){3} \d+\.\d\d \|$", timed, re.MULTILINE) == [
        "start to first step",
        "exception to the end",
    ]


@pytest.mark.torch
@pytest.mark.long
def test_a_restart_goes_on_from_the_checkpoint() -> None:
    came = run(CLIENTS[0], "restart", PHALANX, sys.executable, limit=100)
    assert str(came) == "finished, resumed at step 2"
    assert came.went_on
    assert came.started is not None
    assert came.again is not None
    assert came.started > 0 < came.again


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(2 * 150 + 30)
def test_what_spawn_raises_is_read() -> None:
    client = next(client for client in CLIENTS if client.spawns)
    for launcher in (TORCHRUN, PHALANX):
        came = run(client, "kill", launcher, sys.executable, limit=150)
        assert came._replace(seconds=None, started=None) == Came(1, "1", "SIGKILL")
