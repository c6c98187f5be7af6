"""What workers send to their launcher: the packets, and the check of each one.

Owns both ends of the report socket, and the form of its packets. All workers of a group hold one end of it, and so may
any process that they start: the launcher trusts no packet. The kernel tells who sent it (SCM_CREDENTIALS, unix(7)). Its
content is cut by offset and length, without a decoder; a value that is not in the packet is in a sealed file in memory.
A packet of another form is dropped, with its descriptors, and is held against its sender alone. What a value means is
not known here: `pickling.results` unpickles it when it is wanted.

A packet is a letter and a content::

    R  the pickle of a value; descriptors: those that belong to the value
    L  nothing: a large value; the last descriptor is of its file, see `linux.seal`
    E  evidence that the worker could not write to a file, see `_evidence.sent`
    X  the exit code (1 byte) of a program that has left its main function
    T  nothing: a worker asks for the resource tracker, over the socket that is the one descriptor
"""

from __future__ import annotations

import _socket
import sys

from phalanx._base import channels
from phalanx._evidence import sent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESULT, LARGE, EVIDENCE, LEAVING, TRACKER = b"R", b"L", sent.LETTER, sent.LEAVING, b"T"

PACKET = 33 * 1024
"""The most bytes of a packet."""

PATIENCE = 1
"""Seconds for which a worker waits until its evidence can be sent."""

_DESCRIPTORS = 253  # SCM_MAX_FD (unix(7))
_SCM_CREDENTIALS = 2
_INT = 4
_LONGEST = 2e6  # seconds that one wait takes: poll(2) counts milliseconds in an int


class Packet:
    """One packet: who has sent it, its letter, its content, the descriptors that came with it.

    ``wrong``: why its form is wrong; then it has no descriptors. ``cut``: the kernel dropped some of them.
    """

    __slots__ = ("content", "cut", "fds", "letter", "pid", "wrong")

    def __init__(self, pid: int, body: bytes, fds: list[int], *, cut: bool) -> None:
        self.pid = pid
        self.letter = body[:1]
        self.content = body[1:]
        self.fds = fds
        self.cut = cut
        self.wrong = ""


# --- in the worker


def send(fd: int, body: bytes, fds: Sequence[int] = (), patience: float | None = None) -> bool:
    """Send a packet over the socket ``fd``. Waits ``patience`` (> 0) seconds for room, or for ever.

    What there is room for is sent at once: poll(2), which waits, finds room only when three quarters of the buffer are
    free. Nothing is imported to wait: the function may have left no file to load it from. The socket is made
    non-blocking, for all ranks: it is one that they share.

    Returns whether it has been sent. Raises OSError, and channels.Closed when nobody can read it: the launcher has
    died, or the socket was shut down.
    """
    rights = b"".join(each.to_bytes(_INT, sys.byteorder) for each in fds)
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else []
    sock = _socket.socket(fileno=fd)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.sendmsg([body], ancillary, _socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sock.settimeout(_LONGEST if patience is None else patience)
            except TimeoutError:
                if patience is not None:
                    return False
            except ConnectionError:
                raise channels.Closed from None
            else:
                return True
    finally:
        sock.detach()


# --- in the launcher


def pair() -> tuple[_socket.socket, _socket.socket]:
    """Make the report socket: the launcher's end, and the workers'. Raises OSError.

    A write by which a worker sends evidence waits for `PATIENCE` seconds, at most, for a launcher that reads nothing.
    """
    import struct

    ours, theirs = channels.pair()
    theirs.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE, 0))  # socket(7)
    return ours, theirs


class Inbox:
    """The launcher's end.

    Args:
        drop: Closes descriptors that belong to no value, on a thread: the close of a file may block for as long as its
            sender wants. Returns a function that waits for that, if no packet is to be taken before; else None.
    """

    def __init__(self, sock: _socket.socket, drop: Callable[[list[int]], Callable[[], None] | None]) -> None:
        self._sock = sock
        self._taker = drop
        self._behind: Callable[[], None] | None = None
        sock.setblocking(False)  # the program may have set a default timeout, which would be waited for
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)  # before the first packet is sent

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()

    def receive(self) -> Packet | None:
        """Receive the next packet and check its form; None when there is none now. Raises Closed at the end.

        Its descriptors are the caller's, close-on-exec.
        """
        space = _socket.CMSG_SPACE(3 * _INT) + _socket.CMSG_SPACE(_INT * _DESCRIPTORS)
        while True:
            try:
                body, ancillary, flags, _address = self._sock.recvmsg(PACKET, space, _socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                return None
            except ConnectionError:  # the other end left without reading all of ours: said once
                continue
        if not ancillary and not body:  # an empty packet has a sender
            raise channels.Closed
        pid, fds = _sender_and_descriptors(ancillary)
        packet = Packet(pid, body, fds, cut=bool(flags & _socket.MSG_CTRUNC))
        if flags & _socket.MSG_TRUNC:
            packet.wrong = f"a packet of more than {PACKET} bytes"
        else:
            packet.wrong = _judge(packet)
        if packet.wrong or packet.cut:
            packet.fds = []
            self.drop(fds)
        return packet

    def drop(self, fds: list[int]) -> None:
        """Close descriptors that nobody wants."""
        if fds:
            self._behind = self._taker(fds)

    def behind(self) -> Callable[[], None] | None:
        """What waits until descriptors that nobody wants are closed, if that is to be waited for. Said once."""
        wait, self._behind = self._behind, None
        return wait


def _sender_and_descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, list[int]]:
    """The pid of a packet's sender, and the descriptors that came with it."""
    pid, fds = 0, []
    for level, kind, data in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _SCM_CREDENTIALS):
            pid = int.from_bytes(data[:_INT], sys.byteorder)
        elif (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            fds += memoryview(data)[: len(data) // _INT * _INT].cast("i").tolist()
    return pid, fds


def _judge(packet: Packet) -> str:
    """Why the form of a packet is wrong; "": it is not."""
    letter, content, fds = packet.letter, packet.content, packet.fds
    why = ""
    if letter == EVIDENCE:
        why = "evidence with descriptors" if fds else ""
        try:
            sent.Sent(content)
        except ValueError as error:
            why = str(error)
    elif letter == LEAVING:
        why = "" if len(content) == 1 and not fds else "an exit code that is none"
    elif letter in (LARGE, TRACKER) and content:
        why = f"a packet {letter.decode()} with a content"
    elif letter == LARGE:
        why = "" if fds or packet.cut else "a large value without a file"
    elif letter == TRACKER:
        asks = packet.cut or (len(fds) == 1 and _is_local_socket(fds[0]))
        why = "" if asks else "a question without a socket for the answer"
    elif letter != RESULT:
        why = f"a packet that begins with {letter!r}" if letter else "an empty packet"
    return why


def _is_local_socket(fd: int) -> bool:
    """Whether it is a Unix domain socket, whose closing waits for nobody."""
    try:
        sock = _socket.socket(fileno=fd)
    except OSError:
        return False
    try:
        return sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_DOMAIN) == _socket.AF_UNIX
    finally:
        sock.detach()
