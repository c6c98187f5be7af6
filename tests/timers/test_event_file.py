"""The events of a run: what began a trouble is kept, and how it stands, in bounded files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from phalanx._timers import event_file
from phalanx._timers.event_file import EventFile

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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
