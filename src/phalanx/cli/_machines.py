"""The options of `phalanx run` about several machines, as far as they say that there is one: where workers meet.

Nothing is connected to, and no store is started: rank 0 of the workers serves one, if they need it.
"""

from __future__ import annotations

from typing import NamedTuple

import click

from phalanx._agent.endpoint import BACKENDS, asks_for_others, is_here, read_settings, split_endpoint
from phalanx.cli._declare import LIST, MACHINES, TEXT, WHOLE, Declared, Flag, Maybe, Option
from phalanx.cli._options import Whole

_MASTER_ADDR = "127.0.0.1"
_LATER = "many machines are not there yet"


class Meeting(NamedTuple):
    """Where the workers of a run meet.

    Attributes:
        run_id: What the run is called; None: nobody has said.
        master_addr: ``MASTER_ADDR``.
        master_port: ``MASTER_PORT``; 0: one is to be reserved.
        notes: What is to be said of options without effect.
    """

    run_id: str | None
    master_addr: str
    master_port: int
    notes: list[str]


def read_nodes(text: str) -> str:
    """Read ``--nnodes``. Raises ValueError.

    >>> read_nodes("1:1")
    '1:1'
    """
    if text.strip() not in ("1", "1:1"):
        msg = f"{text!r}: {_LATER}; this version of phalanx run takes 1 or 1:1 only"
        raise ValueError(msg)
    return text.strip()


def read_node_rank(text: str) -> str:
    """Read ``--node-rank``. Raises ValueError.

    >>> read_node_rank("0")
    '0'
    """
    if text.strip() != "0":
        msg = f"{text!r}: {_LATER}; this version of phalanx run takes 0 only"
        raise ValueError(msg)
    return text.strip()


def read_backend(text: str) -> str:
    """Read ``--rdzv-backend``. Raises ValueError.

    >>> read_backend("c10d")
    'c10d'
    """
    if text not in BACKENDS:
        msg = f"{text!r}: expected one of {', '.join(BACKENDS)}"
        raise ValueError(msg)
    return text


def read_endpoint(text: str) -> tuple[str, int]:
    """Read ``--rdzv-endpoint``: a host of any machine, and a port. Raises ValueError.

    >>> read_endpoint("localhost:0"), read_endpoint("")
    (('localhost', 0), ('', 0))
    """
    host, port = split_endpoint(text)
    if set(host) & set(" \t/@,"):
        msg = f"expected the name or the address of a machine and a port, like localhost:29500, got {text!r}"
        raise ValueError(msg)
    return host, port


def read_conf(text: str) -> dict[str, str]:
    """Read ``--rdzv-conf``. Raises ValueError, also for what other machines would be needed for.

    >>> read_conf("timeout=60")
    {'timeout': '60'}
    """
    settings = read_settings(text)
    others = asks_for_others(settings)
    if others:
        msg = f"{others}: {_LATER}; this is the only one"
        raise ValueError(msg)
    return settings


def read_address(text: str) -> str:
    """Read ``--local-addr``: an address of this machine. Raises ValueError.

    >>> read_address("127.0.0.1")
    '127.0.0.1'
    """
    text = text.strip()
    if not text or not is_here(text):
        msg = f"{text!r}: expected the name or an address of this machine; --master-addr takes any"
        raise ValueError(msg)
    return text


class MachineOptions(Declared):
    """Where workers meet, and what torchrun's users say of machines."""

    master_addr = Option(
        str, section=MACHINES, default=_MASTER_ADDR, torchrun="--master-addr", sentence="MASTER_ADDR of the workers."
    )
    master_port = Option(
        int,
        section=MACHINES,
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
        section=MACHINES,
        metavar="HOST",
        torchrun="--local-addr",
        sentence="An address of this machine: MASTER_ADDR, unless that is given.",
    )
    rdzv_id = Maybe(
        str,
        section=MACHINES,
        metavar="NAME",
        torchrun="--rdzv-id",
        written=TEXT + WHOLE,
        sentence="Another name of --run-id.",
    )
    rdzv_backend = Option(
        read_backend,
        section=MACHINES,
        default=BACKENDS[0],
        metavar="NAME",
        torchrun="--rdzv-backend",
        sentence="static: the endpoint is where rank 0 listens. c10d, etcd, etcd-v2: no store is needed.",
    )
    rdzv_endpoint = Option(
        read_endpoint,
        section=MACHINES,
        default="",
        metavar="HOST[:PORT]",
        shows_default=False,
        torchrun="--rdzv-endpoint",
        sentence="A host, which is this machine, and a port, like localhost:0.",
    )
    rdzv_conf = Option(
        read_conf,
        section="",
        default="",
        written=LIST,
        torchrun="--rdzv-conf",
        sentence="Accepted: settings, like timeout=60.",
    )
    standalone = Flag(
        section="", torchrun="--standalone", sentence="Accepted: one machine without a store is what this is."
    )
    nnodes = Option(
        read_nodes,
        section="",
        default="1",
        written=TEXT + WHOLE,
        torchrun="--nnodes",
        sentence="Accepted: 1, or 1:1.",
    )
    node_rank = Option(
        read_node_rank,
        section="",
        default="0",
        written=TEXT + WHOLE,
        torchrun="--node-rank",
        sentence="Accepted: 0.",
    )


def meet(chosen: MachineOptions, run_id: str | None) -> Meeting:
    """Return what the options say, beside ``--run-id``. Raises UsageError.

    As with torchrun, those of the rendezvous have no effect beside ``--standalone``. The endpoint of the static backend
    is where rank 0 listens; that of another is a store's, and there is none. ``--local-addr`` is where workers meet
    unless something else says so.
    """
    rdzv_id, (host, port) = chosen.rdzv_id, chosen.rdzv_endpoint
    address = chosen.local_addr if chosen.local_addr and chosen.master_addr == _MASTER_ADDR else chosen.master_addr
    if chosen.standalone:
        given = {
            "--rdzv-backend": chosen.rdzv_backend != BACKENDS[0], "--rdzv-endpoint": host or port,
            "--rdzv-id": rdzv_id, "--rdzv-conf": chosen.rdzv_conf,
        }  # fmt: skip
        unheeded = ", ".join(name for name, is_given in given.items() if is_given)
        notes = [f"without effect beside --standalone: {unheeded}"] if unheeded else []
        return Meeting(run_id, address, chosen.master_port, notes)
    if run_id and rdzv_id and run_id != rdzv_id:
        msg = f"--run-id is {run_id!r}, and --rdzv-id is {rdzv_id!r}: both name the run; give one of them"
        raise click.UsageError(msg)
    if not is_here(host):
        msg = (
            f"--rdzv-endpoint: {host!r} is another machine than this; {_LATER}. On one machine, leave it out, or give "
            "localhost:0"
        )
        raise click.UsageError(msg)
    if chosen.rdzv_backend != BACKENDS[0] or not host:
        return Meeting(run_id or rdzv_id, address, chosen.master_port, [])
    differ = {
        "--master-addr": chosen.master_addr not in (_MASTER_ADDR, host),
        "--master-port": chosen.master_port not in (0, port),
    }
    unheeded = ", ".join(name for name, is_given in differ.items() if is_given)
    notes = [f"without effect beside --rdzv-endpoint {host}:{port}: {unheeded}"] if unheeded else []
    return Meeting(run_id or rdzv_id, host, port, notes)
