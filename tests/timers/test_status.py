"""What a group shows of its ranks while they run: `PContext.status`, and signals to chosen ranks."""

from __future__ import annotations

import os
import signal

import pytest

from phalanx import timer
from phalanx.multiprocessing import RankStatus, start_processes
from phalanx.timer import TimerSpecs
from tests.support import hang_workers, workers
from tests.support.helpers import Gate, Ready, pass_gate, tell

pytestmark = pytest.mark.usefixtures("own_temporary_folder")  # groups that failed leave their evidence


def test_the_status_has_each_rank_and_its_signs_of_life(ready: Ready, gate: Gate) -> None:
    args = {0: (7, ready.address, gate.address), 1: (0, ready.address, gate.address)}
    with start_processes("s", hang_workers.beat_and_announce, args, nprocs=2, timers=TimerSpecs()) as group:
        ready.wait(2)
        status = group.status()
        assert {rank: one.pid for rank, one in status.items()} == group.pids()
        assert status[0].beat_age is not None
        assert 0 <= status[0].beat_age < 60
        assert (status[0].state, status[0].step, status[0].breakpoint) == ("running", 7, None)
        assert status[1] == RankStatus(1, group.pids()[1], "running")
        group.signal(signal.SIGUSR1, [1])
        assert ready.wait() == ["0 signalled"]
        gate.open(2)
        group.wait()
        assert [(one.state, one.exitcode, one.step) for one in group.status().values()] == [
            ("succeeded", 0, 7),
            ("succeeded", 0, None),
        ]
    assert [one.state for one in group.status().values()] == ["succeeded", "succeeded"]


def steps(address: str, gate: str) -> None:
    timer.progress(1)
    timer.progress(3)
    tell(address, "")
    pass_gate(gate)


def test_the_status_has_how_long_steps_took(ready: Ready, gate: Gate) -> None:
    with start_processes("s", steps, (ready.address, gate.address), nprocs=1, timers=TimerSpecs()) as group:
        ready.wait()
        status = group.status()[0]
        assert status.step_age is not None
        assert 0 <= status.step_age < 60
        assert status.step_time is not None
        assert status.step_time["count"] == 2
        assert 0 < status.step_time["min"] <= status.step_time["median"] <= status.step_time["max"] < 60
        gate.open()
        assert group.wait().succeeded


def test_the_status_says_who_failed_and_who_was_stopped(ready: Ready, gate: Gate) -> None:
    with start_processes("s", workers.announce, (ready.address, gate.address), nprocs=2) as group:
        ready.wait(2)
        os.kill(group.pids()[1], signal.SIGKILL)
        group.wait()
        states = {rank: (one.state, one.exitcode) for rank, one in group.status().items()}
    assert states == {0: ("stopped", -signal.SIGTERM), 1: ("failed", -signal.SIGKILL)}


def test_a_signal_to_a_rank_that_is_not_there_is_refused(ready: Ready, gate: Gate) -> None:
    with start_processes("s", workers.announce, (ready.address, gate.address), nprocs=2) as group:
        ready.wait(2)
        with pytest.raises(ValueError, match="ranks: expected local ranks from 0 to 1, got 2"):
            group.signal(signal.SIGUSR1, [0, 2])
        gate.open(2)
        assert group.wait().succeeded
