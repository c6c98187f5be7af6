"""Timer servers: what a server provides, and the one thread that runs it.

`TimerServer` is the base of the servers of this package and of others: which timers there are, and how a worker is
reaped, is decided there. `Watchdog` owns the thread: it takes requests out of the queue, waits for the earliest
deadline, and has late workers reaped; and what happens if a method of the server, or of its queue, raises.
"""

# ruff: noqa: BLE001 - the methods of others may raise anything; the workers must be watched all the same

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from threading import Thread
from typing import Any, Self, TypeVar

from phalanx._base import clock, loop, unpatched
from phalanx.timer._requests import RequestQueue, TimerRequest
from phalanx.timer.debug_info_logging import log_debug_info_for_expired_timers, logger

D = TypeVar("D")
T = TypeVar("T")

MOST_TIMERS = 10_000
"""The most timers of one worker at a time: a client that sets them without end must not fill the server's memory."""

_LONGEST = 1e6  # seconds: every way of waiting accepts that
_OVERTIME = 5.0
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0  # seconds until a worker that could not be reaped is tried again
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # after an exception, at first and at most
_TURNS = 1000  # the most, in which late requests are taken before a worker is reaped
_WARNINGS, _PERIOD = 10, 10.0  # so many in so many seconds
_PIPE_TURNS = 16  # of a pipe, which holds no more


class TimerServer(ABC):
    """Watches the timers of a host's workers, in a thread of its own, and reaps those that are late.

    The thread sleeps in ``request_queue.get`` until the earliest deadline of any request, or until a request comes,
    so a worker is reaped when its time is over, whatever ``max_interval`` is. At expiry the server logs
    (logger ``phalanx.timer``), calls `_reap_worker`, and then `clear_timers` for those that were reaped. A worker
    that could not be reaped keeps its timers, and is tried again after a second, then two, four and so on, at least
    every ``max_interval``. An exception in one of the methods is logged, and the server continues.

    If a ``get`` takes longer than its timeout, this process was stopped, and perhaps its workers with it. So deadlines
    are put off: by the excess if that is 0.05 to 0.5 s, else by the whole wait. A queue of `multiprocessing` is asked
    in parts of the time to the next deadline, because a pause in the middle of a wait is not seen. Another queue is
    asked once, and may be slow each time; so that counts once for each timer, and for at most the time that the timer
    had when it was received.

    Deadlines are on CLOCK_MONOTONIC: a request is converted as it comes out of the queue, so that `register_timers`
    gets requests whose ``expiration_time`` is comparable to the ``deadline`` of `get_expired_timers`, and
    a step of the wall clock changes nothing. (A release stays negative.)

    A subclass provides the four abstract methods; all are called in the server's thread. A worker has at most 10,000
    timers at a time: further ones are refused, and logged.

    Args:
        request_queue: Where requests come from.
        max_interval: Seconds (> 0) that one wait in the queue may take at the most.
        daemon: Whether the interpreter may exit while the server runs.

    Raises:
        ValueError: ``max_interval`` is not more than 0.
    """

    _ticks = True  # whether it wakes every `max_interval`, though no timer is due
    _plans = False  # whether `register_timers` tells the watchdog of its timers

    def __init__(
        self,
        request_queue: RequestQueue,
        max_interval: float,
        daemon: bool = True,  # noqa: FBT001, FBT002 - the historical signature, by position
    ) -> None:
        super().__init__()
        if not max_interval > 0 or math.isnan(max_interval):
            msg = f"max_interval: expected more than 0 seconds, got {max_interval!r}"
            raise ValueError(msg)
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take over ``timer_requests``: note timers that were taken, forget those that were released.

        They are in order: a later one replaces an earlier one on the same scope. The list is empty when the server has
        woken for another reason.
        """

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of the workers in ``worker_ids``."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Find the timers whose ``expiration_time`` is ``deadline`` or earlier, by worker. It forgets none."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End the worker ``worker_id``. Return whether it has ended, now or before.

        If it raises, that is logged and the worker counts as reaped.
        """

    def start(self) -> None:
        """Start to watch. Without effect on a server that runs.

        Raises:
            OSError: No descriptor or no thread is left.
        """
        if self._watchdog is not None:
            return
        interval = self._max_interval if self._ticks else _LONGEST
        self._watchdog = watchdog = Watchdog(self, self._request_queue, interval, daemon=self._daemon)
        try:
            watchdog.start()
        except BaseException:
            self._watchdog = None
            raise

    def stop(self) -> None:
        """Stop watching, and wait until the thread has ended. Idempotent; afterwards `start` works again.

        With the queues of this package that is at once. Another `RequestQueue` cannot be woken: the thread ends when
        its ``get`` returns, after ``max_interval`` at the latest. One that has not ended 5 s after that is logged,
        and not waited for any longer. In a fork of the server's process nothing happens: no server runs there.
        """
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _expire(self, expired: dict[Any, list[TimerRequest]]) -> set[Any]:
        """Reap the workers of expired timers. Returns those that could not be reaped: they are tried again."""
        reaped = set()
        for worker, timers in expired.items():
            with suppress(Exception):  # of a handler of the user's
                log_debug_info_for_expired_timers("", {worker: [timer.scope_id for timer in timers]})
            try:
                done = self._reap_worker(worker)
            except Exception:
                logger().exception("worker %s could not be reaped", worker)
                done = True
            if done:
                logger().info("worker %s is reaped", worker)
                reaped.add(worker)
        if reaped:
            self.clear_timers(reaped)
        return set(expired) - reaped

    def _moment(self, timer: TimerRequest) -> float:
        """Return when a timer that it has taken over expires (seconds, CLOCK_MONOTONIC)."""
        return timer.expiration_time

    def _given(self, request: TimerRequest) -> TimerRequest:
        """Return a converted request as `register_timers` gets it."""
        return request

    def _ended(self) -> None:  # noqa: B027 - a hook: most servers have nothing to do here
        """The thread ends: release what the server has opened."""

    def _abandon(self) -> None:
        """In a fork of the process that started it: forget the watchdog, whose thread is not here."""
        self._watchdog = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Agenda:
    """Computes when to look next, from requests alone; bounded for each worker.

    A dict and a lower bound, not a heap: a released timer leaves at once, so a job that sets a thousand timers a
    second fills no memory. The bound may be that of a released timer: then one look finds nothing.

    >>> agenda = Agenda()
    >>> [agenda.take(1, *timer, now=3.0) for timer in (("a", 5.0), ("b", 7.0), ("a", -1))]
    [True, True, True]
    >>> agenda.span(1, "a"), agenda.span(1, "b")
    (0.0, 4.0)
    >>> agenda.next(4.0), agenda.next(5.0), agenda.next(7.0)
    (5.0, 7.0, inf)
    """

    def __init__(self) -> None:
        # By worker and scope: when a timer expires, and when it was received.
        self._moments: dict[Any, dict[str, tuple[float, float]]] = {}
        self._soonest = math.inf

    def take(self, worker: Any, scope: str, moment: float, now: float) -> bool:
        """Record a timer that was set, or released (< 0). False: its worker has `MOST_TIMERS` already."""
        own = self._moments.get(worker, {})
        if moment < 0:
            if own.pop(scope, None) is not None and not own:
                del self._moments[worker]
            return True
        if len(own) >= MOST_TIMERS and scope not in own:
            return False
        self._moments.setdefault(worker, own)[scope] = moment, now
        self._soonest = min(self._soonest, moment)
        return True

    def forget(self, worker: Any) -> None:
        """Forget all timers of a worker."""
        self._moments.pop(worker, None)

    def next(self, looked: float) -> float:
        """Return the next moment to look at, or infinity. What was due at ``looked`` is done."""
        if self._soonest <= looked:
            left = {worker: {s: m for s, m in own.items() if m[0] > looked} for worker, own in self._moments.items()}
            self._moments = {worker: own for worker, own in left.items() if own}
            self._soonest = min((m for own in self._moments.values() for m, _ in own.values()), default=math.inf)
        return self._soonest

    def span(self, worker: Any, scope: str) -> float:
        """Return the time that a timer had left when it was received; 0 of one that is not known, or no longer."""
        moment, came = self._moments.get(worker, {}).get(scope, (0.0, 0.0))
        return moment - came


def received(request: TimerRequest, *, shared: bool = True) -> TimerRequest | None:
    """Convert a request from Unix time to CLOCK_MONOTONIC; log what is no request, and return None.

    It is converted in a copy, unless nobody else has it (``shared``). Its ``_deadline`` is that moment as well, which
    shows that it was converted.
    """
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
        own = copy(request) if shared else request
        own.expiration_time = max(0.0, moment)  # long over; a negative one would be a release
        if isinstance(own, TimerRequest):
            own._deadline = own.expiration_time  # noqa: SLF001 - a field of this package's own
    except Exception as error:
        logger().error("not a timer request, skipped: %.200r (%s)", request, error)
        return None
    return own


class Watchdog:
    """The thread of one server, from one `start` to one `stop`."""

    def __init__(self, server: TimerServer, queue: RequestQueue, max_interval: float, *, daemon: bool) -> None:
        self._server = server
        self._queue = queue
        self._interval = min(max_interval, _LONGEST)
        self._daemon = daemon
        self._thread: Thread | None = None
        self._stopping = self._last_round = False
        self._stop = unpatched.module("_thread").allocate_lock()  # held until it is to stop
        self._stop.acquire()
        self._working_since = math.inf  # infinity: it waits
        self._agenda = Agenda()
        self._planning = unpatched.module("_thread").RLock()  # other threads may set and clear timers, too
        self._complaints = Complaints()
        self._again = math.inf  # when to look again, after an exception, although no deadline is due
        # Workers that could not be reaped: when to try again, and the delay after that.
        self._late: dict[Any, tuple[float, float]] = {}
        self._faults = 0
        self._pauses = loop.Pauses()
        self._waited = math.inf, -math.inf  # from when until when `get` last waited, if it did
        self._goal, self._part = math.inf, math.inf  # the moment that is waited for, and the seconds of one part
        # Expired timers that are postponed, because this process could not run: until when, and what they had at first.
        self._postponed: dict[tuple[Any, str, float], tuple[float, float]] = {}

    def start(self) -> None:
        """Open the queue and start the thread."""
        self._hook("_open")()
        # A queue of this package waits in the kernel, which a greenlet must not; another's may be made of greenlets.
        make: Any = unpatched.thread if self._punctual else Thread
        _running.add(self)  # to be abandoned in forks from now on
        try:
            self._thread = make(target=self._run, name="phalanx-timers", daemon=self._daemon)
            self._thread.start()
        except BaseException:
            _running.discard(self)
            self._try(None, self._hook("_close"))
            raise

    def stop(self, *, last_round: bool = False) -> None:
        """End the thread; from itself, after the current turn. With ``last_round``, it serves what there is first."""
        if not self._stopping:
            self._last_round, self._stopping = last_round, True
            self._stop.release()
        self._try(None, self._hook("_wake"))
        if self._thread is None or unpatched.is_current(self._thread):
            return
        self._thread.join(_OVERTIME if self._punctual else self._interval + _OVERTIME)
        if self._thread.is_alive():
            logger().error("the timer server has not stopped: %r still runs; it will end then", self._queue)

    def forget(self, worker: Any) -> None:
        """Forget the timers of a worker."""
        with self._planning:
            self._agenda.forget(worker)

    def plan(self, request: TimerRequest, moment: float) -> bool:
        """Wake at the moment of a timer; < 0: it is released. False: its worker has too many, which is logged."""
        with self._planning:
            if self._agenda.take(request.worker_id, request.scope_id, moment, clock.now()):
                return True
        self._complaints.say("a timer is refused: its worker has %d timers already (%r)", MOST_TIMERS, request)
        return False

    def wake(self) -> None:
        """Have the thread read its plan again, if another thread has changed it."""
        if self._thread is not None and not unpatched.is_current(self._thread):
            self._try(None, self._hook("_wake"))

    def seconds_at_work(self) -> float:
        """Return for how long the thread has worked without a break; 0.0 if it waits."""
        return max(0.0, clock.now() - self._working_since)

    @property
    def _punctual(self) -> bool:
        """Whether the queue ends a wait in time, unless the process is stopped."""
        return getattr(self._queue, "_punctual", False)

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self._stopping:
                faults = self._faults
                looked = self._turn()
                pause = 0.0 if faults == self._faults else min(max(_PAUSE, 2 * pause), _LONGEST_PAUSE, self._interval)
                if pause:
                    self._again = looked + pause
                    self._rest(min(pause, max(0.0, self._next(looked) - clock.now())))
            if self._last_round:
                self._drain()
                self._look()
        finally:
            _running.discard(self)
            if self._server._watchdog in (None, self):  # noqa: SLF001 - else it was started anew, while this one hung
                self._try(None, self._server._ended)  # noqa: SLF001 - a hook of this package's own
                self._try(None, self._hook("_close"))
            self._complaints.flush()

    def _rest(self, seconds: float) -> None:
        """Wait until it is to stop, for so long at the most."""
        if self._stop.acquire(True, seconds):
            self._stop.release()

    def _hook(self, name: str) -> Callable[[], object]:
        """Return a hook of the queue's, which need not be a subclass of ours; without one, what does nothing."""
        hook: Callable[[], object] = getattr(self._queue, name, lambda: None)
        return hook

    def _abandon(self) -> None:
        """In a fork: release what the server and the queue have opened. The thread is not here."""
        self._server._abandon()  # noqa: SLF001 - a hook of this package's own
        self._try(None, self._hook("_abandon"))

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
        moments = [self._next(-1.0), self._again, *(moment for moment, _ in self._late.values())]
        moments += [moment for moment, _ in self._postponed.values() if moment > now]
        seconds = max(0.0, min(min(moments) - now, self._interval))
        if self._punctual:  # then it waits in parts, as a pause within a wait is not seen
            if min(moments) != self._goal:
                self._goal, self._part = min(moments), loop.wait_slice(min(moments) - now)
            seconds = min(seconds, self._part)
        self._take(seconds)
        return now if self._stopping else self._look()

    def _look(self) -> float:
        """Reap late workers. Returns the moment for which expired timers were looked up."""
        now, self._again = clock.now(), math.inf
        expired = self._expired(now)
        if expired:
            self._drain()  # if this process was late itself, releases may still be in the queue
            expired = self._expired(now)
            if expired:
                self._reap(expired, now)
        self._next(now)
        return now

    def _next(self, looked: float) -> float:
        """See `Agenda.next`."""
        with self._planning:
            return self._agenda.next(looked)

    def _drain(self) -> None:
        for _ in range(_PIPE_TURNS if self._punctual else _TURNS):
            if not self._try(0, self._queue.size):
                return
            self._take(0.0)

    def _take(self, timeout: float) -> None:
        size = self._try(0, self._queue.size)
        began = clock.now()
        self._working_since = math.inf if timeout else self._working_since
        came = self._try(None, self._queue.get, max(1, size), timeout) or ()
        now = clock.now()
        self._working_since = now if timeout else self._working_since
        if timeout:
            self._pauses.note(began, began + timeout, now)
        if now - began > loop.SLACK:
            self._waited = began, now
        requests: list[TimerRequest] = []
        shared = not self._punctual  # what came through a pipe was just made of bytes
        for request in filter(None, (received(each, shared=shared) for each in came)):
            taken = getattr(request, "_taken", None)
            if taken is not None and request.expiration_time >= 0 and self._punctual:
                request._deadline = request.expiration_time = (  # noqa: SLF001 - a field of this package's own
                    request.expiration_time + self._pauses.owed(taken, *self._waited)
                )
            if self._server._plans or self.plan(request, request.expiration_time):  # noqa: SLF001 - as above
                requests.append(self._server._given(request))  # noqa: SLF001 - as above
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
                moment = self._server._moment(timer)  # noqa: SLF001 - a hook of this package's own
                key = worker, timer.scope_id, moment
                known = key in before
                span = before[key][1] if known else self._agenda.span(timer.worker_id, timer.scope_id) or loop.LONG
                until = moment + self._pauses.lost(moment - span)
                if not self._punctual:  # `get` may be slow whenever it is called: that is a reason only once
                    until = before[key][0] if known else min(until, now + span)
                if known or until > now:
                    self._postponed[key] = until, span
                if until <= now:
                    due.setdefault(worker, []).append(timer)
        return due

    def _reap(self, expired: dict[Any, list[TimerRequest]], now: float) -> None:
        failed: set[Any] = self._try(set(), self._server._expire, expired)  # noqa: SLF001 - as above
        for worker in expired:
            _, delay = self._late.pop(worker, (0.0, min(_FIRST_RETRY, self._interval)))
            if worker in failed:
                self._late[worker] = now + delay, min(2 * delay, self._interval, _LAST_RETRY)
                logger().error("worker %s could not be reaped; the next attempt is in %g s", worker, delay)


class Complaints:
    """Logs warnings that a broken or hostile client can cause: ten of them in ten seconds."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._said = self._left_out = 0

    def say(self, message: str, *args: object) -> None:
        """Log a warning, or count it."""
        now = clock.now()
        if now - self._since >= _PERIOD:
            self.flush()
            self._since, self._said = now, 0
        if self._said < _WARNINGS:
            self._said += 1
            logger().warning(message, *args)
        else:
            self._left_out += 1

    def flush(self) -> None:
        """Log how many were left out."""
        if self._left_out:
            logger().warning("%d more warnings about timer requests were left out", self._left_out)
            self._left_out = 0


# --- forks
#
# In the child, the threads of servers do not exist, their locks may be held for ever, and their descriptors are shared
# with the parent: a byte that the child writes to a bell wakes the parent, a descriptor that it removes from an epoll
# is removed for the parent, and what it holds open hides the parent's end from clients.

_running: set[Watchdog] = set()


def _after_fork() -> None:
    for watchdog in list(_running):
        watchdog._abandon()  # noqa: SLF001 - a hook that is for this module alone
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
