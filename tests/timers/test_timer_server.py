"""The contract for timer pairs of one's own: what the server's thread does with a queue and a server of anybody's."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import queue
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx._base import clock
from phalanx.timer import (
    RequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
    expires,
)
from phalanx.timer._server import Agenda, Watchdog, received
from tests.support.helpers import TIMEOUT

pytestmark = pytest.mark.each_python

ROOT = Path(__file__).resolve().parents[2]
SPAWN = multiprocessing.get_context("spawn")
EXAMPLE = ROOT / "examples" / "datagram_timer.py"


class ThreadQueue(RequestQueue):
    """As people write it: over `queue.Queue`, with no way to wake it."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Any] = queue.Queue()
        self.timeouts: list[float] = []

    def size(self) -> int:
        return self.requests.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        self.timeouts.append(timeout)
        found: list[TimerRequest] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < size:
                found += [self.requests.get(timeout > 0, timeout)]
        return found


class ListServer(TimerServer):
    """As people port it: the methods have the original's signatures, and compare numbers."""

    def __init__(self, max_interval: float = 0.2, daemon: bool = True) -> None:
        self.inbox = ThreadQueue()
        super().__init__(self.inbox, max_interval, daemon)
        self._timers: dict[tuple[Any, str], TimerRequest] = {}
        self.looked = 0.0
        self.registered: queue.Queue[TimerRequest] = queue.Queue()
        self.reaped: queue.Queue[tuple[Any, float]] = queue.Queue()
        self.cleared: queue.Queue[set[Any]] = queue.Queue()
        self.answer: Callable[[Any], bool] = lambda _worker: True

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            key = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request
            self.registered.put(request)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for key in list(self._timers):
            if key[0] in worker_ids:
                del self._timers[key]
        self.cleared.put(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        expired: dict[Any, list[TimerRequest]] = {}
        self.looked = deadline
        for request in self._timers.values():
            if request.expiration_time <= deadline:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _reap_worker(self, worker_id: Any) -> bool:
        self.reaped.put((worker_id, clock.now()))
        return self.answer(worker_id)

    def ask(self, worker: Any, scope: str, after: float) -> float:
        """Put a request as a foreign client does: Unix time alone. Returns the deadline on the monotonic clock."""
        deadline = clock.now() + after
        self.inbox.requests.put(TimerRequest(worker, scope, clock.wall() + after))
        return deadline


@pytest.fixture
def server() -> Iterator[ListServer]:
    with ListServer() as it:
        yield it


def test_a_request_is_a_value() -> None:
    request = TimerRequest("worker", "scope", 5.0)
    request._deadline = 3.0
    assert request == TimerRequest("worker", "scope", 5.0)
    assert hash(request) == hash(TimerRequest("worker", "scope", 5.0))
    assert request != TimerRequest("worker", "scope", -1)
    assert request != ("worker", "scope", 5.0)
    assert repr(request) == "TimerRequest(worker_id='worker', scope_id='scope', expiration_time=5.0)"
    assert not hasattr(request, "__dict__")
    copy = pickle.loads(pickle.dumps(request))
    assert copy == request
    assert copy._deadline == 3.0


@pytest.mark.parametrize("interval", [0, -1, math.nan])
def test_an_interval_that_is_none_is_refused(interval: float) -> None:
    with pytest.raises(ValueError, match="max_interval: expected more than 0 seconds"):
        ListServer(interval)


def test_requests_become_monotonic_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    monkeypatch.setattr(clock, "wall", lambda: 5e8)
    foreign = received(TimerRequest(1, "scope", 5e8 + 7))
    assert foreign is not None
    assert foreign.expiration_time == 1007
    own = TimerRequest(1, "scope", 5e8 + 3600)
    own._deadline = 1003.0
    converted = received(own)
    assert converted is not None
    assert converted.expiration_time == 1003
    assert own.expiration_time == 5e8 + 3600  # the caller's is not changed
    long_over = received(TimerRequest(1, "scope", 0.0))
    assert long_over is not None
    assert long_over.expiration_time == 0  # expired, and no release
    release = TimerRequest(1, "scope", -1)
    assert received(release) is release


@pytest.mark.parametrize("thing", ["text", TimerRequest([], "scope", 5), TimerRequest(1, "scope", math.nan)], ids=repr)
def test_what_is_no_request_is_skipped_and_logged(thing: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert received(thing) is None
    assert "not a timer request, skipped" in caplog.text


def test_the_agenda_keeps_nothing_of_what_was_released() -> None:
    agenda = Agenda()
    for number in range(1000):
        assert agenda.take(number, "scope", 100.0 + number, 0.0)
        assert agenda.take(number, "scope", -1.0, 0.0)
    assert agenda.next(100.0) == math.inf


def test_a_late_worker_is_reaped_and_its_timers_are_cleared(
    server: ListServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "phalanx.timer"):
        server.ask("fine", "far", 60)
        deadline = server.ask("late", "near", 0.05)
        worker, moment = server.reaped.get(timeout=TIMEOUT)
        assert server.cleared.get(timeout=TIMEOUT) == {"late"}
    assert worker == "late"
    assert deadline <= moment
    assert list(server._timers) == [("fine", "far")]
    assert "worker late has 1 expired timer: near" in caplog.text
    assert "worker late is reaped" in caplog.text


def test_a_release_in_the_queue_is_read_before_a_kill() -> None:
    class OneByOne(ThreadQueue):
        def size(self) -> int:
            return min(1, self.requests.qsize())

    server = ListServer()
    server._request_queue = server.inbox = OneByOne()
    server.ask("released", "scope", -0.5)  # the server was late: it finds both, the deadline being over
    server.inbox.requests.put(TimerRequest("other", "scope", -1))
    server.inbox.requests.put(TimerRequest("released", "scope", -1))
    server.ask("late", "scope", -0.1)
    with server:
        assert server.reaped.get(timeout=TIMEOUT)[0] == "late"


@pytest.mark.slow
def test_the_server_sleeps_until_the_next_deadline(server: ListServer) -> None:
    counts: list[int] = []

    def count(_worker: Any) -> bool:
        counts.append(len(server.inbox.timeouts))
        return True

    server.answer = count
    server.ask("worker", "scope", 0.3)
    assert server.cleared.get(timeout=TIMEOUT) == {"worker"}
    assert counts[0] <= 8  # bounded by the interval of 0.2 s; and not one more


def test_a_worker_that_cannot_be_reaped_is_tried_again() -> None:
    server = ListServer(0.1)
    looks: list[float] = []

    def reap(_worker: Any) -> bool:
        looks.append(server.looked)
        return len(looks) > 1  # not the first time

    server.answer = reap
    with server:
        server.ask("worker", "scope", 0.01)
        assert server.cleared.get(timeout=TIMEOUT) == {"worker"}
    first, second = looks
    assert second - first >= 0.09


@pytest.mark.slow
@pytest.mark.parametrize("method", ["get", "size", "register_timers", "get_expired_timers", "clear_timers"])
def test_a_server_that_raises_goes_on_and_does_not_spin(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = ListServer(0.1)
    target = server.inbox if method in {"get", "size"} else server
    original = getattr(target, method)
    calls: list[float] = []
    until_then: list[int] = []

    def count(_worker: Any) -> bool:
        until_then.append(len(calls))
        return True

    def broken(*args: Any) -> Any:
        calls.append(clock.now())
        if len(calls) <= 2 or calls[-1] < due:
            if method == "register_timers":  # what it has lost is lost
                server.ask("worker", "again", 0.0)
            raise ZeroDivisionError(method)
        return original(*args)

    monkeypatch.setattr(target, method, broken)
    server.answer = count
    due = clock.now() + 0.2
    with server:
        server.ask("worker", "scope", 0.2)
        assert server.cleared.get(timeout=TIMEOUT)
    assert "ZeroDivisionError" in caplog.text
    assert " failed" in caplog.text
    assert until_then[0] < 40


def test_who_raises_while_reaping_counts_as_reaped(server: ListServer, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(worker: Any) -> bool:
        raise OSError(f"not {worker}")

    server.answer = refuse
    server.ask("worker", "scope", 0.01)
    assert server.cleared.get(timeout=TIMEOUT) == {"worker"}
    assert "not worker" in caplog.text


def test_a_wait_that_overran_gives_the_time_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is late whenever it is asked, and by how much: no worker lives for ever by it."""
    now = 1000.0

    class Late(ThreadQueue):
        late = 0.0

        def get(self, size: int, timeout: float) -> list[TimerRequest]:
            nonlocal now
            now += timeout and timeout + self.late
            return super().get(size, 0)

    monkeypatch.setattr(clock, "now", lambda: now)
    monkeypatch.setattr(clock, "wall", lambda: 5e8 + now)
    server = ListServer(60)
    server._request_queue = server.inbox = inbox = Late()
    watchdog = Watchdog(server, inbox, 60, daemon=True)

    def turn(late: float = 0.0) -> float:
        inbox.late = late
        watchdog._turn()
        inbox.late = 0.0
        return now

    def reaped() -> list[tuple[Any, float]]:
        return [server.reaped.get_nowait() for _ in range(server.reaped.qsize())]

    for late, more in ((0.3, 0.0), (0.01, 0.0), (5.0, 20.0), (1.5, 20.0)):
        start = turn()
        server.ask("late", "scope", 20)
        server.ask("late", "released", 20)
        watchdog._take(0.0)
        turn(late)
        assert now == pytest.approx(start + 20 + late)
        if more:
            assert reaped() == []
            server.inbox.requests.put(TimerRequest("late", "released", -1))
            moment = now + more
            turn(late)  # late once more
            while now < moment and not server.reaped.qsize():
                turn(late)
        ((worker, moment),) = reaped()
        assert worker == "late"
        assert moment < start + 20 + more + 4 * late + 1
        assert moment >= start + 20 + late + more
        assert server._timers == {}


def test_a_wait_that_overran_spares_no_earlier_timer() -> None:
    server = ListServer(60)
    watchdog = Watchdog(server, server.inbox, 60, daemon=True)
    now = clock.now()
    server._timers["late", "scope"] = TimerRequest("late", "scope", now - 10)
    watchdog._pauses.note(now - 2.2, now - 2, now)
    assert list(watchdog._expired(now)) == ["late"]
    server._timers["late", "scope"] = TimerRequest("late", "scope", now - 1)
    assert list(watchdog._expired(now)) == []
    assert list(watchdog._expired(now + 1.1)) == ["late"]


def test_a_client_of_ones_own_gets_unix_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client(TimerClient):
        def acquire(self, scope_id: str, expiration_time: float) -> None:
            self.taken = scope_id, expiration_time

        def release(self, scope_id: str) -> None: ...

    monkeypatch.setattr(clock, "wall", lambda: 5e8)
    client = Client()
    with expires(3, "scope", client):
        assert client.taken == ("scope", 5e8 + 3)


def test_the_example_is_the_one_in_the_documentation() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    page = (ROOT / "docs" / "timers.md").read_text(encoding="utf-8")
    assert f"```python\n{text}```" in page
    assert len([line for line in text.splitlines() if line]) < 60


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the worker ended with -9\n"
    assert re.fullmatch(r"worker \d+ has 1 expired timer: a step that hangs\n", done.stderr)
