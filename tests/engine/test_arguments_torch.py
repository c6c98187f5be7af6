"""What torch makes of arguments and results that need a decision, and what we make of them: docs/compatibility.md."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.workers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

PROGRAM = """
import json, sys

def f(*args):
    if args and args[-1] == "boom":
        raise ValueError("boom")
    return args

def group(args):
    context = m.start_processes("x", f, args, {rank: {} for rank in args}, m.DefaultLogsSpecs(), start_method="fork")
    try:
        result = context.wait()
        return [sorted(result.return_values.items()), sorted(result.failures)]
    finally:
        context.close()

def note(call):
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error)]

if __name__ == "__main__":
    if sys.argv[1] == "torch":
        import torch.distributed.elastic.multiprocessing as m
        import torch.multiprocessing as mp
    else:
        import phalanx.multiprocessing as m
        import phalanx.spawn as mp
    print(json.dumps({
        "no ranks": note(lambda: group({})),
        "a string": note(lambda: group({0: "ab"})),
        "a list": note(lambda: group({0: ["ab"]})),
        "no arguments": note(lambda: group({0: ()})),
        "one fails": note(lambda: group({0: ("ok",), 1: ("boom",)})),
        "spawn none": note(lambda: mp.spawn(f, nprocs=0)),
        "spawn a string": note(lambda: mp.spawn(f, args="ab")),
    }))
"""


def said(which: str, folder: Path) -> dict[str, Any]:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), which]
    env = {"PYTHONPATH": f"{ROOT}/src", "TMPDIR": str(folder)}  # of a group that failed, logs are kept there
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=folder, env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_there_and_here(tmp_path: Path) -> None:
    there, here = said("torch", tmp_path), said("phalanx", tmp_path)
    same = {"a list": [[[0, ["ab"]]], []], "no arguments": [[[0, []]], []]}
    assert {name: there[name] for name in same} == {name: here[name] for name in same} == same
    assert there["no ranks"] == [[], []]
    assert here["no ranks"] == ["ValueError", "nprocs: expected at least 1 process, got 0"]
    assert there["spawn none"] is None
    assert here["spawn none"] == ["ValueError", "nprocs: expected at least 1 process, got 0"]
    assert there["a string"] == [[[0, ["a", "b"]]], []]
    assert here["a string"] == ["TypeError", "args: rank 0: expected a tuple of arguments, got 'ab'"]
    assert there["spawn a string"] is None
    assert here["spawn a string"] == ["TypeError", "args: expected a tuple of arguments, got 'ab'"]
    assert there["one fails"] == [[], [1]]
    assert here["one fails"] in ([[[0, ["ok"]]], [1]], [[], [1]])  # a rank may be stopped before it has returned
