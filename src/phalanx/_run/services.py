"""What a run has beside its workers if it is asked for: a timer server, an answer how it is, a log.

Owns where an agent answers over HTTP: `health_pages`, which no start has to load, makes what is answered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from phalanx._events.kinds import Event
from phalanx._rendezvous.endpoint import split_listener
from phalanx._run.local_server import LocalServer, has_no_more, no_fork
from phalanx._run.status import RunStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from phalanx.timer import FileTimerServer

PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"
"""The variable: a port, or an address of this machine and a port. An empty one is as none."""

METRICS_PORT = "--metrics-port"
"""The option with such a value,"""
METRICS_PORT_ENV = "PHALANX_METRICS_PORT"
"""and its variable."""

Addresses = dict[tuple[str, int], str]
"""Where an agent answers how it is: hosts and ports, and of each the option or the variable that it comes from."""


def address_of_environment() -> Addresses:
    """Return where to answer, by the environment. Raises ValueError."""
    text = os.environ.get(PORT_ENV, "").strip()
    if not text:
        return {}
    try:
        return {split_listener(text): PORT_ENV}
    except ValueError as error:
        msg = f"{PORT_ENV}: {error}"
        raise ValueError(msg) from None


ENABLE_FILE_TIMER_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"

LEVEL_ENV = "LOGLEVEL"
"""The variable that torch's loggers heed, too."""


class Services:
    """The services of a run. A context manager, which ends them.

    Args:
        addresses: Where it answers how it is.
        status: What it answers.

    Attributes:
        variables: What workers find in the environment because of them: an agent among them could not have the same
            ports.
        observers: Take the events of the run, each on a thread of the name that is its key.

    Raises OSError: a service cannot be started.
    """

    def __init__(self, addresses: Addresses, status: RunStatus) -> None:
        self.observers: dict[str, Callable[[list[Event]], object]] = {}
        with ExitStack() as held:
            self.variables = _start_timers(status.run_id, held) | ports_for_workers(addresses)
            if addresses:
                from phalanx._run.run_metrics import RunMetrics

                metrics = RunMetrics(status)
                self.observers["phalanx-metrics"] = metrics.observe

                def answer(request: bytes) -> bytes:
                    with no_fork:  # now: no start is to wait for it
                        from phalanx._run.health_pages import answer
                    return answer(request, metrics)

                for address, name in addresses.items():
                    held.enter_context(HealthServer(address, name, answer))
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


_MOST = 32  # connections at a time; of more, the oldest is closed that has had
_BRIEF = 0.01  # seconds: whoever asks does so at once. A slower one has no chance against hundreds of silent ones
_WITHIN = 5.0  # seconds that a connection may take
_MOST_BYTES = 8192  # of a request
_BACKLOG = 128
_STOP_WITHIN = 10.0  # seconds


class HealthServer(LocalServer):
    r"""Answers requests at an address, from `start` to `stop`. A context manager.

    Args:
        address: The host and the port to listen at.
        name: The option or the variable that the address comes from, for the error.
        answer: Called with a request: all that came before its blank line, or less if that did not come within 8 KiB.
            Returns all that is sent. On a thread of this object.

    >>> import socket
    >>> from phalanx._run import master_port
    >>> with master_port.reserve() as port, HealthServer(("127.0.0.1", port.number), "--port", bytes.upper):
    ...     with socket.create_connection(("127.0.0.1", port.number)) as connection:
    ...         connection.sendall(b"hello\n\n"), connection.recv(99)
    (None, b'HELLO\n\n')
    """

    def __init__(self, address: tuple[str, int], name: str, answer: Callable[[bytes], bytes]) -> None:
        super().__init__("phalanx-health", _MOST, _WITHIN, _MOST_BYTES, _BRIEF)
        self._address, self._origin, self._answer = address, name, answer

    def start(self) -> None:
        """Listen, and answer from now on. Raises OSError, whose message has the name."""
        import socket  # which no other start has to load

        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server(self._address, family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            why = (getattr(error, "strerror", None) or str(error)).partition(" (while ")[0]
            raise OSError(getattr(error, "errno", 0), f"{self._origin}: {where}: {why}") from None
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

    # --- the server's thread

    def is_whole(self, request: bytes) -> bool:
        """See `LocalServer`."""
        return has_no_more(request)

    def asked(self, connection: socket.socket, request: bytes) -> None:
        """See `LocalServer`."""
        self.reply(connection, self._answer(request))


def ports_for_workers(addresses: Addresses) -> dict[str, str]:
    """Return the variables that workers find empty where an agent answers at these addresses."""
    return {name: "" for name in (PORT_ENV, METRICS_PORT_ENV) if addresses and os.environ.get(name)}


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
