"""The one stream of events of a run: what emits does not wait, and every observer gets all of it, in order.

Owns a queue and a thread for each observer. `kinds` has the events.

- **Emitted where it happens.** What the keeper reports is emitted as it is received, in its order, with its moments;
  what an agent decides, by the agent. What is emitted before something else in one thread, or before what another
  thread was woken for, is delivered before it.
- **Nobody waits.** `EventStream.emit` appends to a deque for each observer, and wakes it. The values themselves are
  made on the observer's thread. A thousand exits of workers are a few messages of the keeper: so many appends.
- **Nothing is lost silently.** An observer that is slow gets all of it later. When `MOST` entries wait for one, those
  beyond are dropped; it gets an `EventsDropped` that counts them, and a line on stderr says so once.
- **An observer may raise.** The first exception is said on stderr. It gets all later events all the same.
- **A fork** of the process has no observers: what it emits goes nowhere.

The observers are the files of a run (``events.jsonl``, ``run.json``), the destinations of ``phalanx.events`` and the
handlers of ``phalanx.metrics``, and functions of the user's (``on_event``). Nobody else keeps account of a run.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from phalanx._base import clock, interrupts, stderr, unpatched
from phalanx._base.threads import Latch
from phalanx._events.kinds import Event, EventsDropped

Make = Callable[..., list[Event]]

MOST = 100_000
"""How many entries may wait for one observer."""

AT_A_TIME = 1000
"""How many entries are taken at once, at most."""

PATIENCE = 5.0
"""Seconds for which the end of a run, and the interpreter's exit, wait for the observers."""


class EventStream:
    """The events of one run. Any thread may call its methods, and signal handlers may.

    Args:
        is_held: Whether no thread is started, and nothing delivered, before `begin`: for who forks first.

    >>> from phalanx._events.kinds import GroupRunning
    >>> stream = EventStream()
    >>> stream.subscribe("example", lambda events: print([event.name for event in events]))
    >>> stream.emit(GroupRunning, 0, 10**9)
    >>> stream.close(5)
    ['group.running']
    []
    """

    USERS = "phalanx-observer"
    """The name of the threads that call functions of the user's."""

    def __init__(self, *, is_held: bool = False) -> None:
        self._owner = os.getpid()
        self._is_held = is_held
        self._lanes: tuple[_Lane, ...] = ()
        _open.add(self)

    def subscribe(self, name: str, take: Callable[[list[Event]], object]) -> None:
        """Have ``take`` called with the events from now on, some at a time, on a thread of its own of this name."""
        lane = _Lane(name, take)
        with interrupts.deferred():
            self._lanes = (*self._lanes, lane)
            if not self._is_held:
                lane.start()

    def begin(self) -> None:
        """Start to deliver, also what has been emitted before. Idempotent."""
        with interrupts.deferred():
            held, self._is_held = self._is_held, False
            for lane in self._lanes if held else ():
                lane.start()

    @property
    def is_heard(self) -> bool:
        """Whether there is an observer."""
        return bool(self._lanes)

    def emit(self, make: Make | type[Event], *args: Any, **fields: Any) -> None:
        """Emit an event: ``make`` is its class, with the arguments of that. Does not wait, and does not raise.

        Or a function that returns a list of events, and is called later, once for each observer.
        """
        lanes = self._lanes
        if lanes and os.getpid() == self._owner:
            entry = (clock.wall() - clock.now(), make, args, fields)
            for lane in lanes:
                lane.put(entry)

    def drain(self, seconds: float, names: tuple[str, ...] = ()) -> list[str]:
        """Wait until the observers have taken what was emitted before, for at most ``seconds`` in all.

        Returns the names of those that have not. An observer that calls this does not wait for itself. ``names``: those
        that are waited for; default: all.
        """
        if os.getpid() != self._owner:
            return []
        marks = [(lane, lane.mark()) for lane in self._lanes if not names or lane.name in names]
        until = clock.now() + seconds
        return [lane.name for lane, mark in marks if not mark.wait(max(0.0, until - clock.now()))]

    def end(self) -> None:
        """End each thread once it has nothing left to do. Returns at once."""
        if os.getpid() == self._owner:
            for lane in self._lanes:
                lane.end()

    def close(self, seconds: float = PATIENCE, *, but: tuple[str, ...] = ()) -> list[str]:
        """Drain it, and end the threads. Returns as `drain`. Idempotent. ``but``: those that are not waited for."""
        self.begin()
        names = tuple(lane.name for lane in self._lanes if lane.name not in but)
        try:
            late = self.drain(seconds, names) if names else []
        finally:
            self.end()
        _open.discard(self)
        for lane in self._lanes:
            if lane.name not in (*late, *but):
                lane.join()
        return late


class _Lane:
    """One observer's queue and thread."""

    def __init__(self, name: str, take: Callable[[list[Event]], object]) -> None:
        self.name = name
        self._take = take
        self._has_raised = self._has_dropped = self._over = self._has_ended = False
        self._dropped = 0  # since it was told
        self._queue: deque[Any] = deque()
        # Held while there is nothing to do: what releases it wakes the thread. It has no owner, so any thread can, also
        # in a signal handler that has interrupted another release.
        self._bell = allocate_lock()
        self._bell.acquire()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Where none can be started, what waits is delivered by those who wait for it."""
        thread = unpatched.thread(target=self._run, name=self.name)
        if self._queue:
            self._ring()
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def put(self, entry: object) -> None:
        """Add an entry. Does not wait."""
        if len(self._queue) >= MOST:
            self._dropped += 1
            return
        self._queue.append(entry)
        self._ring()

    def mark(self) -> Latch:
        """Return what opens when all that was put before has been taken."""
        latch = Latch()
        thread = self._thread
        if unpatched.is_current(thread):
            latch.open()
            return latch
        self._queue.append(latch)
        if thread is None or self._has_ended:
            self._empty()
        else:
            self._ring()
        return latch

    def end(self) -> None:
        """End the thread when the queue is empty."""
        self._over = True
        self._ring()

    def join(self) -> None:
        """Wait for the thread, which has nothing left to do."""
        if self._thread is not None and not unpatched.is_current(self._thread):
            self._thread.join(1)

    def _ring(self) -> None:
        if self._bell.locked():
            with suppress(RuntimeError):  # another thread has just done so
                self._bell.release()

    def _run(self) -> None:
        while True:
            self._bell.acquire()
            self._empty()
            if self._over:
                self._has_ended = True  # before the last look: what is put after it is for those who wait for it
                self._empty()
                return

    def _empty(self) -> None:
        while self._queue:
            batch: list[Any] = []
            with suppress(IndexError):  # the thread ends, and who waits for it takes the rest as well
                while self._queue and len(batch) < AT_A_TIME:
                    batch.append(self._queue.popleft())
            self._deliver(batch)

    def _deliver(self, batch: list[Any]) -> None:
        events: list[Event] = []
        for entry in batch:
            if isinstance(entry, Latch):
                self._call(events)
                events = []
                entry.open()
            else:
                offset, make, args, fields = entry
                try:
                    made = make(*args, **fields)
                    made = made if isinstance(made, list) else [made]
                    for event in made:
                        event.date(offset)
                    events += made
                except Exception as error:  # noqa: BLE001 - a mistake of ours: the observer gets the others all the same
                    self._report(error)
        dropped, self._dropped = self._dropped, 0
        if dropped:
            events.append(EventsDropped(-1, clock.now_ns(), count=dropped))
            if not self._has_dropped:
                self._has_dropped = True
                stderr.mention(f"phalanx: {self.name} is too slow: events were dropped, {dropped:,} so far")
        self._call(events)

    def _call(self, events: list[Event]) -> None:
        if not events:
            return
        try:
            self._take(events)
        except BaseException as error:  # noqa: BLE001 - this thread is there for the observer alone
            self._report(error)

    def _report(self, error: BaseException) -> None:
        if not self._has_raised:
            self._has_raised = True
            with suppress(Exception):  # a `__repr__` of the user's may raise, too
                stderr.mention(f"phalanx: {self.name}: an observer of events has raised: {error!r}")


_open: weakref.WeakSet[EventStream] = weakref.WeakSet()


@atexit.register
def _drain_all() -> None:
    """Have what was emitted last taken, of runs that nobody has closed."""
    until = clock.now() + PATIENCE
    for stream in list(_open):
        stream.drain(max(0.0, until - clock.now()))


class Listener:
    """An observer of an `EventStream` for a function of the user's. The first exception that it raises is logged.

    Args:
        function: Called with each event, see `Event.to_object`.
        logger: The logger's name.
        kinds: The kinds of events that it is called with; default: all.
    """

    def __init__(
        self, function: Callable[[dict[str, Any]], object], logger: str, kinds: tuple[type[Event], ...] = ()
    ) -> None:
        self._function = function
        self._logger = logger
        self._kinds = kinds
        self._has_raised = False

    def __call__(self, events: Iterable[Event]) -> None:
        """Call the function with each of these."""
        for event in events:
            if self._kinds and not isinstance(event, self._kinds):
                continue
            try:
                self._function(event.to_object())
            except BaseException:  # the thread is there for the function alone
                if not self._has_raised:
                    self._has_raised = True
                    from logging import getLogger

                    getLogger(self._logger).exception("on_event raised at %s", event.name)
