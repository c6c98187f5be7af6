"""The failure that came first is the one that is named, and nobody whom we stopped is called a failure.

``PHALANX_ROUNDS`` says how often the races are run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx._base import clock
from phalanx._engine import keeper_link
from phalanx._engine.keeper.children import Children
from phalanx._outcomes import failure as failure_module
from phalanx._outcomes.result import _early, _raised, verdict
from phalanx.errors import Outcome
from phalanx.multiprocessing import DefaultLogsSpecs, PContext, RunProcsResult, ScriptContext, Std, start_processes
from tests.support import racing_workers as does
from tests.support.command import Launcher, Place
from tests.support.disks import Disk, until
from tests.support.families import KINDS
from tests.support.helpers import TIMEOUT, Gate, Ready, pass_gate, rest, tell, wait_gone
from tests.support.lost_connections import LOSSES, both_lose, follows_a_loss

ROUNDS = int(os.environ.get("PHALANX_ROUNDS", "5"))
METHODS = KINDS[1:]


def combined(ways: Sequence[str]) -> list[tuple[str, str]]:
    """Each way to end in a script and in a fork; the other start methods, whose workers run the same code, in one."""
    return [*((kind, way) for kind in ("script", "fork") for way in ways), ("spawn", ways[0]), ("forkserver", ways[0])]


MEMORY = "/sys/fs/cgroup/memory"

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


def run(entrypoint: Any, args: dict[int, tuple[Any, ...]], **options: Any) -> RunProcsResult:
    with start_processes("root cause", entrypoint, args, **options) as group:
        return group.wait()


def states(result: RunProcsResult) -> list[str]:
    return [result.outcomes[rank].state for rank in sorted(result.outcomes)]


def stayed(after: str) -> str:
    """Return the pattern of what is reported of a rank that was killed because it did not exit."""
    return rf"had not exited \d+(\.\d)? s after its {after}(, in .+:\d+\))?: SIGKILL, sent by us"


def cause(result: RunProcsResult) -> int:
    assert result.root_cause is not None
    return result.root_cause.local_rank


# --- who was first


def part_as_program(rank: int, ready: str, gate: str, hears: str) -> tuple[str, ...]:
    """The same, of programs that leave nothing but their exit: rank 0 sees rank 3's end of a FIFO close."""
    if not os.path.exists(hears):
        os.mkfifo(hears)
    up = (
        "import os, signal, socket, time\n"
        "def tell(address):\n"
        "    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', address)\n"
    )
    if rank == 3:
        rest = f"f = open({hears!r}, 'wb', 0); tell({ready!r}); open({gate!r}, 'rb', 0).read(1); os._exit(3)"
    elif rank == 0:
        rest = f"f = open({hears!r}, 'rb', 0); tell({ready!r}); f.read(1); time.sleep(0.02); os._exit(1)"
    else:
        rest = f"tell({ready!r}); signal.pause()"
    return ("-I", "-S", "-c", up + rest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_is_named_when_another_fails_20_ms_later(kind: str, ready: Ready, gate: Gate, tmp_path: Path) -> None:
    named = []
    for attempt in range(ROUNDS):
        hears = str(tmp_path / f"r0-{attempt}")
        where = (ready.address, gate.address, hears)
        if kind == "binary":
            group = start_processes("race", sys.executable, {rank: part_as_program(rank, *where) for rank in range(4)})
        else:
            group = start_processes("race", does.part, {rank: (rank, *where) for rank in range(4)}, start_method=kind)
        with group:
            ready.wait(4)
            gate.open()
            result = group.wait()
        named.append(cause(result))
        assert [result.outcomes[rank].signal_sent for rank in (1, 2)] == [15, 15]
        assert states(result)[1:] == ["stopped", "stopped", "failed"]
        # On a machine that is slow enough, rank 0 is still on its way to its failure when the settle window is over,
        # and rank 3, whose failure is known, on its way out.
        stopped = {1, 2} if result.outcomes[0].state == "failed" else {0, 1, 2}
        assert set(result.failures) == {0, 1, 2, 3} - stopped
        if kind != "binary":
            assert "ValueError: the cause" in result.failures[3].traceback
            assert 0 in stopped or "RuntimeError: a consequence" in result.failures[0].traceback
    print(f"{kind}: rank 3 named {named.count(3)} times out of {ROUNDS}")  # noqa: T201 - shown with -rP
    assert named == [3] * ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("in_peace", [False, True], ids=["killed while it leaves", "left in peace"])
@pytest.mark.parametrize("method", METHODS)
def test_evidence_counts_more_than_the_order_of_exits(
    method: str, in_peace: bool, ready: Ready, gate: Gate, tmp_path: Path
) -> None:
    # Rank 1 records its exception and takes long to leave; rank 2 is gone 0.1 s after the exception. If rank 1 has not
    # left when the grace period is over, it is killed on its way out, and has failed all the same.
    where = (ready.address, gate.address, str(tmp_path / "r2"))
    args = {rank: (rank, *where) for rank in range(3)}
    worker = functools.partial(does.slow_part, rank_0_waits=not in_peace)
    settle, grace = (TIMEOUT, TIMEOUT) if in_peace else (2.0, 0.1)
    with start_processes("evidence", worker, args, start_method=method, settle=settle, grace=grace) as group:
        ready.wait(3)
        gate.open()
        result = group.wait()
    assert cause(result) == 1
    assert result.root_cause is not None
    assert result.root_cause.message == "ValueError: the cause"
    assert states(result) == ["succeeded" if in_peace else "stopped", "failed", "failed"]
    assert (result.failures[1].observed_ns or 0) > (result.failures[2].observed_ns or 0)
    assert result.outcomes[1].exitcode == (1 if in_peace else -9)
    assert result.root_cause.exitcode == 1  # and so is that of the whole
    assert re.fullmatch("" if in_peace else stayed("exception"), result.root_cause.detail)
    assert verdict(result) == (1, "rank 1: ValueError: the cause")
    assert result.outcomes[2].exitcode == 5


@pytest.mark.parametrize(
    "message,told,expected",
    [
        ("ValueError: nan", {}, (1, 5)),
        ("ValueError: nan", {"pid": 8}, None),  # of another process, which has inherited the variable
        ("ValueError: nan", {"left": False}, None),  # it may have been caught
        ("ValueError: nan", {"recorded_ns": None}, None),
        ("KeyboardInterrupt", {}, None),  # the interpreter ends by SIGINT then
    ],
)
def test_with_which_code_an_exception_ends_a_process(
    tmp_path: Path, message: str, told: dict[str, object], expected: tuple[int, int] | None
) -> None:
    path = tmp_path / "error.json"
    assert _raised(str(path), 7) is None
    info = {"pid": 7, "left": True, "recorded_ns": 5, **told}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": info}}))
    assert _raised(str(path), 7) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_who_was_killed_comes_before_whose_connection_broke(
    method: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For how long a keeper may notice nothing of a kill that a peer has seen; on a machine that is busy, longer yet.
    assert failure_module.KILL_NOTICED_NS >= 100 * 10**6
    monkeypatch.setattr(failure_module, "KILL_NOTICED_NS", 10 * 10**9)
    for _ in range(ROUNDS):
        result = run_connected(does.loses_its_peer, gate.address, method=method, opened=gate.open, settle=TIMEOUT)
        assert result.failures.keys() == {0, 1}
        assert cause(result) == 0


def test_who_kills_itself_for_a_lost_peer_is_not_the_cause(tmp_path: Path) -> None:
    args = {rank: (rank, str(tmp_path / "s")) for rank in range(3)}
    with start_processes("p", does.kills_itself_for_its_peer, args) as group:
        result = group.wait()
    assert cause(result) == 0, result.failures


def run_connected(worker: Any, *arguments: Any, method: str, opened: Any = lambda: None, **options: Any) -> Any:
    """Run two workers with a pipe between them, of which nobody else holds an end."""
    with contextlib.ExitStack() as held:
        ends = multiprocessing.Pipe()
        for end in ends:
            held.callback(end.close)
        args = {rank: (rank, ends, *arguments) for rank in (0, 1)}
        group = held.enter_context(start_processes("p", worker, args, start_method=method, **options))
        held.pop_all()
        for end in ends:
            end.close()
        opened()
        result = group.wait()
        group.close()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss,way", [*((loss, "wrapped") for loss in LOSSES), ("reset", "bare"), ("aiohttp", "hidden"), ("httpx", "exit")]
)
def test_a_lost_connection_is_no_cause_however_wrapped(loss: str, way: str) -> None:
    """A peer that has lost the cause's connection is not named, though its evidence is there long before the cause's.

    Nor does it end the settle window, in which the cause sleeps.
    """
    result = run_connected(follows_a_loss, loss, way, method="fork")
    assert (states(result), cause(result)) == (["failed", "failed"], 0)
    assert result.root_cause.message == "ValueError: the cause"


BUSY_LAUNCHER = """
import os, signal, socket, sys, time
rank, launcher, path = os.environ["RANK"], int(os.environ["LAUNCHER"]), sys.argv[1]
with socket.socket(socket.AF_UNIX) as ours:
    if rank == "0":
        ours.bind(path + ".new")
        ours.listen()
        os.rename(path + ".new", path)
        peer, _ = ours.accept()
        try:
            raise ValueError("the cause")
        finally:
            peer.close()
            time.sleep(0.3)
            os.kill(launcher, signal.SIGCONT)
    while not os.path.exists(path):
        time.sleep(0.01)
    ours.connect(path)
    ours.recv(1)
    os.kill(launcher, signal.SIGSTOP)
    raise RuntimeError("step 7 failed") from ConnectionResetError()
"""


@pytest.mark.long
def test_a_busy_launcher_does_not_stop_the_cause_on_its_way_up(tmp_path: Path) -> None:
    """The keeper does not know what the first failure is, as long as the launcher cannot tell it."""
    (tmp_path / "train.py").write_text(BUSY_LAUNCHER)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs")]
    command += [str(tmp_path / "train.py"), str(tmp_path / "socket")]
    shell = f"LAUNCHER=$$ exec {shlex.join(command)}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 1
    assert re.search(r"Root Cause.*?rank +: 0 .*?error +: ValueError: the cause", done.stderr, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("bare", "wrapped"), ("wrapped", "bare"), ("wrapped", "wrapped")])
def test_of_lost_connections_the_first_is_named(ways: tuple[str, str]) -> None:
    """The first rank has lost a server of its own; its peer's failure is not dated before that."""
    result = run_connected(both_lose, ways, method="fork", settle=TIMEOUT)
    assert (states(result), cause(result)) == (["failed", "failed"], 0)


@pytest.mark.slow
def test_a_failure_after_a_handled_loss_may_be_the_cause() -> None:
    result = run_connected(both_lose, ("real", "wrapped"), method="fork", settle=TIMEOUT)
    assert (states(result), cause(result)) == (["failed", "failed"], 0)
    assert result.root_cause.message == "ValueError: the cause"


@pytest.mark.slow
def test_binaries_are_ordered_by_their_exits(ready: Ready, tmp_path: Path) -> None:
    # A chain: each exits when the one before it has exited, of which a pidfd tells. The ranks are shuffled,
    # and the settle window is long enough for all.
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    fifos = [str(tmp_path / f"after-{position}") for position in range(len(order) + 1)]
    for fifo in fifos:
        os.mkfifo(fifo)
    held = [os.open(fifo, os.O_RDWR | os.O_CLOEXEC) for fifo in fifos]
    try:
        args = {}
        for position, rank in enumerate(order):
            before, after = fifos[position], fifos[position + 1]
            code = f"""
import os, select
before, after = os.open({before!r}, os.O_RDONLY), os.open({after!r}, os.O_WRONLY)
{ready.python()}
pid = int(os.read(before, 20))
if pid:
    poll = select.poll()
    try:
        poll.register(os.pidfd_open(pid), select.POLLIN)
        poll.poll()
    except ProcessLookupError:
        pass
os.write(after, str(os.getpid()).encode())
os._exit(10 + {position})
"""
            args[rank] = ("-I", "-S", "-c", code)
        with start_processes("chain", sys.executable, args, settle=TIMEOUT) as group:
            ready.wait(len(order))
            os.write(held[0], b"0")
            result = group.wait()
    finally:
        for fd in held:
            os.close(fd)
    assert [failure.local_rank for failure in sorted(result.failures.values(), key=lambda f: f.first_key)] == order
    assert cause(result) == order[0]
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {
        rank: 10 + position for position, rank in enumerate(order)
    }


# --- the settle window


def shell(*scripts: str) -> dict[int, tuple[str, ...]]:
    return {rank: ("-c", script) for rank, script in enumerate(scripts)}


@pytest.mark.slow
@pytest.mark.parametrize("settle", [0.0, 1.5])
def test_the_settle_window_is_as_long_as_was_asked_for(settle: float) -> None:
    began = time.monotonic()
    result = run("/bin/sh", shell("exit 3", "exec sleep 600"), settle=settle)
    took = time.monotonic() - began
    assert states(result) == ["failed", "stopped"]
    assert settle <= took < settle + 5


def test_in_the_settle_window_peers_may_end_by_themselves(tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    # The reader sees the end of the file, and has lost its peer. The kernel closes the files of who exits a
    # moment before it tells of the exit, so that of two programs without evidence either may be told of first.
    scripts = shell(f"exec 3>{fifo}; exit 3", f"exec 3<{fifo}; read line <&3; exit 4", "exit 0")
    result = run("/bin/sh", scripts, settle=TIMEOUT)
    assert states(result) == ["failed", "failed", "succeeded"]
    assert result.failures.keys() == {0, 1}


@pytest.mark.slow
def test_who_fails_of_our_signal_is_no_failure(ready: Ready, gate: Gate) -> None:
    # However it dies of it: by the signal, by an exit code, or by an exception on the way out.
    def worker(rank: int) -> None:
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        if rank == 2:
            signal.signal(signal.SIGTERM, _raise)
        tell(ready_address, "up")
        if rank == 0:
            pass_gate(gate_address)
            raise ValueError("the cause")
        rest()

    def _raise(*_: object) -> None:
        raise RuntimeError("stopped")

    ready_address, gate_address = ready.address, gate.address
    with start_processes("stopped", worker, {rank: (rank,) for rank in range(4)}, settle=0.0) as group:
        ready.wait(4)
        gate.open()
        result = group.wait()
    assert list(result.failures) == [0]
    assert states(result) == ["failed", "stopped", "stopped", "stopped"]
    assert [result.outcomes[rank].exitcode for rank in range(4)] == [1, 9, 1, -15]


# --- what is known of it


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_tracebacks_of_all_failed_ranks_are_kept(method: str, gate: Gate) -> None:
    args = {rank: (rank, gate.address) for rank in range(3)}
    with start_processes("all", does.raises, args, start_method=method, settle=TIMEOUT) as group:
        gate.open(3)
        result = group.wait()
    assert sorted(result.failures) == [0, 1, 2]
    for rank, failure in result.failures.items():
        assert failure.message == f"ValueError: rank {rank} fell"
        assert "in raises\n" in failure.traceback
        assert failure.traceback.endswith(f"ValueError: rank {rank} fell\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGSEGV])
def test_a_worker_that_dies_of_a_signal(number: signal.Signals) -> None:
    result = run("/bin/sh", shell("exec sleep 600", f"kill -{number.value} $$"))
    assert cause(result) == 1
    failure = result.failures[1]
    assert failure.exitcode == -number
    assert failure.signal_name() == number.name
    assert failure.message == f"Signal {number.value} ({number.name}) received by PID {failure.pid}"
    assert states(result) == ["stopped", "failed"]


@pytest.mark.parametrize("method", METHODS)
def test_a_fatal_signal_leaves_the_python_stack(method: str) -> None:
    result = run(does.crashes, {0: ()}, start_method=method)
    failure = result.failures[0]
    assert failure.exitcode == -signal.SIGSEGV
    assert failure.message == f"Signal 11 (SIGSEGV) received by PID {failure.pid}"
    with open(failure.error_file, encoding="utf-8") as file:
        message = json.load(file)["message"]
    assert message["message"] == failure.message
    stack = message["extraInfo"]["py_callstack"]
    assert "Fatal Python error: Segmentation fault" in stack
    assert stack == failure.traceback
    assert stack.index(" in inner") < stack.index(" in crashes")  # most recent call first


def test_the_last_lines_of_a_captured_stderr(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ERR)
    result = run(
        "/bin/sh", shell("i=0; while [ $i -lt 99 ]; do i=$((i+1)); echo line $i >&2; done; exit 3"), logs_specs=specs
    )
    assert result.failures[0].stderr_tail.splitlines() == [f"line {number}" for number in range(80, 100)]
    assert result.failures[0].stderr_file == result.stderrs[0]


# --- out of memory


@pytest.fixture
def memory_cgroup(tmp_path: Path) -> Iterator[str]:
    """A memory cgroup (v1) of 64 MiB, without a swap to escape to."""
    folder = os.path.join(MEMORY, f"phalanx-{os.getpid()}-{tmp_path.name}")
    try:
        os.mkdir(folder)
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) to be had: {error}")
    try:
        with open(os.path.join(folder, "memory.limit_in_bytes"), "w") as file:
            file.write(str(64 << 20))
        with contextlib.suppress(OSError), open(os.path.join(folder, "memory.swappiness"), "w") as file:
            file.write("0")
        yield folder
    finally:
        deadline = time.monotonic() + TIMEOUT
        while os.path.exists(folder):
            with contextlib.suppress(OSError):  # busy until init has reaped who was in it
                os.rmdir(folder)
            assert time.monotonic() < deadline


LAUNCHER = """
import sys
from phalanx.multiprocessing import start_processes

HUNGRY = "hungry = []\\nwhile True: hungry.append(bytearray(b'x') * (1 << 20))"
QUIET = "import signal; signal.pause()"
KILLED = "import os; os.kill(os.getpid(), 9)"
chosen = {"hungry": HUNGRY, "killed": KILLED}[sys.argv[1]]
args = {0: ("-S", "-c", QUIET), 1: ("-S", "-c", chosen)}
with start_processes("oom", sys.executable, args) as group:
    result = group.wait(60)
print(sorted(result.failures), result.root_cause.exitcode, result.root_cause.detail)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["hungry", "killed"])
def test_an_oom_kill_is_called_so_because_the_kernel_says_so(which: str, memory_cgroup: str) -> None:
    procs = shlex.quote(os.path.join(memory_cgroup, "cgroup.procs"))
    command = shlex.join([sys.executable, "-c", LAUNCHER, which])
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        ["/bin/sh", "-c", f"echo $$ > {procs} && exec {command}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    if which == "killed":
        assert done.stdout == "[1] -9 SIGKILL, not sent by us\n"
    else:
        assert done.stdout.startswith(f"[1] -9 OOM kill: oom_kill in {memory_cgroup}/memory.oom_control rose from 0 to")


# --- an end that takes long


@pytest.mark.slow
@pytest.mark.parametrize("kind, lasts", combined(["long", "shortly"]))
def test_sys_exit_is_dated_when_it_leaves_the_users_code(tmp_path: Path, kind: str, lasts: str) -> None:
    """A peer that only saw its connection close is not the cause; nor is one that we stopped."""
    teardown = TIMEOUT if lasts == "long" else 0.05
    path = str(tmp_path / "socket")
    times: dict[str, Any] = {"settle": 2.0, "grace": 0.1} if teardown == TIMEOUT else {"settle": TIMEOUT}
    if kind == "script":
        argv: dict[int, tuple[str, ...]] = {rank: (str(rank), path, str(teardown)) for rank in range(2)}
        with script_group(tmp_path, does.SLOW_EXIT, argv, **times) as group:
            result = group.wait()
    else:
        args: dict[int, tuple[Any, ...]] = {rank: (path, rank, teardown) for rank in range(2)}
        result = run(does.serve_and_leave, args, start_method=kind, **times)
    assert cause(result) == 0
    assert result.failures[0].exitcode == 3
    assert states(result) == ["failed", "failed"]
    assert result.root_cause is not None
    assert result.root_cause.error_file == "<N/A>"
    assert result.root_cause.message == "exited with code 3; no error was recorded"
    assert re.fullmatch(stayed("sys.exit") if teardown == TIMEOUT else "", result.root_cause.detail)


def script_group(tmp_path: Path, source: str, argv: dict[int, tuple[str, ...]], **options: Any) -> ScriptContext:
    """A started group of a script, which can import the tests."""
    script = tmp_path / "train.py"
    script.write_text(source)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": tempfile.gettempdir()}
    group = ScriptContext("script", str(script), argv, dict.fromkeys(argv, env), DefaultLogsSpecs(), **options)
    group.start()
    return group


def run_script(tmp_path: Path, source: str, *argv: str, nprocs: int = 1, **options: Any) -> RunProcsResult:
    with script_group(tmp_path, source, dict.fromkeys(range(nprocs), argv), **options) as group:
        return group.wait()


def staying(tmp_path: Path, kind: str, how: str, nprocs: int = 2, **options: Any) -> PContext:
    """Start a group whose last rank fails, and stays, as `STAYS` has it. The others rest."""
    args = {rank: (1 if rank == nprocs - 1 else 0, how, str(tmp_path / "done")) for rank in range(nprocs)}
    if kind != "script":
        return start_processes("stays", does.fail_and_stay, args, start_method=kind, **options)
    argv = {rank: tuple(map(str, each)) for rank, each in args.items()}
    return script_group(tmp_path, SCRIPT_OF_STAYS, argv, **options)


SCRIPT_OF_STAYS = """
import sys
from tests.support.racing_workers import STAYS, rest
if sys.argv.pop(1) == "0":
    rest()
exec(STAYS)
"""
WAYS = ["thread", "pool", "exit handler", "sys.exit"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, how, nprocs",
    [
        *((kind, how, 2) for kind, how in combined(WAYS)),
        ("script", "thread", 1),
        ("spawn", "thread", 1),
    ],
)
def test_a_failed_rank_that_stays_is_the_cause(tmp_path: Path, kind: str, how: str, nprocs: int) -> None:
    with staying(tmp_path, kind, how, nprocs, settle=0.1, grace=0.2) as group:
        result = group.wait()
    assert states(result) == ["stopped", "failed"][-nprocs:]
    assert [outcome.signal_sent for outcome in result.outcomes.values()] == [15, 9][-nprocs:]
    assert cause(result) == nprocs - 1
    root = result.failures[nprocs - 1]
    if how == "sys.exit":
        assert (root.exitcode, root.message) == (3, "exited with code 3; no error was recorded")
    else:
        assert (root.exitcode, root.message) == (1, "ValueError: loss is nan")
        assert 'raise ValueError("loss is nan")' in root.traceback or "ValueError: loss is nan" in root.traceback
    assert re.fullmatch(stayed("sys.exit" if how == "sys.exit" else "exception"), root.detail)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "fork"])
def test_it_is_found_where_it_stays(tmp_path: Path, kind: str) -> None:
    exits: list[dict[str, Any]] = []

    def observe(event: dict[str, Any]) -> None:
        exits.extend([event] if event["name"] == "worker.exited" else [])

    with staying(tmp_path, kind, "thread", settle=0.1, grace=3.0, on_event=observe) as group:
        result = group.wait()
    assert "exception, in _shutdown (threading.py:" in result.failures[1].detail
    assert {event["rank"]: (event["state"], event["signal_sent"]) for event in exits} == {
        0: ("stopped", signal.SIGTERM),
        1: ("failed", signal.SIGKILL),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", *METHODS])
def test_who_has_failed_may_finish_within_the_grace_period(tmp_path: Path, kind: str) -> None:
    """Its exit handlers upload, or save: our death signal, which would end it at once, is for the others."""
    with staying(tmp_path, kind, "saves", settle=0.1, grace=TIMEOUT) as group:
        result = group.wait()
    assert states(result) == ["stopped", "failed"]
    assert (result.outcomes[1].signal_sent, result.failures[1].detail) == (None, "")
    assert result.outcomes[1].exitcode == 1
    assert (tmp_path / "done").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "fork"])
def test_who_has_failed_has_failed_whatever_its_exit_code(tmp_path: Path, kind: str) -> None:
    with staying(tmp_path, kind, "exits well", settle=0.1) as group:
        result = group.wait()
    assert cause(result) == 1
    assert result.outcomes[1].exitcode == 0
    assert result.failures[1].message == "ValueError: loss is nan"
    assert result.failures[1].detail == "it had failed before it exited with code 0"


@pytest.mark.slow
def test_a_failed_rank_that_stays_gets_an_ordered_signal(tmp_path: Path) -> None:
    with staying(tmp_path, "script", "exit handler", settle=0.1, grace=3600) as group:
        until(lambda: set(group.alive) == {1})  # rank 0 has been stopped
        group.close(timeout=3600)
        result = group.wait()
    assert cause(result) == 1
    assert result.failures[1].detail == "SIGTERM, sent by us, came while it was leaving"


@pytest.mark.parametrize("method", METHODS)
def test_a_fork_that_fails_is_not_its_worker(method: str) -> None:
    result = run(does.fail_below, {0: ()}, start_method=method)
    assert result.return_values == {0: "went on"}


@pytest.mark.slow
def test_who_returns_later_is_announced_later_and_nobody_twice(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_link, "LATE", 0.2)
    args = {0: ("",), 1: (gate.address,)}
    with start_processes("stays", does.return_and_stay, args, start_method="spawn") as group:
        until(lambda: len(caplog.messages) == 1)
        assert group.wait(0) is None  # it is left alone
        gate.open()
        until(lambda: len(caplog.messages) == 2)
    for rank, said in enumerate(caplog.messages):
        line = f"rank {rank} has returned from its main function, but has not exited yet"
        assert re.fullmatch(rf"{line}(: in _shutdown \(threading.py:\d+\))?", said)


def test_sys_exit_0_is_no_failure_however_long_it_takes(tmp_path: Path) -> None:
    assert run_script(tmp_path, "import atexit, sys, time; atexit.register(time.sleep, 0.1); sys.exit(0)").succeeded


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit", "abort"])
def test_an_exit_that_takes_long(
    tmp_path: Path, ready: Ready, gate: Gate, disk: Disk, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The first to be reaped has lost its peer, who is on its way out by then: that is what the keeper looks for."""
    looked, look = tmp_path / "looked", Children._look

    def look_and_say(self: Children, *arguments: Any, **options: Any) -> None:
        look(self, *arguments, **options)
        looked.touch()

    monkeypatch.setattr(Children, "_look", look_and_say)  # under fork, the keeper has what we have
    args = {rank: (str(tmp_path), rank, way, ready.address, gate.address) for rank in range(2)}
    with start_processes("slow", does.leave_slowly, args, start_method="fork", settle=TIMEOUT) as group:
        ready.wait()
        disk.freeze()
        gate.open(2)
        until(looked.exists)
        disk.thaw()
        result = group.wait()
    assert cause(result) == 0
    assert states(result) == ["failed", "failed"]
    assert result.failures[0].exitcode == (3 if way == "exit" else -signal.SIGABRT)


# --- an exception that was handled


SCRIPT = """
import sys
from tests.support.racing_workers import handled_before
handled_before(*sys.argv[1:])
"""


@pytest.mark.parametrize("kind, way", combined(["raise", "exit", "exit in the handler", "kill"]))
def test_what_left_last_is_the_cause_and_not_what_was_handled(tmp_path: Path, kind: str, way: str) -> None:
    if kind == "script":
        result = run_script(tmp_path, SCRIPT, way, "")
    else:
        result = run(does.handled_before, {0: (way, "")}, start_method=kind)
    failure = result.failures[0]
    info = failure.error_file_data["message"]["extraInfo"]
    if way == "raise":
        assert failure.message == "KeyError: 'the cause'"
        assert (info["left"], info["before"]["message"]) == (True, "ValueError: handled")
        assert failure.evidence_ns == info["monotonic_ns"] > info["before"]["monotonic_ns"]
    elif way == "exit in the handler":
        assert (failure.exitcode, failure.message, failure.detail) == (3, "ValueError: handled", "")
        assert info["left"]
    else:
        assert failure.message == (
            "exited with code 3" if way == "exit" else f"Signal 9 (SIGKILL) received by PID {failure.pid}"
        )
        assert re.search(r"it had recorded ValueError: handled [\d.]+m?s before, and gone on$", failure.detail)


@pytest.mark.parametrize("kind, way", combined(["exit", "from", "again", "hidden", "afterwards", "0"]))
def test_an_exit_names_the_exception_that_was_handled(tmp_path: Path, kind: str, way: str) -> None:
    if kind == "script":
        result = run_script(tmp_path, SCRIPT.replace("handled_before", "exits_while_handling"), way)
    else:
        result = run(does.exits_while_handling, {0: (way,)}, start_method=kind)
    if way == "0":
        assert result.succeeded
        return
    failure = result.failures[0]
    assert failure.exitcode == 3
    if way in ("hidden", "afterwards"):
        assert (failure.message, failure.traceback) == ("exited with code 3; no error was recorded", "")
        return
    assert failure.message == "exited with code 3 while handling ValueError: loss is nan"
    assert re.fullmatch(r"Traceback .*\n  File \".*\n.*ValueError: loss is nan\n", failure.traceback, re.DOTALL)
    assert not re.search("SystemExit|_engine", failure.traceback)


def test_a_failure_has_its_own_time(ready: Ready) -> None:
    ways = ("exit", "_exit", "kill", "abort", "waits")
    result = run(does.ends_at_once, {rank: (way, ready.address) for rank, way in enumerate(ways)}, settle=2.5)
    assert states(result) == ["failed"] * 4 + ["stopped"]
    offset = time.time() - time.monotonic()
    for failure in result.failures.values():
        assert failure.observed_ns is not None
        assert failure.timestamp <= failure.observed_ns / 1e9 + offset + 0.1


def test_a_childs_evidence_is_kept_when_its_parent_exits(tmp_path: Path) -> None:
    child = "from phalanx.errors import record\n@record\ndef main(): raise KeyError('the cause')\nmain()\n"
    parent = (
        "import subprocess, sys\n"
        "try: subprocess.run([sys.executable, '-c', %r], check=True)\n"
        "except subprocess.CalledProcessError as error: sys.exit(error.returncode)"
    )
    result = run_script(tmp_path, parent % child)
    assert result.failures[0].message == "KeyError: 'the cause'"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_handled_long_ago_is_no_failure(
    method: str, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx._outcomes.failure.SOON_NS", 0)  # of the launcher, for which a moment is long now
    args = {rank: (rank, ready.address, gate.address) for rank in range(2)}
    with start_processes("handled", does.one_has_handled, args, start_method=method, settle=0.0) as group:
        ready.wait(2)
        gate.open()
        result = group.wait()
    assert states(result) == ["stopped", "failed"]
    assert cause(result) == 1


def test_a_program_below_the_worker_tells_and_is_said_to(tmp_path: Path) -> None:
    code = (
        f"import os, sys; sys.path[:] = {sys.path!r}; from phalanx.errors import record\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "@record\ndef main(): raise ValueError('below')\n"
        "main()\n"
    )
    result = run("/bin/sh", shell(f"{shlex.join([sys.executable, '-c', code])} 2>/dev/null; exit 5"))
    failure = result.failures[0]
    assert (failure.exitcode, failure.message) == (5, "ValueError: below")
    assert "in main" in failure.traceback
    pid = (tmp_path / "pid").read_text()
    assert re.match(rf"recorded by process {pid}, below the worker, [\d.]+m?s before its end", failure.detail)


CUSTOM = """
import json, os
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": "the disk is full", "errorCode": 77, "extraInfo": {}}, "custom": [1]}, file)
raise SystemExit(77) if {exits} else RuntimeError("no checkpoint")
"""


@pytest.mark.parametrize("exits", [True, False])
def test_an_error_file_that_a_script_has_written_itself_is_kept(tmp_path: Path, exits: bool) -> None:
    result = run_script(tmp_path, CUSTOM.replace("{exits}", str(exits)))
    failure = result.failures[0]
    assert failure.message == "the disk is full"
    assert failure.error_file_data["custom"] == [1]
    assert failure.error_file_data["message"]["errorCode"] == 77
    assert ("Afterwards:\nTraceback" in failure.traceback) == (not exits)
    assert failure.evidence_ns is not None


def test_an_error_file_of_a_binary_has_its_folder() -> None:
    scripts = ['echo \'{"message": "mine"}\' > $TORCHELASTIC_ERROR_FILE; exit 3'] * 8
    result = run("/bin/sh", shell(*scripts), settle=TIMEOUT)
    assert {failure.message for failure in result.failures.values()} == {"mine"}


def test_the_first_file_is_the_cause_however_late_the_exit(tmp_path: Path) -> None:
    go = shlex.quote(str(tmp_path / "go"))
    os.mkfifo(tmp_path / "go")
    write = 'echo \'{"message": "%s"}\' > $TORCHELASTIC_ERROR_FILE'
    earlier = "touch -d @$(($(date +%s) - 1)) $TORCHELASTIC_ERROR_FILE"
    first = f"{write % 'first'}; {earlier}; echo > {go}; exec sleep 600"
    second = f"read line < {go}; {write % 'second'}; exit 1"
    result = run("/bin/sh", shell(first, second), settle=0.0)
    assert states(result) == ["failed", "failed"]
    assert (cause(result), result.failures[0].message) == (0, "first")


NESTED = """
from phalanx.errors import ChildFailedError, record
from phalanx.multiprocessing import start_processes

@record
def main():
    with start_processes("inner", "{python}", ("-c", {code!r}), nprocs=1) as group:
        result = group.wait()
    raise ChildFailedError("inner", result.failures)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_the_cause_below_a_nested_launcher_is_passed_up(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from phalanx.errors import record\n"
        "@record\ndef main(): raise ValueError('far below')\n"
        "main()\n"
    )
    began = time.monotonic_ns()
    result = run_script(tmp_path, NESTED.replace("{python}", sys.executable).replace("{code!r}", repr(code)))
    failure = result.failures[0]
    assert failure.message == "ValueError: far below"
    assert "in main" in failure.traceback
    assert failure.error_file_data["message"]["errorCode"] == 1
    assert "afterwards" not in failure.error_file_data["message"]["extraInfo"]
    assert "below the worker" in failure.detail
    assert failure.evidence_ns is not None
    assert began < failure.evidence_ns < (failure.observed_ns or 0)


# --- A rank that succeeded long before the rest is no failure, and is noted: in the last lines, and in the record


BEGAN = 1000.0
SOON = """
import phalanx._outcomes.result as result
result.EARLY = result.EARLY_SHARE = 1e-9
from phalanx.cli import main
main()
"""
"""`phalanx run`, to which any time is long."""

HOUR = 3600.0


@pytest.mark.parametrize(
    "ends,early",
    [
        ({0: HOUR, 1: HOUR, 2: HOUR, 3: 600.0}, {3: HOUR - 600}),
        ({0: HOUR, 1: 600.0}, {1: HOUR - 600}),
        ({0: HOUR, 1: HOUR, 2: 600.0, 3: 600.0}, {2: HOUR - 600, 3: HOUR - 600}),  # half of them
        ({0: HOUR, 1: 600.0, 2: 600.0, 3: 600.0}, {}),  # they are the rest
        ({0: HOUR, 1: 0.9 * HOUR - 1}, {1: 0.1 * HOUR + 1}),
        ({0: HOUR, 1: 0.9 * HOUR + 1}, {}),  # not long, for such a run
        ({0: 20.0, 1: 10.0}, {1: 10.0}),
        ({0: 20.0, 1: 10.1}, {}),  # not long
        ({0: HOUR}, {}),
        ({}, {}),
    ],
)
def test_which_ranks_are_early(ends: dict[int, float], early: dict[int, float]) -> None:
    outcomes = {
        rank: Outcome(rank, 1, "succeeded", 0, ended_ns=int((BEGAN + end) * clock.NS)) for rank, end in ends.items()
    }
    assert dict(_early(outcomes, int(BEGAN * clock.NS))) == pytest.approx(early)
    assert dict(_early(outcomes, 0)) == {}  # it is not known when they began


@pytest.mark.parametrize("state", ["failed", "stopped", "abandoned"])
def test_who_did_not_succeed_is_not_early(state: str) -> None:
    late = {rank: Outcome(rank, 1, "succeeded", 0, ended_ns=int(HOUR * clock.NS)) for rank in range(3)}
    other = Outcome(3, 1, state, None if state == "abandoned" else 1, ended_ns=None if state == "abandoned" else 1)
    assert dict(_early({**late, 3: other}, 1)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_it_is_said_and_recorded(place: Place, ready: Ready, gate: Gate, fails: bool) -> None:
    script = place.write(f"""
        import os, sys
        if os.environ["RANK"] == "1":
            {ready.python()}
            sys.exit()
        {gate.python()}
        sys.exit({3 * fails} if os.environ["RANK"] == "2" else 0)
        """)
    command = ("run", "--log-dir", place.logs, "--nproc-per-node", 3, "--settle", 60, script)
    with Launcher([sys.executable, "-c", SOON, *map(str, command)], cwd=place.folder, env=place.env) as launcher:
        assert not wait_gone(ready.pids(1))
        gate.open(2)
        done = launcher.end()
    assert done.status == 3 * fails
    assert len(re.findall(r"^(?:phalanx: )?rank 1: succeeded, [\d.]+m?s before the rest$", done.err, re.MULTILINE)) == 1
    (record,) = place.logs.glob("*/run.json")
    ranks = json.loads(record.read_text())["attempts"][0]["ranks"]
    assert ranks[1]["early"] > 0
    first_of_the_rest = min(ranks[0]["ended"], ranks[2]["ended"])
    assert ranks[1]["ended"] + ranks[1]["early"] == pytest.approx(first_of_the_rest, abs=1.0)  # two looks at two clocks
    assert [ranks[0]["early"], ranks[2]["early"]] == [0, 0]


class DistStoreError(Exception):
    """As torch has it."""


SERVES = {"RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
GONE = r"rank 0 had ended [\d.]+m?s before, and with it what it served \(torch's store, at MASTER_PORT\)"


@pytest.mark.parametrize(
    "error,serves,detail",
    [
        (DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//metric"), SERVES, GONE),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed."), SERVES, GONE),
        (BrokenPipeError(32, "Broken pipe"), SERVES, GONE),
        (ConnectionRefusedError(111, "Connection refused"), SERVES, GONE),
        (ConnectionRefusedError(111, "Connection refused"), SERVES | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, ""),
        (ConnectionRefusedError(111, "Connection refused"), {"RANK": "0"}, ""),
        (ConnectionRefusedError(111, "Connection refused"), SERVES | {"RANK": "2"}, ""),
        (ValueError("loss is nan"), SERVES, ""),
    ],
)
def test_who_loses_a_connection_when_rank_0_has_ended_is_told(
    gate: Gate, tmp_path: Path, error: Exception, serves: dict[str, str], detail: str
) -> None:
    """The store of torch's programs is in rank 0."""
    args, logs = {rank: (rank, gate.address, error) for rank in (0, 1)}, DefaultLogsSpecs(str(tmp_path))
    envs = {0: serves, 1: serves | {"RANK": "1"}}
    with start_processes("late", does.outlives, args, envs=envs, logs_specs=logs, start_method="fork") as group:
        until(lambda: set(group.alive) == {1})
        gate.open()
        result = group.wait()
    assert result.failures.keys() == {1}
    assert re.fullmatch(detail, result.failures[1].detail)
