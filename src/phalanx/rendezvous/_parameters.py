"""What a rendezvous handler is made from."""

from __future__ import annotations

from typing import Any

from phalanx._agent.endpoint import FALSE, TRUE
from phalanx._base.frozen import Value


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
