"""`phalanx logs` against a merge that is written plainly, over random histories of what can happen to log files.

What the reader may do, beyond the plain merge, is stated here and nowhere else: a time is wrong by `BOUND` at most; and
lines that were written after a cut that no look has seen (the file had grown beyond its old size by then) are there,
once, and in the order of their stream, but may have the times of those that they have replaced.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx._base import clock
from phalanx._logs import timeline as timeline_module
from phalanx._logs.timeline import APART, Growth, TimelineWriter
from phalanx._runs.catalog import RunDir
from phalanx.cli._reader import Reader
from phalanx.multiprocessing import ConsoleSpecs
from tests.logs.test_rotated_files import compress, rotate
from tests.support.fake_clock import FakeClock

HISTORIES = int(os.environ.get("PHALANX_TEST_HISTORIES", "150"))
BOUND = APART + 0.01 + 0.002  # the clocks; growths that are noted together; milliseconds, twice
STREAMS = {0: True, 1: True, 2: False}  # the timeline's numbers, and which are rotated
START = 1.7e9

slowly = [HealthCheck.too_slow, HealthCheck.data_too_large]
histories = settings(deadline=None, max_examples=HISTORIES, suppress_health_check=slowly)


class Piece:
    """Bytes that were written at once, as far as they are still in a file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.look = sys.maxsize  # the number of the look that has seen it
        self.time = 0.0  # the wall clock's then
        self.loose = False


class Log:
    """One stream: real files, and what is in them."""

    def __init__(self, path: Path, *, rotates: bool) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        path.touch()
        self.rotates = rotates
        self.growth = Growth(str(path), rotates=rotates)
        self.aside: dict[int, list[Piece]] = {}
        self.unseen: list[int] = []  # those that were set aside since the last look
        self.removed_unseen = False
        self.newest: list[Piece] = []
        self.seen = 0  # bytes of the newest, at the last look
        self.count = 0

    def files(self) -> list[list[Piece]]:
        return [*(self.aside[number] for number in sorted(self.aside)), self.newest]

    def write(self, data: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(data)
        self.newest.append(Piece(data))

    def cut(self, size: int) -> None:
        if size > os.path.getsize(self.path):
            return
        os.truncate(self.path, size)
        for piece in self.newest:
            piece.data, size = piece.data[:size], max(0, size - len(piece.data))

    def rotate(self) -> None:
        if not self.rotates or not b"".join(piece.data for piece in self.newest).endswith(b"\n"):
            return
        self.count += 1
        rotate(self.path, self.count)
        self.aside[self.count], self.newest = self.newest, []
        self.unseen.append(self.count)

    def remove(self, which: int) -> None:
        if self.aside:
            number = sorted(self.aside)[which % len(self.aside)]
            for name in (f"{self.path}.{number}", f"{self.path}.{number}.gz"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            del self.aside[number]

    def compress(self, which: int) -> None:
        plain = [number for number in sorted(self.aside) if os.path.exists(f"{self.path}.{number}")]
        if plain:
            compress(self.path, plain[which % len(plain)])

    def look(self, look: int, time: float) -> None:
        """What a look at it sees."""
        for file in (*(self.aside.get(number) for number in self.unseen), self.newest):
            if file is not None:
                self._see(file, look, time)
            self.seen = 0
        self.unseen = []
        self.seen = sum(len(piece.data) for piece in self.newest)

    def _see(self, file: list[Piece], look: int, time: float) -> None:
        cut = sum(len(piece.data) for piece in file) < self.seen
        place = 0
        for piece in file:
            if cut or piece.look == sys.maxsize:
                piece.loose = not cut and place < self.seen
                piece.look, piece.time = look, time
            place += len(piece.data)

    def end(self) -> None:
        """Nobody looks any more."""
        known = self.aside.get(self.unseen[0]) if self.unseen else self.newest
        if known is None:  # removed: the reader takes the next one for it
            for piece in (piece for file in self.files() for piece in file):
                piece.loose |= piece.look == sys.maxsize
        else:
            self._see(known, sys.maxsize, 0.0)


class Line:
    """A line that must be shown."""

    def __init__(self, pieces: list[Piece], text: bytes, *, ended: bool) -> None:
        self.text = text.decode()
        self.look = pieces[-1].look if ended else sys.maxsize
        self.time = pieces[-1].time
        self.loose = pieces[-1].loose or pieces[-1].look == sys.maxsize


def reference(log: Log) -> list[Line]:
    """All lines of a stream."""
    lines, text, pieces = [], b"", list[Piece]()
    for piece in (piece for file in log.files() for piece in file):
        for part in piece.data.splitlines(keepends=True):
            text += part
            pieces.append(piece)
            if part.endswith(b"\n"):
                lines.append(Line(pieces, text[:-1], ended=True))
                text, pieces = b"", []
    if text:
        lines.append(Line(pieces, text, ended=False))
    return lines


class History:
    """What happens, to files and to clocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = {
            number: Log(folder / str(number // 2) / ("stderr.log" if number % 2 else "stdout.log"), rotates=rotates)
            for number, rotates in STREAMS.items()
        }
        self.timeline = TimelineWriter(str(folder / "timeline"))
        self.clock = FakeClock(100.0)
        self.wall = START
        self._looks = 0

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.wall += seconds

    def _wall(self) -> float:
        return self.wall

    def look(self, number: int) -> None:
        log = self.logs[number]
        for file, size in log.growth.look():
            self.timeline.note(number, size, file)
        self._looks += 1
        log.look(self._looks, self.wall)

    def happen(self, events: list[tuple[Any, ...]]) -> None:
        with mock.patch.object(clock, "now", self.clock), mock.patch.object(clock, "wall", self._wall):
            for number in STREAMS:  # the pump looks when it begins
                self.look(number)
            for count, (what, number, argument, looks) in enumerate(events):
                log = self.logs[number]
                if what == "write":
                    log.write(b"".join(b"%d.%d.%d%s" % (number, count, *part) for part in enumerate(argument)))
                elif what == "cut":
                    log.cut(argument)
                elif what == "pass":
                    self.pass_time(argument)
                elif what == "step":
                    self.wall += argument
                elif what == "flush":
                    self.timeline.flush()
                else:
                    getattr(log, what)(*argument)
                if looks:
                    self.look(number)
            self.timeline.close()
        for log in self.logs.values():
            log.end()


def shown(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What `phalanx logs --log-format json` shows."""
    out = io.StringIO()
    run = RunDir(str(folder), None, "", "succeeded", 0.0)
    with (
        mock.patch.object(sys, "stdout", out),
        contextlib.closing(Reader(run, 0, str(folder), ConsoleSpecs(format="json"))) as reader,
    ):
        reader.read(**options)
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    for row in rows:
        row["number"] = 2 * row["rank"] + (row["stream"] == "stderr")
        row["time"] = datetime.fromisoformat(row["time"]).timestamp()
    return rows


NUMBERS = st.sampled_from(sorted(STREAMS))
ENDS = st.sampled_from([b"\n", b"\n", b"\n", b"-", b"-" * 50 + b"\n"])


def event(what: str, argument: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(what), NUMBERS, argument, st.sampled_from([True, True, False]))


WHICH = st.tuples(st.integers(0, 5))
WRITES = event("write", st.lists(ENDS, min_size=1, max_size=5))
EVENTS = st.one_of(
    WRITES,
    WRITES,
    WRITES,
    event("rotate", st.just(())),
    event("cut", st.sampled_from([0, 0, 0, 7])),
    event("rotate", st.just(())),
    event("remove", WHICH),
    event("compress", WHICH),
    event("pass", st.sampled_from([0.001, 0.004, 0.02, 1.0, 65.6, 3600.0])),
    event("step", st.sampled_from([-0.009, 0.009, 0.011, -5.0, 86400.0, -3600.0])),
    event("flush", st.just(None)),
)


@contextlib.contextmanager
def after(events: list[tuple[Any, ...]]) -> Iterator[tuple[History, Path]]:
    with tempfile.TemporaryDirectory() as name:
        history = History(Path(name))
        try:
            history.happen(events)
            yield history, Path(name)
        finally:
            history.timeline.close()


@pytest.mark.long
@pytest.mark.timeout(120 + HISTORIES // 5)
@histories
@given(st.lists(EVENTS, min_size=20, max_size=80))
def test_nothing_is_lost_doubled_out_of_order_or_misdated(events: list[tuple[Any, ...]]) -> None:
    with after(events) as (history, folder):
        rows = shown(folder)
        expected = {number: reference(log) for number, log in history.logs.items()}
        pairs = []
        for number, lines in expected.items():
            mine = [row for row in rows if row["number"] == number]
            assert [row["text"] for row in mine] == [line.text for line in lines], "lost, doubled, or out of order"
            pairs += list(zip(mine, lines, strict=True))
        for row, line in pairs:
            row["line"] = line
            assert line.loose or abs(row["time"] - line.time) <= BOUND, "misdated"
        looks = [row["line"].look for row in rows if not row["line"].loose]
        assert looks == sorted(looks), "out of order"


@pytest.mark.long
@settings(histories, max_examples=max(20, HISTORIES // 5))
@given(st.lists(EVENTS, min_size=20, max_size=80), st.sampled_from([0.003, 0.01, 10.0]))
def test_growth_that_is_denser_than_is_noted(events: list[tuple[Any, ...]], spacing: float) -> None:
    """Nothing is lost or doubled, each stream keeps its order, and no time is early."""
    with (
        mock.patch.object(timeline_module, "SPACING", spacing),
        mock.patch.object(timeline_module, "DOUBLING", 40),
        after(events) as (history, folder),
    ):
        rows = shown(folder)
        steps = any(event[0] == "step" for event in events)
        for number, lines in ((number, reference(log)) for number, log in history.logs.items()):
            mine = [row for row in rows if row["number"] == number]
            assert [row["text"] for row in mine] == [line.text for line in lines], "lost, doubled, or out of order"
            for row, line in zip(mine, lines, strict=True):
                assert steps or line.loose or row["time"] - line.time >= -BOUND, "misdated"


@pytest.mark.long
@settings(
    deadline=None,
    max_examples=max(20, HISTORIES // 5),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(EVENTS, min_size=20, max_size=80), st.integers(0, 12), st.floats(0, 1))
def test_parts_of_a_history(events: list[tuple[Any, ...]], last: int, share: float) -> None:
    """What was written before a time, and what was since then, are all; and the last lines are the last of these."""
    with after(events) as (_history, folder):
        rows = shown(folder)
        ended = [row["text"] for row in shown(folder, last=last)]
        assert ended == ([row["text"] for row in rows][-last:] if last else [])
        times = sorted(row["time"] for row in rows)
        moment = times[int(share * (len(times) - 1))] + 0.0005 if times else START
        early, late = shown(folder, until=moment), shown(folder, since=moment)
        assert sorted(row["text"] for row in early + late) == sorted(row["text"] for row in rows)
        assert all(row["time"] <= moment for row in early)
        assert all(row["time"] >= moment - 0.001 for row in late)
        for part in (early, late):
            for number in STREAMS:
                mine = [row["text"] for row in part if row["number"] == number]
                whole = [row["text"] for row in rows if row["number"] == number]
                places = iter(whole)
                assert all(text in places for text in mine), "out of order"
