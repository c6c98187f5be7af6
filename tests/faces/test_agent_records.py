"""What the run of an agent leaves: its record says how it has ended, and nothing of it is left in the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.agent import LocalElasticAgent, RunResult, WorkerGroup, WorkerSpec, WorkerState
from phalanx.launcher import LaunchConfig, launch_agent
from phalanx.multiprocessing import DefaultLogsSpecs
from phalanx.rendezvous import ManyMachinesRendezvous, RendezvousClosedError, RendezvousParameters
from tests.faces.test_agent_machines import SOON, both, record
from tests.support.etcd import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow


def how(folder: Path) -> tuple[str, int, str]:
    run = record(folder)
    return run["state"], run["exit_code"], run["cause"]


def agent(folder: Path, *command: str, kind: type[LocalElasticAgent] = LocalElasticAgent) -> LocalElasticAgent:
    spec = WorkerSpec("default", 2, None, entrypoint=command[0], args=command[1:], max_restarts=0)
    return kind(spec, DefaultLogsSpecs(str(folder)))


def test_runs_that_succeed_fail_or_are_launched_are_recorded(tmp_path: Path) -> None:
    agent(tmp_path / "good", "true").run()
    assert how(tmp_path / "good") == ("succeeded", 0, "")
    agent(tmp_path / "bad", "sh", "-c", "exit $((3 * LOCAL_RANK))").run()
    state, code, cause = how(tmp_path / "bad")
    assert (state, code, cause.partition(":")[0]) == ("failed", 3, "rank 1")
    launch_agent(LaunchConfig(1, 1, 1, logs_specs=DefaultLogsSpecs(str(tmp_path / "launched"))), "true", [])
    assert how(tmp_path / "launched") == ("succeeded", 0, "")
    assert record(tmp_path / "launched")["pid"] == os.getpid()


def test_a_stopped_run_is_recorded_as_stopped(tmp_path: Path) -> None:
    it = agent(tmp_path, "sleep", "600")
    thread = threading.Thread(target=it.run, daemon=True)
    thread.start()
    while it.get_worker_group().state != WorkerState.HEALTHY:
        threading.Event().wait(0.01)
    it.stop()
    thread.join(SOON)
    assert how(tmp_path) == ("stopped", 1, "rank 0: stopped by us (SIGTERM)")


class Sickly(LocalElasticAgent):
    """Its workers are said to be UNHEALTHY."""

    def _monitor_workers(self, _worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.UNHEALTHY)


def test_workers_that_are_unhealthy_have_failed(tmp_path: Path) -> None:
    agent(tmp_path, "sleep", "600", kind=Sickly).run()
    assert how(tmp_path) == ("failed", 1, "the workers are UNHEALTHY")


def of_two(
    folder: Path, kinds: tuple[type[LocalElasticAgent], type[LocalElasticAgent]], *command: str, restarts: int = 0
) -> Callable[[int], Any]:
    """Return what runs an agent of one worker on a machine of two, and returns or raises what that does."""
    port = free_port()

    def run(rank: int) -> Any:
        where = f"127.0.0.1:{port}"
        handler = ManyMachinesRendezvous(RendezvousParameters("static", where, "job", 2, 2, rank=rank, agent_port=port))
        spec = WorkerSpec("default", 1, handler, entrypoint=command[0], args=command[1:], max_restarts=restarts)
        try:
            return kinds[rank](spec, DefaultLogsSpecs(str(folder / f"{rank}"))).run()
        finally:
            handler.shutdown()

    return run


class Closer(LocalElasticAgent):
    """Ends the job of all machines as soon as its workers run."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids = super()._start_workers(worker_group)
        worker_group.spec.rdzv_handler.set_closed()
        return ids


def test_a_job_that_is_stopped_on_another_machine_is_stopped(tmp_path: Path) -> None:
    ends = both(of_two(tmp_path, (LocalElasticAgent, Closer), "sleep", "600"))
    assert [type(end) for end in ends] == [RendezvousClosedError] * 2, ends
    cause = f"the rendezvous was closed on host {os.uname().nodename}"
    assert [how(tmp_path / f"{rank}") for rank in (0, 1)] == [("stopped", 143, cause)] * 2


class NoSecondStart(LocalElasticAgent):
    """Cannot start its workers again."""

    starts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.starts += 1
        if self.starts > 1:
            raise ValueError("no room for the workers")
        return super()._start_workers(worker_group)


def test_why_workers_could_not_be_started_again_is_told_to_all(tmp_path: Path) -> None:
    fails = "test $RANK = 0 || exit 3; sleep 600"
    first, second = both(of_two(tmp_path, (LocalElasticAgent, NoSecondStart), "sh", "-c", fails, restarts=1))
    for end in (first, second):
        assert isinstance(end, RendezvousClosedError), end
        assert f"host {os.uname().nodename}, no room for the workers" in str(end)
    assert str(second.__cause__) == "no room for the workers"


LATE = """
import os, signal, sys, time
from phalanx.agent import LocalElasticAgent, WorkerSpec
from phalanx.multiprocessing import DefaultLogsSpecs, SignalException

def send(event):
    if event["name"] == "agent.ended":  # no worker is left, and this observer has yet to take the rest
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(0.2)

if __name__ == "__main__":
    agent = LocalElasticAgent(WorkerSpec("w", 1, None, entrypoint="true"), DefaultLogsSpecs(sys.argv[1]), on_event=send)
    try:
        agent.run()
    except SignalException as error:
        print(error.sigval.name)
"""


def test_a_signal_at_the_very_end_waits_until_all_is_written(tmp_path: Path) -> None:
    number = signal.SIGINT
    command = [sys.executable, "-c", LATE, str(tmp_path), str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert (done.returncode, done.stdout) == (0, f"{number.name}\n"), done.stderr
    assert how(tmp_path) == ("succeeded", 0, "")


EARLY = """
import os, signal, sys, threading, time
from phalanx._base.procfs import children
from phalanx.agent import LocalElasticAgent, WorkerSpec
from phalanx.multiprocessing import DefaultLogsSpecs, SignalException
from phalanx.rendezvous import ManyMachinesRendezvous, RendezvousParameters

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # one that comes before the run
    for delay in range(0, 12, 2):
        params = RendezvousParameters("static", f"127.0.0.1:{sys.argv[1]}", "job", 2, 2, rank=0, agent_port=sys.argv[1])
        handler = ManyMachinesRendezvous(params, warn=lambda _: None)
        spec = WorkerSpec("w", 1, handler, entrypoint=time.sleep, args=(600,))
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(), "forkserver", preload=["json"])
        timers = [threading.Timer(at, os.kill, (os.getpid(), signal.SIGTERM)) for at in (delay * 0.005, 1.0, 2.0)]
        for timer in timers:
            timer.start()
        try:
            agent.run()
        except SignalException:
            handler.shutdown()
        for timer in timers:
            timer.cancel()
            timer.join()
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        assert (left, [*children(os.getpid())]) == ([], []), (delay, left)
        time.sleep(0.3)  # a signal within that time is the same request
"""


def test_a_signal_while_the_machine_joins_leaves_no_import() -> None:
    command = [sys.executable, "-c", EARLY, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert done.returncode == 0, done.stderr
