"""`FileTimerServer`: watches timers that processes set through a named pipe.

Owns the thread that waits for requests and deadlines, the timers, and when one expires. The pipe is `_pipe`'s, its
lines are `_request_parser`'s; how a process is identified, reported and signalled is `_victim`'s.

The thread sleeps until the earliest deadline or the next request, whichever comes first; there is no tick.
"""

# ruff: noqa: SLF001 - what this package adds to the original's fields of a request is for the package alone
# ruff: noqa: BLE001 - what a callback or the evidence raises must not end the server

from __future__ import annotations

import fcntl
import logging
import math
import os

from phalanx._base import clock, unpatched
from phalanx._base.loop import Loop
from phalanx.timer import _forks, _pipe, debug_info_logging
from phalanx.timer._file_client import FileTimerClient, FileTimerRequest
from phalanx.timer._held import MOST, Held
from phalanx.timer._progress import Progress
from phalanx.timer._request_parser import RequestParser
from phalanx.timer._victim import ExitedError, RefusedError, UnknownError, Victim, hang_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable
    from typing import Self

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

_log = logging.getLogger("phalanx.timer")

_READ = 1 << 16  # bytes at a time: few enough that no deadline waits for long
_DRAIN = 16  # the most reads before timers expire: the pipe holds no more
_STOP_WITHIN = 10.0
_RETRY = 1.0  # seconds until a process is examined again that could not be


class FileTimerServer:
    """Watches the timers that processes of this host take through a named pipe, and signals those that are late.

    When a timer expires, the stacks of its process are logged (logger ``phalanx.timer``) and written where its
    supervisor finds them. Then the process is sent the signal of its request. Several scopes of one process expire
    together. Only processes of the same user or descendants are signalled; as root, only descendants; never this
    process or an ancestor. Requests for other processes are refused, and logged. Deadlines are on CLOCK_MONOTONIC.
    Damaged lines are logged and skipped.

    The pipe is a FIFO of mode 0600. One that a killed server left is taken over, with what is in it; the timers
    that the killed server knew are lost.

    Args:
        file_path: Where the pipe shall be.
        run_id: Names the run in the debug information. May be left out: a number in its place is ``max_interval``.
        max_interval: Seconds, more than 0. Kept for its name: the server wakes when there is something to do.
        daemon: Whether the interpreter may exit while the server runs.
        log_event: Called in the server's thread with a name and the request in question: ``timer.expired``,
            ``worker.reaped``, ``request.refused``; and with None: ``watchdog started``, ``watchdog stopped``. What it
            raises is logged.

    Raises:
        ValueError: ``max_interval`` is not more than 0.

    >>> import tempfile
    >>> from phalanx.timer import expires
    >>> with tempfile.TemporaryDirectory() as folder, FileTimerServer(f"{folder}/timers"):
    ...     with expires(60, client=FileTimerClient(f"{folder}/timers")):  # in each worker
    ...         pass
    """

    def __init__(
        self,
        file_path: str,
        run_id: str | float = "",
        max_interval: float = 10,
        daemon: bool = True,  # noqa: FBT001, FBT002 - the historical signature, by position
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        if not isinstance(run_id, str):
            if isinstance(max_interval, bool):  # the older signature: path, max_interval, daemon
                daemon = max_interval
            max_interval, run_id = run_id, ""
        if not max_interval > 0:
            raise ValueError(f"max_interval: expected more than 0 seconds, got {max_interval!r}")
        self._file_path = os.path.abspath(file_path)
        self._run_id = str(run_id)
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event
        self._timers = Held()
        self._request_count = 0
        self._thread: threading.Thread | None = None
        self._loop: Loop | None = None
        self._pipe = -1
        self._complaints = _pipe.Complaints()
        self._parser = RequestParser(self._complaints)
        self._victims: dict[int, Victim] = {}
        self._armed = math.inf  # the moment for which the loop has a deadline
        self._due: dict[int, list[FileTimerRequest]] = {}
        self._progress = Progress()

    def start(self) -> None:
        """Open the pipe and start to watch. When this returns, clients can use it. Idempotent.

        Raises:
            OSError: The path is a symbolic link, no FIFO, another user's, open to others, or served by a live server;
                or the FIFO cannot be made. The message says which.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        pipe, taken_over = _pipe.create(self._file_path)
        loop = Loop()
        try:
            self._complaints = _pipe.Complaints()
            self._parser = RequestParser(self._complaints, mid_line=taken_over)
            self._loop, self._pipe, self._armed = loop, pipe, math.inf
            self._timers.clear()
            loop.watch(pipe, self._on_requests)
            thread = unpatched.thread(target=self._serve, args=(loop,), name="phalanx-timer-file", daemon=self._daemon)
            self._progress.waits = True
            _forks.track(self)
            thread.start()
        except BaseException:
            self._clean_up(loop)
            raise
        self._thread = thread
        _log.info("timer server: started at %s", self._file_path)
        self._call_back("watchdog started", None)

    def stop(self) -> None:
        """Stop watching, close the pipe and remove it. Idempotent; afterwards `start` works again."""
        if self._leave(lambda loop: loop.stop()):
            self._timers.clear()
            _log.info("timer server: stopped at %s", self._file_path)
            self._call_back("watchdog stopped", None)

    def run_once(self) -> None:
        """Serve every request that is in the pipe now, signal processes that are late, and then stop."""
        self._leave(self._last_round)

    def get_last_progress_time(self) -> int:
        """Unix time (whole seconds) when the server was last seen to be able to work.

        That is now while it waits for something to do: it wakes when there is. An old time means that it hangs.
        """
        return int(clock.wall() - (0.0 if self._loop is None else self._progress.seconds_at_work()))

    def register_timers(self, timer_requests: Iterable[FileTimerRequest]) -> None:
        """Take over ``timer_requests`` in their order: note timers that were taken, forget those that were released."""
        known: set[int] = set()
        for request in timer_requests:
            self._request_count += 1
            key = (request.worker_pid, request.scope_id)
            if request.expiration_time < 0:
                victim = self._victims.get(request.worker_pid)
                # A release that came late is not for a process that has the pid now.
                if victim is None or request._born in (None, victim.start):
                    self._timers.pop(key, None)
            elif not self._timers.room(key):
                self._complaints.say("timer pipe: refused: its process has %d timers already (%r)", MOST, request)
            elif self._admit(request, known):
                if request._deadline is None:
                    request._deadline = clock.from_wall(request.expiration_time)
                request._received = clock.now()
                if self._loop is not None and request._taken is not None:
                    waited = self._loop.waited_from, self._loop.waited_until
                    request._deadline += self._loop.pauses.owed(request._taken, *waited)
                self._timers[key] = request
                self._arm(request._deadline)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget all timers of the processes in ``worker_pids``."""
        for key in [key for key in self._timers if key[0] in worker_pids]:
            del self._timers[key]

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Find the timers that are over at ``deadline`` (seconds, monotonic), by process, the first to expire first."""
        expired: dict[int, list[FileTimerRequest]] = {}
        for request in sorted(self._timers.values(), key=_deadline):
            if _deadline(request) > deadline:
                break
            expired.setdefault(request.worker_pid, []).append(request)
        return expired

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the thread

    def _serve(self, loop: Loop) -> None:
        try:
            loop.run()
        finally:
            self._clean_up(loop)

    def _on_requests(self, _events: int) -> None:
        with self._progress.working():
            self._receive()

    def _receive(self) -> bool:
        """Read the pipe once. Returns whether there was something."""
        try:
            data = os.read(self._pipe, _READ)
        except BlockingIOError:
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        self.register_timers(self._parser.feed(data))

    def _drain(self) -> None:
        """Read the pipe until it is empty: a release that was sent in time counts, however late this server is."""
        for _ in range(_DRAIN):
            if not self._receive():
                return

    def _admit(self, request: FileTimerRequest, known: set[int]) -> bool:
        """Whether timers of this process are accepted. It is held as a victim then, unless no descriptor is left.

        Args:
            request: The request.
            known: The pids that were found alive in this round.
        """
        pid = request.worker_pid
        victim = self._victims.get(pid)
        try:
            if victim is not None and pid not in known and victim.has_exited():
                self._forget(victim)
                victim = None
            if victim is None:
                victim = self._victims[pid] = Victim(pid)
                if self._loop is not None:
                    self._loop.watch(victim.fd, lambda _events, victim=victim: self._forget(victim))  # type: ignore[misc]  # a default argument has no type in a lambda
            known.add(pid)
            if request._born not in (None, victim.start):
                _log.debug("timer pipe: %r: its process has exited, and another has its pid", request)
                return False
        except ExitedError as exc:  # it set a timer and exited before the request was read
            _log.debug("timer pipe: %r: %s", request, exc)
            return False
        except RefusedError as exc:
            if isinstance(exc, UnknownError) and request._born is not None:  # later: its start time identifies it
                self._complaints.say("timer pipe: %s (%r)", exc, request)
                return True
            self._complaints.say("timer pipe: refused: %s (%r)", exc, request)
            self._call_back("request.refused", request)
            return False
        return True

    def _forget(self, victim: Victim) -> None:
        """Forget a process that has exited, and its timers."""
        with self._progress.working():
            if self._victims.get(victim.pid) is victim:
                del self._victims[victim.pid]
                self.clear_timers({victim.pid})
            if self._loop is not None:
                self._loop.forget(victim.fd)
            victim.close()

    def _arm(self, moment: float) -> None:
        """Wake at ``moment``. A release does not cancel that: to wake for nothing is cheaper."""
        if moment < self._armed and self._loop is not None:
            self._armed = moment
            self._loop.watch_for_pauses(moment)
            self._loop.at(moment, lambda: self._on_deadline(moment))

    def _on_deadline(self, moment: float) -> None:
        if moment != self._armed:  # an earlier deadline came in between, and has armed the next
            return
        with self._progress.working():
            self._armed = math.inf
            self._drain()
            self._expire()
            self._arm(min(map(self._moment, self._timers.values()), default=math.inf))

    def _expire(self) -> None:
        self._due = self._late(clock.now())
        events: list[tuple[str, FileTimerRequest]] = []
        for pid, requests in self._due.items():
            for request in requests:
                self._timers.pop((pid, request.scope_id), None)
                events.append(("timer.expired", request))
            first = next((request for request in requests if request.signal > 0), requests[0])
            try:
                if self._reap_worker(pid, first.signal) and first.signal > 0:
                    self.clear_timers({pid})
                    events.append(("worker.reaped", first))
            except Exception:
                _log.exception("timer server: pid %d could not be reaped", pid)
        # Last: no callback may come between a deadline and its signal.
        for name, request in events:
            self._call_back(name, request)
        due, self._due = self._due, {}
        if due:
            self._explain({pid: [request.scope_id for request in requests] for pid, requests in due.items()})

    def _late(self, now: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that have expired, without those that are postponed as this process could not run."""
        expired = self.get_expired_timers(now)
        late = {pid: [one for one in requests if self._moment(one) <= now] for pid, requests in expired.items()}
        return {pid: requests for pid, requests in late.items() if requests and self._can_be_signalled(pid, requests)}

    def _can_be_signalled(self, pid: int, requests: list[FileTimerRequest]) -> bool:
        """Whether a late process is held. One that could not be examined before is examined now, or `_RETRY` later."""
        if pid not in self._victims:
            if not self._admit(requests[0], set()):
                self.clear_timers({pid})
                return False
            for request in requests if pid not in self._victims else ():
                request._deadline = clock.now() + _RETRY
        return pid in self._victims

    def _moment(self, request: FileTimerRequest) -> float:
        """Return when a timer expires: at its deadline, postponed by the time in which this process could not run."""
        return _deadline(request) + (0.0 if self._loop is None else self._loop.pauses.lost(request._received))

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Report where a process hangs, then send it ``signal`` (<= 0: none). Returns False if it had exited."""
        victim = self._victims.get(worker_pid)
        if victim is None:
            return False
        hangs = [hang_of(worker_pid, one.scope_id, _deadline(one)) for one in self._due[worker_pid]]
        return victim.reap(signal, hangs)

    def _explain(self, scopes: dict[int, list[str]]) -> None:
        try:
            debug_info_logging.log_debug_info_for_expired_timers(self._run_id, scopes)
        except Exception:
            _log.exception("timer server: the debug information of expired timers could not be logged")

    def _call_back(self, name: str, request: FileTimerRequest | None) -> None:
        if self._log_event is not None:
            try:
                self._log_event(name, request)
            except Exception:
                _log.exception("timer server: log_event(%r) raised", name)

    # --- the end

    def _leave(self, how: Callable[[Loop], None]) -> bool:
        """Have the thread end by calling ``how`` in it, and wait for it. Returns False if there is no thread."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return False
        self._thread = None
        loop.call(lambda: how(loop))
        if not unpatched.is_current(thread):
            thread.join(_STOP_WITHIN)
            if thread.is_alive():
                _log.error("timer server: its thread has not ended within %g s, and is left behind", _STOP_WITHIN)
        return True

    def _last_round(self, loop: Loop) -> None:
        with self._progress.working():
            self._drain()
            self._expire()
            loop.stop()

    def _clean_up(self, loop: Loop) -> None:
        _forks.forget(self)
        self._loop = None
        pipe, self._pipe = self._pipe, -1
        if _pipe.is_at(self._file_path, os.fstat(pipe)):
            os.unlink(self._file_path)
        # Closing is not enough: a child that C code forked may hold the descriptor, and the lock with it.
        fcntl.flock(pipe, fcntl.LOCK_UN)
        os.close(pipe)
        for victim in self._victims.values():
            victim.close()
        self._victims.clear()
        loop.close()
        self._complaints.flush()

    def _abandon(self) -> None:
        """In a fork: close the pipe, whose lock must end with the parent, and the pidfds."""
        for fd in (self._pipe, *(victim.fd for victim in self._victims.values())):
            if fd >= 0:
                os.close(fd)
        if self._loop is not None:
            self._loop.close_in_fork()
        self._loop = self._thread = None
        self._pipe = -1
        self._victims = {}
        self._timers = Held()
        self._armed = math.inf


def _deadline(request: FileTimerRequest) -> float:
    deadline = request._deadline
    return math.inf if deadline is None else deadline
