"""The record of a run whose workers are started again one by one."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from phalanx._events import agent_kinds, kinds
from phalanx._runs import record, workers_recorder
from phalanx._runs.workers_recorder import WorkersRecorder
from phalanx.multiprocessing import Outcome, RunProcsResult

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from phalanx._events.kinds import Event


class Log:
    """A recorder, and the events that it is given."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        envs = {rank: {"RANK": str(10 + rank)} for rank in range(3)}
        self.recorder = WorkersRecorder("serve.py", envs, run_id="r", command=["serve.py"], warn=pytest.fail)

    def take(self, *events: Event) -> dict[str, Any]:
        """Have these noted. Returns what is written then."""
        self.recorder([*events])
        record.read(str(self._folder))  # it is valid
        found: dict[str, Any] = json.loads((self._folder / "run.json").read_text())
        return found

    def start(self, rank: int, attempt: int) -> list[Event]:
        return [
            kinds.GroupStarting(attempt, 0, nprocs=1, folder=str(self._folder)),
            kinds.WorkerStarted(attempt, 1, rank=rank, pid=os.getpid()),
        ]

    def end(self, rank: int, attempt: int, code: int | None, step: int | None = None) -> list[Event]:
        """A worker fails with an exit code; None: its keeper is lost."""
        outcomes = {} if code is None else {rank: Outcome(rank, os.getpid(), "failed", code)}
        lost = code is None
        ended = kinds.GroupEnded(
            attempt, 2, state="failed", exitcode=1, cause="", lost=lost, result=RunProcsResult(outcomes=outcomes)
        )
        error = "no luck\nat all"
        return [
            ended,
            agent_kinds.AttemptEnded(
                attempt, 3, worker=10 + rank, state="failed", rank=10 + rank, exitcode=code, error=error, step=step,
                survivors=0, seconds=1.0,
            ),
        ]  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_each_attempt_has_the_workers_that_were_started_so_often(log: Log) -> None:
    run = log.take(
        *(event for rank in range(3) for event in log.start(rank, 0)), *log.end(1, 0, 3, 7), *log.start(1, 1)
    )
    cause = "rank 11: attempt 0: no luck"
    assert (run["state"], run["restart"], run["cause"]) == ("running", "worker", cause)
    first, second = run["attempts"]
    assert [(rank["rank"], rank["local_rank"], rank["state"]) for rank in first["ranks"]] == [
        (10, 0, "running"),
        (11, 1, "failed"),
        (12, 2, "running"),
    ]
    assert first["ranks"][1]["exitcode"] == 3
    assert first["ranks"][1]["cause"] == cause
    assert (first["step"], first["ended"]) == (7, None)
    assert [rank["rank"] for rank in second["ranks"]] == [11]
    assert second["ranks"][0]["pid_started"] > 0
    run = log.take(agent_kinds.RunEnded(1, 9, state="failed", exitcode=3, cause=cause))
    assert (run["state"], run["exit_code"]) == ("failed", 3)
    assert [rank["state"] for one in run["attempts"] for rank in one["ranks"]] == ["lost", "failed", "lost", "lost"]


def test_an_attempt_has_ended_when_all_its_workers_have(log: Log) -> None:
    run = log.take(*log.start(0, 0), *log.start(1, 0), *log.end(0, 0, 3))
    assert run["attempts"][0]["ended"] is None
    (attempt,) = log.take(*log.end(1, 0, None))["attempts"]
    assert attempt["ended"] >= attempt["started"]
    assert [rank["state"] for rank in attempt["ranks"]] == ["failed", "lost"]


def test_a_run_of_which_no_worker_could_be_started(log: Log) -> None:
    starting = log.start(0, 0)[0]
    run = log.take(starting, agent_kinds.RunEnded(0, 9, state="failed", exitcode=1, cause="no such file"))
    assert (run["state"], run["exit_code"], run["cause"], run["restart"]) == ("failed", 1, "no such file", "worker")
    assert [one["ranks"] for one in run["attempts"]] == [[]]


def test_of_very_many_starts_the_latest_of_each_worker_are_kept(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_recorder, "_MOST", 10)
    events = log.start(0, 0)
    for number in range(100):
        events += [*log.start(1, number), *log.end(1, number, 3)]
    attempts = log.take(*events)["attempts"]
    kept = [(one["number"], rank["local_rank"]) for one in attempts for rank in one["ranks"]]
    assert len(kept) <= 11
    assert kept[0] == (0, 0)
    assert kept[-2:] == [(98, 1), (99, 1)]
