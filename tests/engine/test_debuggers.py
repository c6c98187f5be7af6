"""Debuggers and coverage.py, which have the launcher, follow its workers however they are started, and no helper."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.support.debug_client import Debugger
from tests.support.helpers import descendants, wait_gone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.each_python]

_SCRIPT = """\
    import os, sys, time
    rank = int(os.environ["RANK"])
    print(rank)  # the breakpoint
    assert "PHALANX_DEBUGGER" not in os.environ
    open(f"{__file__}.{rank}", "w").close()
    while not all(os.path.exists(f"{__file__}.{each}") for each in range(2)):
        time.sleep(0.01)
    sys.exit(3 if sys.argv[1:] == [str(rank)] else 0)
"""
_FUNCTION = """\
    import os, sys
    def work(rank):
        print(rank)  # the breakpoint
        assert "PHALANX_DEBUGGER" not in os.environ
    if __name__ == "__main__":
        from phalanx import spawn
        spawn.start_processes(work, nprocs=2, start_method=sys.argv[1])
"""
_BREAKPOINT = 3


def _written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(dedent(text))
    return path


@pytest.mark.parametrize("how", [(), ("--preload", "json"), ("--run-path", "--start-method", "fork")])
def test_a_breakpoint_stops_in_every_rank_of_a_script(tmp_path: Path, how: tuple[str, ...]) -> None:
    script = _written(tmp_path, _SCRIPT)
    command = ["-m", "phalanx", "run", "--nproc-per-node", "2", "--log-dir", str(tmp_path), *how, str(script)]
    with Debugger(command, script, _BREAKPOINT) as debugger:
        assert {debugger.stop()["rank"], debugger.stop()["rank"]} == {"0", "1"}
        assert debugger.wait() == 0
    assert len(debugger.processes) == 3  # the launcher and the workers; no helper
    assert not wait_gone(debugger.processes)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_breakpoint_stops_in_every_function_worker(tmp_path: Path, method: str) -> None:
    program = _written(tmp_path, _FUNCTION)
    with Debugger([str(program), method], program, _BREAKPOINT) as debugger:
        assert {debugger.stop()["rank"], debugger.stop()["rank"]} == {"0", "1"}
        assert debugger.wait() == 0
    assert len(debugger.processes) == 3
    assert not wait_gone(debugger.processes)


def test_a_rank_that_fails_is_the_same_failure_under_a_debugger(tmp_path: Path) -> None:
    script = _written(tmp_path, _SCRIPT)
    command = ["-m", "phalanx", "run", "--nproc-per-node", "2", "--log-dir", str(tmp_path), str(script), "1"]
    with Debugger(command, script, _BREAKPOINT) as debugger:
        debugger.stop()
        debugger.stop()
        assert debugger.wait() == 3


def test_a_debugger_that_ends_the_program_leaves_nothing(tmp_path: Path) -> None:
    program = _written(tmp_path, _FUNCTION)
    with Debugger([str(program), "spawn"], program, _BREAKPOINT, env={"TMPDIR": str(tmp_path)}) as debugger:
        debugger.stop(goes_on=False)
        processes = descendants(debugger.adapter)
        assert len(processes) > 3
    assert not wait_gone(processes)


def test_a_debugger_that_is_not_to_follow_processes_follows_none(tmp_path: Path) -> None:
    program = _written(tmp_path, _FUNCTION)
    with Debugger([str(program), "spawn"], program, _BREAKPOINT, subProcess=False) as debugger:
        assert debugger.wait() == 0
    assert len(debugger.processes) == 1


# --- coverage.py measures function workers as it measures children of `multiprocessing`, and scripts as subprocesses


_MEASURED_FUNCTION = """\
    import os, sys, time
    def work(rank):
        if rank == 1:
            open("both").close()
            raise ValueError("loss is nan")
        open("both", "w").close(); time.sleep(3600)
        return "not measured"
    if __name__ == "__main__":
        from phalanx import spawn
        os.mkfifo("both")
        spawn.start_processes(work, nprocs=2, start_method=sys.argv[1])
"""
_MEASURED_SCRIPT = """\
    import os
    if os.environ["RANK"] == "1":
        print("one")
    if os.environ["RANK"] == "7":
        print("not measured")
"""


def _missed(folder: Path, config: str, program: str, *arguments: str, status: int = 0) -> str:
    """Run a program under coverage.py, with its children. Returns the lines that none of them has reached."""
    (folder / ".coveragerc").write_text(f"[run]\nparallel = true\n{config}")
    (folder / "program.py").write_text(dedent(program))
    head = [sys.executable, "-m", "coverage"]

    def coverage(*words: str, status: int = 0) -> str:
        done = subprocess.run([*head, *words], cwd=folder, check=False, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout

    coverage("run", *arguments, status=status)
    coverage("combine")
    return coverage("report", "-m", "--include=program.py").splitlines()[-3].partition("%")[2].strip()


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_every_line_of_function_workers_is_measured(tmp_path: Path, method: str) -> None:
    config = "concurrency = multiprocessing\nsigterm = true\n"
    # Of the rank that was stopped by SIGTERM as well, and of the one that has failed.
    assert _missed(tmp_path, config, _MEASURED_FUNCTION, "program.py", method, status=1) == "7"


@pytest.mark.parametrize("how", [(), ("--preload", "json")])
def test_every_line_of_scripts_is_measured(tmp_path: Path, how: tuple[str, ...]) -> None:
    command = ("-m", "phalanx", "run", "--nproc-per-node", "2", "--log-dir", str(tmp_path), *how, "program.py")
    assert _missed(tmp_path, "patch = subprocess\n", _MEASURED_SCRIPT, *command) == "5"
