"""The answer of an agent to those who ask how it is: real connections, good, bad, slow, many."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._run import master_port
from phalanx._run.services import PORT_ENV, Health, address_of_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 30.0


class Status:
    """What it answers."""

    def __init__(self) -> None:
        self.state, self.attempt = "NEW", None

    def agent(self) -> dict[str, Any]:
        return vars(self)


STATUS: Any = Status()


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Where nobody else can listen."""
    with master_port.reserve() as reserved:
        yield "127.0.0.1", reserved.number


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
    of: Any = Status()
    with Health(address, of) as health:
        status, body = ask(address)
        assert status == "HTTP/1.1 200 OK"
        assert json.loads(body) == {"state": "NEW", "attempt": None}
        of.state, of.attempt = "RUNNING", 2
        found = json.loads(ask(address, b"GET /healthz HTTP/1.0\n\n")[1])
        assert found == {"state": "RUNNING", "attempt": 2}
        assert health.variables() == {PORT_ENV: ""}
    with pytest.raises(ConnectionRefusedError):
        ask(address)


@pytest.mark.parametrize(
    "request_, status",
    [
        (b"HEAD / HTTP/1.1\r\n\r\n", "200 OK"),
        (b"POST / HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"nonsense\r\n\r\n", "400 Bad Request"),
        (b"GET /".ljust(8192, b"x"), "400 Bad Request"),
        (b"\x16\x03\x01\r\n\r\n", "400 Bad Request"),  # as of TLS
    ],
)
def test_what_is_no_question(address: tuple[str, int], request_: bytes, status: str) -> None:
    with Health(address, STATUS):
        assert ask(address, request_) == (f"HTTP/1.1 {status}", "")


def test_a_question_in_pieces(address: tuple[str, int]) -> None:
    with Health(address, STATUS), socket.create_connection(address, LIMIT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET / HTTP/1.1\r\n\r\n":
            connection.send(bytes([byte]))
        assert answer(connection)[0] == "HTTP/1.1 200 OK"


def test_those_who_say_nothing_hold_up_nobody(address: tuple[str, int]) -> None:
    with Health(address, STATUS):
        silent = [socket.create_connection(address, LIMIT) for _ in range(20)]
        assert ask(address)[0] == "HTTP/1.1 200 OK"
        for connection in silent:
            with connection:
                assert connection.recv(1) == b""  # closed, after a while


def test_more_connections_than_are_served_at_once(address: tuple[str, int]) -> None:
    with Health(address, STATUS):
        silent = [socket.create_connection(address, LIMIT) for _ in range(180)]
        assert ask(address)[0] == "HTTP/1.1 200 OK"
        for connection in silent:
            connection.close()


def test_one_who_leaves_at_once(address: tuple[str, int]) -> None:
    with Health(address, STATUS):
        for _ in range(50):
            socket.create_connection(address, LIMIT).close()
        assert ask(address)[0] == "HTTP/1.1 200 OK"


def test_it_ends_with_connections_open(address: tuple[str, int]) -> None:
    with Health(address, STATUS):
        connection = socket.create_connection(address, LIMIT)
        ask(address)
    with connection:
        assert connection.recv(1) == b""


def test_a_fork_holds_nothing_of_it(address: tuple[str, int]) -> None:
    with Health(address, STATUS):
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


def test_a_port_that_is_taken(address: tuple[str, int]) -> None:
    with socket.create_server(address), pytest.raises(OSError, match=f"{PORT_ENV}: 127.0.0.1:{address[1]}: ") as raised:
        Health(address, STATUS).start()
    assert raised.value.errno == errno.EADDRINUSE


def test_an_address_of_another_machine(address: tuple[str, int]) -> None:
    with pytest.raises(OSError, match=rf"{PORT_ENV}: 192\.0\.2\.1:{address[1]}: "):
        Health(("192.0.2.1", address[1]), STATUS).start()


def test_ipv6(address: tuple[str, int]) -> None:
    try:
        with Health(("::1", address[1]), STATUS):
            assert ask(("::1", address[1]))[0] == "HTTP/1.1 200 OK"
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip("there is no IPv6")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("8080", ("127.0.0.1", 8080)),
        (" 8080 ", ("127.0.0.1", 8080)),
        (":8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),  # noqa: S104 - nobody listens here
        ("[::]:65535", ("::", 65535)),
        ("", None),
    ],
)
def test_the_variable(monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, int] | None) -> None:
    monkeypatch.setenv(PORT_ENV, text)
    assert address_of_environment() == expected


@pytest.mark.parametrize("text", ["0", "-1", "65536", "eighty", "localhost", "localhost:x", "1.5", "²"])
def test_a_variable_that_is_no_port(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PORT_ENV, text)
    with pytest.raises(ValueError, match=re.escape(f"{PORT_ENV}: expected a port, 1 to 65535, or ") + f".*{text!r}"):
        address_of_environment()


def test_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_ENV, raising=False)
    assert address_of_environment() is None
    with Health(None, STATUS) as health:
        assert health.variables() == {}
