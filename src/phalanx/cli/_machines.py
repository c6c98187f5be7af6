"""The options of `phalanx run` about machines: how many there are, and where their agents and their workers meet.

Of one machine, nothing is connected to, and no store is started: rank 0 of the workers serves one, if they need it.
"""

from __future__ import annotations

from typing import NamedTuple

import click

from phalanx._agent.endpoint import BACKENDS, asks_for_others, is_here, read_settings, split_endpoint
from phalanx._rendezvous.settings import ETCD, ETCD_PORT, Machines
from phalanx.cli._declare import LIST, MACHINES, NUMBER, TEXT, WHOLE, Declared, Flag, Maybe, Option
from phalanx.cli._options import Whole, time_of

_MASTER_ADDR = "127.0.0.1"
_LATER = "this is the only machine, see --nnodes"
_MOST_NODES = 65536
_LEAST_TTL, _MOST_TTL = 2, 86400
_MOST_FILE = 1 << 20
_TIMES = ("join_timeout", "last_call")
_CONF = {  # settings of --rdzv-conf: for the nodes of an etcd
    "join_timeout": "join_timeout", "timeout": "join_timeout", "last_call_timeout": "last_call",
    "lease_ttl": "lease_ttl", "ca": "ca", "cert": "cert", "key": "key", "user": "user",
    "password_file": "password",
}  # fmt: skip


TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Meeting(NamedTuple):
    """Where the workers of a run meet.

    Attributes:
        run_id: What the run is called; None: nobody has said.
        master_addr: ``MASTER_ADDR``.
        master_port: ``MASTER_PORT``; 0: one is to be reserved.
        notes: What is to be said of options without effect.
        machines: How this one meets the others; None: there are none.
    """

    run_id: str | None
    master_addr: str
    master_port: int
    notes: list[str]
    machines: Machines | None = None


def read_nodes(text: str) -> tuple[int, int]:
    """Read ``--nnodes``: a number of machines, or the least and the most. Raises ValueError.

    >>> read_nodes("2"), read_nodes("1:4")
    ((2, 2), (1, 4))
    """
    least, colon, most = (part.strip() for part in text.partition(":"))
    numbers = [least, most] if colon else [least, least]
    if not all(number.isascii() and number.isdecimal() and len(number) <= len(str(_MOST_NODES)) for number in numbers):
        msg = f"{text!r}: expected how many machines there are, like 2; or the least and the most, like 2:4"
        raise ValueError(msg)
    first, last = map(int, numbers)
    if not 1 <= first <= last <= _MOST_NODES:
        msg = f"{text!r}: expected 1 to {_MOST_NODES} machines, and no more at least than at most"
        raise ValueError(msg)
    return first, last


def read_node_rank(text: str) -> int:
    """Read ``--node-rank``. Raises ValueError.

    >>> read_node_rank("0")
    0
    """
    if not (text.strip().isascii() and text.strip().isdecimal()):
        msg = f"{text!r}: expected the rank of this machine among the machines, 0 and up"
        raise ValueError(msg)
    return int(text)


def read_backend(text: str) -> str:
    """Read ``--rdzv-backend``. Raises ValueError.

    >>> read_backend("c10d")
    'c10d'
    """
    if text not in BACKENDS:
        msg = f"{text!r}: expected one of {', '.join(BACKENDS)}"
        raise ValueError(msg)
    return text


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
        sentence="How machines meet: etcd. Of one machine: static: the endpoint is where rank 0 listens.",
    )
    rdzv_endpoint = Option(
        read_endpoints,
        section=MACHINES,
        default="",
        metavar="HOST[:PORT],...",
        written=LIST,
        shows_default=False,
        torchrun="--rdzv-endpoint",
        sentence="Where the etcd is, like host:2379. Of one machine: itself, like localhost:0.",
    )
    rdzv_conf = Option(
        read_conf,
        section=MACHINES,
        default="",
        metavar="KEY=VALUE,...",
        written=LIST,
        shows_default=False,
        torchrun="--rdzv-conf",
        sentence="Settings of the rendezvous: join_timeout=600,last_call_timeout=30,lease_ttl=5, and files of TLS.",
    )
    rejoin_delay = Option(
        time_of(endless=False),
        section=MACHINES,
        default="30",
        metavar="SECONDS",
        written=NUMBER,
        sentence="Time between the coming of a machine and the restart with it.",
    )
    exclude_after = Maybe(
        int,
        section=MACHINES,
        kind=Whole(min=1),
        metavar="K",
        written=WHOLE,
        sentence="Leave a machine out whose workers were the root cause K times in a row. Default: none is.",
    )
    exit_barrier_timeout = Option(
        time_of(),
        section=MACHINES,
        default="300",
        metavar="SECONDS",
        written=NUMBER,
        sentence="Time that a machine waits at its end for the workers of the others.",
    )
    standalone = Flag(
        section="", torchrun="--standalone", sentence="Accepted: one machine without a store is what this is."
    )
    nnodes = Option(
        read_nodes,
        section=MACHINES,
        default="1",
        metavar="N|MIN:MAX",
        written=TEXT + WHOLE,
        torchrun="--nnodes",
        sentence="How many machines there are.",
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

    As with torchrun, those of the rendezvous have no effect beside ``--standalone``. ``--local-addr`` is where workers
    meet unless something else says so.
    """
    rdzv_id, given_rank = chosen.rdzv_id, chosen.node_rank
    host, port = (chosen.rdzv_endpoint or [("", 0)])[0]
    address = chosen.local_addr if chosen.local_addr and chosen.master_addr == _MASTER_ADDR else chosen.master_addr
    if chosen.standalone:
        given = {
            "--rdzv-backend": chosen.rdzv_backend != BACKENDS[0], "--rdzv-endpoint": host or port,
            "--rdzv-id": rdzv_id, "--rdzv-conf": chosen.rdzv_conf, "--nnodes": chosen.nnodes != (1, 1),
            "--node-rank": given_rank,
        }  # fmt: skip
        unheeded = ", ".join(name for name, is_given in given.items() if is_given)
        notes = [f"without effect beside --standalone: {unheeded}"] if unheeded else []
        return Meeting(run_id, address, chosen.master_port, notes)
    if run_id and rdzv_id and run_id != rdzv_id:
        msg = f"--run-id is {run_id!r}, and --rdzv-id is {rdzv_id!r}: both name the run; give one of them"
        raise click.UsageError(msg)
    if chosen.nnodes != (1, 1):
        return _meet_others(chosen, run_id or rdzv_id)
    if given_rank:
        msg = f"--node-rank: {given_rank}: {_LATER}; its rank is 0"
        raise click.UsageError(msg)
    others = asks_for_others(chosen.rdzv_conf)
    if others:
        msg = f"--rdzv-conf: {others}: {_LATER}"
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


def _meet_others(chosen: MachineOptions, run_id: str | None) -> Meeting:
    """Return how this machine meets the others. Raises UsageError."""
    if chosen.rdzv_backend not in ETCD:
        msg = (
            f"--rdzv-backend: {chosen.rdzv_backend!r}: of many machines, this version of phalanx run takes etcd only: "
            f"--rdzv-backend etcd --rdzv-endpoint HOST:{ETCD_PORT}"
        )
        raise click.UsageError(msg)
    if not chosen.rdzv_endpoint or not all(host for host, _ in chosen.rdzv_endpoint):
        msg = f"--rdzv-endpoint: expected where the etcd is, like host:{ETCD_PORT}; it is not given"
        raise click.UsageError(msg)
    if not run_id:
        raise click.UsageError("--run-id: the machines of a job find each other by it; give the same one on each")
    least, most = chosen.nnodes
    rank = chosen.node_rank
    if rank and least != most:
        raise click.UsageError(
            "--node-rank: ranks are given by hand to a fixed number of machines; --nnodes is a range"
        )
    if rank >= most:
        msg = f"--node-rank: expected 0 to {most - 1}, for --nnodes {most}; got {rank}"
        raise click.UsageError(msg)
    endpoints = tuple(f"[{name}]:{at or ETCD_PORT}" if ":" in name else f"{name}:{at or ETCD_PORT}"
                      for name, at in chosen.rdzv_endpoint)  # fmt: skip
    machines = Machines(
        least,
        most,
        chosen.rdzv_backend,
        endpoints,
        chosen.local_addr or "",
        rejoin_delay=chosen.rejoin_delay,
        exclude_after=chosen.exclude_after or 0,
        barrier=chosen.exit_barrier_timeout,
        **_settings(chosen.rdzv_conf),
    )
    given = {
        "--master-addr": chosen.master_addr != _MASTER_ADDR, "--master-port": chosen.master_port != 0,
        "--node-rank": rank != 0,
    }  # fmt: skip
    unheeded = ", ".join(name for name, is_given in given.items() if is_given)
    notes = [f"without effect with --rdzv-backend {chosen.rdzv_backend}: {unheeded}"] if unheeded else []
    return Meeting(run_id, machines.address, 0, notes, machines)


def _settings(conf: dict[str, str]) -> dict[str, Any]:
    """Return what ``--rdzv-conf`` says to an etcd's nodes. Raises UsageError.

    Settings of torch's other backends have no counterpart here, and are passed over.
    """
    given = {_CONF[key]: value for key, value in conf.items() if key in _CONF}
    for pair in (("user", "password"), ("cert", "key")):
        if (pair[0] in given) != (pair[1] in given):
            names = " and ".join({"password": "password_file"}.get(name, name) for name in pair)
            msg = f"--rdzv-conf: {names} belong together; one of them is missing"
            raise click.UsageError(msg)
    found: dict[str, Any] = {**given, **{name: float(given[name]) for name in _TIMES if name in given}}
    ttl = given.get("lease_ttl", str(_LEAST_TTL))
    if not (ttl.isascii() and ttl.isdecimal() and _LEAST_TTL <= int(ttl) <= _MOST_TTL):
        msg = f"--rdzv-conf: lease_ttl: expected whole seconds, {_LEAST_TTL} to {_MOST_TTL}, got {ttl!r}"
        raise click.UsageError(msg)
    if "lease_ttl" in given:
        found["lease_ttl"] = int(ttl)
    for name in {"ca", "cert", "key", "password"} & given.keys():
        text = _read("password_file" if name == "password" else name, given[name])
        if name == "password":
            found[name] = text.decode("utf-8", "surrogateescape").rstrip("\r\n")
    return found


def _read(name: str, path: str) -> bytes:
    """Read a file that a setting names. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_FILE)
    except OSError as error:
        msg = f"--rdzv-conf: {name}: {path}: {error.strerror}"
        raise click.UsageError(msg) from None
