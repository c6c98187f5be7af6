"""What is said of a store that cannot be reached, and of those who come to one and are no agents. Pure."""

from __future__ import annotations

import errno
import os

CLOSED = "what listens there closes the connection: another service, torchrun's store perhaps, or a store that ends"
SILENT = "what listens there is silent: another service, torchrun's store perhaps, or an agent that is stopped"

_BEGINS = (
    (b"GET ", "HTTP"), (b"HEAD ", "HTTP"), (b"POST ", "HTTP"), (b"PUT ", "HTTP"), (b"HTTP/", "HTTP"),
    (b"PRI * HTTP/2", "HTTP/2, as a client of an etcd does"), (b"\x16\x03", "TLS"), (b"\x15\x03", "TLS"),
    (b"SSH-", "SSH"), (b"\x00\xce\xf7\x85\x3c", "the protocol of torch's store"),
)  # fmt: skip
"""How what speaks another protocol begins. Torch's store is sent a type of one byte, and ``0x3c85f7ce``."""

_SETTINGS = b"\x04\x00\x00\x00\x00\x00"  # the frame with which a server of HTTP/2 begins, after its length


def of_error(number: int) -> str:
    """Return why there is no connection, as connect(2) tells it, and what is to be looked at.

    >>> of_error(errno.ECONNREFUSED)
    'nobody listens there: Connection refused'
    >>> of_error(errno.EHOSTUNREACH)
    'No route to host: is the address right, and does a firewall let it through?'
    """
    text = os.strerror(number)
    if number == errno.ECONNREFUSED:
        return f"nobody listens there: {text}"
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
        return f"{text}: is the address right, and does a firewall let it through?"
    return text


def of_silence(seconds: float) -> str:
    """Return that an address has not answered within so many seconds.

    >>> of_silence(3.0)
    'no answer within 3 s: is the machine up, and does a firewall let this port through?'
    """
    return f"no answer within {seconds:g} s: is the machine up, and does a firewall let this port through?"


def of_name(text: str) -> str:
    """Return that a name is not known here, as the resolver tells it.

    >>> of_name("Name or service not known")
    'its name is not known here: Name or service not known'
    """
    return f"its name is not known here: {text}"


def of_foreign(data: bytes) -> str:
    """Return that what answers is no agent, by what it has said first.

    >>> of_foreign(b"HTTP/1.1 400")
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
