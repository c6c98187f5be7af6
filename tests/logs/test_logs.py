"""Where output goes: the notation, the layout of folders, redirected files, and the console."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from phalanx.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, RunProcsResult, Std, start_processes
from tests.support import workers
from tests.support.helpers import TIMEOUT, Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

PYTHON = sys.executable


def run(entrypoint: Any, args: Mapping[int, tuple[Any, ...]], **options: Any) -> RunProcsResult:
    with start_processes("logs", entrypoint, args, **options) as group:
        result = group.wait()
    assert result is not None
    assert not result.is_failed(), result.root_cause
    return result


# --- the notation


@pytest.mark.parametrize(
    "text,value",
    [
        ("0", Std.NONE), ("1", Std.OUT), ("2", Std.ERR), ("3", Std.ALL), (" 3 ", Std.ALL),
        ("0:3", {0: Std.ALL}), ("0:3,1:0,12:1", {0: Std.ALL, 1: Std.NONE, 12: Std.OUT}), ("1000:2", {1000: Std.ERR}),
    ],
)  # fmt: skip
def test_std_from_str(text: str, value: Std | dict[int, Std]) -> None:
    assert Std.from_str(text) == value


@pytest.mark.parametrize(
    "text", ["", "4", "-1", "a", "0:", ":1", "0:4", "0:1;1:1", "0:1,", "x:1", "0:1,0:2", "-1:1", "²:1"]
)
def test_std_from_str_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Std.from_str(text)


# --- the layout


@pytest.mark.slow
def test_default_layout(tmp_path: Path) -> None:
    root = tmp_path / "new" / "folder"
    env = {"TORCHELASTIC_RUN_ID": "my/run", "TORCHELASTIC_RESTART_COUNT": "2"}
    specs = DefaultLogsSpecs(str(root), redirects=Std.ALL, tee={1: Std.OUT})
    result = run(workers.prints, {0: ("zero",), 1: ("one",)}, envs={0: env, 1: env}, logs_specs=specs)
    (folder,) = root.iterdir()
    assert re.fullmatch(r"my_run_\w+", folder.name)
    assert specs.root_log_dir == str(root)
    assert specs.run_log_dir == str(folder)
    attempt = folder / "attempt_2"
    assert result.stdouts == {rank: str(attempt / str(rank) / "stdout.log") for rank in range(2)}
    assert result.stderrs == {rank: str(attempt / str(rank) / "stderr.log") for rank in range(2)}
    assert sorted(str(path.relative_to(attempt)) for path in attempt.rglob("*.*")) == [
        "0/stderr.log", "0/stdout.log", "1/stderr.log", "1/stdout.log"
    ]  # fmt: skip
    assert (attempt / "1" / "stdout.log").read_text() == "one\n"


def test_of_many_attempts_the_first_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL, keep_attempts=5)
    for attempt in (0, 2, 3, 7, 8, 9, 11):  # on many machines a node is not in each
        run("echo", {0: (attempt,)}, envs={0: {"TORCHELASTIC_RESTART_COUNT": str(attempt)}}, logs_specs=specs)
    assert specs.run_log_dir is not None
    assert sorted(path.name for path in Path(specs.run_log_dir).iterdir()) == [
        f"attempt_{number}" for number in (0, 11, 3, 7, 8, 9)
    ]


@pytest.mark.parametrize(
    "given,error,words",
    [
        *(
            (
                {"keep_attempts": number},
                error,
                f"keep_attempts: expected a number of attempts, 5 or more, got {number!r}$",
            )
            for number, error in ((4, ValueError), (True, ValueError), (7.5, TypeError), ("100", TypeError))
        ),
        ({"max_size": 2.5}, TypeError, "max_size: expected a number of bytes, 1 or more, got 2.5"),
        ({"max_size": "9"}, TypeError, "max_size: expected a number of bytes, 1 or more, got '9'"),
        ({"max_size": 9, "keep": 2.5}, TypeError, "keep: expected a number of files, 1 or more, got 2.5"),
        *(
            (
                {"log_dir": os.devnull, name: value},
                ValueError,
                f"log_dir: /dev/null keeps no logs that {name} could be about$",
            )
            for name, value in (("max_size", 1 << 20), ("mode", 0o755), ("keep_attempts", 7))
        ),
    ],
)
def test_a_bound_of_logs_that_means_nothing_is_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        DefaultLogsSpecs(**given)


@pytest.mark.parametrize("gone", ["the run's", "all"])
@pytest.mark.parametrize("own_root", [True, False])
def test_a_restart_makes_folders_again_that_were_removed(tmp_path: Path, own_root: bool, gone: str) -> None:
    """A machine's cleaner of /tmp does so, say."""
    specs = DefaultLogsSpecs(str(tmp_path / "logs") if own_root else None, redirects=Std.ALL)
    run("echo", {0: ("first",)}, logs_specs=specs)
    assert specs.run_log_dir is not None
    run_dir = Path(specs.run_log_dir)
    shutil.rmtree(run_dir if gone == "the run's" else run_dir.parent)
    run("echo", {0: ("second",)}, envs={0: {"TORCHELASTIC_RESTART_COUNT": "1"}}, logs_specs=specs)
    assert (run_dir / "attempt_1/0/stdout.log").read_text() == "second\n"
    assert run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_temporary_folder_stays_if_there_is_evidence_in_it(tmp_path: Path) -> None:
    result = run(workers.nothing, {0: ()})
    assert (result.stdouts, result.stderrs) == ({0: ""}, {0: ""})
    folder = tmp_path / "temporary"
    assert list(folder.iterdir()) == []
    with start_processes("n", "sleep", {0: (600,)}) as sleeps:
        assert len(list(folder.iterdir())) == 1
    assert (list(folder.iterdir()), sleeps.is_open) == ([], False)  # it is closed that removes it, and not dropped
    with start_processes("n", workers.fail, {0: ("why",)}) as group:
        assert os.path.exists(group.wait().failures[0].error_file)
    assert len(list(folder.iterdir())) == 1


def test_relative_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rel").mkdir()
    try:
        result = run("pwd", {0: ()}, log_dir="rel", redirects=Std.OUT)
        assert result.stdouts == {0: str(tmp_path / "rel/0/stdout.log")}
        assert (tmp_path / "rel/0/stdout.log").read_text() == f"{tmp_path}\n"
    finally:
        monkeypatch.undo()


class OneFolder(LogsSpecs):
    """A layout of one's own: all files side by side."""

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        assert self._root_log_dir is not None
        root = self._root_log_dir
        return LogsDest(
            stdouts={rank: f"{root}/out-{rank}.txt" for rank in envs},
            stderrs=dict.fromkeys(envs, ""),
            error_files={rank: f"{root}/error-{rank}.json" for rank in envs},
        )


@pytest.mark.slow
def test_a_layout_of_ones_own(logs: Path) -> None:
    with start_processes("own", workers.prints, {0: ("a",), 1: ("b",)}, None, OneFolder(str(logs))) as group:
        result = group.wait()
    assert result is not None
    assert (logs / "out-1.txt").read_text() == "b\n"
    assert result.stdouts[0] == str(logs / "out-0.txt")
    assert sorted(path.name for path in logs.iterdir()) == ["out-0.txt", "out-1.txt"]


class Some(OneFolder):
    """Layouts that forget a rank, or have one too many."""

    def __init__(self, folder: str, name: str, files: object) -> None:
        super().__init__(folder)
        self.change = {name: files}

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        return super().reify(envs).replace(**self.change)


@pytest.mark.parametrize(
    "name,files,expected",
    [
        ("stdouts", {0: "", 2: ""}, "stdouts has no file for local rank 1; it takes one for each of 0 to 2, or ''"),
        ("stderrs", {}, "stderrs has no file for local rank 0, 1, 2; it takes one for each of 0 to 2, or ''"),
        ("error_files", {1: "x"}, "error_files has no file for local rank 0, 2; it takes one for each of 0 to 2"),
        *(
            (name, {0: "x", 3: "x"}, f"{name} has local rank 3; ranks are 0 to 2")
            for name in ("tee_stdouts", "tee_stderrs", "hidden_stdouts", "hidden_stderrs")
        ),
    ],
)
def test_a_layout_that_does_not_have_exactly_the_ranks(
    logs: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"logs_specs: Some.reify: {expected}")):
        start_processes("own", "/bin/true", nprocs=3, logs_specs=Some(str(logs), name, files))
    assert list(logs.iterdir()) == []
    monkeypatch.setattr(OneFolder, "reify", lambda _self, _envs: {"stdouts": {}})
    with pytest.raises(TypeError, match=re.escape("logs_specs: OneFolder.reify: expected a LogsDest, got {'stdouts'")):
        start_processes("own", "/bin/true", nprocs=1, logs_specs=OneFolder(str(logs)))


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_filter_that_chooses_every_line_is_refused(logs: Path, stream: str) -> None:
    filters: dict[str, Any] = {f"duplicate_{stream}_filters": ["loss", ""]}
    with pytest.raises(ValueError, match=f"^duplicate_{stream}_filters: an empty string is in every line, got "):
        start_processes("x", "true", nprocs=1, logs_specs=DefaultLogsSpecs(str(logs), Std.ALL), **filters)


def test_where_streams_go_without_logs() -> None:
    specs = DefaultLogsSpecs(os.devnull, redirects=Std.OUT, tee={1: Std.OUT}, local_ranks_filter={0, 1})
    logs = specs.reify({rank: {} for rank in range(3)})
    assert logs.stdouts == {0: os.devnull, 1: "", 2: os.devnull}
    assert logs.stderrs == {0: "", 1: "", 2: os.devnull}
    specs.tidy(logs)
    assert not os.path.exists(os.path.dirname(logs.error_files[0]))


@pytest.mark.parametrize("order", ["in turn", "at once"])
def test_two_groups_with_the_same_specs(logs: Path, order: str) -> None:
    """Each has a run's folder of its own, and nothing of either is lost."""
    specs = DefaultLogsSpecs(str(logs), Std.OUT)
    folders: list[str | None] = []
    with ExitStack() as stack:
        groups = []
        for text in ("first", "second"):
            groups.append(stack.enter_context(start_processes("g", "echo", (text,), nprocs=2, logs_specs=specs)))
            folders.append(specs.run_log_dir)
            if order == "in turn":
                groups[-1].wait()
        assert not any(group.wait().is_failed() for group in groups)
    assert len(set(folders)) == 2
    texts = [Path(f"{folder}/attempt_0/{rank}/stdout.log").read_text() for folder in folders for rank in range(2)]
    assert texts == ["first\n", "first\n", "second\n", "second\n"]


def test_attempts_of_the_second_group_stay_together_too(logs: Path) -> None:
    specs = DefaultLogsSpecs(str(logs), run_id="ours")
    folders = []
    for attempt in "0101":
        specs.reify({0: {"TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_RUN_ID": "theirs"}})
        folders.append(specs.run_log_dir)
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert all(os.path.basename(str(folder)).startswith("theirs_") for folder in folders)  # the environment is first


def test_what_one_group_removes_is_not_the_others(gate: Gate) -> None:
    """Two groups with the same specs: of one that has ended, nothing is left; the other's failure is kept."""
    specs = DefaultLogsSpecs()
    with start_processes("late", sys.executable, ("-c", f"{gate.python()}; 1/0"), nprocs=1, logs_specs=specs) as late:
        with start_processes("early", "/bin/true", nprocs=1, logs_specs=specs) as early:
            early.wait()
            of_early = Path(early.error_files[0])
        assert not of_early.parents[2].exists()
        assert Path(late.error_files[0]).parent.is_dir()
        gate.open()
        late.wait()


def test_what_it_has_not_made_is_not_removed(logs: Path) -> None:
    DefaultLogsSpecs().tidy(LogsDest(error_files={0: str(logs / "0.json")}))
    assert logs.is_dir()


@pytest.mark.slow
def test_evidence_of_an_earlier_run_in_the_folder_is_removed(logs: Path) -> None:
    """Nor is what stands beside an error file; what is no file stays."""
    for suffix in ("", ".fatal", ".exit", ".stacks"):
        (logs / f"error-0.json{suffix}").write_text("yesterday's")
    os.mkdir(logs / "error-1.json")
    messages = []
    for entrypoint, args in ((workers.fail, ("first",)), ("sh", ("-c", "exit 3"))):
        with start_processes("g", entrypoint, args, nprocs=2, logs_specs=OneFolder(str(logs)), settle=20.0) as group:
            messages.append(group.wait().failures[0].message)
    assert messages == ["ValueError: first", "exited with code 3; no error was recorded"]
    assert sorted(path.name for path in logs.glob("error-*")) == ["error-1.json"]


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_streams_of_each_rank(logs: Path, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    redirects = {0: Std.OUT, 1: Std.ERR, 2: Std.ALL}
    args = {rank: (f"rank{rank}",) for rank in range(4)}
    result = run(workers.prints, args, log_dir=logs, redirects=redirects, start_method=method)
    assert result.stdouts == {0: str(logs / "0/stdout.log"), 1: "", 2: str(logs / "2/stdout.log"), 3: ""}
    assert result.stderrs == {0: "", 1: str(logs / "1/stderr.log"), 2: str(logs / "2/stderr.log"), 3: ""}
    assert (logs / "0/stdout.log").read_text() == "rank0\n"
    assert (logs / "1/stderr.log").read_text() == "rank1\n"
    captured = capfd.readouterr()
    assert sorted(captured.out.split()) == ["rank1", "rank3"]
    assert sorted(captured.err.split()) == ["rank0", "rank3"]


@pytest.mark.slow
def test_local_ranks_filter(logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The console shows some ranks; the files hold all."""
    specs = DefaultLogsSpecs(str(logs), tee={0: Std.ALL, 1: Std.ALL}, local_ranks_filter={1, 2})
    result = run(workers.prints, {rank: (f"rank{rank}",) for rank in range(4)}, logs_specs=specs)
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["[1] rank1", "rank2"]
    assert sorted(captured.err.splitlines()) == ["[1] rank1", "rank2"]
    with open(result.stdouts[0]) as stream:
        assert stream.read() == "rank0\n"


# --- tee: bytes in, whole lines out

SAY = "import os, sys; os.write(1, bytes.fromhex(sys.argv[1]))"


def tee(logs: Path, *texts: bytes, **options: Any) -> RunProcsResult:
    args = {rank: ("-c", SAY, text.hex()) for rank, text in enumerate(texts)}
    return run(PYTHON, args, log_dir=logs, tee=Std.OUT, **options)


TEED = [
    (b"", []),
    (b"\n", [b""]),
    (b"one\ntwo\n", [b"one", b"two"]),
    (b"no newline", [b"no newline"]),
    (b"\n\n\nx", [b"", b"", b"", b"x"]),
    (b"\xff\xfe\x80 not UTF-8\n\xc3", [b"\xff\xfe\x80 not UTF-8", b"\xc3"]),
    ("é — 漢\n".encode(), ["é — 漢".encode()]),
    (b"10 %\r50 %\rdone\n", [b"done"]),
    (b"dos\r\nlines\r\n", [b"dos\r", b"lines\r"]),
    (b"a\0b\n\0", [b"a\0b", b"\0"]),
]


def test_tee_shows_whole_lines_and_keeps_every_byte(logs: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    tee(logs, *(data for data, _ in TEED))
    out, err = capfdbinary.readouterr()
    assert err == b""
    lines = out.removesuffix(b"\n").split(b"\n")
    for rank, (data, shown) in enumerate(TEED):
        assert (logs / f"{rank}/stdout.log").read_bytes() == data
        assert [line[4:] for line in lines if line.startswith(b"[%d] " % rank)] == shown


def test_prefixes_of_the_callers(logs: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    tee(logs, b"zero\n", b"one\n", b"two\n", log_line_prefixes={0: "<zero>: ", 1: "é%s{}\\n "})
    lines = sorted(capfdbinary.readouterr().out.splitlines(keepends=True))
    assert lines == sorted([b"<zero>: zero\n", "é%s{}\\n one\n".encode(), b"[2] two\n"])


@pytest.mark.slow
def test_lines_of_many_ranks_stay_whole(logs: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Each rank writes its lines in pieces; the console gets them in one."""
    code = (
        "import os, sys\nfor n in range(300):\n"
        " for part in (sys.argv[1], ' says ', str(n) * 50, '\\n'): os.write(1, part.encode())"
    )
    run(PYTHON, {rank: ("-c", code, f"rank{rank}") for rank in range(4)}, log_dir=logs, tee=Std.OUT)
    lines = capfdbinary.readouterr().out.decode().splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] rank{rank} says {str(n) * 50}" for n in range(300)]
    assert len(lines) == 1200


@pytest.mark.slow
def test_a_line_is_shown_as_soon_as_it_ends(logs: Path, tmp_path: Path, ready: Ready, gate: Gate) -> None:
    """Not at the end of the run. The worker goes on only when its line has come out at the far end."""
    text = """
import sys
from pathlib import Path
from phalanx.multiprocessing import Std, start_processes
with start_processes("t", sys.executable, {0: ("-c", sys.argv[1])}, log_dir=sys.argv[2], tee=Std.OUT) as group:
    group.wait()
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    code = f"print('half ', end='', flush=True); {ready.python()}; print('whole', flush=True); {gate.python()}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([PYTHON, str(script), code, str(logs)], stdout=subprocess.PIPE, env=env) as launcher:
        assert launcher.stdout is not None
        ready.wait()
        assert launcher.stdout.readline() == b"[0] half whole\n"
        gate.open()
        assert launcher.stdout.read() == b""
    assert launcher.returncode == 0


def test_output_of_orphans_is_in_the_file(logs: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """What a child of the worker writes before the group is over counts, too."""
    child = (
        "import os, time; worker = os.getppid(); open(os.environ['FIFO'], 'w').close()\n"
        "while os.getppid() == worker: time.sleep(0.01)\n"
        "os.write(1, b'last\\n')"
    )
    code = f'mkfifo $FIFO; {shlex.quote(PYTHON)} -c "$CHILD" & read line <$FIFO; echo first'
    env = {"FIFO": str(logs.parent / "fifo"), "CHILD": child}
    run("sh", {0: ("-c", code)}, envs={0: env}, log_dir=logs, tee=Std.OUT, linger=TIMEOUT)
    assert (logs / "0/stdout.log").read_text() == "first\nlast\n"
    assert capfdbinary.readouterr().out == b"[0] first\n[0] last\n"
