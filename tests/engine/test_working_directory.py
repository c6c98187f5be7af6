"""No helper of ours, and no worker before its own code, imports what lies in the working directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.command import LIMIT
from tests.support.helpers import Ready, until
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

NAMES = """
    __future__ abc ast atexit cloudpickle collections contextlib copyreg ctypes dataclasses datetime decimal dis enum
    errno faulthandler fcntl functools gc heapq importlib inspect io itertools json keyword linecache logging marshal
    math multiprocessing operator os phalanx pickle posixpath psutil py_spy queue random re resource runpy select
    selectors shutil signal site sitecustomize socket stat string struct subprocess tempfile threading time token
    tokenize torch traceback types typing warnings weakref zipimport zlib
"""

FUNCTIONS = """
import sys
from phalanx.multiprocessing import start_processes

def double(number):
    return 2 * number

def fail():
    raise ValueError("as it should")

if __name__ == "__main__":
    method, preload = sys.argv[1:]
    options = {"preload": [preload, "__main__"]} if preload else {}
    for function, args in ((double, (21,)), (lambda: 42, ()), (fail, ())):
        group = start_processes("f", function, {0: args}, {0: {}}, start_method=method, **options)
        with group:
            result = group.wait()
            assert result.return_values == {0: 42} or "as it should" in str(result.failures), result
"""


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """The folder in which each module of the working directory leaves its name, if it is imported."""
    there = tmp_path / "there"
    marks = tmp_path / "marks"
    there.mkdir()
    marks.mkdir()
    for name in NAMES.split():
        (there / f"{name}.py").write_text(
            f"import posix\nposix.close(posix.open({str(marks / name)!r}, posix.O_CREAT | posix.O_WRONLY))\n"
            "raise ImportError('imported from the working directory')\n"
        )
    return marks


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=tmp_path / "there",
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "method, preload", [("spawn", ""), ("forkserver", ""), ("fork", ""), ("forkserver", "fractions")]
)
def test_function_workers_and_their_helpers(method: str, preload: str, marks: Path, tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(FUNCTIONS)
    done = run(tmp_path, str(script), method, preload)
    assert done.returncode == 0, done.stderr
    assert not os.listdir(marks)


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--preload", "fractions"), ("--log-max-size", "1M"), ("--no-python",)])
def test_the_command(options: tuple[str, ...], marks: Path, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "tool.py"  # as the console script that pip makes
    tool.parent.mkdir()
    tool.write_text("from phalanx.cli import main\nmain()\n")
    beside = tmp_path / "job" / "beside.py"
    beside.parent.mkdir()
    beside.write_text("value = 42\n")
    script = beside.parent / "job.py"
    script.write_text("import sys\nfrom beside import value\nprint('found', value, sys.path[0])\n")
    logs = str(tmp_path / "logs")
    program = (sys.executable, str(script)) if options == ("--no-python",) else (str(script),)
    done = run(tmp_path, str(tool), "run", "--log-dir", logs, *options, *program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"found 42 {script.parent}\n") == 1  # the script's own folder is where it was
    for command in ("logs", "runs"):
        assert run(tmp_path, str(tool), command, "--log-dir", logs).returncode == 0
    assert not os.listdir(marks)


def test_a_function_of_the_working_directory_is_found(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "functions.py").write_text("def double(number):\n    return 2 * number\n")
    code = textwrap.dedent("""
        import functions
        from phalanx.multiprocessing import start_processes
        for method in ("spawn", "forkserver"):
            with start_processes("f", functions.double, {0: (21,)}, {0: {}}, start_method=method) as group:
                assert group.wait().return_values == {0: 42}
    """)
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_stacks_of_a_run(marks: Path, tmp_path: Path) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text("from phalanx.cli import main\nmain()\n")
    logs = str(tmp_path / "logs")
    with Ready(tmp_path / "ready") as ready:
        script = tmp_path / "job.py"
        script.write_text(f"import signal\n{ready.python()}\nsignal.pause()\n")
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}
        command = [sys.executable, str(tool), "run", "--log-dir", logs, str(script)]
        with subprocess.Popen(command, cwd=tmp_path / "there", env=environ, stderr=subprocess.DEVNULL) as launcher:
            try:
                ready.wait()
                until(lambda: any(Path(logs).glob("*/run.json")))  # the launcher comes to that in its own time
                done = run(tmp_path, str(tool), "stack", "--log-dir", logs)
                assert "job.py" in done.stdout, done.stderr
            finally:
                launcher.send_signal(signal.SIGTERM)
    assert not os.listdir(marks)


def named_like_packages(folder: Path) -> tuple[str, dict[str, str]]:
    """A Python whose own folder is a link, with a name that ends as ``site-packages`` does."""
    prefix = folder / "our-packages"
    prefix.symlink_to(sys.base_prefix)
    return f"{prefix}/bin/{PYTHON}", {}


def told_where(folder: Path) -> tuple[str, dict[str, str]]:
    """One that is told where its library is, with a slash at the end. ``folder`` is of no use."""
    del folder
    return f"{sys.base_prefix}/bin/{PYTHON}", {"PYTHONHOME": f"{sys.base_prefix}/"}


def not_installed(folder: Path) -> tuple[str, dict[str, str]]:
    """One that is run where it was built: its library is not below its prefix."""
    (folder / "Modules").mkdir()
    (folder / "Modules" / "Setup.local").touch()
    (folder / "pybuilddir.txt").write_text("modules")
    library = os.path.dirname(os.__file__)
    (folder / "Lib").symlink_to(library)
    (folder / "modules").symlink_to(f"{library}/lib-dynload")
    shutil.copy(f"{sys.base_prefix}/bin/{PYTHON}", folder / PYTHON)
    return str(folder / PYTHON), {"LD_LIBRARY_PATH": f"{sys.base_prefix}/lib"}


@pytest.mark.long
@pytest.mark.parametrize("made", [named_like_packages, told_where, not_installed])
@pytest.mark.skipif(not os.path.exists(f"{sys.base_prefix}/bin/{PYTHON}"), reason="needs an installed Python")
def test_helpers_have_the_standard_library_wherever_it_is(
    made: Callable[[Path], tuple[str, dict[str, str]]], tmp_path: Path
) -> None:
    (tmp_path / "python").mkdir()
    python, more = made(tmp_path / "python")
    code = textwrap.dedent("""
        import json
        from phalanx.multiprocessing import start_processes
        for method, options in ("spawn", {}), ("forkserver", {}), ("forkserver", {"preload": ["fractions"]}):
            with start_processes("f", json.loads, {0: ("42",)}, {0: {}}, start_method=method, **options) as group:
                assert group.wait().return_values == {0: 42}
    """)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}/src", **more}
    done = subprocess.run(
        [python, "-c", code], check=False, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
