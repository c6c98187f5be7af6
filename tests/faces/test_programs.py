"""The same program prints the same: with torch's functions, and with those of Phalanx.

Each file of ``tests/programs`` (but the helpers, which have no head) is a program as people write it for torch or for
`multiprocessing`: a script with functions and classes of its own. Which library starts its workers, and how, stands on
its command line; see ``faces.py`` there. What it prints, and its exit code, must not depend on the library.

The head of a program says where it means anything: ``# faces:`` one pair or both, the main one first; ``# methods:``
the start methods; ``# not:`` pairs and methods that do not go together; ``# arguments:`` more words for its command
line; ``# why:`` the reason for what is left out.

Importing torch takes a process two seconds, and under "spawn" each worker does it. So the tutorial runs as `TUTORIAL`
says, with each pair and each such method once, and the others with their main pair under `QUICK`, where no process
imports it anew. With ``PROGRAMS=all`` in the environment all run under everything, in some minutes; the table of
docs/compatibility.md is of that. Programs run in the order of the tests, some at a time, in a process of their own
(``program_runs.py``). It has imported torch before it forks to become one of torch's launchers; their workers are
started as torch does it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import leaks

HERE = Path(__file__).resolve().parents[1]
PROGRAMS = HERE / "programs"
QUICK = "fork"
TUTORIAL = {("spawn", "spawn"), ("elastic", "forkserver")}
ALL = os.environ.get("PROGRAMS") == "all"

pytestmark = pytest.mark.torch


def head(program: str) -> dict[str, list[str]]:
    """The words after each ``# name:`` at a program's top. A module that is no program has none."""
    found: dict[str, list[str]] = {}
    for line in (PROGRAMS / f"{program}.py").read_text(encoding="utf-8").splitlines():
        if (match := re.match(r"# (faces|methods|not|arguments|why): (.*)", line)) is None:
            break
        found.setdefault(match[1], []).extend(shlex.split(match[2]) if match[1] != "why" else [match[2]])
    return found


def is_run(program: str, face: str, method: str, main: str) -> bool:
    """Whether a program runs so without ``PROGRAMS=all``."""
    return (face, method) in TUTORIAL if program == "tutorial" else (face, method) == (main, QUICK)


def cases() -> list[tuple[str, str, str]]:
    """Every program, face of Phalanx and method that is run."""
    heads = {path.stem: head(path.stem) for path in sorted(PROGRAMS.glob("*.py"))}
    return [
        (program, face, method)
        for program, about in heads.items()
        if about
        for face in about["faces"]
        for method in about["methods"]
        if f"{face}-{method}" not in about.get("not", ()) and (ALL or is_run(program, face, method, about["faces"][0]))
    ]


class Runs:
    """The results of the runs, as they come in."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._results: dict[tuple[str, ...], dict[str, Any]] = {}

    def result(self, program: str, face: str, method: str) -> dict[str, Any]:
        """Wait for the end of a run."""
        assert self._process.stdout is not None
        while (program, face, method) not in self._results:
            line = self._process.stdout.readline()
            assert line, "the process that runs the programs has ended"
            result = json.loads(line)
            self._results[tuple(result["run"])] = result
        return self._results[program, face, method]

    def same(self, program: str, face: str, method: str) -> bool:
        """Whether a program has printed the same with both libraries, and ended so."""
        ours, theirs = (normal(self.result(program, each, method)) for each in (face, f"torch-{face}"))
        return ours == theirs


def normal(result: dict[str, Any]) -> list[str]:
    """What a program has printed, without what no two runs have in common.

    - The folder that it ran in: each run has its own.
    - Addresses of objects, which stand in the texts of some that have no better one.
    - Process ids, as they stand in such texts.
    """
    text = result["out"].replace(result["folder"], "FOLDER")
    text = re.sub(r"\b0x[0-9a-f]{6,}", "ADDRESS", text)
    text = re.sub(r"\bpid[ =:]+\d+", "PID", text, flags=re.IGNORECASE)
    return [*text.splitlines(), f"exit code {result['code']}"]


def chosen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The program, face and method of each comparison among the chosen tests, in their order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [item.callspec.params for item in items if item.path == Path(__file__) and hasattr(item, "callspec")]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """All runs that the chosen tests want: they begin now, and go on while tests look at the first."""
    wanted = []
    for each in chosen(request):
        words = head(each["program"]).get("arguments", [])
        wanted += [(each["program"], face, each["method"], words) for face in (f"torch-{each['face']}", each["face"])]
    # Without the mark: what runs beside a test, for a later one, is no leak of it.
    process = subprocess.Popen(
        [sys.executable, str(HERE / "support" / "program_runs.py")],
        env={name: value for name, value in os.environ.items() if name != leaks.MARK},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    with process:
        json.dump({"folder": str(tmp_path_factory.mktemp("programs")), "runs": wanted}, process.stdin)
        process.stdin.close()
        yield Runs(process)
        process.terminate()


@pytest.mark.parametrize("program,face,method", cases())
def test_same_program_prints_the_same(runs: Runs, program: str, face: str, method: str) -> None:
    ours, theirs = (runs.result(program, each, method) for each in (face, f"torch-{face}"))
    assert theirs["code"] is not None, f"torch has not ended: {theirs['err']}"
    assert normal(ours) == normal(theirs), ours["err"]


def table(runs: Runs, done: list[tuple[str, str, str]]) -> str:
    """The comparison as a table in Markdown: a row for each program and face, a column for each method."""
    methods = ("spawn", "forkserver", "fork")
    lines = [f"| program | face | {' | '.join(methods)} |", "| --- | --- | --- | --- | --- |"]
    for program, face in dict.fromkeys((program, face) for program, face, _ in done):
        words = []
        for method in methods:
            if (program, face, method) in done:
                words.append("same" if runs.same(program, face, method) else "differs")
            else:
                words.append("")
        lines.append(f"| `{program}` | {face} | {' | '.join(words)} |")
    return "\n".join(lines)


def test_table(runs: Runs, request: pytest.FixtureRequest) -> None:
    """Print what the chosen tests have found; ``pytest -rP`` shows it."""
    done = [(each["program"], each["face"], each["method"]) for each in chosen(request)]
    sys.stdout.write(table(runs, done) + "\n")
