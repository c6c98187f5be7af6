"""Timers in shared memory, for a process that watches over others without being their group's launcher.

A group does the same by itself (`phalanx.timer.TimerSpecs`, ``phalanx run``). Owns the pair's two faces; the table
is `timetable`'s, when to look `lookout`'s, and the reaping `_victim`'s.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from contextlib import ExitStack, suppress

from phalanx._base import clock
from phalanx._base.durations import seconds
from phalanx._base.loop import Loop
from phalanx._timers import timetable
from phalanx._timers.hang import Hang
from phalanx._timers.scheduler import Lookout
from phalanx._timers.timetable import Seat, Timetable
from phalanx.timer import _forks
from phalanx.timer._server import TimerClient
from phalanx.timer._victim import Exited, Refused, Unknown, Victim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from phalanx._timers.timetable import Timer


_log = logging.getLogger("phalanx.timer")

_AGAIN = clock.NS  # nanoseconds after which somebody is looked at again who could not be
_MOST = timetable.LONGEST / clock.NS  # the latest deadline, in seconds

_seats: dict[str, tuple[int, int, Seat]] = {}  # by the server's address: of which process, in which memory
_opening = threading.RLock()  # reentrant, for a signal handler that takes a timer while its own thread does
_hooked = False


class SharedTimerClient(TimerClient):
    """Takes timers in memory that is shared with a `SharedTimerServer`.

    To set or clear a timer is a few stores, and no system call unless its deadline is the earliest.

    It can be pickled, and handed to a worker as an argument. A fork takes a seat of its own.

    Args:
        address: `SharedTimerServer.address`.

    >>> with SharedTimerServer() as server:
    ...     client = SharedTimerClient(server.address)
    ...     client.acquire("load", clock.wall() + 60)
    ...     client.release("load")
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._place: _Place | None = None
        self._texts: dict[str, bytes] = {}

    @property
    def seat(self) -> Seat:
        """This process's place in the server's table, taken at the first use.

        Raises RuntimeError when the server cannot be reached, or has no seat left.
        """
        place = self._place
        return place.seat if place is not None and place.pid == os.getpid() else self._own().seat

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Take a timer on ``scope_id``, or move it, to ``expiration_time`` (Unix time, seconds). Negative: release it.

        Raises:
            RuntimeError: The server cannot be reached, has stopped, or has no seat left; 1024 timers run here.
            ValueError: ``expiration_time`` is not finite.
        """
        if 0 <= expiration_time < math.inf:
            self._acquire(scope_id, clock.from_wall(expiration_time))
        elif -math.inf < expiration_time < 0:
            self.release(scope_id)
        else:
            msg = f"expiration_time: expected a moment, got {expiration_time!r}"
            raise ValueError(msg)

    def release(self, scope_id: str) -> None:
        """Give the timer on ``scope_id`` back. One that is not held is ignored."""
        place = self._place  # in a fork it may be the parent's: what is given there goes nowhere
        if place is not None:
            slot = place.slots.pop(
                scope_id, None
            )  # one step: not even `_acquire` of another thread gives the same slot
            if slot is not None:
                place.seat.give(slot)

    def _acquire(self, scope_id: str, deadline: float) -> None:
        place = self._place
        if place is None or place.pid != os.getpid():
            place = self._own()
        text = self._texts.get(scope_id)
        if text is None:
            if len(self._texts) >= timetable.SLOTS:
                self._texts.clear()
            text = self._texts[scope_id] = timetable.encode(scope_id, "")
        now = clock.now_ns()
        moment = int((deadline if 0 < deadline < _MOST else _MOST if deadline > 0 else 0.0) * clock.NS)
        slots, seat = place.slots, place.seat
        with place.lock:
            before = slots.pop(scope_id, None)
            try:
                slots[scope_id] = seat.take(moment, moment - now, text, threading.get_ident())
            except BaseException:
                if before is not None:
                    slots[scope_id] = before
                raise
            if before is not None:
                seat.give(before)

    def _own(self) -> _Place:
        """This process's place, made in one step for all threads: no timer of one is lost to another."""
        with _opening:
            place = self._place
            if place is None or place.pid != os.getpid():
                place = self._place = _Place(os.getpid(), _seat_at(self._address))
            return place

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_place", "_texts")}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a subclass, too: what it has beside goes along
        self.__dict__.update(state, _place=None, _texts={})


class _Place:
    """Where a client's timers are, in one process."""

    __slots__ = ("lock", "pid", "seat", "slots")

    def __init__(self, pid: int, seat: Seat) -> None:
        self.pid = pid
        self.seat = seat
        self.slots: dict[str, int] = {}  # by scope
        self.lock = threading.RLock()  # reentrant, as above


def _seat_at(address: str) -> Seat:
    """This process's seat at a server's table. Raises RuntimeError.

    One for all its clients: to the kernel a process has a lock, or has it not, whatever the descriptor.
    """
    global _hooked  # noqa: PLW0603 - hooks are the process's
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_unlock)
    pid, memory, *_ = (*address.split(":"), "")
    with _opening:
        which = os.getpid(), 0
        with suppress(OSError):  # then `Seat` says what is wrong
            which = os.getpid(), os.stat(f"/proc/{pid}/fd/{memory}").st_ino  # a later server may have the same address
        *known, seat = _seats.get(address, (0, 0, None))
        if seat is not None and tuple(known) == which:
            return seat
        if seat is not None:
            seat.close()
        try:
            seat = Seat(f"{address}:0")
        except OSError as error:
            raise RuntimeError(error.strerror) from error
        _seats[address] = *which, seat
        return seat


def _unlock() -> None:
    """After a fork, in the child: the thread that took the lock is not there."""
    global _opening  # noqa: PLW0603 - as above
    _opening = threading.RLock()


class SharedTimerServer:
    """Watches timers that are set in shared memory, in a thread of its own, and kills processes that are late.

    It sleeps until the earliest deadline, or until somebody sets an earlier one. The kernel says which process holds a
    seat, by a lock that ends with the process, so a recycled pid is never signalled. Processes of other users, this
    process and its ancestors are refused, and logged.

    Args:
        max_interval: Accepted and without effect: nothing polls.
        daemon: Whether the interpreter may exit while the server runs.
        seats: How many processes can have timers at a time, at least 1.
        hang_timeout: Seconds after a process's last `beat` when it counts as hung, or None.

    Raises:
        ValueError: Fewer than one seat, or a time that is none.
        OSError: There is no memory, or no descriptor, for the table.
    """

    def __init__(
        self,
        max_interval: float = 60,
        daemon: bool = True,  # noqa: FBT001, FBT002 - as with its siblings, by position
        *,
        seats: int = 256,
        hang_timeout: float | None = None,
    ) -> None:
        seconds("max_interval", max_interval, endless=False)
        if hang_timeout is not None:
            hang_timeout = seconds("hang_timeout", hang_timeout, zero=False, endless=False)
        if seats < 1:
            msg = f"seats: expected 1 or more, got {seats}"
            raise ValueError(msg)
        self._daemon = daemon
        self._seats = seats
        self._hang_timeout = hang_timeout
        self._table: Timetable | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """What a `SharedTimerClient` needs, also in a fork. Raises RuntimeError when the server was not started."""
        if not self._address:
            raise RuntimeError("the timer server has not been started")
        return self._address

    def start(self) -> None:
        """Watch from now on. One that does already goes on."""
        if self._table is not None:
            return
        with ExitStack() as undo:
            table = Timetable(self._seats, self._hang_timeout)
            undo.callback(table.close)
            loop = Loop()
            undo.callback(loop.close)
            thread = threading.Thread(target=_Watch(table, loop).run, name="phalanx-timers", daemon=self._daemon)
            thread.start()
            undo.pop_all()
        self._loop, self._thread, self._address = loop, thread, table.address
        _forks.track(self)
        self._table = table

    def stop(self) -> None:
        """Watch no more. Timers that run are forgotten. Idempotent. In a fork nothing happens: no server runs there."""
        table, self._table = self._table, None
        address, self._address = self._address, ""
        if table is None:
            return
        self._loop.call(self._loop.stop)
        self._thread.join()
        _forks.forget(self)
        self._loop.close()
        with _opening:
            _, _, own = _seats.pop(address, (0, 0, None))
        if own is not None:
            own.close()
        table.close()

    def _abandon(self) -> None:
        # In a fork. The table goes by itself, and the address stays: the child may be a client.
        self._table = None
        self._loop.close_in_fork()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Watch:
    """A server that runs. Everything happens in its thread.

    Processes are taken hold of when they are first seen: once a deadline is over, there is no time for it.
    """

    def __init__(self, table: Timetable, loop: Loop) -> None:
        self._table = table
        self._loop = loop
        self._victims: dict[int, Victim] = {}
        self._refused: set[int] = set()
        self._lookout = Lookout(table, loop, self._on_expired, self._on_seen)

    def run(self) -> None:
        self._lookout.open()
        try:
            self._loop.run()
        finally:
            self._lookout.close()
            for victim in self._victims.values():
                victim.close()

    def _on_seen(self, timers: list[Timer]) -> None:
        for seat in {timer.seat for timer in timers}:
            with suppress(Unknown):
                self._hold(self._table.holder(seat))

    def _on_expired(self, timers: list[Timer]) -> None:
        seats: dict[int, list[Timer]] = {}
        for timer in timers:
            seats.setdefault(timer.seat, []).append(timer)
        for seat, late in seats.items():
            try:
                victim = self._hold(self._table.holder(seat))
            except Unknown:
                for timer in late:
                    self._lookout.rearm(timer, clock.now_ns() + _AGAIN)
                continue
            still = [timer for timer in late if self._table.still(timer)]
            # The one that is held lives, and so does the holder of the seat: with the same pid, they are one.
            if victim is not None and still and self._table.holder(seat) == victim.pid:
                hangs = [Hang(0, victim.pid, True, timer) for timer in still]
                victim.reap(signal.SIGKILL, sorted(hangs, key=lambda hang: hang.timer.deadline))

    def _hold(self, pid: int) -> Victim | None:
        """Take hold of a process (0: none), if it may be signalled; one that may not is logged, once.

        Raises Unknown.
        """
        known = self._victims.get(pid)
        if known is not None:
            if not known.gone():
                return known
            self._let_go(known)
        if not pid:  # it has ended, and its timers with it
            return None
        try:
            victim = self._victims[pid] = Victim(pid)
        except Exited:
            return None
        except Refused as why:
            if pid not in self._refused:
                self._refused.add(pid)
                _log.error("timers of pid %d are not watched: %s", pid, why)
            if isinstance(why, Unknown):
                raise
            return None
        self._loop.watch(victim.fd, lambda _events: self._let_go(victim))
        return victim

    def _let_go(self, victim: Victim) -> None:
        if self._victims.get(victim.pid) is victim:
            del self._victims[victim.pid]
            self._loop.forget(victim.fd)
            victim.close()
