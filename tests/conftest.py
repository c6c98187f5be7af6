"""Fixtures for all tests, and the leak checks for all tests and doctests."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from phalanx._run import master_port
from tests.support import leaks
from tests.support.command import Place, Shell
from tests.support.disks import Disk, mounted, small
from tests.support.helpers import Gate, Ready

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# How long an example takes, or its making, is the machine's business: it may be busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

_TOGETHER = ("tests/faces/test_programs.py",)
"""Files whose tests look at what one run has found."""

_WRITES_NO_BYTECODE = pytest.StashKey[bool]()

os.environ.pop("VIRTUAL_ENV", None)  # of whoever runs the tests: phalanx run would tell of it
# NumPy's threads turn in a loop for a while when it is imported, which doubles what an import takes of the processors.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if len(os.fsencode(tempfile.gettempdir())) > 20:  # a socket's path has 107 bytes at most, see unix(7)
    os.environ["TMPDIR"] = "/tmp"
    tempfile.tempdir = None

collect_ignore = ["programs", "program_runs.py"]  # scripts: importing one has effects, which is what they are about


def pytest_configure(config: pytest.Config) -> None:
    """Register the leak checks as a plugin: fixtures of a conftest would not reach the doctests under src.

    Signals that whoever started us ignores (nohup, a shell's ``&``) are as usual: every process of the tests would
    inherit that, and many are signalled. Colours and sizes that somebody wishes for a terminal (FORCE_COLOR, COLUMNS)
    are not wished for what the tests look at; those of colours and sizes set them.
    """
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        os.environ.pop(name, None)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    config.pluginmanager.register(leaks, "leaks")
    config.stash[_WRITES_NO_BYTECODE] = sys.dont_write_bytecode
    sys.dont_write_bytecode = False  # what pytest makes of each assert takes seconds, and is kept for the next run


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let PYTHONDONTWRITEBYTECODE have its effect again: what tests import is not to be kept.

    What pytest has collected stays until the end: no collection of garbage is to go through it, here or in a fork.
    """
    sys.dont_write_bytecode = session.config.stash[_WRITES_NO_BYTECODE]
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``torch`` where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        skip = pytest.mark.skip(reason="torch is not installed in this environment")
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all cases of a test, and all tests of a file in which they share what takes long."""
    from xdist.scheduler import LoadScopeScheduling

    assert all((config.rootpath / file).exists() for file in _TOGETHER)

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in _TOGETHER else nodeid.partition("[")[0]

    return Scheduling(config, log)


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Ready]:
    """Where workers tell the test that they have come so far."""
    with Ready(tmp_path / "ready") as it:
        yield it


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Where workers wait until the test lets them go on."""
    with Gate(tmp_path / "gate") as it:
        yield it


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else is given."""
    with master_port.reserve() as reserved:
        yield reserved.number


@pytest.fixture
def second_port() -> Iterator[int]:
    """Another one."""
    with master_port.reserve() as reserved:
        yield reserved.number


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A new, empty folder."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk that can be made to answer no write."""
    with mounted(tmp_path) as it:
        yield it


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a file system of 64 KiB."""
    with small(tmp_path) as folder:
        yield folder


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let temporary files be the test's own: the error files of a group that failed stay, which is no leak."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def own_tmpdir(own_temporary_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - made by then
    """The same, also for the processes of the test."""
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())


@pytest.fixture(autouse=True)
def no_gc_callbacks() -> None:
    """Remove Hypothesis', which times collections of garbage.

    What a signal raises in it, or a stack that is full, is lost, and told of by pytest.
    """
    gc.callbacks.clear()


@pytest.fixture
def shell(place: Place) -> Iterator[Shell]:
    """A shell with job control, on a terminal."""
    with Shell(place) as shell:
        yield shell


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Where `phalanx run` is tried."""
    folder = tmp_path / "place"
    folder.mkdir()
    return Place(folder)
