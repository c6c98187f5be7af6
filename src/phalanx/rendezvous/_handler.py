"""What every rendezvous handler is made from, does, returns and raises; and the handler of a job on one machine."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, ClassVar

from phalanx._base.frozen import Value
from phalanx._rendezvous.endpoint import FALSE, TRUE
from phalanx._run import master_port as master_ports
from phalanx._run.master_port import ReservedPort


class RendezvousError(Exception):
    """Something went wrong with a rendezvous: the base of the errors here."""

    __module__ = "phalanx.rendezvous"


class RendezvousClosedError(RendezvousError):
    """The rendezvous has been closed: no further one takes place under this run's id."""

    __module__ = "phalanx.rendezvous"


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous was not complete in time."""

    __module__ = "phalanx.rendezvous"


class RendezvousConnectionError(RendezvousError):
    """The place where agents meet (a store) cannot be reached."""

    __module__ = "phalanx.rendezvous"


class RendezvousStateError(RendezvousError):
    """What the store holds of the rendezvous is damaged."""

    __module__ = "phalanx.rendezvous"


class RendezvousGracefulExitError(RendezvousError):
    """This agent is not needed, and is to end without an error."""

    __module__ = "phalanx.rendezvous"


class RendezvousStoreInfo(Value):
    """Where the workers of all agents meet.

    Args:
        master_addr: The address, ``MASTER_ADDR`` of the workers.
        master_port: The port, ``MASTER_PORT`` of the workers.

    Attributes:
        MASTER_ADDR_KEY: The key under which `build` keeps the address in a store.
        MASTER_PORT_KEY: The same for the port.
    """

    __slots__ = ("master_addr", "master_port")

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    master_addr: str
    master_port: int

    def __init__(self, master_addr: str, master_port: int) -> None:
        self._store(master_addr=master_addr, master_port=master_port)

    @staticmethod
    def build(rank: int, store: Any, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Agree on where the workers meet: the agent of rank 0 chooses it and tells the others through a store.

        Args:
            rank: The agent's rank. 0 writes to ``store``, the others read from it.
            store: An object with ``set(key, value: bytes)`` and ``get(key)``, which waits for the value and returns
                bytes. May be None for rank 0 if there are no others.
            local_addr: The address of this machine that others reach; None or "": its name.
            server_port: The port; None or 0: one that is free now.

        Raises:
            RendezvousStateError: What the store holds is no address, or no port.
            OSError: No port is free.
        """
        address, port = RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY
        if rank == 0:
            host = local_addr or os.uname().nodename
            with ExitStack() as held:  # it is not held beyond this: nobody says when it is not needed any more
                chosen = RendezvousStoreInfo(host, server_port or held.enter_context(master_ports.reserve()).number)
            if store is not None:
                store.set(address, chosen.master_addr.encode())
                store.set(port, str(chosen.master_port).encode())
            return chosen
        try:
            values = (store.get(address), store.get(port))
            host, number = (value if isinstance(value, str) else value.decode() for value in values)
            return RendezvousStoreInfo(host, int(number))
        except ValueError as error:
            raise RendezvousStateError(f"the store holds no address at which workers meet: {error}") from error


class RendezvousInfo(Value):
    """What a rendezvous has agreed on.

    Args:
        store: What the agents share, with ``set`` and ``get``; None: there is none.
        rank: This agent's rank among the agents, 0 and up.
        world_size: How many agents there are.
        bootstrap_store_info: Where the workers meet.
    """

    __slots__ = ("store", "rank", "world_size", "bootstrap_store_info")  # noqa: RUF023 - the order is that of the arguments

    store: Any
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo | None

    def __init__(
        self, store: Any, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo | None
    ) -> None:
        self._store(store=store, rank=rank, world_size=world_size, bootstrap_store_info=bootstrap_store_info)


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
            raise ValueError(f"backend: expected the name of a kind of rendezvous, got {backend!r}")
        if min_nodes < 1:
            raise ValueError(f"min_nodes: expected 1 or more, got {min_nodes!r}")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes: expected min_nodes ({min_nodes}) or more, got {max_nodes!r}")
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
        raise ValueError(f"{key}: expected yes or no, got {value!r}")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return what ``config`` has for ``key``, or ``default``, as a whole number. Raises ValueError."""
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except (TypeError, ValueError):
            raise ValueError(f"{key}: expected a whole number, got {value!r}") from None


class RendezvousHandler(ABC):
    """How an agent meets the others. Subclass it for a place of your own."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name of the kind of rendezvous, such as ``"etcd"``."""

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the agents' store at ``MASTER_ADDR`` and ``MASTER_PORT``, and rank 0 serves none."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the agents are complete, and return who this one is. Called before each attempt.

        Raises:
            RendezvousClosedError: There will be no other.
            RendezvousConnectionError: The others cannot be reached.
            RendezvousStateError: What was read makes no sense.
            RendezvousTimeoutError: They were not complete in time.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether there will be no other rendezvous."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close it: from now on, `next_rendezvous` raises RendezvousClosedError for every agent."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many agents have come late, and wait for the next rendezvous."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the run, which the agents have in common."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Give back what the handler holds. Return whether that went well."""


class OneMachineRendezvous(RendezvousHandler):
    """Gives the only agent rank 0 of 1, at once. There is no store: rank 0 of the workers serves one, if they need it.

    Args:
        run_id: The id of the run; "": the date and time.
        master_addr: Where the workers meet.
        master_port: The port; 0: one that is reserved until `give_back` or `shutdown`.
        backend: What `get_backend` returns.
    """

    def __init__(
        self, run_id: str = "", master_addr: str = "127.0.0.1", master_port: int = 0, *, backend: str = "one-machine"
    ) -> None:
        self._run_id = run_id or time.strftime("%Y%m%d-%H%M%S")
        self._addr = master_addr
        self._port = master_port
        self._backend = backend
        self._closed = False
        self._reserved: ReservedPort | None = None

    def get_backend(self) -> str:
        """Return the name that was given, or ``"one-machine"``."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Return rank 0 of 1, at once.

        Raises:
            RendezvousClosedError: After `set_closed` or `shutdown`.
            OSError: No port is free.
        """
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous of run {self._run_id!r} is closed")
        port = self._port
        if not port:
            self._reserved = self._reserved or master_ports.reserve()
            port = self._reserved.renew()
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo(self._addr, port))

    def give_back(self) -> None:
        """End the reservation of the port, until the next rendezvous: no worker is left."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()

    def is_closed(self) -> bool:
        """See `RendezvousHandler.is_closed`."""
        return self._closed

    def set_closed(self) -> None:
        """See `RendezvousHandler.set_closed`."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """See `RendezvousHandler.get_run_id`."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close it. Returns True."""
        self._closed = True
        self.give_back()
        return True
