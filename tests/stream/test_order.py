"""What happens to groups and agents, event by event, in the order in which it happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx._base.threads import Latch
from phalanx.agent import LocalElasticAgent, WorkerSpec
from phalanx.multiprocessing import DefaultLogsSpecs, KeeperLostError, start_processes
from phalanx.timer import TimerSpecs
from tests.engine.test_lost_helpers import lose_both
from tests.support import hang_workers
from tests.support.forks import code_of_fork
from tests.support.helpers import PYTHON, TIMEOUT, Gate, Ready, pass_gate, until
from tests.support.insides import helpers_of

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

WAITS = "echo up; exec sleep 600"
STARTED = ["group.starting", "worker.started 0", "worker.started 1", "group.running"]
GONE = ["group.state SWEEPING", "group.state DRAINING", "group.gone"]


class Heard:
    """An `on_event`: keeps what it is called with."""

    def __init__(self, gate: Latch | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self._gate = gate
        self._more = threading.Condition()

    def __call__(self, event: dict[str, Any]) -> None:
        if self._gate is not None:
            assert self._gate.wait(TIMEOUT)
        with self._more:
            self.events.append(event)
            self._more.notify_all()

    @property
    def lines(self) -> list[str]:
        return [line_of(event) for event in self.events]

    def wait(self, line: str) -> None:
        with self._more:
            assert self._more.wait_for(lambda: line in self.lines, TIMEOUT), self.lines


def line_of(event: dict[str, Any]) -> str:
    """The name of an event, whose it is, and how it is."""
    facts = [event.get(name) for name in ("rank", "state", "status")]
    return " ".join([event["name"], *(str(fact) for fact in facts if fact is not None)])


def read(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("**/events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def sh(*scripts: str) -> dict[int, tuple[str, str]]:
    return {rank: ("-c", script) for rank, script in enumerate(scripts)}


def fail_once_the_other_is_up(ready: Ready, gate: Gate) -> dict[int, tuple[str, str]]:
    up = f'{PYTHON} -S -c "{ready.python("0")}"'
    wait = f'{PYTHON} -S -c "{gate.python()}"'
    return sh(f"{up}; exec sleep 600", f"{wait}; exit 3")


def test_a_group_that_fails(ready: Ready, gate: Gate) -> None:
    heard = Heard()
    with start_processes("g", "/bin/sh", fail_once_the_other_is_up(ready, gate), on_event=heard) as group:
        ready.wait()
        pids = group.pids()
        comm = Path(f"/proc/{pids[0]}/comm")
        until(lambda: comm.read_text() == "sleep\n")  # who has told that it is up may be about to exit
        gate.open()
        group.wait()
    assert heard.lines == [
        *STARTED,
        "worker.exited 1 failed",
        "group.state SETTLING",
        "group.state STOPPING",
        "worker.signalled 0",
        "worker.exited 0 stopped",
        *GONE,
        "group.ended failed",
    ]
    exits = [event for event in heard.events if event["name"] == "worker.exited"]
    assert [(event["pid"], event["exitcode"], event["signal_sent"]) for event in exits] == [
        (pids[1], 3, None),
        (pids[0], -signal.SIGTERM, signal.SIGTERM),
    ]
    moments = [event["monotonic_ns"] for event in heard.events]
    assert moments == sorted(moments)
    assert {event["attempt"] for event in heard.events} == {0}
    assert heard.events[-1]["cause"] == "rank 1: exited with code 3; no error was recorded"


def test_a_group_that_is_stopped() -> None:
    heard = Heard()
    with start_processes("g", "sleep", ("600",), nprocs=2, on_event=heard):
        heard.wait("group.running")
    exits = sorted(heard.lines[7:9])  # whoever is faster
    assert exits == ["worker.exited 0 stopped", "worker.exited 1 stopped"]
    assert heard.lines == [
        *STARTED,
        *["group.state STOPPING", "worker.signalled 0", "worker.signalled 1"],
        *heard.lines[7:9],
        *GONE,
    ]


def test_a_group_that_is_lost() -> None:
    """The guard takes over from a keeper that was killed."""
    heard = Heard()
    with start_processes("g", "sleep", ("600",), nprocs=2, on_event=heard) as group:
        heard.wait("group.running")
        os.kill(helpers_of(group)[1], signal.SIGKILL)
        with pytest.raises(KeeperLostError):
            group.wait(TIMEOUT)
    exits = ["worker.exited 0 stopped", "worker.exited 1 stopped"]
    assert sorted(line for line in heard.lines if line.startswith("worker.exited")) == exits
    assert [line for line in heard.lines if line not in exits] == [
        *[*STARTED, "group.state KILLING", "group.state DRAINING", "group.lost", "group.gone", "group.ended failed"]
    ]
    (lost,) = [event for event in heard.events if event["name"] == "group.lost"]
    assert lost["error"] == "the group's keeper process was killed by signal 9"
    assert heard.events[-1]["cause"].startswith(lost["error"])


def test_a_group_whose_helpers_are_both_lost() -> None:
    heard = Heard()
    with start_processes("g", "sleep", ("600",), nprocs=2, on_event=heard) as group:
        heard.wait("group.running")
        lose_both(group)
        with pytest.raises(KeeperLostError):
            group.wait(TIMEOUT)
    assert [line for line in heard.lines if not line.startswith("worker.exited")][:5] == [*STARTED, "group.lost"]
    assert [event["name"] for event in heard.events][-2:] == ["group.gone", "group.ended"]


@pytest.mark.slow
def test_a_group_that_hangs(logs: Path) -> None:
    heard, of_timers = Heard(), Heard()
    specs = DefaultLogsSpecs(str(logs))
    timers = TimerSpecs(on_event=of_timers)
    with start_processes(
        "g", hang_workers.hang, (), nprocs=1, logs_specs=specs, timers=timers, on_event=heard
    ) as group:
        group.wait()
    assert heard.lines == [
        *["group.starting", "worker.started 0", "group.running"],
        *["timer.armed 0", "timer.expired 0", "worker.reaped 0", "worker.exited 0 failed"],
        *GONE,
        "group.ended failed",
    ]
    assert heard.events[-5]["timer_signal"] == signal.SIGKILL
    assert of_timers.events == heard.events[3:6]
    assert read(logs) == heard.events


def test_a_group_that_leaves_something_behind() -> None:
    heard = Heard()
    leaves = "sleep 600 & until grep -aq ^sleep /proc/$!/cmdline; do :; done; exit 0"
    with start_processes("g", "/bin/sh", ("-c", leaves), nprocs=1, on_event=heard) as group:
        group.wait()
    (swept,) = [event for event in heard.events if event["name"] == "group.swept"]
    assert (swept["rank"], swept["command"]) == (0, "sleep 600")
    assert heard.lines[-3:] == ["group.swept 0", "group.gone", "group.ended succeeded"]


def test_a_group_that_cannot_be_started() -> None:
    heard = Heard()
    with pytest.raises(OSError, match="worker 0 was not started"):
        start_processes("g", "/bin/sh", sh("exit 0"), {0: {"X": "x" * (1 << 20)}}, on_event=heard)
    heard.wait("group.not_started")
    assert heard.lines[0] == "group.starting"
    assert heard.lines[-1] == "group.not_started"


def test_an_on_event_that_raises_gets_every_event(caplog: pytest.LogCaptureFixture) -> None:
    names: list[str] = []

    def raises(event: dict[str, Any]) -> None:
        names.append(event["name"])
        raise KeyboardInterrupt(event["name"])

    with start_processes("g", "true", nprocs=2, on_event=raises) as group:
        result = group.wait()
    assert result.succeeded
    assert names[0] == "group.starting"
    assert names[-1] == "group.ended"
    assert [record.getMessage() for record in caplog.records] == ["on_event raised at group.starting"]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="on_event: expected a function of one dict, got 3"):
        start_processes("g", "true", nprocs=1, on_event=3)  # type: ignore[arg-type]  # what is refused
    spec = WorkerSpec("r", 1, None, entrypoint="true")
    with pytest.raises(TypeError, match="on_event: expected a function of one dict, got 3"):
        LocalElasticAgent(spec, DefaultLogsSpecs(), on_event=3)  # type: ignore[arg-type]  # as above


# --- slow observers


def test_a_slow_observer_delays_no_stop() -> None:
    gate = Latch()
    heard = Heard(gate)
    with start_processes("g", "sleep", ("600",), nprocs=2, on_event=heard) as group:
        group.order_close(signal.SIGTERM, TIMEOUT)
        result = group.wait_gone(TIMEOUT)
        assert result is not None
        assert result.state == "stopped"
        assert heard.events == []
        gate.open()
    assert heard.lines[:4] == STARTED
    assert "group.gone" in heard.lines


def wait_and_fail(address: str) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2":
        sys.exit(3)
    pass_gate(address)


@pytest.mark.slow
def test_a_slow_observer_delays_no_restart(gate: Gate, logs: Path) -> None:
    """It is still at the first event when the third attempt runs, and misses nothing."""
    let_go = Latch()
    heard, quick = Heard(let_go), Heard()
    spec = WorkerSpec("r", 1, None, entrypoint=wait_and_fail, args=(gate.address,), max_restarts=2)
    agent = LocalElasticAgent(
        spec, DefaultLogsSpecs(str(logs)), "fork", timers=TimerSpecs(on_event=quick), on_event=heard
    )
    seen: list[int] = []

    def let() -> None:
        gate.open()  # returns when the worker of the third attempt is there
        seen.append(len(heard.events))
        let_go.open()

    thread = threading.Thread(target=let)
    thread.start()
    assert agent.run().state.value == "SUCCEEDED"
    thread.join()
    assert seen == [0]
    assert heard.events == read(logs)
    assert [event["attempt"] for event in heard.events if event["name"] == "group.running"] == [0, 1, 2]


# --- agents


ATTEMPT = [
    *[
        "agent.state STARTING",
        "agent.status RENDEZVOUS",
        "agent.step",
        "agent.status ASSIGN_WORKER_RANKS",
        "agent.step",
    ],
    *["group.starting", "worker.started 0", "group.running", "agent.step", "agent.step", "agent.status START"],
]


def fail_often() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2":
        sys.exit(3)


@pytest.mark.parametrize("restarts", [3, 1])
@pytest.mark.slow
def test_an_agent_that_restarts_twice_and_succeeds_or_gives_up(restarts: int, logs: Path) -> None:
    heard = Heard()
    spec = WorkerSpec("r", 1, None, entrypoint=fail_often, max_restarts=restarts)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(logs)), on_event=heard)
    state = agent.run().state.value
    failed = [
        *[*ATTEMPT, "agent.state RUNNING", "worker.exited 0 failed", *GONE, "group.ended failed", "agent.step"],
        "attempt.ended 0 failed",
    ]
    retried = [*failed, "restart.decided", "agent.state WAITING"]
    if restarts == 3:
        assert state == "SUCCEEDED"
        expected = [
            *[*retried, *retried, *ATTEMPT, "agent.state RUNNING", "worker.exited 0 succeeded"],
            *["group.state LINGERING", "group.state DRAINING", "group.gone", "group.ended succeeded"],
            *["attempt.ended succeeded", "agent.state SUCCEEDED", "agent.ended SUCCEEDED", "agent.step"],
            "run.ended succeeded",
        ]
    else:
        assert state == "FAILED"
        expected = [*retried, *failed, "agent.gave_up", "agent.state FAILED", "agent.ended FAILED", "agent.step"]
        expected.append("run.ended failed")
    # A worker sends that it leaves before it exits, and may have exited when that arrives.
    lines = [line for line in heard.lines if line not in ("group.state SETTLING", "group.state STOPPING")]
    # The agent's thread and that of the group go on side by side when the group is up.
    side_by_side = {"agent.step", "agent.status START", "agent.state RUNNING"}
    assert [line for line in lines if line not in side_by_side] == [
        line for line in expected if line not in side_by_side
    ]
    assert sorted(lines) == sorted(expected)
    assert [line for line in heard.lines if line.startswith("agent.")] == [
        line for line in expected if line.startswith("agent.")
    ]
    assert read(logs) == heard.events


# --- forks of the host


def test_a_fork_of_the_host_neither_emits_nor_writes(logs: Path) -> None:
    heard = Heard()
    specs = DefaultLogsSpecs(str(logs))
    with start_processes("g", "true", nprocs=1, logs_specs=specs, record=True, on_event=heard) as group:
        assert group._started().ended.wait(TIMEOUT)

        def work() -> bool:
            result = group.wait(TIMEOUT)
            group.close()
            return result is not None and result.succeeded

        assert code_of_fork(work) == 0
        assert "group.ended succeeded" not in heard.lines
        group.wait(TIMEOUT)
    assert heard.lines.count("group.ended succeeded") == 1
    assert read(logs) == heard.events


# --- what an agent tells others


def test_an_agent_whose_destination_is_mistyped_starts_nothing(tmp_path: Path) -> None:
    spec = WorkerSpec("r", 1, None, entrypoint="touch", args=(str(tmp_path / "x"),), event_log_handler="consle")
    with pytest.raises(KeyError, match="event_log_handler: there is no event handler 'consle'"):
        LocalElasticAgent(spec, DefaultLogsSpecs()).run()
    assert not (tmp_path / "x").exists()
