"""What a worker may have put in the place of a file: nobody waits for it, reads it without end, or follows it."""

from __future__ import annotations

import gzip
import os
import socket
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from phalanx._base import files
from phalanx._evidence.cleanup import remove_old
from phalanx._logs import rotated, timeline
from phalanx._logs.follower import Follower, last_lines
from phalanx.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, start_processes
from tests.support.command import Place, logs
from tests.support.pump_tools import Memory, rig


def make_socket(path: str) -> None:
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"/proc/self/fd/{fd}/{name}")  # a path in an address has 108 bytes at the most, see unix(7)
    os.close(fd)


KINDS: dict[str, Callable[[str], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": make_socket,
    "a device": partial(os.symlink, "/dev/zero"),
    "too many": lambda path: os.symlink(path, path),
}


# --- one way to open them


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "log")
    KINDS[kind](path)
    with pytest.raises(OSError, match="(?i)" + kind) as caught:
        files.read(path, 100, links=files.OWN_LINKS)
    assert caught.value.filename == path
    with pytest.raises(OSError, match=r"regular file|link|socket") as unfollowed:
        files.read(path, 100)
    assert unfollowed.value.filename == path


def test_a_link_is_followed_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"line\n")
    (tmp_path / "far").symlink_to("log")
    (tmp_path / "link").symlink_to(tmp_path / "far")
    path = str(tmp_path / "link")
    assert files.read(path, 100, links=files.OWN_LINKS) == files.read(path, 100, links=files.ANY_LINK)
    with pytest.raises(files.UnfitError, match="it is a link, which is not followed here"):
        files.read(path, 100)
    assert files.target(path) == str(tmp_path / "log")


def test_no_more_is_read_than_was_said(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert files.read(str(tmp_path / "log"), 4, 3) == b"3456"
    with pytest.raises(files.UnfitError, match=f"it belongs to uid {os.geteuid()}"):
        files.read(str(tmp_path / "log"), 4, owners={-1})


def test_a_terminal_or_stderr_can_be_a_log() -> None:
    """Its link is root's, and what that leads to the kernel's."""
    for path in ("/dev/stderr", "/dev/null", "/proc/self/fd/2"):
        fd = files.opened_log(path)
        try:
            assert os.get_blocking(fd)
            assert not os.get_inheritable(fd)
        finally:
            os.close(fd)


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for text in (b"one\n", b"two\n"):
        with open(files.opened_log(str(path)), "wb") as file:
            file.write(text)
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_pipe_with_a_reader_can_be_a_log(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    os.mkfifo(path)
    with pytest.raises(files.UnfitError, match="a FIFO that nobody reads"):
        files.opened_log(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = files.opened_log(path)
        os.write(writer, b"line\n")
        os.close(writer)
        assert os.read(reader, 100) == b"line\n"
    finally:
        os.close(reader)


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run.json").symlink_to("precious")
    files.replace(str(tmp_path / "run.json"), str(tmp_path / "new"), b"{}")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "run.json").is_symlink()
    (tmp_path / "new").symlink_to("precious")
    with pytest.raises(FileExistsError):
        files.replace(str(tmp_path / "run.json"), str(tmp_path / "new"), b"[]")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "run.json").read_text() == "{}"


def test_a_folder_that_is_there_counts_only_as_a_folder_of_ours(tmp_path: Path) -> None:
    assert files.make_folder(str(tmp_path / "0"))
    assert not files.make_folder(str(tmp_path / "0"))
    (tmp_path / "1").symlink_to("0")
    (tmp_path / "2").touch()
    for name, what in (("1", "a link"), ("2", "a file")):
        with pytest.raises(files.UnfitError, match=f"{what} of uid {os.geteuid()} is there") as caught:
            files.make_folder(str(tmp_path / name))
        assert caught.value.filename == str(tmp_path / name)


# --- and who uses it


class Prepared(LogsSpecs):
    """Two ranks, and something in the place of the second one's stderr."""

    def __init__(self, folder: Path, make: Callable[[str], object]) -> None:
        super().__init__(str(folder))
        self._folder, self._make = folder, make

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        for rank in envs:
            (self._folder / str(rank)).mkdir()
        self._make(str(self._folder / "1/stderr.log"))
        files_of = {name: {rank: str(self._folder / f"{rank}/{name}") for rank in envs} for name in NAMES}
        return LogsDest(files_of["stdout.log"], files_of["stderr.log"], error_files=files_of["error.json"])


NAMES = ("stdout.log", "stderr.log", "error.json")


@pytest.mark.parametrize(
    "kind, why", [("a FIFO", "FIFO that nobody reads"), ("a socket", "socket"), ("a folder", "directory")]
)
def test_a_log_that_cannot_be_written_ends_the_start(tmp_path: Path, kind: str, why: str) -> None:
    """The keeper opens it. A worker of an earlier attempt, or of a lower rank, can have put it there."""
    with pytest.raises(OSError, match=f"worker 1 was not started; opening its log files.*{why}.*1/stderr.log"):
        start_processes("x", "/bin/true", nprocs=2, logs_specs=Prepared(tmp_path, KINDS[kind]))


def test_a_pipe_that_is_read_does_not_rotate(tmp_path: Path) -> None:
    """Were it not read, the log writer would wait, and with it the logs of all ranks."""

    class Piped(LogsSpecs):
        def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:  # noqa: ARG002 - of one rank
            return LogsDest({0: path}, {0: os.devnull}, error_files={0: str(tmp_path / "error.json")}, max_size=4)

    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with start_processes("x", "/bin/sh", {0: ("-c", "echo one; echo two")}, logs_specs=Piped()) as group:
            result = group.wait()
        assert not result.failures
        assert os.read(reader, 100) == b"one\ntwo\n"
    finally:
        os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("max_size", [None, 100])
@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a folder"])
def test_a_worker_that_replaces_all_there_is_holds_up_nobody(
    tmp_path: Path, kind: str, max_size: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its logs, what rotation is going to make, the evidence, the times of writing, the lines that a filter selects."""
    make = {"a FIFO": "mkfifo", "a folder": "mkdir", "a device": "ln -s /dev/zero"}[kind]
    code = f"""
        cd "${{TORCHELASTIC_ERROR_FILE%/*}}"; rm -f * ../timeline ../filtered*
        for name in stdout.log stderr.log stdout.log.new stdout.log.1 stdout.log.gz.new error.json error.json.fatal \\
            error.json.exit error.json.stacks ../timeline ../filtered_stdout.log; do {make} $name; done
        for line in 1 2 3 4 5 6 7 8 9 10; do echo $line some twenty characters; done
        exit 3
    """
    specs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL, max_size=max_size, compress=bool(max_size))
    argv = dict.fromkeys(range(2), ("-c", code))
    with start_processes("x", "/bin/sh", argv, logs_specs=specs, duplicate_stdout_filters=["some"], grace=1) as group:
        result = group.wait()
    assert {failure.exitcode for failure in result.failures.values()} == {3}
    capfd.readouterr()


def test_following_says_once_what_it_has_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "log")
    os.mkfifo(path)
    with rig([path], Memory()) as it:
        for _ in range(3):
            it.pump.look()
    assert capfd.readouterr().err.count(f"phalanx: {path} is not shown: it is not a regular file, but a FIFO") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a socket"])
def test_logs_passes_over_what_is_no_file_and_says_so(place: Place, kind: str) -> None:
    rank = place.logs / "night_x/attempt_0/0"
    rank.mkdir(parents=True)
    KINDS[kind](str(rank / "stdout.log"))
    (rank / "stderr.log").write_text("bad\n")
    done = logs(place)
    assert (done.status, done.out) == (0, "[0] bad\n")
    assert done.err.startswith(f"phalanx: {rank}/stdout.log is not shown: ")
    assert kind in done.err


def test_a_follower_tells_what_it_may_not_read(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    os.symlink("/dev/zero", path)
    for rotates in (False, True):
        with pytest.raises(files.UnfitError, match="a device"):
            Follower(path, rotates=rotates).read(bytearray(100))
        assert last_lines(path, rotates=rotates) == b""


# --- sizes


def test_the_end_of_a_bomb_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotated, "_MOST_DECOMPRESSED", 1 << 20)
    path = str(tmp_path / "stdout.log.1.gz")
    with gzip.open(path, "wb") as file:
        for _ in range(32):
            file.write(bytes(1 << 17))
    with pytest.raises(OSError, match="too large"):
        rotated.last_bytes(path, 100)
    (tmp_path / "stdout.log").write_bytes(b"end\n")
    assert last_lines(str(tmp_path / "stdout.log"), rotates=True) == b"end\n"


def test_a_bomb_is_unpacked_as_much_as_is_wanted_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "stdout.log.1.gz")
    with gzip.open(path, "wb") as file:
        file.write(bytes(4 << 20))
    follower, buffer = Follower(path.removesuffix(".1.gz"), rotates=True), bytearray(1000)
    (tmp_path / "stdout.log").touch()
    tracemalloc.start()
    try:
        assert follower.read(buffer) == 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        follower.close()


def test_a_file_of_holes_takes_few_records(tmp_path: Path) -> None:
    index = timeline.TimelineWriter(str(tmp_path / "timeline"))
    index.note(0, 1 << 62)
    index.close()
    assert os.path.getsize(index.path) < 40_000


def test_a_device_in_the_place_of_a_timeline_is_not_read(tmp_path: Path) -> None:
    index = tmp_path / "timeline"
    index.symlink_to("/dev/zero")
    assert list(timeline.read(str(index))) == []


def test_what_is_no_file_of_an_earlier_run_is_not_removed(tmp_path: Path) -> None:
    """As root, it would be the machine's /dev/stderr."""
    leads = {
        "null": os.devnull,
        "stderr": "/proc/self/fd/2",
        "over": "stderr",
        "old": "file",
        "nowhere": "missing",
        "loop": "loop",
    }
    for name, where in leads.items():
        (tmp_path / name).symlink_to(where)
    (tmp_path / "file").touch()
    remove_old([str(tmp_path / name) for name in leads])
    assert sorted(os.listdir(tmp_path)) == ["file", "null", "over", "stderr"]
    remove_old([str(tmp_path / "file"), "/proc/self/fd/2"])
    assert sorted(os.listdir(tmp_path)) == ["null", "over", "stderr"]


def test_old_files_go_however_their_folder_is_written(tmp_path: Path) -> None:
    for name in ("0.json", "0.json.exit"):
        (tmp_path / name).touch()
    remove_old([f"{tmp_path}//0.json"])
    assert os.listdir(tmp_path) == []
