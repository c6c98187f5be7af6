"""What a person meets at the command line: help, a slip of the finger, and errors that name what was given."""

from __future__ import annotations

import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from phalanx.cli import run as run_module
from phalanx.cli._commands import cli
from phalanx.cli.run import run
from tests.test_run import Done, Place, refused

if TYPE_CHECKING:
    from pathlib import Path

PHALANX = (sys.executable, "-m", "phalanx")


def phalanx(place: Place, *argv: object) -> Done:
    return place.program(*PHALANX, *argv)


# --- what was meant


@pytest.mark.parametrize(
    "argv,answer",
    [
        (["rn"], "there is no command 'rn'; did you mean 'run'?"),
        (["ps"], "there is no command 'ps'; did you mean 'runs'?"),
        (["launch"], "there is no command 'launch'; did you mean 'run'?"),
        (["xyz"], "there is no command 'xyz'; there are run, logs, runs, stack"),
        (["train.py"], "there is no command 'train.py'; to run a script: phalanx run train.py"),
        (["--nproc-per-node", "4", "train.py"], "there is no option '--nproc-per-node' here; it is one of phalanx run"),
        (["--no-such"], "there is no option '--no-such' here"),
        (["run", "--nproc", "4", "x.py"], "there is no option '--nproc'; did you mean '--nproc-per-node'?"),
        (["run", "--nproc_per", "4", "x.py"], "there is no option '--nproc-per'; did you mean '--nproc-per-node'?"),
        (["run", "--log", "x", "x.py"], "there is no option '--log'; did you mean '--log-dir' or '--log-format' or "),
        (["run", "--redirect", "3", "x.py"], "there is no option '--redirect'; did you mean '--redirects'?"),
        (["run", "--hang-timout", "3", "x.py"], "there is no option '--hang-timout'; did you mean '--hang-timeout'?"),
        (["run", "-z", "x.py"], "there is no option '-z'"),
        (["run", "--rdzv-backend", "c10d", "x.py"], "--rdzv-backend: not there yet: torchrun has it for many machines"),
        (["run", "--rdzv_id=3", "x.py"], "; a run's name is --run-id here"),
        (["logs", "--tail", "3"], "--tail: it is --lines here, or -n"),
        (["run", "--standal", "x.py"], "there is no option '--standal'; did you mean '--standalone'?"),
        (["run", "--rdzv", "x", "x.py"], "--rdzv-backend: not there yet: "),
        (["logs", "--folow"], "there is no option '--folow'; did you mean '--follow'?"),
        (["runs", "prun"], "there is no command 'prun'; did you mean 'prune'?"),
        (["runs", "rm"], "there is no command 'rm'; did you mean 'prune'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_of_the_finger(argv: list[str], answer: str) -> None:
    done = CliRunner().invoke(cli, argv)
    assert done.exit_code == 2
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert answer in done.output


def test_a_name_that_a_terminal_would_obey_is_shown(place: Place) -> None:
    refused(phalanx(place, "\x1b[2J"), r"there is no command '\x1b[2J'")


# --- help


def test_help_is_in_sections() -> None:
    """Each option is in one, and those that people need first are first."""
    shown = CliRunner().invoke(run, ["--help"]).output
    headings = re.findall(r"^([A-Z].*):$", shown, re.MULTILINE)
    assert headings[:2] == ["First", "What the console shows"]
    assert headings[-1] == "Other"
    assert "SCRIPT\n" not in shown.partition("\nOther:")[2]  # the text says what it is
    in_sections = [name for _, names in run_module._SECTIONS for name in names]
    assert len(set(in_sections)) == len(in_sections)
    visible = {
        next(opt for opt in param.opts if opt.startswith("--"))
        for param in run.params
        if param.param_type_name == "option" and not getattr(param, "hidden", False)
    }
    assert set(in_sections) == visible
    for name in in_sections:
        assert len(re.findall(rf"^  (?:-\w, )?{name}\b(?!-)", shown, re.MULTILINE)) == 1, name
    assert len(dict(run_module._SECTIONS)["First"]) == 6


# --- errors that come from the environment


@pytest.mark.parametrize(
    "variables,words",
    [
        ({"PET_MAX_RESTARTS": "3"}, ["'--max-restarts' (PET_MAX_RESTARTS in the environment)", "it does not restart"]),
        ({"PHALANX_NPROC_PER_NODE": "x"}, ["'--nproc-per-node' (PHALANX_NPROC_PER_NODE in the environment)", "'x'"]),
        ({"PET_NPROC_PER_NODE": "0"}, ["'--nproc-per-node' (PET_NPROC_PER_NODE in the environment)"]),
        ({"PHALANX_LOG_KEEP": "3"}, ["--log-keep: files", "(--log-keep is PHALANX_LOG_KEEP in the environment)"]),
        ({"PHALANX_RANKS": "9"}, ["there is no rank 9", "(--ranks is PHALANX_RANKS in the environment)"]),
        ({"PHALANX_LOG_DIR": "/etc/passwd"}, ["'--log-dir' (PHALANX_LOG_DIR in the environment)"]),
        ({"PHALANX_HANG_TIMEOUT": "-1"}, ["'--hang-timeout' (PHALANX_HANG_TIMEOUT in the environment)"]),
        (
            {"PHALANX_TIMESTAMPS": "1", "PET_ELAPSED": "1"},
            ["(--timestamps is PHALANX_TIMESTAMPS in the environment, --elapsed is PET_ELAPSED in the environment)"],
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_an_error_names_the_variable(place: Place, variables: dict[str, str], words: list[str]) -> None:
    place.env |= variables
    refused(place.run(place.write(""), logs=False), *words)


def test_an_option_that_was_typed_is_not_the_environments(place: Place) -> None:
    place.env |= {"PHALANX_GRACE": "1"}
    done = place.run("--grace", "-1", place.write(""))
    refused(done, "'--grace' / '--shutdown-timeout': expected 0 seconds or more")
    assert "in the environment" not in done.err


# --- filters, and no logs


@pytest.mark.parametrize("option", ["--duplicate-stdout-filters", "--duplicate-stderr-filters", "--preload"])
@pytest.mark.parametrize("text", [",,", "", ","])
def test_lists_of_nothing(place: Place, option: str, text: str) -> None:
    refused(place.run(option, text, place.write("")), option, f"{text!r}: expected one or more, between commas")


def test_a_list_with_a_comma_too_many(place: Place) -> None:
    done = place.run("--duplicate-stdout-filters", "loss,,", place.write("print('loss'); print('x')"))
    assert done.status == 0
    assert [path.read_text() for path in place.logs.glob("*/attempt_0/filtered_stdout.log")] == ["[0] loss\n"]


def test_no_logs(place: Place, tmp_path: Path) -> None:
    """As with torchrun: streams are the launcher's own. What is redirected is dropped; a failure is told whole."""
    place.env["TMPDIR"] = str(tmp_path)
    script = place.write("import sys; print('out'); print('err', file=sys.stderr); 1 / (2 - len(sys.argv))")
    before = set(tmp_path.iterdir())
    done = place.run("--log-dir", "/dev/null", script, logs=False)
    assert (done.status, done.out) == (0, "out\n")
    assert done.err == "phalanx: 1 worker, no logs are kept\nerr\n"
    done = place.run("--log-dir", "/dev/null", "-r", "1", "-t", "2", script, "fail", logs=False)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("phalanx: 1 worker, no logs are kept\nerr\n")
    assert "error     : ZeroDivisionError: division by zero" in done.err
    assert "/phalanx_" not in done.err  # what is gone is not named
    assert set(tmp_path.iterdir()) == before


def test_a_hang_without_logs(place: Place, tmp_path: Path) -> None:
    """What is gone with the group is not named, neither in the report nor in the lines before it."""
    place.env["TMPDIR"] = str(tmp_path)
    script = place.write("""
        import signal
        from phalanx import timer
        with timer.expires(0.1, "step"):
            signal.pause()
        """)
    done = place.run("--log-dir", "/dev/null", "--on-expiry", "dump,kill", script, logs=False)
    assert done.status == 128 + signal.SIGKILL
    assert "error     : Hang: 'step'" in done.err
    assert "; stacks: not kept, for no logs are\n" in done.err
    assert "/phalanx_" not in done.err
    assert "stacks-" not in done.err
    assert all(line.startswith("phalanx: ") for line in done.err.partition("\n=")[0].splitlines())
    assert not list(tmp_path.glob("phalanx_*"))


@pytest.mark.parametrize(
    "options",
    [("--fold",), ("--log-max-size", "1MB"), ("--log-mode", "755"), ("--keep-runs", "3"), ("--grep", "x"),
     ("--duplicate-stdout-filters", "x")],
    ids=lambda options: options[0],
)  # fmt: skip
def test_what_needs_logs(place: Place, options: tuple[str, ...]) -> None:
    done = place.run("--log-dir", "/dev/null", *options, place.write(""), logs=False)
    refused(done, f"--log-dir /dev/null: no logs are kept; {options[0]} would have nothing to be about")
