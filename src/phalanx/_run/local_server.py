"""A small server in an agent: a thread that accepts connections, each of which has a bounded time.

Owns the thread, the descriptors and what a fork does with them. What is answered is a subclass's business.
"""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack, suppress

from phalanx._base import clock, interrupts, unpatched
from phalanx._base.loop import READ, WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import threading

_NEXT_TRY = 1.0  # seconds after which connections are accepted again, if no descriptor was left

no_fork = unpatched.module("_thread").RLock()
"""Held where a fork would never have the rest of what a server's thread is at: a descriptor's record, an import."""

os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)


def has_no_more(request: bytes) -> bool:
    """Whether the blank line has come that ends a request of HTTP without a body."""
    return b"\r\n\r\n" in request or b"\n\n" in request


class LocalServer:
    """A listening socket and its connections, from `begin` to `end`: each carries a request, and its answer.

    A slow one delays no other.

    Args:
        name: Of the thread, which calls all methods below `end`.
        most: How many connections there may be at a time. Others are closed, unless there is a ``brief``.
        seconds: After which a connection is closed.
        most_bytes: Of a request.
        brief: Seconds that a connection has to ask where others wait: then the oldest makes room. None: it stays.

    Attributes:
        connections: Of each, what has come of its request, and later what is left of its answer.
    """

    def __init__(self, name: str, most: int, seconds: float, most_bytes: int, brief: float | None = None) -> None:
        self._name, self._most, self._seconds = name, most, seconds
        self._most_bytes, self._brief = most_bytes, brief
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._is_full = False  # no connection is accepted until another is over
        self.loop: Loop | None = None
        self.held = ExitStack()  # until the end of the thread
        self.connections: dict[socket.socket, bytes] = {}
        self._since: dict[socket.socket, float] = {}  # when each was accepted, the oldest first
        self._asked: set[socket.socket] = set()  # those whose request has been handled

    def begin(self, listener: socket.socket | None = None) -> None:
        """Start to listen; None: see `listen`. Raises OSError, RuntimeError: no descriptor is left, or no thread."""
        self._listener = listener
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
        """Handle a connection: refuse it by `drop`, or greet it. By default, its request is read."""

    def is_whole(self, request: bytes) -> bool:
        """Whether this is a whole request."""
        raise NotImplementedError

    def asked(self, connection: socket.socket, request: bytes) -> None:
        """Handle a request, which may be none: then it has as many bytes as one may have. `reply` answers it."""
        raise NotImplementedError

    def reply(self, connection: socket.socket, answer: bytes) -> None:
        """Send an answer, and close the connection then. Nothing is sent to one that has gone, or was answered."""
        if connection in self._asked and not self.connections[connection] and self.loop is not None:
            self.connections[connection] = answer
            self.loop.change(connection.fileno(), READ | WRITE)
            self._ready(connection, WRITE)  # now: to make the answer may have taken all of the time

    def failed(self, error: Exception) -> None:
        """Handle the failure of the thread, which ends."""

    def drop(self, connection: socket.socket) -> None:
        """Close a connection, if that has not been done."""
        left = self.connections.get(connection)
        if left is not None and self.loop is not None:
            self.loop.forget(connection.fileno())
            if left and connection in self._asked:  # the kernel would keep what the other end has not taken: socket(7)
                import socket

                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with no_fork:
                connection.close()
                del self.connections[connection], self._since[connection]
            self._asked.discard(connection)
            if self._listener is not None and self._is_full:
                self._await(self.loop, self._listener)

    def _serve(self, loop: Loop) -> None:
        try:
            listener = self._listener = self._listener or self.listen()
            self._await(loop, listener)
            loop.run()
        except Exception as error:  # noqa: BLE001 - the run goes on
            with suppress(Exception):  # the caller's
                self.failed(error)
        finally:
            self._close(loop)
            self.held.close()

    def _await(self, loop: Loop, listener: socket.socket) -> None:
        self._is_full = False
        loop.watch(listener.fileno(), lambda _events: self._accept(loop, listener))

    def _accept(self, loop: Loop, listener: socket.socket) -> None:
        if self._brief is not None and len(self.connections) >= self._most:
            self._is_full = True
            loop.forget(listener.fileno())
            oldest, since = next(iter(self._since.items()))
            loop.at(since + self._brief, lambda: self._make_room(oldest))
            return
        with no_fork:
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
            self.connections[connection], self._since[connection] = b"", clock.now()
        loop.watch(connection.fileno(), lambda events: self._ready(connection, events))
        loop.after(self._seconds, lambda: self.drop(connection))
        self.accepted(connection)

    def _make_room(self, connection: socket.socket) -> None:
        """Close a connection, once what it has asked by now is answered."""
        if connection in self.connections:
            self._ready(connection, READ)
            self.drop(connection)

    def _ready(self, connection: socket.socket, events: int) -> None:
        try:
            if connection in self._asked:
                self._send(connection, events)
            else:
                self._read(connection)
        except BlockingIOError:
            return
        except Exception:  # noqa: BLE001 - the other end has gone, or there is no answer: others have theirs
            self.drop(connection)

    def _read(self, connection: socket.socket) -> None:
        left = self._most_bytes - len(self.connections[connection])
        data = connection.recv(left)
        request = self.connections[connection] = self.connections[connection] + data
        if len(data) == left or self.is_whole(request):
            self._asked.add(connection)
            self.connections[connection] = b""
            self.asked(connection, request)
        elif not data:
            self.drop(connection)

    def _send(self, connection: socket.socket, events: int) -> None:
        """Send what can be sent. Who has gone, or sends more than its request, is answered no more."""
        left = self.connections[connection]
        if not events & ~WRITE:
            left = self.connections[connection] = left[connection.send(left) :]
        if events & ~WRITE or not left:
            self.drop(connection)

    def _close(self, loop: Loop) -> None:
        _open.discard(self)
        self._close_sockets()
        loop.close()

    def _close_sockets(self) -> None:
        with no_fork:
            for each in (*self.connections, *filter(None, (self._listener,))):
                each.close()
            self.connections.clear()
            self._since.clear()
            self._asked.clear()

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
