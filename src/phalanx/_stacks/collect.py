"""The stacks of live processes: collects them from many at once, and waits for them without polling.

Owns the wait for many, and the order of the two ways to look at a process. One that is about to be killed, and sleeps
in all of its threads, shows them on a signal (`ask`), within a millisecond. Every other one is read from outside
(`spy`), which nothing in it notices. Only where that is not to be had, or takes long, it is sent a signal as well: the
one that shows all threads, if it is about to be killed, and else the one that shows one. What is said of a process
tells which it was. Refuses to know why anyone wants to know. What a dump says is `frames`'s business, and how a worker
makes one, `evidence`'s.
"""

from __future__ import annotations

import contextlib
import os
import struct
from functools import partial

from phalanx._base import clock, linux
from phalanx._base.loop import Loop
from phalanx._stacks.dump import GONE, Frame, Thread, group_equal, own, parse, sum_up, top
from phalanx._stacks.proc_status import facts, states
from phalanx._stacks.py_spy import Spy, end, get_ready, read
from phalanx._stacks.request import Ask, Busy, Refused, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable

else:
    from _collections import deque

__all__ = [
    "BOUND",
    "Collection",
    "Frame",
    "Target",
    "Thread",
    "facts",
    "get_ready",
    "group_equal",
    "own",
    "parse",
    "speaker",
    "sum_up",
    "top",
    "write",
]

BOUND = 0.3
"""Seconds that anyone who is going to kill waits for stacks, at the most."""

KEPT = 20
"""How many files of stacks are kept in a folder, the newest ones."""

# Moments, as shares of the time that there is:
_OTHERWISE = 0.4  # who has not been seen in the one way is asked in the other as well
_UNPAUSED = 0.5  # who cannot be paused, as a thread waits for a disk, is read without
_NO_MORE = 0.8  # no py-spy is started any more
_GIVEN_UP = 0.85  # and those at work are ended, to be gone when the time is over
_LAST_WORD = 0.05  # seconds that it is waited for one which was ended later still
_AT_ONCE = 16  # so many are read at a time: each takes some 10 ms of a processor
_TRIES = 12  # times that a process is read whose memory changes so fast that py-spy cannot make sense of it,
_AT_ONCE_AGAIN = 4  # the first of them follow each other at once, and before each later one it is waited twice as long;
_STRANGERS = 2  # and times that a process is read which has not offered its stacks: it may be no Python
_DEEP = 4  # processes that may stand above the one that does the work
_NAP = 0.002  # seconds between two looks at who is running, and only asked while it sleeps
_SOON, _LATER = 0.0003, 0.008  # seconds between two looks at a handler that is about to end


class Collection:
    """The stacks of several processes, asked for at once.

    >>> with Collection([]) as collection:
    ...     collection.begin()
    ...     collection.wait(), collection.finish()
    (True, {})

    Args:
        targets: The processes.
        seconds: How long `wait` waits at the most.

    Everything happens in `begin` and `wait`, on the caller's thread. Not for several threads at once.
    """

    def __init__(self, targets: Iterable[Target], seconds: float = BOUND) -> None:
        self._asks = [Ask(target) for target in targets]
        self._seconds = seconds
        self._loop: Loop | None = None
        self._until = self._no_more = 0.0
        self._inotify = -1
        self._watched: dict[int, Ask] = {}
        self._again: set[Ask] = set()
        self._delay = _SOON
        self._blind = False  # no inotify to be had: then a timer stands in
        self._to_read: deque[tuple[Ask, int]] = deque()  # from outside; and how often that has been tried
        self._busy: set[Ask] = set()  # to be asked by signal, once they sleep
        self._failed: set[Ask] = set()  # to be read again, after a while
        self._natives: deque[Ask] = deque()  # of which frames of C code are wanted: after all that
        self._spies: dict[Spy, Ask] = {}
        self._starts = False  # whether one is about to be started
        self._result: dict[int, str] | None = None

    def begin(self) -> None:
        """Ask them all, in their order. Raises OSError: no descriptor left.

        A process that would not survive a signal, or is stopped, is not sent one.
        """
        now, seconds = clock.now(), self._seconds
        self._until, self._no_more = now + seconds, now + _NO_MORE * seconds
        loop = self._loop = Loop()
        try:
            try:
                self._inotify = linux.inotify()
                loop.watch(self._inotify, self._grown)
            except OSError:
                self._blind = True
            for ask in self._asks:
                self._begin(ask)
            loop.at(now + _OTHERWISE * seconds, self._ask_otherwise)
            loop.at(now + _UNPAUSED * seconds, self._pause_no_more)
            loop.at(now + _GIVEN_UP * seconds, self._give_up_reading)
            self._read_more()
        except BaseException:
            self.close()
            raise
        if self._blind:
            self._look_again(self._asks)

    def wait(self) -> bool:
        """Wait until all is complete, or the time is over. Returns whether it is."""
        loop = self._loop
        if loop is None:
            return True
        late = loop.at(self._until, lambda: None)
        try:
            while not self._complete():
                if clock.now() >= self._until:
                    return False
                loop.once()
            return True
        finally:
            late.cancel()

    def finish(self) -> dict[int, str]:
        """End the asking, complete or not.

        Of the descriptors only inotify's is left then, until `close` or the end of the collection: to close it takes
        the kernel up to 30 ms, which someone who is about to kill had better spend afterwards.

        Returns:
            Key → its dump, and below it native frames where they were asked for. For one that has shown none: a line
            ``# no Python stack: `` and why, and `facts`. The same again when called again.
        """
        if self._result is None:
            for ask in self._asks:
                if ask.waits and ask.look():
                    ask.look()
            self._result = {ask.target.key: ask.result() for ask in self._asks}
        self._release()
        return self._result

    def close(self) -> None:
        """Give the descriptors back. What was asked may still be written. Idempotent."""
        self._release()
        inotify, self._inotify = self._inotify, -1
        if inotify >= 0:
            os.close(inotify)

    def __del__(self) -> None:
        if hasattr(self, "_result"):  # else the construction has failed
            self.close()

    def _release(self) -> None:
        loop, self._loop = self._loop, None
        end(self._spies, _LAST_WORD)
        self._spies.clear()
        self._to_read.clear()
        self._natives.clear()
        self._busy.clear()
        self._failed.clear()
        for ask in self._asks:
            ask.close()
        if loop is not None:
            loop.close()

    def __enter__(self) -> Collection:  # noqa: PYI034 - typing would be imported for it
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def _complete(self) -> bool:
        waits = any(ask.waits for ask in self._asks) or any(not ask.is_seen for ask in self._busy)
        return not (waits or self._to_read or self._failed or self._spies or self._natives)

    def _begin(self, ask: Ask) -> None:
        try:
            ask.open()
            assert self._loop is not None
            self._loop.watch(ask.pidfd, lambda _events: self._exited(ask))
        except Refused as refused:
            ask.why = str(refused)
        except OSError as error:
            ask.why = f"it could not be asked: {error.strerror or error}"
        else:
            asleep = ask.target.doomed and not ask.shared and ask.sleeps(everyone=True)
            if not (asleep and self._signal(ask, everyone=True)):
                self._to_read.append((ask, 0))

    # --- by signal

    def _signal(self, ask: Ask, *, everyone: bool) -> bool:
        """Send it a signal. Returns whether that could be done."""
        try:
            if not self._blind and ask.path:
                self._watched[linux.inotify_add(self._inotify, ask.path)] = ask
            ask.ask(everyone=everyone)
        except Busy as busy:
            ask.why = str(busy)
            self._ask_later(ask)
        except Refused as refused:
            ask.why = str(refused)
        except OSError as error:
            ask.why = f"it could not be asked: {error.strerror or error}"
        if self._blind and ask.waits:
            self._look_again([ask])
        return ask.waits

    def _ask_later(self, ask: Ask) -> None:
        assert self._loop is not None
        if not self._busy:
            self._loop.after(_NAP, self._ask_the_busy)
        self._busy.add(ask)

    def _ask_the_busy(self) -> None:
        busy, self._busy = self._busy, set()
        for ask in busy:
            self._cannot_read(ask)

    def _grown(self, _events: int) -> None:
        grown: set[Ask] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._inotify, 65536):
                offset = 0
                while offset < len(data):
                    watch, _mask, _cookie, length = struct.unpack_from("iIII", data, offset)
                    offset += 16 + length
                    ask = self._watched.get(watch)
                    grown.update(self._asks if ask is None else (ask,))  # -1: events were lost
        self._look(grown)

    def _look(self, asks: Iterable[Ask]) -> None:
        waiting = [ask for ask in asks if ask.waits]
        self._look_again([ask for ask in waiting if ask.look() or self._blind])
        for ask in waiting:
            if not ask.waits:
                self._has_said(ask)

    def _look_again(self, asks: Iterable[Ask]) -> None:
        soon = [ask for ask in asks if ask.waits]
        if soon and self._loop is not None:
            if not self._again:
                self._loop.after(self._delay, self._timed)
            self._again.update(soon)

    def _timed(self) -> None:
        again, self._again = self._again, set()
        self._delay = min(2 * self._delay, _LATER)
        self._look(again)

    def _has_said(self, ask: Ask) -> None:
        """Its dump is complete. One that was cut lacks the main thread: then it is read from outside as well."""
        if ask.is_cut and clock.now() < self._no_more:
            self._to_read.append((ask, 0))
            self._read_more()
        elif ask.is_cut and ask.number != ask.numbers[0]:
            self._signal(ask, everyone=False)
        else:
            self._read_natively(ask)

    def _exited(self, ask: Ask) -> None:
        assert self._loop is not None
        self._loop.forget(ask.pidfd)
        self._busy.discard(ask)
        ask.exited()
        ask.why = GONE

    # --- from outside

    def _ask_otherwise(self) -> None:
        """Who has not answered a signal by now may have it blocked in every thread, or sleep too deeply.

        And on a machine that is busy, who has not been read by now may not be in time: what it says itself will do.
        """
        unseen = [ask for ask in self._asks if not ask.is_seen]
        self._to_read.extend((ask, 0) for ask in unseen if ask.waits)
        for ask in unseen:
            self._cannot_read(ask)
        self._read_more()

    def _pause_no_more(self) -> None:
        """End those that wait for a thread which cannot be paused. They are followed by one that needs no pause."""
        for spy, ask in self._spies.items():
            if spy.pauses and "D" in states(ask.target.pid):
                spy.kill()

    def _read_more(self) -> None:
        """Start one py-spy, if there is one to start, and the next one in the loop's next turn.

        Each start takes a while on a machine that is busy, and what is due meanwhile has its turn.
        """
        loop = self._loop
        if loop is not None and not self._starts and (self._to_read or self._natives):
            self._starts = True
            loop.after(0, self._start)

    def _start(self) -> None:
        self._starts = False
        if len(self._spies) < _AT_ONCE and (self._start_reading() or self._start_natively()):
            self._read_more()

    def _start_reading(self) -> bool:
        """Returns whether one of those to be read is done with, or being read."""
        if not self._to_read or clock.now() >= self._no_more:
            return False
        ask, tried = self._to_read.popleft()
        if ask.why == GONE or (ask.is_seen and not ask.alone):
            return True
        # Every second time without a pause, and who is stopped needs none: who waits for a disk cannot be paused, nor
        # who is traced already.
        state = ask.state()
        spy = Spy(ask.target.pid, pause=tried % 2 == 0 and not state)
        if spy.done and self._spies:  # no descriptor is left, say: then once another has ended
            self._to_read.appendleft((ask, tried))
            return False
        if spy.done:
            ask.unread = spy.why
            self._cannot_read(ask)
        else:
            self._watch(spy, ask, partial(self._has_read, ask, tried, state))
        return True

    def _start_natively(self) -> bool:
        if not self._natives or self._to_read:
            return False
        ask = self._natives.popleft()
        spy = Spy(ask.target.pid, native=True)
        if not spy.done:
            self._watch(spy, ask, partial(_has_native_frames, ask))
        return True

    def _watch(self, spy: Spy, ask: Ask, then: Callable[[Spy], None]) -> None:
        loop = self._loop
        assert loop is not None

        def ended(_events: int) -> None:
            loop.forget(spy.pidfd)
            del self._spies[spy]
            spy.end()
            then(spy)
            spy.close()
            self._read_more()

        self._spies[spy] = ask
        loop.watch(spy.pidfd, ended)

    def _has_read(self, ask: Ask, tried: int, state: str, spy: Spy) -> None:
        text = read(spy.text())
        if text:
            ask.has_been_read(f"# {state}\n{text}" if state else text)
            self._read_natively(ask)
            return
        ask.unread = spy.why or "py-spy has found no stack"
        again = tried + 1 < (_TRIES if ask.numbers[0] else _STRANGERS) and not ask.unread.endswith("(ptrace)")
        if again and clock.now() < self._no_more:
            self._read_again(ask, tried + 1)
        else:
            self._cannot_read(ask)

    def _read_again(self, ask: Ask, tried: int) -> None:
        def read_it() -> None:
            if ask in self._failed:  # else the time for it is over
                self._failed.discard(ask)
                self._to_read.append((ask, tried))
                self._read_more()

        self._failed.add(ask)
        if tried < _AT_ONCE_AGAIN:
            read_it()
        else:
            assert self._loop is not None
            self._loop.after(_NAP * 2 ** (tried - _AT_ONCE_AGAIN), read_it)

    def _give_up_reading(self) -> None:
        """The time for it is over. Native frames are not asked for before the rest is done, and have all of it."""
        late, self._to_read = self._to_read, deque()
        self._failed.clear()
        for spy in self._spies:
            if not spy.native:
                spy.kill()
        for ask, _tried in late:
            self._cannot_read(ask)
        self._read_more()

    def _cannot_read(self, ask: Ask) -> None:
        """Ask it by signal, if it has not been, nor seen."""
        if ask.why != GONE and not ask.waits and not ask.is_seen:
            self._signal(ask, everyone=ask.target.doomed and not ask.is_cut)

    def _read_natively(self, ask: Ask) -> None:
        """Have frames of C code read, of a process that has done with our signal: py-spy would hold up the handler."""
        if ask.target.native and ask.why != GONE:
            self._natives.append(ask)
            self._read_more()


def speaker(pid: int) -> int:
    """The process whose stacks tell of a worker: itself, or the one below it, where it only waits for that one.

    That is a program which is no Python and has a single child: ``sh run.sh``, ``numactl``, ``env``. Not a child of
    another user (``sudo``). Never raises.
    """
    for _ in range(_DEEP):
        try:
            if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                break
            below = linux.children(pid)
        except OSError:
            break
        if len(below) != 1 or not _have_one_owner(pid, below[0]):
            break
        (pid,) = below
    return pid


def _have_one_owner(*pids: int) -> bool:
    try:
        return len({os.stat(f"/proc/{pid}").st_uid for pid in pids}) == 1
    except OSError:
        return False


def _has_native_frames(ask: Ask, spy: Spy) -> None:
    ask.extra = spy.text()


def write(folder: str, text: str) -> str:
    """Write to ``stacks-<n>.txt`` in a folder, n being one more than the highest there. Returns the path.

    Of such files the newest `KEPT` are kept. Raises OSError.
    """
    numbers = sorted(int(name[7:-4]) for name in os.listdir(folder) if _is_ours(name))
    number = numbers[-1] + 1 if numbers else 1
    path = os.path.join(folder, f"stacks-{number}.txt")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    for old in numbers[: len(numbers) + 1 - KEPT] if len(numbers) >= KEPT else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, f"stacks-{old}.txt"))
    return path


def _is_ours(name: str) -> bool:
    return name.startswith("stacks-") and name.endswith(".txt") and name[7:-4].isdecimal() and name.isascii()
