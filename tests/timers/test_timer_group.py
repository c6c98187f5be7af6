"""Timers of a group, end to end: what hangs is found, explained and ended, and nobody else is."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from phalanx._base import clock, procfs
from phalanx._evidence.error_file import read_error_file, timer_detail, write_error_file, written_at
from phalanx._stacks import collect, dump, py_spy, request, snapshot
from phalanx._stacks.snapshot import Snapshot
from phalanx._timers import escalation, layout
from phalanx._timers.client import Seat
from phalanx._timers.hang import Hang, Timer
from phalanx._timers.hang_reporter import HangReporter
from phalanx._timers.table import TimerTable
from phalanx.multiprocessing import DefaultLogsSpecs, PContext, ProcessFailure, RunProcsResult, start_processes
from phalanx.timer import TimerSpecs, expires
from tests.support import hang_workers
from tests.support.disks import until
from tests.support.helpers import PYTHON, TIMEOUT, Gate, Ready, alive, pass_gate, rest, tell, wait_gone
from tests.support.timer_workers import wait_asleep
from tests.support.waits import wait_long_for_stacks

pytestmark = pytest.mark.usefixtures("own_temporary_folder")  # groups that failed leave their evidence

RUN = (sys.executable, "-m", "phalanx", "run")
HANG = r"Hang: 'load' \(.*hang_workers\.py:\d+\) was not left within 0\.1 s"


class Events:
    """What the group tells of its timers; tests wait for it."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._more = threading.Condition()

    def __call__(self, event: dict[str, Any]) -> None:
        with self._more:
            self.all.append(event)
            self._more.notify_all()

    def names(self, rank: int | None = None) -> list[str]:
        return [event["name"] for event in self.all if rank in (None, event.get("rank"))]

    def wait_for_refusal(self, count: int = 1) -> dict[str, Any]:
        return self.wait("request.refused", count)

    def wait(self, name: str, count: int = 1, rank: int | None = None) -> dict[str, Any]:
        with self._more:
            assert self._more.wait_for(lambda: self.names(rank).count(name) >= count, TIMEOUT), self.all
        return [event for event in self.all if event["name"] == name and rank in (None, event.get("rank"))][count - 1]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(autouse=True)
def patience() -> Iterator[pytest.MonkeyPatch]:
    """Stacks are waited for, until a test calls ``patience.undo()``."""
    with pytest.MonkeyPatch.context() as patched:
        wait_long_for_stacks(patched.setattr)
        yield patched


def wait_before_the_second_step(monkeypatch: pytest.MonkeyPatch, condition: Callable[[Hang], bool]) -> None:
    """Have a keeper that is a fork of this process take the second step of a hang when something is so, not sooner."""
    take = escalation.Escalation._take_step

    def wait_and_take(self: escalation.Escalation, step: int, hangs: list[Hang]) -> None:
        until = clock.now() + TIMEOUT
        while step == 1 and clock.now() < until and not all(map(condition, hangs)):
            os.sched_yield()
        take(self, step, hangs)

    monkeypatch.setattr(escalation.Escalation, "_take_step", wait_and_take)


def start(
    function: Callable[..., Any] | str, args: Any, events: Events | None, nprocs: int = 1, **options: Any
) -> PContext:
    specs = {"on_expiry": options.pop("on_expiry", "kill"), "hang_timeout": options.pop("hang_timeout", None)}
    envs = {rank: {"RANK": str(rank)} for rank in range(nprocs)}
    if (logs := options.pop("logs", None)) is not None:
        options["logs_specs"] = DefaultLogsSpecs(str(logs))
    return start_processes("hang", function, args, envs, timers=TimerSpecs(**specs, on_event=events), **options)


def of_timers(folder: Path) -> list[dict[str, Any]]:
    """The events of a run's file that are about timers."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["name"].startswith("timer.") or event["name"] == "worker.reaped"]


def result_of(group: PContext) -> RunProcsResult:
    result = group.wait(60)
    assert result is not None
    return result


def failure_of(group: PContext) -> ProcessFailure:
    failure = result_of(group).root_cause
    assert failure is not None
    return failure


# --- the demonstration

DEMO = """
import os, socket, threading
from phalanx import timer

def all_reduce():
    threading.Event().wait()

def read_batch(lock):
    with timer.expires(after=0.2, scope="read the batch"):
        lock.acquire()

if os.environ["RANK"] == "3":
    {gate}
    lock = threading.Lock()
    lock.acquire()
    read_batch(lock)
{ready}
all_reduce()
"""


def line_of(text: str, program: str) -> int:
    return next(number for number, line in enumerate(program.splitlines(), 1) if text in line)


@pytest.mark.long
def test_one_of_four_ranks_is_stuck_in_a_lock(ready: Ready, gate: Gate, tmp_path: Path) -> None:
    program = DEMO.format(gate=gate.python(), ready=ready.python())
    script = tmp_path / "train.py"
    script.write_text(program)
    code = "from tests.support.waits import wait_long_for_stacks as wait; wait(); from phalanx.cli import main; main()"
    options = ["--nproc-per-node", "4", "--log-dir", str(tmp_path / "logs"), "--on-expiry", "report,kill:0.05"]
    command = [sys.executable, "-c", code, "run", *options]
    with subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        pids = ready.pids(3)
        for pid in pids:
            wait_asleep(pid)  # in all_reduce, which follows
        gate.open()
        _out, err = run.communicate(timeout=60)
    assert run.returncode == 137, err
    assert wait_gone(pids) == set()
    place = f"{script}:{line_of('timer.expires', program)}"
    what = re.escape(f"'read the batch' ({place}) was not left within 0.2 s")
    hung = f"rank 3: {what}; "
    late = r"[\d.]+m?s over"
    where = re.escape(
        f"3 of 4 ranks wait in all_reduce (train.py:{line_of('.wait()', program)}); "
        f"rank 3 is in read_batch (train.py:{line_of('        lock.acquire()', program)})"
    )
    lines = err.splitlines()
    assert [line for line in lines if re.fullmatch(f"phalanx: {hung}{late}", line)], err
    assert [line for line in lines if re.fullmatch(f"phalanx: {hung}{late}; {where}; SIGKILL", line)], err
    report = err[err.index("Root Cause") :]
    assert re.search(r"rank +: 3 \(local_rank: 3\)\n +exitcode +: -9 .*\(SIGKILL\)", report)
    assert re.search(f"error +: Hang: {what}\n", report)
    detail = rf"{late} its deadline\n +{where}\n +stacks of all ranks: stacks-1\.txt in each rank's folder"
    assert re.search(f"detail +: {detail}", report)
    assert "in read_batch" in report[report.index("traceback") :]
    (folder,) = (tmp_path / "logs").glob("*/attempt_0")
    for rank in range(4):
        text = (folder / str(rank) / "stacks-1.txt").read_text()
        assert ("in read_batch" if rank == 3 else "in all_reduce") in text
    told = of_timers(folder.parent)
    assert [event["name"] for event in told] == ["timer.armed", "timer.expired", "worker.reaped"]
    for event in told:
        assert event["rank"] == 3
        assert event["scope"] == "read the batch"
        assert event["place"] == place
        assert abs(event["timestamp"] - clock.wall()) < 60
    assert told[0]["overdue"] == 0
    assert 0 < told[1]["overdue"] < told[2]["overdue"]
    assert 0 < told[2]["monotonic_ns"] - told[0]["monotonic_ns"] < 60 * clock.NS
    assert told[2]["signal"] == 9


# --- kinds of workers


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_function_that_hangs(method: str, events: Events, gate: Gate) -> None:
    group = start(hang_workers.hang_or_wait, (0.1, gate.address), events, 2, start_method=method)
    failure = failure_of(group)
    assert failure.local_rank == 0
    assert failure.exitcode == -signal.SIGKILL
    assert re.fullmatch(HANG, failure.message)
    assert "over its deadline\n" in failure.detail
    assert "in stuck" in failure.traceback
    assert events.names() == ["timer.armed", "timer.expired", "worker.reaped"]


@pytest.mark.slow
def test_a_binary_shows_what_the_kernel_knows_of_it(events: Events, ready: Ready, logs: Path) -> None:
    program = f"from tests.support import hang_workers as h; {ready.python()}; h.hang()"
    args = {0: ("-c", f'{PYTHON} -c "$0"; :', program), 1: ("-c", "exec sleep 600")}
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    env = {rank: {"PYTHONPATH": path} for rank in range(2)}
    # `hang` begins at once, so rank 1 may be a shell yet when rank 0 expires: it is no Python then, either, and has
    # none below it.
    group = start_processes(
        "hang", "/bin/sh", args, env, logs_specs=DefaultLogsSpecs(str(logs)), timers=TimerSpecs(on_event=events)
    )
    failure = failure_of(group)
    assert failure.local_rank == 0
    expired = events.wait("timer.expired")
    assert expired["rank"] == 0
    assert expired["pid"] != group.pids()[0]
    assert f", in process {expired['pid']} below the worker" in failure.message
    assert not alive(expired["pid"])
    assert failure.exitcode == -signal.SIGKILL, "the shell got over the end of its child"
    (asked,) = logs.glob("*/attempt_0/0/stacks-1.txt")
    assert "hang_workers.py" in asked.read_text(), "the program below the shell shows its stacks"
    (file,) = logs.glob("*/attempt_0/1/stacks-1.txt")
    text = file.read_text()
    assert text.startswith("# no Python stack: ")
    assert "State:" in text or "exited" in text


@pytest.mark.slow
@pytest.mark.parametrize("way", ["child", "orphan"])
def test_a_process_below_the_worker_hangs(way: str, events: Events, ready: Ready) -> None:
    group = start(hang_workers.fork_a_child_that_hangs, (ready.address, way), events, start_method="fork")
    (child,) = ready.pids()
    failure = failure_of(group)
    assert re.search(
        rf"'below' \(.*\) was not left within 0\.1 s, in process {child} below the worker", failure.message
    )
    assert events.wait("worker.reaped")["pid"] == child
    assert wait_gone([child]) == set()
    assert " in hang\n" in failure.traceback, "these are the stacks of the process that hangs"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, outside", [("fork", True), ("spawn", True), ("forkserver", True), ("fork", False), ("spawn", False)]
)
def test_each_process_below_the_worker_shows_stacks_of_its_own(
    method: str, outside: bool, events: Events, ready: Ready, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not outside:
        monkeypatch.setattr(py_spy, "find", lambda: "")
    group = start(hang_workers.hang_below, (method, ready.address), events, log_dir=str(logs))
    failure = failure_of(group)
    child = events.wait("timer.expired")["pid"]
    assert child in ready.pids(2)
    assert f", in process {child} below the worker" in failure.message
    assert re.search(r"\n  File .* in stuck\n  File .* in hang\n  File .* in hang_there\n", failure.traceback)
    assert "rank 0 is in stuck (hang_workers.py:" in failure.detail
    assert f"\nprocess {group.pids()[0]} of the same rank is in hang_below (hang_workers.py:" in failure.detail
    (file,) = logs.glob("**/0/stacks-1.txt")
    assert f"# process {group.pids()[0]} of the same rank\n" in file.read_text()


@pytest.mark.slow
def test_the_second_python_of_a_shell_shows_stacks_of_its_own(
    events: Events, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can be read from outside, each has to offer its own."""
    monkeypatch.setattr(py_spy, "find", lambda: "")
    first = "from phalanx import timer; timer.expires(60).__enter__()"
    second = "from tests.support import hang_workers; hang_workers.hang()"
    script = f'"{sys.executable}" -c "{first}"; "{sys.executable}" -c "{second}"; true'
    group = start("/bin/sh", {0: ("-c", script)}, events, log_dir=str(logs))
    failure = failure_of(group)
    assert " in hang\n" in failure.traceback
    pid = events.wait("worker.reaped")["pid"]
    (file,) = logs.glob(f"**/0/error.json.stacks.{pid}")
    assert f", process {pid}\n" in file.read_text()


def test_of_two_hangs_of_a_rank_none_is_lost(tmp_path: Path) -> None:
    error_file = str(tmp_path / "error.json")
    said: list[str] = []
    table = TimerTable(1)
    report = HangReporter(table, [("kill", 0.0)], {0: error_file}, said.append)
    hangs = [
        Hang(0, 1000 + number, False, Timer(number, 1, 5_000_000_000, 10**9, 0, scope, "t.py:4"))
        for number, scope in enumerate(["first", "second"])
    ]
    told = [hang.to_tuple() for hang in hangs]
    report.on_message("struck", int(signal.SIGKILL), 6_000_000_000, told, workers={0: os.getpid()}, ended={})
    report.finish()
    report.close()
    detail = timer_detail(error_file)
    message = read_error_file(error_file)[0]["message"]["message"]  # type: ignore[index]  # it is there
    assert message == "Hang: 'first' (t.py:4) was not left within 1 s, in process 1000 below the worker"
    also = "\nalso: 'second' (t.py:4) was not left within 1 s, in process 1001 below the worker; 1.0s over its deadline"
    assert also in detail
    assert [line.partition(";")[0] for line in said] == [
        "rank 0: 'first' (t.py:4) was not left within 1 s, in process 1000 below the worker",
        "rank 0: 'second' (t.py:4) was not left within 1 s, in process 1001 below the worker",
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_waiting_rank_is_dated_after_the_cause(
    order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 1; its timer expires half a millisecond sooner, and each is told of by itself."""
    monkeypatch.setattr(Snapshot, "outliers", lambda _snapshot: {1})
    files = {rank: str(tmp_path / f"{rank}.json") for rank in range(2)}
    table = TimerTable(2)
    report = HangReporter(table, [("kill", 0.0)], files, lambda _text: None)
    for rank in order:
        deadline = 5_000_000_000 + rank * 500_000
        hang = Hang(rank, 1000 + rank, True, Timer(rank, 1, deadline, 10**9, 0, "step", "t.py:4"))
        workers = {0: 1000, 1: 1001}
        report.on_message("struck", 9, 6_000_000_000, [hang.to_tuple()], workers=workers, ended={})
    report.finish()
    report.close()
    moments = [written_at(read_error_file(files[rank])[0]) for rank in range(2)]
    assert None not in moments
    assert moments[1] < moments[0]  # type: ignore[operator]  # none is missing


@pytest.mark.parametrize("recorded", [False, True])
def test_a_recorded_failure_needs_no_stacks(tmp_path: Path, recorded: bool) -> None:
    error_file, taken = str(tmp_path / "error.json"), threading.Event()
    table = TimerTable(1)
    report = HangReporter(table, [("term", 0.0)], {0: error_file}, lambda _text: None)
    with subprocess.Popen(["sleep", "60"]) as worker:
        try:
            if recorded:
                write_error_file(error_file, "ValueError: bad sample", "", pid=worker.pid)
            hang = Hang(0, worker.pid, True, Timer(0, 1, 5_000_000_000, 10**9, 0, "step", "t.py:4")).to_tuple()
            report.on_message(
                "hang", "term", int(signal.SIGTERM), 6_000_000_000, [hang],
                workers={0: worker.pid}, ended={}, evidence_taken=taken.set,
            )  # fmt: skip
            assert taken.wait(TIMEOUT)
        finally:
            worker.kill()
    report.finish()
    report.close()
    assert [path.name for path in tmp_path.glob("stacks-*")] == ([] if recorded else ["stacks-1.txt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "worker, on_expiry, exitcode, message, detail, traceback",
    [
        (
            hang_workers.handle_and_hang,
            "kill",
            -9,
            HANG,
            "\nit had recorded ValueError: bad sample before, and gone on",
            "",
        ),
        (hang_workers.fail_and_hang, "kill", -9, "ValueError: bad sample", "", ""),
        (hang_workers.close_all_and_hang, "kill", -9, HANG, "", ""),
        (hang_workers.stop_within_a_block, "terminate", -15, "Hang: 'stopped' .*", "", ""),
        (hang_workers.survive_and_raise, "terminate", 1, "Hang: 'deaf' .*", "", "Afterwards:\nTraceback"),
    ],
)
def test_a_failure_is_what_came_first_and_has_the_rest(
    worker: Callable[..., Any],
    on_expiry: str,
    exitcode: int,
    message: str,
    detail: str,
    traceback: str,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(escalation, "_SURVIVED", TIMEOUT)  # in a keeper that forks: a survivor is to end first
    failure = failure_of(start(worker, (), events, on_expiry=on_expiry, start_method="fork"))
    assert failure.exitcode == exitcode
    assert re.fullmatch(message, failure.message)
    assert detail in failure.detail
    assert traceback in failure.traceback
    assert "ValueError: later" in failure.traceback or not traceback


def test_dumps_without_end_keep_the_newest(tmp_path: Path) -> None:
    for number in range(1, 51):
        assert snapshot.write_stacks(str(tmp_path), f"dump {number}") == str(tmp_path / f"stacks-{number}.txt")
    kept = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.glob("stacks-*"))
    assert kept == list(range(51 - snapshot.KEPT, 51))
    assert (tmp_path / "stacks-50.txt").read_text() == "dump 50"


@pytest.mark.slow
def test_a_dead_process_below_does_not_kill_the_worker(
    events: Events, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_before_the_second_step(monkeypatch, lambda hang: not alive(hang.pid))
    with start(
        hang_workers.fork_a_child_that_dies, (ready.address,), events, on_expiry="report,kill:0.1", start_method="fork"
    ) as group:
        (child,) = ready.pids()
        assert events.wait("timer.expired")["pid"] == child
        os.kill(child, signal.SIGKILL)
        assert wait_gone([child]) == set()
        assert group.wait(0.3) is None
    assert events.names().count("worker.reaped") == 0


# --- steps


@pytest.mark.slow
def test_what_follows_an_expiry_in_order(events: Events, logs: Path) -> None:
    with start(
        hang_workers.hang_in_spite_of_sigterm,
        (0.05,),
        events,
        on_expiry="report,dump:0.05,terminate:0.05,kill:0.1",
        logs=logs,
    ) as group:  # the file of its events is finished when it is closed
        result = result_of(group)
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert events.names() == ["timer.armed", "timer.expired", "worker.reaped", "worker.reaped"]
    late = [event["overdue"] for event in events.all]
    assert late[2] >= 0.1
    assert late[2] + 0.1 <= late[3]
    assert [event["signal"] for event in events.all[2:]] == [signal.SIGTERM, signal.SIGKILL]
    assert list(logs.glob("*/attempt_0/0/stacks-1.txt"))
    (folder,) = logs.iterdir()
    assert of_timers(folder) == events.all


@pytest.mark.slow
@pytest.mark.parametrize("step", ["report", "dump"])
def test_after_a_report_the_timer_is_armed_again(step: str, events: Events, gate: Gate, logs: Path) -> None:
    args = (0.05, gate.address, gate.address)
    group = start(hang_workers.pass_late, args, events, on_expiry=step, logs=logs, start_method="fork")
    third = events.wait("timer.expired", 3)
    assert third["overdue"] >= 0.1
    gate.open(2)
    result = result_of(group)
    assert result.return_values == {0: "done"}
    assert set(events.names()) <= {"timer.armed", "timer.expired", "timer.left"}
    assert bool(list(logs.glob("*/attempt_0/0/stacks-*.txt"))) == (step == "dump")


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [True, False])
def test_a_block_left_between_two_steps_is_reported_once(
    is_late: bool, events: Events, ready: Ready, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next step: a launcher that is late with the evidence of a report has nothing to say of it."""
    second, out, steps = tmp_path / "second", tmp_path / "out", [tmp_path / "step 0", tmp_path / "step 1"]
    os.mkfifo(second)
    take, testified = escalation.Escalation._take_step, escalation.Escalation.evidence_taken

    def take_and_say(self: escalation.Escalation, step: int, hangs: list[Hang]) -> None:
        if step:
            until(out.exists)
        take(self, step, hangs)
        steps[step].touch()

    def testify_late(self: escalation.Escalation, serial: int) -> None:
        if is_late:
            until(out.exists)
        testified(self, serial)

    monkeypatch.setattr(escalation.Escalation, "_take_step", take_and_say)
    monkeypatch.setattr(escalation.Escalation, "evidence_taken", testify_late)
    args = (0.05, gate.address, str(second), ready.address)
    group = start(hang_workers.pass_late, args, events, on_expiry="report,kill:0.1", start_method="fork")
    until(steps[0].exists)
    gate.open()
    ready.wait()
    out.touch()
    until(steps[1].exists)
    with open(second, "wb", 0) as stream:
        stream.write(b".")
    assert result_of(group).return_values == {0: "done"}
    assert events.names() == ["timer.armed", "timer.expired", "timer.left"]
    assert events.wait("timer.left")["scope"] == "slow"


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["terminate", "terminate,kill:600"])
def test_a_survivor_is_not_blamed_for_a_later_failure(
    steps: str, events: Events, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escalation, "_SURVIVED", 0.05)  # in the keeper, which is a fork of this process
    args = (gate.address,)
    group = start(hang_workers.survive_or_fail, args, events, 2, on_expiry=steps, start_method="fork")
    assert events.wait("timer.left")["rank"] == 0
    gate.open()
    result = result_of(group)
    assert result.root_cause is not None
    assert result.root_cause.message == "ValueError: loss is nan"
    assert [result.outcomes[rank].state for rank in range(2)] == ["stopped", "failed"]
    assert events.names(0) == ["timer.armed", "timer.expired", "worker.reaped", "timer.left"]


@pytest.mark.slow
def test_the_hang_of_a_survivor_that_fails_is_reported(
    events: Events, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escalation, "_SURVIVED", 0.05)  # as above
    group = start(hang_workers.survive_and_exit, (gate.address,), events, on_expiry="terminate", start_method="fork")
    events.wait("timer.left")
    gate.open()
    failure = failure_of(group)
    assert failure.message == "exited with code 3; no error was recorded"
    assert re.fullmatch(r"it had hung before: 'deaf' \(.*\) was not left within 0\.1 s; .*", failure.detail)


@pytest.mark.slow
def test_the_most_timers_expire_and_hold_up_nothing(events: Events, gate: Gate, patience: pytest.MonkeyPatch) -> None:
    patience.undo()  # the stacks are taken four times in a row
    count = layout.SLOTS
    group = start(hang_workers.hold_many_or_fail, (count, gate.address), events, 2, on_expiry="report")
    events.wait("timer.expired", count)
    gate.open()
    result = result_of(group)
    assert result.root_cause is not None
    assert result.root_cause.local_rank == 1
    assert result.root_cause.exitcode == 3
    assert result.outcomes[0].state == "stopped"


# --- heartbeats


@pytest.mark.slow
def test_no_heartbeat_is_a_hang_once_there_has_been_one(events: Events, gate: Gate) -> None:
    """The second rank never beats: it may be starting, and its clock is the first rank's expiries."""
    with start(
        _beat_or_not, (gate.address,), events, 2, on_expiry="report", hang_timeout=0.1, start_method="fork"
    ) as group:
        assert events.wait("timer.expired", 3)["overdue"] >= 0
        gate.open(2)
        assert result_of(group).return_values == {0: None, 1: "fine"}
    assert {event["rank"] for event in events.all} == {0}


@pytest.mark.slow
def test_the_rank_has_to_beat_not_each_process(events: Events) -> None:
    group = start(hang_workers.beat_with_a_silent_child, (), events, on_expiry="report", hang_timeout=0.2)
    (child,) = result_of(group).return_values.values()
    # On a machine that is busy enough, the worker may miss a beat itself.
    assert {event["pid"] for event in events.all if event["name"] == "timer.expired"} <= {group.pids()[0]}
    assert child != group.pids()[0]


def _beat_or_not(gate: str) -> str | None:
    if os.environ["RANK"] == "1":
        return hang_workers.never_beat(gate)
    hang_workers.beat_once(41, gate)
    return None


@pytest.mark.slow
def test_a_hang_after_a_long_block_is_found(events: Events, ready: Ready, gate: Gate, tmp_path: Path) -> None:
    second = tmp_path / "second"
    os.mkfifo(second)
    args = (ready.address, gate.address, str(second))
    with start(hang_workers.beat_and_take_long, args, events, hang_timeout=0.1, start_method="fork") as group:
        ready.wait()
        assert group.wait(0.4) is None
        assert "timer.expired" not in events.names()
        before = clock.now_ns()
        gate.open()
        failure = failure_of(group)
    assert failure.message == "Hang: no heartbeat for 0.1 s (the last at step 7)"
    assert events.wait("timer.expired")["monotonic_ns"] - before >= 0.1 * clock.NS * 0.9


# --- whom it leaves alone


@pytest.mark.slow
def test_a_group_that_is_being_stopped_is_not_disturbed(events: Events, ready: Ready) -> None:
    group = start(hang_workers.hang_when_stopped, (ready.address,), events)
    ready.wait()
    group.close(timeout=0.4)
    assert "timer.expired" not in events.names()
    assert "worker.reaped" not in events.names()


@pytest.mark.slow
def test_a_stranger_at_the_table_is_refused(
    events: Events, ready: Ready, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """One is the launcher itself, one a child of it that has nothing to do with the group."""
    with (
        caplog.at_level(logging.WARNING, "phalanx.timer"),
        start(hang_workers.say_where_the_table_is, (ready.address, gate.address), events, start_method="fork") as group,
    ):
        (address,) = ready.wait()
        pid = os.fork()
        if pid == 0:
            try:
                seat = Seat(address)
                seat.arm(1, 1, layout.encode("a stranger's", ""))
                signal.pause()
            finally:
                os._exit(1)
        try:
            assert events.wait_for_refusal()["pid"] == pid
            with Seat(address) as own:
                own.arm(1, 1, layout.encode("the launcher's", ""))
                assert events.wait_for_refusal(2)["pid"] == os.getpid()
            assert alive(pid)
            gate.open()
            assert not result_of(group).is_failed()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert f"process {pid} is not in the group: its timers are not watched" in caplog.text


@pytest.mark.parametrize("timers", ["kill", 5, {"on_expiry": "kill"}])
def test_what_are_no_specs(timers: Any) -> None:
    with pytest.raises(TypeError, match="timers: expected a TimerSpecs, got "):
        start_processes("hang", hang_workers.hang, (), nprocs=1, timers=timers)


@pytest.mark.parametrize(
    "given, error",
    [
        ({"on_expiry": "nonsense"}, "on_expiry: 'nonsense' is no step"),
        ({"on_expiry": "kill,report"}, "on_expiry: 'report' comes after 'kill'"),
        ({"on_expiry": "kill,kill"}, "on_expiry: 'kill' comes after 'kill'"),
        ({"on_expiry": "report:x"}, "on_expiry: 'report:x': 'x': expected a time, 0 or more, like 90 (seconds)"),
        ({"on_expiry": "report:-1"}, "on_expiry: 'report:-1': '-1': expected a time, 0 or more"),
        ({"on_expiry": []}, "on_expiry: expected at least one of report, dump, terminate, kill"),
        ({"on_expiry": [("kill", 1, 2)]}, "on_expiry: expected names, or pairs"),
        ({"on_expiry": [("kill", True)]}, "on_expiry: expected seconds, got True"),
        ({"hang_timeout": 0}, "hang_timeout: expected more than 0 seconds, got 0"),
        ({"hang_timeout": -1}, "hang_timeout: expected more than 0 seconds, got -1"),
        ({"hang_timeout": float("nan")}, "hang_timeout: expected more than 0 seconds, got nan"),
        ({"hang_timeout": "5"}, "hang_timeout: expected seconds, got '5'"),
        ({"on_event": 5}, "on_event: expected a function of one dict, got 5"),
    ],
)
def test_specs_that_make_no_sense(given: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        TimerSpecs(**given)


@pytest.mark.slow
def test_hang_timeout_on_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import signal; from phalanx import timer\ntimer.progress(step=3)\nwhile True: signal.pause()\n")
    command = [*RUN, "--log-dir", str(tmp_path / "logs"), "--hang-timeout", "0.1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 137
    assert "rank 0: no heartbeat for 0.1 s (the last at step 3); " in done.stderr
    assert "Hang: no heartbeat for 0.1 s (the last at step 3)" in done.stderr


# --- what goes wrong meanwhile


@pytest.mark.slow
def test_a_full_disk_prevents_no_kill(events: Events, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Before the start: rank 0 hangs at once, and it is this process that writes of it.
    monkeypatch.setattr("phalanx._evidence.error_file.write_error_file", full)
    monkeypatch.setattr(snapshot, "write_stacks", full)
    group = start(hang_workers.hang_or_wait, (0.1, gate.address), events, 2, start_method="fork")
    failure = failure_of(group)
    assert failure.local_rank == 0
    assert failure.exitcode == -signal.SIGKILL
    assert re.match(HANG, failure.detail)


@pytest.mark.slow
def test_without_descriptors_the_keeper_ends_who_hangs(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    group = start(hang_workers.hang, (), events, start_method="fork")
    monkeypatch.setattr("posix.pidfd_open", none_left)  # which `Process` calls
    failure = failure_of(group)
    assert failure.exitcode == -signal.SIGKILL
    assert re.fullmatch(HANG, failure.message)


@pytest.mark.long
def test_who_cannot_be_looked_up_is_looked_up_again(
    events: Events, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def once(pid: int) -> list[int]:
        tried.append(pid)
        if len(tried) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return ancestors(pid)

    ancestors = escalation._ancestors
    monkeypatch.setattr(escalation, "_ancestors", once)  # in the keeper, which is a fork of this process
    monkeypatch.setattr(escalation, "_RETRY", 50_000_000)
    group = start(hang_workers.fork_a_child_that_hangs, (ready.address, "child"), events, start_method="fork")
    (child,) = ready.pids()
    assert result_of(group).is_failed()
    assert events.wait("worker.reaped")["pid"] == child
    assert "request.refused" not in events.names()


@pytest.mark.slow
def test_the_hang_is_recorded_before_sigterm(
    events: Events, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found"

    def end(self: escalation.Escalation, hang: Hang, worker: int, number: int) -> None:
        found.write_text("".join(path.read_text() for path in logs.glob("*/attempt_0/0/error.json")))
        ended(self, hang, worker, number)

    ended = escalation.Escalation._signal_rank
    monkeypatch.setattr(escalation.Escalation, "_signal_rank", end)  # in the keeper, which is a fork of this process
    group = start(hang_workers.hang, (), events, on_expiry="terminate", logs=logs, start_method="fork")
    assert result_of(group).failures[0].exitcode == -signal.SIGTERM
    assert "Hang: 'load'" in found.read_text()


def in_(function: str, head: str = "Thread 0x01") -> str:
    return f'{head} (most recent call first):\n  File "t.py", line 4 in {function}\n'


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What each process shows of which somebody wants the stacks: text by pid."""
    texts: dict[int, str] = {}

    class Collection:
        def __init__(self, targets: Iterable[request.Target], _seconds: float) -> None:
            self._pids = [target.pid for target in targets]

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def begin(self) -> None:
            pass

        wait = begin

        def finish(self) -> dict[int, str]:
            return {pid: texts[pid] for pid in self._pids}

    monkeypatch.setattr(collect, "Collection", Collection)
    monkeypatch.setattr(request, "working_process", lambda pid: pid)
    monkeypatch.setattr(procfs, "descendants", lambda _pids, _limit: [])
    return texts


FILES = {rank: f"/nowhere/{rank}/error.json" for rank in range(4)}


def test_the_next_hang_keeps_stacks_from_before_the_kill(says: dict[int, str]) -> None:
    it = Snapshot(FILES)
    says.update({10: in_("reduce"), 11: in_("read"), 12: in_("fetch")})
    first, second = hang_of(0, 10), hang_of(1, 12)
    it.take({0: 10, 1: 11}, [first], doomed=True)
    says.update(dict.fromkeys((10, 11), f"{dump.NO_STACK}{dump.GONE}\n"))
    it.take({0: 10, 1: 11}, [second], doomed=True)
    assert it.sum_up(first) == "rank 1 is in fetch (t.py:4); rank 0 is in reduce (t.py:4)"
    assert it.sum_up(second).split("\n") == [
        "rank 0 is in reduce (t.py:4); rank 1 is in fetch (t.py:4)",
        "process 11 of the same rank is in read (t.py:4)",
    ]
    unseen = "rank 0 is in reduce (t.py:4); rank 1 shows no Python stack (it was not looked at)"
    assert it.sum_up(hang_of(1, 13)).partition("\n")[0] == unseen


def test_a_rank_is_where_the_thread_is_that_hangs(says: dict[int, str]) -> None:
    it = Snapshot(FILES)
    says.update(dict.fromkeys(range(10, 14), in_("fetch", "Thread 0x02") + "\n" + in_("train")))
    hangs = [hang_of(rank, 10 + rank, thread=2) for rank in range(3)]
    it.take({rank: 10 + rank for rank in range(4)}, hangs, doomed=True)
    assert it.sum_up(hangs[0]) == "3 of 4 ranks, rank 0 among them, are in fetch (t.py:4); rank 3 is in train (t.py:4)"
    assert it.outliers() == {3}
    last = hang_of(3, 13, thread=2)
    it.take({rank: 10 + rank for rank in range(4)}, [last], doomed=True)
    assert it.sum_up(last) == "all 4 ranks are in fetch (t.py:4)"
    assert it.outliers() == set()


def within(path: str, function: str) -> str:
    """A main thread that is in a function of an installed package, which is called by `step`."""
    head = "Thread 0x01 (most recent call first):\n"
    return f'{head}  File "/x/site-packages/{path}", line 9 in {function}\n  File "t.py", line 7 in step\n'


ALL_REDUCE = within("torch/distributed/distributed_c10d.py", "all_reduce")
BACKWARD = within("torch/autograd/graph.py", "_engine_run_backward")
FUNCTIONAL = f"""Thread 0x01 (most recent call first):
  File "/x/site-packages/torch/_ops.py", line 882 in redispatch
  File "/x/site-packages/torch/_library/autograd.py", line 41 in forward_no_grad
  File "/x/site-packages/torch/_ops.py", line 1279 in __call__
{within("torch/distributed/_functional_collectives.py", "wait_tensor").partition(chr(10))[2]}"""


@pytest.mark.parametrize(
    "texts, found",
    [
        ((ALL_REDUCE, in_("read")), {1}),
        ((in_("read"), BACKWARD), {0}),
        ((FUNCTIONAL, ALL_REDUCE.replace("step", "one")), set()),
        ((FUNCTIONAL, in_("read")), {1}),
        ((within("torch/_ops.py", "__call__"), ALL_REDUCE.replace("step", "one")), {0}),
        ((BACKWARD, within("torch/utils/data/dataloader.py", "__next__")), {1}),  # one place of the user's
        ((ALL_REDUCE, in_("read"), in_("fetch"), f"{dump.NO_STACK}it offers none\n"), {1, 2}),
        ((in_("read"), in_("fetch")), set()),
        ((ALL_REDUCE.replace("step", "one"), BACKWARD), set()),
        ((f"{dump.NO_STACK}it offers none\n", ALL_REDUCE), set()),
    ],
)
def test_who_waits_for_others_is_not_what_they_wait_for(
    texts: tuple[str, ...], found: set[int], says: dict[int, str]
) -> None:
    """Where no place has most of the ranks, as with two; and where all are in the user's call of a framework."""
    it = Snapshot(FILES)
    says.update(dict(enumerate(texts, 10)))
    hangs = [hang_of(rank, 10 + rank) for rank in range(len(texts))]
    it.take({rank: 10 + rank for rank in range(len(texts))}, hangs, doomed=True)
    assert it.outliers() == found


def test_who_waits_is_told_by_the_thread_that_hangs(says: dict[int, str]) -> None:
    it = Snapshot(FILES)
    text = ALL_REDUCE.replace("0x01", "0x02") + "\n" + in_("read")
    says.update(dict.fromkeys((10, 11), text))
    hangs = [hang_of(0, 10, thread=2), hang_of(1, 11, thread=1)]
    it.take({0: 10, 1: 11}, hangs, doomed=True)
    assert it.outliers() == {1}
    assert [ident for ident in (0, 1, 2, 3) if dump.waits_for_peers(text, ident)] == [
        2
    ]  # else the main thread, the last


def test_an_unread_thread_is_not_replaced_by_another(says: dict[int, str]) -> None:
    it = Snapshot(FILES)
    says[10] = in_("train")
    says[11] = f"# {dump.MAIN_ALONE}\n" + in_("train", "Stack")
    gone, unknown = hang_of(0, 10, thread=2), hang_of(1, 11, thread=2)
    it.take({0: 10, 1: 11}, [gone, unknown], doomed=False)
    why = "the thread that hangs is not among those that could be read"
    assert it.sum_up(gone) == f"rank 1 is in train (t.py:4); rank 0 shows no Python stack ({why})"
    assert it.sum_up(unknown).endswith(
        "; rank 1 is in train (t.py:4); of rank 1 it is the main thread, which need not be the one that hangs"
    )


def hang_of(rank: int, pid: int, *, thread: int = 0, deadline: int = 1) -> Hang:
    return Hang(rank, pid, True, Timer(0, 1, deadline, 1, thread, "", "t.py:4"))


@pytest.mark.slow
def test_no_descriptor_of_a_snapshot_outlives_its_taking() -> None:
    before = os.listdir("/proc/self/fd")
    hangs = [hang_of(0, os.getpid())]
    Snapshot({0: "/nowhere/error.json"}).take({0: os.getpid()}, hangs, doomed=False)
    assert os.listdir("/proc/self/fd") == before


# --- processes that stand at breakpoints


@pytest.fixture
def second_gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path / "second") as it:
        yield it


def stand(address: str, gate: str, seconds: float, location: str = "train.py:7") -> int:
    """Stand at a breakpoint until the gate opens, as a debugger has a process do. Return the worker's pid."""
    with Seat(os.environ[layout.TIMERS_ENV]) as seat:
        slot = seat.stand(location, seconds)
        tell(address, str(os.getpid()))
        pass_gate(gate)
        seat.go_on(slot)
    return os.getpid()


def stand_below(address: str, gate: str) -> None:
    """Have a child stand at a breakpoint, and be in a block meanwhile."""
    if not os.fork():
        stand(address, gate, 3600)
        rest()
    with expires(0.1, scope="load"):
        rest()


def one_stands(rank: int, address: str, gate: str, second: str) -> None:
    """Rank 0 stands; rank 1 is in a block, and passes the second gate."""
    if not rank:
        stand(address, gate, 3600)
        return
    with expires(0.5, scope="load"):
        tell(address, str(os.getpid()))
        pass_gate(second)


@pytest.mark.slow
@pytest.mark.parametrize("is_left", [True, False])
def test_nothing_hangs_while_a_rank_stands_at_a_breakpoint(
    is_left: bool, events: Events, ready: Ready, gate: Gate, second_gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    args = {rank: (rank, ready.address, gate.address, second_gate.address) for rank in range(2)}
    with (
        caplog.at_level(logging.WARNING, "phalanx.timer"),
        start(one_stands, args, events, nprocs=2, start_method="fork", hang_timeout=0.5) as group,
    ):
        ready.wait(2)
        assert group.wait(1.5) is None
        assert [one.breakpoint for one in group.status().values()] == ["train.py:7", None]
        assert "timer.expired" not in events.names()
        if is_left:
            second_gate.open()
            gate.open()
            assert result_of(group).succeeded
            assert [one.breakpoint for one in group.status().values()] == [None, None]
            assert "timer.expired" not in events.names()
        else:  # the block is not left, and its timer goes on after that
            gate.open()
            failure = failure_of(group)
            assert failure.local_rank == 1
            assert re.match(r"Hang: 'load' \(.*\) was not left within 0\.5 s", str(failure.message))
    assert "stopped at" not in caplog.text  # in a group that is no run, the worker itself writes where it is reached
    assert events.wait("timer.breakpoint")["place"] == "train.py:7"


@pytest.mark.slow
def test_a_breakpoint_to_which_nobody_attaches_is_a_hang(events: Events, ready: Ready, gate: Gate) -> None:
    with start(stand, (ready.address, gate.address, 0.2), events, start_method="fork") as group:
        failure = failure_of(group)
    assert failure.message == "Hang: breakpoint at train.py:7: nobody attached in 0.2 s"


@pytest.mark.slow
def test_the_end_of_a_process_that_stands_ends_the_rest(events: Events, ready: Ready, gate: Gate) -> None:
    with start(stand_below, (ready.address, gate.address), events, start_method="fork") as group:
        [pid] = map(int, ready.wait())
        assert group.wait(0.5) is None
        os.kill(pid, signal.SIGKILL)
        failure = failure_of(group)
    assert re.match(r"Hang: 'load' \(.*\) was not left within 0\.1 s", str(failure.message))


def fail_or_stand(rank: int, address: str, gate: str, second: str) -> None:
    """Rank 0 stands; rank 1 fails at the second gate."""
    if rank:
        tell(address, str(os.getpid()))
        pass_gate(second)
        raise ValueError("no such sample")
    stand(address, gate, 3600)
    rest()


@pytest.mark.long
def test_the_settle_window_waits_for_a_rank_at_a_breakpoint(
    events: Events, ready: Ready, gate: Gate, second_gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than the launcher waits for a keeper that is silent."""
    args = {rank: (rank, ready.address, gate.address, second_gate.address) for rank in range(2)}
    with start(fail_or_stand, args, events, nprocs=2, start_method="fork") as group:
        ready.wait(2)
        second_gate.open()
        assert group.wait(7) is None
        assert alive(group.pids()[0])
        assert caplog.text.count("the group goes on until no worker stands at a breakpoint") == 1
        gate.open()
        result = result_of(group)
    assert result.root_cause is not None
    assert (result.root_cause.local_rank, result.outcomes[0].state) == (1, "stopped")


@pytest.mark.slow
def test_a_group_whose_rank_stands_can_be_closed(events: Events, ready: Ready, gate: Gate) -> None:
    with start(stand, (ready.address, gate.address, 3600), events, nprocs=2, start_method="fork"):
        pids = ready.wait(2)
    assert wait_gone(map(int, pids)) == set()
