"""What commands write to terminals: colours as they are wished for, and nothing that others have put into names."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx._base import tty as terminals
from tests.cli.test_log_options import feed_until, on_a_terminal, resize
from tests.runs.test_runs import put
from tests.support.command import LIMIT, Done, Launcher, Place, read_until, sh, start_sh, terminal
from tests.support.helpers import Gate
from tests.support.screen import Emulator

EVIL = "evil\033[2J\033]0;title\007"
SHOWN = r"evil\x1b[2J\x1b]0;title\x07"

VARIABLES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")


def phalanx(place: Place, *argv: object) -> Done:
    return place.program(sys.executable, "-m", "phalanx", *argv)


# --- colours

WISHES: list[tuple[dict[str, str], str, bool, bool]] = [
    # environment, --color, a terminal, coloured
    ({}, "auto", True, True),
    ({}, "auto", False, False),
    ({"TERM": "dumb"}, "auto", True, False),
    ({"TERM": ""}, "auto", True, False),
    ({"FORCE_COLOR": "1"}, "auto", False, True),
    ({"FORCE_COLOR": "1", "TERM": "dumb"}, "auto", True, True),
    ({"FORCE_COLOR": ""}, "auto", False, False),
    ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "auto", True, False),
    ({"NO_COLOR": "", "FORCE_COLOR": "1"}, "auto", False, True),
    ({"NO_COLOR": "1"}, "always", False, True),
    ({"TERM": "dumb"}, "always", True, True),
    ({"FORCE_COLOR": "1"}, "never", True, False),
]


@pytest.mark.parametrize("env,choice,tty,coloured", WISHES)
def test_colours_by_one_rule(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], choice: str, tty: bool, coloured: bool
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **env}.items():
        monkeypatch.setenv(name, value)
    with terminal() as (_ours, theirs), open(os.devnull) as file:
        assert terminals.use_colour(theirs if tty else file, choice) is coloured
    assert terminals.use_colour(None) is (bool(env.get("FORCE_COLOR")) and not env.get("NO_COLOR"))


FAILING = "echo line; exit 3"


@pytest.mark.parametrize(
    "env,options,tty,coloured",
    [
        ({}, (), False, False),
        ({"FORCE_COLOR": "1"}, (), False, True),
        ({"FORCE_COLOR": "1"}, ("--color", "never"), False, False),
        ({}, (), True, True),
        ({"NO_COLOR": "1"}, (), True, False),
    ],
)
def test_a_run_and_its_report_have_colours_by_that_rule(
    place: Place, env: dict[str, str], options: tuple[str, ...], tty: bool, coloured: bool
) -> None:
    place.env |= {"TERM": "xterm"} | env
    if tty:
        shown = on_a_terminal(place, FAILING, *options)
        lines, report = shown[: shown.index("====")], shown[shown.index("====") - 10 :]
        assert ("\033[36m[0]\033[0m line\r\n" in lines) is coloured
    else:
        done = sh(place, FAILING, *options)
        assert done.status == 3
        lines, report = done.out, done.err[done.err.index("====") - 10 :]
    assert ("\033[" in lines, "\033[" in report) == (coloured, coloured)


ASKED = r"""printf 'it is <%s>\n' "${FORCE_COLOR-unset}" """


@pytest.mark.parametrize(
    "env,options,value",
    [
        ({}, (), "1"),
        ({}, ("--color", "never"), "unset"),
        ({}, ("--no-force-color",), "unset"),
        ({}, ("--log-format", "json"), "unset"),
        ({"NO_COLOR": "1"}, (), "unset"),
        ({"FORCE_COLOR": "3"}, (), "3"),
        ({"PYTHON_COLORS": "0"}, (), "unset"),
        ({}, ("-t", "0"), "unset"),
    ],
)
def test_workers_use_colours_where_the_console_has_them(
    place: Place, env: dict[str, str], options: tuple[str, ...], value: str
) -> None:
    place.env |= {"TERM": "xterm", **env}
    assert f"it is <{value}>" in on_a_terminal(place, ASKED, *options)


def test_workers_have_no_colours_with_one_terminal_alone(place: Place) -> None:
    place.env["TERM"] = "xterm"
    with terminal() as (ours, theirs), start_sh(place, ASKED, stderr=theirs) as launcher:
        os.close(theirs)
        assert "it is <unset>" in launcher.end().out
        read_until(ours, "what never comes")


def test_a_job_file_may_choose_for_the_workers(place: Place) -> None:
    place.env["TERM"] = "xterm"
    place.write("[env]\nFORCE_COLOR = ''\n", name="job.toml")
    assert "it is <>" in on_a_terminal(place, ASKED, "-f", "job.toml")


@pytest.mark.each_python
def test_coloured_tracebacks_are_compared(place: Place) -> None:
    """Since Python 3.13 tracebacks have colours."""
    place.env["TERM"] = "xterm"
    script = place.write("raise ValueError('the same')")
    options = ("--nproc-per-node", 2, "--settle", 60)
    with terminal() as (ours, theirs), place.start(*options, script, **_at(theirs)) as launcher:
        os.close(theirs)
        shown = read_until(ours, "what never comes")
        launcher.process.wait(LIMIT)
    coloured = "\033[1;35mValueError\033[0m: \033[35mthe same\033[0m"
    lines = shown[: shown.index("=====")]
    assert lines.count(coloured if sys.version_info >= (3, 13) else "ValueError: the same") == 1
    assert "[0-1]" in lines
    assert "ValueError: the same" in shown[shown.index("=====") :], "the report has its own colours"


def test_runs_are_coloured_as_terminal_and_variables_want(place: Place) -> None:
    put(place.logs, "a", state="failed", ended=1e9, exit_code=1, cause="it was")
    for force, coloured in ({}, False), ({"FORCE_COLOR": "1"}, True):
        place.env |= force
        assert ("\033" in phalanx(place, "runs", "--log-dir", place.logs).out) is coloured
    del place.env["FORCE_COLOR"]
    for env, coloured in (({"TERM": "dumb"}, False), ({"TERM": "dumb", "FORCE_COLOR": "1"}, True)):
        place.env |= env
        with terminal() as (ours, theirs):
            argv = [sys.executable, "-m", "phalanx", "runs", "--log-dir", str(place.logs)]
            with Launcher(argv, cwd=place.folder, env=place.env, **_at(theirs)) as launcher:
                os.close(theirs)
                shown = read_until(ours, "what never comes")
                launcher.process.wait(LIMIT)
        assert ("\033[1;31mfailed" in shown) is coloured
        assert ("\033[" in shown) is coloured


def _at(fd: int) -> dict[str, Any]:
    return {"stdout": fd, "stderr": fd}


# --- sizes


def test_a_terminal_that_does_not_say_its_size_shows_the_bars(place: Place, gate: Gate) -> None:
    """A serial line, or a terminal of a program's own, is 0 times 0: that is no size."""
    with terminal() as (ours, theirs):
        resize(theirs, 0, 0)
        with start_sh(place, f"printf 'bar %s' $RANK; read x <{gate.address}", n=4, **_at(theirs)) as launcher:
            os.close(theirs)
            screen = Emulator(400)
            feed_until(screen, ours, lambda: screen.text()[-4:] == [f"[{rank}] bar {rank}" for rank in range(4)])
            os.write(gate._fd, b"\n" * 4)
            screen.feed(read_until(ours, "what never comes"))
            launcher.process.wait(LIMIT)


# --- names


@pytest.mark.long
def test_names_of_runs_are_shown_and_not_obeyed(place: Place) -> None:
    place.logs = place.folder / EVIL
    put(place.logs, f"20260101_{EVIL}a", state="failed", ended=1e9, exit_code=1, cause=EVIL)
    put(place.logs, f"20260101_{EVIL}b", state="failed", ended=1e9, exit_code=1, cause=EVIL)
    (place.logs / "old").mkdir()
    (place.logs / "old" / "attempt_0").write_text("")
    (place.logs / "file").write_text("")
    asked: list[tuple[object, ...]] = [
        ("runs",),
        ("logs",),
        ("logs", EVIL),
        ("logs", "2026"),
        ("logs", "old"),
        ("logs", "old", "--attempt", 7),
        ("logs", f"./{EVIL}"),
        ("report",),
        ("report", EVIL),
        ("report", f"20260101_{EVIL}b"),
        ("rerun", f"20260101_{EVIL}b"),
        ("stack",),
        ("stack", "2026"),
        ("stack", f"20260101_{EVIL}a"),
        ("run", f"{EVIL}.py"),
        ("run", "--no-python", f"./{EVIL}"),
        ("run", "--preload", EVIL, __file__),
        ("run", "--ranks", EVIL, __file__),
        ("run", "--grep", f"({EVIL}", __file__),
        ("run", f"--{EVIL}", __file__),
    ]
    told = 0
    for command, *argv in asked:
        words = (command, "--log-dir", place.logs, *argv)
        if command == "run":
            shown = "".join(phalanx(place, *words)[1:])
        else:
            module = importlib.import_module(f"phalanx.cli.{'runs' if command == 'rerun' else command}")
            shown = CliRunner().invoke(getattr(module, str(command)), list(map(str, words[1:]))).output
        assert "\033" not in shown, argv
        assert "\007" not in shown, argv
        told += SHOWN in shown
    assert told >= len(asked) - 3
    refused = phalanx(place, "runs", "--log-dir", place.logs / "file")
    assert "\033" not in refused.err
    assert SHOWN in refused.err


def test_names_in_the_lines_of_a_run_and_its_report(place: Place) -> None:
    place.logs = place.folder / EVIL
    script = place.write("raise SystemExit(3)", f"{EVIL}.py")
    done = place.run(script)
    assert done.status == 3
    assert "\033" not in done.err
    assert f"logs in {place.folder}/{SHOWN}" in done.err
    (record,) = place.logs.glob("*/run.json")
    assert json.loads(record.read_text())["name"] == script  # which is as it is
