"""A signal that reaches the workers as well as `phalanx run`: the run was stopped, and no worker has failed."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.command import Launcher, Place
from tests.support.etcd import free_port
from tests.support.helpers import Ready, wait_gone

LAUNCHER = """
import sys
from phalanx._agent import group_team
group_team.COMMON_STOP_SECONDS *= 1000  # a busy machine may take longer than is usual between the two signals
group_team._COMMON_STOP_NS *= 1000
sys.argv[0] = "phalanx"
from phalanx.cli import main
main()
"""


WORKER = """
import os, signal
{ready}
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["worker", "launcher"])
def test_a_signal_to_all_processes_stops_the_run(place: Place, ready: Ready, first: str) -> None:
    script = place.write(WORKER.format(ready=ready.python("os.getpid()")))
    program = place.write(LAUNCHER, "launcher.py")
    options = ["--nproc-per-node", "2", "--max-restarts", "3", "--log-dir", str(place.logs)]
    with Launcher([sys.executable, program, "run", *options, script], cwd=place.folder, env=place.env) as launcher:
        workers = ready.pids(2)
        if first == "launcher":
            launcher.send(signal.SIGSTOP)
            launcher.send(signal.SIGTERM)
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        assert not wait_gone(workers)
        if first == "worker":
            launcher.send(signal.SIGTERM)
        launcher.send(signal.SIGCONT)
        done = launcher.end()
    assert done.status == 128 + signal.SIGTERM
    assert "FAILED" not in done.err
    assert " follows" not in done.err
    record = next(place.logs.glob("*/run.json")).read_text()
    assert '"state":"stopped"' in record
    assert '"state":"failed"' not in record


@pytest.mark.slow
def test_a_signal_to_all_workers_and_one_launcher_stops_the_job(place: Place, ready: Ready) -> None:
    script = place.write(WORKER.format(ready=ready.python("os.getpid()")))
    program = place.write(LAUNCHER, "launcher.py")
    options = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--rdzv-conf",
               f"agent_port={free_port()}", "--log-dir", str(place.logs)]  # fmt: skip
    commands = [[sys.executable, program, "run", *options, "--node-rank", rank, script] for rank in "01"]
    with (
        Launcher(commands[0], cwd=place.folder, env=place.env) as first,
        Launcher(commands[1], cwd=place.folder, env=place.env) as second,
    ):
        workers = ready.pids(2)
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        assert not wait_gone(workers)
        second.send(signal.SIGTERM)
        ends = [first.end(), second.end()]
    assert [end.status for end in ends] == [128 + signal.SIGTERM] * 2
    records = [path.read_text() for path in place.logs.glob("*/run.json")]
    assert len(records) == len(ends)
    assert '"state":"failed"' not in "".join(records)  # neither a run nor a rank


@pytest.mark.slow
def test_a_worker_that_alone_gets_the_signal_has_failed(place: Place, ready: Ready) -> None:
    script = place.write(WORKER.format(ready=ready.python("os.getpid()")))
    with place.start("--nproc-per-node", 2, script) as launcher:
        os.kill(ready.pids(2)[0], signal.SIGTERM)
        done = launcher.end()
    assert done.status == 128 + signal.SIGTERM
    assert "Signal 15 (SIGTERM) received by PID" in done.err
