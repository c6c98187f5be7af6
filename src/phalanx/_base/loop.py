"""Waits for descriptors, deadlines and calls of other threads in one blocking call, epoll_wait(2). No polling.

Owns the heap of deadlines, and the pauses: how long a process that watches timers was suspended, and by how much their
deadlines move for that. A container is paused, a virtual machine migrated, a process stopped. The watched processes may
have been stopped as well, and could not use that time: their deadlines move by it. A suspension shows as a wait that
ended too late; time that the watcher spends on its own work, however slowly, stops no other process and does not count.
A suspension within a wait cannot be seen, so a watcher of timers waits in slices, see `wait_slice`.
"""

from __future__ import annotations

import select
from _thread import RLock
from itertools import count

from phalanx._base import clock, unpatched

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections import deque
    from collections.abc import Callable
    from heapq import heapify, heappop, heappush
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up
    from _collections import deque  # the C half: `collections` itself costs the keeper 1.5 ms
    from _heapq import heapify, heappop, heappush  # the C half, which the keeper has sooner

_FEW = 64  # cancelled entries that are not worth a rebuilding of the heap


class Deadline:
    """A moment and the action that is due then."""

    __slots__ = ("_heap", "action", "at")

    def __init__(self, at: float, action: Callable[[], None], heap: Deadlines) -> None:
        self.at = at
        self.action: Callable[[], None] | None = action
        self._heap = heap

    @property
    def pending(self) -> bool:
        """Whether the action has neither been called nor cancelled."""
        return self.action is not None

    def cancel(self) -> None:
        """Drop the action. Idempotent, in constant time.

        The entry leaves the heap at its moment, or earlier when too many are cancelled.
        """
        if self.action is not None:
            self.action = None
            self._heap.note_cancelled()


class Deadlines:
    """Deadlines in order of their time; equal times in order of arrival.

    >>> due = Deadlines()
    >>> first = due.add(2.0, lambda: None)
    >>> due.next()
    2.0
    >>> first.cancel(); due.next() is None
    True
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._arrival = count()
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, action: Callable[[], None]) -> Deadline:
        """Have ``action`` called by `run` once the clock shows ``at`` (seconds, monotonic)."""
        deadline = Deadline(at, action, self)
        heappush(self._heap, (at, next(self._arrival), deadline))
        return deadline

    def next(self) -> float | None:
        """The time of the earliest live deadline, or None."""
        heap = self._heap
        while heap and heap[0][2].action is None:
            heappop(heap)
            self._cancelled -= 1
        return heap[0][0] if heap else None

    def run(self, now: float) -> None:
        """Call, in order, every action that is due at ``now``, once."""
        while (at := self.next()) is not None and at <= now:
            deadline = heappop(self._heap)[2]
            action = deadline.action
            deadline.action = None
            if action is not None:
                action()

    def note_cancelled(self) -> None:
        """Count a cancelled entry. Once they are most of the heap, remove them: heartbeats would fill it otherwise."""
        self._cancelled += 1
        if self._cancelled > _FEW and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapify(self._heap)
            self._cancelled = 0


SLACK = 0.05
"""Seconds by which a wait may end late on a busy machine."""

LONG = 0.5
"""Seconds by which a wait ends late only if the process was suspended."""

_PARTS = 8
_KEPT = 256  # pauses that are kept apart


def wait_slice(seconds: float) -> float:
    """Return how long a watcher waits at a time when its next deadline is ``seconds`` away: an eighth of that.

    That is the most that an unseen suspension can take from a timer. It is no polling: where no timer runs, nothing
    waits in slices.

    >>> wait_slice(60), wait_slice(0.1)
    (7.5, 0.05)
    """
    return max(SLACK, seconds / _PARTS)


class Pauses:
    """The times in which a watcher was suspended, or nothing was to expire. All moments are in seconds, monotonic.

    >>> pauses = Pauses()
    >>> pauses.note(10.0, 12.0, 12.01), pauses.note(20.0, 22.0, 22.5), pauses.note(30.0, 32.0, 40.0)
    (None, None, None)
    >>> pauses.lost(0.0), pauses.lost(22.25), pauses.lost(35.0), pauses.lost(50.0)
    (10.5, 10.25, 5.0, 0)
    """

    def __init__(self) -> None:
        self._all: list[tuple[float, float, float]] = []  # since when, until when, and how many seconds of that

    def note(self, began: float, planned: float, ended: float) -> None:
        """Note a wait that ``began``, was to end as ``planned`` at the latest, and has ``ended``.

        If it was late by more than `SLACK`, the delay counts: the machine may be busy. If it was late by more than
        `LONG`, the process was suspended at an unknown moment: the whole wait counts.
        """
        late = ended - planned
        if late > SLACK:
            since = began if late > LONG else planned
            self._all.append((since, ended, ended - since))
            self._merge(ended)

    def add(self, began: float, ended: float) -> None:
        """Add a time, which has just ``ended``, in which nothing was to expire. What is known of it counts once.

        >>> pauses = Pauses()
        >>> pauses.note(10.0, 12.0, 18.0), pauses.note(18.0, 19.0, 20.0), pauses.add(15.0, 30.0)
        (None, None, None)
        >>> pauses.lost(0.0)
        20.0
        """
        before = [one for one in self._all if one[0] < began]
        self._all = [(since, min(until, began), min(seconds, began - since)) for since, until, seconds in before]
        self._all.append((began, ended, ended - began))
        self._merge(ended)

    def _merge(self, now: float) -> None:
        if len(self._all) > _KEPT:
            # Merge the two neighbours that lie closest for their age: no pause is dropped, for timers that are old.
            pairs = list(zip(self._all, self._all[1:], strict=False))
            spans = [(second[1] - first[0]) / (now - first[0]) for first, second in pairs]
            where = spans.index(min(spans))
            first, second = pairs[where]
            self._all[where : where + 2] = [(first[0], second[1], first[2] + second[2])]

    def owed(self, since: float, began: float, ended: float) -> float:
        """Return by how many seconds a timer moves that was set at ``since`` and is first seen now.

        If it was set in the last wait (which ``began``, and has ``ended``), it should have ended that wait at once.
        """
        delay = ended - since if since >= began else 0.0
        return max(self.lost(since), delay if delay > SLACK else 0.0)

    def __bool__(self) -> bool:
        return bool(self._all)

    def lost(self, since: float) -> float:
        """Return for how many seconds after ``since`` the watcher was suspended, or nothing was to expire."""
        return sum(min(seconds, ended - max(began, since)) for began, ended, seconds in self._all if ended > since)


READ = select.EPOLLIN
WRITE = select.EPOLLOUT

_FOREVER = float("inf")
_LONGEST = 2e6  # seconds
_BRIEF = 0.002  # seconds that are waited for in one turn
_FD_SETSIZE = 1024  # the descriptors that select(2) can take


def wait_promptly(epoll: select.epoll, seconds: float, most: int = -1) -> list[tuple[int, int]]:
    """Wait until events are ready, or ``seconds`` have passed. Returns the events, ``most`` of them at most; -1: all.

    epoll_wait(2) rounds up to whole milliseconds. And like poll(2), it may end late by a thousandth of its timeout
    (five thousandths in a niced process), so that the kernel can join wake-ups: a minute's wait, by 60 ms. Each turn
    here leaves a fiftieth to the next one, and the last is select(2)'s, which counts in microseconds. Only the last:
    after a stop of the process (SIGSTOP), select(2) waits for what was left of its time, as poll(2) does in Python
    3.15, where it is ppoll(2); epoll_wait(2) ends then, see signal(7), and Python waits on until its moment.
    """
    if epoll.fileno() >= _FD_SETSIZE:
        return epoll.poll(seconds, most)
    due = clock.now() + seconds
    while seconds > _BRIEF:
        events = epoll.poll(int(seconds * 980) / 1000, most)
        if events:
            return events
        seconds = due - clock.now()
    if seconds > 0:
        unpatched.module("select").select((epoll,), (), (), seconds)
    return epoll.poll(0, most)


class Loop:
    """Calls back when a descriptor is ready, when a deadline is due, or when another thread asks for it.

    Attributes:
        waited_from, waited_until: When the last wait began, and ended (seconds, monotonic).
        pauses: The waits that have ended too late: the process was stopped, or the machine, or had no processor. What
            callbacks take of the time is not in them, nor waits without a deadline.
    """

    def __init__(self) -> None:
        self.waited_from, self.waited_until = _FOREVER, -_FOREVER  # there was no wait yet
        self.pauses = Pauses()
        self._attends, self._part = -_FOREVER, 0.0  # until when it waits in slices, and of how many seconds
        self._epoll = unpatched.module("select").epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._deadlines = Deadlines()
        self._calls: deque[Callable[[], None]] = deque()
        self._chores: deque[Callable[[], None]] = deque()
        self._stopped = False
        # Between a look at the descriptor and the write its number could become another file's. Reentrant, for a signal
        # handler that calls while its own thread does.
        self._gate = RLock()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.watch(self._wakeup, self._woken)

    def descriptors(self) -> list[int]:
        """The loop's own descriptors, for a forked child to close."""
        return [self._epoll.fileno(), self._wakeup]

    def watch(self, fd: int, callback: Callable[[int], None], events: int = READ) -> None:
        """Call ``callback(events)`` while ``fd`` is ready (level-triggered). Raises OSError (EPERM: not pollable)."""
        self._epoll.register(fd, events)
        self._callbacks[fd] = callback

    def change(self, fd: int, events: int) -> None:
        """Watch ``fd`` for other events."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; before it is closed. Unknown descriptors are ignored."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def at(self, moment: float, action: Callable[[], None]) -> Deadline:
        """Call ``action`` once at ``moment`` (seconds, monotonic)."""
        return self._deadlines.add(moment, action)

    def after(self, seconds: float, action: Callable[[], None]) -> Deadline:
        """Call ``action`` once, ``seconds`` from now."""
        return self._deadlines.add(clock.now() + seconds, action)

    def call(self, action: Callable[[], None]) -> None:
        """Have the loop's thread call ``action`` soon. Any thread may call this, and no other method."""
        with self._gate:
            if self._wakeup >= 0:  # else the loop is closed
                self._calls.append(action)
                os.eventfd_write(self._wakeup, 1)

    def watch_for_pauses(self, moment: float) -> None:
        """Wait in slices until ``moment``, so that a suspension of this process before that is noticed."""
        self._attends, self._part = moment, wait_slice(moment - clock.now())

    def when_idle(self, chore: Callable[[], None]) -> None:
        """Call ``chore`` once, in a round without events. Chores left when the loop ends are not called."""
        self._chores.append(chore)

    def stop(self) -> None:
        """Let `run` return after the current round."""
        self._stopped = True

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopped:
            self.once()

    def once(self) -> None:
        """Wait once, and call back for all that is ready, in the order in which the kernel reports it."""
        due = self._deadlines.next()
        # epoll_wait(2) counts milliseconds in an int: beyond 24 days it waits in several turns.
        began = clock.now()
        timeout = None if due is None else min(max(0.0, due - began), _LONGEST)
        if timeout and began < self._attends:
            timeout = min(timeout, self._part)
        if self._chores:
            timeout = 0
        until = began + timeout if timeout else _FOREVER  # a timeout of 0 is no wait
        # epoll's ready list is first come, first served; all of it is taken so that the order holds across calls.
        most = len(self._callbacks)
        ready = wait_promptly(self._epoll, timeout, most) if timeout else self._epoll.poll(timeout, most)
        self.waited_from, self.waited_until = began, clock.now()
        self.pauses.note(began, until, self.waited_until)
        for fd, events in ready:
            callback = self._callbacks.get(fd)
            if callback is not None:  # else forgotten by an earlier callback of this round
                callback(events)
                self._deadlines.run(clock.now())  # a deadline does not wait for thousands of descriptors
        self._deadlines.run(clock.now())
        if self._chores and not ready:
            self._chores.popleft()()

    def close(self) -> None:
        """Close the descriptors. Not while `run` is under way. Idempotent."""
        with self._gate:
            self.close_in_fork()

    def close_in_fork(self) -> None:
        """`close`, in a fork: a thread that does not exist here may have held the lock at the fork."""
        wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            self._epoll.close()
            os.close(wakeup)
            self._callbacks.clear()

    def _woken(self, _events: int) -> None:
        os.eventfd_read(self._wakeup)
        for _ in range(len(self._calls)):  # calls that these add wait until all else that is ready was served
            self._calls.popleft()()
