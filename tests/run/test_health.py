"""The answer of an agent to those who ask how it is: real connections, good, bad, slow, many."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx._events import agent_kinds, kinds
from phalanx._run.local_server import LocalServer
from phalanx._run.services import PORT_ENV, Services, address_of_environment
from tests.support.workers import open_descriptors

LIMIT = 30.0


class Status:
    """What it answers from."""

    group = staticmethod(lambda: None)
    run_id = "example"

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"state": "NEW", "attempt": None}
        self.ranks = 0
        self.rank: dict[str, Any] = {}

    def agent(self) -> dict[str, Any]:
        return self.facts

    def sample(self) -> dict[str, Any]:
        rank = dict.fromkeys(("pid", "started", "step", "beat", "cpu", "memory", "threads"), 1)
        ranks = [
            {"rank": each, "local_rank": each, "state": "running", **rank, **self.rank} for each in range(self.ranks)
        ]
        known = {"run_id": "example", "host": "here", "name": "train.py", "max_restarts": 0, "paused": False}
        return self.facts | known | {"slow": {}, "ranks": ranks}


def served(address: tuple[str, int], status: Status | None = None) -> Services:
    of: Any = status or Status()
    return Services({address: PORT_ENV}, of)


@pytest.fixture
def address(port: int) -> tuple[str, int]:
    """Where nobody else can listen."""
    return "127.0.0.1", port


def ask(address: tuple[str, int], request: bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[str, str]:
    """Send a request, and read the status line and the body until the connection is closed."""
    with socket.create_connection(address, LIMIT) as connection:
        connection.sendall(request)
        return answer(connection)


def answer(connection: socket.socket) -> tuple[str, str]:
    with connection.makefile("rb") as stream:
        head, _, body = stream.read().decode().partition("\r\n\r\n")
    length = re.search(r"Content-Length: (\d+)", head)
    assert length is None or not body or int(length[1]) == len(body)
    return head.partition("\r\n")[0], body


def test_what_is_told(address: tuple[str, int]) -> None:
    of = Status()
    with served(address, of):
        status, body = ask(address)
        assert status == "HTTP/1.1 200 OK"
        assert json.loads(body) == {"state": "NEW", "attempt": None}
        of.facts = {"state": "RUNNING", "attempt": 2}
        found = json.loads(ask(address, b"GET /healthz?verbose HTTP/1.0\n\n")[1])
        assert found == {"state": "RUNNING", "attempt": 2}
        of.facts = {"state": "FAILED", "attempt": 2}
        status, body = ask(address, b"HEAD / HTTP/1.1\r\n\r\n")
        while status == "HTTP/1.1 200 OK":  # one that is a tenth of a second old
            status, body = ask(address)
        assert status == "HTTP/1.1 503 Service Unavailable"
        found = json.loads(ask(address)[1])
        assert found == {**of.facts, "why": "the run has failed: no other attempt follows"}
    with pytest.raises(ConnectionRefusedError):
        ask(address)


@pytest.mark.parametrize(
    "request_, status",
    [
        (b"HEAD / HTTP/1.1\r\n\r\n", "200 OK"),
        (b"HEAD /healthz/ HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"POST / HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"BREW / HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"nonsense\r\n\r\n", "400 Bad Request"),
        (b"\r\n\r\n", "400 Bad Request"),
        (b"GET / HTTP/3.0\r\n\r\n", "505 HTTP Version Not Supported"),
        (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 101 + b"\r\n", "431 Request Header Fields Too Large"),
        (b"GET /".ljust(8192, b"x"), "400 Bad Request"),
        (b"\x16\x03\x01\r\n\r\n", "400 Bad Request"),  # as of TLS
    ],
)
def test_what_is_no_question(address: tuple[str, int], request_: bytes, status: str) -> None:
    with served(address):
        assert ask(address, request_) == (f"HTTP/1.1 {status}", "")


def test_strangers_cost_little_and_hold_up_nobody(address: tuple[str, int]) -> None:
    with served(address):
        for _ in range(50):  # who leave at once
            socket.create_connection(address, LIMIT).close()
        threads, descriptors = threading.active_count(), len(open_descriptors())
        silent = [socket.create_connection(address, LIMIT) for _ in range(180)]  # more than are served at once
        for _ in range(20):  # those that were accepted before it have gone, or are among the few
            assert ask(address)[0] == "HTTP/1.1 200 OK"
            assert threading.active_count() - threads <= 32
            assert len(open_descriptors()) - descriptors - len(silent) <= 32 + 1
    for connection in silent:  # the end closes what is open
        with connection, suppress(ConnectionResetError):
            assert connection.recv(1) == b""


@pytest.mark.slow
def test_one_who_is_never_done_is_closed(address: tuple[str, int]) -> None:
    with served(address), ExitStack() as held:
        connections = [held.enter_context(socket.create_connection(address, LIMIT)) for _ in range(3)]
        connections[1].sendall(b"GET / HTTP/1.1\r\n")
        left = {connection.fileno(): connection for connection in connections[:2]}
        poll = select.poll()
        for fd in left:
            poll.register(fd, select.POLLIN)
        connections[2].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET / HTTP/1.1\r\n\r\n":
            connections[2].send(bytes([byte]))
        assert answer(connections[2])[0] == "HTTP/1.1 200 OK"  # in pieces, too
        while left:  # one says nothing, and one sends a byte in a tenth of a second: it would not be done for minutes
            if not (ready := poll.poll(100)) and connections[1].fileno() in left:
                connections[1].sendall(b"x")
            for fd, _ in ready:
                poll.unregister(fd)
                with suppress(ConnectionResetError):
                    assert left.pop(fd).recv(1) == b""


@pytest.mark.long
def test_one_who_takes_no_answer_holds_up_nobody(address: tuple[str, int]) -> None:
    of = Status()
    of.ranks = 30_000  # some 20 MB, of which the kernel keeps 10 at most
    with served(address, of), socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        greedy.settimeout(LIMIT)
        greedy.connect(address)
        greedy.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert greedy.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        assert ask(address)[0] == "HTTP/1.1 200 OK"
        poll = select.poll()
        poll.register(greedy, select.POLLRDHUP)
        assert poll.poll(LIMIT * 1000)  # it is closed after a while, and what it has not taken is dropped
        assert ask(address)[0] == "HTTP/1.1 200 OK"


@pytest.mark.slow
def test_it_goes_on_when_descriptors_are_there_again(address: tuple[str, int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with served(address), socket.socket() as silent, socket.socket() as connection:
        connection.settimeout(LIMIT)
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 1, before[1]))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(connection.fileno()))
            silent.connect(address)  # it gets the descriptor that an accept(2) which waits has
            connection.connect(address)
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert not select.select([connection], [], [], 0.2)[0]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in taken:
                os.close(fd)
        assert answer(connection)[0] == "HTTP/1.1 200 OK"


def test_a_fork_holds_nothing_of_it(address: tuple[str, int]) -> None:
    with served(address):
        until, over = os.pipe()
        forked, is_forked = os.pipe()
        child = os.fork()
        if not child:
            os.close(over)
            os.write(is_forked, b"1")
            os.read(until, 1)  # until the parent has looked
            os._exit(0)
        os.read(forked, 1)  # it has closed what is the agent's
    try:
        with pytest.raises(ConnectionRefusedError):
            ask(address)
    finally:
        for fd in (until, over, forked, is_forked):
            os.close(fd)
        os.waitpid(child, 0)


def scraped(address: tuple[str, int], of: Status) -> dict[str, float]:
    """Return what is exposed, anew: a changed state has it made."""
    of.facts = {"state": "RUNNING", "attempt": 1 + (of.facts["attempt"] or 0)}
    lines = ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")[1].splitlines()
    found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in found}


def test_what_was_lost_never_falls(address: tuple[str, int]) -> None:
    """A scrape between the moment of an event and its delivery was ahead: a counter that falls counts as a new one."""
    of, began, name = Status(), time.monotonic_ns(), "phalanx_restart_seconds_total"
    decided = agent_kinds.RestartDecided(
        0, began, delay=0.0, counted=True, cause="", step=None, why="", reason="failure"
    )
    with served(address, of) as services:
        observe = services.observers["phalanx-metrics"]
        observe([kinds.GroupState(0, began, state="STOPPING"), decided])
        runs = kinds.GroupRunning(1, time.monotonic_ns())
        before = scraped(address, of)[name]
        observe([runs])
        assert scraped(address, of)[name] == before > 0


def test_the_cpu_time_of_a_rank_never_falls(address: tuple[str, int]) -> None:
    of, name = Status(), 'phalanx_rank_cpu_seconds_total{local_rank="0",rank="0"}'
    of.ranks, of.rank = 1, {"pid": 5, "cpu": 9.0}
    with served(address, of):
        assert scraped(address, of)[name] == 9
        of.rank["cpu"] = 2.0  # a process below it has ended, and nobody waits for it
        assert scraped(address, of)[name] == 9
        of.rank |= {"pid": 6, "cpu": 1.0}
        assert scraped(address, of)[name] == 1


def test_a_state_is_exposed_at_once(address: tuple[str, int]) -> None:
    of, request = Status(), b"GET /metrics HTTP/1.1\r\n\r\n"
    with served(address, of):
        assert 'phalanx_state{phalanx_state="NEW"} 1.0' in ask(address, request)[1]
        of.facts = {"state": "FAILED", "attempt": 0}
        assert 'phalanx_state{phalanx_state="FAILED"} 1.0' in ask(address, request)[1]


class Late:
    """A group whose one rank was to beat long ago."""

    is_open, is_paused, hang_timeout, alive = True, True, 1.0, (0,)
    envs: tuple[dict[str, str], ...] = ({},)

    def __init__(self) -> None:
        self.hang_report = self

    def signs(self) -> dict[int, SimpleNamespace]:
        return {0: SimpleNamespace(beat=1, limit=2, breakpoint=None, step=None)}


def test_a_group_is_paused_until_it_goes_on(address: tuple[str, int]) -> None:
    """The order to go on is carried out later: a probe in between finds no hang."""
    of: Any = Status()
    of.facts, group = {"state": "RUNNING", "attempt": 0}, Late()
    of.group = lambda: group
    with served(address, of) as services:
        observe = services.observers["phalanx-metrics"]
        observe([kinds.GroupPaused(0, 1, paused=True)])
        group.is_paused = False
        until = time.monotonic() + 0.3  # a verdict is shared for less
        while time.monotonic() < until:
            assert ask(address)[0] == "HTTP/1.1 200 OK"
        observe([kinds.GroupPaused(0, 1, paused=False)])
        while ask(address)[0] == "HTTP/1.1 200 OK":
            pass
        assert "no rank has made progress" in ask(address)[1]


class Shouting(LocalServer):
    """Answers a line in capitals, and "BAD" not at all. Counts those that it accepts."""

    def __init__(self, most: int = 9) -> None:
        super().__init__("shouting", most, LIMIT, 10, 0.0)
        self.count = threading.Semaphore(0)

    def accepted(self, connection: socket.socket) -> None:  # noqa: ARG002 - the base has it
        self.count.release()

    def is_whole(self, request: bytes) -> bool:
        return request.endswith(b"\n")

    def asked(self, connection: socket.socket, request: bytes) -> None:
        if request == b"bad\n":
            raise ValueError(request)
        self.reply(connection, request.upper())


@contextmanager
def shouting(listener: socket.socket, most: int = 9) -> Iterator[tuple[Shouting, tuple[str, int]]]:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    server = Shouting(most)
    server.begin(listener)
    address = listener.getsockname()
    try:
        yield server, address
    finally:
        server.end(LIMIT)


def test_a_fork_waits_until_a_connection_is_recorded() -> None:
    """Else the child would keep it open for as long as it lives: what it closes is what is recorded."""
    accepted, goes_on, inodes = threading.Event(), threading.Event(), []

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            connection, of = super().accept()
            inodes.append(os.fstat(connection.fileno()).st_ino)
            accepted.set()
            goes_on.wait(LIMIT)
            return connection, of

    read, write = os.pipe()
    with shouting(Listener()) as (_, address), socket.create_connection(address, LIMIT):
        accepted.wait(LIMIT)
        threading.Timer(0.2, goes_on.set).start()
        child = os.fork()
        if not child:
            found = [os.fstat(fd).st_ino for fd in open_descriptors()]
            os.write(write, b"%d" % found.count(inodes[0]))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"0"
    os.close(read)
    os.close(write)


def test_who_makes_room_is_answered_if_it_has_asked() -> None:
    is_held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        goes_on.wait(LIMIT)

    with shouting(socket.socket(), most=1) as (server, address), socket.create_connection(address, LIMIT) as first:
        server.count.acquire(timeout=LIMIT)
        assert server.loop is not None
        server.loop.call(hold)
        is_held.wait(LIMIT)
        with socket.create_connection(address, LIMIT) as second:  # the server learns of it first
            first.sendall(b"first\n")
            second.sendall(b"second\n")
            goes_on.set()
            assert (first.recv(9), second.recv(9)) == (b"FIRST\n", b"SECOND\n")


def test_a_mistake_in_an_answer_leaves_the_others() -> None:
    with shouting(socket.socket()) as (_, address):
        assert ask(address, b"bad\n") == ("", "")
        assert ask(address, b"good\n") == ("GOOD\n", "")


def test_a_folder_with_a_module_of_the_librarys_names(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "phalanx._run.health_pages", raising=False)
    monkeypatch.setitem(sys.modules, "http.server", None)
    with served(address):
        for _ in range(2):
            assert ask(address) == ("", "")  # and not a port that is closed


def test_addresses_that_cannot_be_had_are_named(address: tuple[str, int]) -> None:
    with socket.create_server(address), pytest.raises(OSError, match=f"{PORT_ENV}: 127.0.0.1:{address[1]}: ") as raised:
        served(address)
    assert raised.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match=rf"{PORT_ENV}: 192\.0\.2\.1:{address[1]}: "):
        served(("192.0.2.1", address[1]))
    try:
        with served(("::1", address[1])):
            assert ask(("::1", address[1]))[0] == "HTTP/1.1 200 OK"
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # there is no IPv6
            raise


@pytest.mark.parametrize(
    "text, expected",
    [
        (" 8080 ", ("127.0.0.1", 8080)),
        (":8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),  # noqa: S104 - nobody listens here
        ("[::]:65535", ("::", 65535)),
        ("", None),
        *((text, text) for text in ("0", "-1", "65536", "eighty", "localhost", "localhost:x", "1.5", "²")),
    ],
)
def test_the_variable(monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, int] | str | None) -> None:
    monkeypatch.setenv(PORT_ENV, text)
    if isinstance(expected, str):
        wrong = re.escape(f"{PORT_ENV}: expected a port, 1 to 65535, or ") + f".*{text!r}"
        with pytest.raises(ValueError, match=wrong):
            address_of_environment()
    else:
        assert address_of_environment() == ({} if expected is None else {expected: PORT_ENV})


def test_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_ENV, raising=False)
    assert address_of_environment() == {}
    status: Any = Status()
    with Services({}, status) as services:
        assert (services.variables, services.observers) == ({}, {})
