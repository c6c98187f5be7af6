"""The package by itself: what `import phalanx` gives, and loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.support.workers import ROOT


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": f"{ROOT}/src"}
    )
    return done.stdout


def test_modules_are_at_hand() -> None:
    code = """
import phalanx
phalanx.timer.beat()
print(phalanx.spawn.spawn.__name__, phalanx.multiprocessing.Std.ALL.name, phalanx.errors.record.__name__)
"""
    assert python(code) == "spawn ALL record\n"


def test_it_loads_nothing_before() -> None:
    code = "import sys, phalanx; dir(phalanx); print([name for name in sys.modules if name.startswith('phalanx.')])"
    assert python(code) == "[]\n"


def test_its_names() -> None:
    assert set(phalanx.__all__) <= set(dir(phalanx))
    for name in phalanx.__all__:
        getattr(phalanx, name)
    with pytest.raises(AttributeError, match="module 'phalanx' has no attribute 'timers'"):
        phalanx.timers  # noqa: B018 - what is looked for is the error


def nested(folder: str) -> str:
    """A worker whose stderr is logged, and a group of its own whose stderr is not."""
    command = ("-c", "import os; print(os.environ.get('PHALANX_TRACEBACKS'))")
    specs = DefaultLogsSpecs(folder, redirects=Std.OUT)
    with start_processes("inner", sys.executable, command, nprocs=1, logs_specs=specs) as group:
        return Path(group.wait().stdouts[0]).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_workers_log_variables_do_not_reach_its_own_groups(tmp_path: Path, method: str) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ERR)
    args = (str(tmp_path),)
    with start_processes("outer", nested, args, nprocs=1, logs_specs=specs, start_method=method) as group:
        assert group.wait().return_values == {0: "None\n"}
