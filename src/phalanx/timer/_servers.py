"""`LocalTimerServer` and `FileTimerServer`: their timers come through a `multiprocessing` queue, or a named pipe."""

# ruff: noqa: BLE001 - what a callback or the evidence raises must not end the server

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from phalanx._base import clock
from phalanx.timer import debug_info_logging
from phalanx.timer._file_client import FileTimerRequest
from phalanx.timer._processes import ExitedError, ProcessTimerServer, Victim, born_of, hang_of
from phalanx.timer._readers import FifoRequestQueue, MultiprocessingRequestQueue
from phalanx.timer._requests import TimerRequest
from phalanx.timer._server import received

_log = logging.getLogger("phalanx.timer")

_SIGKILL = 9


class LocalTimerServer(ProcessTimerServer):
    """Watches workers of this host that set their timers with `LocalTimerClient`, and kills those that are late.

    A worker is a process, by pid and start time: it must belong to the same user or descend from this process. Requests
    of others, of this process and of its ancestors are refused and logged. At expiry the worker's stacks are
    taken, its error file is written, and it is sent SIGKILL. When a worker exits its timers are dropped; when the
    server stops, all are.

    A subclass that overrides `_reap_worker` ends workers in its own way, and its ids may be anything: ranks, names. No
    request is refused there, and a timer is dropped at an exit only if its request came from that process for itself.

    Args:
        mp_queue: A `multiprocessing` queue (``Queue``, ``SimpleQueue``, or a manager's), for this server alone.
        max_interval: As for `TimerServer`; promptness does not depend on it.
        daemon: As for `TimerServer`.

    >>> import multiprocessing
    >>> from phalanx.timer import LocalTimerClient
    >>> queue = multiprocessing.get_context("spawn").Queue()
    >>> with LocalTimerServer(queue) as server:
    ...     client = LocalTimerClient(queue)  # in each worker
    """

    _trusts_senders = True  # unpickling runs the senders' code here, so they have our rights anyway

    def __init__(
        self,
        mp_queue: Any,
        max_interval: float = 60,
        daemon: bool = True,  # noqa: FBT001, FBT002 - the historical signature, by position
    ) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        timers = self.get_expired_timers(clock.now()).get(worker_id)
        if not timers or not (worker_id in self._victims or self._admit(timers[0])):
            return True
        victim = self._victims.get(worker_id)
        if victim is None:  # no descriptor was left to examine it; this is tried again
            return False
        hangs = [hang_of(worker_id, timer.scope_id, timer.expiration_time) for timer in timers]
        return victim.reap(_SIGKILL, hangs) or victim.has_exited()

    def _admit(self, request: TimerRequest) -> bool:
        if not isinstance(request.worker_id, int):
            return self._is_overridden() or self._refuse(request, TypeError("that is no process id"))
        return super()._admit(request)

    def _refuse(self, request: TimerRequest, reason: Exception) -> bool:
        if self._is_overridden():
            return born_of(request) is None or not isinstance(reason, ExitedError)
        return super()._refuse(request, reason)

    def _forget(self, victim: Victim) -> None:
        if not self._is_overridden():
            super()._forget(victim)
            return
        self._let_go(victim)
        # A worker id that is no pid may equal a pid by chance. Only our own client sends the start time.
        gone = [key for key, one in self._timers.items() if key[0] == victim.pid and born_of(one) == victim.start]
        for key in gone:
            self._plan(self._timers.pop(key), -1.0)

    def _is_overridden(self) -> bool:
        """Whether `_reap_worker` is a subclass's, or was set on this object."""
        return getattr(self._reap_worker, "__func__", None) is not LocalTimerServer._reap_worker


class FileTimerServer(ProcessTimerServer):
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
    >>> from phalanx.timer import FileTimerClient, expires
    >>> with tempfile.TemporaryDirectory() as folder, FileTimerServer(f"{folder}/timers"):
    ...     with expires(60, client=FileTimerClient(f"{folder}/timers")):  # in each worker
    ...         pass
    """

    _ticks = False

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
        self._file_path = os.path.abspath(file_path)
        super().__init__(FifoRequestQueue(self._file_path), max_interval, daemon)
        self._run_id = str(run_id)
        self._log_event = log_event
        self._due: dict[Any, list[TimerRequest]] = {}

    def start(self) -> None:
        """Open the pipe and start to watch. When this returns, clients can use it. Idempotent.

        Raises:
            OSError: The path is a symbolic link, no FIFO, another user's, open to others, or served by a live server;
                or the FIFO cannot be made. The message says which.
        """
        if self._watchdog is None:
            self._timers.clear()
            super().start()
            _log.info("timer server: started at %s", self._file_path)
            self._call_back("watchdog started", None)

    def stop(self) -> None:
        """Stop watching, close the pipe and remove it. Idempotent; afterwards `start` works again."""
        if self._watchdog is not None:
            super().stop()
            _log.info("timer server: stopped at %s", self._file_path)
            self._call_back("watchdog stopped", None)

    def run_once(self) -> None:
        """Serve every request that is in the pipe now, signal processes that are late, and then stop."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop(last_round=True)

    def get_last_progress_time(self) -> int:
        """Unix time (whole seconds) when the server was last seen to be able to work.

        That is now while it waits for something to do: it wakes when there is. An old time means that it hangs.
        """
        return int(clock.wall() - (0.0 if self._watchdog is None else self._watchdog.seconds_at_work()))

    def register_timers(self, timer_requests: Iterable[TimerRequest]) -> None:
        """Take over ``timer_requests`` in their order: note timers that were taken, forget those that were released.

        Their times are Unix time.
        """
        super().register_timers([one for each in timer_requests if (one := _dated(each)) is not None])

    def _given(self, request: Any) -> Any:
        if request.expiration_time >= 0:
            request.expiration_time = request._sent  # noqa: SLF001 - a field of this package's own
        return request

    def _moment(self, timer: Any) -> float:
        moment: float = timer._deadline  # noqa: SLF001 - a field of this package's own, set by `_dated`
        return moment

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget all timers of the processes in ``worker_pids``."""
        super().clear_timers(worker_pids)

    def _refuse(self, request: TimerRequest, reason: Exception) -> bool:
        if isinstance(reason, ExitedError):  # it set a timer and exited before the request was read
            _log.debug("timer pipe: %r: %s", request, reason)
            return False
        self._call_back("request.refused", request)
        return super()._refuse(request, reason)

    def _expire(self, expired: dict[Any, list[TimerRequest]]) -> set[Any]:
        unexamined = set()
        events: list[tuple[str, TimerRequest]] = []
        self._due = {}
        for pid, requests in expired.items():
            if pid not in self._victims:  # no descriptor was left to examine it
                if not self._admit(requests[0]):
                    self.clear_timers({pid})
                    continue
                if pid not in self._victims:
                    unexamined.add(pid)
                    continue
            self._due[pid] = requests
            for request in requests:
                self._timers.pop((pid, request.scope_id), None)
                events.append(("timer.expired", request))
            first = next((request for request in requests if _signal(request) > 0), requests[0])
            try:
                if self._reap_worker(pid, _signal(first)) and _signal(first) > 0:
                    self.clear_timers({pid})
                    events.append(("worker.reaped", first))
            except Exception:
                _log.exception("timer server: pid %d could not be reaped", pid)
        # Last: no callback may come between a deadline and its signal.
        for name, request in events:
            self._call_back(name, request)
        due, self._due = self._due, {}
        try:
            scopes = {pid: [request.scope_id for request in requests] for pid, requests in due.items()}
            debug_info_logging.log_debug_info_for_expired_timers(self._run_id, scopes)
        except Exception:
            _log.exception("timer server: the debug information of expired timers could not be logged")
        return unexamined

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:  # type: ignore[override]  # as the original's
        """Report where a process hangs, then send it ``signal`` (<= 0: none). Returns False if it had exited."""
        victim = self._victims.get(worker_pid)
        if victim is None:
            return False
        hangs = [hang_of(worker_pid, one.scope_id, self._moment(one)) for one in self._due[worker_pid]]
        return victim.reap(signal, hangs)

    def _call_back(self, name: str, request: Any) -> None:
        """Call the user's function, with the request as it was sent."""
        if self._log_event is not None:
            try:
                self._log_event(name, copy(request))
            except Exception:
                _log.exception("timer server: log_event(%r) raised", name)


def _signal(request: Any) -> int:
    number: int = request.signal
    return number


def _dated(request: object) -> Any:
    """Return a request with its moment on CLOCK_MONOTONIC in ``_deadline``; None: it is none, which is logged."""
    if not isinstance(request, FileTimerRequest):
        _log.error("not a timer request, skipped: %.200r", request)
        return None
    if request._deadline is not None and request.expiration_time == request._sent:  # noqa: SLF001 - fields of this package
        return request  # as the server's thread has dated it
    own = request if request.expiration_time == -1 else copy(request)  # a release stays as it is
    own._deadline = None  # noqa: SLF001 - a hook has changed its time, or made it
    dated: Any = received(own, shared=False)
    if dated is not None and dated.expiration_time >= 0:
        dated.expiration_time = request.expiration_time
    return dated
