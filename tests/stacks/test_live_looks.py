"""A look at a live rank harms nobody: ten kinds of threads that never stand still, looked at again and again."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from phalanx._stacks import collect, dump, py_spy, request
from phalanx.multiprocessing import DefaultLogsSpecs, ScriptContext
from tests.support import busy
from tests.support.helpers import Ready

pytestmark = pytest.mark.each_python

# A look that takes the frames of all threads by a signal kills within the first three, on 3.11, 3.12 and 3.13.
LOOKS = int(os.environ.get("PHALANX_TEST_LOOKS", "3"))


@pytest.mark.long
@pytest.mark.parametrize("way", ["py-spy", "signal"])
def test_no_look_harms_a_worker(way: str, ready: Ready, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "signal":
        monkeypatch.setattr(py_spy, "find", lambda: "")
    nap = {"py-spy": "0.001", "signal": "0.05"}[way]  # by signal, who hardly sleeps is not looked at
    args = {rank: (str(rank), ready.address, nap) for rank in range(len(busy.KINDS))}
    group = ScriptContext("busy", busy.__file__, args, {rank: {} for rank in args}, DefaultLogsSpecs(str(logs)))
    group.start()
    with group:
        ready.wait(len(args))
        shown: set[int] = set()
        for look in itertools.count(1):
            targets = [request.Target(rank, pid, group.logs.error_files[rank]) for rank, pid in group.pids().items()]
            with collect.Collection(targets, 0.5 * look) as collection:  # a busy machine takes long to look
                collection.begin()
                collection.wait()
                shown |= {rank for rank, text in collection.finish().items() if dump.parse(text)}
            assert group.wait(0) is None, "a look has ended a worker"
            if look >= LOOKS and shown == set(args):
                break
            assert look < 5 * LOOKS, shown
        group.close(signal.SIGKILL)
