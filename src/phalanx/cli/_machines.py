"""The options of `phalanx run` about machines: how many there are, and where their agents and their workers meet.

Of one machine, nothing is connected to, and no store is started: rank 0 of the workers serves one, if they need it.
"""

from __future__ import annotations

import click

from phalanx._agent.endpoint import BACKENDS, is_here, read_settings, split_endpoint
from phalanx._rendezvous.bounds import MOST_ADDRESS, MOST_NODES, MOST_RUN_ID
from phalanx._rendezvous.conf import FILES
from phalanx.cli._declare import LIST, MACHINES, TEXT, WHOLE, Declared, Flag, Maybe, Option
from phalanx.cli._options import Count, Time, Whole, text_of

MASTER_ADDR = "127.0.0.1"
"""Where workers meet, if nobody says otherwise."""


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
        msg = f"{text!r}: expected 1 to {MOST_NODES} machines, and no more at least than at most"
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
        read_backend,
        default=BACKENDS[0],
        metavar="NAME",
        torchrun="--rdzv-backend",
        sentence="How machines meet: static: ranks are given by hand; c10d: as they come; etcd: at one of your own.",
    )
    rdzv_endpoint = Option(
        read_endpoints,
        default="",
        metavar="HOST[:PORT],...",
        written=LIST,
        torchrun="--rdzv-endpoint",
        sentence="Where the etcd is, or the machine that has the store. Of one machine: localhost:0.",
    )
    insecure = Flag(sentence="Let a machine have the store without a secret, for all who reach its port.")
    rdzv_conf = Option(
        read_conf,
        default="",
        paths=FILES,
        metavar="KEY=VALUE,...",
        written=LIST,
        torchrun="--rdzv-conf",
        sentence="Settings of the rendezvous: join_timeout=600,last_call_timeout=30,lease_ttl=5, and files of TLS.",
    )
    rejoin_delay = Time(
        endless=False, default="30", sentence="Time between the coming of a machine and the restart with it."
    )
    on_sigterm = Maybe(
        str,
        kind=click.Choice(["leave", "stop"]),
        sentence="What SIGTERM does: this machine leaves, or all stop. Default: leave, with MIN:MAX or as a spare.",
    )
    exclude_after = Count(
        least=1,
        metavar="K",
        sentence="Leave a machine out whose workers were the root cause K times in a row. Default: none is.",
    )
    node_check = Maybe(
        str,
        metavar="COMMAND",
        sentence="What a machine runs before each attempt: no worker starts there unless it ends with exit code 0.",
    )
    exit_barrier_timeout = Time(
        default="300", sentence="Time that a machine waits at its end for the workers of the others."
    )
    keep = Flag(sentence="With etcd: leave in it how the job has ended, until the next one of its id that is kept.")
    standalone = Flag(
        section="",
        torchrun="--standalone",
        sentence="One machine, without a store, whatever a scheduler says of others.",
    )
    nnodes = Maybe(
        read_nodes,
        metavar="N|MIN:MAX",
        written=TEXT + WHOLE,
        torchrun="--nnodes",
        sentence="How many machines there are. Default: what a scheduler says, or 1.",
    )
    node_rank = Maybe(
        read_node_rank,
        metavar="N",
        written=TEXT + WHOLE,
        torchrun="--node-rank",
        sentence="With static: the rank of this machine among the machines. Default: what a scheduler says, or 0.",
    )
