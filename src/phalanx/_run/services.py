"""What a run has beside its workers if the environment asks for it: a timer server, an answer how it is, a log."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager

from phalanx._rendezvous.endpoint import split_endpoint
from phalanx._run.local_server import LocalServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Self

    from phalanx._run.status import RunStatus
    from phalanx.timer import FileTimerServer

PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"
"""The variable: a port, or an address of this machine and a port. An empty one is as none."""

_HOST = "127.0.0.1"
_WITHIN = 2.0  # seconds that a connection may take
_MOST = 64  # connections at a time; others wait until one of them is over
_MOST_BYTES = 8192  # of a request
_STOP_WITHIN = 10.0


def address_of_environment() -> tuple[str, int] | None:
    """Return where to listen, by the environment; None: nowhere. Raises ValueError."""
    text = os.environ.get(PORT_ENV, "").strip()
    if not text:
        return None
    try:
        host, port = ("", int(text)) if text.isascii() and text.isdecimal() else split_endpoint(text)
    except ValueError:
        host, port = "", 0
    if not 0 < port < 1 << 16:
        msg = f"{PORT_ENV}: expected a port, 1 to 65535, or an address and a port, like 0.0.0.0:8080, got {text!r}"
        raise ValueError(msg)
    return host or _HOST, port


class Health(LocalServer):
    """Answers over HTTP how an agent is, from `start` to `stop`. A context manager.

    Torch has the variable of its port, and no server behind it. A connection is closed after 2 s: a slow or
    silent one delays no other until there are 64.

    The answer to GET is status 200 with a JSON object, see `RunStatus.agent`.

    Args:
        address: The host and the port to listen at; None: nothing is done.
        status: That of the run.

    >>> import urllib.request
    >>> from phalanx._run import master_port
    >>> from phalanx._run.status import RunStatus
    >>> port = master_port.reserve()
    >>> with Health(("127.0.0.1", port.number), RunStatus("example", 0)):
    ...     with urllib.request.urlopen(f"http://127.0.0.1:{port.number}") as answer:
    ...         print(answer.status, answer.read()[:20])
    200 b'{"run_id": "example"'
    """

    def __init__(self, address: tuple[str, int] | None, status: RunStatus) -> None:
        super().__init__("phalanx-health", _MOST, _WITHIN, waits=True)
        self._address = address
        self._status = status

    def start(self) -> None:
        """Listen, and answer from now on. Idempotent. Raises OSError, whose message names the variable."""
        if self._address is None or self.loop is not None:
            return
        import socket

        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        try:
            listener = socket.create_server(self._address, family=family, backlog=2 * _MOST)
        except OSError as error:
            host, port = self._address
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise OSError(
                error.errno, f"{PORT_ENV}: {where}: {(error.strerror or str(error)).partition(' (while ')[0]}"
            ) from None
        listener.setblocking(False)
        self.begin(listener)

    def stop(self) -> None:
        """Close the port, and the connections. Idempotent."""
        self.end(_STOP_WITHIN)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def variables(self) -> dict[str, str]:
        """Return what workers find in place of the variable: an agent among them could not have the same port."""
        return {PORT_ENV: ""} if self.loop is not None else {}

    # --- the server's thread

    def ready(self, connection: socket.socket, events: int) -> None:  # noqa: ARG002 - it reads, and has sent all
        """See `LocalServer`."""
        data = connection.recv(_MOST_BYTES)
        request = self.connections[connection] = self.connections[connection] + data
        whole = b"\r\n\r\n" in request or b"\n\n" in request
        if whole or len(request) >= _MOST_BYTES:
            connection.send(self._answer(request, whole=whole))  # less than any send buffer
        if whole or not data or len(request) >= _MOST_BYTES:
            self.drop(connection)

    def _answer(self, request: bytes, *, whole: bool) -> bytes:
        verb, _, rest = request.partition(b" ")
        import json

        head, body = "200 OK", json.dumps(self._status.agent()) + "\n"
        if not whole or b"HTTP/" not in rest.partition(b"\n")[0]:
            head, body = "400 Bad Request", ""
        elif verb not in (b"GET", b"HEAD"):
            head, body = "405 Method Not Allowed\r\nAllow: GET, HEAD", ""
        more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nCache-Control: no-store"
        return f"HTTP/1.1 {head}\r\n{more}\r\nConnection: close\r\n\r\n{'' if verb == b'HEAD' else body}".encode()


ENABLE_FILE_TIMER_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"

LEVEL_ENV = "LOGLEVEL"
"""The variable that torch's loggers heed, too."""


class Services:
    """The services of a run. A context manager, which ends them.

    Args:
        address: Where it answers how it is, see `health_address`.
        status: What it answers.

    Attributes:
        variables: What workers find in the environment because of them.

    Raises OSError: a service cannot be started.
    """

    def __init__(self, address: tuple[str, int] | None, status: RunStatus) -> None:
        with ExitStack() as held:
            health = held.enter_context(Health(address, status))
            self.variables = _start_timers(status.run_id, held) | health.variables()
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


@contextmanager
def log_shown() -> Iterator[None]:
    """Write to stderr what is logged to ``phalanx`` and below, from the level of ``LOGLEVEL`` on, if that is set.

    Without it, or with a name that is no level, the host's settings hold: by default, warnings and errors are written.
    """
    text = os.environ.get(LEVEL_ENV, "").strip().upper()
    if not text:
        yield
        return
    import logging

    level = logging.getLevelNamesMapping().get(text)
    logger = logging.getLogger("phalanx")
    if level is None or logger.handlers:
        yield
        return
    before = logger.level
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("phalanx: %(levelname)s: %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _start_timers(run_id: str, held: ExitStack) -> dict[str, str]:
    """Run a `phalanx.timer.FileTimerServer` until ``held`` is closed, if the environment asks for one.

    Its pipe is at ``TORCHELASTIC_TIMER_FILE``, or beside it, if another agent's is there; or else at a path of its own
    among the temporary files. Returns the variable in which workers find it, see `FileTimerClient`. Raises OSError.
    """
    if os.environ.get(ENABLE_FILE_TIMER_ENV) != "1":
        return {}
    import uuid
    from tempfile import gettempdir

    path = os.environ.get(TIMER_FILE_ENV) or os.path.join(gettempdir(), f"phalanx_timer_{uuid.uuid4()}")
    try:
        server = _serve_timers(path, run_id)
    except OSError as error:
        if not getattr(error, "is_served", False):
            raise
        path = f"{path}.{os.getpid()}"  # another agent of this machine has that one
        server = _serve_timers(path, run_id)
    held.callback(server.stop)
    return {TIMER_FILE_ENV: path}


def _serve_timers(path: str, run_id: str) -> FileTimerServer:
    from phalanx.timer import FileTimerServer

    server = FileTimerServer(path, run_id)
    try:
        server.start()
    except OSError as error:
        if getattr(error, "is_served", False):
            raise
        why = error.strerror if isinstance(error.errno, int) else error.errno
        msg = f"{TIMER_FILE_ENV}: {path}: {why}"
        raise OSError(msg) from error
    return server
