"""What a node is told of its job: how many nodes there are, where they meet, and the times that hold."""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._agent.restart_policy import RestartPolicy
    from phalanx._rendezvous.rules import Rules
    from phalanx._store.store import Store

ETCD = ("etcd", "etcd-v3", "etcd-v2")
"""The names of the backend that is an etcd. Torch's users have the last one; what is spoken is version 3 of its API."""

ETCD_PORT = 2379


class Machines(NamedTuple):
    """What a node is told of its job.

    Attributes:
        min_nodes, max_nodes: How many nodes there are.
        backend: How they meet, see `ETCD`.
        endpoints: Where, as ``host:port``.
        address: Where this machine is reached by the others; "": see `own_address`.
        lease_ttl: Seconds after which a node is lost that is not heard of.
        join_timeout, last_call, rejoin_delay, exclude_after: See `rules.Rules`.
        barrier: Seconds that a node waits at its end for the others.
        ca, cert, key, user, password: See `EtcdSettings`.
        keep: Whether what the store holds of the job stays, once that is over.
    """

    min_nodes: int
    max_nodes: int
    backend: str
    endpoints: tuple[str, ...]
    address: str
    lease_ttl: int = 5
    join_timeout: float = 600.0
    last_call: float = 30.0
    rejoin_delay: float = 30.0
    exclude_after: int = 0
    barrier: float = 300.0
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""
    keep: bool = False

    @property
    def where(self) -> str:
        """Where the nodes meet, in words."""
        return f"etcd at {', '.join(self.endpoints)}"

    def own_address(self) -> str:
        """Return where this machine is reached: what was given, or its address on the way to the first endpoint.

        Raises OSError, which names the endpoint: its host is not known, or there is no way to it.
        """
        if self.address:
            return self.address
        import socket

        host, _, port = self.endpoints[0].rpartition(":")
        try:
            family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # of a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:
            msg = f"{host!r}: {getattr(error, 'strerror', None) or error}"
            raise OSError(msg) from None

    def rules(self, policy: RestartPolicy, grace: float, notice: float) -> Rules:
        """Return what the job holds to. ``grace``, ``notice``: seconds that workers have to end."""
        from phalanx._rendezvous.rules import Rules

        return Rules(
            policy,
            join_timeout=self.join_timeout,
            last_call=self.last_call,
            rejoin_delay=self.rejoin_delay,
            end_timeout=grace + notice + 60.0,
            exclude_after=self.exclude_after,
            rank_timeout=30.0 + self.lease_ttl,
        )

    def store(self, run_id: str) -> Store:
        """Return the store of the job of that id. Raises ImportError: the extra is not installed."""
        from phalanx._store.etcd.etcd_store import EtcdStore
        from phalanx._store.etcd.settings import EtcdSettings

        return EtcdStore(
            EtcdSettings(
                self.endpoints, prefix_of(run_id), ttl=self.lease_ttl, ca=self.ca, cert=self.cert, key=self.key,
                user=self.user, password=self.password,
            )
        )  # fmt: skip


def prefix_of(run_id: str) -> str:
    """Return what the keys of a job begin with: no job's keys are among those of another.

    >>> prefix_of("42/a")
    '/phalanx/42%2Fa/'
    """
    from urllib.parse import quote

    return f"/phalanx/{quote(run_id, safe='')}/"
