"""The names and addresses of machines: how they are written, and how they are looked up.

For no longer than is wanted; and until a name is known, where that is wanted.
"""

from __future__ import annotations

from phalanx._base import clock
from phalanx._base.threads import Latch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LOOKUP = 10.0
"""Seconds that one look-up may take. getaddrinfo(3) itself takes a minute and more where no DNS server answers."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds between two look-ups of a name that is not known yet


def look_up(host: str, port: int, *, datagram: bool = False, seconds: float = LOOKUP) -> list[tuple[Any, ...]]:
    """Return the addresses of a machine, as getaddrinfo(3) has them: one or more.

    Raises OSError (TimeoutError: not within so many ``seconds``) or UnicodeError: it is no name that there can be.

    >>> [found[4][0] for found in look_up("127.0.0.1", 29500)]
    ['127.0.0.1']
    """
    import socket
    from contextlib import suppress

    kind = socket.SOCK_DGRAM if datagram else socket.SOCK_STREAM
    with suppress(OSError):
        return socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    from phalanx._base.threads import SerialExecutor

    found: list[tuple[Any, ...]] = []
    errors: list[Exception] = []
    done = Latch()

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=kind))
        except (OSError, UnicodeError) as error:
            errors.append(error)
        done.open()

    if not SerialExecutor("phalanx-name").submit(ask):
        ask()  # no thread can be started
    if not done.wait(seconds):
        msg = f"its name was not resolved within {seconds:g} s"
        raise TimeoutError(msg)
    if errors:
        raise errors[0]
    return found


def split_addresses(host: str) -> tuple[list[str], list[str]]:
    """Return the addresses of a name that this machine has, and those that it has not: a socket can be bound, or not.

    Each list is sorted. Raises OSError, UnicodeError: as `look_up`.
    """
    import socket

    here, elsewhere = set[str](), set[str]()
    for family, kind, _, _, address in look_up(host, 0):
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
        except OSError:
            elsewhere.add(str(address[0]))
        else:
            here.add(str(address[0]))
    return sorted(here), sorted(elsewhere)


def is_unknown(error: Exception) -> bool:
    """Whether a look-up has failed of a name that nobody knows now, but may know later."""
    import socket

    return isinstance(error, (socket.gaierror, TimeoutError))


def await_name(host: str, seconds: float, over: Latch, waits: Callable[[], None]) -> None:
    """Wait until a name is known. ``waits`` is called once, before the first wait.

    Raises OSError: it is not known within so many ``seconds``, or ``over`` was opened; or UnicodeError, as `look_up`.
    """
    deadline, pause, has_said = clock.now() + seconds, _FIRST_PAUSE, False
    while True:
        try:
            look_up(host, 0)
        except OSError as error:
            if not is_unknown(error) or clock.now() + pause >= deadline:
                raise
            if not has_said:
                has_said = True
                waits()
            if over.wait(pause):  # names are published without any event that could be waited for
                raise
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            return


def is_no_machine(host: str) -> bool:
    """Whether an address is that of no machine: each takes it for its own.

    >>> is_no_machine("0.0.0.0"), is_no_machine("::"), is_no_machine("10.0.0.1")
    (True, True, False)
    """
    return bool(host) and not host.strip("0.:")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("127.example.org")
    (True, False)
    """
    return host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdecimal())


def address_text(host: str, port: int) -> str:
    """Return an address and a port, as messages have them.

    >>> address_text("::1", 5)
    '[::1]:5'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
