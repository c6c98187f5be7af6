"""The record of a run whose workers are started again one by one."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from phalanx._logs.layout import LogsDest
from phalanx._outcomes.outcome import Outcome
from phalanx._runs import record, workers_recorder
from phalanx._runs.workers_recorder import WorkersRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

pytestmark = pytest.mark.once


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[WorkersRecorder]:
    (tmp_path / "attempt_0").mkdir()
    envs = {rank: {"RANK": str(10 + rank)} for rank in range(3)}
    it = WorkersRecorder("serve.py", envs, run_id="r", command=["serve.py"], warn=pytest.fail)
    it.logs = LogsDest(timeline=str(tmp_path / "attempt_0" / "timeline"))
    yield it
    it.finish()


def written(recorder: WorkersRecorder, folder: Path) -> dict[str, Any]:
    recorder.finish()
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    record.read(str(folder))  # it is valid
    return found


def failed(rank: int) -> Outcome:
    return Outcome(rank, os.getpid(), "failed", 3)


def test_each_attempt_has_the_workers_that_were_started_so_often(recorder: WorkersRecorder, tmp_path: Path) -> None:
    for rank in range(3):
        recorder.record_worker_start(rank, 0, os.getpid())
    recorder.record_worker_end(1, 0, failed(1), cause="rank 11: attempt 1: no luck\nat all", step=7)
    recorder.record_worker_start(1, 1, os.getpid())
    run = written(recorder, tmp_path)
    assert (run["state"], run["restart"], run["cause"]) == ("running", "worker", "rank 11: attempt 1: no luck")
    first, second = run["attempts"]
    assert [(rank["rank"], rank["local_rank"], rank["state"]) for rank in first["ranks"]] == [
        (10, 0, "running"),
        (11, 1, "failed"),
        (12, 2, "running"),
    ]
    assert first["ranks"][1]["exitcode"] == 3
    assert first["ranks"][1]["cause"] == "rank 11: attempt 1: no luck"
    assert (first["step"], first["ended"]) == (7, None)
    assert [rank["rank"] for rank in second["ranks"]] == [11]
    assert second["ranks"][0]["pid_started"] > 0
    recorder.record_end_and_wait("failed", 3, "rank 11: attempt 1: no luck")
    run = written(recorder, tmp_path)
    assert (run["state"], run["exit_code"]) == ("failed", 3)
    assert [rank["state"] for one in run["attempts"] for rank in one["ranks"]] == ["lost", "failed", "lost", "lost"]


def test_an_attempt_has_ended_when_all_its_workers_have(recorder: WorkersRecorder, tmp_path: Path) -> None:
    for rank in range(2):
        recorder.record_worker_start(rank, 0, os.getpid())
    recorder.record_worker_end(0, 0, failed(0))
    assert written(recorder, tmp_path)["attempts"][0]["ended"] is None
    recorder.record_worker_end(1, 0, None)
    (attempt,) = written(recorder, tmp_path)["attempts"]
    assert attempt["ended"] >= attempt["started"]
    assert [rank["state"] for rank in attempt["ranks"]] == ["failed", "lost"]


def test_of_very_many_starts_the_latest_of_each_worker_are_kept(
    recorder: WorkersRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_recorder, "_MOST", 10)
    recorder.record_worker_start(0, 0, os.getpid())
    for number in range(100):
        recorder.record_worker_start(1, number, os.getpid())
        recorder.record_worker_end(1, number, failed(1))
    attempts = written(recorder, tmp_path)["attempts"]
    kept = [(one["number"], rank["local_rank"]) for one in attempts for rank in one["ranks"]]
    assert len(kept) <= 11
    assert kept[0] == (0, 0)
    assert kept[-2:] == [(98, 1), (99, 1)]
