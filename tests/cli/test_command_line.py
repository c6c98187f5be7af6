"""What a person meets at the command line: help, a slip of the finger, and errors that name what was given."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli._commands import cli, meant
from phalanx.cli._declare import sections
from phalanx.cli._run_config import RunOptions
from phalanx.cli.run import run
from tests.cli.test_run import RUN, Done, Launcher, Place, refused

PHALANX = (sys.executable, "-m", "phalanx")


def phalanx(place: Place, *argv: object) -> Done:
    return place.program(*PHALANX, *argv)


@pytest.mark.slow
def test_a_library_without_a_build_for_this_python_is_named(place: Place) -> None:
    """What does without it works: a run on one machine, its record, and the commands that read it."""
    hidden = place.folder / "hidden"
    hidden.mkdir()
    for name in ("msgspec", "re2", "py_spy"):
        (hidden / f"{name}.py").write_text(f"raise ImportError('no build', name='{name}')")
    place.write("import os\nassert os.environ['RANK'] == '0'", "x.py")
    place.env["PYTHONPATH"] = str(hidden)
    assert phalanx(place, "run", "--log-dir", place.logs, place.folder / "x.py").status == 0
    for command in ("logs", "report"):
        assert phalanx(place, command, "--log-dir", place.logs).status == 0
    done = phalanx(place, "run", "--nnodes", "2", "--node-rank", "0", "x.py")
    why = "this takes msgspec, which cannot be imported here (no build): python -m pip install msgspec"
    assert (done.status, done.out, done.err) == (1, "", f"Error: {why}\n")


# --- what was meant


@pytest.mark.parametrize(
    "argv,answer",
    [
        (["rn"], "there is no command 'rn'; did you mean 'run'?"),
        (["ps"], "there is no command 'ps'; did you mean 'runs'?"),
        (["launch"], "there is no command 'launch'; did you mean 'run'?"),
        *(
            ([name], f"there is no command '{name}'; there are run, logs, runs, report, rerun, stack, torchrun-shim\n")
            for name in ("xyz", "r", "ruxx")
        ),
        ([sys.executable], f"; to run a script: phalanx run {sys.executable}"),
        (["train.py"], "there is no command 'train.py'; to run a script: phalanx run train.py"),
        (["--nproc-per-node", "4", "train.py"], "there is no option '--nproc-per-node' here; it is one of phalanx run"),
        (["--no-such"], "there is no option '--no-such'\n"),
        (["run", "--nproc", "4", "x.py"], "there is no option '--nproc'; did you mean '--nproc-per-node'?"),
        (["run", "--nproc_per", "4", "x.py"], "there is no option '--nproc-per'; did you mean '--nproc-per-node'?"),
        (
            ["run", "--log", "x", "x.py"],
            "there is no option '--log'; did you mean '--log-dir' or '--logs-specs' or '--log-",
        ),
        (["run", "--redirect", "3", "x.py"], "there is no option '--redirect'; did you mean '--redirects'?"),
        (["run", "--hang-timout", "3", "x.py"], "there is no option '--hang-timout'; did you mean '--hang-timeout'?"),
        (["run", "--nnode", "2", "x.py"], "there is no option '--nnode'; did you mean '--nnodes'"),
        (["run", "-z", "x.py"], "there is no option '-z'"),
        (["run", "--rdzv-backend", "c10", "x.py"], "'c10' is not one of 'static', 'c10d', 'etcd', 'etcd-v2'"),
        (
            ["run", "--rdzv-endpoint", "192.0.2.1:29500", __file__],
            "another machine than this; this is the only machine",
        ),
        (["run", "--nnodes", "2:3", __file__], "with --rdzv-backend static, a fixed number of machines takes part"),
        (["logs", "--tail", "3"], "--tail: it is --lines here, or -n"),
        (["run", "--standal", "x.py"], "there is no option '--standal'; did you mean '--standalone'?"),
        (["run", "--rdzv", "x", "x.py"], "; did you mean '--rdzv-id' or '--rdzv-backend' or '--rdzv-"),
        (["logs", "--folow"], "there is no option '--folow'; did you mean '--follow'?"),
        (["run", "--max-restart", "3", "x.py"], "; did you mean '--max-restarts'?"),
        (["run", "--nnode", "3", "x.py"], "there is no option '--nnode'; did you mean '--nnodes'?"),
        (["run", "--rdzv-endpont", "x", "x.py"], "; did you mean '--rdzv-endpoint'?"),
        (["run", "-np", "4", "x.py"], "-n: it is --nproc-per-node here"),
        (["run", "--num_processes", "4", "x.py"], "--num-processes: it is --nproc-per-node here"),
        (["run", "--use-env", "x.py"], "--use-env: the rank is in LOCAL_RANK"),
        (["prune"], "there is no command 'prune'; did you mean 'runs prune'?"),
        (["RUN"], "there is no command 'RUN'; did you mean 'run'?"),
        (["--verison"], "there is no option '--verison'; did you mean '--version'?"),
        (["runs", "prun"], "there is no command 'prun'; did you mean 'prune'?"),
        (["runs", "failed"], "there is no command 'failed'; did you mean '--state failed'?"),
        (["runs", "list"], "there is no command 'list'; phalanx runs lists all, phalanx logs RUN shows one"),
        (["runs", "rm"], "there is no command 'rm'; did you mean 'prune'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_of_the_finger(argv: list[str], answer: str) -> None:
    done = CliRunner().invoke(cli, argv)
    assert done.exit_code == 2
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert answer in done.output


@pytest.mark.parametrize("name", ["--verbose", "--debug", "--nn-x-yz", "--n", "--seed"])
def test_no_guess_is_better_than_a_wild_one(name: str) -> None:
    assert f"there is no option {name!r}\n" in CliRunner().invoke(cli, ["run", name, "x.py"]).output


def test_a_file_does_not_stand_for_a_command_that_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").touch()
    assert "there is no command 'log'; did you mean 'logs'?" in CliRunner().invoke(cli, ["log"]).output


def test_no_more_is_meant_than_a_person_reads() -> None:
    """Of what begins so, the first; else what is closest."""
    assert meant("--log", [f"--log-{letter}" for letter in "abcd"]) == (
        "; did you mean '--log-a' or '--log-b' or '--log-c'?"
    )
    assert meant("stackz", ["stacks", "stack"]) == "; did you mean 'stack' or 'stacks'?"


def test_nothing_completes_a_command_that_is_not_there(place: Place) -> None:
    place.env |= {"_PHALANX_COMPLETE": "bash_complete", "COMP_WORDS": "phalanx xyz x", "COMP_CWORD": "2"}
    assert phalanx(place) == (0, "\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        "--help", "--version", "run --help", "run --dry-run SCRIPT", "run --print-config SCRIPT", "runs", "runs --json",
        "runs prune --keep 0 --dry-run", "logs", "logs -f", "logs -n 1", "stack --help",
    ],
)  # fmt: skip
def test_a_command_whose_reader_has_gone_ends_as_one_that_dies_of_sigpipe(place: Place, argv: str) -> None:
    script = place.write("print('one')")
    assert place.run(script).status == 0
    place.env["PHALANX_LOG_DIR"] = str(place.logs)
    reader, writer = os.pipe()
    os.close(reader)
    words = argv.replace("SCRIPT", script).split()
    with Launcher([*RUN[:-1], *words], cwd=place.folder, env=place.env, stdout=writer) as command:
        os.close(writer)
        done = command.end()
    assert (done.status, done.err) == (128 + signal.SIGPIPE, "")


def test_a_name_that_a_terminal_would_obey_is_shown(place: Place) -> None:
    refused(phalanx(place, "\x1b[2J"), r"there is no command '\x1b[2J'")


# --- help


def test_help_is_in_sections() -> None:
    """Each option is in one, and those that people need first are first."""
    shown = CliRunner().invoke(run, ["--help"]).output
    headings = re.findall(r"^([A-Z].*):$", shown, re.MULTILINE)
    assert headings[:2] == ["Workers", "Restarts"]
    assert headings[-1] == "Other"
    assert "SCRIPT\n" not in shown.partition("\nOther:")[2]  # the text says what it is
    in_sections = [name for _, names in sections(RunOptions) for name in names]
    in_sections += ["--job-file", "--print-config", "--dry-run", "--print-completion"]
    assert len(set(in_sections)) == len(in_sections)
    visible = {
        next(opt for opt in param.opts if opt.startswith("--"))
        for param in run.params
        if param.param_type_name == "option" and not getattr(param, "hidden", False)
    }
    assert set(in_sections) == visible
    for name in in_sections:
        assert len(re.findall(rf"^  (?:-\w, )?{name}\b(?!-)", shown, re.MULTILINE)) == 1, name
    assert "\nOptions:\n" in CliRunner().invoke(cli, ["logs", "--help"]).output


# --- errors that come from the environment


@pytest.mark.parametrize(
    "variables,words",
    [
        ({"PET_MAX_RESTARTS": "x"}, ["'--max-restarts' (PET_MAX_RESTARTS in the environment)", "like 5/1h"]),
        ({"PHALANX_NPROC_PER_NODE": "x"}, ["'--nproc-per-node' (PHALANX_NPROC_PER_NODE in the environment)", "'x'"]),
        ({"PET_NPROC_PER_NODE": "0"}, ["'--nproc-per-node' (PET_NPROC_PER_NODE in the environment)"]),
        ({"PHALANX_LOG_KEEP": "3"}, ["--log-keep: files", "(--log-keep is PHALANX_LOG_KEEP in the environment)"]),
        ({"PHALANX_RANKS": "9"}, ["there is no rank 9", "(--ranks is PHALANX_RANKS in the environment)"]),
        ({"PHALANX_LOG_DIR": "/etc/passwd"}, ["'--log-dir' (PHALANX_LOG_DIR in the environment)"]),
        (
            {"PHALANX_LOG_DIR": "/dev/full"},
            ["--log-dir: '/dev/full' is not", "(--log-dir is PHALANX_LOG_DIR "],
        ),
        (
            {"PHALANX_GRACE": "10 s"},
            ["(PHALANX_GRACE in the environment): '10 s': expected a time, 0 or more, like 90"],
        ),
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


def test_an_interpreter_that_is_not_there(place: Place) -> None:
    script = place.write("")
    for path, why in (("/no/such", "no such binary: '/no/such'"), (str(place.folder), "is a folder, not a binary")):
        place.env["PYTHON_EXEC"] = path
        done = place.run(script)
        assert done.status == 1
        assert done.err.startswith("Error: PYTHON_EXEC: ")
        assert why in done.err


def test_an_option_that_was_typed_is_not_the_environments(place: Place) -> None:
    place.env |= {"PHALANX_GRACE": "1"}
    done = place.run("--grace", "-1", place.write(""))
    refused(done, "'--grace' / '--shutdown-timeout': '-1': expected a time, 0 or more")
    assert "in the environment" not in done.err


# --- values


@pytest.mark.parametrize(
    "options,words",
    [
        (["--master-port", "x", "SCRIPT"], "'x': expected a whole number, 0 to 65535"),
        (["--keep-runs", "0", "SCRIPT"], "'0': expected a whole number, 1 or more"),
        (["--max-restarts", str(1 << 63), "SCRIPT"], "expected a number of restarts"),
        (["--nproc-per-node", "99999999999", "SCRIPT"], "'99999999999': there cannot be so many workers"),
        (["--nproc-per-node", "9" * 5000, "SCRIPT"], "9': there cannot be so many workers"),
        (["--log-dir", "", "SCRIPT"], "'--log-dir': '': expected the name of a folder"),
        (["--no-python", "no-such"], "SCRIPT: no such binary: 'no-such'"),
        (["--no-python", "script.py"], "SCRIPT: no such binary: 'script.py'; ./script.py is here; PATH"),
        (["sh", "SCRIPT"], "script 'sh' does not exist; to run the program 'sh', give --no-python"),
        (["x" * 300], "File name too long"),
        (["script.py/x.py"], "script 'script.py/x.py': Not a directory"),
        (["-m", "script.py"], "--module: 'script.py' is no module's name"),
        (["-m", "./script"], "--module: './script' is no module's name"),
        (["-m", ""], "--module: '' is no module's name"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be(place: Place, options: list[str], words: str) -> None:
    script = place.write("")
    done = place.run(*(script if option == "SCRIPT" else option for option in options), logs="--log-dir" not in options)
    assert done.status == (1 if words.startswith("SCRIPT: no such") else 2)
    assert done.out == ""
    assert words in done.err
    assert "Traceback" not in done.err
    assert "entrypoint" not in done.err


def test_a_script_in_a_folder_that_is_shut(place: Place) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv: root may enter any folder")
    unprivileged = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--") if os.geteuid() == 0 else ()
    folder = Path(place.write("", "shut/script.py")).parent
    folder.chmod(0)
    try:
        done = place.program(*unprivileged, *PHALANX, "run", folder / "script.py")
    finally:
        folder.chmod(0o700)
    refused(done, "/script.py': Permission denied")
    assert "Traceback" not in done.err


@pytest.mark.long
def test_a_run_id_longer_than_names_can_be(place: Place) -> None:
    for run_id in ("x" * 300, "\u00fc" * 300):
        done = place.run("--run-id", run_id, "--no-python", "sh", "-c", "echo $TORCHELASTIC_RUN_ID")
        assert (done.status, done.out) == (0, f"[0] {run_id}\n"), done
        assert place.program(*PHALANX, "logs", "--log-dir", place.logs, run_id).out == done.out


@pytest.mark.parametrize("moment", ["phalanx.cli.run", "phalanx.cli.runs", "phalanx.cli.logs", "phalanx._base.clock"])
def test_a_ctrl_c_while_a_command_is_loaded(place: Place, moment: str) -> None:
    program = f"""
import os, signal, sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {moment!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
from phalanx.cli import main
main()
"""
    command = "runs" if moment == "phalanx._base.clock" else moment.rpartition(".")[2]
    done = place.program(sys.executable, "-c", program, command)
    assert (done.status, done.out, done.err) == (128 + signal.SIGINT, "", "")


# --- filters, and no logs


@pytest.mark.parametrize("option", ["--duplicate-stdout-filters", "--duplicate-stderr-filters", "--preload"])
@pytest.mark.parametrize("text", [",,", "", ","])
def test_lists_of_nothing(place: Place, option: str, text: str) -> None:
    refused(place.run(option, text, place.write("")), option, f"{text!r}: expected one or more, between commas")


def test_a_list_with_a_comma_too_many(place: Place) -> None:
    done = place.run("--duplicate-stdout-filters", "loss,,", place.write("print('loss'); print('x')"))
    assert done.status == 0
    assert [path.read_text() for path in place.logs.glob("*/attempt_0/filtered_stdout.log")] == ["[0] loss\n"]


@pytest.mark.long
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
    nothing = place.run("--log-dir", "/dev/null", "-r", "3", script, "fail", logs=False)
    assert "error     : ZeroDivisionError: division by zero" in nothing.err
    for text in (done.err, nothing.err):  # what is gone is not named, nor what is no file
        assert "/phalanx_" not in text
        assert "/dev/null" not in text
    assert set(tmp_path.iterdir()) == before


def test_a_hang_without_logs(place: Place, tmp_path: Path) -> None:
    """What is gone with the group is not named, neither in the report nor in the lines before it."""
    place.env["TMPDIR"] = str(tmp_path)
    script = place.write("""
        import threading
        from phalanx import timer
        with timer.expires(0.1, "step"):
            threading.Event().wait()
        """)
    done = place.run("--log-dir", "/dev/null", "--on-expiry", "dump,kill", script, logs=False)
    assert done.status == 128 + signal.SIGKILL
    assert "error     : Hang: 'step'" in done.err
    assert "; stacks: not kept, for no logs are\n" in done.err
    assert "/phalanx_" not in done.err
    assert "stacks-" not in done.err
    assert all(line.startswith("phalanx: ") for line in done.err.partition("\n=")[0].splitlines())
    assert not list(tmp_path.glob("phalanx_*"))


def test_a_hang_whose_stacks_cannot_be_written(place: Place) -> None:
    script = place.write("""
        import os, shutil, threading
        from phalanx import timer
        shutil.rmtree(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
        with timer.expires(0.1, "step"):
            threading.Event().wait()
        """)
    assert "; stacks: none\n" in place.run("--on-expiry", "dump,kill", script).err


@pytest.mark.parametrize(
    "options",
    [("--fold",), ("--log-max-size", "1MB"), ("--log-mode", "755"), ("--keep-runs", "3"), ("--grep", "x"),
     ("--duplicate-stdout-filters", "x")],
    ids=lambda options: options[0],
)  # fmt: skip
def test_what_needs_logs(place: Place, options: tuple[str, ...]) -> None:
    done = place.run("--log-dir", "/dev/null", *options, place.write(""), logs=False)
    refused(done, f"--log-dir /dev/null: no logs are kept; {options[0]} would have nothing to be about")
