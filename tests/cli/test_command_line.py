"""What a person meets at the command line: help, a slip of the finger, and errors that name what was given."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli._commands import cli
from phalanx.cli._declare import SECTIONS, sections
from phalanx.cli._run_config import RunOptions
from phalanx.cli.run import run
from tests.support.command import RUN, Done, Launcher, Place

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


def test_nothing_completes_a_command_that_is_not_there(place: Place) -> None:
    place.env |= {"_PHALANX_COMPLETE": "bash_complete", "COMP_WORDS": "phalanx xyz x", "COMP_CWORD": "2"}
    assert phalanx(place) == (0, "\n", "")


@pytest.mark.slow
def test_a_command_whose_reader_has_gone_dies_of_sigpipe(place: Place) -> None:
    script = place.write("print('one')")
    assert place.run(script).status == 0
    place.env["PHALANX_LOG_DIR"] = str(place.logs)
    for argv in (
        "--help", "--version", "run --help", "run --dry-run SCRIPT", "run --print-config SCRIPT", "runs", "runs --json",
        "runs prune --keep 0 --dry-run", "logs", "logs -f", "logs -n 1",
    ):  # fmt: skip
        reader, writer = os.pipe()
        os.close(reader)
        words = argv.replace("SCRIPT", script).split()
        with Launcher([*RUN[:-1], *words], cwd=place.folder, env=place.env, stdout=writer) as command:
            os.close(writer)
            done = command.end()
        assert (done.status, done.err) == (128 + signal.SIGPIPE, ""), argv


# --- help


def test_help_is_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option is in one, and those that people need first are first. It fits the terminal."""
    shown = ""
    for columns in ("80", "100", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        shown, short = (CliRunner().invoke(run, [name]).output for name in ("--help", "-h"))
        assert shown == short
        assert max(map(len, shown.splitlines())) <= min(int(columns), 100)
    assert "phalanx run --nproc-per-node 4 train.py --lr 0.1\n" in shown
    assert "PHALANX_NPROC_PER_NODE" in shown
    headings = re.findall(r"^([A-Z].*):$", shown, re.MULTILINE)
    assert {heading for heading, _ in sections(RunOptions)} == set(SECTIONS)
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


def test_an_interpreter_that_is_not_there(place: Place) -> None:
    script = place.write("")
    for path, why in (("/no/such", "no such binary: '/no/such'"), (str(place.folder), "is a folder, not a binary")):
        place.env["PYTHON_EXEC"] = path
        done = place.run(script)
        assert done.status == 1
        assert done.err.startswith("Error: PYTHON_EXEC: ")
        assert why in done.err


# --- values


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


def test_garbage_is_collected_once_a_command_is_loaded(place: Place) -> None:
    program = "import atexit, gc; atexit.register(lambda: print(gc.isenabled())); from phalanx.cli import main; main()"
    argv = ("run", "--log-dir", place.logs, "--no-python", "/bin/true")
    assert place.program(sys.executable, "-c", program, *argv).out == "True\n"


@pytest.mark.parametrize("before,argv", [(True, ["--nope"]), (False, ["run", "--help"])])
def test_a_host_of_the_command_keeps_its_garbage_collection(place: Place, before: bool, argv: list[str]) -> None:
    program = f"""
import gc, sys
{"gc.enable()" if before else "gc.disable()"}
from phalanx.cli import main
try:
    main()
except SystemExit:
    sys.exit(f"{{gc.isenabled()}} {{gc.get_freeze_count()}}")
"""
    assert place.program(sys.executable, "-c", program, *argv).err.splitlines()[-1] == f"{before} 0"


# --- filters, and no logs


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
