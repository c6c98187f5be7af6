"""How many machines a run has, and where their agents and their workers meet, by the options or a scheduler.

What these say is checked here, and nothing is connected to. Of one machine, no store is started: rank 0 of the workers
serves one, if they need it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx._base.host_names import address_text
from phalanx._rendezvous import rdzv_conf
from phalanx._rendezvous.endpoint import asks_for_others, is_here
from phalanx._rendezvous.rdzv_conf import SECRET
from phalanx._rendezvous.settings import STATIC, STATIC_PORT, Machines
from phalanx._run.config import RunConfig

MASTER_ADDR = "127.0.0.1"
"""Where workers meet, if nobody says otherwise."""

_WORDS = "--rdzv-backend", "--rdzv-conf secret_file=PATH", "--insecure"
_OPTIONS = {"rank": "--node-rank", "max_nodes": "--nnodes", "run_id": "--run-id", "keep": "--keep"}
_HINTS = {"keep": " (--rdzv-backend etcd)"}
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
        is_scheduled: Whether a scheduler starts `phalanx run` on each machine: nobody types it there.
        source: What says where the store is, for errors about that: an option as it was typed, or a scheduler's step;
            "": the backend.
    """

    run_id: str | None
    master_addr: str
    master_port: int
    notes: list[str]
    machines: Machines | None = None
    is_scheduled: bool = False
    source: str = ""


def meet(config: RunConfig) -> Meeting:
    """Return what the options say; and a scheduler, where they say nothing. Raises ValueError.

    As with torchrun, those of the rendezvous have no effect beside ``--standalone``. ``--local-addr`` is where workers
    meet unless something else says so.
    """
    run_id, rdzv_id, (host, port) = config.run_id, config.rdzv_id, _first_endpoint(config)
    address = config.local_addr if config.local_addr and config.master_addr == MASTER_ADDR else config.master_addr
    nodes = config.nnodes or (1, 1)
    of_rendezvous = {
        "--rdzv-backend": config.rdzv_backend != STATIC, "--rdzv-endpoint": host or port, "--rdzv-id": rdzv_id,
        "--rdzv-conf": config.rdzv_conf,
    }  # fmt: skip
    if config.standalone:
        given = {**of_rendezvous, "--nnodes": nodes != (1, 1), "--node-rank": config.node_rank, "--keep": config.keep}
        return Meeting(run_id, address, config.master_port, _unheeded("beside --standalone", given))
    if run_id and rdzv_id and run_id != rdzv_id:
        msg = f"--run-id is {run_id!r}, and --rdzv-id is {rdzv_id!r}: both name the run; give one of them"
        raise ValueError(msg)
    is_silent = config.nnodes is None and config.node_rank is None and not any(of_rendezvous.values())
    if is_silent and not os.environ.keys().isdisjoint(_SCHEDULED) and (scheduled := _meet_as_scheduled(config)):
        return scheduled
    if nodes != (1, 1):
        return _meet_others(config, *nodes, run_id or rdzv_id)
    if config.node_rank:
        raise ValueError(f"--node-rank: {config.node_rank}: {_LATER}; its rank is 0")
    others = asks_for_others(config.rdzv_conf)
    if others or config.keep:
        msg = f"--rdzv-conf: {others}: {_LATER}" if others else f"--keep: {_LATER}; it has no store"
        raise ValueError(msg)
    if not is_here(host):
        msg = (
            f"--rdzv-endpoint: {host!r} is another machine than this; {_LATER}. On one machine, leave it out, or give "
            "localhost:0"
        )
        raise ValueError(msg)
    if config.rdzv_backend != STATIC or not host:
        return Meeting(run_id or rdzv_id, address, config.master_port, [])
    return Meeting(run_id or rdzv_id, host, port, _beside_endpoint(config, host, port))


def _first_endpoint(config: RunConfig) -> tuple[str, int]:
    return config.rdzv_endpoint[0] if config.rdzv_endpoint else ("", 0)


def _meet_as_scheduled(config: RunConfig) -> Meeting | None:
    """Return how machines meet that a scheduler has chosen; None: it has one. Raises ValueError."""
    from phalanx._run.scheduler import found

    if (allocation := found(os.environ)) is None:
        return None
    run_id = config.run_id
    has_address = config.master_addr != MASTER_ADDR
    given = {"--master-addr": has_address, "--master-port": config.master_port, "--run-id": run_id}
    missing = [option for option in allocation.missing if not given[option]]
    if missing:
        msg = (
            f"{allocation.name} has started this on one of {allocation.nodes} machines ({allocation.why}), and does "
            f"not tell all that is needed: give {', '.join(missing)}, the same on each; or --standalone for a run of "
            "this machine alone"
        )
        raise ValueError(msg)
    host = config.master_addr if has_address else allocation.host
    port = config.master_port or allocation.port_of(run_id)
    nodes, name = (allocation.nodes, allocation.nodes), run_id or allocation.job
    met = _meet_at_rank_0(config, nodes, allocation.node_rank, (host, port), name, "--master-port")
    step = "" if run_id else f"{name} (several `phalanx run` in one step need a --run-id each)"
    return met._replace(is_scheduled=True, source=met.source or step)


def _meet_others(config: RunConfig, least: int, most: int, run_id: str | None) -> Meeting:
    """Return how this machine meets the others. Raises ValueError."""
    rank = config.node_rank or 0
    if rank >= most:
        raise ValueError(f"--node-rank: expected 0 to {most - 1}, for --nnodes {most}; got {rank}")
    if rank and least != most:
        raise ValueError("--node-rank: ranks are given by hand to a fixed number of machines; --nnodes is a range")
    if config.rdzv_backend != STATIC:
        machines = _machines(config, (least, most), config.rdzv_endpoint, run_id or "", None, "--rdzv-endpoint")
        given = {
            "--master-addr": config.master_addr != MASTER_ADDR, "--master-port": config.master_port,
            "--node-rank": rank,
        }  # fmt: skip
        notes = _unheeded(f"with --rdzv-backend {config.rdzv_backend}", given)
        return Meeting(run_id or _NO_ID, machines.address, 0, notes, machines)
    host, port = _first_endpoint(config)
    if port and not host:
        msg = f"--rdzv-endpoint: expected the machine of node rank 0, like host:{STATIC_PORT}; got a port alone"
        raise ValueError(msg)
    if not host:
        endpoint = config.master_addr, config.master_port or STATIC_PORT
        return _meet_at_rank_0(config, (least, most), rank, endpoint, run_id or _NO_ID, "--master-port")
    met = _meet_at_rank_0(config, (least, most), rank, (host, port), run_id or _NO_ID, "--rdzv-endpoint")
    return met._replace(notes=_beside_endpoint(config, host, port or STATIC_PORT))


def _meet_at_rank_0(
    config: RunConfig, nodes: tuple[int, int], rank: int, endpoint: tuple[str, int], run_id: str, source: str
) -> Meeting:
    """Return how machines meet whose ranks are given: at the agent of rank 0. ``source``: what gives the port."""
    at_endpoint = source == "--rdzv-endpoint"
    # All endpoints that were typed, so that more than one is refused.
    endpoints = config.rdzv_endpoint if at_endpoint else [endpoint]
    machines = _machines(config, nodes, endpoints, run_id, rank, source if at_endpoint else "--master-addr")
    assert machines.master is not None
    (host, port), (_, agent), typed = machines.master, machines.host_and_port(), ""
    if "agent_port" in config.rdzv_conf:
        typed = f"--rdzv-conf agent_port={agent}"
    elif config.master_port or at_endpoint:
        where = address_text(host, port) if at_endpoint else port
        typed = f"{source} {where}: the agents meet at the port after it, {agent} "
        typed += "(--rdzv-conf agent_port=PORT chooses another)"
    return Meeting(run_id, host, port, [], machines, source=typed)


def _machines(
    config: RunConfig, nodes: tuple[int, int], endpoints: Sequence[tuple[str, int]], run_id: str, rank: int | None,
    where: str,
) -> Machines:  # fmt: skip
    """Return how this machine meets the others. ``where``: the option that names the endpoint. Raises ValueError."""
    more = {
        "rejoin_delay": config.rejoin_delay, "exclude_after": config.exclude_after or 0,
        "barrier": config.exit_barrier_timeout,
    }  # fmt: skip
    told = rdzv_conf.Given(
        config.rdzv_backend, nodes, tuple(endpoints), run_id, config.rdzv_conf, rank, config.local_addr or "",
        insecure=config.insecure, keep=config.keep, words=_WORDS, more=more,
    )  # fmt: skip
    try:
        return rdzv_conf.machines_of(told)
    except ValueError as error:
        name, _, rest = str(error).partition(": ")
        if option := {**_OPTIONS, "endpoint": where}.get(name):
            text = f"{option}: {rest}{_HINTS.get(name, '')}"
        else:
            text = str(error) if name == SECRET else f"--rdzv-conf: {error}"
        raise ValueError(text) from None


def _beside_endpoint(config: RunConfig, host: str, port: int) -> list[str]:
    """Return what is to be said of options that name another place than the endpoint."""
    differ = {
        "--master-addr": config.master_addr not in (MASTER_ADDR, host),
        "--master-port": config.master_port not in (0, port),
    }
    return _unheeded(f"beside --rdzv-endpoint {host}:{port}", differ)


def _unheeded(where: str, given: Mapping[str, object]) -> list[str]:
    """Return what is to be said of options that have been given, and have no effect."""
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return [f"without effect {where}: {names}"] if names else []
