"""Bounds on what rotated logs take of a disk: how many files are kept, and that they are compressed."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx._engine.keeper import log_writer
from phalanx._engine.keeper.log_writer import Compressor
from phalanx._logs.follower import Follower
from phalanx._logs.rotated import numbers, rotated_files
from phalanx.multiprocessing import DefaultLogsSpecs
from tests.support.command import Place, logs, refused, sh
from tests.support.helpers import TIMEOUT
from tests.support.pump_tools import Rotated


def line(number: int) -> bytes:
    return b"line %04d\n" % number


def write(it: Rotated, numbers: range) -> None:
    """One line is one file."""
    for number in numbers:
        it.write(line(number))


def wait_for(compressor: Compressor) -> None:
    """Until everything is compressed."""
    assert compressor._busy.acquire(timeout=TIMEOUT)
    compressor._busy.release()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "rank").mkdir()
    return tmp_path / "rank" / "log"


# --- how many


@pytest.mark.parametrize("keep", [1, 3])
def test_the_oldest_are_removed(path: Path, keep: int) -> None:
    with Rotated(str(path), 10, keep) as it:
        for number in range(20):
            it.write(line(number))
            assert len(rotated_files(str(path))) == min(number, keep)
    assert list(numbers(str(path))) == list(range(20 - keep, 20))
    assert path.read_bytes() == line(19)
    assert [(path.parent / f"log.{n}").read_bytes() for n in range(20 - keep, 20)] == [
        line(n - 1) for n in range(20 - keep, 20)
    ]


def test_those_of_an_earlier_run_count(path: Path) -> None:
    for number, name in ((1, "log.1"), (2, "log.2.gz"), (7, "log.7")):
        (path.parent / name).write_bytes(line(number))
    (path.parent / "log.old").write_bytes(b"of somebody else")
    with Rotated(str(path), 10, 2) as it:
        write(it, range(2))
        assert names(path.parent) == ["log", "log.7", "log.8", "log.old"]
        write(it, range(2, 4))
        assert names(path.parent) == ["log", "log.10", "log.9", "log.old"]


def test_one_that_somebody_has_removed_is_no_trouble(path: Path) -> None:
    with Rotated(str(path), 10, 2) as it:
        write(it, range(3))
        os.unlink(f"{path}.1")
        write(it, range(3, 5))
    assert names(path.parent) == ["log", "log.3", "log.4"]


# --- compressed


@contextlib.contextmanager
def compressing(path: Path) -> Iterator[tuple[Rotated, Compressor]]:
    compressor = Compressor()
    with Rotated(str(path), 10, 0, compressor) as it:
        yield it, compressor


def test_compressed_files_are_the_plain_ones(path: Path) -> None:
    with compressing(path) as (it, compressor):
        it.write(line(0))
        os.chmod(path, 0o640)
        os.utime(path, ns=(10**18 + 1, 10**18 + 2))
        write(it, range(1, 30))
        wait_for(compressor)
    assert names(path.parent) == sorted(["log", *(f"log.{n}.gz" for n in range(1, 30))])
    assert [gzip.decompress((path.parent / f"log.{n}.gz").read_bytes()) for n in range(1, 30)] == [
        line(n) for n in range(29)
    ]
    found = os.stat(f"{path}.1.gz")
    assert (found.st_mode & 0o7777, found.st_mtime_ns) == (0o640, 10**18 + 2)


class Held:
    """A disk that takes nothing until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.error: OSError | None = None
        real = log_writer._write

        def slow(file: int, data: bytes) -> None:
            self.entered.set()
            assert self.go_on.wait(TIMEOUT)
            if self.error is not None:
                raise self.error
            real(file, data)

        monkeypatch.setattr(log_writer, "_write", slow)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    it = Held(monkeypatch)
    yield it
    it.go_on.set()


def test_no_pipe_waits_for_compression(path: Path, held: Held) -> None:
    with compressing(path) as (it, compressor):
        write(it, range(50))
        assert held.entered.wait(TIMEOUT)
        write(it, range(50, 60))
        assert len(numbers(str(path))) == 59
        assert not list(path.parent.glob("*.gz"))
        held.go_on.set()
        wait_for(compressor)
    assert len(list(path.parent.glob("log.*.gz"))) == 59
    assert len(names(path.parent)) == 60


def test_the_end_leaves_plain_what_is_not_compressed(path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_CHUNK", 4)
    with compressing(path) as (it, compressor):
        write(it, range(5))
        assert held.entered.wait(TIMEOUT)
        compressor._over = True  # as `stop` has it, which waits from here on
        held.go_on.set()
        compressor.stop()
        compressor.add(f"{path}.1", lambda: True)
    assert names(path.parent) == ["log", "log.1", "log.2", "log.3", "log.4"]


def test_the_end_does_not_wait_for_a_disk_that_does_not_answer(
    path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "_PATIENCE", 0.01)
    with compressing(path) as (it, compressor):
        write(it, range(3))
        assert held.entered.wait(TIMEOUT)
        compressor.stop()
        assert not held.go_on.is_set()
        assert (path.parent / "log.1").exists()
        held.go_on.set()
        wait_for(compressor)


def test_a_full_disk_leaves_the_plain_file(path: Path, held: Held) -> None:
    held.error = OSError(errno.ENOSPC, "No space left on device")
    held.go_on.set()
    with compressing(path) as (it, compressor):
        write(it, range(3))
        wait_for(compressor)
        assert names(path.parent) == ["log", "log.1", "log.2"]
        held.error = None
        write(it, range(3, 5))
        wait_for(compressor)
    assert names(path.parent) == ["log", "log.1", "log.2", "log.3.gz", "log.4.gz"]


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_is_removed_while_it_is_compressed_stays_away(path: Path, held: Held, by_hand: bool) -> None:
    compressor = Compressor()
    with Rotated(str(path), 10, 0 if by_hand else 1, compressor) as it:
        write(it, range(2))
        assert held.entered.wait(TIMEOUT)
        if by_hand:
            os.unlink(f"{path}.1")
        else:
            write(it, range(2, 4))
        held.go_on.set()
        wait_for(compressor)
    assert names(path.parent) == (["log"] if by_hand else ["log", "log.3.gz"])


def test_a_file_with_another_name_is_left_alone(path: Path) -> None:
    """It may grow under that: a rotation that failed after its first half."""
    path.write_bytes(line(0))
    os.link(path, f"{path}.1")
    compressor = Compressor()
    compressor.add(f"{path}.1", lambda: True)
    wait_for(compressor)
    assert names(path.parent) == ["log", "log.1"]


@pytest.mark.long
@pytest.mark.parametrize("closes", [False, True])
def test_a_reader_during_compression_gets_every_byte_once(path: Path, closes: bool) -> None:
    compressor = Compressor()
    it, follower = Rotated(str(path), 100, 0, compressor), Follower(str(path), rotates=True)
    seen, buffer = b"", bytearray(64)
    try:
        for number in range(3000):
            it.write(line(number))
            if number % 3 == 0:
                seen += bytes(buffer[: follower.read(buffer)])
                if closes:
                    follower.close()
        while count := follower.read(buffer):
            seen += bytes(buffer[:count])
        wait_for(compressor)
    finally:
        it.close()
        follower.close()
    assert seen == b"".join(line(number) for number in range(3000))


def test_an_inode_that_a_newer_file_has_by_now(path: Path) -> None:
    """Some file systems give the inode of the file that went last to the one that comes next."""
    compressor = Compressor()
    it, follower = Rotated(str(path), 10, 0, compressor), Follower(str(path), rotates=True)
    buffer = bytearray(4)
    try:
        it.write(line(0))
        assert follower.read(buffer) == 4
        follower.close()
        first = os.stat(path).st_ino
        for number in range(1, 10):
            it.write(line(number))
            wait_for(compressor)
            if os.stat(path).st_ino == first:
                break
        seen = bytes(buffer)
        while count := follower.read(buffer):
            seen += bytes(buffer[:count])
    finally:
        it.close()
        follower.close()
    assert seen == b"".join(line(n) for n in range(number + 1))


# --- of a run

FLOOD = "n=0; while [ $n -lt 1500 ]; do n=$((n+1)); echo line $n; done"


@pytest.mark.long
def test_a_run_with_compressed_logs(place: Place) -> None:
    compressed = "until ls $LOGS/*/attempt_0/$RANK/stdout.log.3.gz 2>&-; do sleep 0.01; done >&2"
    place.env["LOGS"] = str(place.logs)
    done = sh(place, f"{FLOOD}; {compressed}; {FLOOD}", "--log-max-size", "1k", "--log-compress", n=2)
    assert done.status == 0
    expected = [f"line {n}" for n in range(1, 1501)] * 2
    later = logs(place, "--stdout", "--color", "never")
    for rank in range(2):
        head = f"[{rank}] "
        for shown in (done.out, later.out):
            assert [text.removeprefix(head) for text in shown.splitlines() if text.startswith(head)] == expected
    [folder] = place.logs.glob("*/attempt_0/0")
    assert not [name for name in names(folder) if "new" in name]


def test_a_run_that_keeps_few(place: Place) -> None:
    done = sh(place, FLOOD, "--log-max-size", "1k", "--log-keep", 2, "--log-compress")
    assert done.status == 0
    [log] = place.logs.glob("*/attempt_0/0/stdout.log")
    assert len(numbers(str(log))) == 2
    later = logs(place, "--log-format", "json")
    texts = [json.loads(text)["text"] for text in later.out.splitlines()]
    assert texts == [f"line {n}" for n in range(1501 - len(texts), 1501)]
    assert 200 < len(texts) < 400


# --- what is refused


@pytest.mark.parametrize("option", [["--log-keep", "3"], ["--log-compress"]])
def test_bounds_without_rotation_are_refused(place: Place, option: list[str]) -> None:
    refused(sh(place, "echo", *option), option[0], "only with --log-max-size")
    assert not place.logs.exists()


def test_bounds_that_cannot_be(place: Place) -> None:
    refused(sh(place, "echo", "--log-keep", "0", "--log-max-size", "1k"), "--log-keep")
    given: list[tuple[dict[str, Any], str]] = [
        ({"keep": 3}, "keep: without max_size no file is set aside"),
        ({"compress": True}, "compress: without max_size no file is set aside"),
        ({"keep": 0, "max_size": 1}, "keep: expected a number of files, 1 or more, got 0"),
    ]
    for choices, words in given:
        with pytest.raises(ValueError, match=words):
            DefaultLogsSpecs(**choices)
