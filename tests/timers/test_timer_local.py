"""Timers through a `multiprocessing` queue, with real processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx._base import clock
from phalanx._base.procfs import Stat
from phalanx._stacks import collect
from phalanx.multiprocessing import start_processes
from phalanx.timer import LocalTimerClient, LocalTimerServer, TimerRequest
from tests.support import timer_workers
from tests.support.disks import until
from tests.support.forks import code_of_fork
from tests.support.helpers import TIMEOUT, Ready, wait_gone
from tests.timers.test_pairs import Sleeper, WatchedLocal

pytestmark = pytest.mark.each_python

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def mp_queue() -> Iterator[Any]:
    it: Any = SPAWN.Queue()
    yield it
    it.close()
    it.join_thread()
    it._reader.close()
    it._writer.close()


def request(pid: int, scope: str, after: float) -> TimerRequest:
    """As a client in another process makes it."""
    it = TimerRequest(pid, scope, clock.wall() + after)
    it._deadline = clock.now() + after
    it._born = Stat(pid).start
    it._taken = clock.now()
    return it


@pytest.mark.slow
@pytest.mark.usefixtures("own_temporary_folder")
def test_the_example_of_the_originals_documentation(
    mp_queue: Any, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker gives its stack in milliseconds, if it has a processor.
    monkeypatch.setattr(collect.Collection.__init__, "__defaults__", (TIMEOUT,))
    with LocalTimerServer(mp_queue, max_interval=60):
        with start_processes(
            "trainer",
            timer_workers.trainer_func,
            args={0: (mp_queue, ready.address, 0.2)},
            envs={0: {}},
            start_method="spawn",
        ) as group:
            pids = ready.pids(2)
            result = group.wait(TIMEOUT)
        assert result is not None
        assert result.is_failed()
        failure = result.failures[0]
        assert failure.exitcode == -signal.SIGKILL
        assert "forward pass" in failure.message
        assert "in trainer_func" in failure.traceback
        assert not wait_gone(pids)


@pytest.mark.parametrize("pid", [1 << 30, "text"])
def test_what_is_no_process_is_refused(mp_queue: Any, pid: Any, caplog: pytest.LogCaptureFixture) -> None:
    with WatchedLocal(mp_queue) as server, Sleeper() as worker:
        for _ in range(2):
            mp_queue.put(TimerRequest(pid, "scope", clock.wall() - 1))
        mp_queue.put(request(worker.pid, "scope", 60))
        server.wait_until(lambda: server.held)
    assert caplog.text.count(f"a timer of process {pid!r} is refused") == 1


def test_a_client_sends_the_monotonic_deadline(mp_queue: Any) -> None:
    client = LocalTimerClient(mp_queue)
    before = clock.now()
    client.acquire("scope", clock.wall() + 5)
    after = clock.now()
    client.release("scope")
    client.acquire("scope", -1)
    first, *releases = [mp_queue.get(timeout=TIMEOUT) for _ in range(3)]
    assert first._deadline is not None
    assert before - 0.1 < first._deadline - 5 < after + 0.1
    assert first._born == Stat(os.getpid()).start
    assert releases == [TimerRequest(os.getpid(), "scope", -1)] * 2


def test_a_full_queue_is_waited_for_with_a_bound(mp_queue: Any) -> None:
    client = LocalTimerClient(mp_queue, patience=0.05)

    def fill() -> None:
        for _ in range(100_000):
            client.release("scope")

    with pytest.raises(TimeoutError, match=r"nothing out of its queue, which is full, for 0\.05 s: was it started"):
        fill()
    held = mp_queue.qsize()
    with WatchedLocal(mp_queue):
        until(lambda: not mp_queue.qsize())
        client.release("scope")  # there is room again
    assert held > 100


def test_an_unread_queue_does_not_kill_by_sigpipe() -> None:
    mp_queue: Any = SPAWN.SimpleQueue()
    mp_queue._reader.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with pytest.raises(BrokenPipeError):
            LocalTimerClient(mp_queue).acquire("s", time.time() + 60)
    finally:
        signal.signal(signal.SIGPIPE, before)
        mp_queue._writer.close()


@pytest.mark.slow
def test_a_bounded_queue_keeps_count() -> None:
    bounded: Any = SPAWN.Queue(3)
    client = LocalTimerClient(bounded, patience=0.05)
    for _ in range(3):
        client.release("scope")
    with pytest.raises(TimeoutError):
        client.release("scope")
    with WatchedLocal(bounded):
        until(lambda: not bounded.qsize())
    client.release("scope")
    assert bounded.get(timeout=TIMEOUT) == TimerRequest(os.getpid(), "scope", -1)  # by the queue's own means
    bounded.close()
    bounded._writer.close()


def test_half_a_message_does_not_stop_the_server(mp_queue: Any, caplog: pytest.LogCaptureFixture) -> None:
    with WatchedLocal(mp_queue), Sleeper() as worker:
        os.write(mp_queue._writer.fileno(), struct.pack("!i", 1 << 30) + b"half a mes")
        until(lambda: "its contents are lost" in caplog.text)
        os.write(mp_queue._writer.fileno(), struct.pack("!i", 3) + b"abc")
        until(lambda: "cannot be unpickled" in caplog.text)
        mp_queue.put("not a request")
        until(lambda: "not a timer request" in caplog.text)
        mp_queue.put(request(worker.pid, "scope", 0))
        assert not wait_gone([worker.pid])


@pytest.mark.parametrize("kind", ["SimpleQueue", "JoinableQueue"])
def test_other_queues_of_multiprocessing(kind: str) -> None:
    it: Any = getattr(SPAWN, kind)()
    with WatchedLocal(it) as server, Sleeper() as worker:
        LocalTimerClient(it).acquire("of this process, which is refused", clock.wall())
        it.put(request(worker.pid, "scope", 0.05))
        assert not wait_gone([worker.pid])
        until(lambda: not server.get_expired_timers(math.inf))
    it._reader.close()
    it._writer.close()
    if kind == "JoinableQueue":
        it.close()
        it.join_thread()


def test_queues_without_a_pipe_work_and_are_woken_too() -> None:
    it: Any = queue.Queue()
    client = LocalTimerClient(it)
    start = clock.now()
    with LocalTimerServer(it, max_interval=60), Sleeper() as worker:
        client.release("scope")
        it.put(request(worker.pid, "scope", 0.05))
        assert not wait_gone([worker.pid])
    assert clock.now() - start < TIMEOUT


def test_a_client_travels_to_a_process(mp_queue: Any) -> None:
    client = pickle.loads(pickle.dumps(LocalTimerClient(None, patience=3)))
    assert client._patience == 3
    with pytest.raises(RuntimeError, match="should only be shared between processes through inheritance"):
        pickle.dumps(LocalTimerClient(mp_queue))


def test_who_decides_whom_to_end_gets_every_request(mp_queue: Any) -> None:
    """Keyed by rank or by name: no number is taken for a pid, though there is a process that has it."""

    class Ranked(WatchedLocal):
        def _reap_worker(self, worker_id: Any) -> bool:
            reaped.put(worker_id)
            return True

    reaped: queue.Queue[Any] = queue.Queue()
    with Ranked(mp_queue) as server, Sleeper() as chance:
        ids = ["trainer/0", ("node", 3), 0, 1, -1, os.getpid(), chance.pid]
        for each in ids:
            mp_queue.put(TimerRequest(each, "step", clock.wall() + 60))
        server.wait_until(lambda: len(server.held) == len(ids))
        chance.exit()
        mp_queue.put(TimerRequest(1 << 40, "step", clock.wall() - 1))
        assert reaped.get(timeout=TIMEOUT) == 1 << 40
        until(lambda: len(server.get_expired_timers(math.inf)) == len(ids))
        for each in ids:
            mp_queue.put(TimerRequest(each, "step", clock.wall() - 1))
        assert {reaped.get(timeout=TIMEOUT) for _ in ids} == set(ids)
        until(lambda: not server.get_expired_timers(math.inf))


def test_who_decides_and_lets_the_original_end_it(mp_queue: Any) -> None:
    class Counting(WatchedLocal):
        def _reap_worker(self, worker_id: Any) -> bool:
            reaped.append(worker_id)
            return super()._reap_worker(worker_id)

    reaped: list[Any] = []
    with Counting(mp_queue) as server, Sleeper() as foreign, Sleeper() as ours, Sleeper() as left:
        mp_queue.put(request(left.pid, "scope", 60))
        server.wait_until(lambda: server.held)
        left.exit()
        server.wait_until(lambda: not server.held)  # a process that asked for itself, and has exited
        mp_queue.put(TimerRequest(foreign.pid, "scope", clock.wall()))
        mp_queue.put(request(ours.pid, "scope", 0))
        assert not wait_gone([foreign.pid, ours.pid])
        until(lambda: not server.get_expired_timers(math.inf))
        assert sorted(reaped) == sorted([foreign.pid, ours.pid])


def test_a_server_in_a_fork_is_nobodys(mp_queue: Any) -> None:
    """To stop it there hangs at no lock, and takes nothing out of what the parent's waits for."""
    with WatchedLocal(mp_queue) as server, Sleeper() as worker:
        mp_queue.put(request(worker.pid, "scope", 60))
        server.wait_until(lambda: server.held)
        with server._requests._gate:

            def stop() -> bool:
                signal.alarm(20)
                server.stop()
                server.stop()
                return not server.get_expired_timers(math.inf)

            assert code_of_fork(stop) == 0
        worker.exit()
        server.wait_until(lambda: not server.held)


def test_the_worker_pays_for_the_client_alone() -> None:
    code = (
        "import sys; from phalanx.timer import LocalTimerClient, TimerRequest; "
        "print(*sorted(name for name in sys.modules if name.startswith(('logging', 'phalanx.timer.'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["phalanx.timer._requests"]
