"""The pump's dealings with the kernel: sinks, files that grow, the times of their growth, and the pump itself."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx._base import clock, linux
from phalanx._base.loop import Loop
from phalanx._logs import pump, sink
from phalanx._logs.dedup import Dedup
from phalanx._logs.follower import Follower
from phalanx._logs.pump import Pump
from phalanx._logs.render import Json, Text, View
from phalanx._logs.rotated import rotated_files
from phalanx._logs.sink import Sink
from phalanx._logs.stream import Stream
from phalanx._logs.terminal import PlainOutput
from tests.support.pump_tools import Memory, Rotated, append, followed, read_all, read_on, rig, source, until


@pytest.fixture
def loop() -> Iterator[Loop]:
    it = Loop()
    yield it
    it.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of one page, which is full soon; its reader does not block."""
    import fcntl

    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


# --- sinks


@contextlib.contextmanager
def opened(loop: Loop, target: Any) -> Iterator[Sink]:
    it = Sink(target)
    it.open(loop, lambda: None)
    yield it
    it.close()


def test_a_full_pipe_holds_nobody_up_and_gets_all_in_order(loop: Loop, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    rooms: list[int] = []
    out = Sink(writer)
    out.open(loop, lambda: rooms.append(1))
    sent: list[bytes] = []
    while out.make_room():
        sent.append(b"%06d\n" % len(sent) * 100)
        out.write((sent[-1],), "a")
    assert out.blocked
    assert not out.idle
    assert sum(map(len, sent)) <= sink.TURN * sink._TURNS + 4096 + 700
    assert rooms == []
    got = b""
    while len(got) < sum(map(len, sent)):
        got += read_all(reader)
        if out.blocked:
            loop.once()
    assert got == b"".join(sent)
    assert out.written == len(got)
    assert rooms
    assert out.make_room()
    assert os.get_blocking(writer)  # it is not ours alone
    out.close()


def test_a_sink_that_gives_up_ends_its_line(loop: Loop, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with opened(loop, writer) as out:
        out.write((b"x" * 5000, b"\n"))
        out.flush()
        assert out.mid_line
        assert read_all(reader) == b"x" * 4096
        out.give_up()
        assert read_all(reader) == b"\n"
        assert (out.idle, out.broken) == (True, True)
        out.write((b"dropped",))
        out.flush()
        assert read_all(reader) == b""


def test_nobody_waits_for_a_socket_that_is_full(loop: Loop) -> None:
    """It cannot be opened anew: what is written to it would block."""
    ours, theirs = socket.socketpair()
    with ours, theirs, opened(loop, theirs.fileno()) as out:
        out.write((b"x" * (1 << 22), b"\n"))
        out.flush()
        assert out.blocked
        until(loop, lambda: bool(out.written))
        before = -1
        while before != out.written:  # full
            before = out.written
            loop.after(0.2, lambda: None)
            loop.once()
        assert out.blocked
        assert out.mid_line
        out.give_up()
        assert out.broken


def test_a_reader_that_goes_away(loop: Loop, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    rooms: list[int] = []
    out = Sink(writer)
    out.open(loop, lambda: rooms.append(1))
    out.write((b"x" * 10000,))
    out.flush()
    os.close(reader)
    until(loop, lambda: out.broken)
    assert out.refusal is None
    assert out.idle
    assert out.make_room()
    assert rooms
    out.write((b"more",))
    out.flush()
    out.give_up()
    out.close()


def test_an_object_gets_text_and_no_half_letters(loop: Loop) -> None:
    text = io.StringIO()
    with opened(loop, text) as out:
        for byte in "é漢🙂\n".encode() + b"\xff\xc3\n":
            out.write((bytes([byte]),))
            out.flush()
            until(loop, lambda: out.idle)
        assert text.getvalue() == "é漢🙂\n\ufffd\ufffd\n"


class Broken:
    def write(self, _text: str) -> None:
        raise ValueError("closed")


@pytest.mark.parametrize("target, error", [(Broken(), ValueError("closed")), ("/dev/full", OSError(errno.ENOSPC, ""))])
def test_what_refuses_to_be_written_to_is_left_alone(target: Any, error: Exception, loop: Loop) -> None:
    with opened(loop, target) as out:
        out.write((b"x",))
        out.flush()
        until(loop, lambda: out.broken)
        assert type(out.refusal) is type(error)
        assert out.refusal.args[0] == error.args[0]


def test_a_reader_that_has_gone_is_no_refusal(loop: Loop) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with opened(loop, writer) as out:
        out.write((b"x",))
        out.flush()
        assert (out.broken, out.has_no_reader, out.refusal) == (True, True, None)
    os.close(writer)


# --- files that grow


def test_a_follower_reads_what_has_come(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with followed(path) as it:
        for asks in (it.left, lambda: it.lines_left(9), lambda: it.read(bytearray(1))):
            with pytest.raises(FileNotFoundError):
                asks()
        path.write_bytes(b"one\ntwo\n")
        assert it.left() == 8
        assert read_on(it, 3) == b"one\ntwo\n"
        assert read_on(it) == b""
        append(str(path), b"three\nfour\nfi")
        it.close()
        assert it.left() == 13
        assert it.lines_left(1 << 20)[0] == 3  # the last one is not ended
        assert it.left() == 0


def test_a_rotator_goes_on_where_another_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for text in (b"one\ntwo\n", b"three\nfour\n"):
        with Rotated(str(path), 10) as log:
            log.write(text)
    with followed(path, rotates=True) as it:
        assert read_on(it) == b"one\ntwo\nthree\nfour\n"
    assert [os.path.getsize(name) for name in [*rotated_files(str(path)), str(path)]] == [8, 6, 5]


# --- the pump


def test_files_and_folders_that_appear_later_are_followed(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a/b/c/log", "a/b/log", "there")]
    with rig(paths, str(tmp_path / "out")) as it:
        os.makedirs(tmp_path / "a")
        until(it.loop, lambda: len(it.watch._missing) == 2)
        append(paths[2], b"there\n")
        os.makedirs(tmp_path / "a/b/c")
        append(paths[0], b"deep\n")
        (tmp_path / "other").write_bytes(b"moved\n")
        os.rename(tmp_path / "other", paths[1])
        it.catch_up()
        until(it.loop, lambda: not it.watch._missing)
        for path in paths:
            append(path, b"more\n")
        it.catch_up()
        it.finish()
    lines = (tmp_path / "out").read_bytes().splitlines()
    assert sorted(lines) == [b"[0] deep", b"[0] more", b"[1] more", b"[1] moved", b"[2] more", b"[2] there"]


def test_a_file_that_appears_when_no_watch_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is looked at again and again, and that is said."""
    add = linux.inotify_add

    def scarce(fd: int, path: str, mask: int) -> int:
        if path.endswith("late") and os.path.exists(path):
            raise OSError(errno.ENOSPC, "no inotify watch to be had", path)
        return add(fd, path, mask)

    monkeypatch.setattr(linux, "inotify_add", scarce)
    paths = [str(tmp_path / "late"), str(tmp_path / "there")]
    append(paths[1], b"")
    with rig(paths, str(tmp_path / "out")) as it:
        append(paths[0], b"one\n")
        it.catch_up()
        append(paths[0], b"two\n")
        append(paths[1], b"three\n")
        it.catch_up()
        it.finish()
    assert sorted((tmp_path / "out").read_bytes().splitlines()) == [b"[0] one", b"[0] two", b"[1] three"]
    said = "phalanx: no inotify watch to be had: log files are looked at 10 times a second\n"
    assert capfd.readouterr().err == said


def test_a_file_that_appears_while_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    call = linux._libc

    def late(name: str, *args: object) -> int:
        result = call(name, *args)
        if name == "inotify_add_watch" and result < 0:
            path.write_bytes(b"late\n")
        return result

    monkeypatch.setattr(linux, "_libc", late)
    with rig([str(path)], str(tmp_path / "out")) as it:
        it.catch_up()
        assert not it.watch._missing
        it.finish()
    assert (tmp_path / "out").read_bytes() == b"[0] late\n"


def test_an_overflow_of_events_loses_nothing(tmp_path: Path) -> None:
    """The kernel drops events when too many wait (fs.inotify.max_queued_events)."""
    with open("/proc/sys/fs/inotify/max_queued_events") as file:
        most = int(file.read())
    paths = [tmp_path / name for name in ("a", "b", "late/c")]
    paths[0].touch()
    with Rotated(str(paths[1]), 1000) as log, rig([str(path) for path in paths], str(tmp_path / "out")) as it:
        it.streams[1].follower.rotates = True
        with open(paths[0], "ab", buffering=0) as first, open(tmp_path / "b", "ab", buffering=0) as second:
            for _ in range(most // 2 + 10):
                first.write(b".")
                second.write(b"")
                os.utime(paths[1])
            first.write(b"\n")
        log.write(b"x" * 999 + b"\n" + b"second\n")
        (tmp_path / "late").mkdir()
        append(str(paths[2]), b"third\n")
        it.catch_up()
        append(str(paths[2]), b"more\n")
        log.write(b"more\n")
        it.catch_up()
        it.finish()
    lines = (tmp_path / "out").read_bytes().splitlines()
    assert b"[0] " + b"." * (most // 2 + 10) in lines
    assert [line for line in lines if line.startswith(b"[2]")] == [b"[2] third", b"[2] more"]
    assert [line for line in lines if line.startswith(b"[1]")][1:] == [b"[1] second", b"[1] more"]


MANY = """
import os, resource, sys
sys.path[:0] = sys.argv[2:]
from tests.support.pump_tools import Memory, append, rig
resource.setrlimit(resource.RLIMIT_NOFILE, (290, 290))
folder = sys.argv[1]
paths = [f"{folder}/{rank}.log" for rank in range(400)]
with rig(paths, f"{folder}/out") as it:
    for turn in range(3):
        for rank, path in enumerate(paths):
            append(path, b"rank %d turn %d\\n" % (rank, turn))
        it.loop.once()
    it.finish()
    assert len(os.listdir("/proc/self/fd")) < 280
"""


@pytest.mark.slow
def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path), root, *sys.path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = (tmp_path / "out").read_text().splitlines()
    assert sorted(lines) == sorted(f"[{rank}] rank {rank} turn {turn}" for rank in range(400) for turn in range(3))


@pytest.mark.slow
def test_a_console_that_stops_and_goes_on(tmp_path: Path, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    paths = [tmp_path / "0", tmp_path / "1"]
    whole = b"".join(b"line %d\n" % number for number in range(100_000))
    for path in paths:
        path.write_bytes(whole)
    with rig([str(path) for path in paths], writer) as it:
        until(it.loop, lambda: it.view.output.sink.blocked and len(it.pump._dirty) == 2)
        assert it.view.output.sink._size <= 5 * sink.TURN
        assert it.streams[0].follower.left() > 0
        got = bytearray()

        def read(_events: int) -> None:
            got.extend(read_all(reader))

        it.loop.watch(reader, read)
        it.finish()
        it.loop.forget(reader)
        got += read_all(reader)
    lines = bytes(got).splitlines(keepends=True)
    for rank in range(2):
        mine = b"".join(line[4:] for line in lines if line.startswith(b"[%d] " % rank))
        assert mine == whole


@pytest.mark.parametrize("prefix", ["[{}] ", ""])
def test_what_was_not_shown_is_said(
    tmp_path: Path, pipe: tuple[int, int], capfd: pytest.CaptureFixture[str], prefix: str
) -> None:
    """Each line is either read by somebody, or counted: also the one that was cut. The file's name is not obeyed."""
    reader, writer = pipe
    path = tmp_path / "log\033[2J"
    path.write_bytes(b"a line of some length, more or less\n" * 50_000)
    with rig([str(path)], writer, drain=0.05, prefix=prefix) as it:
        it.finish()
    os.close(writer)
    got = read_all(reader)
    said = re.fullmatch(rf"phalanx: … ([\d,]+) more lines in {tmp_path}/log\\x1b\[2J\n", capfd.readouterr().err)
    assert said is not None
    assert "," in said[1]
    assert int(said[1].replace(",", "")) + got.count(b"\n") == 50_000


def test_a_file_of_ours_is_complete_though_who_reads_is_given_up(
    tmp_path: Path, pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    path, chosen = tmp_path / "log", tmp_path / "chosen"
    path.write_bytes(b"a line\n" * 500_000)
    views = [View(PlainOutput(Sink(target)), Text()) for target in (pipe[1], str(chosen))]
    streams = [Stream(Follower(str(path)), [(view, source())]) for view in views]
    with rig([], None, views=views, streams=streams, drain=0.0) as it:
        it.finish()
    assert chosen.read_bytes() == b"[0] a line\n" * 500_000
    assert re.fullmatch(rf"phalanx: … [\d,]+ more lines in {path}\n", capfd.readouterr().err)


@pytest.mark.parametrize("how,size", [("text", sink.TURN), ("json", 64 * 1024), ("folded", 16 * 1024)])
def test_a_turn_takes_so_much_that_others_need_not_wait(tmp_path: Path, how: str, size: int) -> None:
    """What is done line by line takes time, and every byte may be a line."""
    path = tmp_path / "log"
    path.write_bytes(b"\n" * (1 << 20))
    memory = Memory()
    memory.turn = sink.TURN
    shows = View(PlainOutput(memory), Json() if how == "json" else Text())
    if how == "folded":
        shows.dedup_lines_with(Dedup(lambda sources, line: memory.write((line,), sources[0]), {"stdout": 2}))
    stream = Stream(Follower(str(path)), [(shows, source())])
    assert stream.step(bytearray(sink.TURN))
    assert stream.follower.offset == size
    stream.follower.close()


def test_what_is_left_is_not_read_to_be_counted(
    tmp_path: Path, pipe: tuple[int, int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of it, that is: there may be more than can be read in an hour."""
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * 1000)
    os.truncate(path, 60 << 30)  # one hole
    read, taken = Follower.read, 0

    def counted(self: Follower, buffer: bytearray | memoryview) -> int:
        nonlocal taken
        count = read(self, buffer)
        taken += count
        return count

    monkeypatch.setattr(Follower, "read", counted)
    monkeypatch.setattr(pump, "_MOST_COUNTED", 4 << 20)
    with rig([str(path)], pipe[1], drain=0.02) as it:
        it.finish()
    assert taken < 8 << 20
    assert re.fullmatch(rf"phalanx: … (over [\d,]+ )?more (lines? )?in {path}\n", capfd.readouterr().err)


def test_so_many_files_are_named_and_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], pipe: tuple[int, int]
) -> None:
    paths = [tmp_path / f"{rank:02}" for rank in range(20)]
    for path in paths:
        path.write_bytes(b"x" * 5000 + b"\n")
    with rig([str(path) for path in paths], pipe[1], drain=0.02) as it:
        it.finish()
    *named, last = capfd.readouterr().err.splitlines()
    assert len(named) == 16
    assert all(re.fullmatch(r"phalanx: … 1 more line in .*/\d\d", line) for line in named)
    assert re.fullmatch(r"phalanx: … and more in [34] other files", last)


def test_a_reader_that_takes_nothing_is_waited_for_so_long(
    tmp_path: Path, pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * 50_000)
    before = clock.now()
    with rig([str(path)], pipe[1], drain=1000.0, stuck=0.02) as it:
        it.finish()
    assert clock.now() - before < 100
    assert "more lines in" in capfd.readouterr().err


def test_an_unfinished_line_that_was_not_shown_is_said(
    tmp_path: Path, pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """It has been read while the lines of another rank still wait."""
    many, one = tmp_path / "many", tmp_path / "one"
    many.write_bytes(b"a line of some length, more or less\n" * 50_000)
    one.write_bytes(b"no end")
    with rig([str(many), str(one)], pipe[1], drain=0.05) as it:
        until(it.loop, lambda: it.streams[1].follower.offset == 6 and it.view.output.sink.blocked)
        it.finish()
    assert f"phalanx: … 1 more line in {one}\n" in capfd.readouterr().err


def test_a_pump_that_is_closed_reads_no_more(tmp_path: Path) -> None:
    """It was to go on soon, and others have its console open."""
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * 500_000)
    target = Sink(os.open(os.devnull, os.O_WRONLY), own=True)
    assert target.retain()
    with rig([], target) as other, rig([str(path)], target) as it:
        it.loop.once()
        it.pump.close()
        it.loop.call(lambda: None)
        it.loop.once()
        assert 0 < it.streams[0].follower.offset < 1_000_000
        assert it.streams[0].follower.fd == -1
        assert not other.view.output.sink.broken


def test_one_console_that_is_gone_does_not_stop_another(tmp_path: Path, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    path = tmp_path / "log"
    path.touch()
    views = [View(PlainOutput(Sink(target)), Text()) for target in (writer, str(tmp_path / "out"))]
    stream = Stream(Follower(str(path)), [(it, source()) for it in views])
    with rig([], None, views=views, streams=[stream]) as it:
        os.close(reader)
        append(str(path), b"one\n")
        until(it.loop, lambda: views[0].output.sink.broken)
        append(str(path), b"two\n")
        it.finish()
    assert (tmp_path / "out").read_bytes() == b"[0] one\n[0] two\n"


def test_a_line_of_ours_stands_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "log", tmp_path / "out"
    path.write_bytes(b"half")
    with rig([str(path)], str(out)) as it:
        until(it.loop, lambda: out.read_bytes() == b"[0] half")
        it.pump.show_message("phalanx: a word \udcff")
        until(it.loop, lambda: out.read_bytes() == b"[0] half\nphalanx: a word \\udcff\n")
        it.finish()
        it.pump.show_message("too late for the console")
    assert out.read_bytes() == b"[0] half\nphalanx: a word \\udcff\n"
    assert capfd.readouterr().err == "too late for the console\n"


@pytest.mark.parametrize(
    "text,shown",
    [
        (b"", b""),
        (b"why\nbecause", b"[0] why\n[0] because\n"),
        (b"\r 10%\r 20%\nfailed\n", b"[0]  20%\n[0] failed\n"),
        (b"".join(b"%d\n" % number for number in range(100)), b"".join(b"[0] %d\n" % n for n in range(80, 100))),
        (b"x" * 50_000 + b"\nlast\n", b"[0] last\n"),
    ],
)
def test_a_hidden_rank_that_fails_is_revealed_once(tmp_path: Path, text: bytes, shown: bytes) -> None:
    out = tmp_path / "out"
    (tmp_path / "hidden").write_bytes(text)
    view = View(PlainOutput(Sink(str(out))), Text())
    streams = [
        Stream(Follower(str(tmp_path / name)), [], number=number, hidden_in=(view, source(number // 2)))
        for name, number in (("hidden", 0), ("never written", 1), ("other", 2))
    ]
    (tmp_path / "other").write_bytes(b"well\n")
    with rig([], None, view=view, streams=streams) as it:
        it.pump.reveal(0)
        it.pump.reveal(0)
        it.finish()
    assert out.read_bytes() == shown


def test_what_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    loop = Loop()
    pump = Pump([], [View(PlainOutput(Sink(str(tmp_path))), Text())])
    try:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(IsADirectoryError):
            pump.open(loop)
        assert os.listdir("/proc/self/fd") == before
    finally:
        loop.close()
