"""How a function worker ends: interrupts, evidence that has no file to go to, and streams that it was born with."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._engine import worker_messages
from phalanx._engine.mp_parent import ChildIdentities
from phalanx._engine.worker.mp_child import Child
from phalanx.multiprocessing import ProcessFailure, RunProcsResult, Std, start_processes
from tests.support import ending_workers as does
from tests.support.disks import fill
from tests.support.helpers import TIMEOUT
from tests.support.workers import FAILED, run_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.helpers import Gate, Ready

METHODS = ("spawn", "forkserver", "fork")

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder"), pytest.mark.slow]
each_method = pytest.mark.parametrize("method", METHODS)


def run(function: Callable[..., Any], *arguments: object, **options: Any) -> RunProcsResult:
    """Run one worker and return what became of it."""
    with start_processes("test", function, {0: arguments}, **options) as group:
        return group.wait()


def failure_of(function: Callable[..., Any], *arguments: object, **options: Any) -> ProcessFailure:
    return run(function, *arguments, **options).failures[0]


# --- interrupts


@each_method
@pytest.mark.parametrize("in_use", [True, False], ids=["multiprocessing", "without"])
def test_an_interrupt_leaves_time_for_the_interpreters_end(
    tmp_path: Path, logs: Path, method: str, in_use: bool
) -> None:
    """Whether or not the host has `multiprocessing` in use, in whose frame for children workers run then."""
    text = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from phalanx.multiprocessing import start_processes, Std
def work(path):
    from tests.support.ending_workers import interrupted_with_work_left
    interrupted_with_work_left(path)
if __name__ == "__main__":
    if {in_use}:
        import multiprocessing.util
    with start_processes(
        "n", work, {{0: ({str(tmp_path / "notes")!r},)}}, start_method={method!r}, redirects=Std.ALL,
        log_dir={str(logs)!r},
    ) as group:
        failure = group.wait().failures[0]
    assert failure.message == "KeyboardInterrupt: ", failure.message
    print(failure.exitcode, "interrupted_with_work_left" in failure.traceback)
"""
    done = run_script(tmp_path, text, env={"PYTHONUNBUFFERED": ""})
    told = f"phalanx: the group 'n' has failed: rank 0, KeyboardInterrupt; its files are in {logs}\n"
    assert (done.stdout, done.stderr) == (f"{-signal.SIGINT} True\n", told)
    assert sorted((tmp_path / "notes").read_text().splitlines()) == ["exit handler", "finalizer", "thread"]
    assert (logs / "0/stdout.log").read_text() == "no line end"
    assert (logs / "0/stderr.log").read_text().count("Traceback") == 1


@each_method
def test_an_interrupt_that_is_blocked_is_an_exit_code(method: str) -> None:
    """As of an interpreter."""
    failure = failure_of(does.interrupted_where_that_is_blocked, start_method=method)
    assert failure.exitcode == 128 + signal.SIGINT
    assert failure.message.startswith("KeyboardInterrupt")


# --- evidence


@each_method
def test_who_clears_the_environment_leaves_evidence(logs: Path, method: str) -> None:
    failure = failure_of(does.clear_and_fail, start_method=method, redirects=Std.ERR, log_dir=logs)
    assert (failure.message, failure.exitcode) == ("ValueError: after that", 1)
    assert failure.error_file == str(logs / "0/error.json")
    assert "clear_and_fail" in failure.traceback
    assert (logs / "0/stderr.log").read_text() == failure.traceback


@each_method
def test_who_clears_the_environment_leaves_at_a_known_moment(logs: Path, ready: Ready, gate: Gate, method: str) -> None:
    with start_processes(
        "test", does.clear_and_leave, {0: (ready.address, gate.address)}, start_method=method, log_dir=logs
    ) as group:
        ready.wait()
        assert (logs / "0/error.json.exit").exists()
        gate.open()
        result = group.wait()
    assert result.failures[0].exitcode == 3
    assert result.failures[0].evidence_ns is not None


@each_method
@pytest.mark.parametrize("stderr", ["", "broken", "absent"])
def test_who_may_write_no_file_tells_the_launcher(logs: Path, method: str, stderr: str) -> None:
    """And the launcher, which may, writes the file."""
    failure = failure_of(does.fail_without_a_byte, stderr, start_method=method, redirects=Std.ALL, log_dir=logs)
    assert failure.message == "ValueError: no room"
    assert failure.exitcode in FAILED[method]
    assert failure.traceback.startswith("Traceback")
    assert "fail_without_a_byte" in failure.traceback
    assert failure.evidence_ns is not None
    assert failure.observed_ns is not None
    assert failure.evidence_ns < failure.observed_ns
    written = json.loads((logs / "0/error.json").read_text())["message"]["extraInfo"]
    assert (written["py_callstack"], written["monotonic_ns"], written["pid"]) == (
        failure.traceback,
        failure.evidence_ns,
        failure.pid,
    )
    assert {path.name for path in (logs / "0").iterdir()} == {"error.json", "stdout.log", "stderr.log"}
    assert (logs / "0/stdout.log").read_text() == ""


@pytest.mark.parametrize("letter", ["x", "ä", "€"])
def test_what_is_told_is_cut(letter: str) -> None:
    failure = failure_of(does.fail_without_a_byte, "", letter * 500_000, start_method="fork")
    assert failure.message.startswith(f"ValueError: {letter * 100}")
    assert "\n... cut ...\n" in failure.message
    assert len(failure.message.encode()) < 5_000
    assert "fail_without_a_byte" in failure.traceback
    assert len(failure.traceback.encode()) < 25_000


@each_method
def test_a_traceback_that_no_file_takes_is_printed(tmp_path: Path, logs: Path, method: str) -> None:
    text = f"""
from phalanx.multiprocessing import start_processes
from tests.support.ending_workers import fail_without_a_byte
if __name__ == "__main__":
    with start_processes(
        "n", fail_without_a_byte, {{0: ()}}, start_method={method!r}, log_dir={str(logs)!r}
    ) as group:
        print(group.wait().failures[0].traceback, end="")
"""
    done = run_script(tmp_path, text)
    told = f"phalanx: the group 'n' has failed: rank 0, ValueError: no room; its files are in {logs}\n"
    assert done.stderr == f"phalanx: rank 0 failed:\n{done.stdout}{told}"
    assert done.stdout.endswith("ValueError: no room\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@each_method
def test_a_failure_on_a_full_disk_is_told(small_disk: Path, ready: Ready, gate: Gate, method: str) -> None:
    logs = small_disk / "logs"
    logs.mkdir()
    with start_processes(
        "test",
        does.fail_after,
        {0: (ready.address, gate.address)},
        log_dir=logs,
        redirects=Std.ALL,
        start_method=method,
    ) as group:
        ready.wait()
        fill(small_disk)
        gate.open()
        result = group.wait()
    failure = result.failures[0]
    assert failure.message == "ValueError: on a full disk"
    assert failure.exitcode in FAILED[method]
    assert (failure.error_file, failure.error_file_data) == ("<N/A>", {"message": "<NONE>"})
    assert "fail_after" in failure.traceback
    assert failure.evidence_ns is not None
    assert result.outcomes[0].state == "failed"


def test_what_a_fork_of_the_workers_tells_is_not_the_workers() -> None:
    assert failure_of(does.fail_in_a_fork_too, start_method="spawn").message == "ValueError: of the worker"


@each_method
def test_a_worker_without_descriptors_can_return_nothing(tmp_path: Path, method: str) -> None:
    """And what has their numbers now gets no word of ours."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(64)
        failure = failure_of(does.close_all_and_return, str(tmp_path / "socket"), start_method=method)
        assert "the value cannot be returned: this process has closed" in failure.message
        listener.setblocking(False)
        for _ in range(40):
            connection, _address = listener.accept()
            with connection:
                assert connection.recv(1) == b""


def test_a_worker_waits_for_a_deaf_launcher_a_bounded_time() -> None:
    theirs, ours = worker_messages.pair()
    with closing(ours), closing(theirs):
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(b"x" * 1000)
        before = len(os.listdir("/proc/self/fd"))
        me = Child(ChildIdentities("spawn", [0]).state(0), 0, ours.fileno(), forked=False)
        me.socket.send_evidence("text", "stack", 5)
        assert not worker_messages.send(ours.fileno(), b"E", patience=0.001)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET  # it is open
        assert len(os.listdir("/proc/self/fd")) == before


# --- streams


WELL = "('succeeded', {0: None, 1: None})"


def streams(tmp_path: Path, text: str, method: str, result: str = WELL, **env: str) -> tuple[str, str, str]:
    """Run a host whose ``text`` has ``work``, and may have ``begin`` and ``end``, until the group has ended.

    Returns what the host has printed, and what each of the two workers has.
    """
    text = f"""
import io, os, sys, threading
from pathlib import Path
from phalanx.multiprocessing import start_processes, Std
def begin(): pass
def end(): pass
{text}
if __name__ == "__main__":
    begin()
    with start_processes(
        "n", work, {{0: (0,), 1: (1,)}}, start_method={method!r}, redirects=Std.ALL, log_dir={str(tmp_path / "logs")!r}
    ) as group:
        result = group.wait({TIMEOUT})
    Path({str(tmp_path / "result")!r}).write_text(repr(result and (result.state, result.return_values)))
    end()
"""
    (tmp_path / "logs").mkdir()
    out = run_script(tmp_path, text, env={"PYTHONUNBUFFERED": "", **env}).stdout
    assert (tmp_path / "result").read_text() == result
    first, second = ((tmp_path / f"logs/{rank}/stdout.log").read_text() for rank in (0, 1))
    return out, first, second


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "not flushed"])
def test_a_stream_from_before_the_fork_is_flushed(tmp_path: Path, flushed: bool) -> None:
    """Whether or not the launcher's flush before the fork has reached what was in its buffers."""
    text = f"""
out, binary = sys.stdout, sys.stdout.buffer
def begin():
    out.write("before;")
    if not {flushed}:
        binary.write(b"binary before;")
        out.write("after that;")
        sys.stdout = io.StringIO()
def work(rank):
    print("line", rank, file=out)
    binary.write(b"binary;")
    sys.stdout.write("new;")
    sys.stdout.flush()
    out.write("end;")
def end():
    print("end of the host", file=out, flush=True)
"""
    before = "before;" if flushed else "binary before;before;after that;"
    told = (f"line {rank}\nnew;binary;end;" for rank in (0, 1))
    assert streams(tmp_path, text, "fork") == (before + "end of the host\n", *told)


def test_a_module_that_was_preloaded_may_have_kept_a_stream(tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text("import sys\nout = sys.stdout\n")
    text = f"""
sys.path.insert(0, {str(tmp_path)!r})
def begin():
    global start_processes
    import functools
    start_processes = functools.partial(start_processes, preload=["kept"])
def work(rank):
    import kept
    kept.out.write("end;")
"""
    assert streams(tmp_path, text, "forkserver") == ("", "end;", "end;")


def test_a_stream_locked_at_the_fork_holds_up_no_worker(tmp_path: Path) -> None:
    """By a thread that is not there after it: it is in the middle of a write."""
    text = """
class Raw(io.RawIOBase):
    def writable(self):
        return True
    def fileno(self):
        return 1
    def write(self, data):
        if os.getpid() == host:
            entered.set()
            go_on.wait()
        return os.write(1, data)
host, entered, go_on = os.getpid(), threading.Event(), threading.Event()
out = io.TextIOWrapper(io.BufferedWriter(Raw()))
def say():
    print("of the host", file=out, flush=True)
thread = threading.Thread(target=say)
def begin():
    sys.__stdout__ = out
    thread.start()
    entered.wait()
def work(rank):
    print("of the worker", file=out)
def end():
    go_on.set()
    thread.join()
"""
    assert streams(tmp_path, text, "fork") == ("of the host\n", "of the worker\n", "of the worker\n")


@pytest.mark.long
@pytest.mark.parametrize(
    "method, begin",
    [("fork", "sys.stdout.close()"), ("fork", "sys.stderr.close()"), ("fork", "sys.stdout.detach()"),
     ("fork", "sys.stderr = None"), ("fork", "sys.stdout = object()"), ("spawn", "sys.stderr = sys.stdout = None"),
     ("fork", "sys.stdout = open('/dev/full', 'w'); print('text')"), ("forkserver", "sys.stdout.close()")],
)  # fmt: skip
def test_streams_of_the_host_may_be_unusable(tmp_path: Path, begin: str, method: str) -> None:
    text = f"""
def begin():
    {begin}
def work(rank):
    print("of the worker")
def end():
    sys.stdout = sys.stderr = None
"""
    assert streams(tmp_path, text, method) == ("", "of the worker\n", "of the worker\n")


@each_method
def test_what_passes_on_goes_on_doing_so(tmp_path: Path, method: str) -> None:
    """The class of many a training script, which writes to a file as well, set up at the top."""
    text = """
class Tee:
    def __init__(self, stream, path):
        self.stream, self.file = stream, open(path, "a")
    def write(self, text):
        self.stream.write(text)
        self.file.write(text)
    def flush(self):
        self.stream.flush()
        self.file.flush()
sys.stdout = Tee(sys.stdout, os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.log"))
def work(rank):
    print("step", flush=True)
def end():
    sys.stdout = sys.__stdout__
"""
    assert streams(tmp_path, text, method) == ("", "step\n", "step\n")
    assert (tmp_path / "train.log").read_text() == "step\n" * 2


@each_method
def test_streams_are_unbuffered_where_the_interpreters_are(tmp_path: Path, method: str) -> None:
    text = """
def work(rank):
    sys.stdout.write("no line end")
    os._exit(0)
"""
    found = streams(tmp_path, text, method, PYTHONUNBUFFERED="1")
    assert found == ("", "no line end", "no line end")


@each_method
def test_an_object_may_stand_in_for_a_stream(tmp_path: Path, method: str) -> None:
    """One that `sitecustomize` has put there, which can do little. What is printed through it is out at each line."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("""
import sys
class Wrapper:
    def __init__(self, stream):
        self._stream = stream
    def write(self, text):
        return self._stream.write(text)
    def flush(self):
        self._stream.flush()
sys.stdout, sys.stderr = Wrapper(sys.stdout), Wrapper(sys.stderr)
""")
    os.mkfifo(tmp_path / "fifo")
    text = f"""
def work(rank):
    print("of the worker")
    if rank == 0:
        os.open({str(tmp_path / "fifo")!r}, os.O_WRONLY)
        os._exit(0)
    Path({str(tmp_path / "fifo")!r}).read_bytes()  # until the other one has ended
    os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(tmp_path / "site"), str(root / "src"), str(root)])
    found = streams(tmp_path, text, method, "('failed', {0: None})", PYTHONPATH=path)
    assert found[2] == "of the worker\n"


@each_method
def test_streams_that_raise_keep_nobody_from_leaving(method: str) -> None:
    failure = failure_of(does.leave_with_a_text_that_nobody_takes, start_method=method)
    assert failure.message.endswith("no error was recorded")
    assert failure.exitcode == (120 if method == "spawn" else 1)  # as an interpreter has it, whose flush fails
