"""How an etcd is reached: its members, who we are to it, the files for TLS, and the times that hold.

TLS tells the side that has a certificate only that it is a bad one: until when it is valid is read here.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from typing import NamedTuple


class EtcdSettings(NamedTuple):
    """How an etcd is reached.

    Attributes:
        endpoints: Its members, as ``host:port``; tried in turn.
        prefix: What all keys of the job begin with.
        ttl: Seconds (2 or more) after which the keys of an agent go that is not heard of.
        job_ttl: Seconds after which the job's keys go, once none of its agents is heard of.
        timeout: Seconds that a request may take.
        ca, cert, key: Paths of PEM files: the authority that has signed the members' certificates; our certificate and
            its key. "": TLS is not used, or we have none.
        user, password: Who we are; "": nobody.
    """

    endpoints: tuple[str, ...]
    prefix: str
    ttl: int = 5
    job_ttl: int = 300
    timeout: float = 3.0
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""

    @property
    def job_lease(self) -> int:
        """The id of the job's lease: all agents of the job know it, for it is made from the prefix.

        >>> 0 < EtcdSettings(("localhost:2379",), "/phalanx/run/").job_lease < 1 << 63
        True
        """
        return int.from_bytes(blake2b(self.prefix.encode(), digest_size=8).digest()) >> 2 | 1

    def __repr__(self) -> str:
        # A password is not shown by what shows the settings.
        return f"EtcdSettings({','.join(self.endpoints)}, prefix={self.prefix!r}, ttl={self.ttl}, user={self.user!r})"

    @property
    def tls(self) -> Files:
        """The files for TLS."""
        return Files(self.ca, self.cert, self.key)


_CODE = re.compile(r"OPENSSL_internal:(\w+)")

_VALIDITY = re.compile(rb"\x30[\x1e-\x22](?:\x17\x0d|\x18\x0f)\d{12,14}Z(\x17\x0d|\x18\x0f)(\d{12,14}Z)")
"""The two moments in a certificate, each a UTCTime (tag 0x17, two digits for the year) or a GeneralizedTime (0x18): RFC
5280, 4.1.2.5."""

_CENTURY = 50
"""Two digits from this on are years of the last century."""


class Files:
    """The files for TLS.

    Args:
        ca, cert, key: Their paths: of the authority's certificate, of ours, and of its key. "": there is none.
    """

    def __init__(self, ca: str, cert: str, key: str) -> None:
        self._ca, self._cert, self._key = ca, cert, key

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None] | None:
        """Return the authority's certificate, our key and our certificate; None: there is no file.

        Raises OSError: a file cannot be read. Raises ValueError: one does not hold what it should; the key does not
        belong to the certificate; one of the two is missing.
        """
        if bool(self._cert) != bool(self._key):
            raise ValueError("cert and key belong together; one of them is missing")
        if not (self._ca or self._cert):
            return None
        ca, key, cert = (_read(path) for path in (self._ca, self._key, self._cert))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("ALL:@SECLEVEL=0")  # how strong they have to be is the etcd's business
        for name, path in (("ca", self._ca), ("cert", self._cert)):
            if path:
                _try(partial(context.load_verify_locations, path), f"{name}: {path} holds no certificate (PEM)")
        if self._cert:
            text = key or b""
            why = f"key: {self._key} holds no private key (PEM)"
            if b"ENCRYPTED" in text:
                why = f"key: {self._key} is encrypted, and there is nobody to be asked for its password"
            other = f"key: {self._key} is not the key of the certificate in {self._cert}"
            # A password would be asked for on the console.
            _try(partial(context.load_cert_chain, self._cert, self._key, password=""), why, other)
        return ca, key, cert

    def expired(self) -> str:
        """Return that our certificate has expired, and when; "": it has not, or cannot be read."""
        return self._expired(self._cert, "the certificate")

    def words(self, said: str, host: str) -> str:
        """Return what grpc has said of a connection to a host, in plain words where it is about TLS.

        >>> said = "Tls handshake failed: error:1:SSL routines:OPENSSL_internal:SSLV3_ALERT_BAD_CERTIFICATE: OK"
        >>> Files("ca.pem", "", "").words(said, "db")
        'it wants a certificate of ours: cert=PATH,key=PATH (SSLV3_ALERT_BAD_CERTIFICATE)'
        >>> Files("", "", "").words("Connection refused", "db")
        'Connection refused'
        """
        found = _CODE.search(said)
        code = found[1] if found else ""
        if "certificate has expired" in said:
            told = "its certificate has expired, or that of its authority"
        elif "not yet valid" in said:
            told = "its certificate is not valid yet"
        elif code == "CERTIFICATE_VERIFY_FAILED":
            told = f"no authority in {self._ca} has signed its certificate"
            if not self._ca:
                told = "no authority that this machine knows has signed its certificate: ca=PATH names one"
        elif "Hostname Verification Check failed" in said:
            told = f"its certificate is not for {host}"
        elif code == "WRONG_VERSION_NUMBER":
            told = "it does not speak TLS"
        elif "Handshake read failed" in said:
            told = "it has ended the TLS handshake, as an etcd without TLS does"
        elif "_ALERT_" in code and self._cert:
            told = f"it does not take the certificate in {self._cert}"
        elif "_ALERT_" in code:
            told = "it wants a certificate of ours: cert=PATH,key=PATH"
        else:
            return said
        more = [one for one in (self.expired(), self._expired(self._ca, "that of the authority")) if one]
        return "; ".join((f"{told} ({code})" if code else told, *more))

    def _expired(self, path: str, what: str) -> str:
        try:
            when = expired(_read(path) or b"")
        except OSError:
            return ""
        return f"{what} in {path} has expired on {when}" if when else ""


def _try(load: Callable[[], None], why: str, mismatch: str = "") -> None:
    """Call what loads a file. Raises ValueError with ``why``, or ``mismatch``."""
    try:
        load()
    except ssl.SSLError as error:
        raise ValueError(mismatch if mismatch and error.reason == "KEY_VALUES_MISMATCH" else why) from None


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


def expired(pem: bytes, now: datetime | None = None) -> str:
    """Return when a certificate has expired, in words; "": it has not, or that is not to be read from it.

    Args:
        pem: The first certificate in this text is looked at.
        now: The present moment; None: that of the clock.
    """
    try:
        end = "-----END CERTIFICATE-----"
        _, begin, text = pem.decode("ascii", "replace").partition("-----BEGIN CERTIFICATE-----")
        found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(begin + text.partition(end)[0] + end))
        if found is None:
            return ""
        digits = found[2].decode()
        if found[1] == b"\x17\x0d":
            digits = ("20" if int(digits[:2]) < _CENTURY else "19") + digits
        until = datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return ""
    return f"{until:%Y-%m-%d %H:%M:%S} UTC" if until < (now or datetime.now(UTC)) else ""
