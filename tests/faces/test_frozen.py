"""A frozen program, whose interpreter is the program itself: functions start by `fork`; all else is refused at once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from textwrap import dedent

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
_PROGRAM = """\
    import multiprocessing, os, sys, time
    from phalanx import run, spawn
    from phalanx.multiprocessing import DefaultLogsSpecs, start_processes

    def work(number):
        return 2 * number

    def fail(rank):
        if rank == 1:
            raise ValueError("loss is nan")
        time.sleep(3600)

    def child(queue):
        queue.put("of multiprocessing")

    if __name__ == "__main__":
        multiprocessing.freeze_support()
        how, *python = sys.argv[1:]
        if os.environ.get("STARTED_BY") == str(os.getppid()):
            sys.exit("the program was started again")
        os.environ["STARTED_BY"] = str(os.getpid())
        if python:
            multiprocessing.set_executable(*python)
        logs = DefaultLogsSpecs(log_dir="logs")
        try:
            if how == "multiprocessing":
                context = multiprocessing.get_context("spawn")
                queue = context.SimpleQueue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get())
                process.join()
            elif how == "run":
                run.main(["--log-dir", "logs", "script.py"])
            elif how == "program":
                start_processes("g", "/bin/echo", {0: ("1",)}, {0: {}}, logs_specs=logs)
            else:
                with start_processes("g", work, {0: (1,), 1: (2,)}, {0: {}, 1: {}}, logs, start_method=how) as group:
                    print(group.wait(30).return_values)
                spawn.start_processes(fail, nprocs=2, start_method=how)
        except spawn.ProcessRaisedException as error:
            print(error)
        except OSError as error:
            print(error.strerror)
"""
_REFUSED = (
    "this program is frozen, and its interpreter is {}, which would run the program again: it can start functions, by "
    "start_method 'fork', and nothing else"
)
_FAILED = """\
{0: 2, 1: 4}


-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File"""


def _check(folder: Path, command: list[str], python: str) -> None:
    (folder / "script.py").write_text("print('never')", encoding="utf-8")

    def shown(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )

    for how in ("spawn", "forkserver", "program"):
        assert shown(how).stdout == _REFUSED.format(python) + "\n", how
    done = shown("run")
    assert done.stderr.endswith(f"Error: [Errno 8] {_REFUSED.format(python)}\n"), done
    assert done.returncode == 1
    done = shown("fork")
    assert done.stdout.startswith(_FAILED), done
    assert done.stdout.endswith("ValueError: loss is nan\n\n")
    assert done.stdout.count("  File ") == 1, "frames of ours"


@pytest.mark.slow
def test_what_a_frozen_program_can_start(tmp_path: Path) -> None:
    """Of what a freezer does, this has the mark that it sets."""
    script = tmp_path / "program.py"
    script.write_text("import sys; sys.frozen = True\n" + dedent(_PROGRAM), encoding="utf-8")
    _check(tmp_path, [sys.executable, str(script)], sys.executable)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("PyInstaller") is None, reason="PyInstaller is not installed here")
@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="PyInstaller needs a Python with a shared library"
)
def test_a_program_that_pyinstaller_has_frozen(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(dedent(_PROGRAM), encoding="utf-8")
    env = {**os.environ, "PYINSTALLER_CONFIG_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(SOURCE)}
    freeze = ("PyInstaller", "--noconfirm", "--log-level", "ERROR", "--paths", str(SOURCE), str(script))
    subprocess.run([sys.executable, "-m", *freeze], cwd=tmp_path, env=env, check=True, timeout=400)
    program = str(tmp_path / "dist" / "program" / "program")
    _check(tmp_path, [program], program)
    done = subprocess.run([program, "multiprocessing"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "of multiprocessing\n", done
    # A Python beside it does not have the Phalanx that is within.
    done = subprocess.run([program, "spawn", sys.executable], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == _REFUSED.format(program) + "\n", done
