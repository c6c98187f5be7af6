"""A connection between an agent and the store: sends and takes messages, and waits for nobody. Owns its socket.

Used by the thread of its loop alone.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from hmac import compare_digest

from phalanx._base.loop import READ, WRITE, Loop
from phalanx._store.hub import wire
from phalanx._store.hub.messages import MOST_HELLO
from phalanx._store.hub.wire import PIECE, Cipher, CipherError

MOST_QUEUED = 64 << 20
"""Bytes that may wait for the other end."""

_TURN = 1 << 20  # bytes that are sent or taken before others have their turn
_BEGINNING = 16  # bytes
_SMALL = 64 << 10  # bytes that are taken at once, and are sent in one call


class Link:
    """A connection, on which messages of `MOST_HELLO` bytes are taken at first.

    Args:
        loop: What watches it.
        sock: The connected socket.
        take, lost: See the attributes.

    Attributes:
        take: Called with each message, and whether it is sealed.
        lost: Called once with why, when the connection has ended; not after `close`.
        opens: The seal of the other end; None: it is not known.
        may_be_plain: Whether a frame is taken that has a checksum only.
        seals: Our own seal; None: what is sent has a checksum.
        forged: Called when a frame comes that is not authentic; None: the connection ends.
        is_open: Whether it has not been closed.
        peer: The address of the other end.
        began: What the other end has said first: some bytes.
        is_foreign: Whether that, or what followed before it was known, is no message.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, take: Callable[[bytes, bool], None], lost: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self.take = take
        self.lost = lost
        self._frames = wire.Frames(MOST_HELLO)
        self._fd = sock.fileno()
        self._outbox: deque[tuple[bytes | Iterator[bytes], int]] = deque()  # and how much each counts
        self._chunk = memoryview(b"")  # what is being sent
        self._queued = 0
        self._cipher: Cipher | None = None
        self._plain = memoryview(b"")  # frames that are to be encrypted next
        self._writes = self._finishes = False
        self._why = ""  # it ends for that, as soon as the loop comes to it
        self.opens: wire.Seal | None = None
        self.may_be_plain = True
        self.seals: wire.Seal | None = None
        self.forged: Callable[[], None] | None = None
        self.is_open = True
        self.began = b""
        self.is_foreign = False
        self.peer = str(sock.getpeername()[0]).removeprefix("::ffff:")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(self._fd, self._ready)

    def take_up_to(self, most: int) -> None:
        """Take messages of so many bytes from now on."""
        self._frames.most = most

    def send(self, body: bytes) -> None:
        """Send a message; what cannot be sent at once is kept. If too much is, the connection ends."""
        self._put(body, len(body))

    def stream(self, bodies: Iterator[bytes], size: int) -> None:
        """Send messages that are made when their turn comes, and take so many bytes until then."""
        self._put(bodies, size)

    @property
    def encrypts(self) -> bool:
        """Whether what is said is encrypted."""
        return self._cipher is not None

    def encrypt(self, cipher: Cipher) -> None:
        """Have all encrypted that is said from now on, by both ends. What has been sent before goes as it is."""
        if not self.is_open:
            return
        self._cipher = cipher
        try:
            self._frames.feed(cipher.feed(self._frames.take_rest()))
        except CipherError as error:
            self.end(_not_agreed(error))  # soon: whoever has called this goes on
        else:
            self._flush()

    def finish(self) -> None:
        """Close the connection once all is sent."""
        if self.is_open:
            self._finishes = True
            self._flush()

    def end(self, why: str) -> None:
        """End the connection soon: `lost` is told so, not before this returns."""
        if self.is_open and not self._why:
            self._why = why
            self._outbox.clear()
            self._chunk = memoryview(b"")
            with suppress(OSError):  # it has ended
                self._sock.shutdown(socket.SHUT_RDWR)  # the loop reports both

    def poll(self) -> None:
        """Take what has come, though the loop has not reported it yet."""
        if self.is_open:
            self._read()

    def flush(self) -> None:
        """Send what can be sent at once."""
        if self.is_open:
            self._flush()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.is_open:
            self.is_open = False
            self._loop.forget(self._fd)
            self._sock.close()
            self._outbox.clear()
            self._chunk = memoryview(b"")

    def abandon(self) -> None:
        """Close the socket, in a fork: the connection is the parent's."""
        self._sock.close()

    # --- the loop's thread, from here on

    def _put(self, what: bytes | Iterator[bytes], size: int) -> None:
        if not self.is_open or self._why or self._finishes:
            return
        if self._queued and self._queued + size > MOST_QUEUED:
            self.end(f"more than {MOST_QUEUED >> 20} MiB wait for it")
            return
        self._queued += size
        self._outbox.append((what, size))
        if not self._writes:  # else the loop tells when there is room
            self._flush()

    def _flush(self) -> None:
        sent = 0
        while sent < _TURN and (self._chunk or (self._can_fill and self._fill())):
            try:
                count = self._sock.send(self._chunk, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError as error:
                self.end(error.strerror or str(error))
                return
            self._chunk = self._chunk[count:]
            sent += count
        if self._finishes and not (self._chunk or self._plain or self._outbox):
            self.close()
        elif self._writes != (bool(self._chunk) or self._can_fill):
            self._writes = not self._writes
            self._loop.change(self._fd, READ | WRITE if self._writes else READ)

    @property
    def _can_fill(self) -> bool:
        """Whether there is anything that can be sent: frames wait until the ends have agreed how to encrypt."""
        cipher = self._cipher
        if cipher is None:
            return bool(self._outbox)
        return cipher.has_pending or (cipher.is_up and bool(self._plain or self._outbox))

    def _fill(self) -> bool:
        """Make what is to be sent next. Returns whether there is any."""
        cipher = self._cipher
        if cipher is None:
            self._chunk = memoryview(self._take_frames())
            return bool(self._chunk)
        if cipher.is_up and not cipher.has_pending:
            self._plain = self._plain or memoryview(self._take_frames())
            if self._plain:
                cipher.seal(self._plain[:PIECE])
            self._plain = self._plain[PIECE:]
        self._chunk = memoryview(cipher.take())
        return bool(self._chunk)

    def _take_frames(self) -> bytes:
        """Return the frames that are to be sent next."""
        frames: list[bytes] = []
        size = 0
        while self._outbox and size < _SMALL:
            what, counts = self._outbox[0]
            body = what if isinstance(what, bytes) else next(what, None)
            if body is None or isinstance(what, bytes):
                self._outbox.popleft()
                self._queued -= counts
            if body is not None:
                frames.append(wire.frame(body, self.seals or wire.checksum))
                size += len(body)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _ready(self, events: int) -> None:
        if events & WRITE and not self._why:
            self._flush()
        if self.is_open and (events & ~WRITE or self._why):
            self._read()

    def _read(self) -> None:
        if self._why:
            self._lose(self._why)
            return
        try:
            data = self._sock.recv(min(max(self._frames.missing, _SMALL), _TURN))
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if not data:
            self._lose("the connection was closed")
            return
        self.began = self.began or data[:_BEGINNING]
        if self._feed(data):
            self._take_all()

    def _feed(self, data: bytes) -> bool:
        """Take what has come. Returns whether the connection goes on."""
        if self._cipher is not None:
            try:
                data = self._cipher.feed(data)
            except CipherError as error:
                with suppress(OSError):  # the other end is told why
                    self._sock.send(self._cipher.take(), socket.MSG_NOSIGNAL)
                self._lose(_not_agreed(error))
                return False
            self.flush()  # its part of what is agreed on, and what has waited for that
        self._frames.feed(data)
        return self.is_open

    def _take_all(self) -> None:
        """Take the messages that have come."""
        try:
            while (found := self._frames.next()) is not None:
                self._open(*found)
                if not self.is_open or self._why:
                    return
        except wire.FrameError as error:
            self.is_foreign = self.opens is None
            self._lose(str(error))

    def _open(self, code: bytes, body: bytes) -> None:
        is_sealed = self.opens is not None and compare_digest(code, self.opens(body))
        if is_sealed or (self.may_be_plain and compare_digest(code, wire.checksum(body))):
            self.take(body, is_sealed)
        elif self.forged is not None:
            self.forged()
        else:
            self.is_foreign = self.opens is None
            self._lose("a message is not authentic")

    def _lose(self, why: str) -> None:
        if self.is_open:
            self.close()
            self.lost(why)


def _not_agreed(error: CipherError) -> str:
    return f"what comes is not encrypted as it was agreed: {error}"
