"""What the parameters of a rendezvous say of how machines meet: checked, and nothing is connected to."""

from __future__ import annotations

from typing import Any

from phalanx._agent.endpoint import split_endpoint
from phalanx._base.host_names import is_no_machine
from phalanx._rendezvous import bounds, meeting
from phalanx._rendezvous import conf as settings
from phalanx._rendezvous.settings import C10D, DEFAULT_PORTS, ETCD, ETCD_PORT, STATIC, Machines
from phalanx.rendezvous._parameters import RendezvousParameters

BACKENDS = (STATIC, C10D, *ETCD)
"""Those that are built in."""

_WORDS = "the backend", "secret_file of the config", "insecure=True"


def machines_of(params: RendezvousParameters, *, insecure: bool = False) -> Machines:
    """Return how this machine meets the others. Raises ValueError, which names the parameter."""
    if params.backend not in BACKENDS:
        msg = f"backend: expected one of {', '.join(BACKENDS)}, got {params.backend!r}"
        raise ValueError(msg)
    bounds.text(params.run_id, bounds.MOST_RUN_ID, "run_id")  # beyond these, the others would not read it
    bounds.text(params.local_addr or "", bounds.MOST_ADDRESS, "local_addr")
    bounds.number(params.max_nodes, 1, bounds.MOST_NODES, "max_nodes")
    conf = {name: str(value) for name, value in params.config.items() if value is not None}
    params.get_as_bool("is_host")  # that it is yes or no
    if params.backend == STATIC and params.min_nodes == params.max_nodes and "rank" not in conf:
        msg = f"rank: expected the rank of this machine, 0 to {params.max_nodes - 1}, in the config; it is not there"
        raise ValueError(msg)
    more: dict[str, Any] = {"exclude_after": params.get_as_int("exclude_after", 0) or 0}
    if more["exclude_after"] < 0:
        msg = f"exclude_after: expected a whole number, 0 or more, got {more['exclude_after']}"
        raise ValueError(msg)
    for name, named in (("rejoin_delay", "rejoin_delay"), ("exit_barrier_timeout", "barrier")):
        if name in conf:
            more[named] = settings.seconds(name, conf[name])
    return meeting.machines_of(
        meeting.Told(
            params.backend,
            (params.min_nodes, params.max_nodes),
            tuple(_endpoint(part, params.backend) for part in params.endpoint.split(",") if part.strip()),
            params.run_id,
            conf,
            params.get_as_int("rank") if params.backend == STATIC else None,
            params.local_addr or "",
            insecure=insecure or bool(params.get_as_bool("insecure")),
            keep=bool(params.get_as_bool("keep")),
            words=_WORDS,
            more=more,
        )
    )


def _endpoint(text: str, backend: str) -> tuple[str, int]:
    try:
        host, port = split_endpoint(text)
    except ValueError as error:
        msg = f"endpoint: {error}"
        raise ValueError(msg) from None
    if not host or set(host) & set(" \t/@") or is_no_machine(host):
        like = f"host:{DEFAULT_PORTS.get(backend, ETCD_PORT)}"
        msg = f"endpoint: expected the name or the address of a machine and a port, like {like}, got {text!r}"
        raise ValueError(msg)
    return host, port
