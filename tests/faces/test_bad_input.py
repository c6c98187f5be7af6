"""Bad input is refused before anything starts; bad workers and bad places end the group with words that help."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import phalanx.spawn
from phalanx.errors import Outcome
from phalanx.multiprocessing import DefaultLogsSpecs, RunProcsResult, Std, start_processes
from tests.support import workers
from tests.support.disks import fill
from tests.support.helpers import Gate, Ready
from tests.support.workers import run_script

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

METHODS = ("spawn", "forkserver", "fork")

each_method = pytest.mark.parametrize("method", METHODS)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a file system, or makes a cgroup")


def run(entrypoint: Any, args: Mapping[int, tuple[Any, ...]], **options: Any) -> RunProcsResult:
    with start_processes("bad", entrypoint, args, **options) as group:
        result = group.wait()
    assert result is not None
    return result


@pytest.fixture
def nothing_starts(tmp_path: Path) -> Iterator[None]:
    """Refused means refused: neither a process nor a file is there."""
    yield
    assert list((tmp_path / "temporary").iterdir()) == []


# --- ranks


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "args,envs,nprocs,text",
    [
        ({0: (), 2: ()}, None, None, "args: expected exactly the local ranks 0 to 1: 1 missing; 2 too many"),
        ({0: (), 1: ()}, {0: {}}, None, "envs: expected exactly the local ranks 0 to 1: 1 missing"),
        ({0: ()}, {0: {}, 1: {}, 5: {}}, None, "envs: expected exactly the local ranks 0 to 0: 1, 5 too many"),
        ({0: (), 1: ()}, None, 3, "args: expected exactly the local ranks 0 to 2: 2 missing"),
        ({"0": ()}, None, None, "args: expected exactly the local ranks 0 to 0: 0 missing; '0' too many"),
        ({0: (), -1: ()}, None, None, "args: expected exactly the local ranks 0 to 1: 1 missing; -1 too many"),
        ((), {1: {}}, None, "envs: expected exactly the local ranks 0 to 0: 0 missing; 1 too many"),
    ],
)
def test_ranks_missing_or_surplus(args: Any, envs: Any, nprocs: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$") as caught:
        start_processes("n", workers.nothing, args, envs, nprocs=nprocs)
    assert isinstance(caught.value, RuntimeError)  # as torch raises


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "options,kind,text",
    [
        ({"nprocs": 0}, ValueError, "nprocs: expected at least 1 process, got 0"),
        ({"nprocs": -1}, ValueError, "nprocs: expected at least 1 process, got -1"),
        ({"nprocs": True}, TypeError, "nprocs: expected a whole number, got True"),
        ({"nprocs": "many"}, TypeError, "nprocs: expected a whole number, got 'many'"),
        ({}, TypeError, "nprocs: how many processes?"),
        ({"args": 5}, TypeError, "args: expected a mapping"),
        ({"args": {0: "text"}}, TypeError, "args: rank 0: expected a tuple of arguments, got 'text'"),
        ({"args": {0: {"lr": 1}}}, TypeError, "args: rank 0: expected a tuple of arguments, got {'lr': 1}"),
        ({"args": {0: {1, 2}}}, TypeError, "args: rank 0: expected a tuple of arguments, got {1, 2}"),
        ({"envs": [{}], "nprocs": 1}, TypeError, "envs: expected a mapping"),
        ({"envs": {0: None}}, TypeError, "envs: rank 0: expected environment variables by name, got None"),
        ({"envs": {0: {"A": 1}}}, TypeError, "envs: rank 0: 'A' is 1; names and values must be strings"),
        ({"envs": {0: {1: "x"}}}, TypeError, "envs: rank 0: 1 is 'x'; names and values must be strings"),
        ({"envs": {0: {"A=B": "x"}}}, ValueError, "envs: rank 0: 'A=B'='x' cannot be an environment variable"),
        ({"envs": {0: {"": "x"}}}, ValueError, "envs: rank 0: ''='x' cannot be an environment variable"),
        ({"envs": {0: {"A": "x\0y"}}}, ValueError, "cannot be an environment variable"),
        ({"envs": {0: {"A": "\ud800"}}}, ValueError, "envs: rank 0: 'A'='\\ud800' cannot be an environment variable"),
        ({"redirects": "3", "nprocs": 1}, TypeError, "redirects: expected a Std, or a mapping from local rank to one,"),
        ({"redirects": {1: "3"}, "nprocs": 2}, TypeError, "redirects: rank 1: expected a Std, got '3'; Std.from_str"),
        ({"tee": None, "nprocs": 1}, TypeError, "tee: expected a Std, or a mapping from local rank to one, got None"),
        ({"tee": 9, "nprocs": 1}, ValueError, "tee: expected a Std, or a mapping from local rank to one, got 9"),
        ({"log_dir": "", "nprocs": 1}, ValueError, "log_dir: '' cannot be the path of a folder"),
        ({"duplicate_stdout_filters": 5, "nprocs": 1}, TypeError, "duplicate_stdout_filters: expected a list of"),
        ({"preload": 5, "start_method": "forkserver", "nprocs": 1}, TypeError, "preload: expected a list of modules'"),
        ({"start_method": "thread", "nprocs": 1}, ValueError, "expected one of spawn, forkserver, fork, got 'thread'"),
        ({"main": "reference", "nprocs": 1}, ValueError, "main: expected 'import' or 'value', got 'reference'"),
        ({"settle": "1", "nprocs": 1}, TypeError, "settle: expected seconds, got '1'"),
        ({"grace": -0.5, "nprocs": 1}, ValueError, "grace: expected 0 seconds or more, got -0.5"),
        ({"grace": float("nan"), "nprocs": 1}, ValueError, "grace: expected 0 seconds or more, got nan"),
        ({"grace": None, "nprocs": 1}, TypeError, "grace: expected seconds, got None"),
        ({"name": 5, "nprocs": 1}, TypeError, "name: expected a string, got 5"),
        ({"entrypoint": 5, "nprocs": 1}, TypeError, "entrypoint: expected a callable, or a binary's name, got 5"),
        ({"logs_specs": 5, "nprocs": 1}, TypeError, "logs_specs: expected a LogsSpecs or the path of a folder, got 5"),
        ({"logs_specs": DefaultLogsSpecs(), "log_dir": "/x", "nprocs": 1}, TypeError, "log_dir: give either"),
        ({"logs_specs": DefaultLogsSpecs(), "tee": Std.ALL, "nprocs": 1}, TypeError, "redirects, tee: they belong"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        start_processes(**dict[str, Any](name="n", entrypoint=workers.nothing) | options)


@pytest.mark.parametrize("args", [{0: (1,)}, {1, 2}, "ab"])
def test_arguments_of_spawn_that_are_no_tuple(args: Any) -> None:
    """`start_processes` has a mapping by rank; here, keys would go to the function."""
    with pytest.raises(TypeError, match=re.escape(f"args: expected a tuple of arguments, got {args!r}")):
        phalanx.spawn.spawn(abs, args, 2)


@pytest.mark.slow
def test_whole_numbers_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    count = np.int64(2)
    assert run(pow, {0: (2, 3), 1: (2, 3)}, nprocs=count).return_values == {0: 8, 1: 8}
    assert run(pow, {np.int64(rank): (2, rank) for rank in range(2)}).return_values == {0: 1, 1: 2}
    phalanx.spawn.spawn(abs, (), count)


# --- folders


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("missing", FileNotFoundError, "log_dir: '{}' does not exist"),
        ("file", NotADirectoryError, "log_dir: '{}' is not a folder"),
        ("full", RuntimeError, "log_dir: '{}' is not empty; it holds a, b, c …"),
    ],
)
def test_a_log_dir_that_cannot_be_is_refused(tmp_path: Path, name: str, kind: type[Exception], words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    for letter in "abcd":
        (tmp_path / "full" / letter).touch()
    path = str(tmp_path / name)
    with pytest.raises(kind, match=re.escape(words.format(path))):
        start_processes("n", "true", {0: ()}, {0: {}}, path)
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("path", [5, b"logs", True, DefaultLogsSpecs, "/dev/null/x", "/proc/1/task/logs"])
def test_a_folder_of_logs_specs_that_cannot_be_is_refused(path: Any) -> None:
    """Root may write almost anywhere; not in /proc."""
    kind, words = (
        (OSError, path) if isinstance(path, str) else (TypeError, f"expected the path of a folder, got {path!r}")
    )
    with pytest.raises(kind, match=re.escape(words)):
        start_processes("n", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(path, Std.ALL))


@root_only
@pytest.mark.usefixtures("nothing_starts")
def test_disk_without_room_for_the_folders(small_disk: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(1000):
            (small_disk / f"file{number}").touch()
    with pytest.raises(OSError, match="No space left on device") as caught:
        start_processes("n", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(str(small_disk / "logs"), Std.ALL))
    assert str(small_disk) in str(caught.value)


@root_only
def test_disk_without_room_for_the_log_files(small_disk: Path) -> None:
    """The folders are there, then the files of the second worker are one too many: the first is gone, too."""
    logs = small_disk / "logs"
    logs.mkdir()
    free = os.statvfs(small_disk).f_ffree
    for number in range(free - 4):  # two folders, two files
        (small_disk / f"file{number}").touch()
    with pytest.raises(OSError, match="No space left on device") as caught:
        start_processes("n", "sleep", {0: (600,), 1: (600,)}, log_dir=logs, redirects=Std.ALL)
    assert "worker 1 was not started; opening its log files failed" in str(caught.value)
    assert str(logs / "1") in str(caught.value)


@root_only
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_disk_fills_while_a_worker_writes(small_disk: Path, ready: Ready, gate: Gate, method: str) -> None:
    """The worker sees ENOSPC as it would anywhere; its failure is told although no error file has room."""
    logs = small_disk / "logs"
    logs.mkdir()
    with start_processes(
        "n", workers.fill, {0: (ready.address, gate.address)}, log_dir=logs, redirects=Std.ALL, start_method=method
    ) as group:
        ready.wait()
        fill(small_disk)
        gate.open()
        result = group.wait()
    assert result is not None
    failure = result.failures[0]
    assert failure.exitcode in workers.FAILED[method]
    # Whether there was room for the error file is the file system's business.
    assert "No space left" in failure.message or "no error was recorded" in failure.message


@pytest.mark.slow
@each_method
def test_a_log_dir_may_be_removed_meanwhile(logs: Path, ready: Ready, gate: Gate, method: str) -> None:
    """Nobody fails of it; for the evidence of a failure, the folder is made anew."""

    def run_without_logs(entrypoint: Callable[..., None], *args: str) -> RunProcsResult:
        logs.mkdir(exist_ok=True)
        options: dict[str, Any] = {"redirects": Std.ERR, "tee": Std.OUT, "start_method": method}
        args = (ready.address, gate.address, *args)
        with start_processes("n", entrypoint, dict.fromkeys(range(2), args), log_dir=logs, **options) as group:
            ready.wait(2)
            shutil.rmtree(logs)
            gate.open(2)
            return group.wait()

    assert not run_without_logs(workers.print_after, "text").is_failed()
    assert not logs.exists()
    result = run_without_logs(workers.fail_after)
    assert result.root_cause is not None
    assert (result.root_cause.exitcode, result.root_cause.message) == (1, "ValueError: after the gate")
    assert {path.name for path in logs.rglob("*") if path.is_file()} == {"error.json"}


# --- binaries


class Textless:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "binary,argument,kind,words",
    [
        ("no-such", "", FileNotFoundError, "entrypoint: no such binary: 'no-such'.*PATH of rank 0: /first:/second"),
        ("/no/such/program", "", FileNotFoundError, "no such binary: '/no/such/program'$"),
        ("", "", ValueError, "empty string"),
        ("HERE", "", IsADirectoryError, "entrypoint: 'HERE' is a folder, not a binary"),
        ("HERE/plain", "", PermissionError, "entrypoint: 'HERE/plain' is not executable"),
        ("HERE/no line", "", OSError, "worker 0 was not started.*a script needs a first line like #!/bin/sh.*HERE/no"),
        ("HERE/no sh", "", FileNotFoundError, "worker 0 was not started.*the interpreter that its first line names"),
        ("/bin/true", "LONG", OSError, "worker 0 was not started.*Argument list too long"),
        ("/bin/true", "a\0b", ValueError, "args: rank 0: .*null"),
        ("/bin/true", Textless(), RuntimeError, "no text"),
    ],
)
def test_a_binary_that_cannot_start_is_named(
    tmp_path: Path, binary: str, argument: object, kind: type[Exception], words: str
) -> None:
    for name, text, mode in (("plain", "", 0o644), ("no line", "echo\n", 0o755), ("no sh", "#!/no/such/sh\n", 0o755)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    args = {0: ("x" * (1 << 20) if argument == "LONG" else argument,)}
    with pytest.raises(kind, match=f"(?s){words.replace('HERE', str(tmp_path))}"):
        start_processes("n", binary.replace("HERE", str(tmp_path)), args, {0: {"PATH": "/first:/second"}})


def test_a_binary_on_the_path_of_its_worker(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "my-own-program"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    assert not run("my-own-program", {0: ()}, envs={0: {"PATH": str(program.parent)}}).is_failed()


@pytest.mark.usefixtures("nothing_starts")
def test_one_rank_cannot_start_and_the_others_are_gone(tmp_path: Path) -> None:
    """Rank 1's PATH leads to another program of the same name."""
    for folder, first in (("good", "#!/bin/sh"), ("bad", "#!/no/such/interpreter")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin").write_text(f"{first}\nexec sleep 600\n")
        (tmp_path / folder / "twin").chmod(0o755)
    envs = {rank: {"PATH": f"{tmp_path / ('bad' if rank == 2 else 'good')}:{os.environ['PATH']}"} for rank in range(4)}
    with pytest.raises(OSError, match="worker 2 was not started"):
        start_processes("n", "twin", dict.fromkeys(range(4), ()), envs)


# --- what cannot be pickled


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_cannot_be_pickled_is_named(method: str) -> None:
    lock = threading.Lock()

    def guarded() -> None:
        with lock:
            pass

    with pytest.raises(TypeError, match=r"the variable 'lock' of the entrypoint .*guarded") as caught:
        start_processes("n", guarded, {0: ()}, start_method=method)
    assert "_thread.lock" in str(caught.value)
    args: dict[int, tuple[Any, ...]] = {0: (1, 2), 1: (1, 2), 2: (1, {"lock": threading.Lock()})}
    with pytest.raises(
        TypeError, match=r"item 'lock' of argument 1 of rank 2 .*_thread.lock.* cannot be sent to a worker"
    ):
        start_processes("n", workers.echo, args, start_method=method)


def no_cell() -> Callable[[], object]:
    lock = threading.Lock()
    gone = 1

    def function() -> object:
        return gone, lock  # noqa: F821 - that is the point

    del gone
    return function


class Holder:
    """Holds what cannot be pickled. What else it has is no business of a search for that."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__"):  # pickling itself looks for its own names
            vars(self)["asked"].append(name)
        raise AttributeError(name)

    @property
    def keywords(self) -> object:
        raise RuntimeError("keywords")

    @property
    def __self__(self) -> object:
        raise RuntimeError("__self__")


class CallableHolder(Holder):
    """Is one that can be called."""

    def __getattr__(self, name: str) -> object:
        if name == "__qualname__":
            raise RuntimeError("no name")
        return super().__getattr__(name)

    def __call__(self) -> None:
        pass


class Stubborn:
    """Has a ``__dict__`` that is none, and cannot be pickled."""

    __dict__ = property(lambda _self: 5)

    def __reduce__(self) -> str:
        raise TypeError("not me")


class Key:
    """A key without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Counted:
    """Notes whenever one of it is pickled."""

    times = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        Counted.times += 1
        return Counted, ()


def holding_itself() -> list[object]:
    held: list[object] = []
    held.extend([held] * 100)
    held.append({"lock": threading.Lock(), "held": [held] * 100})
    return held


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "function,argument,text",
    [
        (no_cell(), 0, "the variable 'lock' of the entrypoint no_cell.<locals>.function (_thread.lock)"),
        (workers.echo, Holder(), "the attribute 'lock' of argument 0 of rank 0 (_thread.lock)"),
        (
            CallableHolder(),
            0,
            "the attribute 'lock' of the entrypoint tests.faces.test_bad_input.CallableHolder (_thread.l",
        ),
        (workers.echo, [Stubborn()], "item 0 of argument 0 of rank 0 (tests.faces.test_bad_input.Stubborn) cannot be"),
        (
            workers.echo,
            {Key(): threading.Lock()},
            "item <tests.faces.test_bad_input.Key> of argument 0 of rank 0 (_thread.",
        ),
        (workers.echo, {"k" * 999: threading.Lock()}, f"item 'k{'k' * 58}… of argument 0 of rank 0 (_thread.lock)"),
        (workers.echo, {threading.Lock(): 1}, "the key <unlocked _thread.lock object at "),
        (workers.echo, holding_itself(), "item 'lock' of item 100 of argument 0 of rank 0 (_thread.lock)"),
        (workers.echo, functools.partial(max, threading.Lock()), "item 0 of 'args' of argument 0 of rank 0 (_thread.l"),
        (functools.partial(max, threading.Lock()), 0, "item 0 of 'args' of the entrypoint functools.partial (_thread."),
        (workers.echo, threading.Lock().acquire, "'__self__' of argument 0 of rank 0 (_thread.lock)"),
    ],
)
def test_what_cannot_be_pickled_is_found_in_anything(function: Any, argument: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)) as caught:
        start_processes("n", function, {0: (argument,)})
    why = "TypeError: (cannot pickle '_thread.lock'|not me)"
    if isinstance(argument, dict) and sys.version_info >= (3, 14):  # pickle notes the key of the item
        why += "|RuntimeError: no text"
    assert re.search(f"cannot be sent to a worker: ({why})", str(caught.value))
    for holder in (function, argument):
        assert getattr(holder, "asked", []) == []


@pytest.mark.usefixtures("nothing_starts")
def test_a_search_among_too_many_names_the_whole() -> None:
    Counted.times = 0
    many = [*(Counted() for _ in range(5000)), threading.Lock()]
    with pytest.raises(
        TypeError, match=r"^argument 0 of rank 0 \(list\) cannot be sent to a worker: TypeError: cannot"
    ):
        start_processes("n", workers.echo, {0: (many,), 1: (many,)})
    assert Counted.times <= 4 * len(many)


def test_fork_pickles_nothing() -> None:
    lock = threading.Lock()
    result = run(lambda given: given is lock, {0: (lock,)}, start_method="fork")
    assert result.return_values == {0: True}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_argument_that_cannot_be_unpickled(method: str) -> None:
    result = run(workers.echo, {0: (workers.NeverLoads(),)}, start_method=method)
    assert "ValueError" in result.failures[0].message
    assert "could not be unpickled in the worker" in result.failures[0].traceback


# --- workers that behave badly


@pytest.mark.parametrize(
    "data,message,unreadable",
    [
        (b'{"message": {"mess', "exited with code 9; no error was recorded", "damaged or half written"),
        (b"", "exited with code 9; no error was recorded", "it is empty"),
        (b"[1, 2]", "exited with code 9; no error was recorded", "no JSON object"),
        (b'{"message": {"message": "caf\xe9", "extraInfo": {}}}', "caf\ufffd", ""),
        (None, "exited with code 9; no error was recorded", "longer than"),
    ],
)
def test_an_error_file_of_a_workers_own_is_read_if_it_can_be(data: bytes | None, message: str, unreadable: str) -> None:
    function, args = (workers.write_error_file, (data,)) if data is not None else (workers.write_huge_error_file, ())
    failure = run(function, {0: args}).failures[0]
    assert (failure.exitcode, failure.message) == (9, message)
    assert unreadable in failure.unreadable


@each_method
@pytest.mark.parametrize(
    "function,args,message",
    [
        (workers.raise_bad_text, (), "BadTextError: <__str__ raised RuntimeError>"),
        (workers.raise_two_arguments, (), "TwoArgumentsError: the text of it"),
        (workers.fail, ("huge",), "ValueError: xxx"),
    ],
    ids=["no text", "cannot be unpickled", "huge text"],
)
def test_an_unusual_exception_is_reported(method: str, function: Any, args: tuple[Any, ...], message: str) -> None:
    given = ("x" * (30 << 20),) if args == ("huge",) else args
    failure = run(function, {0: given}, start_method=method).failures[0]
    assert failure.message.startswith(message)
    assert len(failure.message) < 2 << 20
    assert function.__name__ in failure.traceback


@each_method
def test_a_worker_that_closes_all_its_descriptors_and_fails(logs: Path, ready: Ready, gate: Gate, method: str) -> None:
    options: dict[str, Any] = {"log_dir": logs, "redirects": Std.ALL, "start_method": method}
    with start_processes("n", workers.close_everything, {0: (ready.address, gate.address)}, **options) as group:
        ready.wait()
        assert group.wait(0) is None  # it lives, whatever it has closed
        gate.open()
        result = group.wait()
    assert result is not None
    assert result.failures[0].exitcode in workers.FAILED[method]
    assert result.failures[0].message == "ValueError: without a descriptor"


LONG = """
import sys
from phalanx.multiprocessing import Std, start_processes
with start_processes("l", "truncate", {0: ("-s256M", "/proc/self/fd/1")}, log_dir=sys.argv[1], tee=Std.OUT) as group:
    result = group.wait()
assert not result.is_failed(), result.root_cause
with open("/proc/self/status") as file:
    print(next(line for line in file if line.startswith("VmHWM")).split()[1], file=sys.stderr)
"""


@pytest.mark.long
def test_a_long_line_takes_little_memory(tmp_path: Path, logs: Path) -> None:
    """It goes through in pieces: the launcher stays small. The file is sparse, so the disk does, too.

    Where the machine is so busy that there is more to show than the end has time for, that is said before the figure.
    """
    with open(os.devnull, "wb") as console:
        done = run_script(tmp_path, LONG, str(logs), stdout=console)
    assert done.returncode == 0, done.stderr
    assert (logs / "0/stdout.log").stat().st_size == 256 << 20
    *said, size = done.stderr.splitlines()
    assert [line for line in said if not re.fullmatch(r"phalanx: … (1 more line|more) in .*/0/stdout.log", line)] == []
    assert int(size) < 40_000, "KiB"


# --- running out

FEW_FILES = """
import os, resource, sys
from phalanx.multiprocessing import start_processes
from tests.support import workers
from tests.support.helpers import descendants

if __name__ == "__main__":
    kind, here = sys.argv[1], len(os.listdir("/proc/self/fd")) - 1
    errors = []
    for limit in (45, 30, *range(here + 12, here, -1)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        before = set(os.listdir("/proc/self/fd"))
        try:
            if kind == "binary":
                group = start_processes("f", "sleep", (600,), nprocs=25)
            else:
                group = start_processes("f", workers.nothing, (), nprocs=25, start_method=kind)
            group.close()
        except OSError as error:
            errors.append(str(error))
            assert "open files" in str(error), (limit, str(error))
        left = descendants(os.getpid())
        assert set(os.listdir("/proc/self/fd")) == before, (limit, before, os.listdir("/proc/self/fd"))
        assert not left, (limit, left)
    print(len(errors))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["binary", "forkserver", "fork"])
def test_open_files_run_out(tmp_path: Path, kind: str) -> None:
    """At every point of the start, from the launcher's first descriptor to the keeper's last."""
    done = run_script(tmp_path, FEW_FILES, kind)
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(done.stdout) > 10


FEW_PROCESSES = """
import os, sys
from phalanx.multiprocessing import start_processes
from tests.support import workers

if __name__ == "__main__":
    kind, cgroup = sys.argv[1:]
    with open(f"{cgroup}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    errors = []
    if kind in ("spawn", "fork"):
        start_processes("p", workers.nothing, {0: ()}, start_method=kind).close()  # starts what thread pools there are
    for limit in (25, 12, *range(9, 0, -1)):
        with open(f"{cgroup}/pids.max", "w") as file:
            file.write(str(limit))
        try:
            if kind == "binary":
                group = start_processes("p", "sleep", (600,), nprocs=30)
            else:
                group = start_processes("p", workers.nothing, (), nprocs=30, start_method=kind)
            group.close()
        except OSError as error:
            errors.append((limit, str(error)))
        with open(f"{cgroup}/cgroup.procs") as file:
            left = set(map(int, file)) - {os.getpid()}
        assert not left, (limit, left)
    print(len(errors))
    for limit, text in errors:
        assert "processes or memory have run out" in text, (limit, text)
"""


@pytest.mark.long
@root_only
@pytest.mark.parametrize("kind", ["binary", "spawn", "forkserver", "fork"])
def test_processes_run_out(tmp_path: Path, kind: str) -> None:
    """RLIMIT_NPROC does not bind root; a cgroup does, and tells exactly who is left."""
    cgroup = f"/sys/fs/cgroup/pids/phalanx-test-{os.getpid()}"
    try:
        os.mkdir(cgroup)
    except OSError as error:
        pytest.skip(f"no pids cgroup (v1) to be had: {error}")
    try:
        done = run_script(tmp_path, FEW_PROCESSES, kind, cgroup)
    finally:
        os.rmdir(cgroup)
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(done.stdout) == 11


def test_a_subclass_of_a_value_annotates_what_it_likes() -> None:
    """Its annotations are no fields, be they texts or types."""
    code = "class Mine(Outcome):\n    note: int\n    count: 'int' = 3\n"
    names: dict[str, Any] = {"Outcome": Outcome}
    exec(compile(code, "mine.py", "exec", dont_inherit=True), names)  # noqa: S102 - without this module's own future import
    assert repr(names["Mine"](0, 1, "failed", 1)) == repr(Outcome(0, 1, "failed", 1)).replace("Outcome(", "Mine(")
