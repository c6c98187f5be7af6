"""What handlers of a rendezvous raise."""

from __future__ import annotations


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
