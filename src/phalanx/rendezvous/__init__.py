"""How the agents of a job find each other, and agree who is who: the names of ``torch.distributed.elastic.rendezvous``.

A `RendezvousHandler` gives each agent its rank among the agents, and the address at which workers meet. Groups on one
machine need no other agent: `OneMachineRendezvous` answers at once. `ManyMachinesRendezvous` brings agents of several
machines together; `rendezvous_handler_registry` makes it, or what another package has for a backend.

>>> handler = OneMachineRendezvous()
>>> info = handler.next_rendezvous()
>>> info.rank, info.world_size
(0, 1)
>>> handler.give_back()
"""

from __future__ import annotations

from phalanx.rendezvous._handler import (
    OneMachineRendezvous,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from phalanx.rendezvous._many_machines import ManyMachinesRendezvous
from phalanx.rendezvous._registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    rendezvous_handler_registry,
)

__all__ = [
    "ManyMachinesRendezvous",
    "OneMachineRendezvous",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]
