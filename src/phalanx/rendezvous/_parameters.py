"""What a rendezvous handler is made from, and how machines meet by it: checked, and nothing is connected to."""

from __future__ import annotations

from typing import Any

from phalanx._base.frozen import Value
from phalanx._base.host_names import is_no_machine
from phalanx._rendezvous import rdzv_conf, settings
from phalanx._rendezvous.endpoint import FALSE, TRUE, split_endpoint
from phalanx._rendezvous.settings import C10D, DEFAULT_PORTS, ETCD, ETCD_PORT, STATIC, Machines


class RendezvousParameters(Value):
    """What a rendezvous handler is made from.

    Args:
        backend: The name of the kind of rendezvous; not empty.
        endpoint: Where it takes place, usually as ``host:port``.
        run_id: The id of the run.
        min_nodes: How many agents there are at least, 1 or more.
        max_nodes: How many there are at most, ``min_nodes`` or more.
        local_addr: The address of this machine.
        **kwargs: What else the backend takes, kept in ``config``.

    Raises:
        ValueError: What is wrong with which argument.

    >>> RendezvousParameters("etcd", "host:2379", "run", 1, 2, timeout="60").get_as_int("timeout")
    60
    """

    __slots__ = ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "config", "local_addr")  # noqa: RUF023 - the order is that of the arguments

    backend: str
    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    config: dict[str, Any]
    local_addr: str | None

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend or not isinstance(backend, str):
            msg = f"backend: expected the name of a kind of rendezvous, got {backend!r}"
            raise ValueError(msg)
        if min_nodes < 1:
            msg = f"min_nodes: expected 1 or more, got {min_nodes!r}"
            raise ValueError(msg)
        if max_nodes < min_nodes:
            msg = f"max_nodes: expected min_nodes ({min_nodes}) or more, got {max_nodes!r}"
            raise ValueError(msg)
        self._store(
            backend=backend, endpoint=endpoint, run_id=run_id, min_nodes=min_nodes, max_nodes=max_nodes,
            config=kwargs, local_addr=local_addr,
        )  # fmt: skip

    def get(self, key: str, default: Any = None) -> Any:
        """Return what ``config`` has for ``key``, or ``default``."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:  # noqa: FBT001 - the historical signature
        """Return what ``config`` has for ``key``, or ``default``, as a truth value.

        1, true, t, yes, y and 0, false, f, no, n are taken, in any case. Raises ValueError for another text.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).lower()
        if text in (*TRUE, *FALSE) and isinstance(value, str | int):
            return text in TRUE
        msg = f"{key}: expected yes or no, got {value!r}"
        raise ValueError(msg)

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return what ``config`` has for ``key``, or ``default``, as a whole number. Raises ValueError."""
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except (TypeError, ValueError):
            msg = f"{key}: expected a whole number, got {value!r}"
            raise ValueError(msg) from None


BACKENDS = (STATIC, C10D, *ETCD)
"""Those that are built in."""

_WORDS = "the backend", "secret_file of the config", "insecure=True"


def machines_of(params: RendezvousParameters, *, insecure: bool = False) -> Machines:
    """Return how this machine meets the others. Raises ValueError, which names the parameter."""
    if params.backend not in BACKENDS:
        msg = f"backend: expected one of {', '.join(BACKENDS)}, got {params.backend!r}"
        raise ValueError(msg)
    settings.check_text(params.run_id, settings.MOST_RUN_ID, "run_id")  # beyond these, the others would not read it
    settings.check_text(params.local_addr or "", settings.MOST_ADDRESS, "local_addr")
    settings.check_number(params.max_nodes, 1, settings.MOST_NODES, "max_nodes")
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
            more[named] = rdzv_conf.seconds(name, conf[name])
    rank = params.get_as_int("rank") if params.backend == STATIC else None
    endpoints = tuple(_endpoint(part, params.backend) for part in params.endpoint.split(",") if part.strip())
    given = rdzv_conf.Given(
        params.backend, (params.min_nodes, params.max_nodes), endpoints, params.run_id, conf, rank,
        params.local_addr or "", insecure=insecure or bool(params.get_as_bool("insecure")),
        keep=bool(params.get_as_bool("keep")), words=_WORDS, more=more,
    )  # fmt: skip
    return rdzv_conf.machines_of(given)


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
