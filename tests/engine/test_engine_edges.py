"""The edges of the engine: a signal at an awkward moment, waits without end, much of anything."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from phalanx._base import interrupts
from phalanx._base.loop import Loop
from phalanx._base.threads import Latch
from phalanx._engine.host_signals import acquire, release
from phalanx._engine.mirror import Mirror
from phalanx.multiprocessing import DefaultLogsSpecs, KeeperLostError, SignalException, start_processes
from tests.support import workers
from tests.support.helpers import TIMEOUT, descendants
from tests.support.insides import supervisor_of
from tests.support.waits import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from phalanx.multiprocessing import LogsDest, PContext
    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

METHODS = ("spawn", "forkserver", "fork")


def test_a_latch_forgets_who_has_given_up_waiting() -> None:
    latch = Latch()
    for _ in range(100):
        assert not latch.wait(0.0001)
    assert not latch._waiters


@pytest.mark.parametrize("seconds", [3e6, 1e10, math.inf])
def test_a_deadline_beyond_what_epoll_can_count(seconds: float) -> None:
    loop = Loop()
    try:
        loop.after(seconds, loop.stop)
        threading.Timer(0.01, loop.call, [loop.stop]).start()
        loop.run()
    finally:
        loop.close()


def test_a_grace_without_end(ready: Ready, gate: Gate) -> None:
    with start_processes("g", workers.announce, {0: (ready.address, gate.address)}, grace=math.inf) as group:
        ready.wait()
        group.close(timeout=math.inf)
    assert group.wait(0) is not None


IN_A_REMOVED_FOLDER = """
import os, sys
if __name__ == "__main__":
    os.mkdir("gone"); os.chdir("gone"); os.rmdir(os.getcwd())
    sys.path.insert(0, "")
    from phalanx.multiprocessing import start_processes
    with start_processes("g", len, ("abc",), nprocs=1, start_method=sys.argv[1]) as group:
        print(group.wait().return_values)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_working_directory_that_has_been_removed(method: str, tmp_path: Path) -> None:
    """In a process of its own: where multiprocessing is in use, its import fails there under Python 3.13.0, as does
    `python -c "import socket"` in any removed folder.
    """
    done = workers.run_script(tmp_path, IN_A_REMOVED_FOLDER, method, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("{0: 3}\n", "")


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_sigterm_right_after_the_start_is_not_lost(method: str) -> None:
    for _ in range(8):
        group = start_processes("g", time.sleep, (600,), nprocs=2, start_method=method)
        before = time.monotonic()
        group.close(timeout=20)
        assert time.monotonic() - before < 10
        assert {outcome.exitcode for outcome in group.wait().outcomes.values()} == {-signal.SIGTERM}


def test_a_start_that_fails_waits_for_no_copy_of_its_socket(logs: Path) -> None:
    """A fork of the host, taken at the wrong moment, holds the launcher's end of the socket."""
    kept: list[int] = []

    class Forking(DefaultLogsSpecs):
        def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:  # noqa: ARG002 - it fails
            out, into = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(into)
                os.read(out, 1)
                os._exit(0)
            os.close(out)
            kept.extend((pid, into))
            raise OSError("no")

    before = time.monotonic()
    with pytest.raises(OSError, match="no"):
        start_processes("g", "true", nprocs=1, logs_specs=Forking(str(logs)))
    took = time.monotonic() - before
    os.close(kept[1])
    os.waitpid(kept[0], 0)
    assert took < TIMEOUT / 2


def test_a_held_signal_raises_at_the_end() -> None:
    owner = object()
    done = False
    acquire(owner)
    try:
        with pytest.raises(SignalException) as caught, interrupts.deferred():  # noqa: PT012 - the order is the point
            os.kill(os.getpid(), signal.SIGTERM)
            done = True
    finally:
        release(owner)
    assert done
    assert caught.value.sigval is signal.SIGTERM


STARTING = """
import os, signal, threading
from phalanx._base import stderr
from phalanx.multiprocessing import SignalException
from phalanx._engine.host_signals import acquire

name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
start = getattr(threading, name)

def start_and_interrupt(*arguments, **options):
    result = start(*arguments, **options)
    os.kill(os.getpid(), signal.SIGTERM)  # its handler runs before this returns to Thread.start
    return result

acquire(object())
setattr(threading, name, start_and_interrupt)
try:
    stderr.mention("said all the same")
except SignalException as error:
    print(error.sigval.name)
setattr(threading, name, start)
stderr.tell("and so is this")
"""


def test_a_signal_while_a_thread_of_ours_starts(tmp_path: Path) -> None:
    """The exception comes when the thread runs: before, it would be one that nobody starts any more."""
    done = workers.run_script(tmp_path, STARTING)
    assert (done.stdout, done.stderr) == ("SIGTERM\n", "said all the same\nand so is this\n")
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* was dropped, and is killed:ResourceWarning")
# What a signal raises in the callback of a weak reference is lost; the next wait raises it again.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["binary", "fork"])
def test_a_signal_at_any_moment_leaves_nothing(how: str) -> None:
    """Of the start or the close: no descriptor, thread, child or handler is left (the leak checks see to that, too)."""

    def start() -> PContext:
        if how == "binary":
            return start_processes("g", "sleep", ("600",), nprocs=1)
        return start_processes("g", time.sleep, (600,), nprocs=1, start_method="fork")

    start().close()
    before = time.monotonic()
    start().close()
    span = time.monotonic() - before

    def late(_number: int, _frame: object) -> None:
        """Before the group is open, or after: as if nothing were."""

    moments = random.Random(7)  # noqa: S311 - no secret
    old = signal.signal(signal.SIGTERM, late)
    old_alarm = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        descriptors = set(os.listdir("/proc/self/fd"))
        children = descendants(os.getpid())  # multiprocessing's resource tracker, of tests before this one
        for _ in range(40):
            group = None
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, span))
            try:
                group = start()
                group.close(timeout=5)
            except SignalException:
                if group is not None:
                    group.close(timeout=5)
            for thread in threading.enumerate():  # raised on the way out of the start, it took the group with it
                if thread is not threading.main_thread():
                    thread.join(TIMEOUT)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert signal.getsignal(signal.SIGTERM) is late
            assert set(os.listdir("/proc/self/fd")) == descriptors
            assert descendants(os.getpid()) == children
            assert threading.active_count() == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_alarm)
        signal.signal(signal.SIGTERM, old)


def test_a_dropped_group_is_killed_and_restores_the_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    group = start_processes("g", "/bin/sleep", ("600",), nprocs=1)
    supervisor = supervisor_of(group)
    kept = [group]
    del group
    with pytest.warns(ResourceWarning, match="'g', running, 1 rank> was dropped, and is killed; close it"):
        kept.clear()
    assert signal.getsignal(signal.SIGTERM) == before
    supervisor.join()


@pytest.mark.slow
def test_a_keeper_that_never_gets_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    shorten(monkeypatch, START_WAIT=0.05, ANSWER_WAIT=0.05, KILL_WAIT=0.05)
    with pytest.raises(KeeperLostError, match="answered no more"):
        start_processes("g", "/bin/true", (), nprocs=1)


@pytest.mark.slow
def test_folders_for_evidence_are_made_once_workers_run(ready: Ready, gate: Gate) -> None:
    """By the group's thread, when it has nothing else to do: they are on nobody's way."""
    args = dict.fromkeys(range(4), (ready.address, gate.address))
    with start_processes("g", workers.announce, args, start_method="fork") as group:
        ready.wait(4)
        made = Latch()
        loop = supervisor_of(group)._loop
        loop.call(lambda: loop.when_idle(made.open))  # after those that wait already
        assert made.wait(20)
        assert all(os.path.isdir(os.path.dirname(path)) for path in group.logs.error_files.values())
        gate.open(4)
        assert not group.wait().is_failed()


def test_workers_can_be_counted_while_others_start() -> None:
    """As a signal handler does that passes a signal on, while the group's thread hears of workers."""
    mirror, over = Mirror(), threading.Event()

    def start() -> None:
        for rank in itertools.count():
            if over.is_set():
                return
            mirror.started([(rank, rank + 1)])
            if rank % 2000 == 0:
                mirror.workers.clear()

    thread, before = threading.Thread(target=start), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(50000):
            assert len(mirror.alive) <= 2000
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()
