"""Messages and descriptors over a socket. Owns framing; knows nothing of what a message means.

One SOCK_SEQPACKET packet is one message: the kernel keeps the boundaries, and several writers may share one end.
What does not fit a packet travels in a memfd beside it. `marshal` encodes: it is built in, needs no import, and
both ends are the same interpreter of the same version on the same machine.
"""

from __future__ import annotations

import _socket  # the C module: `socket` itself costs 7 ms to import, most of it for enums
import errno
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

Message = tuple[object, ...]

_PACKET = 32 * 1024  # well under the default send buffer (212,992 bytes), so that several packets fit
_DESCRIPTORS = 250  # SCM_MAX_FD is 253 (unix(7))
_INT = 4


class Closed(Exception):  # noqa: N818 - a state of the channel, not an error
    """The other end is gone."""


class Truncated(OSError):  # noqa: N818 - what the kernel calls it: MSG_CTRUNC
    """The kernel dropped descriptors that came with ``message``, because no more may be open here (unix(7))."""

    def __init__(self, message: object) -> None:
        super().__init__(errno.EMFILE, os.strerror(errno.EMFILE))
        self.message = message


def pair() -> tuple[_socket.socket, _socket.socket]:
    """Two connected ends, close-on-exec."""
    return _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


class Channel:
    """One end of a conversation. Non-blocking both ways; what cannot be sent at once is kept, in order.

    Used by one thread. The descriptors passed to `send` are duplicated by the kernel and stay the caller's; those that
    `receive` returns belong to the receiver, close-on-exec.
    """

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        self._outbox: list[tuple[bytes, tuple[int, ...], int]] = []
        self._fds: list[int] = []
        sock.setblocking(False)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send, or keep for `flush`. Returns whether all is sent. Raises Closed when nobody can read it any more."""
        while len(fds) > _DESCRIPTORS:
            self._outbox.append((marshal.dumps(None), tuple(fds[:_DESCRIPTORS]), -1))
            fds = fds[_DESCRIPTORS:]
        body = marshal.dumps(message)  # type: ignore[arg-type]  # plain values, as `marshal` demands; typeshed spells them out
        memfd = -1
        if len(body) > _PACKET:
            memfd = os.memfd_create("phalanx-message")
            view = memoryview(body)
            while view:
                view = view[os.write(memfd, view) :]
            body = marshal.dumps(memfd)  # any int: "the message is in the last descriptor"
            fds = (*fds, memfd)
        self._outbox.append((body, tuple(fds), memfd))
        return self.flush()

    def flush(self) -> bool:
        """Send what is kept, as far as it goes. Returns whether all is sent. Raises Closed."""
        while self._outbox:
            body, fds, memfd = self._outbox[0]
            rights = b"".join(fd.to_bytes(_INT, sys.byteorder) for fd in fds)
            try:
                self._sock.sendmsg(
                    [body], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else [], _socket.MSG_NOSIGNAL
                )
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionError):
                raise Closed from None
            del self._outbox[0]
            if memfd >= 0:
                os.close(memfd)
        return True

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors; None when there is none now. Raises Closed at the end; Truncated."""
        while True:
            try:
                body, ancillary, flags, _addr = self._sock.recvmsg(
                    _PACKET + 1024, _socket.CMSG_SPACE(_INT * (_DESCRIPTORS + 3)), _socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end left without reading all of ours. The kernel says so once, ahead of what it had sent.
                continue
            for level, kind, data in ancillary:
                if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                    self._fds += memoryview(data)[: len(data) // _INT * _INT].cast("i").tolist()
            if not body:
                raise Closed
            message = marshal.loads(body)  # noqa: S302 - the other end is our own process
            if flags & _socket.MSG_CTRUNC:
                raise Truncated(message)
            if message is None:
                continue
            fds, self._fds = self._fds, []
            if isinstance(message, int):
                with open(fds.pop(), "rb") as file:
                    file.seek(0)
                    message = marshal.load(file)  # noqa: S302 - as above
            return message, fds

    def shutdown(self) -> None:
        """End the conversation for every process that holds this end of it. Idempotent."""
        try:  # noqa: SIM105 - the keeper pays for no contextlib
            self._sock.shutdown(_socket.SHUT_RDWR)
        except OSError:  # ENOTCONN: it has ended; EBADF: it is closed
            pass

    def close(self) -> None:
        """Close the socket, and drop what was not sent or not taken. Idempotent."""
        self._sock.close()
        for _body, _fds, memfd in self._outbox:
            if memfd >= 0:
                os.close(memfd)
        for fd in self._fds:
            os.close(fd)
        self._outbox, self._fds = [], []
