"""The options of `phalanx run` about machines: how many there are, and where their agents and their workers meet.

What they say is checked here, and nothing is connected to. Of one machine, no store is started: rank 0 of the workers
serves one, if they need it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import click

from phalanx._base.host_names import address_text
from phalanx._rendezvous import rdzv_conf
from phalanx._rendezvous.endpoint import BACKENDS, asks_for_others, is_here, read_settings, split_endpoint
from phalanx._rendezvous.rdzv_conf import FILES, SECRET
from phalanx._rendezvous.settings import MOST_ADDRESS, MOST_NODES, MOST_RUN_ID, STATIC, STATIC_PORT, Machines
from phalanx.cli._declare import LIST, MACHINES, TEXT, WHOLE, Declared, Flag, Maybe, Option
from phalanx.cli._options import Count, Time, Whole, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx._run.scheduler import Allocation

MASTER_ADDR = "127.0.0.1"
"""Where workers meet, if nobody says otherwise."""

_WORDS = "--rdzv-backend", "--rdzv-conf secret_file=PATH", "--insecure"
_HINTS = {"keep": " (--rdzv-backend etcd)"}
_LATER = "this is the only machine, see --nnodes"
_SCHEDULED = {"SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}
"""Variables of which one is there, where a scheduler says anything; else what reads them is not loaded."""

_NO_ID = "none"
"""The id of a run of many machines that nobody has given one: all of them know it, and torchrun's is the same."""


def read_nodes(text: str) -> tuple[int, int]:
    """Read ``--nnodes``: a number of machines, or the least and the most. Raises ValueError.

    >>> read_nodes("2"), read_nodes("1:4")
    ((2, 2), (1, 4))
    """
    least, colon, most = (part.strip() for part in text.partition(":"))
    numbers = [least, most] if colon else [least, least]
    if not all(number.isascii() and number.isdecimal() and len(number) <= len(str(MOST_NODES)) for number in numbers):
        msg = f"{text!r}: expected how many machines there are, like 2; or the least and the most, like 2:4"
        raise ValueError(msg)
    first, last = map(int, numbers)
    if not 1 <= first <= last <= MOST_NODES:
        raise ValueError(f"{text!r}: expected 1 to {MOST_NODES} machines, and no more at least than at most")
    return first, last


def read_endpoints(text: str) -> list[tuple[str, int]]:
    """Read ``--rdzv-endpoint``: hosts and ports, of any machines; there may be several of an etcd. Raises ValueError.

    >>> read_endpoints("localhost:0"), read_endpoints("a:1,b"), read_endpoints("")
    ([('localhost', 0)], [('a', 1), ('b', 0)], [])
    """
    found = [split_endpoint(part) for part in text.split(",") if text.strip()]
    if any(set(host) & set(" \t/@") or not (host or len(found) == 1) for host, _ in found):
        msg = f"expected the name or the address of a machine and a port, like localhost:29500, got {text!r}"
        raise ValueError(msg)
    return found


def read_conf(text: str) -> dict[str, str]:
    """Read ``--rdzv-conf``. Raises ValueError.

    >>> read_conf("timeout=60")
    {'timeout': '60'}
    """
    settings = read_settings(text)
    if "password" in settings:
        msg = "password: it would be seen by all users of this machine; password_file=PATH names a file that holds it"
        raise ValueError(msg)
    return settings


def read_address(text: str) -> str:
    """Read ``--local-addr``: an address of this machine. Raises ValueError.

    >>> read_address("127.0.0.1")
    '127.0.0.1'
    """
    text = text.strip()
    if not text or len(text) > MOST_ADDRESS or not is_here(text):
        msg = f"{text!r}: expected the name or an address of this machine; --master-addr takes any"
        raise ValueError(msg)
    return text


class MachineOptions(Declared, section=MACHINES):
    """Where workers meet, and what torchrun's users say of machines."""

    master_addr = Option(str, default=MASTER_ADDR, torchrun="--master-addr", sentence="MASTER_ADDR of the workers.")
    master_port = Option(
        int,
        kind=Whole(0, 65535),
        default="0",
        metavar="PORT",
        written=WHOLE,
        shows_default=False,
        torchrun="--master-port",
        sentence="MASTER_PORT of the workers. Default: a port that is reserved for the run.",
    )
    local_addr = Maybe(
        read_address,
        metavar="HOST",
        torchrun="--local-addr",
        sentence="An address of this machine: MASTER_ADDR, unless that is given.",
    )
    rdzv_id = Maybe(
        text_of(MOST_RUN_ID),
        metavar="NAME",
        torchrun="--rdzv-id",
        written=TEXT + WHOLE,
        sentence="Another name of --run-id.",
    )
    rdzv_backend = Option(
        str,
        kind=click.Choice(BACKENDS),
        default=STATIC,
        metavar="NAME",
        torchrun="--rdzv-backend",
        sentence="How machines meet. static: with --node-rank; c10d: at one of them; etcd: at an etcd of yours.",
    )
    rdzv_endpoint = Option(
        read_endpoints,
        default="",
        metavar="HOST[:PORT],...",
        written=LIST,
        torchrun="--rdzv-endpoint",
        sentence="Address of the etcd, or of the machine that has the store. For one machine: localhost:0.",
    )
    insecure = Flag(sentence="Serve the store without a secret, to everybody who reaches its port.")
    rdzv_conf = Option(
        read_conf,
        default="",
        paths=FILES,
        metavar="KEY=VALUE,...",
        written=LIST,
        torchrun="--rdzv-conf",
        sentence="Settings of the rendezvous: join_timeout=600,last_call_timeout=30,lease_ttl=5, and files of TLS.",
    )
    rejoin_delay = Time(endless=False, default="30", sentence="Delay of the restart that takes in a new machine.")
    on_sigterm = Maybe(
        str,
        kind=click.Choice(["leave", "stop"]),
        sentence="Effect of SIGTERM: this machine leaves, or all stop. Default: leave, with MIN:MAX or as a spare.",
    )
    exclude_after = Count(
        least=1,
        metavar="K",
        sentence="Exclude a machine whose workers were the root cause K times in a row. Default: never.",
    )
    node_check = Maybe(
        str,
        metavar="COMMAND",
        sentence="Command before each attempt: no worker starts on the machine unless it exits with 0.",
    )
    exit_barrier_timeout = Time(
        default="300", sentence="How long a machine whose workers have ended waits for those of the others."
    )
    keep = Flag(sentence="Keep the job's end in the etcd, until the next job of this id.")
    standalone = Flag(
        section="",
        torchrun="--standalone",
        sentence="Run on this machine alone, without a store; ignore what a scheduler sets.",
    )
    nnodes = Maybe(
        read_nodes,
        metavar="N|MIN:MAX",
        written=TEXT + WHOLE,
        torchrun="--nnodes",
        sentence="Number of machines. Default: that of a scheduler, or 1.",
    )
    node_rank = Maybe(
        int,
        kind=Whole(min=0),
        metavar="N",
        written=TEXT + WHOLE,
        torchrun="--node-rank",
        sentence="With static: this machine's rank. Default: that of a scheduler, or 0.",
    )


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
        "--rdzv-backend": chosen.rdzv_backend != STATIC, "--rdzv-endpoint": host or port, "--rdzv-id": rdzv_id,
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
        raise click.UsageError(f"--node-rank: {chosen.node_rank}: {_LATER}; its rank is 0")
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
    return Meeting(run_id or rdzv_id, host, port, _beside_endpoint(chosen, host, port))


def _allocation() -> Allocation | None:
    """Return what a scheduler says of several machines; None: nothing. Raises UsageError."""
    if os.environ.keys().isdisjoint(_SCHEDULED):
        return None
    from phalanx._run.scheduler import found

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
    met = _meet_at_rank_0(chosen, nodes, allocation.node_rank, [(host, port)], name, "--master-port")
    step = "" if run_id else f"{name} (several `phalanx run` in one step need a --run-id each)"
    return met._replace(is_scheduled=True, source=met.source or step)


def _meet_others(chosen: MachineOptions, least: int, most: int, run_id: str | None) -> Meeting:
    """Return how this machine meets the others. Raises UsageError."""
    rank = chosen.node_rank or 0
    if rank >= most:
        raise click.UsageError(f"--node-rank: expected 0 to {most - 1}, for --nnodes {most}; got {rank}")
    if rank and least != most:
        raise click.UsageError(
            "--node-rank: ranks are given by hand to a fixed number of machines; --nnodes is a range"
        )
    if chosen.rdzv_backend == STATIC:
        return _meet_static(chosen, least, most, rank, run_id or _NO_ID)
    machines = _machines(chosen, (least, most), chosen.rdzv_endpoint, run_id or "", None, "--rdzv-endpoint")
    given = {
        "--master-addr": chosen.master_addr != MASTER_ADDR, "--master-port": chosen.master_port != 0,
        "--node-rank": rank != 0,
    }  # fmt: skip
    notes = _unheeded(f"with --rdzv-backend {chosen.rdzv_backend}", given)
    return Meeting(run_id or _NO_ID, machines.address, 0, notes, machines)


def _meet_static(chosen: MachineOptions, least: int, most: int, rank: int, run_id: str) -> Meeting:
    """Return how machines meet that have been given their ranks by options. Raises UsageError."""
    host, port = (chosen.rdzv_endpoint or [("", 0)])[0]
    if port and not host:
        msg = f"--rdzv-endpoint: expected the machine of node rank 0, like host:{STATIC_PORT}; got a port alone"
        raise click.UsageError(msg)
    if not host:
        endpoint = chosen.master_addr, chosen.master_port or STATIC_PORT
        return _meet_at_rank_0(chosen, (least, most), rank, [endpoint], run_id, "--master-port")
    met = _meet_at_rank_0(chosen, (least, most), rank, chosen.rdzv_endpoint, run_id, "--rdzv-endpoint")
    return met._replace(notes=_beside_endpoint(chosen, host, port or STATIC_PORT))


def _meet_at_rank_0(
    chosen: MachineOptions, nodes: tuple[int, int], rank: int, endpoints: Sequence[tuple[str, int]], run_id: str,
    source: str,
) -> Meeting:  # fmt: skip
    """Return how machines meet whose ranks are given: at the agent of rank 0. Raises UsageError.

    ``source``: the option that gives the port, if one does.
    """
    option = "--rdzv-endpoint" if source == "--rdzv-endpoint" else "--master-addr"
    machines = _machines(chosen, nodes, endpoints, run_id, rank, option)
    assert machines.master is not None
    (host, port), (_, agent), typed = machines.master, machines.host_and_port(), ""
    if "agent_port" in chosen.rdzv_conf:
        typed = f"--rdzv-conf agent_port={agent}"
    elif chosen.master_port or source == "--rdzv-endpoint":
        where = address_text(host, port) if source == "--rdzv-endpoint" else port
        typed = f"{source} {where}: the agents meet at the port after it, {agent} "
        typed += "(--rdzv-conf agent_port=PORT chooses another)"
    return Meeting(run_id, host, port, [], machines, source=typed)


def _machines(
    chosen: MachineOptions, nodes: tuple[int, int], endpoints: Sequence[tuple[str, int]], run_id: str,
    rank: int | None, where: str,
) -> Machines:  # fmt: skip
    """Return how this machine meets the others. ``where``: the option that names the endpoint. Raises UsageError."""
    more = {
        "rejoin_delay": chosen.rejoin_delay, "exclude_after": chosen.exclude_after or 0,
        "barrier": chosen.exit_barrier_timeout,
    }  # fmt: skip
    told = rdzv_conf.Given(
        chosen.rdzv_backend, nodes, tuple(endpoints), run_id, chosen.rdzv_conf, rank, chosen.local_addr or "",
        insecure=chosen.insecure, keep=chosen.keep, words=_WORDS, more=more,
    )  # fmt: skip
    try:
        return rdzv_conf.machines_of(told)
    except ValueError as error:
        name, _, rest = str(error).partition(": ")
        options = {
            "endpoint": where, "rank": "--node-rank", "max_nodes": "--nnodes", "run_id": "--run-id", "keep": "--keep",
        }  # fmt: skip
        if name in options:
            text = f"{options[name]}: {rest}{_HINTS.get(name, '')}"
        else:
            text = str(error) if name == SECRET else f"--rdzv-conf: {error}"
        raise click.UsageError(text) from None


def _beside_endpoint(chosen: MachineOptions, host: str, port: int) -> list[str]:
    """Return what is to be said of options that name another place than the endpoint."""
    differ = {
        "--master-addr": chosen.master_addr not in (MASTER_ADDR, host),
        "--master-port": chosen.master_port not in (0, port),
    }
    return _unheeded(f"beside --rdzv-endpoint {host}:{port}", differ)


def _unheeded(where: str, given: Mapping[str, object]) -> list[str]:
    """Return what is to be said of options that have been given, and have no effect."""
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return [f"without effect {where}: {names}"] if names else []
