"""coverage.py measures function workers as it measures children of `multiprocessing`, and scripts as subprocesses."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.each_python]

_FUNCTION = """\
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
_SCRIPT = """\
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
    assert _missed(tmp_path, config, _FUNCTION, "program.py", method, status=1) == "7"


@pytest.mark.parametrize("how", [(), ("--preload", "json")])
def test_every_line_of_scripts_is_measured(tmp_path: Path, how: tuple[str, ...]) -> None:
    command = ("-m", "phalanx", "run", "--nproc-per-node", "2", "--log-dir", str(tmp_path), *how, "program.py")
    assert _missed(tmp_path, "patch = subprocess\n", _SCRIPT, *command) == "5"
