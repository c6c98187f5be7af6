"""Reads many processes with py-spy, a few at a time, and again those whose memory changed while it was read.

Owns the order of these reads, and when no more are started. What is done about a process that cannot be read is the
caller's business.
"""

from __future__ import annotations

from functools import partial

from phalanx._base import clock, procfs
from phalanx._stacks.dump import GONE
from phalanx._stacks.proc_status import MOST_THREADS
from phalanx._stacks.py_spy import PySpy, close_all, parse_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from phalanx._base.loop import Loop
    from phalanx._stacks.request import StackRequest
else:
    from _collections import deque

_AT_ONCE = 16  # py-spies that run at a time: each takes some 10 ms of a CPU
_TRIES = 12  # times that a process is read whose memory changes so fast that py-spy cannot make sense of it,
_TRIES_AT_ONCE = 4  # the first of them follow each other at once, and the wait before each later one doubles;
_TRIES_OF_STRANGERS = 2  # and times that a process is read which has not offered its stacks: it may be no Python
_PAUSE = 0.002  # seconds of the first such wait


class PySpyQueue:
    """The processes that are to be read, and the py-spies at work.

    Args:
        loop: What waits for their ends.
        no_more: The moment (seconds, monotonic) from which on no py-spy is started, but for native frames.
        read: Called with each request that has been read.
        unreadable: Called with each request that cannot be read. Its `unread` is why.
    """

    def __init__(
        self,
        loop: Loop,
        no_more: float,
        read: Callable[[StackRequest], None],
        unreadable: Callable[[StackRequest], None],
    ) -> None:
        self.running: dict[PySpy, StackRequest] = {}
        """The py-spies at work."""
        self._loop = loop
        self._no_more = no_more
        self._read = read
        self._unreadable = unreadable
        self._waiting: deque[tuple[StackRequest, int]] = deque()  # with how often each has been tried
        self._paused: set[StackRequest] = set()  # to be read again, after a while
        self._native: deque[StackRequest] = deque()  # of which frames of C code are wanted: after all that
        self._start_planned = False

    def __bool__(self) -> bool:
        """Whether a process is being read, or is still to be."""
        return bool(self._waiting or self._paused or self.running or self._native)

    def add(self, request: StackRequest) -> None:
        """Have a process read, after those before it. It is started by `start_more`."""
        self._waiting.append((request, 0))

    def add_native(self, request: StackRequest) -> None:
        """Have frames of C code read, after all other reads."""
        self._native.append(request)
        self.start_more()

    def start_more(self) -> None:
        """Start one py-spy, if there is one to start, and the next one in the loop's next turn.

        Each start takes a while on a machine that is busy, and what is due meanwhile has its turn.
        """
        if not self._start_planned and (self._waiting or self._native):
            self._start_planned = True
            self._loop.after(0, self._start)

    def kill_pausing(self) -> None:
        """Kill those that wait for a thread in uninterruptible sleep to pause. A read that does not pause follows."""
        for spy, request in self.running.items():
            if spy.pauses and "D" in procfs.thread_states(request.target.pid, MOST_THREADS):
                spy.kill()

    def give_up(self) -> None:
        """Kill those at work, and start no others but for native frames, which have all of the time."""
        late, self._waiting = self._waiting, deque()
        self._paused.clear()
        for spy in self.running:
            if not spy.native:
                spy.kill()
        for request, _tried in late:
            self._unreadable(request)
        self.start_more()

    def close(self, seconds: float) -> None:
        """Kill and close all, and wait for at most ``seconds`` until they have ended. The loop is closed next."""
        close_all(self.running, seconds)
        self.running.clear()
        self._waiting.clear()
        self._paused.clear()
        self._native.clear()

    def _start(self) -> None:
        self._start_planned = False
        if len(self.running) < _AT_ONCE and (self._start_reading() or self._start_native()):
            self.start_more()

    def _start_reading(self) -> bool:
        """Take one from the queue. Returns whether there was one that could be taken."""
        if not self._waiting or clock.now() >= self._no_more:
            return False
        request, tried = self._waiting.popleft()
        if request.why == GONE or (request.is_seen and not request.alone):
            return True
        # Every second time without a pause: a process that waits for a disk, or is traced already, cannot be paused.
        # One that is stopped needs no pause.
        state = request.state()
        spy = PySpy(request.target.pid, pause=tried % 2 == 0 and not state)
        if spy.done and self.running:  # no descriptor is left, perhaps: then once another has ended
            self._waiting.appendleft((request, tried))
            return False
        if spy.done:
            request.unread = spy.why
            self._unreadable(request)
        else:
            self._watch(spy, request, partial(self._on_read, request, tried, state))
        return True

    def _start_native(self) -> bool:
        if not self._native or self._waiting:
            return False
        request = self._native.popleft()
        spy = PySpy(request.target.pid, native=True)
        if not spy.done:
            self._watch(spy, request, partial(_keep_native_frames, request))
        return True

    def _watch(self, spy: PySpy, request: StackRequest, then: Callable[[PySpy], None]) -> None:
        process = spy.process
        assert process is not None

        def ended(_events: int) -> None:
            self._loop.forget(process.pidfd)
            del self.running[spy]
            spy.end()
            then(spy)
            spy.close()
            self.start_more()

        self.running[spy] = request
        self._loop.watch(process.pidfd, ended)

    def _on_read(self, request: StackRequest, tried: int, state: str, spy: PySpy) -> None:
        text = parse_json(spy.text())
        if text:
            request.take_reading(f"# {state}\n{text}" if state else text)
            self._read(request)
            return
        request.unread = spy.why or "py-spy has found no stack"
        most = _TRIES if request.signals[0] else _TRIES_OF_STRANGERS
        again = tried + 1 < most and not request.unread.endswith("(ptrace)")
        if again and clock.now() < self._no_more:
            self._read_again(request, tried + 1)
        else:
            self._unreadable(request)

    def _read_again(self, request: StackRequest, tried: int) -> None:
        def add() -> None:
            if request in self._paused:  # else the time for it is over
                self._paused.discard(request)
                self._waiting.append((request, tried))
                self.start_more()

        self._paused.add(request)
        if tried < _TRIES_AT_ONCE:
            add()
        else:
            self._loop.after(_PAUSE * 2 ** (tried - _TRIES_AT_ONCE), add)


def _keep_native_frames(request: StackRequest, spy: PySpy) -> None:
    request.native_frames = spy.text()
