"""How an etcd is reached: its members, who we are to it, and the times that hold."""

from __future__ import annotations

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

    def expired(self) -> str:
        """Return which of our certificates has expired, and when, to be added to a sentence; "": none has."""
        from phalanx._store.etcd.certificate import expired

        for path in filter(None, (self.cert, self.ca)):
            try:
                when = expired(_read(path) or b"")
            except OSError:
                continue
            if when:
                return f"; {path} has expired at {when}"
        return ""

    def credentials(self) -> tuple[bytes | None, bytes | None, bytes | None] | None:
        """Return the authority's certificate, our key and our certificate, as their files are now; None: no TLS.

        Raises OSError: a file cannot be read. Raises ValueError: one does not hold what it should; the key does not
        belong to the certificate; one of the two is missing.
        """
        import ssl

        if bool(self.cert) != bool(self.key):
            msg = "cert and key belong together; one of them is missing"
            raise ValueError(msg)
        if not (self.ca or self.cert):
            return None
        read = [_read(path) for path in (self.ca, self.key, self.cert)]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("ALL:@SECLEVEL=0")  # how strong they have to be is the etcd's business
        named = self.ca
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            if self.cert:
                named = f"{self.cert}, {self.key}"
                context.load_cert_chain(self.cert, self.key, password="")  # it would be asked for on the console
        except ssl.SSLError as error:
            msg = f"{named}: not what TLS can use: {error.reason or error}"
            raise ValueError(msg) from None
        return read[0], read[1], read[2]


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()
