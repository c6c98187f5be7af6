"""`SharedTimerServer` and `SharedTimerClient`: timers in shared memory, for a process that launches no group.

A group does the same by itself (`phalanx.timer.TimerSpecs`, ``phalanx run``). The table is
`table`'s and `client`'s; when timers expire is decided by `scheduler`; what happens to a process is `_victim`'s.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from contextlib import ExitStack, suppress

from phalanx._base import clock, unpatched
from phalanx._base.loop import Loop
from phalanx._base.text import seconds
from phalanx._timers.client import Seat
from phalanx._timers.hang import Hang
from phalanx._timers.layout import LONGEST, SLOTS, encode
from phalanx._timers.scheduler import TimerScheduler
from phalanx._timers.table import TimerTable
from phalanx.timer import _forks
from phalanx.timer._requests import TimerClient
from phalanx.timer._victim import ExitedError, RefusedError, UnknownError, Victim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from phalanx._timers.timer import Timer


_log = logging.getLogger("phalanx.timer")

_RETRY = clock.NS  # nanoseconds until a process is examined again that could not be
_MOST = LONGEST / clock.NS  # the latest deadline, in seconds

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
        self._timers: _ProcessTimers | None = None
        self._texts: dict[str, bytes] = {}

    @property
    def seat(self) -> Seat:
        """This process's seat in the server's table, taken at the first use.

        Raises RuntimeError when the server cannot be reached, or has no seat left.
        """
        own = self._timers
        return own.seat if own is not None and own.pid == os.getpid() else self._for_this_process().seat

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer on ``scope_id``, or move it, to ``expiration_time`` (Unix time, seconds). Negative: release it.

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
        """Release the timer on ``scope_id``. One that is not set is ignored."""
        own = self._timers  # in a fork it may be the parent's, whose seat is detached
        if own is not None:
            slot = own.slots.pop(scope_id, None)  # one step, so no other thread disarms the same slot
            if slot is not None:
                own.seat.disarm(slot)

    def _acquire(self, scope_id: str, deadline: float) -> None:
        own = self._timers
        if own is None or own.pid != os.getpid():
            own = self._for_this_process()
        text = self._texts.get(scope_id)
        if text is None:
            if len(self._texts) >= SLOTS:
                self._texts.clear()
            text = self._texts[scope_id] = encode(scope_id, "")
        now = clock.now_ns()
        moment = int((deadline if 0 < deadline < _MOST else _MOST if deadline > 0 else 0.0) * clock.NS)
        slots, seat = own.slots, own.seat
        with own.lock:
            before = slots.pop(scope_id, None)
            try:
                slots[scope_id] = seat.arm(moment, moment - now, text, threading.get_ident())
            except BaseException:
                if before is not None:
                    slots[scope_id] = before
                raise
            if before is not None:
                seat.disarm(before)

    def _for_this_process(self) -> _ProcessTimers:
        """Return the timers of this process. Made once for all threads, so that no thread's timers are lost."""
        with _opening:
            own = self._timers
            if own is None or own.pid != os.getpid():
                own = self._timers = _ProcessTimers(os.getpid(), _seat_at(self._address))
            return own

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_timers", "_texts")}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a subclass, too: what it has beside goes along
        self.__dict__.update(state, _timers=None, _texts={})


class _ProcessTimers:
    """The timers of one client in one process."""

    __slots__ = ("lock", "pid", "seat", "slots")

    def __init__(self, pid: int, seat: Seat) -> None:
        self.pid = pid
        self.seat = seat
        self.slots: dict[str, int] = {}  # by scope
        self.lock = threading.RLock()  # reentrant, as above


def _seat_at(address: str) -> Seat:
    """Return this process's seat at a server's table. Raises RuntimeError.

    One for all its clients: a record lock belongs to the process, whatever the descriptor (fcntl(2)).
    """
    global _hooked  # noqa: PLW0603 - hooks are the process's
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_unlock)
    pid, memory, *_ = (*address.split(":"), "")
    with _opening:
        which = os.getpid(), 0
        with suppress(OSError):  # then `Seat` raises, with the reason
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
    """After a fork, in the child: replace the lock, whose holder may not exist here."""
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
        OSError: No memory or no descriptor is left for the table.
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
        self._table: TimerTable | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """What a `SharedTimerClient` needs, also in a fork. Raises RuntimeError when the server was not started."""
        if not self._address:
            raise RuntimeError("the timer server has not been started")
        return self._address

    def start(self) -> None:
        """Start to watch. Without effect on a server that runs."""
        if self._table is not None:
            return
        with ExitStack() as undo:
            table = TimerTable(self._seats, self._hang_timeout)
            undo.callback(table.close)
            loop = Loop()
            undo.callback(loop.close)
            thread = unpatched.thread(target=_Watch(table, loop).run, name="phalanx-timers", daemon=self._daemon)
            thread.start()
            undo.pop_all()
        self._loop, self._thread, self._address = loop, thread, table.address
        _forks.track(self)
        self._table = table

    def stop(self) -> None:
        """Stop watching. Timers that run are forgotten. Idempotent. In a fork nothing happens: no server runs there."""
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
        # In a fork. The table closes by its own hook; the address stays, as the child may be a client.
        self._table = None
        self._loop.close_in_fork()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Watch:
    """A running server. All methods run in its thread.

    A process is opened when its first timer is seen: once a deadline is over, there is no time for it.
    """

    def __init__(self, table: TimerTable, loop: Loop) -> None:
        self._table = table
        self._loop = loop
        self._victims: dict[int, Victim] = {}
        self._refused: set[int] = set()
        self._scheduler = TimerScheduler(table, loop, self._on_expired, self._on_seen)

    def run(self) -> None:
        self._scheduler.open()
        try:
            self._loop.run()
        finally:
            self._scheduler.close()
            for victim in self._victims.values():
                victim.close()

    def _on_seen(self, timers: list[Timer]) -> None:
        for seat in {timer.seat for timer in timers}:
            with suppress(UnknownError):
                self._hold(self._table.holder(seat))

    def _on_expired(self, timers: list[Timer]) -> None:
        seats: dict[int, list[Timer]] = {}
        for timer in timers:
            seats.setdefault(timer.seat, []).append(timer)
        for seat, late in seats.items():
            try:
                victim = self._hold(self._table.holder(seat))
            except UnknownError:
                for timer in late:
                    self._scheduler.rearm(timer, clock.now_ns() + _RETRY)
                continue
            still = [timer for timer in late if self._table.is_still_set(timer)]
            # Both the held process and the seat's holder are alive: with the same pid, they are the same process.
            if victim is not None and still and self._table.holder(seat) == victim.pid:
                hangs = [Hang(0, victim.pid, True, timer) for timer in still]
                victim.reap(signal.SIGKILL, sorted(hangs, key=lambda hang: hang.timer.deadline))

    def _hold(self, pid: int) -> Victim | None:
        """Open a process (0: none) by a pidfd. Returns None, and logs it once, if it may not be signalled.

        Raises UnknownError.
        """
        known = self._victims.get(pid)
        if known is not None:
            if not known.has_exited():
                return known
            self._let_go(known)
        if not pid:  # the process has ended, and its timers with it
            return None
        try:
            victim = self._victims[pid] = Victim(pid)
        except ExitedError:
            return None
        except RefusedError as why:
            if pid not in self._refused:
                self._refused.add(pid)
                _log.error("timers of pid %d are not watched: %s", pid, why)
            if isinstance(why, UnknownError):
                raise
            return None
        self._loop.watch(victim.fd, lambda _events: self._let_go(victim))
        return victim

    def _let_go(self, victim: Victim) -> None:
        if self._victims.get(victim.pid) is victim:
            del self._victims[victim.pid]
            self._loop.forget(victim.fd)
            victim.close()
