"""Collects the stacks of many live processes at once, within a given time, and waits for them without polling.

Owns the order of the two ways to look at a process. One that is about to be killed, and sleeps in all of its threads,
writes them on a signal (`request`), within a millisecond. Every other one is read from outside (`py_spy`), which
nothing in it notices. Only where that is not to be had, or takes long, it is sent a signal as well: the one on which it
writes all threads, if it is about to be killed, and else the one on which it writes one. The text of a process tells
which it was. Knows nothing of why the stacks are wanted, nor of what a dump means (`dump`).
"""

from __future__ import annotations

import contextlib
import os
import struct

from phalanx._base import clock, linux
from phalanx._base.loop import Loop
from phalanx._stacks.dump import GONE
from phalanx._stacks.py_spy import PySpyQueue
from phalanx._stacks.request import BusyError, NotAskedError, StackRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Collection as AbstractCollection

    from phalanx._stacks.request import Target

BOUND = 0.3
"""Seconds that a caller who is going to kill waits for stacks, at the most."""

_SOON, _LATER = 0.0003, 0.008  # seconds between two looks at a handler that is about to return: the first, the longest
_EVENTS = 65536  # bytes that are read at a time

# Moments, as shares of the time that there is:
_OTHERWISE = 0.4  # a process that has not been seen in the one way is asked in the other as well
_UNPAUSED = 0.5  # one that cannot be paused, as a thread waits for a disk, is read without a pause
_NO_MORE = 0.8  # no py-spy is started any more
_GIVEN_UP = 0.85  # and those at work are killed, to be gone when the time is over
_LAST_WAIT = 0.05  # seconds that the end of a py-spy is waited for that was killed later still
_NAP = 0.002  # seconds between two looks at a process that runs, and is only asked while it sleeps


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
        self._requests = [StackRequest(target) for target in targets]
        self._seconds = seconds
        self._loop: Loop | None = None
        self._until = self._no_more = 0.0
        self._dumps: DumpWatch | None = None
        self._py_spies: PySpyQueue | None = None
        self._busy: set[StackRequest] = set()  # to be asked by signal, once they sleep
        self._result: dict[int, str] | None = None

    def begin(self) -> None:
        """Ask all processes, in their order. Raises OSError: no descriptor is left.

        A process that would not survive a signal, or is stopped, is not sent one.
        """
        now, seconds = clock.now(), self._seconds
        self._until, self._no_more = now + seconds, now + _NO_MORE * seconds
        loop = self._loop = Loop()
        try:
            self._dumps = DumpWatch(loop, self._requests, self._on_dump)
            self._py_spies = PySpyQueue(loop, self._no_more, self._read_native_frames, self._ask_unread)
            for request in self._requests:
                self._begin(request)
            loop.at(now + _OTHERWISE * seconds, self._ask_otherwise)
            loop.at(now + _UNPAUSED * seconds, self._py_spies.kill_pausing)
            loop.at(now + _GIVEN_UP * seconds, self._py_spies.give_up)
            self._py_spies.start_more()
        except BaseException:
            self.close()
            raise

    def wait(self) -> bool:
        """Wait until all stacks are complete, or the time is over. Returns whether they are."""
        loop = self._loop
        if loop is None:
            return True
        late = loop.at(self._until, lambda: None)
        try:
            while not self._is_complete():
                if clock.now() >= self._until:
                    return False
                loop.once()
            return True
        finally:
            late.cancel()

    def finish(self) -> dict[int, str]:
        """End the asking, complete or not.

        Of the descriptors only inotify's is left then, until `close` or the end of the collection: to close it takes
        the kernel up to 30 ms, which a caller that is about to kill had better spend afterwards.

        Returns:
            Key → its dump, and below it native frames where they were asked for. For one that has shown none: a line
            ``# no Python stack: `` and why, and `facts`. The same again when called again.
        """
        if self._result is None:
            for request in self._requests:
                if request.waits and request.poll():
                    request.poll()
            self._result = {request.target.key: request.result() for request in self._requests}
        self._release()
        return self._result

    def close(self) -> None:
        """Close all descriptors. A process that was asked may still write. Idempotent."""
        self._release()
        if self._dumps is not None:
            self._dumps.close()

    def __del__(self) -> None:
        if hasattr(self, "_result"):  # else the construction has failed
            self.close()

    def _release(self) -> None:
        loop, self._loop = self._loop, None
        if self._py_spies is not None:
            self._py_spies.close(_LAST_WAIT)
        self._busy.clear()
        for request in self._requests:
            request.close()
        if loop is not None:
            loop.close()

    def __enter__(self) -> Collection:  # noqa: PYI034 - typing would be imported for it
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def _is_complete(self) -> bool:
        waits = any(request.waits for request in self._requests) or any(not busy.is_seen for busy in self._busy)
        return not (waits or self._py_spies)

    def _begin(self, request: StackRequest) -> None:
        assert self._loop is not None
        assert self._py_spies is not None
        try:
            process = request.open()
            self._loop.watch(process.pidfd, lambda _events: self._on_exit(request))
        except NotAskedError as error:
            request.why = str(error)
        except OSError as error:
            request.why = f"it could not be asked: {error.strerror or error}"
        else:
            asleep = request.target.doomed and not request.shared and request.sleeps(all_threads=True)
            if not (asleep and self._signal(request, all_threads=True)):
                self._py_spies.add(request)

    def _on_exit(self, request: StackRequest) -> None:
        assert self._loop is not None
        assert request.process is not None
        self._loop.forget(request.process.pidfd)
        self._busy.discard(request)
        request.exited()
        request.why = GONE

    # --- by signal

    def _signal(self, request: StackRequest, *, all_threads: bool) -> bool:
        """Send a process its stack signal. Returns whether it has been sent."""
        assert self._dumps is not None
        try:
            self._dumps.add(request)
            request.send(all_threads=all_threads)
        except BusyError as error:
            request.why = str(error)
            self._ask_later(request)
        except NotAskedError as error:
            request.why = str(error)
        except OSError as error:
            request.why = f"it could not be asked: {error.strerror or error}"
        if request.waits:
            self._dumps.follow(request)
        return request.waits

    def _ask_later(self, request: StackRequest) -> None:
        assert self._loop is not None
        if not self._busy:
            self._loop.after(_NAP, self._ask_busy)
        self._busy.add(request)

    def _ask_busy(self) -> None:
        busy, self._busy = self._busy, set()
        for request in busy:
            self._ask_unread(request)

    def _on_dump(self, request: StackRequest) -> None:
        """A dump is complete. One that was cut lacks the main thread: then the process is read from outside as well."""
        assert self._py_spies is not None
        if request.is_cut and clock.now() < self._no_more:
            self._py_spies.add(request)
            self._py_spies.start_more()
        elif request.is_cut and request.number != request.signals[0]:
            self._signal(request, all_threads=False)
        else:
            self._read_native_frames(request)

    def _ask_unread(self, request: StackRequest) -> None:
        """Send a signal to a process that could not be read, if it has not been asked, nor seen."""
        if request.why != GONE and not request.waits and not request.is_seen:
            self._signal(request, all_threads=request.target.doomed and not request.is_cut)

    # --- from outside

    def _ask_otherwise(self) -> None:
        """Read those that have not answered a signal, which may be blocked in every thread; signal the others.

        A process that on a busy machine has not been read by now may not be in time: what it writes itself will do.
        """
        assert self._py_spies is not None
        unseen = [request for request in self._requests if not request.is_seen]
        for request in unseen:
            if request.waits:
                self._py_spies.add(request)
        for request in unseen:
            self._ask_unread(request)
        self._py_spies.start_more()

    def _read_native_frames(self, request: StackRequest) -> None:
        """Have frames of C code read, of a process whose handler has returned: py-spy would hold it up."""
        assert self._py_spies is not None
        if request.target.native and request.why != GONE:
            self._py_spies.add_native(request)


class DumpWatch:
    """Waits until processes that were sent a stack signal have written their dumps: polls their requests.

    Owns the inotify descriptor on their files, and a timer for what inotify does not report: that a handler has
    returned after its last write; and, where no inotify is to be had, that a file has grown.

    Args:
        loop: What waits.
        requests: All requests of the collection: each is polled when inotify has lost events.
        complete: Called with each request that has its dump.
    """

    def __init__(
        self, loop: Loop, requests: AbstractCollection[StackRequest], complete: Callable[[StackRequest], None]
    ) -> None:
        self._loop = loop
        self._requests = requests
        self._complete = complete
        self._by_watch: dict[int, StackRequest] = {}
        self._again: set[StackRequest] = set()
        self._delay = _SOON
        self._inotify = self._open_inotify()

    def add(self, request: StackRequest) -> None:
        """Watch the file of a request, before its signal is sent. Raises OSError."""
        if self._inotify >= 0 and request.path:
            self._by_watch[linux.inotify_add(self._inotify, request.path)] = request

    def follow(self, request: StackRequest) -> None:
        """Poll a request whose signal has been sent, where inotify does not report its writes."""
        if self._inotify < 0:
            self._poll_later([request])

    def _open_inotify(self) -> int:
        """Returns -1 when there is none to be had: then the timer alone serves."""
        fd = -1
        try:
            fd = linux.inotify()
            self._loop.watch(fd, self._on_events)
        except OSError:
            if fd >= 0:
                os.close(fd)
            return -1
        return fd

    def close(self) -> None:
        """Close the inotify descriptor, which takes the kernel up to 30 ms. Idempotent."""
        inotify, self._inotify = self._inotify, -1
        if inotify >= 0:
            os.close(inotify)

    def _on_events(self, _events: int) -> None:
        grown: set[StackRequest] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._inotify, _EVENTS):
                offset = 0
                while offset < len(data):
                    watch, _mask, _cookie, length = struct.unpack_from("iIII", data, offset)
                    offset += 16 + length
                    request = self._by_watch.get(watch)
                    grown.update(self._requests if request is None else (request,))  # -1: events were lost
        self._poll(grown)

    def _poll(self, requests: Iterable[StackRequest]) -> None:
        waiting = [request for request in requests if request.waits]
        self._poll_later([request for request in waiting if request.poll() or self._inotify < 0])
        for request in waiting:
            if not request.waits:
                self._complete(request)

    def _poll_later(self, requests: Iterable[StackRequest]) -> None:
        waiting = [request for request in requests if request.waits]
        if waiting:
            if not self._again:
                self._loop.after(self._delay, self._on_timer)
            self._again.update(waiting)

    def _on_timer(self) -> None:
        again, self._again = self._again, set()
        self._delay = min(2 * self._delay, _LATER)
        self._poll(again)
