"""`LocalTimerServer`: watches timers that processes set through a `multiprocessing` queue."""

from __future__ import annotations

from phalanx._base import clock
from phalanx.timer._processes import ExitedError, ProcessTimerServer, Victim, born_of, hang_of
from phalanx.timer._readers import MultiprocessingRequestQueue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.timer._requests import TimerRequest

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
            del self._timers[key]

    def _is_overridden(self) -> bool:
        """Whether `_reap_worker` is a subclass's, or was set on this object."""
        return getattr(self._reap_worker, "__func__", None) is not LocalTimerServer._reap_worker
