"""What an agent answers over HTTP: how it is, as JSON for people and probes, and its metrics.

Owns the paths, the statuses, and when an agent counts as healthy. `services` has the
sockets; `run_metrics` the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import NamedTuple

from phalanx._run.local_server import has_no_more
from phalanx._run.run_metrics import RunMetrics

_HEALTH, _METRICS = ("/", "/healthz"), "/metrics"
_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"


class Page(NamedTuple):
    """What is answered: the status, the type of the content, the content."""

    status: HTTPStatus
    kind: str
    body: bytes


def answer(request: bytes, metrics: RunMetrics) -> bytes:
    r"""Return the answer to a request: all of its bytes. Any thread may call it. ``metrics``: what is known of the run.

    >>> from phalanx._run.run_metrics import RunMetrics
    >>> from phalanx._run.status import RunStatus
    >>> metrics = RunMetrics(RunStatus("example", 0))
    >>> answer(b"GET /healthz HTTP/1.1\r\n\r\n", metrics).splitlines()[0]
    b'HTTP/1.1 200 OK'
    >>> answer(b"GET /nowhere HTTP/1.1\r\n\r\n", metrics).splitlines()[0]
    b'HTTP/1.1 404 Not Found'
    """
    return _Exchange(request, partial(_page, metrics)).wfile.getvalue()


def _page(metrics: RunMetrics, path: str, accept: str) -> Page:
    try:
        if path in _HEALTH:
            return _health(metrics)
        if path == _METRICS:
            return Page(HTTPStatus.OK, *metrics.exposed(accept))
    except ImportError as error:  # of the library for metrics
        return Page(HTTPStatus.NOT_IMPLEMENTED, _TEXT, f"{error}\n".encode())
    except Exception as error:  # noqa: BLE001 - a mistake of ours: whoever asks learns it, and the run goes on
        return Page(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, f"{type(error).__name__}: {error}\n".encode())
    known = ", ".join((*_HEALTH, _METRICS))
    return Page(HTTPStatus.NOT_FOUND, _TEXT, f"there is no such page; there are {known}\n".encode())


def _health(metrics: RunMetrics) -> Page:
    agent, why = metrics.status.agent(), metrics.why_unhealthy()
    status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
    return Page(status, _JSON, (json.dumps(agent | {"why": why} if why else agent) + "\n").encode())


class _Exchange(BaseHTTPRequestHandler):
    """One request and its answer, in memory: the base reads the one and writes the other."""

    protocol_version = default_request_version = "HTTP/1.1"  # what is no request has a status line for an answer, too
    wfile: BytesIO

    def __init__(self, request: bytes, page: Callable[[str, str], Page]) -> None:
        self.rfile, self.wfile = BytesIO(request), BytesIO()
        self._page = page
        self.command, self.requestline, self.request_version = "", "", self.protocol_version
        if has_no_more(request):
            self.handle_one_request()
        if not self.wfile.tell():  # it did not come whole, or is an empty line, which the base answers by nothing
            self.send_error(HTTPStatus.BAD_REQUEST)

    def do_GET(self) -> None:
        """See `BaseHTTPRequestHandler`."""
        accept = " ".join(self.headers.get("Accept", "").split())  # a header may go over several lines
        self._write(self._page(self.path.partition("?")[0], accept))

    do_HEAD = do_GET  # noqa: N815 - the base's name

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - not shown
        """See `BaseHTTPRequestHandler`, whose answer has what was asked in it, as HTML."""
        is_verb = code == HTTPStatus.NOT_IMPLEMENTED  # what it says of a verb for which there is no method
        self._write(Page(HTTPStatus.METHOD_NOT_ALLOWED if is_verb else HTTPStatus(code), _TEXT, b""))

    def _write(self, page: Page) -> None:
        self.send_response(page.status)
        if page.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def version_string(self) -> str:
        """See `BaseHTTPRequestHandler`: not which Python this is."""
        return "phalanx"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """See `BaseHTTPRequestHandler`: the console is not for probes."""
