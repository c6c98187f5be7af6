"""A failure that nobody asks about is seen all the same: the traceback at once, one ERROR of the logger `phalanx`."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import queue
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from phalanx.agent import RunResult
from phalanx.agent import WorkerState as State
from phalanx.errors import ChildFailedError
from phalanx.multiprocessing import (
    DefaultLogsSpecs,
    KeeperLostError,
    Leftover,
    Outcome,
    ProcessFailure,
    RunProcsResult,
    Std,
    start_processes,
)
from phalanx.spawn import ProcessRaisedException, spawn
from tests.support.command import Place
from tests.support.helpers import TIMEOUT, Gate, Ready, pass_gate, tell
from tests.support.workers import run_script

METHODS = ("spawn", "forkserver", "fork")
LAST = "ValueError: loss is nan"

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder")]


def train(rank: int) -> None:
    if rank == 1:
        raise ValueError("loss is nan")


class Log(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)

    def next(self) -> str:
        """The next ERROR."""
        return self.records.get(timeout=TIMEOUT).getMessage()


@pytest.fixture
def log() -> Iterator[Log]:
    logger, handler = logging.getLogger("phalanx"), Log()
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


SCRIPT = """
import logging, os, sys, threading, time
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
import phalanx.spawn as mp

def train(rank):
    if rank == 1:
        raise ValueError("loss is nan")

def run(**options):
    with start_processes("train", train, args={0: (0,), 1: (1,)}, **options) as group:
        group.wait()

if __name__ == "__main__":
    BODY
    print("all done")
"""


def script(folder: Path, body: str) -> str:
    """What a program writes to stderr, which runs groups and does not look at what becomes of them."""
    env = {"TMPDIR": str(folder)}
    done = run_script(folder, SCRIPT.replace("BODY", indent(dedent(body), "    ").strip()), env=env)
    assert (done.returncode, done.stdout) == (0, "all done\n"), done.stderr
    return done.stderr


# --- the traceback, and the ERROR


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_failure_is_seen_though_nobody_looks_at_the_result(method: str, tmp_path: Path) -> None:
    """From a thread, too."""
    call = f"run(start_method={method!r})"
    in_thread = f"thread = threading.Thread(target=lambda: {call}); thread.start(); thread.join()"
    err = script(tmp_path, in_thread if method == "spawn" else call)
    head, trace, *_, last, line = err.splitlines()
    assert (head, trace, last) == ("phalanx: rank 1 failed:", "Traceback (most recent call last):", LAST)
    assert err.count("Traceback") == 1
    found = re.fullmatch(f"phalanx: the group 'train' has failed: rank 1, {LAST}; its files are in (.*)", line)
    assert found is not None, line
    assert found[1].startswith(f"{tmp_path}/phalanx_")
    assert (Path(found[1]) / "1" / "error.json").exists()


@pytest.mark.slow
def test_logging_decides_where_the_error_goes(tmp_path: Path) -> None:
    body = """
    import io
    logger, real = logging.getLogger("phalanx"), sys.stderr
    sys.stderr = io.StringIO()
    run()
    sys.stdout.flush()
    assert sys.stderr.getvalue().startswith("phalanx: the group"), sys.stderr.getvalue()
    sys.stderr = real
    nowhere = logging.NullHandler()
    logger.addHandler(nowhere)
    run()
    logger.removeHandler(nowhere)
    logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s")
    run()
    """
    err = script(tmp_path, body)
    assert err.splitlines()[-1].startswith(f"ERROR:phalanx:the group 'train' has failed: rank 1, {LAST}")
    assert (err.count("the group"), err.count("phalanx: the group")) == (1, 0)
    assert err.count("Traceback") == 3  # the workers write to the descriptor


@pytest.mark.slow
def test_a_traceback_is_where_stderr_goes_and_nowhere_else(tmp_path: Path) -> None:
    for stream, shown in (("redirects", 0), ("tee", 1)):
        logs = tmp_path / stream
        err = script(tmp_path, f"run(logs_specs=DefaultLogsSpecs({str(logs)!r}, {stream}=Std.ALL))")
        assert err.count("Traceback") == err.count(f"[1] {LAST}") == shown
        assert err.count("phalanx: the group 'train' has failed") == 1
        [path] = logs.glob("*/attempt_0/1/stderr.log")
        assert path.read_text().count("Traceback") == 1
        assert path.read_text().startswith("Traceback")


def wait_or_fail(address: str) -> None:
    if not address:
        raise ValueError("loss is nan")
    pass_gate(address)


def test_it_is_logged_while_others_use_their_grace(log: Log, ready: Ready, gate: Gate) -> None:
    args = {0: (gate.address, ready.address), 1: (gate.address, "")}
    with start_processes("q", ignore_or_fail, args, grace=600.0) as group:
        ready.wait()
        gate.open(1)
        assert f"rank 1, {LAST}" in log.next()
        assert group.wait(0) is None
        group.close(signal.SIGKILL)
    assert log.records.empty()


def ignore_or_fail(gate: str, ready: str) -> None:
    if not ready:
        pass_gate(gate)
        raise ValueError("loss is nan")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(ready, "ignores SIGTERM")
    signal.pause()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_first_to_fail_is_named_though_it_has_not_exited(method: str, log: Log, gate: Gate, ready: Ready) -> None:
    args = {0: (0, gate.address, ready.address), 1: (1, gate.address, ready.address)}
    with start_processes("slow", leave_slowly, args, start_method=method, grace=600.0) as group:
        ready.wait()
        gate.open(1)  # rank 0 goes on, and fails of what rank 1 has done
        assert f"rank 1, {LAST}" in log.next()
        assert group.wait(0) is None
        group.close(signal.SIGKILL)
    result = group.wait()
    assert result.root_cause is not None
    assert result.root_cause.local_rank == 1


def leave_slowly(rank: int, gate: str, ready: str) -> None:
    if rank == 0:
        pass_gate(gate)
        raise ConnectionResetError("connection closed by peer")
    import atexit

    def linger() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(ready, "leaves")
        signal.pause()

    atexit.register(linger)
    raise ValueError("loss is nan")


def test_what_a_program_said_last_is_in_it(log: Log, tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    with start_processes("p", "sh", ("-c", "echo no data >&2; exit 3"), nprocs=1, logs_specs=logs):
        said = log.next()
    assert "rank 0, exited with code 3; stderr ends with: no data; its files are in " in said
    with start_processes("p", "sh", ("-c", "kill -9 $$"), nprocs=1) as group:
        group.wait()
    said = log.next()
    assert "Signal 9 (SIGKILL) received by PID" in said
    assert "(SIGKILL, not sent by us)" in said
    assert "its files" not in said  # there are none, and the folder goes with the group
    assert log.records.empty()


class Unloadable:
    """Can be pickled, and cannot be unpickled in the launcher."""

    def __reduce__(self) -> Any:
        return load_here, (os.getpid(),)


def load_here(pid: int) -> None:
    if pid != os.getpid():
        raise ValueError("not here")


def test_a_value_that_cannot_be_unpickled_is_logged(log: Log) -> None:
    with start_processes("v", Unloadable, (), nprocs=1) as group:
        assert group.wait().is_failed()
    said = log.next()
    assert "rank 0, ValueError: not here" in said
    assert (Path(said.rpartition(" ")[2]) / "0" / "error.json").exists()
    assert log.records.empty()


def test_a_group_that_succeeds_or_is_closed_says_nothing(log: Log, gate: Gate) -> None:
    with start_processes("p", pow, (2, 3), nprocs=2) as group:
        assert group.wait().raise_if_failed().return_values == {0: 8, 1: 8}
    with start_processes("p", wait_or_fail, (gate.address,), nprocs=2) as group:
        pass
    assert group.wait().state == "stopped"
    assert log.records.empty()
    with start_processes("k", wait_or_fail, (gate.address,), nprocs=1) as group:
        assert group._supervisor is not None
        keeper = group._supervisor._keeper.keeper
        assert keeper is not None
        keeper.signal(signal.SIGKILL)
        assert "the group 'k' has failed: the group's keeper" in log.next()  # a lost one is a failure
        with pytest.raises(KeeperLostError):
            group.wait()
    assert log.records.empty()


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Lets no attribute be set."""

    text: str


def raise_frozen() -> None:
    pid = os.fork()
    if not pid:
        raise ValueError("below")
    os.waitpid(pid, 0)
    raise FrozenError("is nan")


def test_a_rank_is_no_fork_of_its_own_nor_needs_attributes(log: Log, capfd: pytest.CaptureFixture[str]) -> None:
    """A fork of a worker prints its traceback as itself, and an exception that lets no attribute be set is printed."""
    with start_processes("f", raise_frozen, (), nprocs=1) as group:
        assert group.wait().failures[0].message == "FrozenError: is nan"
    assert "rank 0, FrozenError: is nan" in log.next()
    err = capfd.readouterr().err
    assert err.startswith("Traceback")
    assert (err.count("Traceback"), err.count("ValueError: below"), err.count("rank 0 failed")) == (2, 1, 1)
    assert "FrozenInstanceError" not in err
    assert "phalanx/_engine" not in err.partition("rank 0 failed")[2]
    assert log.records.empty()


def test_a_handler_that_raises_blocks_or_exits_holds_up_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    logger, freed = logging.getLogger("phalanx"), threading.Event()

    class Does(logging.Handler):
        def __init__(self, what: Exception | SystemExit | None) -> None:
            super().__init__()
            self.what = what

        def emit(self, _record: logging.LogRecord) -> None:
            if self.what is not None:
                raise self.what
            freed.wait(TIMEOUT)

    for handler in (Does(OSError("no network")), Does(SystemExit(9)), Does(None)):
        logger.addHandler(handler)
        try:
            with start_processes("h", train, {0: (0,), 1: (1,)}) as group:
                result = group.wait()
            assert result.failures.keys() == {1}
        finally:
            freed.set()
            logger.removeHandler(handler)
    err = capfd.readouterr().err
    for raised in ("OSError('no network')", "SystemExit(9)"):
        assert f"a handler of the log has raised {raised} at: the group 'h' has failed: rank 1" in err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_console_that_nobody_reads_holds_up_nobody(method: str, tmp_path: Path) -> None:
    body = f"""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    os.dup2(write, 2)
    with start_processes("train", train, args={{0: (0,), 1: (1,)}}, start_method={method!r}) as group:
        assert group.wait({TIMEOUT}).failures.keys() == {{1}}
    with start_processes("exit", sys.exit, args=("no data",), nprocs=1, start_method={method!r}) as group:
        assert group.wait({TIMEOUT}).failures.keys() == {{0}}
    """
    assert script(tmp_path, body) == ""


@pytest.mark.slow
def test_a_fork_of_the_host_logs_nothing(tmp_path: Path) -> None:
    body = """
    import warnings
    warnings.simplefilter("ignore")  # a fork of a process with threads
    gone = threading.Event()
    with start_processes("train", train, args={0: (0,), 1: (1,)}) as group:
        group.when_gone(gone.set)
        assert gone.wait(TIMEOUT)
        pid = os.fork()
        if not pid:
            os._exit(not group.wait_gone().is_failed())
        assert os.waitpid(pid, 0)[1] == 0
    """
    err = script(tmp_path, body.replace("TIMEOUT", str(TIMEOUT)))
    assert err.count("phalanx: the group") == 1


# --- where the caller is given the failure in any case


@pytest.mark.slow
def test_spawn_raises_the_traceback_and_that_is_all(tmp_path: Path) -> None:
    body = "mp.spawn(train, nprocs=2)"
    done = run_script(tmp_path, SCRIPT.replace("BODY", body))
    assert done.stderr.count(LAST) == 1
    assert done.stderr.count("Traceback") == 2  # of the launcher, and of the process
    assert "phalanx: " not in done.stderr
    body = 'from phalanx.launcher import *; launch_agent(LaunchConfig(1, 1, 2), "false", [])'
    done = run_script(tmp_path, SCRIPT.replace("BODY", body), env={"TMPDIR": str(tmp_path)})
    assert "phalanx: the group" not in done.stderr
    assert done.stderr.count("Root Cause") == 1


@pytest.mark.slow
def test_the_command_prints_its_report_and_no_more(place: Place) -> None:
    path = place.write("raise ValueError('loss is nan')")
    for options in ((), ("--run-path",)):
        done = place.run("--nproc-per-node", 1, *options, path)
        assert done.status == 1
        assert "has failed" not in done.err
        assert (done.err.count("Root Cause"), done.err.count("Traceback")) == (1, 2)  # rank 0's, and the report's


def test_spawn_without_a_join_logs_it(log: Log, capfd: pytest.CaptureFixture[str]) -> None:
    context = spawn(train, nprocs=2, join=False)
    assert log.next() == f"the group 'train' has failed: rank 1, {LAST}"
    with pytest.raises(ProcessRaisedException) as caught:
        context.join(TIMEOUT)
    assert LAST in str(caught.value)
    assert len(repr(caught.value)) < 300
    assert capfd.readouterr().err == ""


# --- results


def test_raise_if_failed_raises_the_report(gate: Gate) -> None:
    with start_processes("train", train, {0: (0,), 1: (1,)}) as group:
        result = group.wait()
    with pytest.raises(ChildFailedError, match="train FAILED") as caught:
        result.raise_if_failed()
    assert caught.value.get_first_failure()[0] == 1
    assert f"logs      : {result.log_dir}" in str(caught.value)
    with start_processes("closed", wait_or_fail, (gate.address,), nprocs=1) as group:
        pass
    with pytest.raises(RuntimeError, match="the group 'closed' was stopped: rank 0: stopped by us"):
        group.wait().raise_if_failed()
    assert pickle.loads(pickle.dumps(result)) == result


def test_results_and_failures_have_short_reprs() -> None:
    long = "x" * 10_000
    failure = ProcessFailure(1, 4242, 1, "<N/A>", detail=long, stderr_tail=long, told=(long, long, 1))
    killed = failure.replace(message=f"{long}\n{long}", exitcode=-9)
    outcomes = {rank: Outcome(rank, 4242 + rank, "stopped", -15, 15, 10**15, notice=10) for rank in range(99)}
    failures = dict.fromkeys(range(99), killed)
    result = RunProcsResult({}, failures, {0: long}, {0: long}, outcomes, name=long, log_dir=long)
    agent = RunResult(State.FAILED, {0: long}, failures)
    left = Leftover(4711, long, 2, 12.34, 15, None)
    error = ChildFailedError("train", {1: failure})
    raised = ProcessRaisedException(f"\n\n-- Process 1\n{long}", 1, 4242)
    for value in (failure, killed, outcomes[0], result, RunProcsResult(), agent, left, error, raised):
        assert len(repr(value)) < 300, value
        assert "\n" not in repr(value)
    wiped = failure.replace(message="ValueError: a\033[2Jb\033[31mc\a")
    raised = ProcessRaisedException("ValueError: a\033[2Jb\a", 1, 4242)
    for value in (wiped, RunProcsResult({}, {1: wiped}, outcomes=outcomes), raised):
        assert repr(value).isprintable(), value
    with start_processes("train", train, {0: (0,), 1: (1,)}) as group:
        result = group.wait()
    assert repr(result) == f"<RunProcsResult 'train': failed, 2 ranks; rank 1: {LAST}>"
    pid = result.failures[1].pid
    assert repr(result.failures[1]) == f"<ProcessFailure of rank 1, pid {pid}, exit code 1: {LAST}>"


# --- temporary folders


def recover() -> None:
    from phalanx.errors import record

    @record
    def fail() -> None:
        raise ValueError("handled")

    try:
        fail()
    except ValueError:
        return


def test_a_temporary_folder_goes_with_a_group_that_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    with start_processes("well", recover, (), nprocs=2) as group:
        group.wait().raise_if_failed()
        assert list(folder.glob("phalanx_*/run_*/attempt_0/*/error.json"))
    assert not list(folder.iterdir())
    with start_processes("well", "echo", ("hello",), nprocs=1, redirects=Std.ALL) as group:
        result = group.wait()
    assert Path(result.stdouts[0]).read_text() == "hello\n"  # what a user wanted in files stays
    with start_processes("ill", train, (1,), nprocs=1) as group:
        result = group.wait()
    assert Path(result.failures[0].error_file).exists()
