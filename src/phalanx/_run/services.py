"""What a run has beside its workers if the environment asks for it: a timer server, an answer how it is, a log."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

from phalanx._base import clock, unpatched
from phalanx._events.agent_kinds import AgentState
from phalanx._rendezvous.endpoint import split_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any, Self

    from phalanx._base.loop import Loop
    from phalanx._events.kinds import Event
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


class Health:
    """Answers over HTTP how an agent is, from `start` to `stop`. A context manager.

    Torch has the variable of its port, and no server behind it. A connection that is slow or silent holds up nobody.

    The answer to GET is status 200 with a JSON object: ``state`` (see `phalanx._run.attempts.STATES`), ``attempt``
    (from 0 on; null: there was none), ``since`` (of the state, Unix seconds), ``pid``, and what the agent adds.

    Args:
        address: The host and the port to listen at; None: nothing is done.
        **facts: What the answer has besides, each time.

    >>> import urllib.request
    >>> from phalanx._run import master_port
    >>> port = master_port.reserve()
    >>> with Health(("127.0.0.1", port.number), run_id="example") as health:
    ...     health.note("RUNNING", 0)
    ...     with urllib.request.urlopen(f"http://127.0.0.1:{port.number}") as answer:
    ...         print(answer.status, answer.read()[:20])
    200 b'{"run_id": "example"'
    """

    def __init__(self, address: tuple[str, int] | None, **facts: Any) -> None:
        self._address = address
        self._facts = {**facts, "pid": os.getpid()}
        self._state: tuple[str, int, float] = ("NEW", -1, clock.wall())
        self._server: _Server | None = None

    def start(self) -> None:
        """Listen, and answer from now on. Idempotent. Raises OSError, whose message names the variable."""
        if self._address is None or self._server is not None:
            return
        try:
            self._server = _Server(self._address, self)
        except OSError as error:
            host, port = self._address
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise OSError(
                error.errno, f"{PORT_ENV}: {where}: {(error.strerror or str(error)).partition(' (while ')[0]}"
            ) from None

    def observe(self, events: list[Event]) -> None:
        """Note what has happened: an observer of the run's events."""
        for event in events:
            if isinstance(event, AgentState):
                attempt = max(self._state[1], event.attempt)
                if (event.state, attempt) != self._state[:2]:
                    self.note(event.state, attempt)

    def note(self, state: str, attempt: int) -> None:
        """Have the agent's state told from now on. Any thread may call this.

        Args:
            state: See `phalanx._run.attempts.STATES`.
            attempt: The attempt that is being started, runs, or ran last, from 0 on; -1: there was none.
        """
        self._state = state, attempt, clock.wall()

    def stop(self) -> None:
        """Close the port, and the connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def variables(self) -> dict[str, str]:
        """Return what workers find in place of the variable: an agent among them could not have the same port."""
        return {PORT_ENV: ""} if self._server is not None else {}

    def text(self) -> str:
        """Return the answer."""
        import json

        state, attempt, since = self._state
        number = None if attempt < 0 else attempt
        return json.dumps({**self._facts, "state": state, "attempt": number, "since": round(since, 3)})


class _Server:
    """The listening socket, and the thread."""

    def __init__(self, address: tuple[str, int], health: Health) -> None:
        import socket

        from phalanx._base.loop import Loop

        self._health = health
        self._open: dict[int, tuple[socket.socket, bytearray]] = {}
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=_MOST)
        self._listener.setblocking(False)
        self._loop = Loop()
        self._loop.watch(self._listener.fileno(), self._accept)
        self._thread = unpatched.thread(target=self._serve, args=(self._loop,), name="phalanx-health")
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise
        _running.add(self)

    def stop(self) -> None:
        _running.discard(self)
        self._loop.call(self._loop.stop)
        self._thread.join(_STOP_WITHIN)

    def _serve(self, loop: Loop) -> None:
        try:
            loop.run()
        finally:
            self._close()

    def _close(self) -> None:
        self._listener.close()
        for connection, _ in self._open.values():
            connection.close()
        self._open.clear()
        self._loop.close()

    def abandon(self) -> None:
        """In a fork: close what belongs to the agent."""
        self._listener.close()
        for connection, _ in self._open.values():
            connection.close()
        self._loop.close_in_fork()

    def _accept(self, _events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it would be told again at once, and for ever
                self._pause()
            return
        connection.setblocking(False)
        number = connection.fileno()
        self._open[number] = connection, bytearray()
        self._loop.watch(number, lambda _events: self._read(number))
        self._loop.after(_WITHIN, lambda: self._end(connection))
        if len(self._open) >= _MOST:
            self._pause()

    def _pause(self) -> None:
        """Accept nobody until the connections of now are over."""
        self._loop.forget(self._listener.fileno())
        self._loop.after(_WITHIN, lambda: self._loop.watch(self._listener.fileno(), self._accept))

    def _read(self, number: int) -> None:
        connection, request = self._open[number]
        try:
            data = connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        request += data
        whole = b"\r\n\r\n" in request or b"\n\n" in request
        if whole or len(request) >= _MOST_BYTES:
            self._answer(connection, bytes(request), whole=whole)
        if whole or not data or len(request) >= _MOST_BYTES:
            self._end(connection)

    def _answer(self, connection: socket.socket, request: bytes, *, whole: bool) -> None:
        verb, _, rest = request.partition(b" ")
        head, body = "200 OK", self._health.text() + "\n"
        if not whole or b"HTTP/" not in rest.partition(b"\n")[0]:
            head, body = "400 Bad Request", ""
        elif verb not in (b"GET", b"HEAD"):
            head, body = "405 Method Not Allowed\r\nAllow: GET, HEAD", ""
        more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nCache-Control: no-store"
        answer = f"HTTP/1.1 {head}\r\n{more}\r\nConnection: close\r\n\r\n{'' if verb == b'HEAD' else body}"
        try:
            connection.send(answer.encode())  # less than any send buffer
        except OSError:  # the other end has gone
            return

    def _end(self, connection: socket.socket) -> None:
        """Close a connection, if that has not been done."""
        number = connection.fileno()
        if number >= 0:
            self._loop.forget(number)
            del self._open[number]
            connection.close()


_running: set[_Server] = set()


def _abandon_all() -> None:
    for server in _running:
        server.abandon()
    _running.clear()


os.register_at_fork(after_in_child=_abandon_all)


ENABLE_FILE_TIMER_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"

LEVEL_ENV = "LOGLEVEL"
"""The variable that torch's loggers heed, too."""


class Services:
    """The services of a run. A context manager, which ends them.

    Args:
        address: Where it answers how it is, see `health_address`.
        run_id: The id of the run.
        max_restarts: How many restarts there may be.

    Attributes:
        variables: What workers find in the environment because of them.

    Raises OSError: a service cannot be started.
    """

    def __init__(self, address: tuple[str, int] | None, run_id: str, max_restarts: int) -> None:
        self._health = Health(address, run_id=run_id, max_restarts=max_restarts)
        self._timers = FileTimers()
        try:
            self._health.start()
            self.variables = self._timers.start(run_id) | self._health.variables()
        except BaseException:
            self._stop()
            raise

    def observe(self, events: list[Event]) -> None:
        """Note what has happened: an observer of the run's events."""
        self._health.observe(events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._timers.stop()
        self._health.stop()


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


class FileTimers:
    """Runs a `phalanx.timer.FileTimerServer` from the first attempt to the end, if the environment asks for one.

    Its pipe is at ``TORCHELASTIC_TIMER_FILE``, or beside it, if another agent's is there; or else at a path of its own
    among the temporary files. Workers find that variable, and make their `FileTimerClient` of it.
    """

    def __init__(self) -> None:
        self._server: FileTimerServer | None = None
        self._path = ""

    def start(self, run_id: str) -> dict[str, str]:
        """Start the server, if it is wanted and does not run. Return the variables for workers. Raises OSError."""
        if os.environ.get(ENABLE_FILE_TIMER_ENV) != "1":
            return {}
        if self._server is None:
            import uuid
            from tempfile import gettempdir

            self._path = os.environ.get(TIMER_FILE_ENV) or os.path.join(gettempdir(), f"phalanx_timer_{uuid.uuid4()}")
            try:
                self._server = self._serve(run_id)
            except OSError as error:
                if not getattr(error, "is_served", False):
                    raise
                self._path = f"{self._path}.{os.getpid()}"  # another agent of this machine has that one
                self._server = self._serve(run_id)
        return {TIMER_FILE_ENV: self._path}

    def _serve(self, run_id: str) -> FileTimerServer:
        from phalanx.timer import FileTimerServer

        server = FileTimerServer(self._path, run_id)
        try:
            server.start()
        except OSError as error:
            if getattr(error, "is_served", False):
                raise
            why = error.strerror if isinstance(error.errno, int) else error.errno
            msg = f"{TIMER_FILE_ENV}: {self._path}: {why}"
            raise OSError(msg) from error
        return server

    def stop(self) -> None:
        """Stop the server, if it runs, and remove the pipe."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
