# ruff: noqa: D101, D102, D103 - phalanx.timer says what each method is for
"""A timer server and its client, over a Unix datagram socket: each datagram is `pid expiration scope`."""

import os
import signal
import socket
import tempfile
from multiprocessing import get_context
from select import select

from phalanx.timer import RequestQueue, TimerClient, TimerRequest, TimerServer, expires


class DatagramQueue(RequestQueue):
    def __init__(self, inbox: socket.socket) -> None:
        self.inbox = inbox

    def size(self) -> int:
        return len(select([self.inbox], [], [], 0)[0])  # 0 or 1: nobody can count datagrams

    def get(self, size: int, timeout: float) -> list[TimerRequest]:  # noqa: ARG002 - more than 1 is never asked for
        if not select([self.inbox], [], [], timeout)[0]:
            return []
        pid, expiration, scope = self.inbox.recv(4096).decode().split(" ", 2)
        return [TimerRequest(int(pid), scope, float(expiration))]


class DatagramClient(TimerClient):
    def __init__(self, path: str) -> None:
        self.path = path

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
            outbox.sendto(f"{os.getpid()} {expiration_time} {scope_id}".encode(), self.path)

    def release(self, scope_id: str) -> None:
        self.acquire(scope_id, -1)


class DatagramServer(TimerServer):
    def __init__(self, inbox: socket.socket) -> None:
        super().__init__(DatagramQueue(inbox), max_interval=0.5)
        self.timers: dict[tuple[int, str], TimerRequest] = {}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self.timers |= {(request.worker_id, request.scope_id): request for request in timer_requests}
        self.timers = {key: request for key, request in self.timers.items() if request.expiration_time >= 0}

    def clear_timers(self, worker_ids: set[int]) -> None:
        self.timers = {key: request for key, request in self.timers.items() if key[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[int, list[TimerRequest]]:
        late = [request for request in self.timers.values() if request.expiration_time <= deadline]
        return {pid: [one for one in late if one.worker_id == pid] for pid in {one.worker_id for one in late}}

    def _reap_worker(self, worker_id: int) -> bool:
        # Only a child of ours: waitid raises ChildProcessError for others. A pidfd never comes to mean another process.
        with open(os.pidfd_open(worker_id), "rb") as pidfd:
            os.waitid(os.P_PIDFD, pidfd.fileno(), os.WEXITED | os.WNOHANG | os.WNOWAIT)
            signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
        return True


def work(path: str) -> None:
    with expires(after=0.3, scope="a step that hangs", client=DatagramClient(path)):
        signal.pause()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(f"{folder}/timers")
        with DatagramServer(inbox):
            worker = get_context("spawn").Process(target=work, args=(f"{folder}/timers",))
            worker.start()
            worker.join()
            print(f"the worker ended with {worker.exitcode}")
