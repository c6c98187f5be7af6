"""How a machine meets the others of its job, made of what it was told: checked, and nothing is connected to.

What is wrong is a ValueError, whose text begins with "endpoint", "max_nodes", "rank", "run_id" or "keep", with the name
of a setting of `conf`, or with that of a variable. Who has asked puts the name of an own parameter in its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx._base.host_names import address_text, is_loopback, is_no_machine
from phalanx._rendezvous import conf as settings
from phalanx._rendezvous.conf import CANNOT_KEEP, SECRET
from phalanx._rendezvous.settings import C10D, C10D_PORT, ETCD_PORT, STATIC, STATIC_PORT, Machines


class Told(NamedTuple):
    """What a machine was told.

    Attributes:
        backend: One of those that are built in.
        nodes: The least number of machines, and the greatest.
        endpoints: Hosts and ports (0: the default), of which there is one where an agent has the store.
        run_id: The id of the job; "": nobody has given one.
        conf: The settings, see `conf`.
        rank: The rank of this machine; None: it is numbered as it comes.
        address: By which the others reach this machine; "": see `entrance`.
        insecure: Whether an agent may have the store without a secret.
        keep: Whether what the job was is to be kept.
        words: What the backend is called, and how a file with the secret, and ``insecure``, are given: for errors.
        more: Further fields of `Machines`.
    """

    backend: str
    nodes: tuple[int, int]
    endpoints: tuple[tuple[str, int], ...]
    run_id: str
    conf: Mapping[str, str]
    rank: int | None
    address: str
    insecure: bool
    keep: bool
    words: tuple[str, str, str]
    more: Mapping[str, Any]


def machines_of(told: Told) -> Machines:
    """Return how this machine meets the others. Raises ValueError, see above."""
    is_hosted = told.backend in (STATIC, C10D)
    found = _static(told) if told.backend == STATIC else _numbered(told, is_hosted=is_hosted)
    if told.keep and is_hosted:
        msg = f"keep: {CANNOT_KEEP}"
        raise ValueError(msg)
    fields = settings.machine_settings(told.conf, os.environ, is_hosted=is_hosted) | found | dict(told.more)
    endpoints = fields.pop("endpoints")
    return Machines(*told.nodes, told.backend, endpoints, told.address, keep=told.keep, **fields)


def _static(told: Told) -> dict[str, Any]:
    """Return the fields of machines whose ranks are given: they meet at the agent of rank 0."""
    least, most = told.nodes
    if least != most:
        msg = f"max_nodes: {least}:{most}: with {told.words[0]} static, a fixed number of machines takes part"
        raise ValueError(msg)
    if told.rank is None or not 0 <= told.rank < most:
        msg = f"rank: expected the rank of this machine, 0 to {most - 1}, got {told.rank}"
        raise ValueError(msg)
    if len(told.endpoints) != 1:
        msg = f"endpoint: expected one machine, that of node rank 0; got {len(told.endpoints)}"
        raise ValueError(msg)
    host, port = told.endpoints[0]
    port = port or STATIC_PORT
    _check_host(host)
    endpoint = address_text(host, settings.agent_port(told.conf, port + 1))
    secret = _secret(told, host, endpoint)
    return {
        "endpoints": (endpoint,), "hosts": told.rank == 0, "secret": secret, "node_rank": told.rank,
        "master": (host, port),
    }  # fmt: skip


def _numbered(told: Told, *, is_hosted: bool) -> dict[str, Any]:
    """Return the fields of machines that are numbered as they come."""
    default = C10D_PORT if is_hosted else ETCD_PORT
    what = "where the machine is that has the store" if is_hosted else "where the etcd is"
    if not told.endpoints or not all(host for host, _ in told.endpoints):
        msg = f"endpoint: expected {what}, like host:{default}; it is not given"
        raise ValueError(msg)
    if is_hosted and len(told.endpoints) > 1:
        msg = f"endpoint: expected one machine, which has the store; got {len(told.endpoints)}"
        raise ValueError(msg)
    host = told.endpoints[0][0]
    _check_host(host)
    if not told.run_id and not is_hosted:
        raise ValueError("run_id: the machines of a job find each other by it; give the same one on each")
    endpoints = tuple(address_text(name, port or default) for name, port in told.endpoints)
    if not is_hosted:
        return {"endpoints": endpoints, "hosts": False}
    hosts = settings.may_host(told.conf, host)
    return {"endpoints": endpoints, "hosts": hosts, "secret": _secret(told, host, endpoints[0])}


def _check_host(host: str) -> None:
    """Refuse an endpoint that each machine would take for its own."""
    if is_no_machine(host):
        msg = f"endpoint: expected the name or the address of a machine, by which the others reach it; got {host!r}"
        raise ValueError(msg)


def _secret(told: Told, host: str, endpoint: str) -> bytes:
    """Return the secret of a job whose store an agent has. Raises ValueError: none is given, and one is needed."""
    secret = settings.job_secret(told.conf, os.environ)
    if secret or told.insecure or is_loopback(host):
        return secret
    _, file, insecure = told.words
    msg = (
        f"endpoint: the agents meet at {endpoint}, which other machines reach: set {SECRET} to the same secret on each"
        f" (`openssl rand -hex 32` makes one), or let {file} name a file that holds it. {insecure} does without: "
        "whoever reaches that port can then stop the job, or lead it astray"
    )
    raise ValueError(msg)
