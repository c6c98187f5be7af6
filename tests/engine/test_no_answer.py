"""Disks, consoles and functions of the host's that do not answer: the group is stopped, and ends, without them.

A FIFO that nobody opens, or an event that nobody sets, stands for the disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from phalanx._base import stderr
from phalanx._engine import supervisor as supervisor_module
from phalanx._group import context as group_context
from phalanx._group import ending as group_ending
from phalanx.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, start_processes
from tests.support.helpers import TIMEOUT, alive, pass_gate, wait_gone
from tests.support.insides import supervisor_of
from tests.support.waits import shorten
from tests.support.workers import run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.support.helpers import Gate, Ready

pytestmark = [pytest.mark.usefixtures("own_temporary_folder"), pytest.mark.slow]


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What is waited for in vain, until the test is over."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("phalanx"):
            thread.join(TIMEOUT)


def pausing(ready: Ready) -> tuple[str, tuple[str, ...]]:
    return sys.executable, ("-S", "-c", f"import signal; {ready.python()}; signal.pause()")


def test_folders_that_cannot_be_made_now_hold_up_no_stop(
    ready: Ready, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def make() -> None:
        asked.set()
        never.wait()

    monkeypatch.setattr(group_context, "missing_folders", lambda _logs: [make])
    shorten(monkeypatch, ANSWER_WAIT=0.2)
    monkeypatch.setattr(group_ending, "TIDY", 0.2)
    binary, args = pausing(ready)
    with start_processes("g", binary, args, nprocs=2) as group:
        pids = ready.pids(2)
        assert asked.wait(TIMEOUT)
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < 5
        assert [pid for pid in pids if alive(pid)] == []
        result = group.wait(0)
        assert result is not None
        assert result.state == "stopped"


def test_folders_are_made_for_no_group_that_has_ended(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    first, ended, made = threading.Event(), threading.Event(), []

    def slow() -> None:
        first.set()
        ended.wait(TIMEOUT)

    monkeypatch.setattr(group_context, "missing_folders", lambda _logs: [slow, lambda: made.append(1)])
    monkeypatch.setattr(supervisor_module.Supervisor, "_finish_threads", lambda _self: None)
    with start_processes("g", "head", ("-c1", gate.address), nprocs=1) as group:
        assert first.wait(TIMEOUT)
        gate.open()
        group.wait(TIMEOUT)
        ended.set()
        assert supervisor_of(group)._chored.drain(TIMEOUT)
    assert not made


def test_folders_are_removed_after_the_last_that_is_made(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a disk has held up and that comes between two removals would keep those above it."""
    asked, answer, steps = threading.Event(), threading.Event(), []

    def make() -> None:
        asked.set()
        answer.wait(TIMEOUT)
        steps.append("made")

    monkeypatch.setattr(group_context, "missing_folders", lambda _logs: [make])
    monkeypatch.setattr(group_ending, "TIDY", 0.2)
    shorten(monkeypatch, ANSWER_WAIT=0.2)
    with start_processes(
        "g", "head", ("-c1", gate.address), nprocs=1, logs_specs=SlowToTidy(lambda: steps.append("removed"))
    ) as group:
        assert asked.wait(TIMEOUT)
        gate.open()
        group.wait(TIMEOUT)
    assert steps == []
    answer.set()
    assert supervisor_of(group)._chored.drain(TIMEOUT)
    assert steps == ["made", "removed"]


class SlowToTidy(DefaultLogsSpecs):
    """Logs on a disk that does not answer by the end."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def tidy(self, logs: LogsDest) -> None:
        self._wait()
        super().tidy(logs)


def test_a_close_waits_for_removal_no_longer_than_it_says(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_ending, "TIDY", 0.2)
    group = start_processes("g", "sh", ("-c", ":"), nprocs=1, logs_specs=SlowToTidy(never.wait))
    group.wait(TIMEOUT)
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    closing.join(TIMEOUT)
    assert not closing.is_alive()


class ErrorsIntoAPipe(LogsSpecs):
    """A layout of the user's own: a collector reads what the workers write to stderr."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        pipe = dict.fromkeys(envs, str(self._folder / "pipe"))
        errors = {rank: str(self._folder / f"{rank}.json") for rank in envs}
        return LogsDest(dict.fromkeys(envs, ""), pipe, tee_stderrs=pipe, error_files=errors)


def test_a_pipe_in_place_of_a_log_file_is_waited_for_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    specs = ErrorsIntoAPipe(tmp_path)
    with start_processes("g", "sh", ("-c", "echo oops >&2; exit 3"), nprocs=1, logs_specs=specs) as group:
        assert supervisor_of(group).ended.wait(TIMEOUT)
        os.close(reader)
        results: list[object] = []
        waiting = threading.Thread(target=lambda: results.append(group.wait()), daemon=True)
        waiting.start()
        waiting.join(TIMEOUT)
        assert not waiting.is_alive()
    assert results


IMPORTS = """
import os, sys
from phalanx.multiprocessing import start_processes

os.mkfifo("there")
with start_processes("g", "sh", ("-c", "sleep 600 & echo > there; wait"), nprocs=1) as group:
    open("there").read()
    assert group._supervisor._chored.drain(20)
    before = set(sys.modules)
    group.close(timeout=0.1)
    assert group._supervisor.mirror.leftovers
print(sorted(name for name in set(sys.modules) - before if name.startswith("phalanx._")))
"""


def test_what_the_end_needs_is_imported_before(tmp_path: Path) -> None:
    """The disk may not answer by then."""
    done = run_script(tmp_path, IMPORTS, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def ask_for_a_tracker(gate: str) -> int:
    threading.Thread(target=resource_tracker.ensure_running, daemon=True).start()
    pass_gate(gate)
    return 3


@pytest.mark.long
def test_a_stuck_resource_tracker_holds_up_no_result(
    gate: Gate, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getfd() -> int:
        gate.open(2)
        never.wait()
        raise OSError

    monkeypatch.setattr(resource_tracker, "_resource_tracker", resource_tracker.ResourceTracker())
    monkeypatch.setattr(resource_tracker, "getfd", getfd)
    with start_processes("g", ask_for_a_tracker, (gate.address,), nprocs=2, start_method="spawn") as group:
        result = group.wait()
        assert result.return_values == {0: 3, 1: 3}


# --- the command line

RUN = """
import os, sys, threading
from phalanx.cli.run import main
{setting}
main()
"""


@contextlib.contextmanager
def run(tmp_path: Path, ready: Ready, setting: str) -> Iterator[subprocess.Popen[bytes]]:
    script = tmp_path / "script.py"
    script.write_text(f"import signal; {ready.python()}; signal.pause()")
    options = ["--nproc-per-node", "2", "-r", "3", "--log-dir", str(tmp_path / "logs"), str(script)]
    code = RUN.format(setting=dedent(setting))
    with subprocess.Popen([sys.executable, "-c", code, *options], stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_record_that_cannot_be_written_delays_no_signal(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    """Neither as the workers start nor at the end."""
    setting = f"""
    from phalanx._runs import recorder
    from phalanx._runs import record
    recorder.PATIENCE = 0.2
    def write(*_):
        {ready.python(repr("writing"))}
        {gate.python()}
    record.write = write
    """
    with run(tmp_path, ready, setting) as process:
        said = ready.wait(3)
        said.remove("writing")
        process.send_signal(signal.SIGTERM)
        assert wait_gone(map(int, said)) == set()
        assert process.wait(TIMEOUT) == 128 + signal.SIGTERM


def test_a_console_that_takes_nothing_holds_back_no_signal(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    """Here it is a stand-in whose flush does not return; a terminal of another user, or a socket, are no better."""
    setting = f"""
    class Stream:
        encoding = "utf-8"
        def fileno(self):
            return 2
        def write(self, text):
            return len(text)
        def flush(self):
            if os.path.exists({str(tmp_path / "stuck")!r}):
                {gate.python()}
    sys.stderr = Stream()
    """
    with run(tmp_path, ready, setting) as process:
        pids = ready.pids(2)
        (tmp_path / "stuck").touch()
        process.send_signal(signal.SIGTERM)
        assert wait_gone(pids) == set()
        gate.open(100)  # the interpreter flushes it at its end as well
        assert process.wait(TIMEOUT) == 128 + signal.SIGTERM


def test_reports_come_in_order_and_a_fork_has_its_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stderr, "STALL", TIMEOUT)  # for a thread that does not run yet on a machine that is busy
    stderr.mention("one")
    stderr.mention("two")
    stderr.tell("three")
    pid = os.fork()
    if pid == 0:
        stderr.tell("four")
        os._exit(0)
    os.waitpid(pid, 0)
    assert capfd.readouterr().err == "one\ntwo\nthree\nfour\n"


def test_a_launcher_without_descriptors_reports_all_the_same(tmp_path: Path) -> None:
    """What the report needs is loaded before, and stderr is there."""
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('planted')")
    launcher = f"""
import resource, sys, threading
from phalanx.cli import main
from phalanx.multiprocessing import PContext

wait = PContext.wait_gone
def with_none(self, *args):
    if threading.current_thread() is threading.main_thread():  # what writes run.json looks at the group, too
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return wait(self, *args)
PContext.wait_gone = with_none
sys.argv = ["phalanx", "run", "--log-dir", {str(tmp_path / "logs")!r}, {str(script)!r}]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", launcher], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "error.json (unreadable: Too many open files)" in done.stderr
    assert 'File "<' not in done.stderr
