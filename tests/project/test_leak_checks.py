"""The leak checks see each kind of leak, clean up after it, and are quiet about what is none."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.helpers import Ready, alive, wait_gone

_SET_CHILD_SUBREAPER = 36  # prctl(2)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests leak on purpose: they need not wait for the end of it."""
    monkeypatch.setattr(leaks, "PATIENCE", 0.1)


def found(mark: str, leak: Callable[[], object]) -> str:
    """What the check says about a leak."""
    said: list[str] = []
    with leaks.unchanged(mark, said.append):
        leak()
    return "\n".join(said)


def test_nothing_is_said_about_nothing(leak_mark: str) -> None:
    assert found(leak_mark, lambda: None) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_child_is_named_and_killed(leak_mark: str) -> None:
    children: list[int] = []
    text = found(leak_mark, lambda: children.append(subprocess.Popen(["sleep", "600"]).pid))
    assert f"child {children[0]} is left: sleep 600" in text
    assert not alive(children[0])


@pytest.mark.slow
def test_a_zombie_is_a_child(leak_mark: str) -> None:
    def leak() -> None:
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        wait_gone([pid])

    assert "is left: (a zombie)" in found(leak_mark, leak)


@pytest.mark.slow
def test_an_orphan_is_named_and_killed(leak_mark: str, ready: Ready) -> None:
    orphan = f"import os, signal; os.setsid(); {ready.python()}; signal.pause()"

    def leak() -> None:
        start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
        subprocess.run([sys.executable, "-c", start], check=True)
        pids.extend(ready.pids())

    pids: list[int] = []
    assert f"survivor {pids[0] if pids else ''}" in found(leak_mark, leak)
    assert wait_gone(pids) == set()


@pytest.mark.slow
def test_a_descriptor_is_named_with_what_it_is(leak_mark: str, tmp_path: Path) -> None:
    fds: list[int] = []
    text = found(leak_mark, lambda: fds.append(os.open(tmp_path, os.O_RDONLY)))
    os.close(fds[0])
    assert f"descriptor {fds[0]} is left open: {tmp_path}" in text


@pytest.mark.slow
def test_a_thread_is_named(leak_mark: str) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    text = found(leak_mark, thread.start)
    end.set()
    thread.join()
    assert "thread 'forgotten' is left running" in text


@pytest.mark.slow
def test_a_thread_that_ends_soon_is_no_leak(leak_mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 20.0)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(0.05,))
    assert found(leak_mark, thread.start) == ""


def test_a_handler_a_mask_and_a_flag_are_named(leak_mark: str) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    prctl = ctypes.CDLL(None).prctl

    def leak() -> None:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    text = found(leak_mark, leak)
    signal.signal(signal.SIGUSR1, before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert "signal handler: SIGUSR1 was" in text
    assert "signal mask was" in text
    assert "child subreaper was 0, is 1" in text


@pytest.mark.slow
def test_environment_folder_and_temporary_files_are_named(leak_mark: str, tmp_path: Path) -> None:
    def leak() -> None:
        os.environ["FORGOTTEN"] = "1"
        os.chdir(tmp_path)
        paths.append(tempfile.mkdtemp(prefix="phalanx-"))

    paths: list[str] = []
    folder = os.getcwd()
    text = found(leak_mark, leak)
    os.chdir(folder)
    del os.environ["FORGOTTEN"]
    os.rmdir(paths[0])
    assert "os.environ: FORGOTTEN is new: 1" in text
    assert f"working directory was {folder}, is {tmp_path}" in text
    assert "temporary file is left: phalanx-" in text


def test_the_resource_tracker_is_no_leak(leak_mark: str) -> None:
    def use() -> None:
        lock = multiprocessing.get_context("spawn").Lock()
        with contextlib.closing(multiprocessing.get_context("spawn").SimpleQueue()), lock:
            pass

    assert found(leak_mark, use) == ""
