"""The settle window ends early when no other worker reacts, and never where that could change the cause that is named.

Real workers; what is measured is the time between the first exit and the death signal, as the keeper has noted both.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pytest

from phalanx._base import procfs
from phalanx._outcomes import result as outcomes
from phalanx.multiprocessing import start_processes
from tests.support.disks import until
from tests.support.helpers import TIMEOUT
from tests.support.settling_workers import closes_and_sleeps, is_slow_to_record, leaves_nothing, raises

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.multiprocessing import PContext, RunProcsResult
    from tests.support.helpers import Gate, Ready

WINDOW = 0.8
"""Seconds: a twentieth is long enough for a shell to do something in it, on a machine that is busy."""


@pytest.fixture(autouse=True)
def _logs_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups without a log folder make a temporary one, which is theirs to keep."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))


def shells(*scripts: str) -> dict[int, tuple[str, ...]]:
    return {rank: ("-c", script) for rank, script in enumerate(scripts)}


def span(group: PContext, failed: int = 0, stopped: int = 1) -> float:
    """Seconds between the exit of one worker and the signal to another."""
    assert group._supervisor is not None
    workers = group._supervisor.mirror.workers
    assert workers[stopped].signalled == 15
    return (workers[stopped].signalled_ns - workers[failed].exit_ns) / 1e9


def ended(group: PContext) -> RunProcsResult:
    result = group.wait(TIMEOUT)
    assert result is not None
    return result


def cause(result: RunProcsResult) -> int:
    assert result.root_cause is not None
    return result.root_cause.local_rank


@pytest.mark.parametrize("how", ["exit 3", "kill -9 $$", "kill -SEGV $$"])
def test_who_sleeps_is_stopped_early(how: str) -> None:
    with start_processes("quiet", "/bin/sh", shells(how, *["exec sleep 600"] * 3), settle=WINDOW) as group:
        result = ended(group)
    assert span(group) < WINDOW * 0.95
    assert span(group) >= WINDOW / 20
    assert cause(result) == 0
    assert list(result.failures) == [0]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_who_sleeps_is_stopped_early_when_the_first_has_recorded_an_exception(
    method: str, ready: Ready, gate: Gate
) -> None:
    args = {rank: (rank, gate.address, ready.address) for rank in range(2)}
    with start_processes("quiet", raises, args, start_method=method, settle=WINDOW) as group:
        ready.wait(2)
        gate.open()
        result = ended(group)
    assert span(group) < WINDOW * 0.95
    assert cause(result) == 0


@pytest.mark.long
def test_a_worker_that_does_something_has_the_whole_window() -> None:
    with start_processes("busy", "/bin/sh", shells("exit 3", "while :; do :; done"), settle=WINDOW) as group:
        result = ended(group)
    assert span(group) >= WINDOW
    assert cause(result) == 0


@pytest.mark.long
def test_one_that_is_busy_keeps_the_window_open_for_those_that_sleep() -> None:
    scripts = shells("exit 3", "exec sleep 600", "while :; do :; done")
    with start_processes("busy", "/bin/sh", scripts, settle=WINDOW) as group:
        ended(group)
    assert span(group) >= WINDOW


def test_a_worker_that_is_stopped_has_the_whole_window(tmp_path: Path) -> None:
    fifo = str(tmp_path / "go")
    os.mkfifo(fifo)
    with start_processes(
        "stop", "/bin/sh", shells(f"read x < {fifo}; exit 3", "kill -STOP $$"), settle=WINDOW
    ) as group:
        pid = group.pids()[1]
        until(lambda: procfs.Stat(pid).state == "T")
        with open(fifo, "w") as go:
            go.write("\n")
        ended(group)
    assert span(group) >= WINDOW


def test_a_second_failure_keeps_the_window_open() -> None:
    # Both are told of before the first look; of the second, nobody has judged what brought it about.
    scripts = shells("exit 3", "exec sleep 600", "exit 4")
    with start_processes("two", "/bin/sh", scripts, settle=WINDOW) as group:
        result = ended(group)
    if len(result.failures) == 2:  # else the second had no time for its failure, on a machine that is very busy
        assert max(span(group, failed=0), span(group, failed=2)) >= WINDOW  # from whichever was the first


def test_a_failure_that_left_no_word_where_one_may_be_on_its_way_keeps_the_window_open(
    ready: Ready, gate: Gate
) -> None:
    args = {rank: (rank, gate.address, ready.address) for rank in range(2)}
    with start_processes("mute", leaves_nothing, args, start_method="fork", settle=WINDOW) as group:
        ready.wait(2)
        gate.open()
        ended(group)
    assert span(group) >= WINDOW


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_worker_that_sleeps_while_it_records_an_earlier_failure_has_the_whole_window(method: str, gate: Gate) -> None:
    args = {rank: (rank, gate.address, WINDOW / 2) for rank in range(2)}
    with start_processes("slow", is_slow_to_record, args, start_method=method, settle=WINDOW) as group:
        result = ended(group)
    assert cause(result) == 0
    assert sorted(result.failures) == [0, 1]


def test_a_window_of_more_than_a_second_is_kept() -> None:
    with start_processes("long", "/bin/sh", shells("exit 3", "exec sleep 600"), settle=1.2) as group:
        ended(group)
    assert span(group) >= 1.2


def test_a_peer_that_sleeps_in_a_handler_is_named_if_its_end_brought_about_the_first_exit(
    ready: Ready, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_LEAVING", 10 * 10**9)  # for how long a handler may take, on any machine
    # Rank 1 is gone long before rank 0 has recorded anything, and rank 0 uses no CPU time for several looks.
    path = str(tmp_path / "sock")
    args = {rank: (rank, path, ready.address, gate.address, WINDOW / 2) for rank in range(2)}
    with start_processes("handler", closes_and_sleeps, args, start_method="fork", settle=WINDOW) as group:
        ready.wait(1)
        gate.open()
        result = ended(group)
    assert cause(result) == 0
    assert result.root_cause is not None
    assert result.root_cause.message == "ValueError: the cause"
    assert sorted(result.failures) == [0, 1]
