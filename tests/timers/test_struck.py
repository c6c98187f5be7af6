"""A rank that was sent a signal because its timer had expired has failed, whatever it says on its way out."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx._evidence.error_file import write_error_file
from phalanx._timers import escalation
from tests.support import hang_workers
from tests.support.helpers import Gate, Ready
from tests.support.stack_workers import fake_py_spy
from tests.support.waits import wait_long_for_stacks
from tests.timers.test_timer_group import HANG, Events, failure_of, result_of, start

pytestmark = pytest.mark.usefixtures("own_temporary_folder")  # groups that failed leave their evidence

TOLD = "it was sent SIGTERM for that, and exited with code 0"


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(autouse=True)
def _stacks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long_for_stacks(monkeypatch.setattr)


@pytest.mark.each_python
@pytest.mark.slow
def test_who_exits_with_0_by_sigterm_has_failed(events: Events, gate: Gate) -> None:
    args = (gate.address, "done")
    result = result_of(start(hang_workers.one_ends_well, args, events, 2, on_expiry="terminate,kill:600"))
    assert [result.outcomes[rank].state for rank in range(2)] == ["failed", "stopped"]
    assert result.state == "failed"
    assert result.is_failed()
    assert result.return_values == {}
    failure = result.failures[0]
    assert result.root_cause is failure
    assert failure.exitcode == 1
    assert re.fullmatch(HANG, failure.message)
    assert failure.detail.splitlines()[-1] == TOLD
    assert "over its deadline" in failure.detail
    assert "in hang\n" in failure.traceback  # and in what that calls, if it has come so far
    assert result.outcomes[0].describe() == "failed: exited with code 0"


@pytest.mark.slow
def test_a_process_below_that_hangs_and_ends_well(events: Events) -> None:
    failure = failure_of(start(hang_workers.end_well_below, (), events, on_expiry="terminate"))
    assert re.match(
        r"Hang: 'below' \(.*\) was not left within 0\.1 s, in process \d+ below the worker", failure.message
    )
    assert failure.detail.splitlines()[-1] == TOLD


@pytest.mark.slow
def test_who_goes_on_for_long_and_then_ends_well_has_failed(
    events: Events, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escalation, "_SURVIVED", 0.05)  # in the keeper, which is a fork of this process
    args = (gate.address,)
    group = start(hang_workers.survive_and_return, args, events, on_expiry="terminate,kill:600", start_method="fork")
    events.wait("timer.left")
    gate.open()
    result = result_of(group)
    assert result.state == "failed"
    assert result.return_values == {}
    failure = result.failures[0]
    assert re.fullmatch(r"Hang: 'deaf' \(.*\) was not left within 0\.1 s", failure.message)
    before, told = failure.detail.splitlines()
    assert re.fullmatch(r"it had hung before: 'deaf' \(.*\) was not left within 0\.1 s; and had gone on since", before)
    assert told == TOLD


@pytest.mark.slow
def test_where_no_evidence_can_be_written_the_hang_is_named(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    write, launcher = write_error_file, os.getpid()

    def full(*args: Any, **options: Any) -> None:
        if os.getpid() != launcher:
            write(*args, **options)
            return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("phalanx._evidence.error_file.write_error_file", full)
    group = start(hang_workers.end_well, (), events, on_expiry="terminate", start_method="fork")
    failure = failure_of(group)
    assert re.fullmatch(HANG, failure.message)
    assert failure.detail.splitlines()[-1] == TOLD
    assert "Hang: " not in failure.detail, "it is said once"


PROGRAM = """
import os, signal, sys
from phalanx import timer
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with timer.expires(after=0.1, scope="load"):
    while True:
        signal.pause()
"""


@pytest.mark.slow
def test_phalanx_run_exits_with_1(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "phalanx", "run", "--log-dir", str(tmp_path / "logs"), "--on-expiry", "terminate"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "Hang: 'load' (" in done.stderr
    assert TOLD in done.stderr


@pytest.mark.slow
def test_a_survivor_stopped_for_another_has_not_failed(
    events: Events, ready: Ready, gate: Gate, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escalation, "_SURVIVED", 0.05)  # as above
    group = start(
        hang_workers.survive_or_fail,
        (gate.address, ready.address),
        events,
        2,
        on_expiry="terminate",
        start_method="fork",
        logs=logs,
    )
    ready.wait()
    events.wait("timer.left")
    gate.open()
    result = result_of(group)
    assert set(result.failures) == {1}
    assert result.outcomes[0].exitcode == -signal.SIGTERM


def test_who_dies_of_the_look_that_precedes_the_kill_has_hung(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler that shows all threads can end a process by SIGSEGV."""
    fake_py_spy(tmp_path, monkeypatch, 'for pid; do :; done; kill -SEGV "$pid"; exit 1')
    result = result_of(start(hang_workers.run_on, (), events))
    failure = result.failures[0]
    assert failure.exitcode == -signal.SIGSEGV
    assert re.fullmatch(HANG, failure.message)
    assert "over its deadline" in failure.detail
