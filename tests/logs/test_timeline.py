"""The timeline: growth, cuts, rotation, clocks that come apart, what is damaged, and files merged by it."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx._base import clock
from phalanx._logs import rotated, timeline
from phalanx._logs.follower import Follower
from phalanx._logs.merge import merge
from phalanx._logs.rotated import NEWEST
from phalanx._logs.timeline import (
    APART,
    CUT,
    GREW,
    HEAD,
    MAGIC,
    ROTATED,
    SPACING,
    Growth,
    TimelineWriter,
    pack,
)
from tests.logs.test_rotated_files import compress, rotate
from tests.support.fake_clock import FakeClock
from tests.support.pump_tools import append, rig, until

START = 1_700_000_000.0


class Wall:
    """A wall clock that goes with the other one, until it is set."""

    def __init__(self, time: FakeClock) -> None:
        self._time = time
        self.ahead = START - time()

    def __call__(self) -> float:
        return self._time() + self.ahead


@pytest.fixture
def wall(time: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Wall:
    it = Wall(time)
    monkeypatch.setattr(clock, "wall", it)
    return it


@pytest.fixture
def times(tmp_path: Path, wall: Wall) -> TimelineWriter:
    del wall
    return TimelineWriter(str(tmp_path / "timeline"))


def records(it: TimelineWriter) -> list[tuple[float, int, int, int]]:
    it.close()
    return [(round(at - START, 3), kind, stream, number) for at, kind, stream, number in timeline.read(it.path)]


def merged(it: TimelineWriter, *logs: Path) -> list[tuple[float, int, bytes]]:
    it.close()
    followers = {stream: Follower(str(path), rotates=True) for stream, path in enumerate(logs)}
    try:
        return [(round(at - START, 3), stream, data) for at, stream, data in merge(followers, it.path)]
    finally:
        for follower in followers.values():
            follower.close()


def test_a_timeline_is_read_as_it_was_written(time: FakeClock, times: TimelineWriter) -> None:
    noted = [(0.0, 0, 10), (0.5, 3, 7), (0.0, 0, 12), (70.0, 0, 13), (0.001, 1, 1), (600.25, 3, 10 << 30)]
    sizes: dict[int, int] = {}
    expected = []
    for pause, stream, size in noted:
        time.advance(pause)
        times.note(stream, size)
        expected.append((round(time() - 100, 3), GREW, stream, size - sizes.get(stream, 0)))
        sizes[stream] = size
    times.note(3, 10 << 30)  # nothing new
    assert times.unwritten
    assert records(times) == expected
    assert records(times) == expected


def test_a_timeline_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "where", "/dev/full"):
        it = TimelineWriter(str(path))
        it.note(0, 10)
        it.flush()
        it.note(0, 20)
        it.close()
    assert list(timeline.read(str(tmp_path / "no" / "where"))) == []


def test_a_damaged_timeline_yields_what_can_be_read(times: TimelineWriter) -> None:
    path = Path(times.path)
    times.note(0, 10)
    times.note(1, 20)
    times.close()
    whole = path.read_bytes()
    counts = []
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        counts.append(len(list(timeline.read(str(path)))))
    assert counts == [0] * 19 + [1] * 3 + [2]
    path.write_bytes(b"something else, and long enough for it\n")
    assert list(timeline.read(str(path))) == []


def test_without_a_timeline_file_follows_file(tmp_path: Path, times: TimelineWriter) -> None:
    paths = [tmp_path / f"{stream}.log" for stream in range(4)]
    for path, changed in zip(paths, (30, 10, 20), strict=False):
        path.write_bytes(b"%d\n" % changed)
        os.utime(path, (START + changed, START + changed))
    assert merged(times, *paths) == [(10, 1, b"10\n"), (20, 2, b"20\n"), (30, 0, b"30\n")]


def test_a_timeline_of_files_that_are_gone_or_shorter(tmp_path: Path, times: TimelineWriter) -> None:
    for stream in (0, 1, 2):
        times.note(stream, 100)
    append(str(tmp_path / "0"), b"short\n")
    assert [rest for _at, *rest in merged(times, tmp_path / "0", tmp_path / "1")] == [[0, b"short\n"]]


def test_a_cut_is_told(time: FakeClock, times: TimelineWriter) -> None:
    times.note(0, 100)
    time.advance(1)
    times.note(0, 0)
    times.note(1, 1)
    time.advance(1)
    times.note(0, 50)
    times.note(0, 20)  # cut, and grown again before anybody looked
    assert records(times) == [
        (0.0, GREW, 0, 100), (1.0, CUT, 0, 0), (1.0, GREW, 1, 1),
        (2.0, GREW, 0, 50), (2.0, CUT, 0, 0), (2.0, GREW, 0, 20)
    ]  # fmt: skip


def test_a_cut_that_nobody_has_noted(tmp_path: Path, times: TimelineWriter) -> None:
    """What the file holds now was written after all that is known of it."""
    path = tmp_path / "log"
    times.note(0, 100)
    append(str(path), b"new\n")
    os.utime(path, (START + 50, START + 50))
    assert merged(times, path) == [(50.0, 0, b"new\n")]


def test_copies_of_a_log_that_is_not_rotated_are_not_read(
    tmp_path: Path, time: FakeClock, times: TimelineWriter
) -> None:
    """As logrotate's copytruncate makes them."""
    path = tmp_path / "log"
    append(str(path), b"copied\n")
    times.note(0, 7)
    (tmp_path / "log.1").write_bytes(b"copied\n")
    os.truncate(path, 0)
    times.note(0, 0)
    time.advance(1)
    append(str(path), b"new\n")
    times.note(0, 4)
    assert merged(times, path) == [(1.0, 0, b"new\n")]


def test_a_compressed_file_that_is_larger_than_it_tells(
    tmp_path: Path, time: FakeClock, times: TimelineWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells its size modulo 4 GiB: here, 16 bytes."""

    def content_size(fd: int, *, compressed: bool) -> int:
        size = rotated.content_size(fd, compressed=compressed)
        return size % 16 if compressed else size

    for name in ("timeline", "follower"):
        monkeypatch.setattr(f"phalanx._logs.{name}.content_size", content_size)
    for name in ("timeline", "merge"):
        monkeypatch.setattr(f"phalanx._logs.{name}.MODULO", 16)
    path = tmp_path / "log"
    path.touch()
    growth = Growth(str(path), rotates=True)
    for number, text in enumerate((b"", b"of more than 16 bytes\n", b"new\n")):
        time.advance(1)
        if number == 2:
            rotate(path, 1)
            compress(path, 1)
        append(str(path), text)
        for file, size in growth.look():
            times.note(0, size, file)
    assert merged(times, path) == [(2.0, 0, b"of more than 16 bytes\n"), (3.0, 0, b"new\n")]


def test_a_step_of_the_wall_clock(time: FakeClock, wall: Wall, times: TimelineWriter) -> None:
    expected = []
    for number, step in enumerate((0.0, 3600.0, -86400.0, 0.5, APART / 2, APART, -5.0)):
        wall.ahead += step
        times.note(0, 10 * number + 10)
        expected.append(wall() - START)
        time.advance(0.5)
    found = [at for at, *_rest in records(times)]
    assert len(found) == len(expected)
    assert all(abs(one - other) <= APART + 0.001 for one, other in zip(found, expected, strict=True))


def test_a_long_pause_takes_one_record(time: FakeClock, times: TimelineWriter) -> None:
    times.note(0, 10)
    time.advance(10 * 86400)
    times.note(0, 20)
    assert records(times)[-1] == (864000.0, GREW, 0, 10)
    assert os.path.getsize(times.path) == HEAD.size + len(pack(0, 0, 10)) + len(pack(864_000_000, 0, 10))


def test_half_a_write_is_the_last(time: FakeClock, times: TimelineWriter, small_disk: Path) -> None:
    times.path = str(small_disk / "timeline")
    for number in range(40_000):
        time.advance(SPACING)
        times.note(number % 2, number + 1)
    assert os.path.getsize(times.path) <= 64 << 10
    read = list(timeline.read(times.path))
    assert len(read) > 4000
    assert {kind for _at, kind, _stream, _grown in read} == {GREW}
    times.close()


# --- what looks at a log see


def test_looks_at_a_log_that_is_not_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    growth = Growth(str(path))
    with pytest.raises(FileNotFoundError):
        growth.look()
    path.write_bytes(b"one\n")
    (tmp_path / "log.1").write_bytes(b"somebody's\n")
    assert growth.look() == [(NEWEST, 4)]


def test_looks_at_a_log_that_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    growth = Growth(str(path), rotates=True)
    assert growth.look() == [(0, 0), (NEWEST, 0)]
    append(str(path), b"one\n")
    assert growth.look() == [(NEWEST, 4)]
    os.link(path, f"{path}.1")
    assert growth.look() == [(NEWEST, 4)]  # it has both names
    os.unlink(f"{path}.1")
    for number in range(1, 6):
        append(str(path), b"%d\n" % number * number)
        rotate(path, number)
    compress(path, 1)
    compress(path, 3)
    os.unlink(f"{path}.4")
    assert growth.look() == [(1, 6), (2, 4), (3, 6), (5, 10), (NEWEST, 0)]
    append(str(path), b"1234\n")
    assert growth.look() == [(NEWEST, 5)]
    for number in (6, 7):
        rotate(path, number)
        append(str(path), b"more\n" * number)
    os.unlink(f"{path}.6")  # what was the newest at the last look; it had at least as many bytes as then
    assert growth.look() == [(6, 5), (7, 30), (NEWEST, 35)]
    growth.look()
    rotate(path, 8)
    os.unlink(f"{path}.8")
    assert growth.look() == [(8, 35), (NEWEST, 0)]


@pytest.mark.parametrize("tells", ["the folder", "the size"])
def test_a_look_at_a_new_file_that_has_the_inode_of_an_old_one(tmp_path: Path, tells: str) -> None:
    """The folder's time tells; or the size, should the clock of the file system not have gone on."""
    folder = tmp_path / "rank"
    folder.mkdir()
    path, inode = folder / "log", tmp_path / "inode"
    append(str(path), b"one\n")
    os.utime(folder, ns=(0, 0))
    growth = Growth(str(path), rotates=True)
    growth.look()
    os.link(path, inode)
    rotate(path, 1)
    append(str(path), b"second\n")
    rotate(path, 2)
    os.unlink(f"{path}.1")
    inode.write_bytes(b"longer\n" if tells == "the folder" else b"3\n")
    os.replace(inode, path)
    if tells == "the size":
        os.utime(folder, ns=(0, 0))
    assert growth.look() == [(1, 4), (2, 7), (NEWEST, path.stat().st_size)]


def test_a_look_at_a_rotation_that_was_tried_twice(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(str(path), b"one\n")
    growth = Growth(str(path), rotates=True)
    growth.look()
    os.link(path, f"{path}.1")
    append(str(path), b"two\n")
    assert growth.look() == [(NEWEST, 8)]
    rotate(path, 2)
    append(str(path), b"three\n")
    assert growth.look() == [(1, 8), (NEWEST, 6)]
    assert growth.look() == [(NEWEST, 6)]


def noted(path: str) -> list[list[int]]:
    """The records of one stream, of which growths that follow each other are one: a busy machine parts them."""
    found: list[list[int]] = []
    for _at, *rest in timeline.read(path):
        if found and rest[0] == found[-1][0] == GREW:
            found[-1][2] += rest[2]
        else:
            found.append(rest)
    return found


def test_the_pump_notes_cuts_and_rotation(tmp_path: Path) -> None:
    times = TimelineWriter(str(tmp_path / "timeline"))
    cut, turned = tmp_path / "cut", tmp_path / "turned"
    for path in (cut, turned):
        append(str(path), b"one\n")
    with rig([str(cut)], str(tmp_path / "out"), timeline=times) as it:
        append(str(cut), b"two\n")
        it.catch_up()
        until(it.loop, lambda: os.path.exists(times.path))  # within a second, not only at the end
        os.truncate(cut, 0)
        it.loop.once()
        append(str(cut), b"three\n")
        it.finish()
    assert noted(times.path) == [[GREW, 0, 8], [CUT, 0, 0], [GREW, 0, 6]]
    times = TimelineWriter(str(tmp_path / "another"))
    with rig([str(turned)], str(tmp_path / "out"), timeline=times, rotates=True) as it:
        append(str(turned), b"two\n")
        it.catch_up()
        rotate(turned, 1)
        append(str(turned), b"three\n")
        it.catch_up()
        it.finish()
    assert noted(times.path) == [[ROTATED, 0, 0], [GREW, 0, 8], [ROTATED, 0, 1], [GREW, 0, 6]]


# --- how long it gets


def grows(it: TimelineWriter, time: FakeClock, sizes: dict[int, int], seconds: float, pause: float, grown: int) -> None:
    """All streams grow, one after the other, for so long."""
    end = time() + seconds
    while time() < end:
        time.advance(pause)
        for stream, size in sizes.items():
            sizes[stream] = size + grown
            it.note(stream, size + grown)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline counts as long soon."""
    monkeypatch.setattr(timeline, "DOUBLING", 4096)


@pytest.mark.usefixtures("short")
def test_dense_growth_is_late_by_the_spacing(time: FakeClock, times: TimelineWriter) -> None:
    """Nothing is lost, and the order of each stream is its own."""
    sizes = dict.fromkeys(range(8), 0)
    grows(times, time, sizes, seconds=10.0, pause=0.003, grown=100)
    times.close()
    found = list(timeline.read(times.path))
    longest = SPACING * ((1 << os.path.getsize(times.path) // 4096) - 1)
    assert longest < 1.0
    grown = dict.fromkeys(range(8), 0)
    for at, _kind, stream, number in found:
        grown[stream] += number
        written = grown[stream] / 100 * 0.003  # when it had grown by so much
        assert -0.002 - APART <= at - START - written <= longest + 0.004 + APART
    assert grown == sizes


@pytest.mark.usefixtures("short")
def test_the_spacing_doubles_as_the_file_grows(time: FakeClock, times: TimelineWriter) -> None:
    sizes = {0: 0, 1: 0}
    lengths = []
    for _ in range(6):
        grows(times, time, sizes, seconds=100.0, pause=0.005, grown=1)
        times.flush()
        lengths.append(os.path.getsize(times.path))
    assert lengths[0] < 6 * 4096
    assert lengths[5] < lengths[0] + 4 * 4096  # six times as long takes less than four doublings
    times.close()
    assert sum(number for _at, _kind, stream, number in timeline.read(times.path) if stream == 0) == sizes[0]


@pytest.mark.usefixtures("short")
def test_a_worker_that_cuts_its_log_again_and_again(time: FakeClock, times: TimelineWriter) -> None:
    for number in range(20_000):
        time.advance(0.001)
        times.note(0, number % 2 * 100)
    times.note(1, 1)
    assert (GREW, 1, 1) in {tuple(rest) for _at, *rest in records(times)}
    assert os.path.getsize(times.path) < 10 * 4096


@pytest.mark.usefixtures("short")
def test_what_is_held_is_written_a_little_later(time: FakeClock, times: TimelineWriter) -> None:
    """Not before its time, and not never; and nobody is woken for nothing meanwhile."""
    for size in range(1, 3000):
        time.advance(0.001)
        times.note(0, size)
        if not size % 1000:
            times.flush()
    noted = time()
    times.flush()
    waits = 0
    while times.unwritten:
        waits += 1
        time.advance(max(0.0, times.since - time()))
        times.flush()
    assert waits == 1
    assert noted < time() < noted + 2 * SPACING
    assert sum(number for _at, _kind, _stream, number in timeline.read(times.path)) == 2999
    times.close()


# --- what others have written

VALUES = st.one_of(
    st.integers(0, 300), st.integers(0, (1 << 70) - 1), st.sampled_from([0, NEWEST, 1 << 62, (1 << 63) - 1])
)
TRIPLES = st.lists(st.tuples(VALUES, st.one_of(st.integers(0, 15), VALUES), VALUES), max_size=30)
DAMAGED = st.builds(
    lambda version, started, triples, rest: (
        HEAD.pack(version, started) + b"".join(pack(*triple) for triple in triples) + rest
    ),
    st.sampled_from([MAGIC, b"phalanx2"]),
    st.integers(0, (1 << 64) - 1),
    TRIPLES,
    st.binary(max_size=64),
)


@pytest.mark.long
@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.one_of(DAMAGED, st.binary(max_size=200)))
def test_a_timeline_that_others_have_written(data: bytes) -> None:
    """Every line is shown once, in the order of its stream, at a time that a calendar has."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "timeline").write_bytes(data)
        texts = {0: b"a\nb\nc\n", 1: b"d\ne\n"}
        for stream, text in texts.items():
            (folder / str(stream)).write_bytes(text)
        (folder / "0.1").write_bytes(b"set aside\n")
        followers = {stream: Follower(str(folder / str(stream)), rotates=True) for stream in texts}
        found = dict.fromkeys(texts, b"")
        try:
            for at, stream, text in merge(followers, str(folder / "timeline")):
                datetime.fromtimestamp(at, UTC)
                found[stream] += text
        finally:
            for follower in followers.values():
                follower.close()
        assert found[1] == texts[1]
        assert found[0] in (texts[0], b"set aside\n" + texts[0])


def peak(of: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        of()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_timeline_of_4_gigabytes_of_holes(tmp_path: Path) -> None:
    path, log = tmp_path / "timeline", tmp_path / "log"
    log.write_bytes(b"line\n")
    with open(path, "wb") as file:
        file.write(HEAD.pack(MAGIC, int(START * clock.NS)))
        file.truncate(4 << 30)
    assert peak(lambda: merged(TimelineWriter(str(path)), log)) < 4 << 20


def test_a_timeline_of_very_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond what is followed comes file by file."""
    monkeypatch.setattr("phalanx._logs.timeline.MOST_PARTS", 1000)
    path, log = tmp_path / "timeline", tmp_path / "log"
    log.write_bytes(b"line\n")
    path.write_bytes(HEAD.pack(MAGIC, int(START * clock.NS)) + pack(1, CUT, 0) * 50_000 + pack(1, GREW, 5))
    os.utime(log, (START + 500, START + 500))
    assert merged(TimelineWriter(str(path)), log) == [(500.0, 0, b"line\n")]
    assert peak(lambda: merged(TimelineWriter(str(path)), log)) < 6 << 20
