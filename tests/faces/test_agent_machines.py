"""Agents of several machines: they restart together, within the job's one budget, and return what is theirs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.agent import LocalElasticAgent, Worker, WorkerGroup, WorkerSpec, WorkerState
from phalanx.errors import ChildFailedError
from phalanx.launcher import LaunchConfig, launch_agent
from phalanx.multiprocessing import DefaultLogsSpecs
from phalanx.rendezvous import ManyMachinesRendezvous, RendezvousParameters
from tests.support import agent_workers
from tests.support.etcd import free_port
from tests.support.helpers import alive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOON = 30.0

pytestmark = pytest.mark.slow


def record(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*/run.json")
    return dict(json.loads(path.read_text()))


def both(call: Callable[[int], Any]) -> list[Any]:
    """Return what each of two machines returns, or raises."""
    found: dict[int, Any] = {}

    def on(rank: int) -> None:
        try:
            found[rank] = call(rank)
        except Exception as error:  # noqa: BLE001 - it is what the test is about
            found[rank] = error

    threads = [threading.Thread(target=on, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return [found[0], found[1]]


def launched(
    folder: Path, fails: Any, max_restarts: int, function: Any = agent_workers.fail_on_another_machine
) -> tuple[int, list[Any]]:
    port = free_port()

    def launch(rank: int) -> Any:
        config = LaunchConfig(
            2, 2, (2, 1)[rank], run_id="job", rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"rank": rank, "agent_port": port}, max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(str(folder / f"{rank}")),
        )  # fmt: skip
        return launch_agent(config, function, [fails])

    return port, both(launch)


def test_workers_are_no_forks_of_an_agent_that_uses_an_etcd(tmp_path: Path) -> None:
    handler = ManyMachinesRendezvous(RendezvousParameters("etcd", "127.0.0.1:1", "job", 2, 2))
    spec = WorkerSpec("default", 1, handler, entrypoint=print)
    with pytest.raises(ValueError, match=r"start_method: expected 'spawn' or 'forkserver', got 'fork': .* by grpc"):
        LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), start_method="fork")


PROGRAM = """
import sys
from phalanx.launcher import LaunchConfig, elastic_launch

rank, port, folder = sys.argv[1:]
config = LaunchConfig(
    2, 2, 1, run_id="job", rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
    rdzv_configs={"rank": rank, "agent_port": port, "lease_ttl": 2, "away_timeout": 3},
    max_restarts=0,
)
code = "import os, time; open(f'{folder}/{rank}', 'w').write(str(os.getpid())); time.sleep(600)"
code = code.replace("{folder}", folder).replace("{rank}", rank)
elastic_launch(config, sys.executable)("-c", code)
"""


def test_the_workers_of_an_agent_that_is_stopped_end_in_time(tmp_path: Path) -> None:
    port = free_port()
    commands = [[sys.executable, "-c", PROGRAM, str(rank), str(port), str(tmp_path)] for rank in range(2)]
    programs = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    try:
        workers = [int(wait_for(partial(text_of, tmp_path / str(rank)))) for rank in range(2)]
        programs[1].send_signal(signal.SIGSTOP)
        wait_for(lambda: not alive(workers[1]))
        programs[1].send_signal(signal.SIGCONT)
        assert [program.wait(SOON) for program in programs] == [1, 1]
        assert not alive(workers[0])
    finally:
        for program in programs:
            program.send_signal(signal.SIGCONT)
            program.kill()
            program.wait()


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(found: Callable[[], Any]) -> Any:
    until = time.monotonic() + SOON
    while not (it := found()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return it


def test_all_restart_when_a_worker_of_one_fails(tmp_path: Path) -> None:
    """Its cause is recorded by all alike."""
    port, values = launched(tmp_path, 1, 1)
    assert values == [{0: (0, 3, 0, str(port)), 1: (1, 3, 0, str(port))}, {2: (2, 3, 1, str(port))}]
    causes = [f"rank 2 on host {os.uname().nodename}, ValueError: bad batch 0", ""]
    for rank in (0, 1):
        run = record(tmp_path / f"{rank}")
        assert (run["state"], [attempt["cause"] for attempt in run["attempts"]]) == ("succeeded", causes)


def test_all_report_the_same_on_a_job_that_has_failed(tmp_path: Path) -> None:
    """It names the root cause, its host and its traceback, where that is not this machine, too."""
    host = os.uname().nodename
    _, ends = launched(tmp_path, 2, 1)
    assert [type(each) for each in ends] == [ChildFailedError] * 2, ends
    for each in ends:
        rank, failure = each.get_first_failure()
        assert (list(each.failures), rank, failure.local_rank, failure.host) == ([2], 2, 0, host)
        assert (failure.exitcode, failure.message) == (1, "ValueError: bad batch 1")
        assert "raise ValueError(msg)" in failure.traceback
        assert [each.outcomes[other].state for other in (0, 1, 2)] == ["stopped", "stopped", "failed"]
        assert (each.log_dir, each.gave_up) == (ends[1].log_dir, "1 of 1 restart used")
        assert each.log_dir.startswith(str(tmp_path / "1"))
        (before,) = each.earlier
        assert before.startswith("attempt 0, after ")
        assert before.endswith(f": rank 2 on host {host}, ValueError: bad batch 0")
    assert str(ends[0]) == str(ends[1])
    data = [each.failures[2].error_file_data for each in ends]
    assert [("extraInfo" in str(each)) for each in data] == [False, True]  # its file is on that machine


class LateToObservers(list[Worker]):
    """Workers whose ranks the observer of failures learns late."""

    def __init__(self, workers: list[Worker], may_learn: threading.Event) -> None:
        super().__init__(workers)
        self._may_learn = may_learn

    def __getitem__(self, index: Any) -> Any:
        if threading.current_thread().name == "phalanx-failure":
            assert self._may_learn.wait(SOON)
        return super().__getitem__(index)


class ToldByObservers(ManyMachinesRendezvous):
    """Notes that an observer has told of a failure."""

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params)
        self.has_told = threading.Event()

    def tell_failure(
        self, error: str, *, rank: int | None = None, exitcode: int | None = None, is_hang: bool = False
    ) -> None:
        super().tell_failure(error, rank=rank, exitcode=exitcode, is_hang=is_hang)
        if threading.current_thread().name == "phalanx-failure":
            self.has_told.set()


class LateObserver(LocalElasticAgent):
    """Its observer of failures can tell of one when the first attempt has ended, or when the next one runs."""

    until = ""
    starts = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._may_learn = threading.Event()

    def _assign_worker_ranks(self, *args: Any) -> list[Worker]:
        return LateToObservers(super()._assign_worker_ranks(*args), self._may_learn)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids = super()._start_workers(worker_group)
        self.starts += 1
        if self.starts == 2:
            self._let_observer_tell("next attempt")
        return ids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._let_observer_tell("end")
        super()._stop_workers(worker_group)

    def _let_observer_tell(self, when: str) -> None:
        if when == self.until:
            self._may_learn.set()
            handler = self.get_worker_group().spec.rdzv_handler
            assert isinstance(handler, ToldByObservers)
            handler.has_told.wait(0.5)  # it is not to


@pytest.mark.parametrize("fails, until", [(2, "end"), (1, "next attempt")])
def test_an_observer_that_is_late_has_no_word_of_a_failure(fails: int, until: str, tmp_path: Path) -> None:
    """An exit is observed on a thread of its own. What is known at the end holds, and the next attempt goes on."""
    port, reports = free_port(), {}

    def run(rank: int) -> WorkerState:
        handler = ToldByObservers(
            RendezvousParameters("static", f"127.0.0.1:{port}", "job", 2, 2, rank=rank, agent_port=port)
        )
        spec = WorkerSpec(
            "trainer", (2, 1)[rank], handler, max_restarts=1,
            entrypoint=agent_workers.fail_on_another_machine, args=(fails,),
        )  # fmt: skip
        agent = LateObserver(spec, DefaultLogsSpecs(str(tmp_path / str(rank))))
        agent.until = until if rank == 1 else "end"
        try:
            state = agent.run().state
            reports[rank] = handler.report("trainer")
            return state
        finally:
            handler.shutdown()

    ends = both(run)
    if fails == 1:
        assert ends == [WorkerState.SUCCEEDED] * 2
    else:
        assert ends[1] == WorkerState.FAILED
        report = reports[1]
        assert report is not None
        assert [line.rpartition(": ")[2] for line in report.earlier] == ["bad batch 0"]


def test_a_lost_connection_is_no_root_cause_on_any_machine(tmp_path: Path) -> None:
    """Without restarts, too, each waits for the end of the others' workers, and has their outcomes."""
    _, ends = launched(tmp_path, str(tmp_path / "socket"), 0, agent_workers.lose_another_machine)
    assert [type(each) for each in ends] == [ChildFailedError] * 2, ends
    assert str(ends[0]) == str(ends[1])
    for each in ends:
        rank, failure = each.get_first_failure()
        assert (rank, failure.message, each.earlier, each.gave_up) == (2, "ValueError: bad batch", [], "")
        assert set(each.failures) <= {0, 2}  # rank 0 has lost its connection, or was stopped before it saw that
        assert (list(each.outcomes), each.outcomes[1].state) == ([0, 1, 2], "stopped")


CONNECTED = """
import os, socket, sys
from phalanx.errors import ChildFailedError
from phalanx.launcher import LaunchConfig, elastic_launch

def train(path):
    with socket.socket(socket.AF_UNIX) as sock:
        if os.environ["RANK"] == "0":
            with socket.socket(socket.AF_UNIX) as peer:
                while peer.connect_ex(path):
                    pass
                print("connected", flush=True)
                peer.recv(1)
            raise ConnectionResetError("connection closed by peer")
        sock.bind(path)
        sock.listen()
        sock.accept()[0].recv(1)

if __name__ == "__main__":
    rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = LaunchConfig(
        2, 2, 1, run_id="job", rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}", max_restarts=0,
        rdzv_configs={"rank": rank, "agent_port": port, "lease_ttl": 2},
    )
    try:
        elastic_launch(config, train)(path)
    except ChildFailedError as error:
        print(error)
"""


def test_a_lost_machine_is_the_cause_of_lost_connections(tmp_path: Path) -> None:
    script = tmp_path / "launches.py"
    script.write_text(CONNECTED)
    env, port = {**os.environ, "TMPDIR": str(tmp_path)}, str(free_port())
    launchers = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port, tmp_path / "sock"], stdout=subprocess.PIPE, text=True, env=env
        )
        for rank in (0, 1)
    ]
    with launchers[0], launchers[1]:
        try:
            assert launchers[0].stdout is not None
            assert launchers[0].stdout.readline() == "connected\n"
            launchers[1].kill()
            report = launchers[0].communicate(timeout=SOON)[0]
        finally:
            for launcher in launchers:
                launcher.kill()
    assert re.search(r"Root Cause:\n  host      : .*\n  error     : node 1 is lost: ", report), report
    others = r"Other Failures:\nrank 0:\n(  .*\n)+ +error +: ConnectionResetError: connection closed"
    assert re.search(others, report), report


def test_no_agent_is_done_before_the_others(tmp_path: Path) -> None:
    """It waits for their workers, and ends with them."""
    port, path = free_port(), tmp_path / "pipe"
    os.mkfifo(path)
    waits = threading.Event()

    class Noting(ManyMachinesRendezvous):
        def tell_success(self, *, wait: bool = True) -> bool | None:
            told = super().tell_success(wait=wait)
            if told is None:
                waits.set()
            return told

    def run(rank: int) -> Any:
        handler = Noting(RendezvousParameters("static", f"127.0.0.1:{port}", "job", 2, 2, rank=rank, agent_port=port))
        spec = WorkerSpec("trainer", 1, handler, entrypoint=agent_workers.wait_for_another_machine, args=(str(path),))
        try:
            return LocalElasticAgent(spec, DefaultLogsSpecs()).run()
        finally:
            handler.shutdown()

    def let_go() -> None:
        assert waits.wait(SOON)
        path.write_bytes(b"")

    late = threading.Thread(target=let_go, daemon=True)
    late.start()
    results = both(run)
    late.join()
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert [result.return_values for result in results] == [{0: 0}, {1: 1}]
