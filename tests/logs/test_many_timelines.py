"""Logs of several attempts at a time: their timelines are merged into one order; one timeline has several writers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from phalanx._base import clock
from phalanx._logs import merge as merging
from phalanx._logs import timeline_reader
from phalanx._logs.follower import Follower
from phalanx._logs.timeline_format import GREW
from phalanx._logs.timeline_writer import TimelineWriter
from tests.support.fake_clock import FakeClock
from tests.support.pump_tools import append

if TYPE_CHECKING:
    from pathlib import Path


START = 1_700_000_000.0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    it = FakeClock(100.0)
    monkeypatch.setattr(clock, "now", it)
    monkeypatch.setattr(clock, "wall", lambda: START - 100.0 + it())
    return it


class Attempt:
    """An attempt's timeline, and the log of one rank in it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder / f"attempt_{number}"
        self.folder.mkdir()
        self.number = number
        self.timeline = TimelineWriter(str(self.folder / "timeline"))
        self.log = str(self.folder / "stdout.log")

    def write(self, text: bytes) -> None:
        append(self.log, text)
        self.timeline.note(0, os.path.getsize(self.log))


def merged(attempts: list[Attempt]) -> list[tuple[float, int, bytes]]:
    followers = {(it.number, 0): Follower(it.log, rotates=False) for it in attempts}
    try:
        found = list(merging.merge(followers, {it.number: it.timeline.path for it in attempts}))
    finally:
        for follower in followers.values():
            follower.close()
    return [(round(moment - START, 3), stream[0], data) for moment, stream, data in found]


@pytest.mark.parametrize("most", [128, 1], ids=["open", "opened for each piece"])
def test_attempts_that_overlap_are_one_order(
    tmp_path: Path, time: FakeClock, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(merging, "_MOST_OPEN", most)
    attempts = [Attempt(tmp_path, number) for number in range(3)]
    expected = []
    for turn in range(6):
        attempt = attempts[(0, 1, 0, 2, 1, 0)[turn]]
        text = b"line %d\n" % turn
        attempt.write(text)
        expected.append((float(turn), attempt.number, text))
        time.advance(1.0)
    for attempt in attempts:
        attempt.timeline.close()
    assert merged(attempts) == expected


def test_a_timeline_that_was_replaced_since_it_was_opened_has_no_more_records(tmp_path: Path, time: FakeClock) -> None:
    attempt = Attempt(tmp_path, 0)
    attempt.write(b"one\n")
    time.advance(1.0)
    attempt.timeline.close()
    reader = timeline_reader.TimelineReader(attempt.timeline.path)
    reader.rest()
    assert [record[1:] for record in reader.records()] == [(GREW, 0, 4)]
    os.rename(attempt.timeline.path, f"{attempt.timeline.path}.old")
    TimelineWriter(attempt.timeline.path).close()
    append(attempt.timeline.path, b"phalanx3")
    assert list(reader.records()) == []
    reader.close()


def test_a_writer_that_has_rested_goes_on(tmp_path: Path, time: FakeClock) -> None:
    """Its file was closed in between: it is the same timeline, and not a second one in the same file."""
    attempt = Attempt(tmp_path, 0)
    for number in range(3):
        attempt.write(b"%d\n" % number)
        attempt.timeline.rest()
        assert attempt.timeline._file is None
        time.advance(1.0)
    attempt.timeline.close()
    assert merged([attempt]) == [(float(number), 0, b"%d\n" % number) for number in range(3)]
