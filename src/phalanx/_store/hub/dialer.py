"""Connects to the store: resolves its name, and tries one address after another. Owns the socket until it is connected.

Used by the thread of its loop. A name is resolved on a thread of its own, which is there meanwhile: a resolver may take
as long as it likes, and cannot be interrupted.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

from phalanx._base.loop import WRITE, Deadline, Loop
from phalanx._base.threads import SerialExecutor
from phalanx._store.hub import words


class Dialer:
    """Makes connections, one at a time.

    Args:
        loop: What watches them.
        host, port: Where to.
        seconds: How long a name may take to be resolved, and an address to answer.
        connected: Called with the connected socket, which is the callee's then.
        failed: Called with why there is no connection.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        seconds: float,
        connected: Callable[[socket.socket], None],
        failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._host = host
        self._port = port
        self._seconds = seconds
        self._connected = connected
        self._failed = failed
        self._resolver = SerialExecutor("phalanx-store-name")
        self._is_resolving = False  # a call may take longer than it was waited for
        self._is_waiting = False  # for a name
        self._addresses: list[tuple[Any, ...]] = []  # that are still to be tried, as getaddrinfo(3) has them
        self._sock: socket.socket | None = None
        self._deadline: Deadline | None = None

    def dial(self) -> None:
        """Try to connect. `connected` or `failed` is called once, perhaps before this returns."""
        try:
            found = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )  # fmt: skip
        except (OSError, UnicodeError):  # a name
            self._resolve()
        else:
            self._try_all(found)

    def cancel(self) -> None:
        """Stop trying: neither is called any more. Idempotent."""
        self._is_waiting = False
        self._addresses.clear()
        self._drop()

    def abandon(self) -> None:
        """Close the socket, in a fork."""
        if self._sock is not None:
            self._sock.close()

    def _resolve(self) -> None:
        self._is_waiting = True
        self._deadline = self._loop.after(self._seconds, self._see_no_name)
        if self._is_resolving:
            return  # the last call has not returned: its result will do
        self._is_resolving = True
        if not self._resolver.submit(self._look_up):
            self._is_resolving = False
            self._see_name([], "no thread can be started to resolve it")

    def _look_up(self) -> None:
        """On the resolver's thread."""
        found, why = [], ""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = words.of_name(getattr(error, "strerror", None) or str(error))
        self._loop.call(lambda: self._see_name(found, why))

    def _see_name(self, found: list[Any], why: str) -> None:
        self._is_resolving = False
        if not self._is_waiting:
            return
        self._is_waiting = False
        self._drop()
        if found:
            self._try_all(found)
        else:
            self._failed(why)

    def _see_no_name(self) -> None:
        self._is_waiting = False
        self._failed(f"its name was not resolved within {self._seconds:g} s")

    def _try_all(self, found: list[Any]) -> None:
        self._addresses = list(found)
        self._try_next("it has no address")

    def _try_next(self, why: str) -> None:
        """Try the next address. ``why``: what became of the last one."""
        self._drop()
        while self._addresses:
            family, kind, protocol, _, address = self._addresses.pop(0)
            try:
                self._sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
                error = self._sock.connect_ex(address)
                if error in (0, errno.EINPROGRESS):
                    self._loop.watch(self._sock.fileno(), self._ready, WRITE)
                    self._deadline = self._loop.after(self._seconds, self._see_no_answer)
                    return
                why = words.of_error(error)
            except OSError as raised:
                why = words.of_error(raised.errno) if raised.errno else str(raised)
            self._drop()
        self._failed(why)

    def _see_no_answer(self) -> None:
        self._try_next(words.of_silence(self._seconds))

    def _ready(self, _events: int) -> None:
        sock = self._sock
        assert sock is not None
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._try_next(words.of_error(error))
            return
        try:
            peer = sock.getpeername()
        except OSError:  # the event was of a socket that had this number before
            return
        if peer == sock.getsockname():  # nobody listens, and the port was our own by chance: tcp(7) lets both ends meet
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # frees the port at once
            self._try_next(words.of_error(errno.ECONNREFUSED))
            return
        self._sock = None
        self._loop.forget(sock.fileno())
        self._drop()
        self._addresses.clear()
        self._connected(sock)

    def _drop(self) -> None:
        """Close the socket, if there is one, and end the wait."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.forget(sock.fileno())
            sock.close()
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            deadline.cancel()
