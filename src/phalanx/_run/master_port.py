"""Reserves MASTER_PORT: a port for rank 0 that nobody else is given between its choice and the end of the run.

A TCP socket of ours on the port would refuse some of rank 0's binds: all binds without SO_REUSEADDR fail while any
socket has the port. So as a rule there is none. A port outside ip_local_port_range is taken: the kernel gives ports of
that range alone to bind(2) with port 0 and to connect(2). Among launchers, a Unix socket reserves it, bound to an
abstract name with the port's number in it (unix(7)): such names are unique in a network namespace, as ports are,
whatever the user, the mount namespace or the container, and the kernel frees one when its process ends, however it
ends. Nobody can connect to the socket: it does not listen.

Where no such port is left, a TCP socket holds one of ip_local_port_range: bound, not listening, with SO_REUSEADDR. The
kernel then gives the port to nobody else (unless ip_autobind_reuse is set, and ports have run out). Rank 0 can bind it
with SO_REUSEADDR only.
"""

from __future__ import annotations

import _socket  # the C module: `socket` itself costs 7 ms to import
import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Self
from weakref import WeakSet

from phalanx._base import procfs

EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
"""First and last port that the kernel chooses by itself, of both IPv4 and IPv6."""

SET_ASIDE = "/proc/sys/net/ipv4/ip_local_reserved_ports"
"""Ports that the administrator keeps for programs of theirs: "8080,9148-9150"."""

RANGES = (range(49152, 63536), range(1024, 49152), range(63536, 65536))
"""Where a port is looked for: among those that are registered for nothing (RFC 6335) first. The highest 2,000 come
last: programs add to the port (``int(os.environ["MASTER_PORT"]) + 1``), and 65536 is none."""

_held: WeakSet[ReservedPort] = WeakSet()


class ReservedPort:
    """A port that is reserved until `close`, or as long as this object and this process are there. A context manager.

    It is not inherited: forks close it, and programs that are executed do not have it.
    """

    def __init__(self, number: int, holder: _socket.socket) -> None:
        self.number = number
        """The port, 1024 to 65535."""
        self._holder = holder
        _held.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def renew(self) -> int:
        """Return the port for a further attempt: another one, if connections of an earlier attempt still have this.

        A bind without SO_REUSEADDR would fail then. If no other port can be reserved, it is this one.
        """
        if self._holder.family == _socket.AF_UNIX and not _is_free(self.number):
            with suppress(OSError):
                number, holder = _choose()
                self._holder.close()
                self.number, self._holder = number, holder
        return self.number

    def close(self) -> None:
        """End the reservation. Idempotent."""
        self._holder.close()

    __del__ = close


def reserve() -> ReservedPort:
    """Reserve a port on all addresses of this machine.

    Any bind(2) of a worker succeeds at first: to an IPv4 or IPv6 address or to all of them, with or without
    SO_REUSEADDR. (Where ip_local_port_range leaves no port out: with SO_REUSEADDR.) It succeeds again after the worker
    has ended, with SO_REUSEADDR; without, the kernel refuses it for as long as connections to the port are in
    TIME_WAIT, up to a minute. An attempt that reserves a port anew has one without.

    Raises:
        OSError: No port is free, or no descriptor.
    """
    return ReservedPort(*_choose())


def _choose() -> tuple[int, _socket.socket]:
    """Return a port, and the socket that holds it. Raises OSError."""
    with suppress(OSError):  # there are no Unix sockets, or a security policy forbids abstract names
        for number in _numbers():
            name = _take_name(number)
            if name is None:
                continue
            try:
                free = _is_free(number)
            except BaseException:
                name.close()
                raise
            if free:
                return number, name
            name.close()
    holder = _hold_any()
    return int(holder.getsockname()[1]), holder


def _numbers() -> Iterator[int]:
    """The ports that the kernel never chooses by itself, from a random one on; none where /proc does not tell."""
    bounds = procfs.read(EPHEMERAL).split()
    if not bounds:
        return
    first, last = map(int, bounds)
    spans = (span.partition(b"-") for span in procfs.read(SET_ASIDE).strip().split(b",") if span)
    set_aside = [range(int(low), int(high or low) + 1) for low, _dash, high in spans]
    for ports in RANGES:
        low, high = ports.start, ports.stop
        numbers = [*range(low, min(first, high)), *range(max(last + 1, low), high)]
        start = int.from_bytes(os.urandom(4)) % len(numbers) if numbers else 0
        for number in numbers[start:] + numbers[:start]:
            if not any(number in span for span in set_aside):
                yield number


def _take_name(number: int) -> _socket.socket | None:
    """Bind the name of a port; None if another launcher has it. Raises OSError."""
    name = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        name.bind(b"\0phalanx-master-port-%d" % number)
    except OSError as error:
        name.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return name


def _is_free(number: int) -> bool:
    """Whether it can be bound: no socket has it, connections in TIME_WAIT included. Raises OSError."""
    for family, everywhere in ((_socket.AF_INET, "0.0.0.0"), (_socket.AF_INET6, "::")):  # noqa: S104 - it never listens
        try:
            probe = _tcp_socket(family)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                continue
            raise
        try:
            if family == _socket.AF_INET6:
                probe.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
            probe.bind((everywhere, number))
        except OSError:
            return False
        finally:
            probe.close()
    return True


def _hold_any() -> _socket.socket:
    """Bind a port that the kernel chooses, and do not listen. Raises OSError."""
    with suppress(OSError):  # there is no IPv6
        return _bind_any(_socket.AF_INET6, "::")
    return _bind_any(_socket.AF_INET, "0.0.0.0")  # noqa: S104 - it never listens


def _bind_any(family: int, everywhere: str) -> _socket.socket:
    holder = _tcp_socket(family)
    try:
        if family == _socket.AF_INET6:
            holder.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        holder.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        holder.bind((everywhere, 0))
    except OSError:
        holder.close()
        raise
    return holder


def _tcp_socket(family: int) -> _socket.socket:
    return _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)


def _close_all() -> None:
    """Close, in a fork, what belongs to the launcher alone."""
    for port in list(_held):
        port.close()


os.register_at_fork(after_in_child=_close_all)
