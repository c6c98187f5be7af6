"""A small server in an agent: a thread that accepts connections, each of which has a bounded time.

Owns the thread, the descriptors and what a fork does with them. What is answered is a subclass's business.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

from phalanx._base import interrupts, unpatched
from phalanx._base.loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import threading

_NEXT_TRY = 1.0  # seconds after which connections are accepted again, if no descriptor was left


class LocalServer:
    """A listening socket and its connections, from `begin` to `end`. A slow one delays no other.

    Args:
        name: Of the thread, which calls all methods below `end`.
        most: How many connections there may be at a time. Others are closed.
        seconds: After which a connection is closed.

    Attributes:
        connections: What is kept of each.
    """

    def __init__(self, name: str, most: int, seconds: float) -> None:
        self._name, self._most, self._seconds = name, most, seconds
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self.loop: Loop | None = None
        self.held = ExitStack()  # until the end of the thread
        self.connections: dict[socket.socket, bytes] = {}

    def begin(self) -> None:
        """Start to listen, see `listen`. Raises OSError, RuntimeError: no descriptor is left, or no thread."""
        with interrupts.deferred():
            loop = self.loop = Loop()
            thread = unpatched.thread(target=self._serve, args=(loop,), name=self._name)
            _open.add(self)
            try:
                thread.start()
            except BaseException:
                self._close(loop)
                raise
            self._thread = thread

    def end(self, seconds: float) -> None:
        """Close the socket and the connections. Waits for that at most so many seconds. Idempotent."""
        thread = self._thread
        if thread is not None and self.loop is not None and self._owner == os.getpid():
            self.loop.call(self.loop.stop)
            thread.join(seconds)
            self._thread = None  # now: a signal may have raised before

    def listen(self) -> socket.socket:
        """Return a socket that listens, and does not block."""
        raise NotImplementedError

    def accepted(self, connection: socket.socket) -> None:
        """Handle a connection. By default, `ready` does."""

    def ready(self, connection: socket.socket, events: int) -> None:
        """Read or write what can be. May raise OSError: the other end has gone."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Handle the failure of the thread, which ends."""

    def drop(self, connection: socket.socket) -> None:
        """Close a connection, if that has not been done."""
        if self.connections.pop(connection, None) is not None and self.loop is not None:
            self.loop.forget(connection.fileno())
            connection.close()

    def _serve(self, loop: Loop) -> None:
        try:
            listener = self._listener = self.listen()
            self._await(loop, listener)
            loop.run()
        except Exception as error:  # noqa: BLE001 - the run goes on
            with suppress(Exception):  # the caller's
                self.failed(error)
        finally:
            self._close(loop)
            self.held.close()

    def _await(self, loop: Loop, listener: socket.socket) -> None:
        loop.watch(listener.fileno(), lambda _events: self._accept(loop, listener))

    def _accept(self, loop: Loop, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # the other end has gone
            return
        except OSError:  # no descriptor is left: it would be reported again at once, and for ever
            loop.forget(listener.fileno())
            loop.after(_NEXT_TRY, lambda: self._await(loop, listener))
            return
        if len(self.connections) >= self._most:
            connection.close()
            return
        connection.setblocking(False)
        self.connections[connection] = b""
        loop.watch(connection.fileno(), lambda events: self._ready(connection, events))
        loop.after(self._seconds, lambda: self.drop(connection))
        self.accepted(connection)

    def _ready(self, connection: socket.socket, events: int) -> None:
        try:
            self.ready(connection, events)
        except BlockingIOError:
            return
        except OSError:
            self.drop(connection)

    def _close(self, loop: Loop) -> None:
        _open.discard(self)
        self._close_sockets()
        loop.close()

    def _close_sockets(self) -> None:
        for each in (*self.connections, *filter(None, (self._listener,))):
            each.close()
        self.connections.clear()

    def abandon(self) -> None:
        """Close, in a fork, what belongs to the parent."""
        self._thread = None
        self._close_sockets()
        if self.loop is not None:
            self.loop.close_in_fork()


_open: set[LocalServer] = set()


def _abandon_all() -> None:
    for server in _open:
        server.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)
