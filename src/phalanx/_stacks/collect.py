"""Collects the stacks of many live processes at once, within a given time.

Owns the order of the two ways to look at a process. One that is about to be killed, and sleeps in all of its threads,
writes them on a signal (`request`), within a millisecond. Every other one is read from outside (`py_spy`), which
nothing in it notices. Only where that is not to be had, or takes long, it is sent a signal as well: the one on which it
writes all threads, if it is about to be killed, and else the one on which it writes one. The text of a process tells
which it was. At the end, the workers of a group that goes on. Knows nothing of why the stacks are wanted.
"""

from __future__ import annotations

import contextlib

from phalanx._base import clock
from phalanx._base.loop import Loop
from phalanx._base.process import Process
from phalanx._stacks import py_spy
from phalanx._stacks.dump import EXITED, GONE, Frame, Halted, is_starter, location
from phalanx._stacks.py_spy import PySpyQueue
from phalanx._stacks.request import BusyError, NotAskedError, StackRequest, Target, working_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

BOUND = 0.3
"""Seconds that a caller who is going to kill waits for stacks, at the most."""

_SOON, _LATER = 0.0003, 0.004  # seconds between two looks at dumps that are being written: the first, the longest

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
        self._polls, self._delay = False, _SOON  # whether dumps are polled, and the seconds until the next time
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
        """End the asking, complete or not, and close all descriptors.

        Returns:
            Key → its dump, and below it native frames where they were asked for. For one that has shown none: a line
            ``# no Python stack: `` and why, and `facts`. The same again when called again.
        """
        if self._result is None:
            for request in self._requests:
                if request.waits and request.poll():
                    request.poll()
            self._result = {request.target.key: request.result() for request in self._requests}
        self.close()
        return self._result

    def close(self) -> None:
        """Close all descriptors. A process that was asked may still write. Idempotent."""
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
            asleep = request.target.doomed and not request.shared and request.sleeps()
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
        try:
            request.send(all_threads=all_threads)
        except BusyError as error:
            request.why = str(error)
            self._ask_later(request)
        except NotAskedError as error:
            request.why = str(error)
        except OSError as error:
            request.why = f"it could not be asked: {error.strerror or error}"
        if request.waits:
            self._delay = _SOON
            self._poll_later()
        return request.waits

    def _poll_later(self) -> None:
        assert self._loop is not None
        if not self._polls:
            self._polls = True
            self._loop.after(self._delay, self._poll_dumps)

    def _poll_dumps(self) -> None:
        """Read what the processes have written that were sent a signal."""
        self._polls, self._delay = False, min(2 * self._delay, _LATER)
        for request in [request for request in self._requests if request.waits]:
            request.poll()
            if not request.waits:
                self._on_dump(request)
        if any(request.waits for request in self._requests):
            self._poll_later()

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


AT_ONCE = 128
"""Ranks that are looked at at a time, each of which takes a descriptor."""


def take(alive: Callable[[], Mapping[int, int]], error_files: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Return the stacks of the workers, by rank, as `Collection.finish` does; `EXITED`, if one has exited meanwhile.

    ``alive`` returns the pids of the workers that have not exited, by rank, as the group's supervisor knows them. It
    takes ``seconds`` at most. Raises OSError: no descriptor is left.
    """
    py_spy.preload()
    until = clock.now() + seconds
    ranks = sorted(alive())
    texts: dict[int, str] = {}
    for first in range(0, len(ranks), AT_ONCE):
        texts |= _look(ranks[first : first + AT_ONCE], alive, error_files, max(0.0, until - clock.now()))
    return texts


def locate(alive: Callable[[], Mapping[int, int]], error_files: Mapping[int, str]) -> dict[int, str]:
    """Return where these workers are, by rank, in words, as far as their stacks have a frame; at most `BOUND` later.

    See `take`. Nothing is raised: what has no stack has none here.
    """
    try:
        found = {rank: location(text) for rank, text in take(alive, error_files, BOUND).items()}
    except OSError:  # no descriptor is left
        return {}
    frames = {rank: where.frame if isinstance(where, Halted) else where for rank, where in found.items()}
    is_theirs = {rank: isinstance(frame, Frame) and not is_starter(frame) for rank, frame in frames.items()}
    return {rank: str(where) for rank, where in found.items() if is_theirs[rank]}


def _look(
    ranks: Sequence[int], alive: Callable[[], Mapping[int, int]], error_files: Mapping[int, str], seconds: float
) -> dict[int, str]:
    texts = dict.fromkeys(ranks, EXITED)
    with contextlib.ExitStack() as held:
        processes: dict[int, Process] = {}
        for rank, pid in alive().items():
            if rank in texts:
                with contextlib.suppress(ProcessLookupError):
                    processes[rank] = held.enter_context(Process(pid))
        there = alive()  # of the others, the pid may have been another process's when it was held
        targets = []
        for rank, process in processes.items():
            if rank in there:
                pid = working_process(process.pid)
                targets.append(Target(rank, pid, error_files[rank], process=process if pid == process.pid else None))
        collection = held.enter_context(Collection(targets, seconds))
        collection.begin()
        collection.wait()
        return texts | collection.finish()
