"""How messages travel over a TCP connection: their frames, and the codes that show that they are authentic. Pure.

A frame is the length of a message (4 bytes, big endian), a code (32 bytes), and the message. The first two messages,
one in each direction, carry random bytes; their code is a checksum. From these bytes, the job and its secret a key is
made for each direction; from then on, the code is HMAC-SHA256 with that key over the number of the frame and the
message. So each side shows with its first frame that it knows the secret, and nothing can be added, changed, repeated
or put in another order on the way. Where both ends can, all that follows Welcome is encrypted, see `cipher`; else who
sees the network sees what the agents write. What each end can is a part of the keys: nobody on the way can change it.

    agent                                      store
    Hello(run, random bytes, can)      ->
                                       <-      Challenge(random bytes, can), or Refusal
    Enter, the first with a code       ->
                                       <-      Welcome, the first with a code; or Refusal
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import NamedTuple

CODE = 32
_LENGTH = 4
HEAD = _LENGTH + CODE
_PROTOCOL = b"phalanx hub"


class FrameError(ValueError):
    """What came is no frame."""


class Seal:
    """Makes the codes of the frames of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._begun = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def __call__(self, body: bytes) -> bytes:
        """Return the code of the next frame."""
        code = self._begun.copy()
        code.update(self._number.to_bytes(8, "big"))
        code.update(body)
        self._number += 1
        return code.digest()


def checksum(body: bytes) -> bytes:
    """Return the code of a frame of somebody who is not known yet."""
    return hashlib.sha256(_PROTOCOL + body).digest()


def equal(code: bytes, other: bytes) -> bool:
    """Whether two codes are the same, in a time that does not depend on what they are."""
    return hmac.compare_digest(code, other)


def run_hash(run_id: str) -> bytes:
    """Return what a run id is told from others by."""
    return hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).digest()


class Keys(NamedTuple):
    """What both ends have made of the secret, for one connection: their seals, and the key of its encryption."""

    agent: Seal
    store: Seal
    cipher: bytes


def keys(
    secret: bytes, version: int, run: bytes, agents: bytes, stores: bytes, *, can: bool = False, do: bool = False
) -> Keys:
    """Return the seals of the agent and of the store, and the key of what is encrypted.

    Args:
        secret: The job's.
        version: Of the protocol.
        run: The hash of the run id.
        agents: The random bytes of the agent.
        stores: Those of the store.
        can: Whether the agent has said that it can encrypt.
        do: Whether the store has said that both do.
    """
    said = b"%s %d %s%s%s%d%d" % (_PROTOCOL, version, run, agents, stores, can, do)
    key = hmac.digest(secret, said, "sha256")
    made = (hmac.digest(key, use, "sha256") for use in (b"agent", b"store", b"cipher"))
    return Keys(Seal(next(made)), Seal(next(made)), next(made))


def frame(body: bytes, seal: Callable[[bytes], bytes]) -> bytes:
    """Return a frame."""
    return b"".join((len(body).to_bytes(_LENGTH, "big"), seal(body), body))


class Frames:
    """Takes frames from a stream of bytes.

    Args:
        most: Bytes of a message that is taken; may be changed.

    >>> frames = Frames(100)
    >>> sent = frame(b"one", checksum) + frame(b"two", checksum)
    >>> frames.feed(sent[:50]); [body for _, body in iter(frames.next, None)], frames.missing
    ([b'one'], 28)
    >>> frames.feed(sent[50:]); frames.next() == (checksum(b"two"), b"two"), frames.next()
    (True, None)
    >>> frames.feed(b"GET / HTTP/1.1"); frames.next()
    Traceback (most recent call last):
    phalanx._store.hub.wire.FrameError: a message of 1195725856 bytes, where 100 are the most
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._bytes += data

    def take_rest(self) -> bytes:
        """Return what has come of a frame that has not come yet, and forget it: it is no frame."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        return rest

    @property
    def missing(self) -> int:
        """How many bytes are missing to the next frame; at least, if its length is not known."""
        whole = HEAD if len(self._bytes) < _LENGTH else HEAD + self._length()
        return max(0, whole - len(self._bytes))

    def next(self) -> tuple[bytes, bytes] | None:
        """Return the code and the message of the next frame; None: it has not come. Raises FrameError."""
        if len(self._bytes) < _LENGTH:
            return None
        length = self._length()
        if length > self.most:
            msg = f"a message of {length} bytes, where {self.most} are the most"
            raise FrameError(msg)
        if len(self._bytes) < HEAD + length:
            return None
        code, body = bytes(self._bytes[_LENGTH:HEAD]), bytes(self._bytes[HEAD : HEAD + length])
        del self._bytes[: HEAD + length]
        return code, body

    def _length(self) -> int:
        return int.from_bytes(self._bytes[:_LENGTH], "big")
