"""`TailLog` and `tail_logfile`: files that grow, appear, and end, into whatever can be written to."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from phalanx._base import linux
from phalanx.multiprocessing.tail_log import TailLog, tail_logfile
from tests.support.command import read_until
from tests.support.helpers import TIMEOUT


class Console(io.StringIO):
    """Text that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        with self._changed:
            count = super().write(text)
            self._changed.notify_all()
        return count

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.getvalue(), TIMEOUT), self.getvalue()


@pytest.fixture
def console() -> Console:
    return Console()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "0.log"


def append(path: Path, text: bytes) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    with open(path, "ab") as stream:
        stream.write(text)


# --- files


@pytest.mark.parametrize("below", ["0.log", "new/0.log", "a/new/folder/0.log"])
def test_a_file_that_appears_later(tmp_path: Path, console: Console, below: str) -> None:
    path = tmp_path / below
    tail = TailLog("t", {0: str(path)}, console).start()
    append(path, b"one\n")
    console.wait_for("one\n")
    append(path, b"two\n")
    console.wait_for("two\n")
    tail.stop()
    assert console.getvalue() == "[t0]:one\n[t0]:two\n"


def test_many_files_and_one_thread(tmp_path: Path, console: Console) -> None:
    before = threading.active_count()
    paths = {rank: tmp_path / f"{rank}.log" for rank in range(300)}
    tail = TailLog("t", {rank: str(path) for rank, path in paths.items()}, console).start()
    assert threading.active_count() == before + 1
    for rank, path in paths.items():
        append(path, b"of %d\n" % rank)
    tail.stop()
    assert sorted(console.getvalue().splitlines()) == sorted(f"[t{rank}]:of {rank}" for rank in paths)


# --- where lines go


def test_a_pipe(file: Path) -> None:
    ours, theirs = os.pipe()
    with open(ours, "rb", buffering=0) as read, open(theirs, "w") as write:
        tail = TailLog("t", {0: str(file)}, write).start()
        append(file, b"one\n")
        assert read_until(read.fileno(), "\n") == "[t0]:one\n"
        append(file, b"rest")
        tail.stop()
        assert read_until(read.fileno(), "\n") == "[t0]:rest\n"
        assert not write.closed


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError(text)


@pytest.mark.parametrize("what", ["a pipe that nobody reads", "raises"])
def test_a_console_that_takes_nothing_holds_up_no_stop(file: Path, what: str) -> None:
    ours, theirs = os.pipe()
    with open(theirs, "w") as write:
        tail = TailLog("t", {0: str(file)}, Broken() if what == "raises" else write).start()
        os.close(ours)
        append(file, b"one\n" * 100_000)
        tail.stop()
        assert tail.stopped()


def test_undecodable_bytes_are_replaced(file: Path, console: Console) -> None:
    tail = TailLog("t", {0: str(file)}, console).start()
    append(file, b"a\xff\n\xe2\x82")
    append(file, b"\xac\n\x00\n")
    tail.stop()
    assert console.getvalue() == "[t0]:a\N{REPLACEMENT CHARACTER}\n[t0]:€\n[t0]:\0\n"


# --- which lines, and what stands before them


def test_prefixes(tmp_path: Path, console: Console) -> None:
    files = {rank: str(tmp_path / f"{rank}.log") for rank in range(3)}
    tail = TailLog("t", files, console, {0: "é> ", 2: ""}).start()
    for rank in files:
        append(tmp_path / f"{rank}.log", b"of %d\n" % rank)
    tail.stop()
    assert sorted(console.getvalue().splitlines()) == ["[t1]:of 1", "of 2", "é> of 0"]


def test_a_filter(file: Path, console: Console) -> None:
    seen = []

    def wanted(line: str) -> bool:
        seen.append(line)
        return "keep" in line

    tail = TailLog("t", {0: str(file)}, console, log_line_filter=wanted).start()
    append(file, b"keep 1\ndrop\nkeep \xff\nkeep 3")
    tail.stop()
    assert seen == ["keep 1\n", "drop\n", "keep \udcff\n", "keep 3\n"]
    assert console.getvalue() == "[t0]:keep 1\n[t0]:keep \N{REPLACEMENT CHARACTER}\n[t0]:keep 3\n"


def test_a_filter_that_raises_does_not_hang(file: Path, console: Console) -> None:
    def raises(line: str) -> bool:
        raise RuntimeError(line)

    failed: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, failed.append
    try:
        append(file, b"one\n")
        tail = TailLog("t", {0: str(file)}, console, log_line_filter=raises).start()
        tail.stop()
        assert tail.stopped()
    finally:
        threading.excepthook = hook
    assert console.getvalue() == ""
    (args,) = failed
    assert args.exc_type is RuntimeError


# --- start and stop


def test_stop_shows_everything_that_was_written_before_it(file: Path, console: Console) -> None:
    for number in range(20):
        tail = TailLog("t", {0: str(file)}, console).start()
        append(file, b"number %d\n" % number)
        tail.stop()
        assert console.getvalue().endswith(f"[t0]:number {number}\n")


def test_it_starts_once_and_stops_again_and_again(file: Path, console: Console) -> None:
    append(file, b"one\n")
    tail = TailLog("t", {0: file}, console, 0.05)  # a path, and the interval of old
    assert not tail.stopped()
    assert tail.start() is tail
    for has_stopped in (False, True, True):
        assert tail.stopped() == has_stopped
        with pytest.raises(RuntimeError, match="started once"):
            tail.start()
        tail.stop()
    append(file, b"too late\n")
    assert console.getvalue() == "[t0]:one\n"
    before = threading.active_count()
    for files, dst in (({}, console), ({0: str(file)}, None)):  # nothing to do
        tail = TailLog("t", files, dst).start()
        assert threading.active_count() == before
        tail.stop()
        assert tail.stopped()


def test_a_start_that_fails_leaves_nothing(file: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> int:
        raise OSError(13, "not for you")

    monkeypatch.setattr(linux, "inotify_add", refuse)
    tail = TailLog("t", {0: str(file)}, console)
    with pytest.raises(OSError, match="not for you"):
        tail.start()
    tail.stop()


# --- one file


@pytest.fixture
def tailing(file: Path, console: Console) -> Iterator[Callable[..., threading.Event]]:
    """Starts `tail_logfile` on a thread of its own."""
    threads = []

    def start(**options: Any) -> threading.Event:
        finished = threading.Event()
        arguments = ("head: ", str(file), console, finished)
        thread = threading.Thread(target=tail_logfile, args=arguments, kwargs=options)
        thread.start()
        threads.append((thread, finished))
        return finished

    yield start
    for thread, finished in threads:
        finished.set()
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_tail_logfile(file: Path, console: Console, tailing: Callable[..., threading.Event]) -> None:
    tailing(interval_sec=1000, log_line_filter=lambda line: "drop" not in line)
    append(file, b"one\n")
    console.wait_for("one\n")
    append(file, b"drop\ntwo\n")
    console.wait_for("two\n")
    assert console.getvalue() == "head: one\nhead: two\n"


def test_tail_logfile_shows_what_is_left(file: Path, console: Console) -> None:
    finished = threading.Event()
    finished.set()
    append(file, b"one\ntwo")
    tail_logfile("", str(file), console, finished)
    assert console.getvalue() == "one\ntwo\n"
    tail_logfile("", str(file.parent / "never"), console, finished)
    assert console.getvalue() == "one\ntwo\n"


# --- beside the original


def shown_by(kind: Any, files: dict[int, str], console: TextIO, text: bytes, **options: Any) -> None:
    tail = kind("t", files, console, **options)
    tail.start()
    for path in files.values():
        with open(path, "ab") as stream:
            stream.write(text)
    tail.stop()
    assert tail.stopped()


def test_a_folder_is_refused(tmp_path: Path, file: Path, console: Console) -> None:
    tail = TailLog("trainer", {0: str(file), 1: str(tmp_path)}, console)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        tail.start()
    tail.stop()
    with pytest.raises(IsADirectoryError):
        tail_logfile("", str(tmp_path), console, threading.Event())
    TailLog("trainer", {0: str(tmp_path)}, None).start().stop()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_temporary_folder")
@pytest.mark.parametrize(
    "options", [{}, {"log_line_prefixes": {0: "[zero] "}}, {"log_line_filter": lambda s: "2" in s}]
)
def test_the_same_text_as_the_originals(tmp_path: Path, options: dict[str, Any]) -> None:
    """The original's most complete one: it misses a file that is written just before the stop, once in 150 times."""
    from torch.distributed.elastic.multiprocessing import tail_log as original

    texts = []
    for number, kind in enumerate((TailLog, *[original.TailLog] * 5)):
        files = {rank: str(tmp_path / f"{number}-{rank}.log") for rank in range(2)}
        for path in files.values():
            open(path, "x").close()
        console = io.StringIO()
        shown_by(kind, files, console, b"line 1\nline 2\n\nline \xc3\xa9 2\n", **options)
        texts.append(sorted(console.getvalue().splitlines()))
    assert texts[0] == max(texts[1:], key=len)
