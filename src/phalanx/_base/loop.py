"""Waits for descriptors, deadlines and calls of other threads in one blocking call, epoll_wait(2). No polling."""

from __future__ import annotations

import select
from _thread import RLock

from phalanx._base import clock, unpatched
from phalanx._base.deadlines import Deadline, Deadlines
from phalanx._base.suspension import Pauses, wait_slice

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections import deque
    from collections.abc import Callable
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up
    from _collections import deque  # the C half: `collections` itself costs the keeper 1.5 ms

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
