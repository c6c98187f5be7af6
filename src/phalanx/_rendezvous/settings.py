"""What a node is told of its job: how many nodes there are, where they meet, and the times that hold."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from phalanx._agent.endpoint import where_is

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._agent.restart_policy import RestartPolicy
    from phalanx._base.latch import Latch
    from phalanx._rendezvous.rules import Rules
    from phalanx._store.store import Store


ETCD = ("etcd", "etcd-v3", "etcd-v2")
"""The names of the backend that is an etcd. Torch's users have the last one; what is spoken is version 3 of its API."""

C10D = "c10d"
"""The backend that is an etcd which the agent at the endpoint hosts."""

STATIC = "static"
"""The backend of nodes whose ranks are given by hand: rank 0's agent holds what the agents share."""

ETCD_PORT, C10D_PORT, STATIC_PORT = 2379, 29400, 29500
"""Where they are, if no port is given: torchrun's ports, where it has any. For `STATIC`, of rank 0 of the workers."""

RETURN = 5.0
"""Seconds within which all agents reach a store that answers again: those of a request that was lost, and a pause."""

CLOSE = 3.0
"""Seconds for which the end of a hosted store waits for the other agents, which have left the job by then."""

OWN_FILES = 64
"""Files that an agent which holds the store has open beside its connections: 47 with 8 workers."""


class Machines(NamedTuple):
    """What a node is told of its job.

    Attributes:
        min_nodes, max_nodes: How many nodes there are.
        backend: How they meet: one of `ETCD`, `C10D`, or `STATIC`.
        endpoints: Where, as ``host:port``.
        address: Where this machine is reached by the others; "": see `own_address`.
        is_hosted: Whether an agent hosts the store.
        hosts: Whether this one does, unless another one of its machine has been quicker; None: where the endpoint is
            tells, but its name was not known yet.
        secret: What the agents of a hosted store know each other by; empty: nothing.
        node_rank: The rank of this node, if it is given; -1: it is not.
        master: Where rank 0 of the workers listens, if that is given: its host and its port.
        lease_ttl: Seconds after which a node is lost that is not heard of.
        join_timeout, last_call, rejoin_delay, exclude_after, keep: See `rules.Rules`.
        away_timeout: Seconds for which workers go on while a hosted store is away.
        barrier: Seconds that a node waits at its end for the others.
        ca, cert, key, user, password: See `EtcdSettings`.
    """

    min_nodes: int
    max_nodes: int
    backend: str
    endpoints: tuple[str, ...]
    address: str
    is_hosted: bool = False
    hosts: bool | None = False
    secret: bytes = b""
    node_rank: int = -1
    master: tuple[str, int] | None = None
    lease_ttl: int = 5
    join_timeout: float = 600.0
    last_call: float = 30.0
    rejoin_delay: float = 30.0
    exclude_after: int = 0
    keep: bool = False
    away_timeout: float = 60.0
    barrier: float = 300.0
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""

    @property
    def where(self) -> str:
        """Where the nodes meet, in words."""
        what = "the agent of node 0" if self.backend == STATIC else "etcd"
        return f"{what} at {', '.join(self.endpoints)}"

    def __repr__(self) -> str:
        # A secret is not shown by what shows the settings.
        return f"Machines({self.min_nodes}:{self.max_nodes}, {self.backend!r}, {','.join(self.endpoints)})"

    def own_address(self) -> str:
        """Return where this machine is reached: what was given, or its address on the way to the first endpoint.

        "": where rank 0 listens is given, so nobody asks; the host of that may not be known yet.

        Raises OSError, which names the endpoint: its host is not known, or there is no way to it.
        """
        if self.address or self.master is not None:
            return self.address
        import socket

        from phalanx._base.host_names import look_up

        host, port = self._endpoint()
        try:
            family, kind, _, _, address = look_up(host, port, datagram=True)[0]
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
            # The agent's own etcd, and its hub, have no other member that could end a lease by mistake.
            lost_after=0.0 if self.is_hosted else min(0.5, self.lease_ttl / 10),
            return_timeout=self.lease_ttl + RETURN,
            keep=self.keep,
        )

    def store(self, run_id: str) -> Store:
        """Return the store of the job of that id. Raises ImportError: the extra is not installed."""
        if self.backend == STATIC:
            from phalanx._store.hub.hub_store import HubStore
            from phalanx._store.hub.settings import HubSettings

            host, port = self._endpoint()
            return HubStore(HubSettings(host, port, run_id, self.secret, ttl=self.lease_ttl))
        from phalanx._store.etcd.etcd_store import EtcdStore
        from phalanx._store.etcd.settings import EtcdSettings

        user, password = self.user, self.password
        if self.is_hosted:
            from phalanx._store.etcd.server import credentials

            user, password = credentials(self.secret)
        return EtcdStore(
            EtcdSettings(
                self.endpoints, prefix_of(run_id), ttl=self.lease_ttl, ca=self.ca, cert=self.cert, key=self.key,
                user=user, password=password, is_hosted=self.is_hosted,
            )
        )  # fmt: skip

    def host(self, run_id: str, warn: Callable[[str], None], over: Latch | None = None) -> Callable[[], None] | None:
        """Have this agent host the store, if it is to. Returns what ends that; None: another one hosts it.

        A name of this machine that is not known yet (a pod's is published some time after its start) is waited for,
        `join_timeout` long, and that is said. So is that of the host where this machine has to find its way there.

        ``warn`` is told of that, and of agents that are refused, a line each, on any thread. The waits end when
        ``over`` is opened.

        Raises OSError: it cannot listen there, or the program is not there; or the name is not known in time; or this
        process may not have files open for so many nodes.
        ImportError: the extra is not installed.
        """
        host, port = self._endpoint()
        if self.hosts or (self.is_hosted and not self.address and self.master is None):
            self._await_name(host, warn, over)
        if not (where_is(host) == "here" if self.hosts is None else self.hosts):
            return None
        if self.backend == STATIC:
            from phalanx._store.hub.server import HubServer

            self._check_open_files()
            server = HubServer(host, port, run_id=run_id, secret=self.secret, ttl=self.lease_ttl, warn=warn)
            server.start()
            return partial(server.close, CLOSE)
        from phalanx._rendezvous.hosted_etcd import HostedEtcd

        etcd = HostedEtcd(host, port, secret=self.secret, warn=warn)
        return etcd.close if etcd.start() else None

    def _await_name(self, host: str, warn: Callable[[str], None], over: Latch | None) -> None:
        from phalanx._base.host_names import await_name
        from phalanx._base.latch import Latch

        def say() -> None:
            warn(f"{host}, where the store is to be, is no name that is known here; it is waited for")

        try:
            await_name(host, self.join_timeout, over or Latch(), say)
        except (OSError, UnicodeError) as error:
            msg = f"{host!r}: {getattr(error, 'strerror', None) or error}"
            raise OSError(msg) from None

    def _check_open_files(self) -> None:
        """Raises OSError: each node has a connection to the store, and this process may not have so many files open."""
        import resource

        most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], self.max_nodes + OWN_FILES
        if most != resource.RLIM_INFINITY and most < needed:
            msg = (
                f"the agent of node 0 has a connection to each of {self.max_nodes} nodes, and needs {needed} open"
                f" files: it may have {most} (ulimit -n)"
            )
            raise OSError(msg)

    def _endpoint(self) -> tuple[str, int]:
        host, _, port = self.endpoints[0].rpartition(":")
        return host.strip("[]"), int(port)


def prefix_of(run_id: str) -> str:
    """Return what the keys of a job begin with: no job's keys are among those of another.

    >>> prefix_of("42/a")
    '/phalanx/42%2Fa/'
    """
    from urllib.parse import quote

    return f"/phalanx/{quote(run_id, safe='', errors='surrogateescape')}/"


def agent_id(host: str) -> str:
    """Return an id for an agent on the machine of that name, which no other agent has, now or later."""
    import os
    import re

    name = re.sub(r"[^\w.-]", "_", host, flags=re.ASCII)[:64]
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
