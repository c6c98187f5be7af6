"""Chooses where a store listens, and listens there. Owns nothing: the sockets are the caller's.

An endpoint is what agents are given: a name, whose addresses need not be those by which other machines come. Debian has
``127.0.1.1`` for a machine's own name; a name may be IPv6 first where the others know IPv4; a service, a forwarder or a
published port of a container stands before the machine. So a store listens at each address that the endpoint has on
this machine; and at all of the machine's, where these are loopback only, or none.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import NamedTuple

from phalanx._base.host_names import address_text, is_loopback, look_up

BACKLOG = 1024
"""Connections that wait to be accepted: all agents of a job may come at once."""


class Place(NamedTuple):
    """Where a store listens.

    Attributes:
        port: Its port.
        addresses: Of this machine, in their order; empty: all that it has.
        why: What a reader is to know of the endpoint; "": these are its addresses, or what was asked for.
    """

    port: int
    addresses: tuple[str, ...]
    why: str = ""

    @property
    def own(self) -> str:
        """The address by which the agents of this machine reach it.

        >>> Place(29400, ("10.0.0.1",)).own, Place(29400, ()).own, Place(29400, ("::",)).own
        ('10.0.0.1', '127.0.0.1', '::1')
        """
        first = self.addresses[0] if self.addresses else "0.0.0.0"  # noqa: S104 - nothing is bound
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(first, first)  # noqa: S104 - as above

    @property
    def told(self) -> str:
        """The address by which other machines reach this one; "": which one that is, they know who come by it.

        >>> Place(29400, ("10.0.0.1",)).told, Place(29400, ()).told, Place(29400, ("10.0.0.1", "fd00::1")).told
        ('10.0.0.1', '', '')
        """
        is_one = len(self.addresses) == 1 and self.addresses[0] == self.own
        return self.addresses[0] if is_one and not is_loopback(self.addresses[0]) else ""


def find_place(host: str, port: int) -> Place:
    """Return where the store of an endpoint listens on this machine, which is to have it.

    The order of the addresses is the same for all agents of the machine: that which has the first one has all.

    >>> find_place("127.0.0.1", 29400)
    Place(port=29400, addresses=('127.0.0.1',), why='')
    """
    here, elsewhere = set(), set()
    try:
        found = look_up(host, 0)
    except (OSError, UnicodeError):
        return Place(port, (), f"{host} is no name that is known on this machine")
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
        except OSError:
            elsewhere.add(str(address[0]))
        else:
            here.add(str(address[0]))
    if not here:
        return Place(port, (), f"{host} is no address of this machine")
    if not is_loopback(host) and all(map(is_loopback, here)):  # others are told another one
        return Place(port, (), f"{host} is {' and '.join(sorted(here))} on this machine")
    why = f"{host} is {' and '.join(sorted(elsewhere))} as well, which is no address of this machine"
    return Place(port, tuple(sorted(here)), why if elsewhere else "")


def listen(place: Place) -> list[socket.socket]:
    """Listen there. Raises OSError, which names the address and the port; EADDRINUSE: something else does."""
    addresses = place.addresses or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0",)  # noqa: S104 - see above
    port = place.port
    with ExitStack() as opened:
        made: list[socket.socket] = []
        for address in addresses:
            is_6 = ":" in address
            try:
                listener = socket.create_server(
                    (address, port), family=socket.AF_INET6 if is_6 else socket.AF_INET, backlog=BACKLOG,
                    dualstack_ipv6=is_6 and not place.addresses,
                )  # fmt: skip
            except OSError as error:
                strerror = (error.strerror or str(error)).partition(" (while ")[0]
                why = f"{address_text(address, port)}: {strerror}"
                if made and error.errno == errno.EADDRINUSE:
                    raise TakenInPartError(error.errno, why) from None
                raise OSError(error.errno, why) from None
            made.append(opened.enter_context(listener))
            port = port or listener.getsockname()[1]  # one that is free is the same for all
        opened.pop_all()
    return made


class TakenInPartError(OSError):
    """Of several addresses, something else listens at one that is not the first: it is no agent that has all."""


def is_taken(error: OSError) -> bool:
    """Whether something else listens there, which may be the store already."""
    return error.errno == errno.EADDRINUSE and not isinstance(error, TakenInPartError)
