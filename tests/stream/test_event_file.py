"""The events of a run: what began a trouble is kept, and how it stands, in bounded files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx._events import event_file
from phalanx._events.event_file import EventFile, EventLog
from phalanx._events.kinds import GroupStarting, GroupState
from tests.support.disks import fill


def event(number: int) -> dict[str, Any]:
    return {"name": "timer.expired", "timestamp": float(number), "monotonic_ns": number, "rank": 0, "scope": "s" * 40}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_without_end_take_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "EVENTS_SIZE", 2000)
    path = tmp_path / "events.jsonl"
    file = EventFile(str(path))
    for number in range(1000):
        file.write([event(number)])
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 3 * 2000
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, f"{path.name}.1", f"{path.name}.2"]
    first, before, newest = read(tmp_path / f"{path.name}.1"), read(tmp_path / f"{path.name}.2"), read(path)
    assert first == [event(number) for number in range(len(first))]
    assert before.pop(0)["name"] == "events.removed"
    removed = newest.pop(0)
    assert removed["name"] == "events.removed"
    last = before + newest
    assert last == [event(number) for number in range(1000 - len(last), 1000)]
    assert removed["count"] == 1000 - len(first) - len(last)


def test_few_events_are_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventFile(str(path))
    file.write([event(number) for number in range(3000)])
    file.write([event(3000)])
    assert read(path) == [event(number) for number in range(3001)]
    assert [each.name for each in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_folder_that_has_gone_is_no_trouble(tmp_path: Path) -> None:
    EventFile(str(tmp_path / "none" / "events.jsonl")).write([event(0)])


@pytest.mark.parametrize("most", [10_000, 20])
def test_what_a_full_disk_does_not_take_is_written_later(
    most: int, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or counted, if that is too much to keep."""
    monkeypatch.setattr(event_file, "MOST_HELD", most)
    said: list[str] = []
    path = small_disk / "events.jsonl"
    file = EventFile(str(path), said.append)
    file.write([event(number) for number in range(10)])
    fill(small_disk)
    for number in range(10, 110):
        file.write([event(number)])
        assert path.read_text().endswith("\n")
    assert len(said) == 1
    assert said[0].startswith("events.jsonl cannot be written: ")
    (small_disk / "filler").unlink()
    file.write([event(110)])
    found = read(path)
    removed = [each for each in found if each["name"] == "events.removed"]
    left = [each["monotonic_ns"] for each in found if each["name"] != "events.removed"]
    assert left == sorted(left)
    assert len(left) + sum(each["count"] for each in removed) == 111
    assert bool(removed) == (most == 20)
    assert left[-most:] == list(range(111))[-most:]


def test_a_line_that_a_killed_launcher_has_not_finished_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"name": "a')
    EventFile(str(path)).write([event(0)])
    assert path.read_text().splitlines()[0] == '{"name": "a'
    assert json.loads(path.read_text().splitlines()[1]) == event(0)


def test_another_launcher_of_the_run_keeps_its_oldest_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "EVENTS_SIZE", 2000)
    path = tmp_path / "events.jsonl"
    for launcher in range(2):
        file = EventFile(str(path))
        for number in range(100):
            file.write([event(1000 * launcher + number)])
    assert read(tmp_path / "events.jsonl.1")[0] == event(0)


def test_what_comes_before_the_folder_is_known_is_written_there(tmp_path: Path) -> None:
    log = EventLog(print)
    log([GroupState(0, 1, state="A")])
    assert list(tmp_path.iterdir()) == []
    log([GroupStarting(0, 2, nprocs=1, folder=str(tmp_path))])
    log([GroupState(0, 3, state="B"), GroupStarting(1, 4, nprocs=1, folder=str(tmp_path))])
    assert [each["monotonic_ns"] for each in read(tmp_path / "events.jsonl")] == [1, 2, 3, 4]


def test_a_run_without_logs_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = EventLog(print)
    log([GroupState(0, 1, state="A"), GroupStarting(0, 2, nprocs=1, folder=""), GroupState(0, 3, state="B")])
    assert list(tmp_path.iterdir()) == []
    assert log._early == []
