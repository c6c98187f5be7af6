"""What runs out, what cannot be read, and what is not what it seems: each is said, and hides nothing else."""

from __future__ import annotations

import ctypes
import multiprocessing.spawn
import os
import pathlib
import resource
import shutil
import signal
import sys
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from phalanx._base import channels, interpreter, procfs
from phalanx._base.loop import Deadlines
from phalanx._base.text import seconds
from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, LogsDest, LogsSpecs, Placement, Std, start_processes
from phalanx.timer import TimerSpecs
from tests.support import workers
from tests.support.helpers import PYTHON, TIMEOUT, alive, meanwhile, pass_gate, tell, until, wait_gone
from tests.support.insides import guard_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


# --- results, and descriptors

FEW = """
import resource, sys
from phalanx.multiprocessing import DefaultLogsSpecs, Placement, Std, start_processes
from tests.support import workers

if __name__ == "__main__":
    folder, method, nice, max_size = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    specs = DefaultLogsSpecs(folder, redirects=Std.ALL, max_size=int(max_size) or None)
    options = {"nprocs": 12, "placement": Placement(nice=int(nice)), "logs_specs": specs}
    with start_processes("g", workers.echo, ("x",), start_method=method, **options) as group:
        print(len(group.wait().return_values))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "method, nice, max_size",
    [("forkserver", 0, 0), ("spawn", 0, 0), ("spawn", 1, 0), ("fork", 1, 0), ("spawn", 0, 100_000)],
    ids=["forked", "executed", "executed in a fork", "forked and placed", "rotated"],
)
def test_workers_start_under_a_low_limit_on_open_files(tmp_path: Path, method: str, nice: int, max_size: int) -> None:
    """That limit holds while they are started."""
    done = workers.run_script(tmp_path, FEW, str(tmp_path / "logs"), method, str(nice), str(max_size))
    assert (done.returncode, done.stdout.strip()) == (0, "12"), done.stderr


def test_a_channel_goes_on_after_a_message_that_was_cut() -> None:
    ours, theirs = map(channels.Channel, channels.pair())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        ours.send(("first", 1), [0])
        ours.send(("second", 2))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(channels.Truncated) as caught:
                theirs.receive()
            assert theirs.receive() == (("second", 2), [])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert caught.value.message == ("first", 1)
    finally:
        ours.close()
        theirs.close()


def test_descriptors_that_wait_may_be_closed_by_their_owner() -> None:
    ours, theirs = map(channels.Channel, channels.pair())
    received: list[tuple[channels.Message, list[int]]] = []
    out, into = os.pipe()
    try:
        while ours.send(("filler", b"x" * 20_000)):
            pass
        assert not ours.send(("pipe",), [out])
        os.close(out)
        while not received or received[-1][0][0] != "pipe":
            ours.flush()
            message = theirs.receive()
            assert message is not None
            received.append(message)
        [fd] = received[-1][1]
        os.write(into, b"hello")
        assert os.read(fd, 5) == b"hello"
        os.close(fd)
    finally:
        os.close(into)
        ours.close()
        theirs.close()


@pytest.mark.long
def test_no_message_to_a_launcher_needs_a_descriptor(ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of ranks: a launcher may have none left."""
    sizes: list[int] = []
    send = channels.Channel.send

    def measured(self: channels.Channel, message: channels.Message, fds: Any = ()) -> bool:
        import marshal

        size = len(marshal.dumps(message))  # type: ignore[arg-type]  # plain values
        if message[0] != "up" and (size > channels._PACKET or fds):
            tell(ready.address, f"{message[0]}: {size} bytes, {len(fds)} descriptors")
        sizes.append(size)
        return send(self, message, fds)

    monkeypatch.setattr(channels.Channel, "send", measured)
    args = dict.fromkeys(range(400), (ready.address, gate.address))
    group = start_processes("g", leaves_at_once, args, start_method="fork")
    monkeypatch.undo()
    assert group.wait(60) is not None
    group.close()
    said = ready_now(ready)
    assert [line for line in said if not line.startswith("start: ")] == []


def leaves_at_once(_address: str, _gate: str) -> None:
    os._exit(0)


def ready_now(ready: Ready) -> list[str]:
    """What has been told by now."""
    lines = []
    ready._sock.settimeout(0.01)
    try:
        while True:
            lines.append(ready._sock.recv(65536).decode())
    except TimeoutError:
        return lines


# --- what cannot be read


HIDDEN = """
import os, sys
from phalanx._engine.keeper import keeper
from phalanx.multiprocessing import start_processes
from tests.support.waits import tell_keepers

tell_keepers(keeper, "PATIENCE", 20.0)  # for their end, once they have been asked
child = sys.argv[1]
code = f"import os, subprocess; child = subprocess.Popen([{child!r}, '600'], start_new_session=True)\\n"
code += "while os.path.exists('/proc/%d' % child.pid): pass"  # Popen returns when it is about to be another user's
with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=2) as group:
    result = group.wait()
try:
    open(f"/proc/{result.leftovers[0].pid}/stat")
except OSError:
    print(result.state, [(left.command, left.signal_sent, left.exitcode) for left in result.leftovers])
"""


@pytest.mark.slow
def test_a_child_that_proc_does_not_show(tmp_path: Path) -> None:
    """It is of another user by now (setuid), and /proc hides it (hidepid). The keeper is its parent all the same."""
    sleep = tmp_path / "sleep"
    shutil.copy("/bin/sleep", sleep)
    sleep.chmod(0o4755)
    if os.geteuid() != 0:
        pytest.skip("it takes root to mount a /proc")
    os.chown(sleep, 65534, 65534)
    sleep.chmod(0o4755)
    inside = 'mount -t proc -o hidepid=2,gid=54321 proc /proc && exec setpriv --bounding-set=-sys_ptrace "$@"'
    prefix = ("unshare", "--mount", "--pid", "--fork", "sh", "-c", inside, "sh")
    done = workers.run_script(tmp_path, HIDDEN, str(sleep), prefix=prefix)
    assert done.stdout == "succeeded [('?', 15, -15), ('?', 15, -15)]\n", done.stderr


@pytest.mark.slow
def test_a_look_that_fails_is_no_end(ready: Ready, gate: Gate) -> None:
    """Every look at a process fails: all the same, what a worker leaves behind is ended."""

    def refuse(pid: int) -> object:
        raise PermissionError(1, "hidden", str(pid))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procfs, "Stat", refuse)  # in the keeper, which is a fork of this process
        group = start_processes("g", leaves_children, (ready.address, gate.address), nprocs=1, start_method="fork")
    pids = ready.pids(3)
    gate.open()
    result = group.wait()
    group.close()
    assert result.succeeded
    assert wait_gone(pids) == set()
    assert {left.pid for left in result.leftovers} == set(pids)


def leaves_children(address: str, gate: str) -> None:
    from tests.support.families import fork_daemon, fork_plain, fork_session

    for fork in (fork_plain, fork_session, fork_daemon):
        fork(address)
    pass_gate(gate)  # they have said so


# --- a tracer


PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17


@pytest.mark.slow
def test_a_zombie_of_a_tracer_is_reaped_when_let_go(ready: Ready, gate: Gate) -> None:
    """It is readable, and not ours to reap before: no reason to spin. Its exit is dated when it happened."""
    code = f"import os; {ready.python()}; {gate.python()}; os._exit(3)"
    waits = f"import signal; {ready.python()}; signal.pause()"
    args = {0: ("-S", "-c", code), 1: ("-S", "-c", waits)}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    with start_processes("g", sys.executable, args) as group:
        ready.wait(2)
        [keeper] = procfs.children(guard_of(group))
        traced = group.pids()[0]
        assert libc.ptrace(PTRACE_SEIZE, traced, None, None) == 0, os.strerror(ctypes.get_errno())
        gate.open()
        until(lambda: procfs.Stat(traced).state == "Z")
        before = cpu_seconds(keeper)
        assert group.wait(0.5) is None
        assert cpu_seconds(keeper) - before < 0.1
        os.waitpid(traced, os.WNOHANG)  # the tracer, which is this thread, takes note, and it is the keeper's
        result = group.wait()
    assert result.root_cause is not None
    assert (result.root_cause.local_rank, result.root_cause.exitcode) == (0, 3)
    assert result.outcomes[1].state == "stopped"


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- deadlines


@pytest.mark.slow
def test_cancelled_deadlines_do_not_pile_up() -> None:
    """A heartbeat of a day beside timers that are set and cleared all the time."""
    due = Deadlines()
    due.add(86400.0, lambda: None)
    for moment in range(100_000):
        due.add(1000.0 + moment, lambda: None).cancel()
        assert len(due) < 300
    live = [due.add(float(moment), lambda: None) for moment in range(500)]
    for deadline in live[::2]:
        deadline.cancel()
        deadline.cancel()
    assert due.next() == 1.0
    ran: list[int] = []
    for moment in range(500, 600):
        due.add(float(moment), lambda moment=moment: ran.append(moment))  # type: ignore[misc]  # mypy has no type for it
    due.run(599.0)
    assert ran == list(range(500, 600))


# --- numbers and paths of others


class Seconds(float):
    """A subclass, as many libraries have one."""


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), Seconds(0.5)], ids=lambda it: type(it).__name__)
def test_times_may_be_of_any_library(value: Any, ready: Ready) -> None:
    options = dict.fromkeys(("settle", "grace", "linger"), value)
    timers = TimerSpecs(on_expiry=[("report", value), ("kill", value)], hang_timeout=value)
    code = f"import signal; {ready.python()}; signal.pause()"
    with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=2, timers=timers, **options) as group:
        pids = ready.pids(2)
        os.kill(pids[0], signal.SIGKILL)
        assert group.wait().is_failed()
        group.close(np.int64(15), timeout=value)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("value", ["1", None, True, np.array([1.0]), 1j, float("nan"), -1])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="grace: expected"):
        seconds("grace", value)


def test_a_wait_and_a_close_refuse_what_is_not_a_number() -> None:
    with start_processes("g", "sleep", ("600",), nprocs=1) as group:
        with pytest.raises(ValueError, match="timeout: expected seconds, got nan"):
            group.wait(float("nan"))
        with pytest.raises(ValueError, match="timeout: expected seconds, got nan"):
            group.close(timeout=float("nan"))
        assert group.is_open


def test_the_drain_may_be_of_any_library() -> None:
    assert type(ConsoleSpecs(drain=Decimal("0.5")).drain) is float  # type: ignore[arg-type]  # that is the point


class AsPaths(LogsSpecs):
    """A layout of somebody's own, with `pathlib.Path` for names."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        files: dict[int, Any] = {rank: self._folder / f"{rank}.out" for rank in envs}
        errors: dict[int, Any] = {rank: self._folder / f"{rank}.json" for rank in envs}
        return LogsDest(files, dict.fromkeys(envs, ""), files, {}, errors, max_size=np.int64(1000))  # type: ignore[arg-type]  # that is the point


def test_logs_may_be_paths_and_sizes_of_any_library(tmp_path: Path) -> None:
    with start_processes("g", "/bin/echo", ("hello",), nprocs=2, logs_specs=AsPaths(tmp_path)) as group:
        assert group.wait().succeeded
    assert [(tmp_path / f"{rank}.out").read_text() for rank in range(2)] == ["hello\n", "hello\n"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_path_in_sys_path_is_no_trouble(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Text(str):
        __slots__ = ()

    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, Text(tmp_path / "text")])
    with start_processes("g", paths, nprocs=1, start_method=method) as group:
        found = group.wait().return_values[0]
    assert str(tmp_path / "text") in found
    assert str(tmp_path) not in found, "no import looks there"


def paths() -> list[str]:
    assert all(type(entry) is str for entry in sys.path)
    return sys.path


def test_a_placement_may_have_numbers_of_any_kind() -> None:
    class Nice(int):
        pass

    with start_processes("g", "true", nprocs=1, placement=Placement(nice=Nice(1))) as group:
        assert group.wait().succeeded


# --- which Python

EMBEDDED = """
import sys

if __name__ == "__main__":
    python, how, method = sys.argv[1:]
    sys.executable = {"empty": "", "none": None, "other": "/bin/false", "set": "/bin/false"}[how]

    import multiprocessing
    from phalanx.multiprocessing import start_processes

    if how == "set":
        multiprocessing.set_executable(python)
    try:
        with start_processes("g", len, ("abc",), nprocs=2, start_method=method) as group:
            print(group.wait().return_values)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


NO_PYTHON = "FileNotFoundError: [Errno 2] sys.executable is empty: this process is no Python"
NO_KEEPER = (
    "KeeperLostError: the group's keeper did not get up: /bin/false ended with exit code 1; if that is no Python"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, method, told",
    [
        ("set", "spawn", "{0: 3, 1: 3}\n"),
        ("set", "forkserver", "{0: 3, 1: 3}\n"),
        ("empty", "spawn", NO_PYTHON),
        ("none", "spawn", NO_PYTHON),
        ("other", "spawn", NO_KEEPER),  # uwsgi's sys.executable is uwsgi
    ],
)
def test_a_host_that_is_no_interpreter_may_set_one(tmp_path: Path, how: str, method: str, told: str) -> None:
    done = workers.run_script(tmp_path, EMBEDDED, sys.executable, how, method)
    assert done.stdout.startswith(told)
    assert how == "set" or interpreter.HINT in done.stdout
    assert how != "set" or done.stderr == ""


def test_scripts_run_in_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.multiprocessing import ScriptContext

    wrapper, script = tmp_path / "wrapper", tmp_path / "script.py"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=yes exec {PYTHON} "$@"\n')
    wrapper.chmod(0o755)
    script.write_text("import os; print(os.environ['WRAPPED'])")
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(wrapper))
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT)
    group = ScriptContext("g", str(script), {0: ()}, {0: {}}, specs)
    group.start()
    with group:
        result = group.wait()
    assert pathlib.Path(result.stdouts[0]).read_text() == "yes\n"


# --- forks of a host with threads

IMPORTS = """
import os, sys, threading
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from phalanx.timer import TimerSpecs
from tests.engine.test_limits import does_all

host, found = os.getpid(), sys.argv[1]
armed = False

def hook(event, arguments):
    if armed and event == "import" and os.getpid() != host and arguments[0] not in sys.modules:
        with open(found, "a") as file:
            file.write(f"{arguments[0]}\\n")

sys.addaudithook(hook)
threading.Thread(target=threading.Event().wait, daemon=True).start()
armed = True
for what in ("value", "error", "exit", "signal", "lambda", "leaves"):
    specs = DefaultLogsSpecs(sys.argv[2], redirects=Std.ALL, max_size=1000)
    with start_processes(
        what, does_all, (what,), nprocs=2, start_method="fork", logs_specs=specs, timers=TimerSpecs()
    ) as group:
        group.wait()
"""


def does_all(what: str) -> Any:
    if what == "error":
        raise ValueError("no")
    if what == "exit":
        sys.exit(3)
    if what == "signal":
        signal.raise_signal(signal.SIGSEGV)
    if what == "leaves" and os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    return (lambda: 3) if what == "lambda" else [what]


@pytest.mark.long
def test_a_fork_of_a_host_with_threads_imports_nothing(tmp_path: Path) -> None:
    """A thread that is not there in the fork may have held the lock of an import."""
    found = tmp_path / "found"
    done = workers.run_script(tmp_path, IMPORTS, str(found), str(tmp_path / "logs"), env={"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    assert not found.exists(), found.read_text()


# --- closes


@pytest.mark.slow
def test_a_second_close_shortens_the_sweep_of_the_first(ready: Ready, tmp_path: Path) -> None:
    """The worker dies at once; what is below it, in its session, takes all of the grace that it is allowed."""
    code = f"import signal; signal.signal(15, signal.SIG_IGN); {ready.python()}; signal.pause()"
    script = tmp_path / "child.py"
    script.write_text(code)
    with start_processes("g", "/bin/sh", ("-c", f"{PYTHON} -S {script}; echo"), nprocs=1) as group:
        [pid] = ready.pids()
        with meanwhile(group.close, timeout=TIMEOUT):
            assert wait_gone(group.pids().values()) == set()
            assert alive(pid)
            began = time.monotonic()
            group.close(timeout=0.3)
            assert time.monotonic() - began < TIMEOUT / 2
        assert not alive(pid)


def test_a_run_that_was_stopped_has_not_succeeded() -> None:
    from phalanx._outcomes.result import verdict
    from phalanx.multiprocessing import Outcome, RunProcsResult

    code, cause = verdict(RunProcsResult(outcomes={0: Outcome(0, 4242, "stopped", -15, 15)}))
    assert (code, cause) == (1, "rank 0: stopped by us (SIGTERM)")
    assert verdict(RunProcsResult(outcomes={0: Outcome(0, 4242, "succeeded", 0)})) == (0, "")
