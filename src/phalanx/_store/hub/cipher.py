"""Encrypts a connection: TLS 1.3 with a key that both ends have made of the job's secret, and no certificate.

Python has that since 3.13 (`ssl.SSLContext.set_psk_client_callback`), where its OpenSSL has it. The TLS is between two
buffers: what is sent and received is the business of `link`, whose sends raise no SIGPIPE. Keys are agreed on anew for
each connection (ephemeral Diffie-Hellman, RFC 8446, 4.2.9): who learns the secret later cannot read what was recorded.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

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
