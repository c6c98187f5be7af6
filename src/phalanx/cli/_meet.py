"""What the options say of where the agents and the workers of a run meet: checked, and nothing is connected to."""

from __future__ import annotations

import os
from typing import NamedTuple

import click

from phalanx._agent.endpoint import BACKENDS, asks_for_others, is_here
from phalanx._base.host_names import address_text, is_loopback, is_no_machine
from phalanx._rendezvous.conf import CANNOT_KEEP
from phalanx._rendezvous.settings import C10D, C10D_PORT, ETCD_PORT, STATIC, STATIC_PORT, Machines
from phalanx.cli._machines import MASTER_ADDR
from phalanx.cli._rdzv_conf import SECRET, agent_port, job_secret, machine_settings, may_host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from phalanx.cli._machines import MachineOptions
    from phalanx.cli._scheduler import Allocation

_LATER = "this is the only machine, see --nnodes"
_SCHEDULED = {"SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}
"""Variables of which one is there, where a scheduler says anything; else what reads them is not loaded."""

_NO_ID = "none"
"""The id of a run of many machines that nobody has given one: all of them know it, and torchrun's is the same."""


class Meeting(NamedTuple):
    """Where the workers of a run meet.

    Attributes:
        run_id: What the run is called; None: nobody has said.
        master_addr: ``MASTER_ADDR``.
        master_port: ``MASTER_PORT``; 0: one is to be reserved.
        notes: What is to be said of options without effect.
        machines: How this one meets the others; None: there are none.
        holds: What no other launcher on this machine may have while this one runs, see `OneRun`; "": nothing.
        source: What the user has typed that says where the store is, for errors about that; "": the backend.
    """

    run_id: str | None
    master_addr: str
    master_port: int
    notes: list[str]
    machines: Machines | None = None
    holds: str = ""
    source: str = ""


def meet(chosen: MachineOptions, run_id: str | None) -> Meeting:
    """Return what the options say, beside ``--run-id``; and a scheduler, where they say nothing. Raises UsageError.

    As with torchrun, those of the rendezvous have no effect beside ``--standalone``. ``--local-addr`` is where workers
    meet unless something else says so.
    """
    rdzv_id = chosen.rdzv_id
    host, port = (chosen.rdzv_endpoint or [("", 0)])[0]
    address = chosen.local_addr if chosen.local_addr and chosen.master_addr == MASTER_ADDR else chosen.master_addr
    nodes = chosen.nnodes or (1, 1)
    of_rendezvous = {
        "--rdzv-backend": chosen.rdzv_backend != BACKENDS[0], "--rdzv-endpoint": host or port, "--rdzv-id": rdzv_id,
        "--rdzv-conf": chosen.rdzv_conf,
    }  # fmt: skip
    if chosen.standalone:
        given = {**of_rendezvous, "--nnodes": nodes != (1, 1), "--node-rank": chosen.node_rank, "--keep": chosen.keep}
        return Meeting(run_id, address, chosen.master_port, _unheeded("beside --standalone", given))
    if run_id and rdzv_id and run_id != rdzv_id:
        msg = f"--run-id is {run_id!r}, and --rdzv-id is {rdzv_id!r}: both name the run; give one of them"
        raise click.UsageError(msg)
    if chosen.nnodes is None and chosen.node_rank is None and not any(of_rendezvous.values()):
        allocation = _allocation()
        if allocation is not None:
            return _meet_as_scheduled(chosen, run_id, allocation)
    if nodes != (1, 1):
        return _meet_others(chosen, *nodes, run_id or rdzv_id)
    if chosen.node_rank:
        msg = f"--node-rank: {chosen.node_rank}: {_LATER}; its rank is 0"
        raise click.UsageError(msg)
    others = asks_for_others(chosen.rdzv_conf)
    if others or chosen.keep:
        msg = f"--rdzv-conf: {others}: {_LATER}" if others else f"--keep: {_LATER}; it has no store"
        raise click.UsageError(msg)
    if not is_here(host):
        msg = (
            f"--rdzv-endpoint: {host!r} is another machine than this; {_LATER}. On one machine, leave it out, or give "
            "localhost:0"
        )
        raise click.UsageError(msg)
    if chosen.rdzv_backend != STATIC or not host:
        return Meeting(run_id or rdzv_id, address, chosen.master_port, [])
    differ = {
        "--master-addr": chosen.master_addr not in (MASTER_ADDR, host),
        "--master-port": chosen.master_port not in (0, port),
    }
    return Meeting(run_id or rdzv_id, host, port, _unheeded(f"beside --rdzv-endpoint {host}:{port}", differ))


def _allocation() -> Allocation | None:
    """Return what a scheduler says of several machines; None: nothing. Raises UsageError."""
    if os.environ.keys().isdisjoint(_SCHEDULED):
        return None
    from phalanx.cli._scheduler import found

    try:
        return found(os.environ)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _meet_as_scheduled(chosen: MachineOptions, run_id: str | None, allocation: Allocation) -> Meeting:
    """Return how machines meet that a scheduler has chosen. Raises UsageError: it does not tell enough."""
    given = {
        "--master-addr": chosen.master_addr != MASTER_ADDR, "--master-port": chosen.master_port, "--run-id": run_id,
    }  # fmt: skip
    missing = [option for option in allocation.missing if not given[option]]
    if missing:
        msg = (
            f"{allocation.name} has started this on one of {allocation.nodes} machines ({allocation.why}), and does "
            f"not tell all that is needed: give {', '.join(missing)}, the same on each; or --standalone for a run of "
            "this machine alone"
        )
        raise click.UsageError(msg)
    host = chosen.master_addr if given["--master-addr"] else allocation.host
    port = chosen.master_port or allocation.port_of(run_id)
    nodes = allocation.nodes, allocation.nodes
    name = run_id or allocation.job
    meeting = _meet_at_rank_0(chosen, *nodes, allocation.node_rank, host, port, name, "--master-port")
    return meeting._replace(holds=f"{name}, node {allocation.node_rank}")


def _meet_others(chosen: MachineOptions, least: int, most: int, run_id: str | None) -> Meeting:
    """Return how this machine meets the others. Raises UsageError."""
    rank = chosen.node_rank or 0
    if rank >= most:
        msg = f"--node-rank: expected 0 to {most - 1}, for --nnodes {most}; got {rank}"
        raise click.UsageError(msg)
    if rank and least != most:
        raise click.UsageError(
            "--node-rank: ranks are given by hand to a fixed number of machines; --nnodes is a range"
        )
    if chosen.rdzv_backend == STATIC:
        return _meet_static(chosen, least, most, rank, run_id or _NO_ID)
    is_hosted = chosen.rdzv_backend == C10D
    default = C10D_PORT if is_hosted else ETCD_PORT
    what = "where the machine is that has the store" if is_hosted else "where the etcd is"
    if not chosen.rdzv_endpoint or not all(host for host, _ in chosen.rdzv_endpoint):
        msg = f"--rdzv-endpoint: expected {what}, like host:{default}; it is not given"
        raise click.UsageError(msg)
    host = chosen.rdzv_endpoint[0][0]
    if is_hosted and len(chosen.rdzv_endpoint) > 1:
        msg = f"--rdzv-endpoint: expected one machine, which has the store; got {len(chosen.rdzv_endpoint)}"
        raise click.UsageError(msg)
    _check_host("--rdzv-endpoint", host)
    if not run_id and not is_hosted:
        raise click.UsageError("--run-id: the machines of a job find each other by it; give the same one on each")
    endpoints = tuple(address_text(name, at or default) for name, at in chosen.rdzv_endpoint)
    machines = _machines(
        chosen,
        (least, most),
        endpoints,
        hosts=is_hosted and may_host(chosen.rdzv_conf, host),
        secret=_secret(chosen, host, endpoints[0]) if is_hosted else b"",
    )
    given = {
        "--master-addr": chosen.master_addr != MASTER_ADDR, "--master-port": chosen.master_port != 0,
        "--node-rank": rank != 0,
    }  # fmt: skip
    notes = _unheeded(f"with --rdzv-backend {chosen.rdzv_backend}", given)
    return Meeting(run_id or _NO_ID, machines.address, 0, notes, machines)


def _check_host(option: str, host: str) -> None:
    """Refuse an endpoint that each machine would take for its own. Raises UsageError."""
    if is_no_machine(host):
        msg = f"{option}: expected the name or the address of a machine, by which the others reach it; got {host!r}"
        raise click.UsageError(msg)


def _meet_static(chosen: MachineOptions, least: int, most: int, rank: int, run_id: str) -> Meeting:
    """Return how machines meet that have been given their ranks by options. Raises UsageError."""
    if least != most:
        msg = f"--nnodes: {least}:{most}: with --rdzv-backend static, a fixed number of machines takes part"
        raise click.UsageError(msg)
    host, port, source = chosen.master_addr, chosen.master_port or STATIC_PORT, "--master-port"
    notes = []
    if len(chosen.rdzv_endpoint) > 1:
        msg = f"--rdzv-endpoint: expected one machine, that of node rank 0; got {len(chosen.rdzv_endpoint)}"
        raise click.UsageError(msg)
    if chosen.rdzv_endpoint and not chosen.rdzv_endpoint[0][0] and chosen.rdzv_endpoint[0][1]:
        msg = f"--rdzv-endpoint: expected the machine of node rank 0, like host:{STATIC_PORT}; got a port alone"
        raise click.UsageError(msg)
    if chosen.rdzv_endpoint and chosen.rdzv_endpoint[0][0]:
        host, at = chosen.rdzv_endpoint[0]
        port, source = at or STATIC_PORT, "--rdzv-endpoint"
        differ = {
            "--master-addr": chosen.master_addr not in (MASTER_ADDR, host),
            "--master-port": chosen.master_port not in (0, port),
        }
        notes = _unheeded(f"beside --rdzv-endpoint {host}:{port}", differ)
    meeting = _meet_at_rank_0(chosen, least, most, rank, host, port, run_id, source)
    return meeting._replace(notes=notes)


def _meet_at_rank_0(
    chosen: MachineOptions, least: int, most: int, rank: int, host: str, port: int, run_id: str, source: str
) -> Meeting:
    """Return how machines meet whose ranks are given: at the agent of rank 0, ``host``. Raises UsageError.

    ``source``: the option that gives the port, if one does.
    """
    _check_host("--rdzv-endpoint" if source == "--rdzv-endpoint" else "--master-addr", host)
    agent = agent_port(chosen.rdzv_conf, port + 1)
    endpoint, typed = address_text(host, agent), ""
    if "agent_port" in chosen.rdzv_conf:
        typed = f"--rdzv-conf agent_port={agent}"
    elif chosen.master_port or source == "--rdzv-endpoint":
        typed = (
            f"--rdzv-endpoint {address_text(host, port)}" if source == "--rdzv-endpoint" else f"--master-port {port}"
        )
        typed += f": the agents meet at the port after it, {agent} (--rdzv-conf agent_port=PORT chooses another)"
    machines = _machines(
        chosen,
        (least, most),
        (endpoint,),
        hosts=rank == 0,
        secret=_secret(chosen, host, endpoint),
        node_rank=rank,
        master=(host, port),
    )
    return Meeting(run_id, host, port, [], machines, source=typed)


def _machines(chosen: MachineOptions, nodes: tuple[int, int], endpoints: tuple[str, ...], **more: Any) -> Machines:
    is_hosted = chosen.rdzv_backend in (STATIC, C10D)
    if chosen.keep and is_hosted:
        msg = f"--keep: {CANNOT_KEEP} (--rdzv-backend etcd)"
        raise click.UsageError(msg)
    fields = machine_settings(chosen.rdzv_conf, os.environ, is_hosted=is_hosted) | more
    return Machines(
        *nodes,
        chosen.rdzv_backend,
        endpoints,
        chosen.local_addr or "",
        rejoin_delay=chosen.rejoin_delay,
        exclude_after=chosen.exclude_after or 0,
        keep=chosen.keep,
        barrier=chosen.exit_barrier_timeout,
        **fields,
    )


def _secret(chosen: MachineOptions, host: str, endpoint: str) -> bytes:
    """Return the secret of a job whose store an agent has. Raises UsageError: none is given, and one is needed."""
    secret = job_secret(chosen.rdzv_conf, os.environ)
    if secret or chosen.insecure or is_loopback(host):
        return secret
    msg = (
        f"the agents meet at {endpoint}, which other machines reach: set {SECRET} to the same secret on each "
        "(`openssl rand -hex 32` makes one), or let --rdzv-conf secret_file=PATH name a file that holds it. "
        "--insecure does without: whoever reaches that port can then stop the job, or lead it astray"
    )
    raise click.UsageError(msg)


def _unheeded(where: str, given: Mapping[str, object]) -> list[str]:
    """Return what is to be said of options that have been given, and have no effect."""
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return [f"without effect {where}: {names}"] if names else []
