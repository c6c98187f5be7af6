"""Asks processes for their stacks, and waits for them without polling.

Owns the wait for many, and what is told of them. It refuses to know why anyone wants to know. How one process is asked
is `ask`'s business, what a dump says `frames`'s, and how a worker makes one, `evidence`'s.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct

from phalanx._core import clock, linux
from phalanx._core.ask import Ask, Refused, Target
from phalanx._core.facts import facts
from phalanx._core.frames import Frame, Thread, group_equal, own, parse, sum_up, top
from phalanx._core.spy import Spy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "BOUND",
    "Collection",
    "Frame",
    "Target",
    "Thread",
    "facts",
    "group_equal",
    "own",
    "parse",
    "sum_up",
    "top",
    "write",
]

BOUND = 0.3
"""Seconds that anyone who is going to kill waits for stacks, at the most."""

_SOON, _LATER = 0.0003, 0.008  # seconds between two looks at a handler that is about to end


class Collection:
    """The stacks of several processes, asked for at once.

    >>> with Collection([]) as collection:
    ...     collection.begin()
    ...     collection.wait(BOUND), collection.finish()
    (True, {})

    ``begin`` asks; what follows is for a loop (`fileno` and `complete`) or for a thread that waits (`wait`). Not for
    several threads at once.
    """

    def __init__(self, targets: Iterable[Target]) -> None:
        self._asks = [Ask(target) for target in targets]
        self._waiting: list[Ask] = []
        self._again: set[Ask] = set()
        self._fds: dict[int, Callable[[], None]] = {}
        self._watched: dict[int, Ask] = {}
        self._epoll: select.epoll | None = None
        self._inotify = self._timer = -1
        self._delay = _SOON
        self._blind = False  # no inotify to be had: then the timer stands in
        self._result: dict[int, str] | None = None

    def begin(self) -> None:
        """Ask them all, in their order, which is that in which they begin to write. Raises OSError: no descriptor left.

        A process that would not survive the signal, or is stopped, is not sent it.
        """
        try:
            self._epoll = select.epoll(max(1, len(self._asks)))
            self._timer = _timerfd()
            self._add(self._timer, self._timed)
            try:
                self._inotify = linux.inotify()
                self._add(self._inotify, self._grown)
            except OSError:
                self._blind = True
            for ask in self._asks:
                self._ask(ask)
        except BaseException:
            self.close()
            raise
        if self._blind:
            self._look_again(self._waiting)

    def fileno(self) -> int:
        """A descriptor that is readable when `complete` has something to take. Valid until `finish` or `close`."""
        if self._epoll is None:
            raise ValueError("the collection is not open")
        return self._epoll.fileno()

    def complete(self) -> bool:
        """Take what is there, without waiting. Returns whether all that can come has come."""
        if self._epoll is None:
            return True
        while ready := self._epoll.poll(0):
            for fd, _events in ready:
                if fd in self._fds:
                    self._fds[fd]()
        return all(ask.done for ask in self._asks)

    def wait(self, seconds: float = BOUND) -> bool:
        """Wait until all is complete, for ``seconds`` at the most. Returns whether it is."""
        deadline = clock.now() + seconds
        while not self.complete():
            left = deadline - clock.now()
            if left <= 0 or self._epoll is None:
                return False
            poll = select.poll()
            poll.register(self._epoll.fileno(), select.POLLIN)
            poll.poll(left * 1000)
        return True

    def finish(self) -> dict[int, str]:
        """End the asking, complete or not.

        Of the descriptors only inotify's is left then, until `close` or the end of the collection: to close it takes
        the kernel up to 30 ms, which someone who is about to kill had better spend afterwards.

        Returns:
            Rank → its dump, and below it native frames where they were asked for. For one that has shown none: a line
            ``# no Python stack: `` and why, and `facts`. The same again when called again.
        """
        if self._result is None:
            if self._epoll is not None:
                self.complete()
                for ask in self._waiting:
                    if ask.waits and ask.look():
                        ask.look()
            self._result = {ask.target.rank: ask.result() for ask in self._asks}
        self._release()
        return self._result

    def close(self) -> None:
        """Give the descriptors back. What was asked may still be written. Idempotent."""
        self._release()
        inotify, self._inotify = self._inotify, -1
        if inotify >= 0:
            os.close(inotify)

    def __del__(self) -> None:
        if getattr(self, "_inotify", -1) >= 0:
            self.close()

    def _release(self) -> None:
        epoll, self._epoll = self._epoll, None
        for ask in self._asks:
            if ask.spy is not None:
                ask.spy.close()
            if ask.pidfd >= 0:
                os.close(ask.pidfd)
                ask.pidfd = -1
        timer, self._timer = self._timer, -1
        if timer >= 0:
            os.close(timer)
        self._fds.clear()  # they refer to us
        if epoll is not None:
            epoll.close()

    def __enter__(self) -> Collection:  # noqa: PYI034 - typing would be imported for it
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def _ask(self, ask: Ask) -> None:
        try:
            ask.open()
            if not self._blind:
                self._watched[linux.inotify_add(self._inotify, ask.path)] = ask
            self._waiting.append(ask)
            ask.ask()
            self._add(ask.pidfd, lambda: self._exited(ask))
        except Refused as refused:
            ask.why = str(refused)
        except OSError as error:
            ask.why = f"it could not be asked: {error.strerror or error}"
        if ask.why and ask.why != "it has exited":
            self._spy(ask)

    def _add(self, fd: int, callback: Callable[[], None]) -> None:
        assert self._epoll is not None
        self._epoll.register(fd, select.EPOLLIN)
        self._fds[fd] = callback

    def _forget(self, fd: int) -> None:
        if self._fds.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)

    def _grown(self) -> None:
        grown: set[Ask] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._inotify, 65536):
                offset = 0
                while offset < len(data):
                    watch, _events, _cookie, length = struct.unpack_from("iIII", data, offset)
                    offset += 16 + length
                    ask = self._watched.get(watch)
                    grown.update(self._waiting if ask is None else (ask,))  # -1: events were lost
        self._look(grown)

    def _timed(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._timer, 8)
        again, self._again = self._again, set()
        self._delay = min(2 * self._delay, _LATER)
        self._look(again)
        if self._blind:
            self._look_again(self._waiting)

    def _look(self, asks: Iterable[Ask]) -> None:
        self._look_again([ask for ask in asks if ask.waits and ask.look()])
        for ask in asks:
            if ask.text is not None and ask.spy is None:
                self._spy(ask)

    def _look_again(self, asks: Iterable[Ask]) -> None:
        soon = [ask for ask in asks if ask.waits]
        if soon:
            if not self._again:
                _set_timer(self._timer, self._delay)
            self._again.update(soon)

    def _exited(self, ask: Ask) -> None:
        self._forget(ask.pidfd)
        ask.exited()

    def _spy(self, ask: Ask) -> None:
        """Have py-spy look at a process that has done with our signal: it would hold up the handler."""
        if ask.target.native and ask.spy is None:
            ask.spy = Spy(ask.target.pid)
            if not ask.spy.done:
                spy = ask.spy

                def ended() -> None:
                    self._forget(spy.pidfd)
                    spy.end()

                self._add(spy.pidfd, ended)


def write(folder: str, text: str) -> str:
    """Write to ``stacks-1.txt`` in a folder, or to the next number that is free. Returns the path. Raises OSError."""
    number = 1
    while True:
        path = os.path.join(folder, f"stacks-{number}.txt")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            number += 1
            continue
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return path


def _timerfd() -> int:
    """A timer on CLOCK_MONOTONIC, as a descriptor (timerfd_create(2)); `os` has it since 3.13. Raises OSError."""
    fd = linux._libc("timerfd_create", 1, os.O_NONBLOCK | os.O_CLOEXEC)  # noqa: SLF001 - the one way to call the C library
    if fd < 0:
        raise OSError(24, "no descriptor left for a timer")
    return fd


def _set_timer(fd: int, seconds: float) -> None:
    whole, part = divmod(int(seconds * 1e9), 1_000_000_000)
    linux._libc("timerfd_settime", fd, 0, struct.pack("@4l", 0, 0, whole, part), None)  # noqa: SLF001 - as above
