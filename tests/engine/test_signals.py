"""Signals to a host while a group is open, and after it: the host's handlers, its forks, and swallowed exceptions."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from phalanx._base import linux
from phalanx._engine import host_signals
from phalanx._engine.host_signals import acquire, release
from phalanx.multiprocessing import PContext, SignalException, start_processes
from tests.support import workers
from tests.support.helpers import TIMEOUT, let_a_request_pass, meanwhile, wait_gone
from tests.support.insides import supervisor_of
from tests.support.waits import when_we_wait
from tests.support.workers import run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.helpers import Gate, Ready

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder")]


def end_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- forks of the host


def test_the_fork_of_a_thread_has_the_handlers_that_the_host_had() -> None:
    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
        assert end_of(pid) == 0

    with start_processes("g", "sleep", ("600",), nprocs=1), meanwhile(fork):
        pass


def has_default_handlers() -> bool:
    names = ("SIGTERM", "SIGHUP", "SIGQUIT")
    return all(signal.getsignal(getattr(signal, name)) is signal.SIG_DFL for name in names)


def test_a_pool_that_is_made_while_a_group_is_open() -> None:
    """SIGTERM ends a fork: a retry loop would swallow an exception."""
    with start_processes("g", "sleep", ("600",), nprocs=1):
        pool = multiprocessing.get_context("fork").Pool(1)
        try:
            assert pool.apply(has_default_handlers)
        finally:
            pool.terminate()  # by SIGTERM
            pool.join()


def test_a_group_is_not_a_forks_to_close_nor_to_wait_for() -> None:
    with start_processes("g", "sleep", ("600",), nprocs=1) as group:
        pid = os.fork()
        if pid == 0:
            group.close()
            try:
                group.wait()
            except RuntimeError:
                pass
            else:
                os._exit(2)
            os._exit(0 if has_default_handlers() else 1)
        assert end_of(pid) == 0
        assert group.is_open
        assert group.wait(0.05) is None


# --- twice


def test_the_same_request_cuts_nothing_short(ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` sends SIGTERM, and a closing terminal SIGHUP: twice within a moment."""
    monkeypatch.setattr(host_signals, "_APART", 3600.0)  # however busy the machine is
    code = f"""
import signal, sys, time
def save(*_):
    {ready.python("'saves'")}
    {gate.python()}
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
{ready.python("'up'")}
time.sleep(600)
"""

    def again() -> None:
        assert ready.wait() == ["saves"]
        os.kill(os.getpid(), signal.SIGHUP)
        gate.open()

    with start_processes("g", sys.executable, ("-c", code), nprocs=1) as group:
        assert ready.wait() == ["up"]
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGTERM)
        with meanwhile(again):
            group.close()
        result = group.wait()
    assert result is not None
    assert result.outcomes[0].exitcode == 7


def test_a_further_request_is_one() -> None:
    with start_processes("g", "sleep", ("600",), nprocs=1):
        for _ in range(2):
            with pytest.raises(SignalException):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            let_a_request_pass()


# --- swallowed


def swallow_sigterm() -> None:
    """As a library does: logging's own handlers, say."""
    with contextlib.suppress(Exception):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_swallowed_exception_is_raised_by_the_next_wait_once() -> None:
    """Of the main thread, or by its next start; not if it came out of a wait, or was handled by a close."""
    with start_processes("g", "sleep", ("600",), nprocs=1) as group:
        swallow_sigterm()
        with meanwhile(group.wait, 0.05):
            pass
        with pytest.raises(SignalException) as caught:
            group.wait(TIMEOUT)
        assert caught.value.sigval is signal.SIGTERM
        assert group.wait(0) is None
        let_a_request_pass()
        killing = when_we_wait(os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(SignalException):
            group.wait(TIMEOUT)
        killing.join()
        assert group.wait(0.05) is None
        let_a_request_pass()
        swallow_sigterm()
        with pytest.raises(SignalException):
            start_processes("h", "sleep", ("600",), nprocs=1)
    with pytest.raises(SignalException), start_processes("g", "sleep", ("600",), nprocs=1):
        os.kill(os.getpid(), signal.SIGTERM)
    with start_processes("g", "true", (), nprocs=1) as group:
        assert group.wait(TIMEOUT).succeeded  # type: ignore[union-attr]  # it ends at once


def test_a_signal_amid_the_reading_of_a_value_fails_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_worker: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with start_processes("other", "sleep", ("600",), nprocs=1), start_processes("g", "true", (), nprocs=1) as group:
        monkeypatch.setattr(group, "_value", read)
        with pytest.raises(SignalException):
            group.wait(TIMEOUT)


def test_one_in_the_midst_of_the_tidying_leaves_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    release_ = host_signals.release

    def interrupted(owner: object) -> None:
        monkeypatch.setattr(host_signals, "release", release_)
        os.kill(os.getpid(), signal.SIGTERM)
        release_(owner)

    group = start_processes("g", "sleep", ("600",), nprocs=1)
    monkeypatch.setattr(host_signals, "release", interrupted)
    with pytest.raises(SignalException):
        group.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert not group.is_open


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_amid_the_dropping_of_a_group_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised there is lost."""
    monkeypatch.setattr(PContext, "__repr__", lambda _self: os.kill(os.getpid(), signal.SIGTERM))
    group = start_processes("g", "sleep", ("600",), nprocs=1)
    [pid] = group.pids().values()
    done = supervisor_of(group).done
    del group
    gc.collect()
    assert done.wait(TIMEOUT)
    assert wait_gone([pid]) == set()


# --- handlers that come and go


SWAPPED = """
import os, signal, sys
from phalanx.multiprocessing import start_processes

how = sys.argv[1]
with start_processes("g", "true", (), nprocs=1) as group:
    ours = signal.getsignal(signal.SIGTERM)
    if how == "chained":
        signal.signal(signal.SIGTERM, lambda *arguments: ours(*arguments))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    group.wait()
if how != "chained":
    signal.signal(signal.SIGTERM, ours)
if how == "put back twice":
    with start_processes("g", "true", (), nprocs=1) as group:
        group.wait()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["put back", "put back twice", "chained"])
def test_a_handler_of_ours_that_a_host_keeps_passes_on(how: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, SWAPPED, how)
    assert done.returncode == -signal.SIGTERM, done


def test_a_fork_amid_a_start_has_its_own_interrupt() -> None:
    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(3)
            os._exit(0)
        assert end_of(pid) == 3

    with host_signals.postpone(), meanwhile(fork):
        pass


# --- handlers that C code has set


def test_a_handler_of_c_code_is_restored(tmp_path: Path) -> None:
    """SIGQUIT shows the stacks, before a group and after it, and does not kill the host."""
    with open(tmp_path / "stacks", "w+") as file:
        before = linux.handler_of(linux.sigaction(signal.SIGQUIT))
        faulthandler.register(signal.SIGQUIT, file)
        try:
            handler = linux.handler_of(linux.sigaction(signal.SIGQUIT))
            with start_processes("g", "true", (), nprocs=1) as group:
                group.wait()
            assert linux.handler_of(linux.sigaction(signal.SIGQUIT)) == handler
            os.kill(os.getpid(), signal.SIGQUIT)
            file.seek(0)
            assert "test_a_handler_of_c_code_is_restored" in file.read()
        finally:
            faulthandler.unregister(signal.SIGQUIT)
    assert linux.handler_of(linux.sigaction(signal.SIGQUIT)) == before


@pytest.fixture
def ignored_in_c() -> Iterator[Callable[[], None]]:
    """Ignores SIGHUP as a library does, of which Python knows nothing."""
    before = linux.sigaction(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ignored = linux.sigaction(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield lambda: linux.set_sigaction(signal.SIGHUP, ignored)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    linux.set_sigaction(signal.SIGHUP, before)


def test_what_c_code_ignores_stays_ignored(ignored_in_c: Callable[[], None]) -> None:
    ignored_in_c()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    with start_processes("g", "sleep", ("600",), nprocs=1) as group:
        os.kill(os.getpid(), signal.SIGHUP)
        assert group.wait(0.05) is None
    os.kill(os.getpid(), signal.SIGHUP)
    assert linux.handler_of(linux.sigaction(signal.SIGHUP)) == signal.SIG_IGN


def test_a_handler_that_c_code_sets_meanwhile_stays(ignored_in_c: Callable[[], None]) -> None:
    owner = object()
    acquire(owner)
    ignored_in_c()
    release(owner)
    assert linux.handler_of(linux.sigaction(signal.SIGHUP)) == signal.SIG_IGN


# --- the umask


UMASK = """
import os, sys, threading
from phalanx.multiprocessing import start_processes, warm

folder, times, seen, over = sys.argv[1], int(sys.argv[2]), set(), threading.Event()

def look():
    number = 0
    while not over.is_set():
        number += 1
        path = f"{folder}/{number % 50}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        seen.add(oct(os.stat(path).st_mode & 0o777))
        os.unlink(path)

if __name__ == "__main__":
    os.umask(0o077)
    thread = threading.Thread(target=look)
    thread.start()
    with warm(preload=["json"]):
        for _ in range(times):
            with start_processes("g", os.getpid, nprocs=1, start_method="forkserver") as group:
                group.wait()
    over.set()
    thread.join()
    print(seen)
"""


@pytest.mark.long
@pytest.mark.parametrize("times", [pytest.param(5, marks=pytest.mark.each_python), 50])
def test_a_warm_start_changes_the_umask_for_nobody(tmp_path: Path, times: int) -> None:
    """Not for a moment: another thread's file would be writable for all."""
    folder = tmp_path / "files"
    folder.mkdir()
    began = time.monotonic()
    done = workers.run_script(tmp_path, UMASK, str(folder), str(times), timeout=TIMEOUT * 3)
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)  # noqa: T201 - shown when it fails
    assert (done.stdout, done.stderr) == ("{'0o600'}\n", "")
