"""How a node meets the others of its job, the times that hold for the job, and the bounds of its records."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._group.restart_policy import RestartPolicy
    from phalanx._store.hub.addresses import Encryption


MOST_LINE = 2000
"""Characters of a text in one line: an error, or what workers are called."""

MOST_RUN_ID = 1000
"""Characters of a job's id: it is in every key, and a store's keys are no place for more."""

MOST_ADDRESS = 255
"""Characters of the name or the address of a machine: those of DNS are no longer."""

MOST_NODES = 1 << 16
MOST_WORKERS = 1 << 20
"""Of one node."""

MOST_CODE = 1 << 31
"""Ranks, and exit codes without their signs, are less."""


def check_text(what: str, most: int, name: str = "") -> str:
    """Return a text that is not too long. Raises ValueError, which begins with the ``name``.

    >>> check_text("x" * 11, 10, "role")
    Traceback (most recent call last):
    ValueError: role: expected 10 characters or less, got 11
    """
    if len(what) > most:
        raise ValueError(f"{name and f'{name}: '}expected {most} characters or less, got {len(what)}")
    return what


def check_number(what: int, least: int, most: int, name: str) -> None:
    """Refuse a number that is out of bounds. Raises ValueError, which begins with the ``name``.

    >>> check_number(0, 1, 5, "nproc")
    Traceback (most recent call last):
    ValueError: nproc: expected a whole number, 1 to 5, got 0
    """
    if not least <= what <= most:
        raise ValueError(f"{name}: expected a whole number, {least} to {most}, got {what!r}")


ETCD = ("etcd", "etcd-v3", "etcd-v2")
"""The names of the backend that is an etcd. Torch's users have the last one; what is spoken is version 3 of its API."""

NO_FORK = (
    "expected 'spawn' or 'forkserver', got 'fork': this process meets the other machines at an etcd, by grpc, which"
    " crashes or hangs in forks of it"
)
"""Why workers are no forks of an agent that meets the others at an etcd."""

C10D = "c10d"
"""The backend of nodes that are numbered as they come: the agent at the endpoint has what the agents share."""

STATIC = "static"
"""The backend of nodes whose ranks are given by hand: rank 0's agent has what the agents share."""

ETCD_PORT, C10D_PORT, STATIC_PORT = 2379, 29400, 29500
"""Where they are, if no port is given: torchrun's ports, where it has any. For `STATIC`, of rank 0 of the workers."""

DEFAULT_PORTS = {C10D: C10D_PORT, STATIC: STATIC_PORT}
"""By backend; of the others: `ETCD_PORT`."""

RETURN = 5.0
"""Seconds within which all agents reach a store that answers again: those of a request that was lost, and a pause."""


RANK_TIMEOUT = 30.0
"""Seconds after which a node is refused whose rank another one has, see `Rules`."""


class Rules(NamedTuple):
    """The policy and the times (seconds) of a job.

    Attributes:
        policy: When a failure is followed by another generation.
        join_timeout: How long a generation may be waited for while there are too few nodes.
        last_call: How long more nodes may come, after the minimum is there, before the first generation.
        rejoin_delay: From the coming of a node to the end of the generation that runs without it.
        end_timeout: How long a node is waited for that has not ended its workers.
        exclude_after: After so many root causes in a row a machine is left out; 0: never.
        rank_timeout: When a node is refused whose rank another one has: longer than a lease lasts, for that may be the
            node's own entry of before.
        lost_after: When a node is lost whose entry is gone: etcd may have ended its lease by mistake, and the node
            enters again then.
        return_timeout: The same, where the store was away, from the moment on at which the leader has it again.
        lease: When an agent is lost that is not heard of. A store in an agent stays so long for those that are lost.
        keep: Whether what the job was is kept when it is over, see `records.KEPT`: of the agent that makes the job.
    """

    policy: RestartPolicy
    join_timeout: float = 600.0
    last_call: float = 30.0
    rejoin_delay: float = 30.0
    end_timeout: float = 90.0
    exclude_after: int = 0
    rank_timeout: float = RANK_TIMEOUT
    lost_after: float = 0.0
    return_timeout: float = 0.0
    lease: float = 0.0
    keep: bool = False


class Machines(NamedTuple):
    """How a node meets the others of its job.

    Attributes:
        min_nodes, max_nodes: How many nodes there are.
        backend: One of `ETCD`, `C10D`, or `STATIC`.
        endpoints: Where they meet, as ``host:port``.
        address: Where the others reach this machine; "": see `entrance`.
        hosts: Whether this one has the store, unless another one of its machine has been quicker; None: the machine of
            the endpoint has, but its name was not known yet.
        bind: Where the store listens, if this one has it: an address, "" for all that there are, and a port, 0 for the
            endpoint's. None: see `addresses`.
        secret: What the agents prove to each other, where one of them has the store; empty: nothing.
        encrypt: Whether messages are encrypted then, see `HubSettings`.
        node_rank: The rank of this node, if it is given; -1: it is not.
        master: The host and the port of rank 0 of the workers, if they are given.
        lease_ttl: Seconds after which a node is lost that is not heard of.
        join_timeout, last_call, rejoin_delay, exclude_after, keep: See `Rules`.
        away_timeout: Seconds for which workers go on while the store is away, or their agent is stopped.
        barrier: Seconds that a node waits at its end for the others.
        ca, cert, key, user, password: See `EtcdSettings`.
    """

    min_nodes: int
    max_nodes: int
    backend: str
    endpoints: tuple[str, ...]
    address: str
    hosts: bool | None = False
    bind: tuple[str, int] | None = None
    secret: bytes = b""
    encrypt: Encryption = "auto"
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
    def is_hosted(self) -> bool:
        """Whether one of the job's agents has the store."""
        return self.backend in (STATIC, C10D)

    @property
    def where(self) -> str:
        """Where the nodes meet, in words."""
        what = {STATIC: "the agent of node 0", C10D: "the agent"}.get(self.backend, "etcd")
        return f"{what} at {', '.join(self.endpoints)}"

    def __repr__(self) -> str:
        # A secret is not shown by what shows the settings.
        return f"Machines({self.min_nodes}:{self.max_nodes}, {self.backend!r}, {','.join(self.endpoints)})"

    def rules(self, policy: RestartPolicy, grace: float, notice: float, orphan_grace: float = 0.0) -> Rules:
        """Return the job's rules.

        ``grace``, ``notice``: seconds that workers have to end; ``orphan_grace``: likewise, if their agent is killed.
        """
        # A store in an agent has no other member that could end a lease by mistake.
        by_mistake = 0.0 if self.is_hosted else min(0.5, self.lease_ttl / 10)
        return Rules(
            policy, self.join_timeout, self.last_call, self.rejoin_delay, grace + notice + 60.0, self.exclude_after,
            30.0 + self.lease_ttl, orphan_grace + by_mistake, self.lease_ttl + RETURN, self.lease_ttl, self.keep,
        )  # fmt: skip

    def host_and_port(self) -> tuple[str, int]:
        """Return the first endpoint."""
        host, _, port = self.endpoints[0].rpartition(":")
        return host.strip("[]"), int(port)


def prefix_of(run_id: str) -> str:
    """Return what the keys of a job begin with: no job's keys are among those of another.

    >>> prefix_of("42/a")
    '/phalanx/42%2Fa/'
    """
    from urllib.parse import quote  # costs a start milliseconds

    return f"/phalanx/{quote(run_id, safe='', errors='surrogateescape')}/"


def agent_id(host: str) -> str:
    """Return an id for an agent on the machine of that name, which no other agent has, now or later."""
    name = re.sub(r"[^\w.-]", "_", host, flags=re.ASCII)[:64]
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
