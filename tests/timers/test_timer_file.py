"""Timers over a named pipe: server, client, and whom they may strike. Real processes, and no wait by time."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import pickle
import queue
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._base import clock
from phalanx._evidence.error_file import message_of, read_error_file, write_error_file, written_by
from phalanx.timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
    TimerRequest,
    _file_client,
    debug_info_logging,
)
from phalanx.timer._processes import RefusedError, Victim
from phalanx.timer._readers import Lines
from tests.support.helpers import TIMEOUT, alive, wait_gone

LONG = 3600.0
_markers = itertools.count()

_CHILD = """
import os, sys, time, threading, signal
from phalanx.timer._file_client import FileTimerClient
path = sys.argv[1]
client = FileTimerClient(path)
for line in sys.stdin:
    exec(line.replace(chr(0), chr(10)))
    print("done", flush=True)
"""


class Child:
    """A worker that does what the test says, line by line, and tells when it has done so."""

    def __init__(self, path: str, **environ: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()

    def begin(self, code: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(code.replace("\n", "\0") + "\n")
        self._process.stdin.flush()

    def end(self) -> str:
        """What the child printed until it was done."""
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            if line == "done\n":
                return said
            said += line
        raise AssertionError(f"the child is gone: {self._process.wait(TIMEOUT)}: {said}")

    def do(self, code: str) -> str:
        self.begin(code)
        return self.end()

    def exitcode(self) -> int:
        return self._process.wait(TIMEOUT)

    def hang(self) -> None:
        """Take a timer that is over, and be killed for it."""
        self.begin("client.acquire('s', time.time())")
        assert self.exitcode() == -signal.SIGKILL

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self.exitcode() == 0


class Events:
    """What a server told its owner."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._queue: queue.Queue[tuple[str, FileTimerRequest | None]] = queue.Queue()

    def __call__(self, name: str, request: FileTimerRequest | None) -> None:
        self.names.append(name)
        self._queue.put((name, request))

    def wait(self, name: str) -> FileTimerRequest:
        while True:
            got, request = self._queue.get(timeout=TIMEOUT)
            if got == name:
                assert request is not None
                return request


def settle(server: FileTimerServer) -> None:
    """Return when the server has taken all that is in the pipe now."""
    marker, seen, register = f"marker {next(_markers)}", threading.Event(), server.register_timers

    def noting(timer_requests: Iterable[TimerRequest]) -> None:
        requests = list(timer_requests)
        register(requests)
        if any(one.scope_id == marker for one in requests):
            seen.set()

    server.register_timers = noting  # type: ignore[method-assign]  # an instance's own, for the time of the wait
    write(server._file_path, request(os.getpid(), marker, expiration_time=-1))
    assert seen.wait(TIMEOUT)
    del server.register_timers


def held(server: FileTimerServer) -> list[tuple[int, str]]:
    """The timers that the server has, by process and scope."""
    expired = server.get_expired_timers(math.inf)
    return sorted((pid, one.scope_id) for pid, requests in expired.items() for one in requests)


def wait_until_none_is_held(server: FileTimerServer) -> None:
    """A process that has exited is heard of at the next wait."""
    deadline = clock.now() + TIMEOUT
    while held(server):
        assert clock.now() < deadline
        settle(server)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "timers")


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def server(path: str, events: Events) -> Iterator[FileTimerServer]:
    with FileTimerServer(path, "run", 60, log_event=events) as it:
        yield it


@pytest.fixture
def client(path: str) -> Iterator[FileTimerClient]:
    it = FileTimerClient(path)
    yield it
    it.close()


@pytest.fixture
def child(server: FileTimerServer, path: str) -> Iterator[Child]:  # noqa: ARG001 - it must run
    with Child(path) as it:
        yield it


def write(path: str, *lines: object) -> None:
    """Write lines as a program in any language would."""
    fd = os.open(path, os.O_WRONLY)
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    os.write(fd, b"\n".join([*data, b""]))
    os.close(fd)


def request(pid: int, scope: str = "s", after: float = LONG, number: int = signal.SIGKILL, **more: object) -> object:
    fields = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": time.time() + after, "signal": number}
    return fields | more


# Requests.


def test_a_request_is_a_value_and_a_line_of_json() -> None:
    one = FileTimerRequest(worker_pid=1, scope_id="ä\n", expiration_time=2.5, signal=9)
    assert one == FileTimerRequest(1, "ä\n", 2.5, 9) == pickle.loads(pickle.dumps(one))
    assert {one} == {FileTimerRequest(1, "ä\n", 2.5, 9)}
    assert one not in (FileTimerRequest(1, "ä\n", 2.5, 15), FileTimerRequest(1, "ä\n", 2.5), (1, "ä\n", 2.5, 9))
    assert (one.worker_pid, one.worker_id, one.version, FileTimerRequest(1, "a", 2.0).signal) == (1, 1, 1, 0)
    fields = {"version": 1, "pid": 1, "scope_id": "ä\n", "expiration_time": 2.5, "signal": 9}  # torch's keys
    assert json.loads(one.to_json()) == fields


@pytest.mark.parametrize(
    "line, why",
    [
        (b"{", "not JSON"),
        (b"[" * 4000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "not a JSON object"),
        ({"version": 2}, "version"),
        ({"scope_id": 3}, "scope_id"),
        ({"pid": True}, "pid"),
        ({"pid": 1 << 40}, "pid"),
        ({"pid": None}, "missing"),
        ({"signal": 65}, "signal"),
        ({"signal": 9.0}, "signal"),
        ({"signal": None}, "missing"),
        ({"expiration_time": "soon"}, "expiration_time"),
        ({"expiration_time": None}, "missing"),
        ({"expiration_time": float("nan")}, "finite"),
        ({"expiration_time": float("inf")}, "finite"),
        ({"expiration_time": 10**400}, "finite"),
        ({"monotonic": []}, "monotonic"),
        ({"born": -1}, "born"),
    ],
)
def test_a_damaged_request_is_refused_with_the_reason(line: Any, why: str) -> None:
    if isinstance(line, dict):
        line = json.dumps({**json.loads(FileTimerRequest(7, "s", 1, 9).to_json()), **line})
    with pytest.raises(ValueError, match=why):
        FileTimerRequest.from_json(line)


# The pipe.


def test_both_historical_signatures_are_read(path: str) -> None:
    known = [
        (FileTimerServer(path, "run", 5.0, False, print), ("run", 5.0, False, print)),
        (FileTimerServer(path, 5, False), ("", 5, False, None)),
        (
            FileTimerServer(file_path=path, run_id="run", max_interval=1, daemon=True, log_event=None),
            ("run", 1, True, None),
        ),
        (FileTimerServer(path, "run"), ("run", 10, True, None)),
    ]
    for it, expected in known:
        assert (it._run_id, it._max_interval, it._daemon, it._log_event) == expected


def _symlink(path: str) -> None:
    os.mkfifo(path + ".real", 0o600)
    os.symlink(path + ".real", path)


def _file(path: str) -> None:
    with open(path, "w"):
        pass


def _open_to_all(path: str) -> None:
    os.mkfifo(path)
    os.chmod(path, 0o622)  # noqa: S103 - that is what is tested


@pytest.mark.parametrize(
    "make, why",
    [(_symlink, "symbolic link"), (_file, "not a named pipe"), (os.mkdir, "not a named pipe"), (_open_to_all, "0622")],
)
def test_what_is_not_our_pipe_is_refused_and_left_alone(path: str, make: Callable[[str], None], why: str) -> None:
    make(path)
    before = os.lstat(path)
    server = FileTimerServer(path, "run")
    with pytest.raises(OSError, match=why):
        server.start()
    server.stop()
    assert os.lstat(path) == before


def test_another_users_pipe_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(path, 0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="another user"):
        FileTimerServer(path, "run").start()


def test_a_second_live_server_is_refused(server: FileTimerServer, path: str, child: Child) -> None:
    mode = os.lstat(path).st_mode
    assert (stat.S_ISFIFO(mode), stat.S_IMODE(mode)) == (True, 0o600)
    with pytest.raises(OSError, match="another timer server"):
        FileTimerServer(path, "run").start()
    child.do("client.acquire('s', time.time() + 3600)")
    settle(server)
    assert (child.pid, "s") in held(server)


# Expiry.


def test_what_the_server_knows_is_explained_with_the_run(
    server: FileTimerServer, path: str, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained: list[object] = []
    monkeypatch.setattr(debug_info_logging, "log_debug_info_for_expired_timers", lambda *given: explained.append(given))
    write(path, request(child.pid, "b", -1), request(child.pid, "a", -2))  # none is judged without the other
    child.exitcode()
    server.run_once()
    assert explained == [("run", {child.pid: ["a", "b"]})]


@pytest.mark.usefixtures("server")
def test_a_file_of_the_users_is_no_error_file(path: str, tmp_path: Path) -> None:
    """The worker has a file open that is called as ours are; beside it lies another of the user's."""
    model, error_file = tmp_path / "model", tmp_path / "error.json"
    model.write_bytes(b"weights")
    (tmp_path / "model.stacks").write_bytes(b"# stacks of layers\n")
    with Child(path, TORCHELASTIC_ERROR_FILE=str(error_file)) as child:
        child.do(f"kept = open({str(model) + '.stacks'!r})")
        child.hang()
    assert model.read_bytes() == b"weights"
    data, why = read_error_file(str(error_file))
    assert data is not None, why
    info = data["message"]["extraInfo"]
    assert (written_by(data), info["observer"], info["scope"]) == (child.pid, "timer", "s")
    assert "'s'" in data["message"]["message"]
    assert "over its deadline" in info["detail"]


@pytest.mark.usefixtures("server")
def test_what_is_no_error_file_is_left_where_one_was_asked_for(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"weights")
    with Child(path, TORCHELASTIC_ERROR_FILE=str(model)) as child:
        child.hang()
    assert model.read_bytes() == b"weights"
    assert f"{model} is no error file, and is left as it is" in caplog.text


@pytest.mark.usefixtures("server")
def test_a_reader_of_another_ranks_stacks_is_not_accused(path: str, tmp_path: Path) -> None:
    theirs, own = tmp_path / "3" / "error.json", tmp_path / "error.json"
    theirs.parent.mkdir()
    with Child(path, TORCHELASTIC_ERROR_FILE=str(own)) as child:
        number = int(child.do(f"kept = open({str(theirs) + '.stacks'!r}, 'a+'); print(kept.fileno())").split()[0])
        stacks = theirs.with_name("error.json.stacks")
        stacks.write_text(f"# stacks on signals 52 and 53, descriptor {number + 1}, process 4242\n")
        child.do(f"again = open({str(stacks)!r})")  # which has that number, and is for reading
        child.hang()
    assert not theirs.exists()
    assert written_by(read_error_file(str(own))[0]) == child.pid


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("whose", ["the worker", "a process above it"])
def test_what_a_worker_has_recorded_is_kept(path: str, tmp_path: Path, whose: str) -> None:
    error_file = str(tmp_path / "error.json")
    with Child(path, TORCHELASTIC_ERROR_FILE=error_file) as child:
        write_error_file(error_file, "ValueError: first", "", pid=child.pid)
        if whose == "the worker":
            child.hang()
        else:
            child.do(
                "middle = os.fork()\n"
                "if not middle:\n"
                "    worker = os.fork()\n"
                "    if not worker: client.acquire('s', time.time()); time.sleep(1000)\n"
                "    os._exit(os.waitpid(worker, 0)[1])\n"
                "assert os.waitpid(middle, 0)[1] == signal.SIGKILL << 8"
            )
    assert message_of(read_error_file(error_file)[0]) == "ValueError: first"


def test_several_scopes_of_one_worker_are_one_kill(
    server: FileTimerServer, path: str, events: Events, child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    moment = clock.now() - 1
    lines = [
        request(child.pid, scope, -1, number, monotonic=moment) for scope, number in [("a", 0), ("b", 9), ("c", 9)]
    ]
    write(path, *lines)
    assert child.exitcode() == -signal.SIGKILL
    struck = events.wait("worker.reaped")
    assert (struck.worker_pid, struck.scope_id, struck.signal) == (child.pid, "b", signal.SIGKILL)
    server.run_once()
    assert events.names == ["watchdog started", *["timer.expired"] * 3, "worker.reaped"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1
    late = r"was not left in time; [\d.]+m?s over"
    assert re.match(f"pid {child.pid}: 'a' {late}; 'b' {late}; 'c' {late}; .*SIGKILL", said[0])


@pytest.mark.parametrize("number", [0, -1])
def test_a_signal_that_is_none_reports_and_spares(
    server: FileTimerServer, path: str, events: Events, child: Child, tmp_path: Path, number: int
) -> None:
    write(path, request(child.pid, "other"), request(child.pid, "s", -1, number))
    assert events.wait("timer.expired").scope_id == "s"
    assert alive(child.pid)
    assert child.do("print('well')") == "well\n"
    settle(server)
    assert held(server) == [(child.pid, "other")]
    assert "worker.reaped" not in events.names
    assert list(tmp_path.iterdir()) == [tmp_path / "timers"]


@pytest.mark.usefixtures("server")
def test_another_signal_is_the_one_that_is_sent(path: str, child: Child) -> None:
    write(path, request(child.pid, "s", -1, signal.SIGTERM))
    assert child.exitcode() == -signal.SIGTERM


@pytest.mark.slow
def test_a_process_has_ten_thousand_timers_at_the_most(
    server: FileTimerServer, child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    child.do("[client.acquire(f's{i}', time.time() + 3600) for i in range(10_001)]")
    settle(server)
    assert len(held(server)) == 10_000
    assert "refused: its worker has 10000 timers already" in caplog.text
    child.do("client.release('s0'); client.acquire('more', time.time() + 3600)")
    settle(server)
    assert (child.pid, "more") in held(server)
    child.leave()
    wait_until_none_is_held(server)


def test_a_release_that_waits_in_the_pipe_at_the_deadline_counts(
    server: FileTimerServer, path: str, events: Events, child: Child
) -> None:
    """The server is late, not the worker: what was sent before the timers are judged is heard first."""
    register = server.register_timers

    def late(timer_requests: Iterable[TimerRequest]) -> None:
        requests = list(timer_requests)
        register(requests)
        if requests and requests[0].expiration_time >= 0:
            write(path, request(child.pid, "s", expiration_time=-1))

    server.register_timers = late  # type: ignore[method-assign]  # an instance's own
    write(path, request(child.pid, "s", -1))
    settle(server)
    assert not held(server)
    assert "timer.expired" not in events.names
    assert alive(child.pid)


def test_a_worker_that_has_left_raises_no_alarm(path: str, events: Events, caplog: pytest.LogCaptureFixture) -> None:
    with FileTimerServer(path, "run", log_event=events) as server, Child(path) as child:
        child.leave()
        write(path, request(child.pid))
        settle(server)
        assert not held(server)
    assert events.names == ["watchdog started", "watchdog stopped"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Whom it may strike.


def test_the_owner_hears_of_a_refusal(
    server: FileTimerServer, path: str, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    for pid in (os.getpid(), os.getppid()):
        write(path, request(pid, "s", -1))
        assert events.wait("request.refused").worker_pid == pid
    settle(server)
    assert not held(server)
    assert "timer.expired" not in events.names
    assert "own process" in caplog.text
    assert "descends from" in caplog.text


@pytest.mark.slow
def test_another_users_process_is_refused_unless_we_started_it(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    victim = Victim(child.pid)  # a child of ours
    victim.close()
    code = (
        f"import os; os.geteuid = lambda: {stranger}; from phalanx.timer._processes import Victim; Victim({child.pid})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "RefusedError" in done.stderr
    assert "another user's" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the server's, and a child that becomes another user")
def test_another_users_child_cannot_have_roots_process_killed(
    path: str, server: FileTimerServer, events: Events, child: Child
) -> None:
    done = subprocess.run(["/bin/sh", "-c", "sleep 600 >/dev/null & echo $!"], check=True, stdout=subprocess.PIPE)
    orphan = int(done.stdout)
    fd = os.pidfd_open(orphan)
    try:
        with Child(path) as nobody:
            nobody.do("pipe = os.open(path, os.O_WRONLY); os.setgroups([]); os.setgid(65534); os.setuid(65534)")
            nobody.do(
                f"try:\n os.kill({orphan}, 9)\nexcept PermissionError:\n pass\nelse:\n raise SystemExit('it may')"
            )
            for pid in (orphan, child.pid):
                line = f'{{"pid": {pid}, "scope_id": "s", "expiration_time": 1.0, "signal": 9}}\n'
                nobody.do(f"os.write(pipe, {line.encode()!r})")
            assert child.exitcode() == -signal.SIGKILL  # it was asked for after the other
            refused = events.wait("request.refused")
            assert refused is not None
            assert refused.worker_pid == orphan
            settle(server)
            assert alive(orphan)
        with pytest.raises(RefusedError, match="root's, as this server is, and none that this server started"):
            Victim(orphan)
        Victim(orphan, senders=True).close()
    finally:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


@pytest.mark.usefixtures("server")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_an_error_file_of_another_user_is_not_written_by_root(path: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    sleeper = subprocess.Popen(
        ["/bin/sh", "-c", "echo; read x"],
        user=12345,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"TORCHELASTIC_ERROR_FILE": str(target)},
    )
    with sleeper:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        write(path, request(sleeper.pid, "s", -1))
        assert sleeper.wait(TIMEOUT) == -signal.SIGKILL
    assert not target.exists()


def test_evidence_that_fails_does_not_prevent_the_kill(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no evidence")

    monkeypatch.setattr(Victim, "_stacks", fail)
    monkeypatch.setattr(debug_info_logging, "log_debug_info_for_expired_timers", fail)
    child.hang()
    assert "no evidence" in caplog.text


# Callbacks, progress.


@pytest.mark.slow
def test_an_exception_of_the_owner_is_harmless(path: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_name: str, _request: FileTimerRequest | None) -> None:
        raise RuntimeError("the owner's mistake")

    with FileTimerServer(path, "run", log_event=fail) as server:
        for _ in range(2):
            with Child(path) as child:
                child.hang()
        settle(server)
    assert "the owner's mistake" in caplog.text


def test_the_owner_may_stop_the_server_from_its_callback(path: str) -> None:
    def stop(name: str, _request: FileTimerRequest | None) -> None:
        if name == "worker.reaped":
            thread.append(threading.current_thread())
            server.stop()

    thread: list[threading.Thread] = []
    server = FileTimerServer(path, "run", log_event=stop)
    server.start()
    with Child(path) as child:
        child.begin("client.acquire('s', time.time())")
        child.exitcode()
    while not thread:
        pass
    thread[0].join(TIMEOUT)
    assert not os.path.exists(path)


def test_progress_is_now_while_it_waits_and_old_while_it_hangs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FileTimerServer(path, "run", log_event=lambda name, _request: names[name]())
    assert abs(server.get_last_progress_time() - time.time()) <= TIMEOUT
    seen: list[float] = []
    names: dict[str, Callable[[], None]] = {"watchdog started": lambda: None, "watchdog stopped": lambda: None}
    with server, Child(path) as child:
        assert abs(server.get_last_progress_time() - time.time()) <= TIMEOUT
        now = clock.now

        def later() -> None:
            monkeypatch.setattr(clock, "now", lambda: now() + 100)
            seen.append(server.get_last_progress_time() - time.time())
            monkeypatch.undo()

        names["request.refused"] = later
        write(path, request(1))
        settle(server)
        child.leave()
    assert -100 - TIMEOUT < seen[0] < -97


@pytest.mark.slow
def test_run_once_serves_what_is_there_and_ends(path: str, client: FileTimerClient) -> None:
    server = FileTimerServer(path, "run")
    server.run_once()
    server.start()
    with Child(path) as child, Child(path) as late:
        child.do("client.acquire('s', time.time() + 3600)")
        write(path, request(late.pid, "s", -1))
        server.run_once()
        assert late.exitcode() == -signal.SIGKILL
        assert held(server) == [(child.pid, "s")]
    assert not os.path.exists(path)
    server.stop()
    assert client._fds == {}


# The client.


def test_a_full_pipe_is_waited_for_and_then_an_error(
    path: str, client: FileTimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_client, "_FULL_PATIENCE", 0.02)
    pipe, _ = _file_client.create_pipe(path)  # a server that does not read
    try:
        with pytest.raises(TimeoutError, match="FileTimerServer is stopped"):
            any(map(client.release, ["s" * 3000] * 100_000))
        monkeypatch.setattr(_file_client, "_FULL_PATIENCE", TIMEOUT)
        waiting = threading.Thread(target=client.release, args=("last",))
        waiting.start()
        lines = Lines()
        got: list[bytes] = []
        while not any(b"last" in line for line in got):
            with contextlib.suppress(BlockingIOError):
                got = lines.feed(os.read(pipe, 1 << 16))
        waiting.join()
    finally:
        os.close(pipe)
        os.unlink(path)


def test_no_server_is_waited_for_and_then_an_error(
    path: str, client: FileTimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_client, "_ABSENT_PATIENCE", 0.02)
    with pytest.raises(BrokenPipeError, match="start FileTimerServer"):
        client.acquire("s", time.time() + 1)
    os.mkfifo(path, 0o600)  # left by one that was killed
    with pytest.raises(BrokenPipeError, match="start FileTimerServer"):
        client.acquire("s", time.time() + 1)
    os.unlink(path)
    _file(path)
    with pytest.raises(OSError, match="not a named pipe"):
        client.acquire("s", time.time() + 1)


@pytest.mark.parametrize("left_over", [False, True])
def test_a_server_that_comes_late_is_waited_for(path: str, events: Events, left_over: bool) -> None:
    if left_over:
        os.mkfifo(path, 0o600)
    with Child(path) as child:
        child.begin("client.acquire('s', time.time() + 3600)")
        with FileTimerServer(path, "run", log_event=events) as server:
            child.end()
            settle(server)
            assert held(server) == [(child.pid, "s")]


def test_a_client_finds_the_next_server_without_sigpipe(child: Child, server: FileTimerServer) -> None:
    child.do("signal.signal(signal.SIGPIPE, signal.SIG_DFL); client.acquire('s', time.time() + 3600)")
    server.stop()
    server.start()
    child.do("client.acquire('s', time.time() + 3600)")
    child.do("assert signal.SIGPIPE not in signal.sigpending() | signal.pthread_sigmask(signal.SIG_BLOCK, ())")
    settle(server)
    assert held(server) == [(child.pid, "s")]


def test_bad_arguments_are_refused_by_the_client(path: str, client: FileTimerClient) -> None:
    with pytest.raises(ValueError, match="signal"):
        FileTimerClient(path, 65)
    with pytest.raises(TypeError, match="scope_id"):
        client.acquire(3, 1.0)  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(ValueError, match="expiration_time"):
        client.acquire("s", float("nan"))
    with pytest.raises(ValueError, match="4096 bytes"):
        client._send_request(FileTimerRequest(1, "x" * 5000, 1.0))


# Servers that die.

_SERVER = """
import os, sys
from phalanx.timer._servers import FileTimerServer
server = FileTimerServer(sys.argv[1], "run", 60)
server.start()
if os.fork() == 0:
    server.stop()  # the parent's: nothing happens
    sys.stdin.read()  # and this process keeps nothing of it
    os._exit(0)
os.write(1, b"up\\n")
sys.stdin.read()
"""


@contextlib.contextmanager
def other_server(path: str) -> Iterator[subprocess.Popen[str]]:
    """A server with a fork of it, which outlives it."""
    arguments = [sys.executable, "-W", "ignore", "-c", _SERVER, path]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
def test_a_server_killed_and_started_again_costs_no_worker(
    path: str, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        first = stack.enter_context(other_server(path))
        assert line_of(first) == "up"
        children = [stack.enter_context(Child(path)) for _ in range(3)]
        for child in children:
            child.do(
                "go = True\n"
                "def work():\n"
                "    while go:\n"
                "        client.acquire('s', time.time() + 3600)\n"
                "        client.release('s')\n"
                "thread = threading.Thread(target=work)\n"
                "thread.start()\n"
            )
        inode = os.stat(path).st_ino
        first.kill()
        first.wait()
        with FileTimerServer(path, "run", 60, log_event=events) as server:
            assert os.stat(path).st_ino == inode
            for child in children:
                child.do("go = False; thread.join()")
            settle(server)
            assert not held(server)
            children[0].begin("client.acquire('after', time.time() + 0.01)")
            assert children[0].exitcode() == -signal.SIGKILL
            assert events.wait("worker.reaped").scope_id == "after"
            assert [alive(child.pid) for child in children[1:]] == [True, True]
        assert "damaged" not in caplog.text


# The parser.


def test_damaged_and_oversized_lines_are_logged_and_skipped(
    server: FileTimerServer, path: str, child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, b"garbage", b"", b"x" * 4096, b"y" * 100_000, request(child.pid, "after"))
    settle(server)
    assert held(server) == [(child.pid, "after")]
    assert caplog.text.count("damaged") == 1
    assert caplog.text.count("more than 4096 bytes") >= 1
    for _ in range(50):
        write(path, b"garbage")
    settle(server)
    server.stop()
    assert 8 <= caplog.text.count("damaged") <= 10
    assert "more warnings about timer requests were left out" in caplog.text


@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([b"\n", b"a" * 5000, b"b" * 4095, b"c\nd\n"]))))
def test_lines_are_the_same_however_the_bytes_come(chunks: list[bytes]) -> None:
    lines = Lines()
    got = []
    for chunk in chunks:
        got += lines.feed(chunk)
        assert len(lines._rest) < _file_client.LINE_LIMIT
    whole = b"".join(chunks).split(b"\n")
    assert got == [line for line in whole[:-1] if len(line) < _file_client.LINE_LIMIT]
    assert lines.oversized == sum(len(line) >= _file_client.LINE_LIMIT for line in whole)


# Timers that a subclass, or its ``log_event``, changes or sets: they expire when it says so.

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


def renamed(requests: list[FileTimerRequest]) -> list[FileTimerRequest]:
    return [
        FileTimerRequest(one.worker_pid, f"job/{one.scope_id}", one.expiration_time, one.signal) for one in requests
    ]


def test_a_hook_gets_unix_times_and_may_rename_scopes(path: str, worker: int) -> None:
    sent = FileTimerRequest(worker, "x", time.time() + LONG, signal.SIGKILL)
    with Hooked(path, renamed) as server:
        write(path, sent.to_json().encode())
        assert server.came.get(timeout=TIMEOUT) == [sent]
        assert server.get_expired_timers(time.monotonic() + LONG / 2) == {}
        held = server.get_expired_timers(time.monotonic() + 2 * LONG)
        assert [one.scope_id for one in held[worker]] == ["job/x"]


def test_requests_that_come_at_once_count_in_their_order(path: str, worker: int) -> None:
    now = time.time()
    moments = [("a", now + LONG), ("b", -1), ("a", -1), ("b", now + LONG), ("c", now + LONG), ("c", now + 2 * LONG)]
    with FileTimerServer(path, "run") as server:
        server.register_timers([FileTimerRequest(worker, scope, moment, signal.SIGKILL) for scope, moment in moments])
        held = server.get_expired_timers(time.monotonic() + 3 * LONG)[worker]
        assert [(one.scope_id, one.expiration_time) for one in held] == [("b", now + LONG), ("c", now + 2 * LONG)]


def at_once(requests: list[FileTimerRequest]) -> list[FileTimerRequest]:
    return [FileTimerRequest(one.worker_pid, "own", time.time(), signal.SIGKILL) for one in requests]


def moved(requests: list[FileTimerRequest]) -> list[FileTimerRequest]:
    for one in requests:
        one.expiration_time = time.time()
    return requests


@pytest.mark.parametrize("change", [at_once, moved])
def test_a_timer_expires_at_the_time_of_the_hook(path: str, worker: int, change: Callable[..., Any]) -> None:
    with Hooked(path, change):
        write(path, FileTimerRequest(worker, "x", time.time() + LONG, signal.SIGKILL).to_json().encode())
        assert not wait_gone([worker])


def test_log_event_may_set_a_timer(path: str, worker: int) -> None:
    def kill_next(name: str, _request: FileTimerRequest | None) -> None:
        if name == "timer.expired":
            it.register_timers([FileTimerRequest(worker, "last", time.time(), signal.SIGKILL)])

    with FileTimerServer(path, "run", log_event=kill_next) as it:
        write(path, FileTimerRequest(worker, "warning", time.time(), 0).to_json().encode())
        assert not wait_gone([worker])


def test_a_timer_of_another_thread_wakes_the_server(path: str, worker: int) -> None:
    with FileTimerServer(path, "run") as server:
        server.register_timers([FileTimerRequest(worker, "x", time.time(), signal.SIGKILL)])
        assert not wait_gone([worker])


def test_timers_that_are_cleared_count_no_more(path: str, worker: int) -> None:
    with FileTimerServer(path, "run") as server:
        for _ in range(2):
            many = [FileTimerRequest(worker, str(number), time.time() + LONG) for number in range(10_001)]
            server.register_timers(many)
            assert len(server.get_expired_timers(time.monotonic() + 2 * LONG)[worker]) == 10_000
            server.clear_timers({worker})
            assert server.get_expired_timers(time.monotonic() + 2 * LONG) == {}


def test_what_is_no_request_is_skipped(path: str, worker: int, caplog: pytest.LogCaptureFixture) -> None:
    with FileTimerServer(path, "run") as server:
        for foreign in (None, (worker, "x", 0.0), TimerRequest(worker, "x", time.time())):
            server.register_timers([foreign, FileTimerRequest(worker, "good", time.time() + LONG)])  # type: ignore[list-item] # that is tested
        held = server.get_expired_timers(time.monotonic() + 2 * LONG)
    assert [one.scope_id for one in held[worker]] == ["good"]
    assert caplog.text.count("not a timer request, skipped") == 3
