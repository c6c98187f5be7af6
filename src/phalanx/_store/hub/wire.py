"""How messages travel over a TCP connection: their frames and codes, who is let in, and encryption.

A frame is the length of a message (4 bytes, big endian), a code (32 bytes), and the message. The first two messages,
one in each direction, carry random bytes; their code is a checksum. From these bytes, the job and its secret a key is
made for each direction; from then on, the code is HMAC-SHA256 with that key over the number of the frame and the
message. So each side shows with its first frame that it knows the secret, and nothing can be added, changed, repeated
or put in another order on the way. Where both ends can, all that follows Welcome is encrypted, see `Cipher`; else who
sees the network sees what the agents write. What each end can is a part of the keys: nobody on the way can change it.

    agent                                      store
    Hello(run, random bytes, can)      ->
                                       <-      Challenge(random bytes, can), or Refusal
    Enter, the first with a code       ->
                                       <-      Welcome, the first with a code; or Refusal

Encryption is TLS 1.3 with a key that both ends have made of the job's secret, and no certificate. Python has that since
3.13 (`ssl.SSLContext.set_psk_client_callback`), where its OpenSSL has it. The TLS is between two buffers: what is sent
and received is the business of `link`, whose sends raise no SIGPIPE. Keys are agreed on anew for each connection
(ephemeral Diffie-Hellman, RFC 8446, 4.2.9): who learns the secret later cannot read what was recorded.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from phalanx._store.hub import messages
from phalanx._store.hub.addresses import Encryption, HubSettings
from phalanx._store.hub.messages import NONCE, VERSION, Challenge, Enter, Hello, Refusal, Welcome

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


def run_hash(run_id: str) -> bytes:
    """Return what a run id is told from others by."""
    return hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).digest()


class ConnectionKeys(NamedTuple):
    """What both ends have made of the secret, for one connection: their seals, and the key of its encryption."""

    agent: Seal
    store: Seal
    cipher: bytes


def connection_keys(
    secret: bytes, version: int, run: bytes, agents: bytes, stores: bytes, *, can: bool = False, do: bool = False
) -> ConnectionKeys:
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
    return ConnectionKeys(Seal(next(made)), Seal(next(made)), next(made))


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
            raise FrameError(f"a message of {length} bytes, where {self.most} are the most")
        if len(self._bytes) < HEAD + length:
            return None
        code, body = bytes(self._bytes[_LENGTH:HEAD]), bytes(self._bytes[HEAD : HEAD + length])
        del self._bytes[: HEAD + length]
        return code, body

    def _length(self) -> int:
        return int.from_bytes(self._bytes[:_LENGTH], "big")


NEEDS = "Python 3.13 or later"

_IDENTITY = "phalanx"
_TURNS = 2  # in which both ends have agreed
PIECE = 1 << 18
"""Bytes that are encrypted or decrypted at once: OpenSSL's buffers never become smaller than they were."""


def can_encrypt() -> bool:
    """Whether this Python can: that is tried once."""
    return sys.version_info >= (3, 13) and _has_tried()


@functools.cache
def _has_tried() -> bool:
    """Whether two ends can agree, in this process: an OpenSSL may be built, or told, not to."""
    try:
        agent, store = (Cipher(bytes(32), is_store=is_store) for is_store in (False, True))
        for _ in range(_TURNS):
            store.feed(agent.take())
            agent.feed(store.take())
    except (CipherError, AttributeError, ValueError, OSError):
        return False
    return agent.is_up and store.is_up


class CipherError(Exception):
    """What came is not encrypted with the key, or has been changed."""


class Cipher:
    """The encryption of a connection, at one of its ends.

    Args:
        key: The key that both ends have, 32 bytes.
        is_store: At which end.

    Attributes:
        is_up: Whether the ends have agreed: `seal` can be called.
    """

    def __init__(self, key: bytes, *, is_store: bool) -> None:
        import ssl

        self._ssl = ssl
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(key, is_store=is_store).wrap_bio(self._incoming, self._outgoing, server_side=is_store)
        self.is_up = False
        self._shake()

    def feed(self, data: bytes) -> bytes:
        """Take what has come, and return what it says. Raises CipherError."""
        self._incoming.write(data)
        if not self.is_up:
            self._shake()
        found: list[bytes] = []
        while self.is_up:
            try:
                piece = self._tls.read(PIECE)
            except self._ssl.SSLWantReadError:
                break
            except self._ssl.SSLError as error:
                raise CipherError(error.reason or str(error)) from None
            if not piece:
                break
            found.append(piece)
        return b"".join(found)

    def seal(self, data: bytes | memoryview) -> None:
        """Encrypt what is to be sent: `take` returns it. While `is_up`."""
        self._tls.write(data)

    @property
    def has_pending(self) -> bool:
        """Whether there is something to `take`."""
        return self._outgoing.pending > 0

    def take(self) -> bytes:
        """Return what is to be sent."""
        return self._outgoing.read()

    def _shake(self) -> None:
        """Go on with what the ends agree on. Raises CipherError."""
        try:
            self._tls.do_handshake()
        except self._ssl.SSLWantReadError:
            return
        except self._ssl.SSLError as error:
            raise CipherError(error.reason or str(error)) from None
        if not self._tls.session_reused:
            raise CipherError("the other end has not used the key")
        self.is_up = True


def _context(key: bytes, *, is_store: bool) -> Any:
    import ssl

    context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_store else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The key is what both ends know each other by. A store may answer without it, with a certificate (RFC 8446, 4.1.1):
    # of those that an agent knows there is none.
    context.verify_mode = ssl.CERT_NONE if is_store else ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if is_store:
        context.num_tickets = 0
        context.set_psk_server_callback(lambda _identity: key)
    else:
        context.set_psk_client_callback(lambda _hint: (_IDENTITY, key))
    return context


class RefusedError(Exception):
    """The store does not have this agent. The words tell why, in one line."""


class TurnedAwayError(Exception):
    """The store does not let an agent in.

    Attributes:
        why: See `Refusal`.
        words: What is said of it on rank 0's console.
    """

    def __init__(self, why: Literal["version", "run", "secret", "encrypt"], words: str) -> None:
        super().__init__(words)
        self.why = why
        self.words = words


class AgentSide:
    """How an agent enters.

    Args:
        settings: Who we are.
        session: The session that we have had; b"": none.
    """

    def __init__(self, settings: HubSettings, session: bytes) -> None:
        self._settings = settings
        self._session = session
        self._run = run_hash(settings.run_id)
        self._nonce = os.urandom(NONCE)
        self._lacks = _lacks(settings.encrypt, settings.secret)
        self.encrypts = False
        """Whether what follows `welcome` is encrypted: known after `enter`."""

    def hello(self) -> bytes:
        """Return the first message."""
        return messages.write(Hello(VERSION, self._run, shown(self._settings.run_id), self._nonce, not self._lacks))

    def enter(self, body: bytes) -> tuple[bytes, ConnectionKeys]:
        """Take the store's first message. Returns the second one, which is sealed; and the keys of the connection.

        Raises RefusedError; DamagedError.
        """
        answer = messages.read_answer(body)
        if isinstance(answer, Refusal):
            raise self._refused(answer)
        self.encrypts = answer.encrypts and not self._lacks
        if self._settings.encrypt == "require" and not self.encrypts:
            where = self._settings.where
            raise RefusedError(f"{where} does not encrypt, which encrypt=require asks for: {self._lacks or _THERE}")
        keys = connection_keys(
            self._settings.secret, VERSION, self._run, self._nonce, answer.nonce,
            can=not self._lacks, do=answer.encrypts,
        )  # fmt: skip
        return messages.write(Enter(self._session or None)), keys

    def welcome(self, body: bytes, *, is_sealed: bool) -> Welcome:
        """Take the store's second message, and return it. Raises RefusedError; DamagedError."""
        if is_sealed:
            return messages.read_welcome(body)
        answer = messages.read_answer(body)
        if isinstance(answer, Refusal):
            raise self._refused(answer)
        raise messages.DamagedError("a challenge comes twice")

    def _refused(self, refusal: Refusal) -> RefusedError:
        where, mine = self._settings.where, shown(self._settings.run_id)
        if refusal.why == "version":
            spoken = f"version {refusal.version} of the store's protocol; this agent speaks version {VERSION}"
            return RefusedError(f"{where} speaks {spoken}")
        if refusal.why == "run":
            return RefusedError(f"{where} serves the job {refusal.name!r}; this agent is of the job {mine!r}")
        if refusal.why == "encrypt":
            return RefusedError(f"{where} wants what is said to be encrypted (encrypt=require): {self._lacks}")
        return RefusedError(f"the job's secret is not the one of {where}")


class StoreSide:
    """How the store lets an agent in.

    Args:
        run_id: Of its job.
        secret: Of its job.
        encrypt: See `HubSettings`.
    """

    def __init__(self, run_id: str, secret: bytes, encrypt: Encryption = "auto") -> None:
        self._run = run_hash(run_id)
        self._name = shown(run_id)
        self._secret = secret
        self._wants = encrypt == "require"
        self._lacks = _lacks(encrypt, secret)

    def challenge(self, body: bytes) -> tuple[bytes, ConnectionKeys, bool]:
        """Take an agent's first message. Returns the answer; the keys; and whether what follows `Welcome` is encrypted.

        Raises TurnedAwayError; DamagedError.
        """
        hello = messages.read_hello(body)
        if hello.version != VERSION:
            spoken = f"version {hello.version} of the store's protocol; the one here is {VERSION}"
            raise TurnedAwayError("version", f"it speaks {spoken}")
        if not hmac.compare_digest(hello.run, self._run):
            raise TurnedAwayError("run", f"it is of the job {hello.name!r}; the one here is {self._name!r}")
        do = hello.encrypts and not self._lacks
        if self._wants and not do:
            raise TurnedAwayError(
                "encrypt", f"nothing would be encrypted, which encrypt=require asks for: {self._lacks or _THERE}"
            )
        nonce = os.urandom(NONCE)
        keys = connection_keys(self._secret, VERSION, self._run, hello.nonce, nonce, can=hello.encrypts, do=do)
        return messages.write(Challenge(nonce, do)), keys, do

    def refusal(self, error: TurnedAwayError) -> bytes:
        """Return what an agent is told that is turned away."""
        return messages.write(Refusal(error.why, VERSION, self._name))


_THERE = f"{NEEDS} is needed there, and not encrypt=no"


def _lacks(encrypt: Encryption, secret: bytes) -> str:
    """Return why nothing can be encrypted at this end; "": it can."""
    if encrypt == "no":
        return "encrypt=no was given here"
    if not secret:
        return "there is no secret, of which the key would be made"
    return "" if can_encrypt() else f"{NEEDS} is needed here"


def shown(run_id: str) -> str:
    """Return a run id as it is shown to others.

    >>> shown("night7"), len(shown("x" * 1000))
    ('night7', 200)
    """
    return run_id.encode("utf-8", "replace").decode()[: messages.MOST_NAME]
