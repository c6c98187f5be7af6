"""Reads the endpoint and the settings of a rendezvous, and tells whether an address is this machine's."""

from __future__ import annotations

import os
from typing import Literal

from phalanx._base.text import parse_duration

BACKENDS = ("static", "c10d", "etcd", "etcd-v2", "etcd-v3")
"""The rendezvous backends of torchrun. On one machine they are all the same: nothing is connected to."""

_MOST_PORT = 65535
_TIMES = (
    *("timeout", "last_call_timeout", "join_timeout", "close_timeout", "heartbeat_timeout", "read_timeout"),
    *("keep_alive_interval", "cas_backoff_max_seconds"),
)
_WHOLE = ("keep_alive_max_attempt", "rank")
_YES_NO = ("is_host",)
TRUE, FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
"""What stands for yes and for no, in any case."""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the host and the port of ``host``, ``host:port``, ``[host]:port`` or an IPv6 address; "" and 0: none.

    Raises ValueError: what is after the last colon is no port.

    >>> split_endpoint("localhost:29500"), split_endpoint("[::1]:5"), split_endpoint("::1"), split_endpoint("")
    (('localhost', 29500), ('::1', 5), ('::1', 0), ('', 0))
    """
    host, colon, text = endpoint.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or text.endswith("]"):
        host, text = endpoint.strip(), "0"
    if not (text.isdecimal() and text.isascii() and int(text) <= _MOST_PORT):
        raise ValueError(f"expected a port, 0 to {_MOST_PORT}, after the last colon, got {endpoint!r}")
    return host.removeprefix("[").removesuffix("]"), int(text)


def split_listener(text: str) -> tuple[str, int]:
    """Return the host and the port of ``PORT`` or ``HOST:PORT``, at which something is to listen. Raises ValueError.

    >>> split_listener("8080"), split_listener("0.0.0.0:8080"), split_listener("[::]:8080")
    (('127.0.0.1', 8080), ('0.0.0.0', 8080), ('::', 8080))
    """
    text = text.strip()
    try:
        host, port = ("", int(text)) if text.isascii() and text.isdecimal() else split_endpoint(text)
    except ValueError:
        host, port = "", 0
    if not 0 < port <= _MOST_PORT:
        msg = f"expected a port, 1 to {_MOST_PORT}, or an address and a port, like 0.0.0.0:8080, got {text!r}"
        raise ValueError(msg)
    return host or "127.0.0.1", port


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's: a socket can be bound to an address of it. "" is.

    >>> is_here("localhost"), is_here("127.0.0.1"), is_here("192.0.2.1")  # the last is nobody's, see RFC 5737
    (True, True, False)
    """
    return where_is(host) == "here"


def where_is(host: str) -> Literal["here", "elsewhere", "unknown"]:
    """Return whether a name or an address is this machine's; "unknown": nobody knows the name, as yet.

    >>> where_is("127.0.0.1"), where_is("192.0.2.1"), where_is("no name")
    ('here', 'elsewhere', 'unknown')
    """
    if host in ("", "localhost", os.uname().nodename):
        return "here"
    from phalanx._base.host_names import is_unknown, split_addresses

    try:
        here, _ = split_addresses(host)
    except (OSError, UnicodeError) as error:
        return "unknown" if is_unknown(error) else "elsewhere"
    return "here" if here else "elsewhere"


def read_settings(text: str) -> dict[str, str]:
    """Read the settings of a rendezvous, as torchrun's ``--rdzv-conf`` has them. Raises ValueError.

    Settings that are times, numbers, or yes or no, for one of torch's backends are checked for being so.

    >>> read_settings("timeout=10m, is_host=yes"), read_settings("")
    ({'timeout': '10m', 'is_host': 'yes'}, {})
    """
    settings: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (equals and key and value):
            msg = f"{text!r}: expected settings, like timeout=60,read_timeout=30; the trouble is with {part!r}"
            raise ValueError(msg)
        if key in _TIMES:
            try:
                parse_duration(value)
            except ValueError as error:
                raise ValueError(f"{text!r}: {key}: {error}") from None
        if key in _WHOLE and not (value.isascii() and value.isdecimal()):
            raise ValueError(f"{text!r}: {key}: expected a whole number, got {value!r}")
        if key in _YES_NO and value.lower() not in (*TRUE, *FALSE):
            raise ValueError(f"{text!r}: {key}: expected yes or no, got {value!r}")
        settings[key] = value
    return settings


def asks_for_others(settings: dict[str, str]) -> str:
    """Return the setting that makes sense with many machines only, as ``key=value``; "": there is none.

    >>> asks_for_others({"rank": "1"}), asks_for_others({"rank": "0", "is_host": "true"})
    ('rank=1', '')
    """
    rank, host = settings.get("rank", "0"), settings.get("is_host", "yes")
    if int(rank):
        return f"rank={rank}"
    return f"is_host={host}" if host.lower() in FALSE else ""
