"""What the pages say of torch's behaviour where ours differs, and no name or signature shows it: both are run."""

from __future__ import annotations

import importlib
import logging
import multiprocessing.connection
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx.multiprocessing as ours
import phalanx.spawn as our_spawn
from phalanx.multiprocessing import errors as our_errors
from tests.support.torch_names import torch_version

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def theirs() -> Any:
    return importlib.import_module("torch.distributed.elastic.multiprocessing")


def their_errors() -> Any:
    return importlib.import_module("torch.distributed.elastic.multiprocessing.errors")


def their_spawn() -> Any:
    return importlib.import_module("torch.multiprocessing")


@pytest.fixture
def handlers() -> Any:
    """Put back what torch leaves behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def layout(package: Any, folder: Path, **ranks: int) -> Any:
    """Specs of one's own for two ranks, with files for another number of ranks where ``ranks`` says so."""

    class Own(package.LogsSpecs):  # type: ignore[misc]  # either package's
        @property
        def root_log_dir(self) -> str:
            return str(folder)

        def reify(self, envs: Any) -> Any:  # noqa: ARG002 - nothing of it is needed
            streams = {name: dict.fromkeys(range(ranks.get(name, 2)), "") for name in ("stdouts", "stderrs")}
            files = {rank: str(folder / f"{rank}.json") for rank in range(ranks.get("error_files", 2))}
            return package.LogsDest(**streams, error_files=files)

    return Own()


def run(package: Any, specs: Any, binary: str) -> Any:
    with_two = {0: (), 1: ()}
    group = package.start_processes("x", binary, with_two, {0: {}, 1: {}}, specs)
    try:
        return group.wait(60, 0.01)
    finally:
        group.close()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("name", ["stdouts", "stderrs", "error_files"])
def test_layouts_that_leave_out_a_rank(tmp_path: Path, name: str) -> None:
    short = {name: 1}
    with pytest.raises(ValueError, match=f"{name} has no file for local rank 1"):
        run(ours, layout(ours, tmp_path, **short), "true")
    if name == "error_files":
        assert not run(theirs(), layout(theirs(), tmp_path, **short), "true").failures
        with pytest.raises(KeyError):
            run(theirs(), layout(theirs(), tmp_path, error_files=0), "false")
    else:
        with pytest.raises(RuntimeError, match=name):
            run(theirs(), layout(theirs(), tmp_path, **short), "true")


@pytest.mark.parametrize("name", ["stdouts", "stderrs"])
def test_layouts_with_more_ranks(tmp_path: Path, name: str) -> None:
    more = {name: 3}
    assert run(ours, layout(ours, tmp_path, **more), "true").succeeded
    with pytest.raises(RuntimeError, match=name):
        run(theirs(), layout(theirs(), tmp_path, **more), "true")


def test_the_default_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (theirs().DefaultLogsSpecs("a") == theirs().DefaultLogsSpecs("a"), Path("a").exists()) == (True, True)
    assert (ours.DefaultLogsSpecs("b") == ours.DefaultLogsSpecs("b"), Path("b").exists()) == (False, False)
    found = [package.DefaultLogsSpecs("c").reify({0: {}}).error_files[0] for package in (theirs(), ours)]
    assert [os.path.isabs(path) for path in found] == [False, True]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("handlers", "own_temporary_folder")  # torch leaves its files there
def test_a_function_that_ends_with_a_keyboard_interrupt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = their_spawn().start_processes(interrupt, nprocs=1, join=False, start_method="fork")
    if torch_version() < (2, 15):
        assert context.join()
    else:
        with pytest.raises(Exception, match=r"line \d+, in interrupt\n    raise KeyboardInterrupt"):
            context.join()
        assert context.processes[0].exitcode == 128 + signal.SIGINT
    one: Any = ({0: ()}, {0: {}})
    specs = [package.DefaultLogsSpecs(str(tmp_path)) for package in (theirs(), ours)]
    there = theirs().start_processes("x", interrupt, *one, specs[0], start_method="fork")
    try:
        multiprocessing.connection.wait([process.sentinel for process in there._pc.processes])
        if torch_version() < (2, 15):
            assert there.wait(0.2, 0.01) is None
            assert there.pids()
            assert [process.exitcode for process in there._pc.processes] == [0]
        else:
            # What it logs has a traceback, whose frames keep its pipes.
            caplog.set_level(logging.CRITICAL, "torch.distributed.elastic.multiprocessing.api")
            assert there.wait().failures[0].exitcode == 128 + signal.SIGINT
    finally:
        there.close()
    with ours.start_processes("x", interrupt, *one, specs[1], start_method="fork") as here:
        assert here.wait().failures[0].exitcode == -signal.SIGINT


def leave(rank: int) -> None:
    sys.exit(rank + 1)


def test_join_after_a_failure() -> None:
    said = []
    for package in (their_spawn(), our_spawn):
        context = package.start_processes(leave, nprocs=2, join=False, start_method="fork")
        for process in context.processes:
            process.join()
        for _ in range(3):
            try:
                said.append(context.join())
            except Exception as error:  # noqa: BLE001 - the classes are two
                said.append(error.exit_code)  # type: ignore[attr-defined]  # of both packages
    assert sorted(said[:2]) == [1, 2]
    assert said[2] is True
    assert len({*said[3:]}) == 1
    assert said[3] in (1, 2)


def test_an_error_code_where_there_is_no_place_for_it(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError):
        their_errors().ErrorHandler().override_error_code_in_rootcause_data("file", {"message": 3}, 5)
    our_errors.ErrorHandler().override_error_code_in_rootcause_data("file", {"message": 3}, 5)
    assert caplog.records


def test_an_exception_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for package in (their_errors(), our_errors):
        path = tmp_path / package.__name__
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        for error in (ValueError("first"), KeyError("second")):
            try:
                raise error  # noqa: TRY301 - recorded while it is handled
            except Exception as caught:  # noqa: BLE001 - both are raised above
                package.ErrorHandler().record_exception(caught)
        found.append(path.read_text())
    assert ["second" in text for text in found] == [True, True]
    assert ["first" in text for text in found] == [False, True]
