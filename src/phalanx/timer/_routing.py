"""Finds where the timers and heartbeats of this process go: to a configured client, or to the table of its group.

Owns the seat at the group's table, and the choice of how a client is called.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock

from phalanx._timers.client import Seat
from phalanx._timers.layout import TIMERS_ENV

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.timer._requests import TimerClient

MOST_KEPT = 4096
"""The most lines of code, texts of timers, and classes of clients that are kept for their next use."""

client: TimerClient | None = None
"""The configured client; None: the group's table is used."""

seat: Seat | None = None
"""Where timers go, once `find_seat` has found it. None as well if the configured client knows scopes by name."""

group_seat: Seat | None = None
"""This process's seat at the table of its group, once it is taken."""

nobody_watches = False
"""Whether heartbeats of this process are dropped, as it is in no group that has a table."""

lock = RLock()
"""Held while the state of this module and of its users changes. Reentrant: a signal handler may take a timer."""

_BY_NAME, _BY_DEADLINE, _BY_SEAT = "acquire", "_acquire", "seat"
_ways: dict[type, str] = {}  # how clients of a class are called: one of these


class NobodyWatchesError(RuntimeError):
    """A timer was taken in a process whose timers nobody watches."""

    __module__ = "phalanx.timer"  # as people know it, in tracebacks and pickles


def use(timer_client: TimerClient | None) -> None:
    """Have timers and heartbeats go to a client from now on; None: to the table of the group."""
    global client, seat, nobody_watches
    client, seat, nobody_watches = timer_client, None, False


def find_seat() -> Seat | None:
    """Return the seat where timers go: the configured client's, or that at the table of this process's group.

    None: a client is configured, and it has no seat. Raises RuntimeError if nobody watches.
    """
    global seat  # noqa: PLW0603 - one for the process
    seat = take_group_seat() if client is None else seat_of(client)
    return seat


def seat_of(timer_client: TimerClient) -> Seat | None:
    """Return the seat that a client writes to; None if it has none, or wants to be called."""
    way = _ways.get(timer_client.__class__) or _choose_way(timer_client.__class__)
    if way is _BY_SEAT:
        own = timer_client.__dict__
        if "acquire" not in own and "release" not in own and "_acquire" not in own:
            found = timer_client.seat  # type: ignore[attr-defined]  # as was found
            return found if isinstance(found, Seat) else None
    return None


def takes_deadlines(timer_client: TimerClient) -> bool:
    """Whether a client's ``_acquire``, which takes a moment of the monotonic clock, may replace its ``acquire``."""
    way = _ways.get(timer_client.__class__) or _choose_way(timer_client.__class__)
    if way is _BY_NAME:
        return False
    own = timer_client.__dict__
    return "acquire" not in own or "_acquire" in own


def _choose_way(kind: type) -> str:
    """Choose how clients of a class are called.

    ``_acquire`` and ``seat`` are short ways of this package's own clients; another class may have attributes of these
    names that mean something else. A subclass that overrides a method of theirs, or an object on which one is set, is
    called by that method.
    """
    requests = sys.modules.get("phalanx.timer._requests")
    order = kind.__mro__

    def definer(name: str) -> int:
        """Return the index in the MRO of the class that defines a name; beyond all of them if none does."""
        return next((number for number, each in enumerate(order) if name in each.__dict__), len(order))

    acquire, own_seat = definer("_acquire"), definer("seat")
    if requests is None or requests.TimerClient not in order or not acquire <= definer("acquire") < len(order):
        way = _BY_NAME
    elif own_seat <= min(acquire, definer("acquire"), definer("release")):
        way = _BY_SEAT
    else:
        way = _BY_DEADLINE
    if len(_ways) >= MOST_KEPT:
        _ways.clear()
    _ways[kind] = way
    return way


def take_group_seat() -> Seat:
    """Take a seat at the table of this process's group, once. Raises NobodyWatchesError, RuntimeError, ValueError."""
    global group_seat  # noqa: PLW0603 - one for the process
    address = os.environ.get(TIMERS_ENV)
    if not address:
        raise NobodyWatchesError(
            "nobody watches timers: call phalanx.timer.configure(client) first, or run under `phalanx run`, or in a "
            "group that was started with timers=TimerSpecs()"
        )
    with lock:
        if group_seat is None:
            try:
                group_seat = Seat(address)
            except OSError as error:
                raise RuntimeError(error.strerror) from error
            _offer_stacks()
        return group_seat


def _offer_stacks() -> None:
    """Have this process show its stacks on a signal, unless it does: it may be one below the worker (`sh run.sh`)."""
    from phalanx._base import linux
    from phalanx._evidence.error_file import ERROR_FILE_ENV
    from phalanx._evidence.stack_signals import offer_stacks, offers_stacks

    path = os.environ.get(ERROR_FILE_ENV)
    if path and not offers_stacks(path):
        offer_stacks(path)
        linux.allow_ptrace()


def _start_anew() -> None:
    """After a fork, in the child: forget the parent's seats. The child takes a seat of its own."""
    global group_seat, seat, lock, nobody_watches  # noqa: PLW0603 - as above
    lock = RLock()
    group_seat = seat = None
    nobody_watches = False


os.register_at_fork(after_in_child=_start_anew)
