"""`phalanx run --print-config`: what it prints is read back to the same, says who has said what, and starts nothing."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from phalanx._run.config import RunConfig
from phalanx.cli._commands import cli
from phalanx.cli._declare import as_job_file, declarations
from phalanx.cli._run_config import RunOptions
from phalanx.cli.run import run
from tests.support.command import Place, refused

NAMES = [declared.name for declared in declarations(RunOptions)]


def printed(*argv: object) -> tuple[str, dict[str, Any]]:
    """What is printed for a command line, and the values of the options."""
    ctx = run.make_context("phalanx run", [*map(str, argv), "x.py"])
    values = {name: ctx.params[name] for name in NAMES}
    return as_job_file(ctx, RunOptions, RunConfig(script="x.py", args=("a", 'b"\n\\ \x7fü'), env={}, **values)), values


def test_each_option_has_a_typed_value() -> None:
    typed = {name for kind in RunConfig.__mro__ for name in vars(kind).get("__annotations__", {})}
    assert typed == {*NAMES, "script", "args", "env"}


def test_every_option_is_printed_or_said_not_to_be_set() -> None:
    shown, values = printed("--grep", "a'b", "--grep", "c\td", "--grace", "5m")
    document = tomllib.loads(shown)
    assert document["grep"] == ["a'b", "c\td"]
    assert document["grace"] == "5m"
    assert (document["script"], document["args"]) == ("x.py", ["a", 'b"\n\\ \x7fü'])
    unset = [name for line in shown.splitlines() if line.startswith("# not set: ") for name in line[11:].split(", ")]
    keys = [key for key in document if key not in ("script", "args")]
    assert sorted([*keys, *unset]) == sorted(name.replace("_", "-") for name in NAMES)
    assert {name.replace("-", "_") for name in unset} == {name for name in NAMES if values[name] is None}


@pytest.mark.slow
def test_a_real_one(place: Place) -> None:
    """From a file, the environment and the command line to a file; and that file says the same of itself."""
    place.write("", "train ü.py")
    place.env["PHALANX_SETTLE"] = "0.5"
    place.write('script = "train ü.py"\nargs = ["-x"]\nnproc-per-node = "cpu"\n\n[env]\nA = 1\n', "job.toml")
    place.env["HOME"] = str(place.folder / "home")
    place.env.pop("XDG_STATE_HOME", None)
    before = sorted(os.listdir(place.folder))
    done = place.run("-f", "job.toml", "--grace", "5", "--print-config", logs=False)
    assert (done.status, done.err) == (0, ""), done
    assert sorted(os.listdir(place.folder)) == before  # no folder was made
    for key, text, who in (
        ("script", '"train ü.py"', "job.toml, line 1"),
        ("args", '["-x"]', "job.toml, line 2"),
        ("nproc-per-node", '"cpu"', "job.toml, line 3"),
        ("A", '"1"', "job.toml, line 6"),
        ("grace", "5", "command line"),
        ("settle", "0.5", "PHALANX_SETTLE"),
        ("linger", "10", "default"),
    ):
        assert f"{key} = {text:<{37 - len(key)}} # {who}\n" in done.out
    place.write(done.out, "again.toml")
    del place.env["PHALANX_SETTLE"]
    again = place.run("-f", "again.toml", "--print-config", logs=False)
    assert tomllib.loads(again.out) == tomllib.loads(done.out)
    assert "again.toml, line " in again.out
    assert "default" not in again.out.replace('"default"', "")


@pytest.mark.parametrize("option", ["--print-config", "--dry-run"])
def test_a_question_is_refused_what_a_run_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    for argv, words in (
        ("no_such.py", "script 'no_such.py' does not exist"),
        ("--grace x script.py", "'--grace'"),
        ("--ranks 3 script.py", "--ranks: there is no rank 3"),
        ("--nice -3 --cpu-bind 0-999999 script.py", "--cpu-bind: '0-999999'"),
        ("--log-dir script.py script.py", "--log-dir"),
        ("--no-python no-such-program", "SCRIPT: no such binary: 'no-such-program'"),
        ("", "Missing argument 'SCRIPT'"),
        ("--print-config --dry-run script.py", "--print-config and --dry-run exclude each other"),
    ):
        done = CliRunner().invoke(cli, ["run", option, *argv.split()])
        assert done.exit_code == (1 if "binary" in words else 2)
        assert words in done.output


def test_what_no_job_file_can_hold(place: Place) -> None:
    script = os.fsencode(place.write(""))
    name = script.replace(b"script", b"\xff")
    os.rename(script, name)
    done = place.program(sys.executable, "-m", "phalanx", "run", "--print-config", os.fsdecode(name))
    refused(done, "is not UTF-8, and no job file can hold it")


@pytest.mark.slow
def test_a_stdout_that_takes_nothing(place: Place) -> None:
    script = place.write("")
    for option in ("--print-config", "--dry-run"):
        with open("/dev/full", "w") as full, place.start(option, script, stdout=full) as launcher:
            done = launcher.end()
        assert (done.status, done.err) == (1, "Error: stdout: No space left on device\n"), done


def test_options_that_ask_are_of_the_command_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB_FILE", "PRINT_CONFIG", "DRY_RUN"):
        monkeypatch.setenv(f"PHALANX_{name}", "1")
    values = run.make_context("phalanx run", ["x.py"]).params
    assert (values["print_config"], values["dry_run"]) == (False, False)
    assert all(not param.envvar for param in run.params if isinstance(param, click.Option) and param.name not in NAMES)
