"""The rendezvous of a job on one machine: there is one agent, and nobody to wait for."""

from __future__ import annotations

import time

from phalanx._agent import master_port as master_ports
from phalanx._agent.master_port import ReservedPort
from phalanx.rendezvous._errors import RendezvousClosedError
from phalanx.rendezvous._handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


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
            msg = f"the rendezvous of run {self._run_id!r} is closed"
            raise RendezvousClosedError(msg)
        port = self._port
        if not port:
            if self._reserved is None:
                self._reserved = master_ports.reserve()
            port = self._reserved.renew()
        where = RendezvousStoreInfo(self._addr, port)
        return RendezvousInfo(None, 0, 1, where)

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
