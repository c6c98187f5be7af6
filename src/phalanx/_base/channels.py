"""Sends messages and descriptors over a Unix socket; tells who is at its other end.

Owns the framing; knows nothing of what a message means. A worker of Python 3.8 can import it, to be debugged.

One SOCK_SEQPACKET packet is one message: the kernel keeps the boundaries, and several writers may share one end.
A message that does not fit a packet travels in a memfd that is sent along. `marshal` encodes: it is built in, needs no
import, and both ends are the same interpreter of the same version on the same machine.
"""

from __future__ import annotations

import _socket  # the C module: `socket` itself costs 7 ms to import, most of it for enums
import errno
import marshal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    Message = tuple[object, ...]
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_PACKET = 32 * 1024  # well under the default send buffer (212,992 bytes), so that several packets fit
_DESCRIPTORS = 250  # SCM_MAX_FD is 253 (unix(7))
_INT = 4


class Closed(Exception):  # noqa: N818 - a state of the channel, not an error
    """The other end is closed."""


class Truncated(OSError):  # noqa: N818 - what the kernel calls it: MSG_CTRUNC
    """The kernel dropped descriptors that came with ``message``, because no more may be open here (unix(7))."""

    def __init__(self, message: object) -> None:
        super().__init__(errno.EMFILE, os.strerror(errno.EMFILE))
        self.message = message


def pair() -> tuple[_socket.socket, _socket.socket]:
    """Make two connected ends, close-on-exec. Raises OSError."""
    return _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


def peer(sock: _socket.socket) -> tuple[int, int]:
    """Read the pid and the uid of the process at the other end, as it was when it connected, or listened.

    SO_PEERCRED, unix(7). The pid is 0 if the process is in a pid namespace that is not below ours.
    """
    pid, uid, _gid = memoryview(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 3 * _INT)).cast("I")
    return pid, uid


def by_folder(path: str, call: Callable[[str], object]) -> None:
    """Call ``call`` with a short path to ``path``: the whole one may be too long for a socket, see unix(7)."""
    name = path.rpartition("/")[2]
    folder = os.open(path[: len(path) - len(name)] or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)


class Channel:
    """One end of a connection. Sending never blocks: a message that cannot be sent at once is kept, in order.

    Used by one thread. The descriptors passed to `send` are duplicated by the kernel and stay the caller's; those that
    `receive` returns are the receiver's, close-on-exec.
    """

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        # Each: body, descriptors, and those of them that are ours, to be closed.
        self._outbox: list[tuple[bytes, tuple[int, ...], tuple[int, ...]]] = []
        self._fds: list[int] = []
        sock.setblocking(False)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def descriptors(self) -> list[int]:
        """All descriptors that are open here."""
        return [self.fileno(), *(fd for _body, _fds, own in self._outbox for fd in own), *self._fds]

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send, or keep for `flush`. Returns whether nothing is kept. Raises Closed when the other end is closed.

        The caller may close the descriptors afterwards: those of a message that is kept are duplicated.
        """
        first = len(self._outbox)
        while len(fds) > _DESCRIPTORS:
            self._outbox.append((marshal.dumps(None), tuple(fds[:_DESCRIPTORS]), ()))
            fds = fds[_DESCRIPTORS:]
        body = marshal.dumps(message)  # type: ignore[arg-type]  # plain values, as `marshal` demands; typeshed spells them out
        own: tuple[int, ...] = ()
        if len(body) > _PACKET:
            memfd = os.memfd_create("phalanx-message")
            view = memoryview(body)
            while view:
                view = view[os.write(memfd, view) :]
            body = marshal.dumps(memfd)  # any int: "the message is in the last descriptor"
            own = (memfd,)
        self._outbox.append((body, (*fds, *own), own))
        count = len(self._outbox)
        if self.flush():
            return True
        for index in range(max(0, first - count + len(self._outbox)), len(self._outbox)):
            body, fds, own = self._outbox[index]
            duplicates = tuple(os.dup(fd) for fd in fds if fd not in own)
            self._outbox[index] = (body, (*duplicates, *own), (*duplicates, *own))
        return False

    def flush(self) -> bool:
        """Send what is kept, until the socket is full. Returns whether nothing is kept. Raises Closed."""
        while self._outbox:
            body, fds, own = self._outbox[0]
            rights = b"".join(fd.to_bytes(_INT, sys.byteorder) for fd in fds)
            try:
                self._sock.sendmsg(
                    [body], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else [], _socket.MSG_NOSIGNAL
                )
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionError):
                self._drop()
                raise Closed from None
            del self._outbox[0]
            for fd in own:
                os.close(fd)
        return True

    def receive(self) -> tuple[Message, list[int]] | None:
        """Take the next message and its descriptors; None if there is none now. Raises Closed at the end; Truncated."""
        while True:
            try:
                body, ancillary, flags, _addr = self._sock.recvmsg(
                    _PACKET + 1024, _socket.CMSG_SPACE(_INT * (_DESCRIPTORS + 3)), _socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end was closed before it had read all of ours. The kernel reports that once, before the
                # messages that the other end had sent.
                continue
            for level, kind, data in ancillary:
                if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                    self._fds += memoryview(data)[: len(data) // _INT * _INT].cast("i").tolist()
            if not body:
                raise Closed
            message = marshal.loads(body)  # noqa: S302 - the other end is our own process
            if flags & _socket.MSG_CTRUNC:
                self.drop_received()
                raise Truncated(message)
            if message is None:
                continue
            fds, self._fds = self._fds, []
            if isinstance(message, int):
                with open(fds.pop(), "rb") as file:
                    file.seek(0)
                    message = marshal.load(file)  # noqa: S302 - as above
            return message, fds

    def receive_by(self, deadline: float | None, ends: Iterable[int] = ()) -> tuple[Message, list[int]] | None:
        """Wait for the next message; it is returned as by `receive`.

        Args:
            deadline: How long, as a moment in seconds, monotonic. None: without limit.
            ends: Descriptors that end the wait when they are readable and no message is there. -1 is ignored.

        Returns None when one of ``ends`` was readable first. Raises TimeoutError at the deadline; Closed; Truncated.
        """
        import select  # here, because a worker that only sends does without

        from phalanx._base import clock

        poll = select.poll()
        for fd in (self.fileno(), *(fd for fd in ends if fd >= 0)):
            poll.register(fd, select.POLLIN)
        while (received := self.receive()) is None:
            ready = dict(poll.poll(None if deadline is None else max(0.0, deadline - clock.now()) * 1000))
            if not ready:
                raise TimeoutError
            if self.fileno() not in ready:
                return None
        return received

    def shutdown(self) -> None:
        """Shut the connection down, for every process that holds this end. Idempotent."""
        try:
            self._sock.shutdown(_socket.SHUT_RDWR)
        except OSError:  # ENOTCONN: it has ended; EBADF: it is closed
            pass

    def close(self) -> None:
        """Close the socket, and drop messages that were not sent or not taken. Idempotent."""
        self._sock.close()
        self._drop()
        self.drop_received()

    def drop_received(self) -> None:
        """Close the descriptors of a message that an exception has kept `receive` from returning."""
        while self._fds:
            os.close(self._fds.pop())

    def _drop(self) -> None:
        """Drop the messages that were not sent."""
        outbox, self._outbox = self._outbox, []
        for _body, _fds, own in outbox:
            for fd in own:
                os.close(fd)
