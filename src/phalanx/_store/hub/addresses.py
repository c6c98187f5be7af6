"""The address of the store in an agent: how agents reach it, where it listens, and why it is not reached. Pure.

An endpoint is what agents are given: a name, whose addresses need not be those by which other machines come. Debian has
``127.0.1.1`` for a machine's own name; a name may be IPv6 first where the others know IPv4; a service, a forwarder or a
published port of a container stands before the machine. So a store listens at each address that the endpoint has on
this machine; and at all of the machine's, where these are loopback only, or none. The sockets are the caller's.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from typing import Literal, NamedTuple

from phalanx._base.host_names import address_text, is_loopback, split_addresses

Encryption = Literal["auto", "require", "no"]
"""When what is said is encrypted."""


class HubSettings(NamedTuple):
    """How the store is reached.

    Attributes:
        host: The name or the address of the agent's machine. A name is resolved anew each time.
        port: Where that agent listens.
        run_id: Which job it is.
        secret: What all agents of the job know, and nobody else; empty: everybody is let in who knows the run id.
        ttl: Seconds (2 or more) after which the keys of an agent go that is not heard of. The same for all agents.
        timeout: Seconds that an answer may take.
        encrypt: "auto": what is said is encrypted where both ends can; "require": else there is no connection; "no".
        endpoint: What the user knows it as; "": the host and the port.
    """

    host: str
    port: int
    run_id: str
    secret: bytes
    ttl: int
    timeout: float = 3.0
    encrypt: Encryption = "auto"
    endpoint: str = ""

    @property
    def where(self) -> str:
        """Where the store is, for a reader.

        >>> HubSettings("::1", 29500, "night7", b"", 5).where
        '[::1]:29500'
        """
        return self.endpoint or address_text(self.host, self.port)

    def __repr__(self) -> str:
        # A secret is not shown by what shows the settings.
        return f"HubSettings({self.where}, run_id={self.run_id!r}, ttl={self.ttl}, timeout={self.timeout})"


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
    try:
        here, elsewhere = split_addresses(host)
    except (OSError, UnicodeError):
        return Place(port, (), f"{host} is no name that is known on this machine")
    if not here:
        return Place(port, (), f"{host} is no address of this machine")
    if not is_loopback(host) and all(map(is_loopback, here)):  # others are told another one
        return Place(port, (), f"{host} is {' and '.join(here)} on this machine")
    why = f"{host} is {' and '.join(elsewhere)} as well, which is no address of this machine"
    return Place(port, tuple(here), why if elsewhere else "")


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


CLOSED = "what listens there closes the connection: another service, torchrun's store perhaps, or a store that ends"
SILENT = "what listens there is silent: another service, torchrun's store perhaps, or an agent that is stopped"

_BEGINS = (
    (b"GET ", "HTTP"), (b"HEAD ", "HTTP"), (b"POST ", "HTTP"), (b"PUT ", "HTTP"), (b"HTTP/", "HTTP"),
    (b"PRI * HTTP/2", "HTTP/2, as a client of an etcd does"), (b"\x16\x03", "TLS"), (b"\x15\x03", "TLS"),
    (b"SSH-", "SSH"), (b"\x00\xce\xf7\x85\x3c", "the protocol of torch's store"),
)  # fmt: skip
"""How what speaks another protocol begins. Torch's store is sent a type of one byte, and ``0x3c85f7ce``."""

_SETTINGS = b"\x04\x00\x00\x00\x00\x00"  # the frame with which a server of HTTP/2 begins, after its length


def describe_error(number: int) -> str:
    """Return why there is no connection, as connect(2) tells it, and what is to be looked at.

    >>> describe_error(errno.ECONNREFUSED)
    'nobody listens there: Connection refused'
    >>> describe_error(errno.EHOSTUNREACH)
    'No route to host: is the address right, and does a firewall let it through?'
    """
    text = os.strerror(number)
    if number == errno.ECONNREFUSED:
        return f"nobody listens there: {text}"
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
        return f"{text}: is the address right, and does a firewall let it through?"
    return text


def describe_foreign(data: bytes) -> str:
    """Return that what answers is no agent, by what it has said first.

    >>> describe_foreign(b"HTTP/1.1 400")
    'what answers there is no agent, it speaks HTTP: another port is needed'
    """
    protocol = protocol_of(data)
    spoken = f", it speaks {protocol}" if protocol else ""
    return f"what answers there is no agent{spoken}: another port is needed"


def protocol_of(data: bytes) -> str:
    r"""Return what speaks that is no agent, by what it has said first; "": nobody knows.

    >>> protocol_of(b"GET / HTTP/1.1\r\n"), protocol_of(b"\x16\x03\x01\x02\x00"), protocol_of(b"hello")
    ('HTTP', 'TLS', '')
    >>> protocol_of(b"\x00\xce\xf7\x85\x3c\x09")
    "the protocol of torch's store"
    """
    if data[3:9] == _SETTINGS:
        return "HTTP/2, as an etcd does"
    return next((name for begin, name in _BEGINS if data.startswith(begin)), "")
