"""Functions that the tests of agents run as workers, and a rendezvous and agents as a user would write them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from phalanx import timer
from phalanx.agent import LocalElasticAgent, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from phalanx.multiprocessing import DefaultLogsSpecs, ProcessFailure
from phalanx.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from tests.support.helpers import pass_gate, rest, tell


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def rank() -> int:
    return int(os.environ["RANK"])


def fails_until(which: int) -> tuple[int, int]:
    """Fail in all attempts before ``which``; then say who this is."""
    if attempt() < which:
        message = f"rank {rank()}, attempt {attempt()}"
        raise ValueError(message)
    return attempt(), rank()


def one_fails(which: int) -> None:
    """Rank ``which`` fails by itself; the others wait for their end."""
    if rank() == which:
        sys.exit(3)
    signal.pause()


def environment() -> dict[str, str]:
    return dict(os.environ)


def says_and_waits(address: str) -> None:
    """Say the own pid, and that of a child that ignores signals; wait."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    tell(address, str(os.getpid()))
    tell(address, str(child.pid))
    rest()


def outlives_sigterm(address: str) -> None:
    """Say when a SIGTERM can come, and when it has come; go on."""
    signal.signal(signal.SIGTERM, lambda *_: tell(address, "SIGTERM"))
    tell(address, "waits")
    rest()


def ends_at_sigterm(address: str) -> None:
    """Say when a SIGTERM can come. When it has come, take a while, and say so."""

    def end(*_: Any) -> None:
        threading.Event().wait(0.2)
        tell(address, "has had its time")
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    tell(address, "waits")
    rest()


def waits_in_the_first_attempt(address: str) -> int:
    if attempt() == 0:
        tell(address, "waits")
        signal.pause()
    return attempt()


def passes(gate: str) -> int:
    pass_gate(gate)
    return rank()


def overruns(client: Any) -> int:
    """The example of the original's documentation: in the first attempt the block is not left in time."""
    if client is not None:
        timer.configure(client)
    if attempt() == 0 and rank() == 0:
        with timer.expires(after=0.3, scope="forward pass"):
            threading.Event().wait()
    with timer.expires(after=60, scope="forward pass"):
        return attempt()


def overruns_by_environment() -> int:
    """The same, with the server that the agent runs for its workers."""
    return overruns(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))


def runs_an_agent() -> tuple[str, dict[int, Any]]:
    """An agent in a worker of another agent."""
    spec = WorkerSpec("inner", 2, None, entrypoint=fails_until, args=(1,), max_restarts=1)
    result = LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="fork").run()
    return result.state.value, result.return_values


class Meeting(RendezvousHandler):
    """A rendezvous of a user's own, of one machine."""

    def __init__(self, waiting: int = 0) -> None:
        self.calls = 0
        self.waiting = waiting

    def get_backend(self) -> str:
        return "own"

    def next_rendezvous(self) -> RendezvousInfo:
        self.calls += 1
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo("10.0.0.1", 4000 + self.calls))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        waiting, self.waiting = self.waiting, 0
        return waiting

    def get_run_id(self) -> str:
        return "own run"

    def shutdown(self) -> bool:
        return True


class PopenAgent(SimpleElasticAgent):
    """What the original's documentation invites people to write: workers that are started by `subprocess`."""

    def __init__(self, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self.calls: list[str] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        command = [str(self._worker_group.spec.entrypoint), *worker_group.spec.args]
        for worker in worker_group.workers:
            env = {**os.environ, "RANK": str(worker.global_rank), "ATTEMPT": str(self.calls.count("start") - 1)}
            self.processes[worker.local_rank] = subprocess.Popen(command, env=env)
        return {local_rank: process.pid for local_rank, process in self.processes.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.calls[-1] != "monitor":
            self.calls.append("monitor")
        codes = {worker.global_rank: self.processes[worker.local_rank].poll() for worker in worker_group.workers}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            failures = {
                rank: ProcessFailure(rank, self.processes[rank].pid, code, "<N/A>") for rank, code in failed.items()
            }
            return RunResult(WorkerState.FAILED, failures=failures)
        if all(code == 0 for code in codes.values()):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - as it is called
        self.calls.append("stop")
        self._end(signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self.calls.append(f"shutdown {signal.Signals(death_sig).name} {timeout:g}")
        self._end(death_sig)

    def _end(self, number: int) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)
            process.wait()


def ask_health(port: int) -> str:
    """Ask the agent how it is."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
        text: str = answer.read().decode()
    return text


def fail_on_another_machine(fails: int) -> tuple[int, int, int, str]:
    """Fail as rank 2 in the first attempts; the others wait for that. Return rank, size, group rank and port."""
    rank = int(os.environ["RANK"])
    if attempt() < fails:
        if rank == 2:
            msg = f"bad batch {attempt()}"
            raise ValueError(msg)
        signal.pause()
    return rank, int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_RANK"]), os.environ["MASTER_PORT"]


def lose_another_machine(path: str) -> None:
    """Rank 2 fails when rank 0 is connected to it, which fails of the lost connection; rank 1 waits for its end."""
    rank = int(os.environ["RANK"])
    if rank == 2:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}.new")
            listener.listen()
            os.rename(f"{path}.new", path)
            link, _ = listener.accept()
            link.recv(1)
            msg = "bad batch"
            raise ValueError(msg)
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as link:
            while True:
                with suppress(OSError):
                    link.connect(path)
                    break
                time.sleep(0.01)
            link.sendall(b"x")
            link.recv(1)
            msg = "the peer is gone"
            raise ConnectionResetError(msg)
    signal.pause()


def wait_for_another_machine(path: str) -> int:
    """Rank 0 ends at once, rank 1 once rank 0's agent waits for it."""
    rank = int(os.environ["RANK"])
    if rank:
        with open(path, "rb") as pipe:
            pipe.read()
    return rank
