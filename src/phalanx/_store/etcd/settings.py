"""How an etcd is reached: its members, who we are to it, and the times that hold."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._store.etcd.tls import Files


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
        from phalanx._store.etcd.tls import Files

        return Files(self.ca, self.cert, self.key)


USERS_HOLD = {(3, 4): 42, (3, 5): 28, (3, 6): 9}
"""The first versions of etcd whose users and passwords hold, see GHSA-q8m4-xhhv-38mg: before, whoever reaches the port
raises an alarm without a password, and an etcd with an alarm has others turn its checks off."""


def users_hold(version: str) -> bool:
    """Whether an etcd of that version checks users and passwords in a way that cannot be got round. Unknown ones do.

    >>> users_hold("3.5.1"), users_hold("3.5.30"), users_hold("3.4.23"), users_hold("3.7.0-rc.1"), users_hold("3.3.25")
    (False, True, False, True, False)
    """
    try:
        major, minor, patch = map(int, version.partition("-")[0].split("."))
    except ValueError:
        return True
    return (major, minor) >= min(USERS_HOLD) and patch >= USERS_HOLD.get((major, minor), 0)
