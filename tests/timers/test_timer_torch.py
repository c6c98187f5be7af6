"""A program that uses torch's timers needs another import, and no other change."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import phalanx.timer

if TYPE_CHECKING:
    from pathlib import Path

HERE = "phalanx.timer"
THERE = "torch.distributed.elastic.timer"
CLASSES = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
]


@pytest.fixture(scope="module")
def torch_timer() -> Any:
    return importlib.import_module(THERE)


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(name, each.default) for name, each in inspect.signature(function).parameters.items()]


def _public(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} | {"__init__"}


@pytest.mark.torch
def test_every_public_name_is_here(torch_timer: Any) -> None:
    modules = {name for name in dir(torch_timer) if inspect.ismodule(getattr(torch_timer, name))}
    names = {name for name in dir(torch_timer) if not name.startswith("_")} - modules | {"debug_info_logging"}
    assert names <= set(phalanx.timer.__all__)


@pytest.mark.torch
@pytest.mark.parametrize("name", [*CLASSES, "configure", "expires"])
def test_arguments_have_torchs_names_order_and_defaults(torch_timer: Any, name: str) -> None:
    theirs, ours = getattr(torch_timer, name), getattr(phalanx.timer, name)
    if not inspect.isclass(theirs):
        assert _parameters(ours) == _parameters(theirs)
        return
    members = _public(theirs)
    assert members - _public(ours) <= {"is_process_running"}  # of a pid, which is no identity here
    for member in members & _public(ours):
        method = inspect.getattr_static(theirs, member)
        if inspect.isfunction(method):
            known = _parameters(method)
            given = _parameters(inspect.getattr_static(ours, member))[: len(known)]
            assert [name for name, _ in given] == [name for name, _ in known], member
            # What is required there may be left out here, and never the other way.
            assert all(
                mine == other or other is inspect.Parameter.empty
                for (_, mine), (_, other) in zip(given, known, strict=True)
            )


def _hang_by_queue(module: str, queue: Any) -> None:
    timer = importlib.import_module(module)
    timer.configure(timer.LocalTimerClient(queue))
    with timer.expires(after=60, scope="quick"):
        pass
    with timer.expires(after=0.2):
        signal.pause()


def _hang_by_pipe(module: str, path: str) -> None:
    timer = importlib.import_module(module)
    timer.configure(timer.FileTimerClient(path))
    with timer.expires(after=60, scope="quick"):
        pass
    with timer.expires(after=0.2):
        signal.pause()


def _exit_code(target: Any, *args: Any) -> int | None:
    worker = multiprocessing.get_context("spawn").Process(target=target, args=args)
    worker.start()
    worker.join()
    code = worker.exitcode
    worker.close()
    return code


@pytest.mark.slow
@pytest.mark.parametrize("module", [HERE, pytest.param(THERE, marks=pytest.mark.torch)])
def test_the_same_program_over_a_queue(module: str) -> None:
    timer = importlib.import_module(module)
    queue = multiprocessing.get_context("spawn").Queue()
    server = timer.LocalTimerServer(queue, max_interval=0.1)
    server.start()
    try:
        assert _exit_code(_hang_by_queue, module, queue) == -signal.SIGKILL
    finally:
        server.stop()
        queue.close()
        queue.join_thread()


@pytest.mark.slow
def test_the_same_program_over_a_pipe(tmp_path: Path) -> None:
    """Not with torch's server: that kills the process in which it runs, too."""
    path = os.fspath(tmp_path / "timers")
    told: list[str] = []
    server = phalanx.timer.FileTimerServer(path, "run", 0.1, True, lambda name, _request: told.append(name))
    server.start()
    try:
        assert _exit_code(_hang_by_pipe, HERE, path) == -signal.SIGKILL
        assert isinstance(server.get_last_progress_time(), int)
    finally:
        server.stop()
    assert any("start" in name for name in told)
