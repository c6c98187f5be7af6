"""Heartbeats of groups, end to end: whose they are, when nobody expects them, and how many may send them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import hang_workers
from tests.support.helpers import Gate, Ready
from tests.timers.test_timer_group import Events, failure_of, result_of, start

pytestmark = pytest.mark.usefixtures("own_temporary_folder")  # groups that failed leave their evidence

HANG_TIMEOUT = 0.5
IN_TIME = 1.2
"""Seconds without a heartbeat for workers that are in time: a machine that is busy may hold one up for a while."""

LONG = 1.5
"""Seconds after which a heartbeat that is expected has been missed."""

RUN = (sys.executable, "-m", "phalanx", "run")


@pytest.fixture
def events() -> Events:
    return Events()


def begin(
    function: Any, args: tuple[Any, ...], events: Events, method: str = "fork", seconds: float = HANG_TIMEOUT
) -> Any:
    return start(function, args, events, hang_timeout=seconds, start_method=method)


# --- ranks of several processes


@pytest.mark.slow
def test_a_block_of_the_parent_extends_the_childs_heartbeat(events: Events, ready: Ready, gate: Gate) -> None:
    with begin(hang_workers.share_a_scope, (ready.address, gate.address), events, seconds=IN_TIME) as group:
        ready.wait()
        assert group.wait(LONG) is None
        gate.open()
        assert result_of(group).return_values == {0: "done"}
    assert "timer.expired" not in events.names()


@pytest.mark.slow
def test_a_block_of_a_dead_process_hides_no_hang(events: Events) -> None:
    with begin(hang_workers.leave_a_scope_behind, (), events) as group:
        failure = failure_of(group)
    assert failure.exitcode == -signal.SIGKILL
    assert failure.message == f"Hang: no heartbeat for {HANG_TIMEOUT:g} s (the last at step 3)"


@pytest.mark.long
def test_more_processes_than_a_rank_of_loaders_has(events: Events, ready: Ready, gate: Gate) -> None:
    count = 72
    args = (ready.address, gate.address, count)
    group = start(hang_workers.beat_with_many_below, args, events, hang_timeout=60, start_method="fork")
    ready.wait(count + 1)
    gate.open()
    assert result_of(group).return_values == {0: "{0}"}


# --- rest


@pytest.mark.slow
@pytest.mark.parametrize("way, step", [("plain", 0), ("child", 0), ("beat", 5), ("block", 4)])
def test_who_rests_may_take_any_time(way: str, step: int, events: Events, ready: Ready, gate: Gate) -> None:
    """And so may the processes below it; then heartbeats are expected again."""
    with begin(hang_workers.beat_and_rest, (ready.address, gate.address, way), events, seconds=IN_TIME) as group:
        ready.wait()
        assert group.wait(LONG) is None
        gate.open()
        result = result_of(group)
    if step:
        assert result.failures[0].message == f"Hang: no heartbeat for {IN_TIME:g} s (the last at step {step})"
    else:
        assert result.return_values == {0: "done"}
        assert "timer.expired" not in events.names()


@pytest.mark.slow
def test_a_rest_shields_no_parent(events: Events, ready: Ready, gate: Gate) -> None:
    with begin(hang_workers.rest_below, (ready.address, gate.address), events, seconds=IN_TIME) as group:
        ready.wait()
        failure = failure_of(group)
    assert failure.message == f"Hang: no heartbeat for {IN_TIME:g} s (the last at step 6)"


# --- the end of a program rests by itself


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, way",
    [
        ("spawn", "handler"),
        ("forkserver", "thread"),
        *(("fork", way) for way in ("handler", "thread", "handler, exits")),
    ],
)
def test_what_outlasts_a_function_may_take_any_time(
    method: str, way: str, events: Events, ready: Ready, gate: Gate
) -> None:
    with begin(hang_workers.end_slowly, (ready.address, gate.address, way), events, method, IN_TIME) as group:
        ready.wait()
        assert group.wait(LONG) is None
        gate.open()
        result = result_of(group)
    assert result.state == "succeeded"
    assert "timer.expired" not in events.names()


@pytest.mark.slow
@pytest.mark.parametrize("way, code", [("handler, fails", 1), ("handler, exits badly", 3)])
def test_a_teardown_that_hangs_has_the_grace_period(
    way: str, code: int, events: Events, ready: Ready, gate: Gate
) -> None:
    args = (ready.address, gate.address, way)
    with start(hang_workers.end_slowly, args, events, hang_timeout=3600, grace=0.1, start_method="fork") as group:
        failure = failure_of(group)
    assert failure.exitcode == code
    assert re.match(r"had not exited \d+(\.\d)? s after its ", failure.detail)
    assert "timer.expired" not in events.names()


SCRIPT = "from tests.support import hang_workers\nhang_workers.end_slowly({address!r}, {gate!r}, {way!r})\n"


@pytest.mark.slow
@pytest.mark.parametrize("way, code", [("handler", 0), ("thread, exits", 0), ("handler, fails", 1)])
def test_what_outlasts_a_script(way: str, code: int, ready: Ready, gate: Gate, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(address=ready.address, gate=gate.address, way=way))
    options = ("--hang-timeout", str(IN_TIME), "--grace", "0.1")
    command = [*RUN, "--log-dir", str(tmp_path / "logs"), *options, str(script)]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as run:
        if code == 0:
            ready.wait()
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(LONG)
            gate.open()
        _out, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    assert "no heartbeat" not in err
    assert bool(re.search(r"had not exited \d+(\.\d)? s after its exception", err)) == (code != 0)


# --- none at all

UNWATCHED = "phalanx: local {} not called phalanx.timer.beat() in 0.2s: the hang timeout does not watch {}\n"


@pytest.mark.slow
def test_a_program_without_heartbeats_is_announced(gate: Gate, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(gate.python())
    argv = (*RUN, "--hang-timeout", "0.2", "--log-dir", str(tmp_path), str(script))
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        assert UNWATCHED.format("rank 0 has", "it") in iter(launcher.stderr.readline, "")
        gate.open()
        assert launcher.stderr.read() == ""
    assert launcher.returncode == 0


@pytest.mark.slow
def test_nothing_of_that_kind_is_announced_where_one_has_come(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\nfrom phalanx.timer import beat, rest\nbeat()\nwith rest(): time.sleep(0.6)")
    argv = (*RUN, "--hang-timeout", "0.5", "--log-dir", str(tmp_path), str(script))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert "not called" not in done.stderr
