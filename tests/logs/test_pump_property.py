"""Any bytes, in any chunks, through the pump: without the prefixes they are what was written."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx._base import clock
from phalanx._logs import lines, render, sink
from phalanx._logs.lines import Cutter, Source
from phalanx._logs.render import Text, View
from phalanx._logs.terminal import PlainOutput
from tests.support.fake_clock import FakeClock
from tests.support.pump_tools import Memory, Rotated, append, rig, until

quick = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
few = settings(quick, max_examples=40)

RANKS = 3


def seen(data: bytes) -> bytes:
    """What a stream comes to: a return takes back what stands before it in its line, but for those at the line's end.

    A last line that nobody has ended is ended, unless there is nothing in it.
    """
    shown = []
    for line in data.split(b"\n"):
        text = line.rstrip(b"\r")
        shown.append(text.split(b"\r")[-1] + line[len(text) :])
    if not shown[-1].strip(b"\r"):
        shown[-1] = b""
    whole = b"\n".join(shown)
    return whole if whole.endswith(b"\n") or not whole else whole + b"\n"


def ended(data: bytes) -> bytes:
    """The same for a stream without such returns."""
    return data if data.endswith(b"\n") or not data else data + b"\n"


def joined(pieces: list[bytes]) -> bytes:
    return b"".join(pieces)


def unmoved(data: bytes) -> bytes:
    """Without what moves a terminal's cursor: moves up are taken back with what they move over, like returns.

    Hypothesis tries the constants of our modules as well, and such a move is one.
    """
    return data.translate(None, b"\r\033")


WORDS = ["", "a", "é", "漢字", "🙂", "loss = 0.25", "x" * 300]
ENDS = [b"\n", b"\r\n", b"\n\n", b"\0", b"\0\n"]
ENCODED = [
    st.sampled_from(WORDS).map(str.encode),
    st.text(max_size=8).map(lambda text: unmoved(text.encode())),
    st.text(max_size=8).map(lambda text: unmoved(text.encode("utf-16"))),
    st.binary(max_size=8).map(unmoved),
    st.just(b"\xff\xfe\x80\xc3"),
]

plain = st.lists(st.one_of(*ENCODED, st.sampled_from(ENDS)), max_size=25).map(joined)
"""Text of every kind, without lone carriage returns."""

barred = st.lists(st.one_of(*ENCODED, st.sampled_from([*ENDS, b"\r", b"\r\r", b" 50%\r"])), max_size=25).map(joined)
"""The same with them."""


@st.composite
def chunks(draw: st.DrawFn, text: st.SearchStrategy[bytes]) -> list[bytes]:
    """A text in chunks, cut anywhere."""
    data = draw(text)
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@st.composite
def turns(draw: st.DrawFn, text: st.SearchStrategy[bytes]) -> list[tuple[int, bytes]]:
    """Chunks of several ranks, those of each in their order."""
    ranks = [draw(chunks(text)) for _ in range(RANKS)]
    left = [rank for rank, parts in enumerate(ranks) for _ in parts]
    return [(rank, ranks[rank].pop(0)) for rank in draw(st.permutations(left))]


def of_rank(rank: int, said: list[tuple[int, bytes]]) -> bytes:
    return b"".join(data for who, data in said if who == rank)


def unprefixed(shown: bytes) -> dict[int, bytes]:
    """What each rank has said, by the prefix of each line."""
    found = dict.fromkeys(range(RANKS), b"")
    if shown:
        assert shown.endswith(b"\n")
        for line in shown[:-1].split(b"\n"):
            assert line[:1] == b"[", line
            assert line[2:4] == b"] ", line
            found[int(line[1:2])] += line[4:] + b"\n"
    return found


class Desk:
    """A view of three ranks, on a clock of our own."""

    def __init__(self, time: FakeClock, prefix: str = "[{}] ") -> None:
        self.time = time
        self.memory = Memory()
        self.view = View(PlainOutput(self.memory), Text())
        self.sources = [Source(rank, "stdout", prefix.format(rank).encode()) for rank in range(RANKS)]

    def wait(self, seconds: float) -> None:
        self.time.advance(seconds)
        self.view.tick()
        self.view.settle()

    def shown(self) -> bytes:
        for source in self.sources:
            self.view.finish(source)
        self.view.close()
        return self.memory.taken()


@contextlib.contextmanager
def stopped_clock(longest: int = lines.LONGEST, start: float = 100.0) -> Iterator[FakeClock]:
    """A clock of ours. From 0 on, no state of a progress bar is due before a second has passed."""
    fake = FakeClock(start)
    with mock.patch.object(clock, "now", fake), mock.patch.object(render, "LONGEST", longest):
        yield fake


# --- the cutter, by itself


@pytest.mark.long
@quick
@given(chunks(barred))
def test_a_cutter_gives_out_what_it_was_given(parts: list[bytes]) -> None:
    cutter = Cutter()
    shown = []
    for part in parts:
        block = cutter.cut(bytearray(part + b"beyond"), len(part))
        assert not block or block.endswith(b"\n")
        assert b"\n" not in cutter.rest
        shown.append(block)
    rest = cutter.take()
    assert cutter.rest == b""
    assert b"".join(shown) + (ended(rest) if rest.strip(b"\r") else b"") == seen(b"".join(parts))


# --- a view


@pytest.mark.long
@quick
@given(turns(barred))
def test_lines_without_their_prefixes_are_the_input(said: list[tuple[int, bytes]]) -> None:
    with stopped_clock() as time:
        desk = Desk(time)
        for rank, data in said:
            desk.view.take(desk.sources[rank], data)
        shown = unprefixed(desk.shown())
    for rank in range(RANKS):
        assert shown[rank] == seen(of_rank(rank, said))


@pytest.mark.long
@quick
@given(chunks(plain), st.data(), st.sampled_from([4, 16, lines.LONGEST]), st.sampled_from(["", "> "]))
def test_a_rank_that_pauses_is_shown_whole(parts: list[bytes], data: st.DataObject, longest: int, prefix: str) -> None:
    """Unfinished lines that are shown, lines that are longer than can be held: each still has one prefix."""
    with stopped_clock(longest) as time:
        desk = Desk(time, prefix)
        for part in parts:
            desk.view.take(desk.sources[0], part)
            desk.wait(data.draw(st.sampled_from([0.0, 0.05, 0.11, 3.0])))
        whole = ended(b"".join(parts))
        expected = b"".join(prefix.encode() + line + b"\n" for line in whole.split(b"\n")[:-1])
        assert desk.shown() == expected


@pytest.mark.long
@quick
@given(turns(plain), st.data(), st.sampled_from([4, lines.LONGEST]))
def test_ranks_that_break_each_others_lines_lose_nothing(
    said: list[tuple[int, bytes]], data: st.DataObject, longest: int
) -> None:
    """An unfinished line that is shown may be broken by another rank's: a line end more, and no other byte."""
    with stopped_clock(longest) as time:
        desk = Desk(time)
        for rank, part in said:
            desk.view.take(desk.sources[rank], part)
            desk.wait(data.draw(st.sampled_from([0.0, 0.11])))
        shown = unprefixed(desk.shown())
    for rank in range(RANKS):
        whole = ended(of_rank(rank, said))
        assert shown[rank].translate(None, b"\r\n") == whole.translate(None, b"\r\n")
        assert shown[rank].count(b"\n") >= whole.count(b"\n")


@pytest.mark.long
@quick
@given(chunks(barred), st.data())
def test_a_progress_bar_that_pauses_ends_as_it_would_without(parts: list[bytes], data: st.DataObject) -> None:
    """States come between: each is something that stood there. What a line comes to is shown last.

    And once, unless its beginning was shown when nothing yet told that it would be taken back, and looked the same:
    then what stood there meanwhile, parts of it, may come, too.
    """
    with stopped_clock() as time:
        desk = Desk(time, "")
        for part in parts:
            desk.view.take(desk.sources[0], part)
            desk.wait(data.draw(st.sampled_from([0.0, 0.11, 3.0])))
        shown = iter(desk.shown().split(b"\n")[:-1])
    whole = b"".join(parts)
    text = b""
    for line in seen(whole).split(b"\n")[:-1]:
        text = line.rstrip(b"\r")
        assert any(text == other.rstrip(b"\r") for other in shown), line
    assert all(text.startswith(other.rstrip(b"\r")) for other in shown)


# --- the pump: real files, a real loop


def feed(
    folder: str, said: list[tuple[int, bytes]], turn: int, *, console: str = "path", together: bool = False
) -> bytes:
    """What a console gets to see of files that grow."""
    paths = [f"{folder}/{rank}.log" for rank in range(RANKS)]
    for path in paths:
        append(path, b"")
    out = f"{folder}/console"
    target: object = out
    fd = -1
    reader = -1
    before = b"before\n" if console in ("file", "append") else b""
    if before:
        target = fd = os.open(
            out, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if console == "append" else 0)
        )
        os.write(fd, before)
    elif console == "pipe":
        reader, fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        target = fd
    elif console == "socket":
        reader, target = (end.detach() for end in socket.socketpair())
        fd = target
    try:
        with (
            mock.patch.object(sink, "TURN", turn),
            mock.patch.object(sink, "_FIRST_TURN", turn),
            rig(paths, target) as it,
        ):
            for rank, data in said:
                append(paths[rank], data)
                if not together:
                    it.catch_up()
            it.finish()
    finally:
        if fd >= 0:
            os.close(fd)
    with open(reader if reader >= 0 else out, "rb") as file:
        assert file.read(len(before)) == before
        return file.read()


@few
@given(
    turns(barred),
    st.sampled_from([1, 2, 7, 64, 16384]),
    st.sampled_from(["path", "file", "append", "pipe", "socket"]),
    st.booleans(),
)
def test_files_through_the_pump(said: list[tuple[int, bytes]], turn: int, console: str, together: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, stopped_clock(start=0.0):
        shown = unprefixed(feed(folder, said, turn, console=console, together=together))
    for rank in range(RANKS):
        assert shown[rank] == seen(of_rank(rank, said))


@pytest.mark.long
@few
@given(turns(plain), st.sampled_from([3, 16384]))
def test_files_through_the_pump_with_long_lines(said: list[tuple[int, bytes]], turn: int) -> None:
    with tempfile.TemporaryDirectory() as folder, stopped_clock(longest=16):
        shown = unprefixed(feed(folder, said, turn))
    for rank in range(RANKS):
        assert shown[rank].translate(None, b"\r\n") == of_rank(rank, said).translate(None, b"\r\n")


@few
@given(st.lists(st.one_of(plain.filter(bool), st.none()), max_size=10))
def test_a_file_that_is_cut_short_goes_on(steps: list[bytes | None]) -> None:
    """None stands for a cut. What was seen before it and what comes after it are one stream."""
    with tempfile.TemporaryDirectory() as folder, stopped_clock():
        path, out = f"{folder}/log", f"{folder}/console"
        append(path, b"")
        with rig([path], out, prefix="") as it:
            for step in steps:
                if step is None:
                    os.truncate(path, 0)
                else:
                    append(path, step)
                it.catch_up()
            it.finish()
        with open(out, "rb") as file:
            assert file.read() == ended(b"".join(step for step in steps if step))


# --- rotation


def rotate(path: str, parts: list[bytes], limit: int) -> list[bytes]:
    """The files that come of it, oldest first."""
    with Rotated(path, limit) as rotator:
        for part in parts:
            rotator.write(part)
        rotator.close_writer()
        assert not rotator.drain()
    names = sorted(
        os.listdir(os.path.dirname(path)), key=lambda name: int(name.rpartition(".")[2]) if "." in name else 0
    )
    assert names == [os.path.basename(path), *(f"{os.path.basename(path)}.{n}" for n in range(1, len(names)))]
    files = []
    for name in [*names[1:], names[0]]:
        with open(os.path.join(os.path.dirname(path), name), "rb") as file:
            files.append(file.read())
    return files


@few
@given(chunks(barred), st.integers(1, 40))
def test_a_rotated_file_is_whole_in_its_parts(parts: list[bytes], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = rotate(f"{folder}/log", parts, limit)
    assert b"".join(files) == b"".join(parts)
    for content in files[:-1]:
        assert content.endswith(b"\n")
    for content in files:
        # The line that was under way when the limit came ends where it began.
        last = content.removesuffix(b"\n").rpartition(b"\n")[2]
        assert len(content) <= limit or len(content) - len(last) - 1 < limit


@few
@given(st.lists(st.sampled_from([b"\n", b"a\n", b"four\n", b"x" * 30 + b"\n"]), max_size=30), st.integers(1, 40))
def test_whole_lines_keep_to_the_limit(parts: list[bytes], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = rotate(f"{folder}/log", parts, limit)
    assert b"".join(files) == b"".join(parts)
    for content in files:
        assert len(content) <= limit or content.count(b"\n") == 1


@few
@given(chunks(plain), st.integers(1, 40), st.booleans())
def test_a_rotated_file_is_followed_through_all_its_parts(parts: list[bytes], limit: int, at_once: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, stopped_clock():
        path, out = f"{folder}/log", f"{folder}/console"
        with Rotated(path, limit) as rotator, rig([path], out, prefix="", rotates=True) as it:
            for part in parts:
                rotator.write(part)
                if not at_once:
                    it.catch_up()
            until(it.loop, lambda: [len(streams) for streams in it.watch._watches.values()] == [1])
            it.finish()
        with open(out, "rb") as file:
            assert file.read() == ended(b"".join(parts))
