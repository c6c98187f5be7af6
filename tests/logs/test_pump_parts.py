"""How lines come to be shown, without files and descriptors: cutting, views, formats, folding, and screens."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import termios
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._base import clock, tty
from phalanx._base.loop import Loop
from phalanx._logs import dedup, render
from phalanx._logs import sink as sink_module
from phalanx._logs.dedup import Dedup
from phalanx._logs.lines import Cutter, Source, half_letter, last_state
from phalanx._logs.render import QUIET, STATE, Json, Text, View
from phalanx._logs.search import Search
from phalanx._logs.sink import Sink, TailSink
from phalanx._logs.terminal import FRAME, PlainOutput, TerminalOutput, visible
from phalanx.errors import format_ranks
from tests.support.fake_clock import FakeClock
from tests.support.pump_tools import Memory, source
from tests.support.screen import Emulator

# --- lines


@given(st.lists(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", "é".encode()])).map(b"".join)))
def test_a_cutter_holds_what_is_left_to_see_whatever_pieces_come(parts: list[bytes]) -> None:
    cutter, whole = Cutter(), b""
    for part in parts:
        whole += part
        cutter.cut(part)
        unfinished = whole[whole.rfind(b"\n") + 1 :]
        assert cutter.rest == last_state(unfinished)
        assert cutter.rewritten == (cutter.rest != unfinished)
        assert cutter.held == len(cutter.rest)


@given(st.binary(), st.booleans())
def test_a_piece_ends_with_a_whole_letter_and_no_return(data: bytes, text: bool) -> None:
    line = data.decode("utf-8", "ignore").encode() if text else data
    line = line.replace(b"\n", b"").replace(b"\r", b"") + b"x"
    for end in range(1, len(line) + 1):
        for returns in (b"", b"\r"):
            cutter = Cutter()
            cutter.cut(line[:end] + returns)
            piece = cutter.take_piece()
            assert piece + cutter.rest == line[:end] + returns
            assert piece
            if text and half_letter(line[:end]) < end:  # else there is nothing but half a letter
                piece.decode()


# --- a view on paper


class Desk:
    """A view, and what has been written since one looked last."""

    def __init__(self, form: Text | Json | None = None, select: Search | None = None) -> None:
        self.memory = Memory()
        self.view = View(PlainOutput(self.memory), form or Text(), select)

    def take(self, source: Source, data: bytes) -> bytes:
        self.view.take(source, data)
        return self.memory.taken()

    def tick(self) -> bytes:
        self.view.tick()
        self.view.settle()
        return self.memory.taken()

    def finish(self, *sources: Source) -> bytes:
        for it in sources:
            self.view.finish(it)
        self.view.close()
        return self.memory.taken()


def test_an_unfinished_line_is_shown_after_a_quiet_time(time: FakeClock) -> None:
    desk, one = Desk(), source()
    assert desk.take(one, b"name? ") == b""
    assert desk.view.due == time() + QUIET
    time.advance(QUIET / 2)
    assert desk.tick() == b""
    assert desk.take(one, b"(y/n) ") == b""
    time.advance(QUIET * 0.9)
    assert desk.tick() == b""  # it was not quiet
    time.advance(QUIET)
    assert desk.tick() == b"[0] name? (y/n) "
    assert desk.view.due == float("inf")
    assert desk.take(one, b"yes") == b""
    time.advance(QUIET)
    assert desk.tick() == b"yes"
    assert desk.take(one, b"\nnext\n") == b"\n[0] next\n"


def test_more_that_can_be_read_at_once_is_waited_for(time: FakeClock) -> None:
    desk, one = Desk(), source()
    desk.view.take(one, b"half", more=True)
    time.advance(10)
    assert desk.tick() == b""
    desk.view.take(one, b"", more=False)
    time.advance(QUIET)
    assert desk.tick() == b"[0] half"


def test_a_line_that_was_broken_at_its_end_is_not_ended_twice(time: FakeClock) -> None:
    desk, one, other = Desk(), source(0), source(1)
    for end in (b"\n", b"\r\n"):
        desk.take(one, b"half")
        time.advance(QUIET)
        desk.tick()
        assert desk.take(other, b"whole\n") == b"\n[1] whole\n"
        assert desk.take(one, end) == b""
        assert desk.take(one, b"next\n") == b"[0] next\n"


def test_half_a_line_end_is_not_a_line(time: FakeClock) -> None:
    desk, one = Desk(), source()
    desk.take(one, b"dos\r")
    time.advance(QUIET)
    assert desk.tick() == b"[0] dos"
    assert desk.take(one, b"\nnext\r") == b"\r\n"
    assert desk.take(one, b"\n") == b"[0] next\r\n"


@pytest.mark.parametrize("form, first", [(b"\r%3d%%", 0), (b"%3d%%\r", 1)])
def test_a_progress_bar_shows_one_state_a_second_and_the_last(form: bytes, first: int, time: FakeClock) -> None:
    desk, one = Desk(), source()
    shown = b""
    for percent in range(101):
        shown += desk.take(one, form % percent)
        shown += desk.tick()
        time.advance(0.025)
    assert shown == b"".join(b"[0] %3d%%\n" % (40 * second + first) for second in range(3))
    time.advance(STATE)
    assert desk.tick() == b"[0] 100%\n"
    assert desk.take(one, b"\n") == b""
    assert desk.take(one, b"done\n") == b"[0] done\n"


def test_a_bar_that_is_wiped_away_leaves_no_empty_line(time: FakeClock) -> None:
    desk, one = Desk(), source()
    desk.take(one, b"\r 50%")
    desk.tick()
    desk.take(one, b"\r     \r")
    time.advance(STATE)
    assert desk.tick() == b""
    assert desk.take(one, b"done\n") == b"[0] done\n"


def test_what_was_shown_of_a_line_and_is_taken_back_stays_a_line(time: FakeClock) -> None:
    desk, one = Desk(), source()
    for rest, shown in ((b"\rback\n", b"\n[0] back\n"), (b"\rback", b"\n")):
        desk.take(one, b"forth")
        time.advance(QUIET)
        assert desk.tick() == b"[0] forth"
        assert desk.take(one, rest) == shown
    time.advance(STATE)
    assert desk.tick() == b"[0] back\n"


# --- for machines, and for patterns


def objects(data: bytes) -> list[dict[str, Any]]:
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data[:-1].split(b"\n")] if data else []


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_any_bytes_are_valid_json(chunks: list[bytes]) -> None:
    desk, one = Desk(Json()), source(3, "stderr")
    shown = b"".join(desk.take(one, chunk) for chunk in chunks) + desk.finish(one)
    data = b"".join(chunks)
    if data and not data.endswith(b"\n"):
        data += b"\n"
    found = objects(shown)
    assert len(found) in (data.count(b"\n"), data.count(b"\n") - 1)  # but for a last line of returns only
    for it in found:
        assert list(it) == ["time", "rank", "stream", "text"]
        assert (it["rank"], it["stream"]) == (3, "stderr")


def test_what_a_json_line_holds() -> None:
    desk, one = Desk(Json("node1")), source()
    desk.view.time = lambda: 1700000000.1256
    [it] = objects(desk.take(one, b'"\xc3\xa9"\t\xff\0\\\r\n'))
    assert list(it) == ["host", "time", "rank", "stream", "text"]
    moment = it.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.125[+-]\d\d:\d\d", moment)
    assert datetime.fromisoformat(moment).timestamp() == 1700000000.125
    assert it == {"host": "node1", "rank": 0, "stream": "stdout", "text": '"é"\t\\xff\0\\'}


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"", b"\rother\n"])
def test_parts_of_a_long_line_are_marked_and_hold_whole_letters(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr(render, "LONGEST", 10)
    desk, one, other = Desk(Json()), source(0), source(1)
    line = "äöüß€𝄞" * 9
    shown = b""
    for byte in line.encode():
        shown += desk.take(one, bytes([byte]))
        shown += desk.take(other, b"between\n")
    shown += desk.take(one, end) + (desk.take(one, b"next\n") if end else b"")
    desk.view.finish(one)
    parts = [row for row in objects(shown + desk.memory.taken()) if row["rank"] == 0]
    *beginning, last = parts
    if end:
        assert last["text"] == "next"
        assert not last.keys() & {"partial", "continued"}
        *beginning, last = beginning
    if end.startswith(b"\ro"):  # the line has been taken back
        assert last["text"] == "other"
        assert not last.keys() & {"partial", "continued"}
    else:
        assert "".join(row["text"] for row in [*beginning, last]) == line
        assert last["continued"] is True
        assert "partial" not in last
    assert len(beginning) > 10
    assert all(row["partial"] is True for row in beginning)
    assert [row.get("continued") for row in beginning] == [None] + [True] * (len(beginning) - 1)


def test_a_long_line_that_ends_where_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is told of the end of what it was told to be partial; a person needs no empty line."""
    monkeypatch.setattr(render, "LONGEST", 10)
    desk, one = Desk(Json()), source()
    rows = objects(desk.take(one, b"x" * 10) + desk.take(one, b"\n"))
    assert [(row["text"], row.get("partial"), row.get("continued")) for row in rows] == [
        ("x" * 10, True, None),
        ("", None, True),
    ]
    it = Watcher()
    it.take(one, b"x" * 10)
    assert it.take(one, b"\nnext\n") == ["[0] " + "x" * 10, "[0] next"]


def test_parts_are_wanted_by_themselves_and_are_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "LONGEST", 10)
    desk, one = Desk(Json(), Search(["wanted"], before=2, after=2)), source()
    text = b"before\n" + b"1234567890" + b"is wanted " + b"and more\n" + b"after\n" + b"wanted\n"
    shown = b"".join(desk.take(one, bytes([byte])) for byte in text) + desk.finish(one)
    marked = [(row["text"], row.get("partial"), row.get("continued")) for row in objects(shown)]
    assert ("is wanted ", True, True) in marked
    assert [row for row in marked if row[1] or row[2]] == [("is wanted ", True, True)]
    assert [row[0] for row in marked[1:]] == ["before", "after", "wanted"]


def test_skipping_a_line_without_end_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been written of it before it is wanted, and is too much to be held, is not shown."""
    monkeypatch.setattr(render, "LONGEST", 10)
    desk, one = Desk(Json()), source()
    for number in range(100):
        desk.view.skip(one, b"old %d " % number)
        assert one.cutter.held < 20
    rows = objects(desk.take(one, b"new\nnext\n"))
    assert rows[0]["text"].endswith("new")
    assert [row.get("continued") for row in rows] == [True, None]
    desk.view.skip(one, b"whole\nbegun ")
    assert objects(desk.take(one, b"ended\n"))[0]["text"] == "begun ended"


def test_half_a_line_is_nothing_to_a_machine(time: FakeClock) -> None:
    desk, one = Desk(Json()), source()
    assert desk.take(one, b"half") == b""
    time.advance(10)
    assert desk.tick() == b""
    assert [it["text"] for it in objects(desk.finish(one))] == ["half"]


def grep(pattern: str) -> Search:
    return Search([pattern])


def test_only_lines_that_are_selected(time: FakeClock) -> None:
    desk, one = Desk(select=grep("loss")), source()
    assert desk.take(one, b"hello\nloss 1\nx\nlo") == b"[0] loss 1\n"
    time.advance(QUIET)
    assert desk.tick() == b""  # half a line is nothing to a pattern
    assert desk.take(one, b"ss 2\nloss 3") == b"[0] loss 2\n"
    assert desk.finish(one) == b"[0] loss 3\n"


# --- folding


class Folder:
    """A fold of some ranks, and what has come out."""

    def __init__(self, ranks: int) -> None:
        self.sources = [source(rank) for rank in range(ranks)]
        self.out: list[tuple[str, bytes]] = []
        self.fold = Dedup(self.emit, {"stdout": ranks})

    def emit(self, sources: list[Source], line: bytes) -> None:
        self.out.append((format_ranks([it.rank for it in sources], ","), line))

    def add(self, rank: int, block: bytes) -> None:
        self.fold.add_lines(self.sources[rank], block)


def test_a_line_that_all_have_said_comes_at_once(time: FakeClock) -> None:
    it = Folder(3)
    for rank in range(3):
        it.add(rank, b"same\n")
        it.fold.release()
    assert it.out == [("0-2", b"same\n")]
    assert it.fold.due == float("inf")
    assert time() == 100.0


def test_a_line_waits_for_its_equals_no_longer_than_the_window(time: FakeClock) -> None:
    it = Folder(3)
    it.add(0, b"same\n")
    assert it.fold.due == pytest.approx(time() + dedup.WINDOW)
    time.advance(dedup.WINDOW * 0.9)
    it.add(2, b"same\n")
    it.fold.release()
    assert it.out == []
    time.advance(dedup.WINDOW * 0.2)
    it.add(1, b"same\n")  # too late, though nobody has looked at the clock since
    assert it.out == [("0,2", b"same\n")]
    time.advance(dedup.WINDOW)
    it.fold.release()
    assert it.out[1:] == [("1", b"same\n")]


def test_a_rank_that_says_a_line_twice_said_two(time: FakeClock) -> None:
    del time  # it stands still: the second rank is never too late

    it = Folder(2)
    it.add(0, b"x\nx\n")
    it.add(1, b"x\n")
    it.fold.release(everything=True)
    assert it.out == [("0-1", b"x\n"), ("0", b"x\n")]


def test_streams_are_folded_apart() -> None:
    it = Folder(1)
    it.fold = Dedup(it.emit, {"stdout": 2, "stderr": 2})
    it.fold.add_lines(source(0, "stdout"), b"x\n")
    it.fold.add_lines(source(1, "stderr"), b"x\n")
    it.fold.release(everything=True)
    assert it.out == [("0", b"x\n"), ("1", b"x\n")]


@pytest.mark.long
@pytest.mark.parametrize("line", [b"\n", b"the same\n"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_work_of_folding_grows_as_the_lines_do(line: bytes, ranks: int, time: FakeClock) -> None:
    """Not with their square: equal lines are found by a search of the sorted, not by a look at each."""

    del time  # it stands still: no line waits for long, however slow the machine is

    def calls(count: int) -> int:
        """How many functions are called, C's included."""
        it = Folder(4)
        number = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            for rank in range(ranks):
                it.add(rank, line * count)
        finally:
            sys.setprofile(None)
        it.fold.release(everything=True)
        assert len(it.out) >= count
        return number

    few, more, most = calls(6_000), calls(9_000), calls(12_000)  # the first thousands have less to do each
    assert most - more < 1.1 * (more - few)


def test_a_fold_holds_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "_MOST_HELD", 10)
    it = Folder(2)
    it.add(0, b"".join(b"%d\n" % number for number in range(25)))
    assert [line for _ranks, line in it.out] == [b"%d\n" % number for number in range(15)]
    monkeypatch.setattr(dedup, "_MOST_BYTES", 1000)
    it.add(1, b"x" * 2000 + b"\n")
    assert it.out[-1] == ("1", b"x" * 2000 + b"\n")
    assert len(it.out) == 26


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"d\n"])))), st.data())
def test_folding_keeps_each_ranks_lines_in_their_order(
    said: list[tuple[int, list[bytes]]], data: st.DataObject
) -> None:
    fake = FakeClock(100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", fake)
        it = Folder(4)
        got: dict[int, list[bytes]] = {rank: [] for rank in range(4)}

        def emit(sources: list[Source], line: bytes) -> None:
            for each in sources:
                got[each.rank].append(line)

        it.fold = Dedup(emit, {"stdout": 4})
        for rank, block in said:
            it.add(rank, b"".join(block))
            fake.advance(data.draw(st.sampled_from([0.0, 0.05, 0.3])))
            it.fold.release()
        it.fold.release(everything=True)
    for rank in range(4):
        assert got[rank] == [line for who, block in said if who == rank for line in block]
    assert not it.fold._equals
    assert it.fold._bytes == 0


# --- a screen


class Watcher:
    """A view on a terminal, and somebody who looks at it."""

    def __init__(self, columns: int = 40, rows: int = 12) -> None:
        self.terminal = Emulator(columns)
        self.memory = Memory()
        self.screen = TerminalOutput(self.memory, lambda: (columns, rows))
        self.view = View(self.screen, Text())

    def take(self, source: Source, data: bytes) -> list[str]:
        """What one sees after the round that handed on ``data``."""
        self.view.take(source, data)
        return self.look()

    def look(self) -> list[str]:
        if self.view.due <= clock.now():
            self.view.tick()
        self.view.settle()
        self.terminal.feed(self.memory.taken().decode().replace("\n", "\r\n"))  # as a terminal does (ONLCR)
        return self.terminal.text()


def test_whole_lines_stand_above_live_ones_in_the_order_of_ranks(time: FakeClock) -> None:
    it, one, two = Watcher(), source(1), source(2)
    assert it.take(two, b"\r 10%") == ["[2]  10%"]
    time.advance(FRAME)
    assert it.take(one, b"\r 20%") == ["[1]  20%", "[2]  10%"]
    assert it.take(source(0), b"hello\nyou\n") == ["[0] hello", "[0] you", "[1]  20%", "[2]  10%"]
    time.advance(FRAME)
    assert it.take(two, b"\r 30%") == ["[0] hello", "[0] you", "[1]  20%", "[2]  30%"]
    assert it.take(two, b"\r100%\n") == ["[0] hello", "[0] you", "[2] 100%", "[1]  20%"]
    time.advance(FRAME)
    it.view.finish(one)
    it.view.finish(two)
    it.view.close()
    assert it.look() == ["[0] hello", "[0] you", "[2] 100%", "[1]  20%"]
    assert it.terminal.wraps


def test_live_lines_are_drawn_so_often_and_no_oftener(time: FakeClock) -> None:
    it, one = Watcher(), source()
    it.take(one, b"\r 0%")
    for percent in range(1, 10):
        time.advance(FRAME / 10)
        assert it.take(one, b"\r %d%%" % percent) == ["[0]  0%"]
        assert it.view.due <= 100 + FRAME
    time.advance(FRAME / 5)
    assert it.look() == ["[0]  9%"]
    assert it.memory.data == b""
    time.advance(10)
    it.look()
    assert it.view.due == float("inf")


def test_a_partial_line_is_live_after_a_quiet_time(time: FakeClock) -> None:
    it, one = Watcher(), source()
    assert it.take(one, b"name? ") == []
    time.advance(QUIET)
    assert it.look() == ["[0] name?"]
    time.advance(1)
    assert it.take(source(1), b"x\n") == ["[1] x", "[0] name?"]
    assert it.take(one, b"me\n") == ["[1] x", "[0] name? me"]


def test_more_ranks_than_there_is_room_for(time: FakeClock) -> None:
    it, sources = Watcher(rows=8), [source(rank) for rank in range(10)]
    for each in reversed(sources):
        it.take(each, b"\r...")
        time.advance(FRAME)
    assert it.look() == ["[0] ...", "[1] ...", "[2] ...", "... and 7 more"]
    it.take(sources[0], b"\rdone\n")
    time.advance(FRAME)
    assert it.look() == ["[0] done", "[1] ...", "[2] ...", "[3] ...", "... and 6 more"]
    for each in sources:
        it.view.finish(each)
    it.view.close()
    assert it.look() == ["[0] done", *[f"[{rank}] ..." for rank in range(1, 10)]]


def test_what_scrolls_away_is_whole(time: FakeClock) -> None:
    """Some bars, and lines from everybody, for longer than the screen is high: no line is lost, doubled or mixed."""
    it, sources = Watcher(rows=10), [source(rank) for rank in range(4)]
    dice = random.Random(1)  # noqa: S311 - the same numbers in every run, and no secret
    said = []
    for number in range(300):
        who = dice.choice(sources)
        if dice.random() < 0.5:
            it.take(who, b"\r%3d%%" % number)
        else:
            it.take(who, b"\rline %d\n" % number)
            said.append(f"[{who.rank}] line {number}")
        time.advance(dice.random() * 0.1)
    whole = it.look()
    assert whole[: len(said)] == said
    live = whole[len(said) :]
    assert live == sorted(live)
    assert all(re.fullmatch(r"\[\d\] +\d+%", line) for line in live)


def test_nothing_is_drawn_while_the_reader_makes_no_room(time: FakeClock) -> None:
    it, one = Watcher(), source()
    it.memory.blocked = True
    assert it.take(one, b"\r 10%") == []
    assert it.view.due == float("inf")
    time.advance(1)
    it.memory.blocked = False
    assert it.look() == ["[0]  10%"]


def test_a_live_line_that_is_no_longer_selected_goes(time: FakeClock) -> None:
    it, one = Watcher(), source()
    it.view = View(it.screen, Text(), grep("loss"))
    assert it.take(one, b"\rloss 1") == ["[0] loss 1"]
    time.advance(FRAME)
    assert it.take(one, b"\rsaving") == []


def test_a_line_too_long_to_hold_leaves_no_live_one(time: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "LONGEST", 10)
    it, one = Watcher(), source()
    it.take(one, b"\r 10%")
    time.advance(FRAME)
    assert it.take(one, b"x" * 12) == ["[0]  10%" + "x" * 12]
    time.advance(FRAME)
    assert it.look() == ["[0]  10%" + "x" * 12]


@pytest.mark.parametrize(
    "line,text",
    [
        (b"12345678", b"12345"),
        ("äöü€ß12".encode(), "äöü€ß".encode()),
        ("ä".encode("latin-1") * 7, "ä".encode("latin-1") * 5),
        ("e\u0301".encode() * 7, "e\u0301".encode() * 5),
        (b"\033[1;31m1234\033[0m567", b"\033[1;31m1234\033[0m5\033[0m"),
        (b"12345\033[0m", b"12345\033[0m"),
        (b"1234\xc3", b"1234\xc3"),
        (b"\033[0m" * 1000 + b"x", b"\033[0m" * 80),
        (b"\033[A" * 20 + b"x", b"x"),
    ],
)
def test_what_fits_a_terminal(line: bytes, text: bytes) -> None:
    assert visible(line, 5) == text


@given(st.lists(st.sampled_from([b"\033", b"[", b"]", b"A", b"m", b"3", b";", b"?", b" ", b"\0", b"\r", b"\\", b"("])))
def test_nothing_visible_moves_the_cursor(parts: list[bytes]) -> None:
    shown = visible(b"".join(parts), 80)
    assert not re.search(rb"[\0-\032\034-\037\177]", shown)
    assert b"\033" not in re.sub(rb"\033\[[0-9;]*m", b"", shown)


def test_a_screen_asks_its_terminal_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that stderr happens to be; and what the terminal does not say, the environment does, or is usual."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("LINES", "20")
    loop = Loop()
    master, slave = os.openpty()
    other = os.openpty()
    out = Sink(slave)
    with os.fdopen(other[1], "w") as stream:
        termios.tcsetwinsize(other[1], (2, 2))
        monkeypatch.setattr(sys, "__stderr__", stream)
        out.open(loop, lambda: None)
        many = ["0" * 80] * 9 + ["... and 11 more"]
        for size, live in (((4, 10), ["0" * 10, "... and 19"]), ((0, 0), many)):
            termios.tcsetwinsize(slave, size)
            screen = TerminalOutput(out)
            for rank in range(20):
                screen.show(source(rank), b"0" * 100)
            screen.draw()
            out.flush()
            said = re.sub(r"\033\[\?7[hl]", "", os.read(master, 65536).decode())
            assert said.split("\r\r\n") == live
        out.close()
    loop.close()
    for fd in (master, slave, other[0]):
        os.close(fd)


@pytest.mark.parametrize("text,columns", [("40", 40), ("0", 80), ("-3", 80), ("wide", 80), ("²", 80), ("", 80)])
def test_columns_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", text)
    monkeypatch.delenv("LINES", raising=False)
    assert tty.size(-1) == (columns, 24)


def test_a_line_that_grows_out_of_sight_is_not_sent_again(time: FakeClock) -> None:
    it, one = Watcher(columns=40), source()
    sent = 0
    write = it.memory.write

    def count(buffers: tuple[bytes | memoryview, ...], owner: object = None) -> None:
        nonlocal sent
        sent += sum(map(len, buffers))
        write(buffers, owner)

    it.memory.write = count  # type: ignore[method-assign]  # who counts what is sent
    for _ in range(50):
        it.take(one, b"." * 1000)
        time.advance(QUIET)
        assert it.look() == ["[0] " + "." * 36]
    assert sent < 200
    it.take(source(1), b"line\n")
    time.advance(FRAME)
    assert it.look() == ["[1] line", "[0] " + "." * 36]
    assert "".join(it.take(one, b"\n")).count(".") == 50_000


@given(
    st.lists(st.lists(st.sampled_from([b"a", b"", b"\n", b"bc\n", b"\n\n", b"x\ny"]), max_size=3), max_size=12),
    st.integers(0, 5),
)
def test_the_last_lines_of_what_is_written(writes: list[list[bytes]], count: int) -> None:
    last = TailSink(count)
    for number, buffers in enumerate(writes):
        last.write(tuple(buffers), number)
    lines = b"".join(b"".join(buffers) for buffers in writes).split(b"\n")
    rest = lines.pop()
    assert len(last._lines) <= count
    expected = [line + b"\n" for line in lines[max(0, len(lines) - count) :]] + ([rest] if rest else [])
    assert [line for line, _owner in last.taken()] == expected
    assert list(last.taken()) == []


NESTED = {
    2: (
        [b"\r outer 0%", *[b"\n\r inner %d%%\033[A" % done for done in (0, 50, 100)], b"\r outer 50%",
         *[b"\n\r inner %d%%\033[A" % done for done in (0, 50, 100)], b"\r outer 100%", b"\n"],
        b" outer 0%\n outer 50%\n outer 100%\n",
    ),
    3: (
        [b"\r a", b"\n\n\r c1\033[A\033[A", b"\n\n\r c2\033[A\033[A",
         b"\n\r b1\033[A", b"\n\r b2\033[A", b"\r A", b"\n"],
        b" a\n\n A\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("depth", NESTED)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_bars_of_nested_loops_are_one_line(depth: int, size: int) -> None:
    """As tqdm draws them: a line feed for each row down, and a move for each row up again."""
    pieces, lines = NESTED[depth]
    data = b"".join(pieces)
    cutter = Cutter()
    cut = b"".join(cutter.cut(data[place : place + size]) for place in range(0, len(data), size))
    assert cut.replace(b"\r", b"") == lines
    assert cutter.rest == b""


def test_moves_without_end_are_held_within_bounds() -> None:
    cutter = Cutter()
    for _ in range(1000):
        assert cutter.cut(b"bar\033[A\n" * 100) == b""
        assert cutter.held < 100


def test_a_line_without_an_end_is_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker can make one of terabytes, of holes."""
    monkeypatch.setattr(sink_module, "MOST_OF_A_LINE", 10)
    last = TailSink(3)
    for data in (b"one\n", b"0123456", b"789abc", b"def", b"ghi\nthree\n", b"fo", b"ur"):
        last.write((data,), "whose")
    assert b"".join(line for line, _owner in last.taken()) == (b"one\n0123456789 ... 9 bytes cut ...\nthree\nfour")
    last.write((b"x" * 11,), "whose")
    last.write((b"\n",), "whose")
    assert [line for line, _owner in last.taken()] == [b"xxxxxxxxxx ... 1 bytes cut ...\n"]
