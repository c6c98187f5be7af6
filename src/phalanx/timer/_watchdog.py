"""Runs a timer server: takes requests, waits for the earliest deadline, and has late workers reaped.

Owns the server's thread, when each of its methods is called, and what happens if one of them, or of its queue, raises.
Which timers exist, and how a worker is reaped, is decided by the server.
"""

# ruff: noqa: BLE001 - the methods of others may raise anything; the workers must be watched all the same

from __future__ import annotations

import math
from copy import copy
from threading import Event, Thread, current_thread

from phalanx._base import clock
from phalanx._base.loop import LONG, SLACK, Pauses, wait_slice
from phalanx.timer import _forks
from phalanx.timer.debug_info_logging import log_debug_info_for_expired_timers, logger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol, TypeVar

    from phalanx.timer._requests import RequestQueue, TimerRequest

    D = TypeVar("D")
    T = TypeVar("T")

    class Server(Protocol):
        """What a `Watchdog` calls, see `TimerServer`."""

        def register_timers(self, timer_requests: list[TimerRequest]) -> None: ...

        def clear_timers(self, worker_ids: set[Any]) -> None: ...

        def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]: ...

        def _reap_worker(self, worker_id: Any) -> bool: ...

        def _abandon(self) -> None: ...


_LONGEST = 1e6  # seconds: every way of waiting accepts that
_OVERTIME = 5.0
_RETRY = 1.0  # seconds until a worker that could not be reaped is tried again, at first
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # after an exception, at first and at most
_TURNS = 1000  # the most, in which late requests are taken before a worker is reaped


class Agenda:
    """Computes when to look next, from requests alone.

    A dict and a lower bound, not a heap: a released timer leaves at once, so a job that sets a thousand timers a
    second fills no memory. The bound may be that of a released timer: then one look finds nothing.

    >>> from phalanx.timer import TimerRequest
    >>> agenda = Agenda()
    >>> agenda.take([TimerRequest(1, "a", 5.0), TimerRequest(1, "b", 7.0), TimerRequest(1, "a", -1)], 3.0)
    >>> agenda.span(1, "a"), agenda.span(1, "b")
    (0.0, 4.0)
    >>> agenda.next(4.0), agenda.next(5.0), agenda.next(7.0)
    (5.0, 7.0, inf)
    """

    def __init__(self) -> None:
        self._moments: dict[tuple[Any, str], tuple[float, float]] = {}  # when it expires, and when it was received
        self._soonest = math.inf

    def take(self, requests: list[TimerRequest], now: float) -> None:
        """Record timers set and released."""
        for request in requests:
            key = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                self._moments.pop(key, None)
            else:
                self._moments[key] = request.expiration_time, now
                self._soonest = min(self._soonest, request.expiration_time)

    def next(self, looked: float) -> float:
        """Return the next moment to look at, or infinity. What was due at ``looked`` is done."""
        if self._soonest <= looked:
            self._moments = {key: moment for key, moment in self._moments.items() if moment[0] > looked}
            self._soonest = min((moment for moment, _ in self._moments.values()), default=math.inf)
        return self._soonest

    def span(self, worker: Any, scope: str) -> float:
        """Return the time that a timer had left when it was received; 0 of one that is not known, or no longer."""
        moment, received = self._moments.get((worker, scope), (0.0, 0.0))
        return moment - received


def received(request: TimerRequest) -> TimerRequest | None:
    """Convert a request from Unix time to CLOCK_MONOTONIC, in a copy; log what is no request, and return None."""
    try:
        hash((request.worker_id, request.scope_id))
        expiration = float(request.expiration_time)
        if math.isnan(expiration):
            raise ValueError("its expiration is not a number")  # noqa: TRY301 - one way out for all that is wrong
        if expiration < 0:
            return request
        moment = getattr(request, "_deadline", None)
        if moment is None:
            moment = clock.from_wall(expiration)
        own = copy(request)
        own.expiration_time = max(0.0, moment)  # long over; a negative one would be a release
    except Exception as error:
        logger().error("not a timer request, skipped: %.200r (%s)", request, error)
        return None
    return own


class Watchdog:
    """The thread of one server, from one `start` to one `stop`."""

    def __init__(self, server: Server, queue: RequestQueue, max_interval: float, *, daemon: bool) -> None:
        self._server = server
        self._queue = queue
        self._interval = min(max_interval, _LONGEST)
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="phalanx-timers", daemon=daemon)
        self._agenda = Agenda()
        self._again = math.inf  # when to look again, after an exception, although no deadline is due
        # Workers that could not be reaped: when to try again, and the delay after that.
        self._late: dict[Any, tuple[float, float]] = {}
        self._faults = 0
        self._pauses = Pauses()
        self._waited = math.inf, -math.inf  # from when until when `get` last waited, if it did
        self._goal, self._part = math.inf, math.inf  # the moment that is waited for, and the seconds of one part
        # Expired timers that are postponed, because this process could not run: until when, and what they had at first.
        self._postponed: dict[tuple[Any, str, float], tuple[float, float]] = {}

    def start(self) -> None:
        """Open the queue and start the thread."""
        hook = getattr(self._queue, "_open", None)  # a queue need not be a subclass of ours
        if hook is not None:
            hook()
        _forks.track(self)
        try:
            self._thread.start()
        except BaseException:
            _forks.forget(self)
            self._close()
            raise

    def stop(self) -> None:
        """End the thread; from itself, after the current turn."""
        self._stopping.set()
        wake = getattr(self._queue, "_wake", None)
        if wake is not None:
            self._try(None, wake)
        if current_thread() is self._thread:
            return
        self._thread.join(self._interval + _OVERTIME)
        if self._thread.is_alive():
            logger().error("the timer server has not stopped: %r still runs; it will end then", self._queue)

    @property
    def _punctual(self) -> bool:
        """Whether the queue ends a wait in time, unless the process is stopped."""
        return getattr(self._queue, "_punctual", False)

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self._stopping.is_set():
                faults = self._faults
                looked = self._turn()
                pause = 0.0 if faults == self._faults else min(max(_PAUSE, 2 * pause), _LONGEST_PAUSE, self._interval)
                if pause:
                    self._again = looked + pause
                    self._stopping.wait(min(pause, max(0.0, self._agenda.next(looked) - clock.now())))
        finally:
            _forks.forget(self)
            self._close()

    def _close(self) -> None:
        hook = getattr(self._queue, "_close", None)
        if hook is not None:
            self._try(None, hook)

    def _abandon(self) -> None:
        """In a fork: release what the server and the queue have opened. The thread is not here."""
        self._server._abandon()  # noqa: SLF001 - a hook of this package's own
        hook = getattr(self._queue, "_abandon", None)
        if hook is not None:
            self._try(None, hook)

    def _try(self, default: D, method: Callable[..., T], *args: Any) -> T | D:
        try:
            return method(*args)
        except Exception:
            self._faults += 1
            logger().exception("%s failed", getattr(method, "__qualname__", repr(method)))
            return default

    def _turn(self) -> float:
        """Wait, take requests, reap late workers. Returns the moment for which expired timers were looked up."""
        now = clock.now()
        moments = [self._agenda.next(-1.0), self._again, *(moment for moment, _ in self._late.values())]
        moments += [moment for moment, _ in self._postponed.values() if moment > now]
        seconds = max(0.0, min(min(moments) - now, self._interval))
        if self._punctual:  # then it waits in parts, as a pause within a wait is not seen
            if min(moments) != self._goal:
                self._goal, self._part = min(moments), wait_slice(min(moments) - now)
            seconds = min(seconds, self._part)
        self._take(seconds)
        if self._stopping.is_set():
            return now
        now, self._again = clock.now(), math.inf
        expired = self._expired(now)
        if expired:
            # If this process was late itself, releases may still be in the queue.
            for _ in range(_TURNS):
                if not self._try(0, self._queue.size):
                    break
                self._take(0.0)
            expired = self._expired(now)
            self._reap(expired, now)
        self._agenda.next(now)
        return now

    def _take(self, timeout: float) -> None:
        size = self._try(0, self._queue.size)
        began = clock.now()
        came = self._try(None, self._queue.get, max(1, size), timeout) or ()
        now = clock.now()
        if timeout:
            self._pauses.note(began, began + timeout, now)
        if now - began > SLACK:
            self._waited = began, now
        requests = [request for request in map(received, came) if request is not None]
        for request in requests:
            taken = getattr(request, "_taken", None)
            if taken is not None and request.expiration_time >= 0 and self._punctual:
                request.expiration_time += self._pauses.owed(taken, *self._waited)
        self._agenda.take(requests, now)
        self._try(None, self._server.register_timers, requests)

    def _expired(self, now: float) -> dict[Any, list[TimerRequest]]:
        expired = self._try(None, self._server.get_expired_timers, now) or {}
        self._late = {worker: late for worker, late in self._late.items() if expired.get(worker)}
        if expired:
            expired = self._try(expired, self._postpone, expired, now)
        return {
            worker: timers
            for worker, timers in expired.items()
            if timers and not (worker in self._late and self._late[worker][0] > now)
        }

    def _postpone(self, expired: dict[Any, list[TimerRequest]], now: float) -> dict[Any, list[TimerRequest]]:
        """Postpone timers that expired while this process could not run. Returns those that are due now.

        The timers that the server keeps are not changed: it returns them again at each look, until they are released.
        """
        before, self._postponed = self._postponed, {}
        due: dict[Any, list[TimerRequest]] = {}
        for worker, timers in expired.items():
            for timer in timers:
                key = worker, timer.scope_id, timer.expiration_time
                known = key in before
                span = before[key][1] if known else self._agenda.span(timer.worker_id, timer.scope_id) or LONG
                until = timer.expiration_time + self._pauses.lost(timer.expiration_time - span)
                if not self._punctual:  # `get` may be slow whenever it is called: that is a reason only once
                    until = before[key][0] if known else min(until, now + span)
                if known or until > now:
                    self._postponed[key] = until, span
                if until <= now:
                    due.setdefault(worker, []).append(timer)
        return due

    def _reap(self, expired: dict[Any, list[TimerRequest]], now: float) -> None:
        reaped = set()
        for worker, timers in expired.items():
            self._try(None, log_debug_info_for_expired_timers, "", {worker: [timer.scope_id for timer in timers]})
            if self._try(True, self._server._reap_worker, worker):  # noqa: SLF001 - the historical name of the hook
                logger().info("worker %s is reaped", worker)
                reaped.add(worker)
                self._late.pop(worker, None)
            else:
                delay = self._late[worker][1] if worker in self._late else min(_RETRY, self._interval)
                self._late[worker] = now + delay, min(2 * delay, self._interval)
                logger().error("worker %s could not be reaped; the next attempt is in %g s", worker, delay)
        if reaped:
            self._try(None, self._server.clear_timers, reaped)
