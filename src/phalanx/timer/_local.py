"""`LocalTimerServer` and `LocalTimerClient`: timers through a `multiprocessing` queue.

Owns which timers there are. How requests are sent is `_mp_queue`'s; which process may be killed, and how, `_victim`'s.
"""

from __future__ import annotations

import math
import os

from phalanx._base import clock
from phalanx.timer._mp_queue import MultiprocessingRequestQueue, Outbox
from phalanx.timer._requests import TimerClient, TimerRequest, shortened
from phalanx.timer._server import TimerServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.timer._victim import Victim

_SIGKILL = 9
_LONGEST_SCOPE = 900  # characters; with four bytes each a request fits into one write
_REMEMBERED = 1000  # refused pids


class LocalTimerClient(TimerClient):
    """Sets timers at the `LocalTimerServer` at the other end of a queue. For any thread, and after a fork.

    A request is one write to the queue's pipe. If the server reads nothing and the pipe is full, the
    worker waits for ``patience``, and then gets an error.

    Args:
        mp_queue: The server's queue, handed to the worker as an argument.
        patience: Seconds.

    Raises:
        TimeoutError: From `acquire` and `release`: the queue was full for ``patience``.
    """

    def __init__(self, mp_queue: Any, *, patience: float = 10.0) -> None:
        self._mp_queue = mp_queue
        self._patience = patience
        self._outbox = Outbox(mp_queue, patience)
        self._me = 0, 0  # pid, start time

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_outbox", "_me")}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a subclass, too: what it has beside goes along
        self.__dict__.update(state)
        self._outbox = Outbox(self._mp_queue, self._patience)
        self._me = 0, 0

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`. A negative time releases."""
        if expiration_time < 0:
            self.release(scope_id)
        else:
            self._send(scope_id, expiration_time, clock.from_wall(expiration_time))

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`."""
        self._send(scope_id, -1, None)

    def _send(self, scope: str, expiration: float, deadline: float | None) -> None:
        pid = os.getpid()
        if self._me[0] != pid:
            from phalanx._base.procfs import Stat

            self._me = pid, Stat(pid).start
        if len(scope) > _LONGEST_SCOPE:
            scope = shortened(scope)
        request = TimerRequest(pid, scope, expiration)
        request._deadline = deadline  # noqa: SLF001 - what only our own clients know
        request._born = self._me[1]  # noqa: SLF001 - as above
        request._taken = clock.now()  # noqa: SLF001 - as above
        self._outbox.send(request)


class LocalTimerServer(TimerServer):
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
    >>> queue = multiprocessing.get_context("spawn").Queue()
    >>> with LocalTimerServer(queue) as server:
    ...     client = LocalTimerClient(queue)  # in each worker
    """

    def __init__(
        self,
        mp_queue: Any,
        max_interval: float = 60,
        daemon: bool = True,  # noqa: FBT001, FBT002 - the historical signature, by position
    ) -> None:
        self._requests = MultiprocessingRequestQueue(mp_queue)
        super().__init__(self._requests, max_interval, daemon)
        self._timers: dict[tuple[int, str], TimerRequest] = {}
        self._soonest = math.inf  # no timer expires earlier
        self._victims: dict[int, Victim] = {}
        self._refused: set[Any] = set()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """See `TimerServer`. Requests for processes that must not be killed are refused."""
        self._drop_exited()
        for request in timer_requests:
            key = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            elif self._known(request):
                self._timers[key] = request
                self._soonest = min(self._soonest, request.expiration_time)

    def clear_timers(self, worker_ids: set[int]) -> None:
        """See `TimerServer`."""
        self._timers = {key: request for key, request in self._timers.items() if key[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[int, list[TimerRequest]]:
        """See `TimerServer`. Within a worker the earliest stands first."""
        expired: dict[int, list[TimerRequest]] = {}
        if deadline < self._soonest:
            return expired
        for request in sorted(self._timers.values(), key=_expiration):
            if request.expiration_time > deadline:
                break
            expired.setdefault(request.worker_id, []).append(request)
        self._soonest = min(map(_expiration, self._timers.values()), default=math.inf)
        return expired

    def start(self) -> None:
        """See `TimerServer.start`."""
        from importlib import import_module

        for name in ("phalanx.timer._victim", "phalanx._stacks.collect", "phalanx.timer.debug_info_logging"):
            import_module(name)  # now: at the first expiry it would delay the kill by 7 ms
        super().start()

    def stop(self) -> None:
        """See `TimerServer.stop`; at once."""
        super().stop()
        self._timers.clear()
        for pid in list(self._victims):
            self._forget(pid)

    def _abandon(self) -> None:
        super()._abandon()
        for victim in self._victims.values():
            os.close(victim.fd)
        self._victims = {}
        self._timers = {}

    def _reap_worker(self, worker_id: int) -> bool:
        from phalanx.timer._victim import hang_of

        now = clock.now()
        timers = self.get_expired_timers(now).get(worker_id)
        if not timers or not (worker_id in self._victims or self._known(timers[0])):
            return True
        victim = self._victims.get(worker_id)
        if victim is None:  # no descriptor was left to examine it; this is tried again
            return False
        hangs = [hang_of(worker_id, timer.scope_id, timer.expiration_time) for timer in timers]
        return victim.reap(_SIGKILL, hangs) or victim.has_exited()

    def _known(self, request: TimerRequest) -> bool:
        """Whether the worker of a request may be ended. From now on its process is watched, if it could be opened."""
        from phalanx.timer._victim import ExitedError, RefusedError, UnknownError, Victim

        pid, born = request.worker_id, _born(request)
        if not isinstance(pid, int):
            return self._is_overridden() or self._refuse(pid, TypeError("that is no process id"))
        victim = self._victims.get(pid)
        if victim is not None and not victim.has_exited():
            return born is None or born == victim.start
        self._forget(pid)
        try:
            # Unpickling runs the senders' code here, so they have our rights anyway.
            victim = Victim(pid, senders=True)
        except RefusedError as reason:
            if self._is_overridden():
                return born is None or not isinstance(reason, ExitedError)
            # One that could not be examined is examined later, if its start time identifies it.
            return (isinstance(reason, UnknownError) and born is not None) or self._refuse(pid, reason)
        if born is not None and born != victim.start:  # it has exited, and another process has its pid
            victim.close()
            return False
        for other in [other for other, known in self._victims.items() if known.has_exited()]:
            self._forget(other)
        self._victims[pid] = victim
        self._requests.watch(victim.fd)
        return True

    def _is_overridden(self) -> bool:
        """Whether `_reap_worker` is a subclass's, or was set on this object."""
        return getattr(self._reap_worker, "__func__", None) is not LocalTimerServer._reap_worker

    def _refuse(self, pid: Any, reason: Exception) -> bool:
        if pid not in self._refused:  # log it once: it may send many
            from phalanx.timer.debug_info_logging import logger

            # The text alone: a log record may be kept, and an exception keeps its frames with all their variables.
            logger().warning("a timer of process %r is refused: %s", pid, str(reason))
            if len(self._refused) >= _REMEMBERED:
                self._refused.clear()
            self._refused.add(pid)
        return False

    def _drop_exited(self) -> None:
        exited = set(self._requests.readable())
        for pid in [pid for pid, victim in self._victims.items() if victim.fd in exited]:
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        victim = self._victims.pop(pid, None)
        if victim is not None:
            self._requests.forget(victim.fd)
            victim.close()
            if not self._is_overridden():
                self.clear_timers({pid})
                return
            # A worker id that is no pid may equal a pid by chance. Only our own client sends the start time.
            gone = [key for key, request in self._timers.items() if key[0] == pid and _born(request) == victim.start]
            for key in gone:
                del self._timers[key]


def _born(request: TimerRequest) -> int | None:
    """Return the start time of the process that sent a request; None if it is not in the request."""
    born: int | None = getattr(request, "_born", None)
    return born


def _expiration(request: TimerRequest) -> float:
    return request.expiration_time
