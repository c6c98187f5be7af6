"""Functions that the tests of timers run as workers, in a module that their processes import."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from phalanx import timer
from phalanx.timer import LocalTimerClient, TimerRequest
from phalanx.timer._readers import MultiprocessingRequestQueue
from tests.support.forks import start_fork
from tests.support.helpers import pass_gate, tell


def trainer_func(mp_queue: Any, address: str, after: float) -> None:
    """The example of the original's documentation, with a child that must not survive it."""
    timer.configure(LocalTimerClient(mp_queue))
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    tell(address, str(os.getpid()))
    tell(address, str(child.pid))
    with timer.expires(after=after, scope="forward pass"):
        threading.Event().wait()


def hang(client: Any) -> None:
    with timer.expires(0.2, "a hang", client):
        signal.pause()


def fork_and_hang(client: Any, address: str) -> None:
    """Fork while other threads take timers from a client; say how each child ended, whose thread hangs."""
    with timer.expires(60, "around", client):
        for _ in range(3):
            pid = _fork_while_others_take(client)
            if not pid:
                try:
                    hanging = threading.Thread(target=_hang, args=(client,))
                    hanging.start()
                    with timer.expires(60, "the child's", client):
                        hanging.join()
                finally:
                    os._exit(70)
            tell(address, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    tell(address, "well")


def _fork_while_others_take(client: Any) -> int:
    """Fork as two threads take timer after timer, and let the parent's threads end then."""
    under_way, stopping = threading.Semaphore(0), threading.Event()

    def take() -> None:
        while not stopping.is_set():
            with timer.expires(60, "the parent's", client):
                under_way.release()

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        under_way.acquire()
    if pid := os.fork():
        stopping.set()
        for thread in threads:
            thread.join()
    return pid


def _hang(client: Any) -> None:
    with timer.expires(0.2, "the child's", client):
        threading.Event().wait()


def wait_asleep(pid: int) -> None:
    """Return when every thread of a process waits for something: a server that has done what it was told of."""
    while _states(pid) != {"S"}:
        os.sched_yield()


def stop(pid: int) -> None:
    """Stop a process, and return when every thread of it has stopped: until then one may take what comes."""
    os.kill(pid, signal.SIGSTOP)
    while _states(pid) != {"T"}:
        os.sched_yield()


def _states(pid: int) -> set[str]:
    found = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat") as file:
            found.add(file.read().rpartition(")")[2].split()[0])
    return found


def let_pass(moment: float) -> None:
    """Return at a moment on the monotonic clock: the time for which others are stopped."""
    threading.Event().wait(max(0.0, moment - time.monotonic()))


class Named(timer.TimerServer):
    """A server of one's own, whose workers are names, as people write it. It says who is reaped."""

    def __init__(self, queue: Any, address: str) -> None:
        super().__init__(MultiprocessingRequestQueue(queue), max_interval=60)
        self._address = address
        self._timers: dict[tuple[str, str], TimerRequest] = {}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            self._timers[request.worker_id, request.scope_id] = request
            tell(self._address, f"{request.worker_id} {request.expiration_time >= 0}")
        self._timers = {key: request for key, request in self._timers.items() if request.expiration_time >= 0}

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self._timers = {key: request for key, request in self._timers.items() if key[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        expired: dict[Any, list[TimerRequest]] = {}
        for request in self._timers.values():
            if request.expiration_time <= deadline:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _reap_worker(self, worker_id: Any) -> bool:
        tell(self._address, f"{worker_id} reaped")
        return True


class Telling(timer.FileTimerServer):
    """Says which requests it has taken."""

    address = ""

    def register_timers(self, timer_requests: Iterable[TimerRequest]) -> None:
        requests = list(timer_requests)
        super().register_timers(requests)
        for request in requests:
            tell(self.address, f"{request.worker_id} {request.expiration_time >= 0}")


def serve(kind: str, where: Any, address: str, gate: str) -> None:
    """Run a server until the gate opens; say first which two workers it has."""
    with contextlib.ExitStack() as stack:
        server: Any
        if kind == "named":
            server = Named(where, address)
            workers: list[Any] = ["prompt", "late"]
        else:
            server = Telling(where)
            server.address = address
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            processes = [stack.enter_context(subprocess.Popen(["cat"], **pipes)) for _ in range(2)]  # type: ignore[call-overload]  # as it takes them
            workers = [process.pid for process in processes]
            for process in processes:
                stack.callback(process.kill)
        stack.enter_context(server)
        for worker in workers:
            tell(address, str(worker))
        tell(address, "up")
        pass_gate(gate)


def serve_itself(where: str, address: str, gate: str) -> None:
    """Run a server of a fork, which takes a timer when the gate opens, and hangs; until it is killed."""

    def take_a_timer_and_hang() -> None:
        client = timer.FileTimerClient(where)
        pass_gate(gate)
        client.acquire("s", time.time() + 1)
        tell(address, "taken")
        signal.pause()

    pid = start_fork(take_a_timer_and_hang)
    with timer.FileTimerServer(where):
        tell(address, str(pid))
        tell(address, "up")
        os.waitpid(pid, 0)
