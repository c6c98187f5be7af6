"""The benchmarks' counters of what must not be: that each of them can find it."""

from __future__ import annotations

import shlex

import pytest

from benchmarks import jobs, launchers
from benchmarks.cases import lines
from benchmarks.jobs import SLEEPS, Started
from benchmarks.launchers import Job, Launcher

MARK = rb"\[(\d+)\] "


def line(mark: int, copy: int, number: int) -> bytes:
    return b"[%d] " % mark + (b"@%d:%08d:" % (copy, number)).ljust(lines.LINE - 2, b"x") + b"@\n"


def shown(*copies: int) -> list[bytes]:
    return [line(copy, copy, number) for number in range(3) for copy in copies]


TORN = line(1, 1, 0)[:20] + line(0, 0, 0) + b"[1] " + line(1, 1, 0)[20:]
"""As a launcher shows a line that it had in two pieces: each of them marked."""


@pytest.mark.parametrize(
    "text,missing,torn,wrong",
    [
        (shown(0, 1), 0, 0, 0),
        ([*shown(0, 1), b"the launcher says good-bye\n"], 0, 0, 0),
        ([text.partition(b" ")[2] for text in shown(0, 1)], 0, 0, 6),
        (shown(0, 1, 1), 0, 0, 3),
        (shown(0, 0), 3, 0, 3),
        ([*shown(0), *[line(0, 9, number) for number in range(3)]], 0, 0, 3),
        ([line(1 - copy, copy, number) for number in range(3) for copy in (0, 1)], 0, 0, 6),
        (shown(0, 1)[::-1], 0, 0, 4),
        (shown(0, 1)[1:], 1, 0, 0),
        (shown(0), 3, 0, 0),
        (shown(0, 1, 2), 0, 0, 3),
        ([TORN, *shown(0, 1)[2:]], 0, 2, 0),
        ([TORN.replace(b"xxx", b"xx", 1), *shown(0, 1)[2:]], 1, 2, 0),
    ],
    ids=[
        "right", "others' lines", "no marks", "twice", "one lost, one run twice", "another's mark", "marks swapped",
        "order", "a line lost", "a copy lost", "a copy too many", "torn", "torn, and a byte lost",
    ],
)  # fmt: skip
def test_lines_are_judged(text: list[bytes], missing: int, torn: int, wrong: int) -> None:
    found = lines.judge(b"".join(text), MARK, copies=2, lines=3)
    assert found == {"missing": missing, "torn": torn, "wrong": wrong}


def shell(script: str) -> Launcher:
    """Return a launcher that is a script of bash's, in which ``start COPY`` starts one."""

    def command(job: Job) -> list[str]:
        start = f'start() {{ LOCAL_RANK="$1" {shlex.join(job.argv)}; }}; '
        return ["bash", "-c", start + script, "launcher"]

    return Launcher(command, tees=MARK)


BOTH = 'for copy in 0 1; do start $copy | sed "{}" & done; wait; '


@pytest.mark.parametrize(
    "script,wrong,failure",
    [
        (BOTH.format("s/^/[$copy] /"), 0, 0),
        (BOTH.format(""), 20, 0),
        (BOTH.format("s/^/[$copy] /; p"), 20, 0),
        (BOTH.format("s/^/[$copy] /") + "exit 7", 0, 1),
    ],
    ids=["right", "no marks", "twice", "exit code"],
)
def test_a_launcher_that_shows_lines_wrongly_is_found_out(
    monkeypatch: pytest.MonkeyPatch, script: str, wrong: int, failure: int
) -> None:
    monkeypatch.setattr(lines, "TOTAL", 20 * lines.LINE)
    monkeypatch.setitem(launchers.LAUNCHERS, "faulty", shell(script))
    figures = lines.measure("faulty", 2).figures
    assert {name: value for name, (value,) in figures.items() if name != "speed"} == {
        "missing": 0, "torn": 0, "wrong": wrong, "told as failure": failure,
    }  # fmt: skip


def test_a_copy_that_could_not_be_found_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PATIENCE", 0.1)
    unmarked = shell(f"for copy in 0 1; do start $copy & done; unset {jobs.MARK}; LAUNCHER=$$ start 2 & wait")
    monkeypatch.setitem(launchers.LAUNCHERS, "faulty", unmarked)
    ends_by_itself = 'echo $$ >"$1/ready"; while kill -0 $LAUNCHER; do sleep 0.05; done; exit'
    script = f'test "$LOCAL_RANK" = 2 && {{ {ends_by_itself}; }}; {SLEEPS}'
    with Started("faulty", script, 3) as job, pytest.raises(RuntimeError, match=r"1 of 3 copies do not carry"):
        job.wait_ready()
