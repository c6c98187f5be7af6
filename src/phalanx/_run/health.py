"""Where an agent answers over HTTP: `health_pages`, which no start has to load, makes what is answered."""

from __future__ import annotations

import socket

from phalanx._run.local_server import LocalServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

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
        return is_whole(request)

    def asked(self, connection: socket.socket, request: bytes) -> None:
        """See `LocalServer`."""
        self.reply(connection, self._answer(request))


def is_whole(request: bytes) -> bool:
    """Whether the blank line has come that ends a request without a body."""
    return b"\r\n\r\n" in request or b"\n\n" in request
