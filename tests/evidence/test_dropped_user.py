"""A worker that has given up the rights it was started with still tells why it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from phalanx._evidence.error_file import has_left, message_of, read_error_file
from phalanx._evidence.stack_signals import fatal_path, read_fatal_stacks
from phalanx.multiprocessing import start_processes

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can become another user")


DROP = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"


def drops(_jail: str) -> NoReturn:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    raise ValueError("after the drop")


def jailed(folder: str) -> NoReturn:
    os.chroot(folder)
    os.chdir("/")
    raise ValueError("in another root")


@pytest.mark.long
@as_root
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("does, message", [(drops, "after the drop"), (jailed, "in another root")])
def test_a_functions_exception_is_known(does: Any, message: str, method: str, tmp_path: Path) -> None:
    jail = tmp_path / "jail"
    jail.mkdir()
    with start_processes("drop", does, (str(jail),), nprocs=2, start_method=method) as group:
        result = group.wait()
        for rank, failure in result.failures.items():
            assert (failure.exitcode, failure.message) == (1, f"ValueError: {message}")
            assert f"in {does.__name__}" in failure.traceback
            assert failure.error_file == group.error_files[rank]
    for path in group.error_files.values():
        assert not os.path.exists(fatal_path(path))
    assert not list(jail.iterdir())


def run(tmp_path: Path, text: str) -> Path:
    """Run a script as a worker, which fails. Returns the rank's folder."""
    script = tmp_path / "script.py"
    script.write_text(text)
    tmp_path.chmod(0o755)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0, done.stderr
    [folder] = (tmp_path / "logs").glob("*/attempt_0/0")
    return folder


@pytest.mark.slow
@as_root
def test_a_scripts_exception_is_known(tmp_path: Path) -> None:
    folder = run(tmp_path, DROP + "def fail():\n    raise ValueError('after the drop')\nfail()\n")
    data, problem = read_error_file(str(folder / "error.json"))
    assert (message_of(data), problem) == ("ValueError: after the drop", "")
    assert "in fail" in str(data)
    assert has_left(data)
    assert not (folder / "error.json.fatal").exists()


@as_root
def test_a_scripts_fatal_signal_is_known(tmp_path: Path) -> None:
    folder = run(tmp_path, DROP + "def crash():\n    os.kill(os.getpid(), 11)\ncrash()\n")
    assert "in crash" in read_fatal_stacks(str(folder / "error.json"))


# --- another root

JAILED = """
import os, sys
os.chroot(sys.argv[1])
os.chdir("/")
{end}
"""


@pytest.mark.slow
@as_root
@pytest.mark.parametrize(
    "end, expected",
    [("raise ValueError('loss is nan')", "ValueError: loss is nan"), ("sys.exit(3)", "exited with code 3")],
)
def test_so_is_that_of_a_script(end: str, expected: str, tmp_path: Path) -> None:
    jail, script = tmp_path / "jail", tmp_path / "train.py"
    jail.mkdir()
    script.write_text(JAILED.format(end=end))
    argv = [sys.executable, "-m", "phalanx", "run", "--log-dir", str(tmp_path / "logs"), str(script), str(jail)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (3 if "exit" in end else 1)
    assert f"error     : {expected}" in done.stderr
    assert not list(jail.iterdir())
