"""What each pair of client and server keeps to, whatever its timers travel through: with real processes."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from phalanx._base import clock
from phalanx._base.procfs import Stat
from phalanx.timer import FileTimerClient, FileTimerServer, LocalTimerClient, LocalTimerServer, TimerRequest
from tests.support import timer_workers
from tests.support.forks import start_fork
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, wait_gone

pytestmark = pytest.mark.each_python

SPAWN = multiprocessing.get_context("spawn")
LONG = 3600.0


class Watched:
    """What a server knows after each of its turns."""

    def __init__(self, where: Any) -> None:
        super().__init__(where, max_interval=60)  # type: ignore[call-arg]  # of the server that this is mixed into
        self.changed = threading.Condition()
        self.held: dict[tuple[int, str], float] = {}
        self.taken: set[tuple[int, str]] = set()  # ever
        self.turns = 0

    def register_timers(self, timer_requests: Iterable[TimerRequest]) -> None:
        super().register_timers(timer_requests)  # type: ignore[misc]  # as above
        late = self.get_expired_timers(math.inf)  # type: ignore[attr-defined]  # as above
        with self.changed:
            self.held = {(pid, one.scope_id): one.expiration_time for pid, them in late.items() for one in them}
            self.taken |= set(self.held)
            self.turns += 1
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT), self.held


class WatchedLocal(Watched, LocalTimerServer):
    pass


class WatchedFile(Watched, FileTimerServer):
    pass


class Pair:
    """A server that runs in this process, its client, and how a request of any process gets to it."""

    def __init__(self, kind: str, where: Any) -> None:
        self.kind = kind
        self.where = where
        self.server: Any = WatchedLocal(where) if kind == "local" else WatchedFile(where)
        self.client: Any = LocalTimerClient(where) if kind == "local" else FileTimerClient(where)

    def put(self, pid: Any, scope: str, after: float = LONG, born: int | None = None) -> None:
        """Send a request of a process, as a program in another language would. Negative: it releases."""
        moment = clock.wall() + after if after >= 0 else -1
        put_request(self.kind, self.where, pid, scope, moment, born)

    def wait_until(self, condition: Callable[[], object]) -> None:
        self.server.wait_until(condition)

    def holds(self, *keys: tuple[int, str]) -> bool:
        return set(self.server.held) == set(keys)


def put_request(kind: str, where: Any, pid: Any, scope: str, moment: float, born: int | None = None) -> None:
    if kind == "local":
        request = TimerRequest(pid, scope, moment)
        request._born = born
        where.put(request)
        return
    line = {"pid": pid, "scope_id": scope, "expiration_time": moment, "signal": 9}
    with open(where, "wb", buffering=0) as pipe:
        pipe.write(json.dumps(line if born is None else line | {"born": born}).encode() + b"\n")


@contextlib.contextmanager
def channel(kind: str, folder: Path) -> Iterator[Any]:
    """What timers of a pair travel through: a queue, or the path of a pipe."""
    if kind == "file":
        yield str(folder / "timers")
        return
    queue: Any = SPAWN.SimpleQueue()
    yield queue
    queue._reader.close()
    queue._writer.close()


@pytest.fixture(params=["local", "file"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with channel(request.param, tmp_path) as where:
        it = Pair(request.param, where)
        with it.server:
            yield it


class Sleeper:
    """A child of ours that does nothing, and exits when it is to."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def exit(self) -> None:
        self._process.communicate()

    def code(self) -> int:
        return self._process.wait(TIMEOUT)


@contextlib.contextmanager
def client_process(work: Callable[[], None]) -> Iterator[int]:
    """A fork that works with the client, and exits when the block is left."""
    gate, latch = os.pipe()

    def wait_after_work() -> None:
        os.close(latch)
        work()
        os.read(gate, 1)

    pid = start_fork(wait_after_work)
    os.close(gate)
    try:
        yield pid
    finally:
        os.close(latch)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0


@pytest.mark.slow
def test_expiry_is_prompt_whatever_the_interval_is(pair: Pair) -> None:
    late = []
    for _ in range(5):
        with Sleeper() as worker:
            moment = clock.now() + 0.02
            pair.put(worker.pid, "scope", 0.02)
            assert not wait_gone([worker.pid])
            late.append(clock.now() - moment)
            assert worker.code() == -signal.SIGKILL
    assert min(late) >= 0
    assert max(late) < TIMEOUT


def test_a_worker_that_exits_takes_its_timers_along(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Sleeper() as worker:
        pair.put(worker.pid, "scope")
        pair.wait_until(lambda: pair.holds((worker.pid, "scope")))
        worker.exit()
        pair.wait_until(pair.holds)
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_worker_has_its_own_scopes(pair: Pair) -> None:
    with Sleeper() as late, Sleeper() as fine:
        for worker, after in ((late, 0.1), (fine, 60)):
            pair.put(worker.pid, "outer")
            pair.put(worker.pid, "inner", after)
        pair.put(fine.pid, "inner", -1)
        pair.put(fine.pid, "never taken", -1)
        assert not wait_gone([late.pid])
        pair.wait_until(lambda: pair.holds((fine.pid, "outer")))
        assert alive(fine.pid)


def test_a_timer_that_is_taken_again_moves(pair: Pair) -> None:
    with Sleeper() as worker:
        pair.put(worker.pid, "scope", 3600)
        pair.put(worker.pid, "scope", 7200)
        pair.wait_until(lambda: pair.server.held.get((worker.pid, "scope"), 0) > clock.now() + 7000)


def test_scopes_of_any_length_and_content_arrive(pair: Pair) -> None:
    scopes = ["", "a\nb", "ä" * 900, "x" * 9999, "x" * 9998, "\U0001f40c" * 5000, "\U0001f40c" * 5001, "\udcff"]

    def work() -> None:
        for scope in scopes:
            pair.client.acquire(scope, time.time() + LONG)

    with client_process(work):
        pair.wait_until(lambda: len(pair.server.held) == len(scopes))
        found = {scope for _, scope in pair.server.held}
        assert {"", "a\nb"} < found
        assert max(map(len, found)) <= 900
    pair.wait_until(pair.holds)


@pytest.mark.parametrize("who", ["init", "everybody", "a process group", "ourselves", "our parent", "a thread"])
def test_who_must_not_be_killed_is_refused(pair: Pair, who: str, caplog: pytest.LogCaptureFixture) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    pid = {
        "init": 1,
        "everybody": 0,
        "a process group": -5,
        "ourselves": os.getpid(),
        "our parent": os.getppid(),
        "a thread": thread.native_id,
    }[who]
    with Sleeper() as worker:
        for _ in range(2):
            pair.put(pid, "scope", 0)
        pair.put(worker.pid, "scope")
        pair.wait_until(lambda: pair.holds((worker.pid, "scope")))
    leave.set()
    thread.join()
    assert caplog.text.count(f"a timer of process {pid!r} is refused") == 1


def test_a_recycled_pid_is_never_signalled(pair: Pair) -> None:
    with Sleeper() as worker, Sleeper() as other:
        stale = Stat(worker.pid).start - 1  # of the process that had this pid before
        pair.put(worker.pid, "kept")
        pair.put(worker.pid, "scope", 0, stale)
        pair.put(worker.pid, "kept", -1, stale)
        pair.put(other.pid, "scope", 0)
        assert not wait_gone([other.pid])
        pair.wait_until(lambda: pair.holds((worker.pid, "kept")))
        assert alive(worker.pid)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3600, -3600])
def test_a_step_of_the_wall_clock_kills_no_one_and_spares_no_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    def work() -> None:  # a client of ours sends the monotonic moment, too
        pair.client.acquire("a fork's", time.time() + LONG)

    with Sleeper() as late, Sleeper() as fine, client_process(work) as fork:
        pair.put(fine.pid, "before", 600)
        pair.put(late.pid, "scope", 0.15)
        keys = (fine.pid, "before"), (late.pid, "scope"), (fork, "a fork's")
        pair.wait_until(lambda: pair.server.taken == set(keys))
        monkeypatch.setattr(clock, "wall", lambda: time.time() + step)
        assert not wait_gone([late.pid])
        pair.wait_until(lambda: pair.holds(keys[0], keys[2]))
        assert alive(fine.pid)


@pytest.mark.long
def test_a_flood_is_taken_without_an_error(pair: Pair) -> None:
    def work() -> None:
        for number in range(2000):
            pair.client.acquire(f"scope {number % 7}", time.time() + LONG)
            pair.client.release(f"scope {number % 7}")
        pair.client.acquire("done", time.time() + LONG)

    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(client_process(work)) for _ in range(8)]
        pair.wait_until(lambda: pair.holds(*((pid, "done") for pid in pids)))


def test_stopping_is_prompt_and_leaves_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.server.stop()
    before = set(os.listdir("/proc/self/fd"))
    with Sleeper() as worker:
        held = set(os.listdir("/proc/self/fd"))
        for _ in range(2):  # it can be started again
            pair.server.start()
            pair.server.start()  # it runs already, and goes on
            pair.put(worker.pid, "scope")
            pair.wait_until(lambda: pair.holds((worker.pid, "scope")))
            start = clock.now()
            pair.server.stop()
            pair.server.stop()
            assert clock.now() - start < TIMEOUT
            assert pair.server.get_expired_timers(math.inf) == {}
            assert set(os.listdir("/proc/self/fd")) == held
            pair.server.held = {}
        assert alive(worker.pid)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.slow
def test_an_idle_server_does_not_wake(pair: Pair) -> None:
    with Sleeper() as worker:
        pair.put(worker.pid, "scope", 2)
        assert not wait_gone([worker.pid])
    # The start; the request; the parts of the wait; what waits in the queue then; the exit; the end. And as many again,
    # should it have been late for some of that: the deadline is put off then.
    assert pair.server.turns <= 20


@pytest.mark.slow
def test_forks_and_threads_of_a_client_have_timers_of_their_own(pair: Pair, ready: Ready) -> None:
    worker = SPAWN.Process(target=timer_workers.fork_and_hang, args=(pair.client, ready.address))
    worker.start()
    assert ready.wait(4) == ["-9", "-9", "-9", "well"]
    worker.join()
    assert worker.exitcode == 0
    worker.close()


@pytest.mark.slow
def test_a_server_without_a_descriptor_is_not_rid_of_who_hangs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it hears of the timer, nor when that expires, but a second later there is one."""
    asked: list[int] = []
    open_it = os.pidfd_open

    def pidfd_open(pid: int) -> int:
        asked.append(pid)
        if len(asked) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_it(pid)

    monkeypatch.setattr("posix.pidfd_open", pidfd_open)  # which `Process` calls
    worker = SPAWN.Process(target=timer_workers.hang, args=(pair.client,))
    worker.start()
    worker.join(TIMEOUT)
    code = worker.exitcode
    worker.kill()
    worker.join()
    worker.close()
    assert code == -signal.SIGKILL
    assert len(set(asked[:3])) == 1


# --- a server that was stopped


@contextlib.contextmanager
def hosted(kind: str, folder: Path, ready: Ready, gate: Gate) -> Iterator[tuple[int, list[Any], Callable[..., None]]]:
    """A process with a server. Gives its pid, two workers of it, and how a request gets there."""
    with channel("file" if kind == "file" else "local", folder) as where:
        host = SPAWN.Process(target=timer_workers.serve, args=(kind, where, ready.address, gate.address))
        host.start()
        assert host.pid is not None
        *workers, up = ready.wait(3)
        assert up == "up"
        names = workers if kind == "named" else [int(worker) for worker in workers]

        def put(worker: Any, after: float) -> None:
            moment = clock.wall() + after if after >= 0 else -1
            put_request(kind.replace("named", "local"), where, worker, "s", moment)

        yield host.pid, names, put
        gate.open()
        host.join()
        assert host.exitcode == 0
        host.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "named"])
def test_a_stopped_server_ends_only_the_late_worker(kind: str, tmp_path: Path, ready: Ready, gate: Gate) -> None:
    """A paused virtual machine: the server and its workers have lost the same time."""
    with hosted(kind, tmp_path, ready, gate) as (pid, (prompt, late), put):
        span = 3.0
        start = clock.now()
        for worker in (prompt, late):
            put(worker, span)
        assert set(ready.wait(2)) == {f"{prompt} True", f"{late} True"}
        timer_workers.wait_asleep(pid)
        assert clock.now() - start < span - 0.2, "too slow a machine for this test"
        os.kill(pid, signal.SIGSTOP)
        timer_workers.let_pass(clock.now() + span + 1.2)
        os.kill(pid, signal.SIGCONT)
        resumed = clock.now()
        put(prompt, -1)
        assert set(ready.wait()) == {f"{prompt} False"}
        if kind == "named":
            assert ready.wait() == [f"{late} reaped"]
        else:
            assert not wait_gone([late])
            assert alive(prompt)
        assert span - 0.5 < clock.now() - resumed


@pytest.mark.slow
def test_a_timer_set_just_before_a_stop_has_its_time(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    """The server waits without end, so its wait has not overrun, and the timer is over when it hears of it."""
    with channel("file", tmp_path) as where:
        host = SPAWN.Process(target=timer_workers.serve_itself, args=(where, ready.address, gate.address))
        host.start()
        child, up = ready.wait(2)
        assert up == "up"
        assert host.pid is not None
        timer_workers.wait_asleep(host.pid)
        timer_workers.stop(host.pid)
        gate.open()
        assert ready.wait() == ["taken"]
        timer_workers.let_pass(clock.now() + 1.5)
        resumed = clock.now()
        os.kill(host.pid, signal.SIGCONT)
        assert not wait_gone([int(child)])
        assert clock.now() - resumed >= 1
        host.join()
        assert host.exitcode == 0
        host.close()
