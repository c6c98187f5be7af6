"""Timers that a subclass of `FileTimerServer`, or its ``log_event``, changes or sets: they expire when it says so."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.timer import FileTimerRequest, FileTimerServer, TimerRequest
from tests.support.helpers import TIMEOUT, wait_gone

HOUR = 3600.0

Change = Any  # of a list of requests, to another one


class Hooked(FileTimerServer):
    """Takes over what ``change`` makes of the requests that come."""

    def __init__(self, path: str, change: Change) -> None:
        super().__init__(path, "run")
        self._change = change
        self.came: queue.Queue[list[FileTimerRequest]] = queue.Queue()

    def register_timers(self, timer_requests: Any) -> None:
        """Remember what came."""
        super().register_timers(self._change(timer_requests))
        if timer_requests:
            self.came.put(list(timer_requests))


@pytest.fixture
def worker() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def send(path: Path, request: FileTimerRequest) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, f"{request.to_json()}\n".encode())
    os.close(fd)


def renamed(requests: list[FileTimerRequest]) -> list[FileTimerRequest]:
    return [
        FileTimerRequest(one.worker_pid, f"job/{one.scope_id}", one.expiration_time, one.signal) for one in requests
    ]


def test_a_hook_gets_unix_times_and_may_rename_scopes(tmp_path: Path, worker: int) -> None:
    sent = FileTimerRequest(worker, "x", time.time() + HOUR, signal.SIGKILL)
    with Hooked(str(tmp_path / "timers"), renamed) as server:
        send(tmp_path / "timers", sent)
        assert server.came.get(timeout=TIMEOUT) == [sent]
        assert server.get_expired_timers(time.monotonic() + HOUR / 2) == {}
        held = server.get_expired_timers(time.monotonic() + 2 * HOUR)
        assert [one.scope_id for one in held[worker]] == ["job/x"]


def test_requests_that_come_at_once_count_in_their_order(tmp_path: Path, worker: int) -> None:
    now = time.time()
    moments = [("a", now + HOUR), ("b", -1), ("a", -1), ("b", now + HOUR), ("c", now + HOUR), ("c", now + 2 * HOUR)]
    with FileTimerServer(str(tmp_path / "timers"), "run") as server:
        server.register_timers([FileTimerRequest(worker, scope, moment, signal.SIGKILL) for scope, moment in moments])
        held = server.get_expired_timers(time.monotonic() + 3 * HOUR)[worker]
        assert [(one.scope_id, one.expiration_time) for one in held] == [("b", now + HOUR), ("c", now + 2 * HOUR)]


def at_once(requests: list[FileTimerRequest]) -> list[FileTimerRequest]:
    return [FileTimerRequest(one.worker_pid, "own", time.time(), signal.SIGKILL) for one in requests]


def moved(requests: list[FileTimerRequest]) -> list[FileTimerRequest]:
    for one in requests:
        one.expiration_time = time.time()
    return requests


@pytest.mark.parametrize("change", [at_once, moved])
def test_a_timer_expires_at_the_time_of_the_hook(tmp_path: Path, worker: int, change: Callable[..., Any]) -> None:
    with Hooked(str(tmp_path / "timers"), change):
        send(tmp_path / "timers", FileTimerRequest(worker, "x", time.time() + HOUR, signal.SIGKILL))
        wait_gone([worker])


def test_log_event_may_set_a_timer(tmp_path: Path, worker: int) -> None:
    def kill_next(name: str, _request: FileTimerRequest | None) -> None:
        if name == "timer.expired":
            server.register_timers([FileTimerRequest(worker, "last", time.time(), signal.SIGKILL)])

    with FileTimerServer(str(tmp_path / "timers"), "run", log_event=kill_next) as server:
        send(tmp_path / "timers", FileTimerRequest(worker, "warning", time.time(), 0))
        wait_gone([worker])


def test_a_timer_of_another_thread_wakes_the_server(tmp_path: Path, worker: int) -> None:
    with FileTimerServer(str(tmp_path / "timers"), "run") as server:
        server.register_timers([FileTimerRequest(worker, "x", time.time(), signal.SIGKILL)])
        wait_gone([worker])


def test_timers_that_are_cleared_count_no_more(tmp_path: Path, worker: int) -> None:
    with FileTimerServer(str(tmp_path / "timers"), "run") as server:
        for _ in range(2):
            many = [FileTimerRequest(worker, str(number), time.time() + HOUR) for number in range(10_001)]
            server.register_timers(many)
            assert len(server.get_expired_timers(time.monotonic() + 2 * HOUR)[worker]) == 10_000
            server.clear_timers({worker})
            assert server.get_expired_timers(time.monotonic() + 2 * HOUR) == {}


def test_what_is_no_request_is_skipped(tmp_path: Path, worker: int, caplog: pytest.LogCaptureFixture) -> None:
    with FileTimerServer(str(tmp_path / "timers"), "run") as server:
        for foreign in (None, (worker, "x", 0.0), TimerRequest(worker, "x", time.time())):
            server.register_timers([foreign, FileTimerRequest(worker, "good", time.time() + HOUR)])  # type: ignore[list-item] # that is tested
        held = server.get_expired_timers(time.monotonic() + 2 * HOUR)
    assert [one.scope_id for one in held[worker]] == ["good"]
    assert caplog.text.count("not a timer request, skipped") == 3
