"""What the parameters of a rendezvous say of how machines meet: checked, and nothing is connected to."""

from __future__ import annotations

import os

from phalanx._agent.endpoint import split_endpoint
from phalanx._base.host_names import address_text, is_loopback, is_no_machine
from phalanx._rendezvous import bounds
from phalanx._rendezvous import conf as settings
from phalanx._rendezvous.conf import SECRET
from phalanx._rendezvous.settings import C10D, C10D_PORT, ETCD, ETCD_PORT, STATIC, STATIC_PORT, Machines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from phalanx.rendezvous._parameters import RendezvousParameters

BACKENDS = (STATIC, C10D, *ETCD)
"""Those that are built in."""


def machines_of(params: RendezvousParameters, *, insecure: bool = False) -> Machines:
    """Return how this machine meets the others. Raises ValueError, which names the parameter."""
    _check_bounds(params)
    conf = {name: str(value) for name, value in params.config.items() if value is not None}
    insecure = insecure or bool(params.get_as_bool("insecure"))
    if params.backend == STATIC:
        return _static(params, conf, insecure=insecure)
    if params.backend not in BACKENDS:
        msg = f"backend: expected one of {', '.join(BACKENDS)}, got {params.backend!r}"
        raise ValueError(msg)
    is_hosted = params.backend == C10D
    default = C10D_PORT if is_hosted else ETCD_PORT
    found = [_endpoint(part, default) for part in params.endpoint.split(",") if part.strip()]
    if not found or (is_hosted and len(found) > 1):
        what = "where one machine is, which has the store" if is_hosted else "where the etcd is"
        msg = f"endpoint: expected {what}, like host:{default}, got {params.endpoint!r}"
        raise ValueError(msg)
    if not params.run_id and not is_hosted:
        msg = "run_id: expected the id of the job, by which its machines find each other in the etcd, got ''"
        raise ValueError(msg)
    host = found[0][0]
    endpoints = tuple(address_text(*each) for each in found)
    params.get_as_bool("is_host")  # that it is yes or no
    hosts = is_hosted and settings.may_host(conf, host)
    secret = _secret(conf, host, endpoints[0], insecure=insecure) if is_hosted else b""
    return _machines(params, conf, endpoints, hosts=hosts, secret=secret)


def _check_bounds(params: RendezvousParameters) -> None:
    """Refuse what the other machines would not read. Raises ValueError."""
    bounds.text(params.run_id, bounds.MOST_RUN_ID, "run_id")
    bounds.text(params.local_addr or "", bounds.MOST_ADDRESS, "local_addr")
    bounds.number(params.max_nodes, 1, bounds.MOST_NODES, "max_nodes")


def _static(params: RendezvousParameters, conf: Mapping[str, str], *, insecure: bool) -> Machines:
    """Return how machines meet whose ranks are given: at the agent of rank 0. Raises ValueError."""
    if params.min_nodes != params.max_nodes:
        msg = f"max_nodes: expected min_nodes ({params.min_nodes}) with the backend static, got {params.max_nodes}"
        raise ValueError(msg)
    if "rank" not in conf:
        msg = f"rank: expected the rank of this machine, 0 to {params.max_nodes - 1}, in the config; it is not there"
        raise ValueError(msg)
    rank = params.get_as_int("rank")
    if rank is None or not 0 <= rank < params.max_nodes:
        msg = f"rank: expected the rank of this machine, 0 to {params.max_nodes - 1}, got {rank!r}"
        raise ValueError(msg)
    host, port = _endpoint(params.endpoint, STATIC_PORT)
    endpoint = address_text(host, settings.agent_port(conf, port + 1))
    secret = _secret(conf, host, endpoint, insecure=insecure)
    return _machines(params, conf, (endpoint,), hosts=rank == 0, secret=secret, node_rank=rank, master=(host, port))


def _machines(
    params: RendezvousParameters, conf: Mapping[str, str], endpoints: tuple[str, ...], **more: Any
) -> Machines:
    is_hosted = params.backend in (STATIC, C10D)
    fields = settings.machine_settings(conf, os.environ, is_hosted=is_hosted) | more
    for name, named in (("rejoin_delay", "rejoin_delay"), ("exit_barrier_timeout", "barrier")):
        if name in conf:
            fields[named] = settings.seconds(name, conf[name])
    exclude_after = params.get_as_int("exclude_after", 0) or 0
    if exclude_after < 0:
        msg = f"exclude_after: expected a whole number, 0 or more, got {exclude_after}"
        raise ValueError(msg)
    keep = bool(params.get_as_bool("keep"))
    if keep and is_hosted:
        msg = f"keep: {settings.CANNOT_KEEP}"
        raise ValueError(msg)
    return Machines(
        params.min_nodes, params.max_nodes, params.backend, endpoints, params.local_addr or "",
        exclude_after=exclude_after, keep=keep, **fields,
    )  # fmt: skip


def _endpoint(text: str, default: int) -> tuple[str, int]:
    try:
        host, port = split_endpoint(text)
    except ValueError as error:
        msg = f"endpoint: {error}"
        raise ValueError(msg) from None
    if not host or set(host) & set(" \t/@") or is_no_machine(host):
        msg = f"endpoint: expected the name or the address of a machine and a port, like host:{default}, got {text!r}"
        raise ValueError(msg)
    return host, port or default


def _secret(conf: Mapping[str, str], host: str, endpoint: str, *, insecure: bool) -> bytes:
    """Return the secret of a job whose store an agent has. Raises ValueError: none is given, and one is needed."""
    secret = settings.job_secret(conf, os.environ)
    if secret or insecure or is_loopback(host):
        return secret
    msg = (
        f"endpoint: the agents meet at {endpoint}, which other machines reach: set {SECRET} to the same secret on "
        "each, or let secret_file of the config name a file that holds it. insecure=True does without: whoever reaches "
        "that port can then stop the job, or lead it astray"
    )
    raise ValueError(msg)
