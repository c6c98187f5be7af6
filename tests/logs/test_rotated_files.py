"""Files that rotation has set aside: some of them removed, some compressed, under a reader that is anywhere in them."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import stat
from pathlib import Path

import pytest

from phalanx._logs.follower import last_lines
from phalanx._logs.rotated import NEWEST, GzipReader, numbers, rotated_files
from phalanx._logs.timeline import Growth
from tests.support.pump_tools import append, followed, read_on


def rotate(path: Path, number: int) -> None:
    """As the log writer does it."""
    os.link(path, f"{path}.{number}")
    new = path.with_name("new")
    new.touch()
    os.replace(new, path)


def compress(path: Path, number: int) -> None:
    """Have ``path.N.gz`` in the place of ``path.N``."""
    plain, packed = f"{path}.{number}", f"{path}.{number}.gz"
    with open(plain, "rb") as source, gzip.open(f"{packed}.part", "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target)
    shutil.copystat(plain, f"{packed}.part")
    os.rename(f"{packed}.part", packed)
    os.unlink(plain)


def filled(path: Path, count: int = 5) -> None:
    """A log with ``count`` files set aside, each with its number in it, and "newest" in the last."""
    for number in range(1, count + 1):
        append(str(path), b"file %d\n" % number)
        rotate(path, number)
    append(str(path), b"newest\n")


def test_their_names(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for name in ("log", "log.2", "log.10", "log.3.gz", "log.3", "log.4.gz", "log.0", "log.01", "log.gz", "log.5.gz.new",
                 "log.new", "log.-1", "log.²", "logs.6", "other.7", "log.20261120"):  # fmt: skip
        (tmp_path / name).touch()
    assert [(number, os.path.basename(name)) for number, name in numbers(str(path)).items()] == [
        (2, "log.2"), (3, "log.3"), (4, "log.4.gz"), (10, "log.10")
    ]  # fmt: skip
    assert rotated_files(str(path)) == [f"{path}{end}" for end in (".2", ".3", ".4.gz", ".10")]
    assert rotated_files(str(tmp_path / "no" / "log")) == []


@pytest.mark.parametrize("missing", [{1}, {3}, {5}, {1, 2, 3}, {2, 4}, {1, 2, 3, 4, 5}])
def test_those_that_were_removed_hide_no_others(tmp_path: Path, missing: set[int]) -> None:
    path = tmp_path / "log"
    filled(path)
    for number in missing:
        os.unlink(f"{path}.{number}")
    left = b"".join(b"file %d\n" % number for number in range(1, 6) if number not in missing) + b"newest\n"
    with followed(path, rotates=True) as it:
        assert it.left() == len(left)
        assert read_on(it, 3) == left
        append(str(path), b"more\n")
        rotate(path, 6)
        append(str(path), b"and more\n")
        assert read_on(it) == b"more\nand more\n"
    assert last_lines(str(path), rotates=True) == left + b"more\nand more\n"


@pytest.mark.parametrize("closes", [False, True])
def test_those_that_are_removed_while_they_are_read(tmp_path: Path, closes: bool) -> None:
    path = tmp_path / "log"
    filled(path)
    with followed(path, rotates=True) as it:
        buffer = bytearray(4)
        assert it.read(buffer) == 4  # of the first
        if closes:
            it.close()
        for number in (1, 2, 4):
            os.unlink(f"{path}.{number}")
        rest = b"" if closes else b" 1\n"
        assert read_on(it) == rest + b"file 3\nfile 5\nnewest\n"
        for number in (6, 7, 8):  # what is being read is set aside, and removed with the next one
            append(str(path), b"file %d\n" % number)
            rotate(path, number)
        os.unlink(f"{path}.6")
        os.unlink(f"{path}.7")
        if closes:
            it.close()
        append(str(path), b"newest\n")
        assert read_on(it) == (b"" if closes else b"file 6\n") + b"file 8\nnewest\n"


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("size", [1, 5, 4096])
def test_those_that_are_compressed_while_they_are_read(tmp_path: Path, closes: bool, size: int) -> None:
    path = tmp_path / "log"
    dice = random.Random(3)  # noqa: S311 - the same numbers in every run, and no secret
    buffer = bytearray(size)
    got, said, plain, count = b"", b"", [], 0
    with followed(path, rotates=True) as it:
        for number in range(1, 25):
            line = b"line %d\n" % number * dice.randrange(1, 9)
            append(str(path), line)
            said += line
            if dice.random() < 0.6:
                count += 1
                rotate(path, count)
                plain.append(count)
            if plain and dice.random() < 0.6:
                compress(path, plain.pop(dice.randrange(len(plain))))
            for _ in range(dice.randrange(6)):
                got += buffer[: it.read(buffer)]
            assert it.left() == len(said) - len(got)
            if closes:
                it.close()
        assert got + read_on(it, size) == said


def test_a_number_that_nobody_expects(tmp_path: Path) -> None:
    """The newest of those set aside was removed: what is read has another number than one more than the last."""
    path = tmp_path / "log"
    filled(path, 3)
    os.unlink(f"{path}.3")
    with followed(path, rotates=True) as it:
        assert read_on(it) == b"file 1\nfile 2\nnewest\n"
        rotate(path, 4)
        compress(path, 4)
        append(str(path), b"next\n")
        assert read_on(it) == b"next\n"


@pytest.mark.parametrize("call", ["os.stat", "posix.open"])
def test_a_rotation_between_two_calls_loses_no_byte(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a read at the end of the file; and after the look at what was set aside, before the file is opened."""
    path = tmp_path / "log"
    append(str(path), b"one\n")
    real, turns, got, buffer = getattr(os, call.partition(".")[2]), list[str](), b"", bytearray(4)

    def late(name: object, *args: object, **options: object) -> object:
        if os.path.basename(str(name)) == "log" and not turns:
            turns.append(call)
            append(str(path), b"two\n")
            rotate(path, 1)
            append(str(path), b"three\n")
        return real(name, *args, **options)

    with followed(path, rotates=True) as it:
        if call == "os.stat":
            got = bytes(buffer[: it.read(buffer)])
        monkeypatch.setattr(call, late)
        assert got + read_on(it) == b"one\ntwo\nthree\n"
    assert turns


def test_a_rotation_that_was_tried_twice(tmp_path: Path) -> None:
    """The file has two numbers: it got the first one, but not its new name, and grew on."""
    path = tmp_path / "log"
    append(str(path), b"one\n")
    with followed(path, rotates=True) as it, followed(path, rotates=True) as late:
        assert read_on(it) == b"one\n"
        os.link(path, f"{path}.1")  # it has two names
        assert read_on(it) == b""
        append(str(path), b"two\n")
        rotate(path, 2)
        append(str(path), b"three\n")
        assert read_on(it) == b"two\nthree\n"
        assert read_on(late) == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("end", [".3", ".3.gz"])
@pytest.mark.parametrize("what", ["folder", "pipe", "socket", "loop", "a link to nothing"])
def test_something_else_that_is_called_so(tmp_path: Path, what: str, end: str) -> None:
    path = tmp_path / "log"
    filled(path)
    os.unlink(f"{path}.3")
    name = f"{path}{end}"
    if what == "folder":
        os.mkdir(name)
    elif what == "pipe":
        os.mkfifo(name)
    elif what == "socket":
        os.mknod(name, stat.S_IFSOCK | 0o600)
    else:
        os.symlink(name if what == "loop" else "nowhere", name)
    with followed(path, rotates=True) as it:
        assert read_on(it, 3) == b"file 1\nfile 2\nfile 4\nfile 5\nnewest\n"
    growth = Growth(str(path), rotates=True)
    assert growth.look() == [(0, 0), *((number, 7) for number in (1, 2, 4, 5)), (NEWEST, 7)]


def test_reading_up_to_a_number(tmp_path: Path) -> None:
    path = tmp_path / "log"
    filled(path)
    os.unlink(f"{path}.3")
    buffer = bytearray(100)
    with followed(path, rotates=True) as it:
        assert buffer[: it.read(buffer, 3)] == b"file 1\n"
        assert buffer[: it.read(buffer, 3)] == b"file 2\n"
        assert it.read(buffer, 3) == 0
        assert (it.read_here(buffer), it.number) == (7, 4)
        assert it.read_here(buffer) == 0
        it.go_to(6)
        assert (it.read_here(buffer), it.number) == (7, NEWEST)
        it.go_to(2)
        assert (it.read_here(buffer), it.number) == (7, 2)


def test_a_file_cut_and_set_aside_between_reads_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(str(path), b"a long line\n")
    with followed(path, rotates=True) as it:
        assert read_on(it) == b"a long line\n"
        os.truncate(path, 0)
        append(str(path), b"short\n")
        rotate(path, 1)
        assert read_on(it) == b"short\n"


def test_the_last_lines_of_compressed_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(str(path), b"".join(b"line %d\n" % number for number in range(100_000)))
    rotate(path, 1)
    compress(path, 1)
    append(str(path), b"newest\n")
    expected = b"".join(b"line %d\n" % number for number in range(99_981, 100_000)) + b"newest\n"
    assert last_lines(str(path), rotates=True) == expected


@pytest.mark.parametrize("damage", ["cut", "garbage behind", "two members", "garbage"])
def test_a_damaged_compressed_file_yields_what_can_be_read(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.1.gz"
    text = b"".join(b"line %d\n" % number for number in range(1000))
    packed = gzip.compress(text)
    expected = text
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "garbage behind":
        packed += b"garbage"
    elif damage == "two members":
        packed += gzip.compress(b"more\n")
        expected += b"more\n"
    else:
        packed = b"garbage"
    path.write_bytes(packed)
    append(str(tmp_path / "log"), b"newest\n")
    with followed(tmp_path / "log", rotates=True) as it:
        got = read_on(it, 100)
    assert got.endswith(b"newest\n")
    got = got.removesuffix(b"newest\n")
    assert expected.startswith(got)
    assert got == expected or damage in ("cut", "garbage")
    assert got or damage == "garbage"


def test_a_compressed_file_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(bytes(range(100))))
    fd = os.open(path, os.O_RDONLY)
    try:
        packed, buffer = GzipReader(), bytearray(10)
        for offset in (0, 10, 50, 95, 20, 0, 100):
            count = packed.read_at(fd, buffer, offset)
            assert bytes(buffer[:count]) == bytes(range(offset, min(offset + 10, 100)))
    finally:
        os.close(fd)
