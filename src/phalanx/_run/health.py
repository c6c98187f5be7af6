"""Where an agent answers over HTTP: a listening socket, and a thread for each connection, of which there are few.

Owns the sockets, the threads, their bounds, and what a fork does with them. Knows no HTTP: what is answered is made by
`health_pages`, which no start has to load.
"""

from __future__ import annotations

import _socket  # where gevent has patched `socket`, that waits in another thread's loop
import os
import socket
import struct
from contextlib import suppress

from phalanx._base import clock, interrupts, unpatched

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Self

MOST = 32
"""Connections at a time. Beyond them, the oldest is closed that has had `BRIEF` seconds."""

BRIEF = 0.25
"""Seconds that a connection has in any case, however many others come."""

REQUEST_SECONDS, ANSWER_SECONDS = 2.0, 5.0
"""In which a request has to be there, and then its answer to be taken; else the connection is closed."""

MOST_BYTES = 8192
"""Of a request."""

_BACKLOG = 128
_NEXT_TRY = 1.0  # seconds after which connections are accepted again, if no descriptor or thread was left
_STOP_WITHIN = 10.0  # seconds

_RESET = struct.pack("ii", 1, 0)  # a struct linger: on, for no time

allocate_lock = unpatched.module("_thread").allocate_lock

loading = allocate_lock()
"""Held while a connection's thread imports a module: a fork in the midst of that would never have it."""


class HealthServer:
    r"""Answers requests at an address, from `start` to `stop`. A context manager.

    Args:
        address: The host and the port to listen at.
        name: The option or the variable that the address comes from, for the error.
        answer: Called with a request: all that came before its blank line, or less if that did not come within
            `MOST_BYTES`. Returns all that is sent. On threads of this object, several at a time.

    >>> from phalanx._run import master_port
    >>> with master_port.reserve() as port, HealthServer(("127.0.0.1", port.number), "--port", bytes.upper):
    ...     with socket.create_connection(("127.0.0.1", port.number)) as connection:
    ...         connection.sendall(b"hello\n\n"), connection.recv(99)
    (None, b'HELLO\n\n')
    """

    def __init__(self, address: tuple[str, int], name: str, answer: Callable[[bytes], bytes]) -> None:
        self._address, self._name, self._answer = address, name, answer
        self._listener: _socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[_socket.socket, tuple[float, threading.Thread]] = {}  # since when, the oldest first
        self._is_over = False
        self._free = allocate_lock()  # released when a connection ends
        self._free.acquire()

    def start(self) -> None:
        """Listen, and answer from now on. Raises OSError, whose message has the name."""
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server(self._address, family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            why = (getattr(error, "strerror", None) or str(error)).partition(" (while ")[0]
            raise OSError(getattr(error, "errno", 0), f"{self._name}: {where}: {why}") from None
        with interrupts.deferred():
            own = self._listener = _socket.socket(fileno=listener.detach())
            own.setblocking(True)
            thread = unpatched.thread(target=self._accept, args=(own,), name="phalanx-health")
            _open.add(self)
            try:
                thread.start()
            except BaseException:
                self._close()
                raise
            self._thread = thread

    def stop(self) -> None:
        """Close the port, and the connections. Idempotent. Waits for the threads, which end soon."""
        thread, until = self._thread, clock.now() + _STOP_WITHIN
        if thread is None:
            return
        self._is_over = True
        self._ring()
        self._end(self._listener)
        thread.join(_STOP_WITHIN)
        for connection, (_, answering) in self._connections.copy().items():
            self._end(connection)
            answering.join(max(0.0, until - clock.now()))
        self._thread = None  # now: a signal may have raised before

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def abandon(self) -> None:
        """Close, in a fork, what belongs to the parent."""
        self._thread = None
        for each in (*self._connections, *filter(None, (self._listener,))):
            each.close()
        self._connections.clear()

    @staticmethod
    def _end(connection: _socket.socket | None) -> None:
        """Have the thread that waits at a socket go on: close(2) does not wake it, and the number would be reused."""
        with suppress(OSError):  # closed, or the other end has gone
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)  # of a socket that listens, accept(2) returns EINVAL

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it is released
            self._free.release()

    # --- the thread that accepts

    def _accept(self, listener: _socket.socket) -> None:
        try:
            while not self._is_over:
                try:
                    fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - `accept` calls it
                except ConnectionError:  # the other end has gone
                    continue
                except OSError:  # it has been shut down; or no descriptor is left, which would be found again at once
                    self._wait(_NEXT_TRY)
                    continue
                connection = _socket.socket(fileno=fd)
                self._make_room()
                thread = unpatched.thread(target=self._serve, args=(connection,), name="phalanx-health-answer")
                self._connections[connection] = clock.now(), thread
                try:
                    thread.start()
                except RuntimeError:  # no thread is left
                    self._connections.pop(connection, None)
                    connection.close()
                    self._wait(_NEXT_TRY)
        finally:
            self._close()

    def _make_room(self) -> None:
        """Wait until there are fewer connections than `MOST`. The oldest has `BRIEF` seconds for its end."""
        while len(self._connections) >= MOST and not self._is_over:
            connection, (since, _) = next(iter(self._connections.copy().items()), (None, (0.0, None)))
            left = since + BRIEF - clock.now()
            if left <= 0:
                self._end(connection)
            self._wait(left if left > 0 else _NEXT_TRY)

    def _wait(self, seconds: float) -> None:
        """Wait until a connection has ended, or all is over; for so many seconds at most."""
        if not self._is_over:
            self._free.acquire(timeout=seconds)

    def _close(self) -> None:
        _open.discard(self)
        if self._listener is not None:
            self._listener.close()

    # --- the threads of connections

    def _serve(self, connection: _socket.socket) -> None:
        try:
            request = self._read(connection)
            if request:
                self._send(connection, self._answer(request))
        except OSError:  # the other end is too slow, or has gone; or this is over
            pass
        finally:
            connection.close()
            self._connections.pop(connection, None)
            self._ring()

    @staticmethod
    def _send(connection: _socket.socket, answer: bytes) -> None:
        """Send an answer. Raises OSError."""
        connection.settimeout(ANSWER_SECONDS)  # of sendall, for the whole of it
        try:
            connection.sendall(answer)
        except TimeoutError:  # the kernel would go on with what the other end has not taken, see socket(7)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    @staticmethod
    def _read(connection: _socket.socket) -> bytes:
        """Read a request, see the class; b"": none has come. Raises OSError."""
        until, request = clock.now() + REQUEST_SECONDS, b""
        while not is_whole(request) and len(request) < MOST_BYTES:
            connection.settimeout(max(0.001, until - clock.now()))  # 0 would not wait at all
            part = connection.recv(MOST_BYTES - len(request))
            if not part:
                return b""
            request += part
        return request


def is_whole(request: bytes) -> bool:
    """Whether the blank line has come that ends a request without a body."""
    return b"\r\n\r\n" in request or b"\n\n" in request


_open: set[HealthServer] = set()


def _after_fork() -> None:
    loading.release()
    for server in _open:
        server.abandon()
    _open.clear()


os.register_at_fork(before=loading.acquire, after_in_parent=loading.release, after_in_child=_after_fork)
