"""A `phalanx serve` that was started, and what a browser, or a stranger, asks of it."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tests.support.command import Launcher, Place, read_until
from tests.support.helpers import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SERVE = (sys.executable, "-m", "phalanx", "serve")


class Answer(NamedTuple):
    """What was answered."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def version(self) -> int:
        """That of a page."""
        found = re.search(r' data-version="(\d+)"', self.text)
        assert found, self.text[:500]
        return int(found[1])


class Stream:
    """The events of a page."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self.answer = connection.getresponse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def next(self) -> int | None:
        """The next version; None: the stream has ended."""
        event = b""
        while line := self.answer.readline():
            event = line.removeprefix(b"event: ").strip() if line.startswith(b"event: ") else event
            if event == b"changed" and line.startswith(b"data: "):
                return int(line.removeprefix(b"data: "))
        return None


class Served:
    """A server that runs. It knows its token."""

    def __init__(self, launcher: Launcher, line: str) -> None:
        self.launcher = launcher
        found = re.fullmatch(r"http://(\S+):(\d+)/(?:\?token=(\S+))?\n", line)
        assert found, line
        self.host, self.port, self.token = found[1], int(found[2]), found[3] or ""

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    def connect(self) -> socket.socket:
        """A connection of somebody who knows nothing."""
        return socket.create_connection((self.host, self.port), timeout=TIMEOUT)

    def _request(self, method: str, path: str, headers: dict[str, str], body: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT)
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connection.request(method, path, body, {**bearer, **headers})
        return connection

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
        """Ask with the token, or with other headers, whose names have a _ for a -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self._request(method, path, named, body)
        try:
            found = connection.getresponse()
            return Answer(found.status, found.headers, found.read())
        finally:
            connection.close()

    def events(self, path: str) -> Stream:
        return Stream(self._request("GET", path, {}, None))

    def control(self, name: str, do: str, **headers: str) -> tuple[int, bool, str]:
        """Ask as the page's script does. Returns the status, whether it was done, and what is said of it."""
        own = {"X_Phalanx": "1", "Content_Type": "application/json", "Origin": self.origin, **headers}
        answer = self.ask(f"/runs/{name}/control", "POST", json.dumps({"do": do}), **own)
        found = json.loads(answer.text)
        return answer.status, found["ok"], found["text"]


@contextmanager
def served(place: Place, *options: object, through: Sequence[str] = ()) -> Iterator[Served]:
    """Serve the runs of a place, at any port, until the context is left. ``through``: a command that starts it."""
    place.logs.mkdir(exist_ok=True)
    argv = [*through, *SERVE, str(place.logs), "--port", "0", *map(str, options)]
    with Launcher(argv, cwd=place.folder, env=place.env) as launcher:
        assert launcher.process.stdout is not None
        yield Served(launcher, read_until(launcher.process.stdout.fileno(), "\n"))
