"""`start_processes` from call to result: signatures, start methods, values, waiting and closing."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    PContext,
    RunProcsResult,
    SignalException,
    Std,
    SubprocessContext,
    start_processes,
)
from tests.support import workers
from tests.support.helpers import TIMEOUT, Gate, Ready, alive
from tests.support.workers import run_script

METHODS = ("spawn", "forkserver", "fork")

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder")]
each_method = pytest.mark.parametrize("method", METHODS)


def run(entrypoint: Callable[..., Any] | str, args: Any, **options: Any) -> RunProcsResult:
    """Start a group and return its result."""
    with start_processes("test", entrypoint, args, **options) as group:
        result = group.wait()
    assert result is not None
    return result


def values_of(result: RunProcsResult) -> dict[int, Any]:
    """The return values of a group that succeeded, or the test fails with what went wrong."""
    assert not result.is_failed(), [(failure.message, failure.traceback) for failure in result.failures.values()]
    return result.return_values


# --- both historical forms


@pytest.mark.slow
def test_first_form_by_position(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), Std.ALL)
    group = start_processes(
        "n", workers.get_env, {0: ("A",), 1: ("A",)}, {0: {"A": "x"}, 1: {"A": "y"}}, specs, {0: "p"}, "forkserver"
    )
    with group:
        assert isinstance(group, MultiprocessContext)
        assert (group.name, group.start_method) == ("n", "forkserver")
        result = group.wait(-1, 1)
    assert result is not None
    assert values_of(result) == {0: {"A": "x"}, 1: {"A": "y"}}
    assert result.stdouts[1].startswith(str(tmp_path / "logs"))


@pytest.mark.slow
def test_second_form_by_position(logs: Path) -> None:
    group = start_processes(
        "n", workers.prints, {0: ("a",), 1: ("b",)}, {0: {}, 1: {}}, str(logs), "fork", Std.ALL, {1: Std.OUT}
    )
    with group:
        result = group.wait()
    assert result.stdouts == {0: str(logs / "0/stdout.log"), 1: str(logs / "1/stdout.log")}
    assert (logs / "1/stderr.log").read_text() == "b\n"
    assert group.logs.error_files == {0: str(logs / "0/error.json"), 1: str(logs / "1/error.json")}
    assert group.logs.tee_stdouts == {1: str(logs / "1/stdout.log")}


@pytest.mark.parametrize("name", ["log_dir", "logs_specs"])
def test_second_form_by_name(logs: Path, name: str) -> None:
    """A binary, whose arguments need not be strings; an os.PathLike is as good as a str."""
    folder: Any = {name: logs}
    with start_processes(
        name="n", entrypoint="/bin/echo", args={0: (1, 2.5, None, logs, "é")}, envs={0: {}}, start_method="spawn",
        redirects={0: Std.OUT}, tee=Std.NONE, **folder,
    ) as group:  # fmt: skip
        assert isinstance(group, SubprocessContext)
        result = group.wait()
    assert (logs / "0/stdout.log").read_text() == f"1 2.5 None {logs} é\n"
    assert (result.stderrs, result.return_values) == ({0: ""}, {0: None})


def test_arguments_by_position_are_counted(logs: Path) -> None:
    with pytest.raises(TypeError, match="at most 7 positional arguments"):
        start_processes("n", workers.nothing, {0: ()}, {0: {}}, None, None, "spawn", Std.ALL)
    with pytest.raises(TypeError, match="at most 8 positional arguments"):
        start_processes("n", workers.nothing, {0: ()}, {0: {}}, str(logs), "spawn", Std.ALL, Std.ALL, 1)
    with pytest.raises(TypeError, match="'start_method' twice"):
        start_processes("n", workers.nothing, {0: ()}, {0: {}}, None, None, "spawn", start_method="fork")


class Lazy:
    """A mapping, as far as `dict` wants one, that makes what it is asked for anew each time."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count = count
        self._make = make
        self.asked: list[int] = []

    def keys(self) -> range:
        return range(self._count)

    def __getitem__(self, rank: int) -> Any:
        self.asked.append(rank)
        return self._make(rank)


@pytest.mark.slow
def test_arguments_of_ranks_are_read_once_in_any_order() -> None:
    assert values_of(run(workers.add, (1, 2), nprocs=3, start_method="fork")) == {0: 3, 1: 3, 2: 3}
    result = run(workers.echo, {2: ("c",), 0: ("a",), 1: ("b",)}, start_method="forkserver")
    assert list(values_of(result).items()) == [(0, ("a",)), (1, ("b",)), (2, ("c",))]
    once = iter("ab")
    assert values_of(run(workers.echo, {0: once, 1: once}, start_method="fork")) == {0: ("a", "b"), 1: ("a", "b")}
    args = Lazy(6, lambda rank: (f"RANK_{rank}", "SAME"))
    envs: Any = Lazy(6, lambda rank: {f"RANK_{rank}": str(rank), "SAME": "x"})
    values = values_of(run(workers.get_env, args, envs=envs, start_method="fork"))
    assert values == {rank: {f"RANK_{rank}": str(rank), "SAME": "x"} for rank in range(6)}
    assert args.asked == envs.asked == list(range(6))


@pytest.mark.slow
def test_each_ranks_environment_is_on_top_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "1")
    monkeypatch.setenv("BOTH", "outer")
    names = ("OUTER", "BOTH", "NEW")
    result = run(workers.get_env, {0: names, 1: names}, envs={0: {"BOTH": "zero", "NEW": "é\udcff"}, 1: {}})
    assert values_of(result) == {
        0: {"OUTER": "1", "BOTH": "zero", "NEW": "é\udcff"},
        1: {"OUTER": "1", "BOTH": "outer", "NEW": None},
    }


# --- values and callables


@pytest.mark.slow
@each_method
def test_arguments_and_values_have_any_size(method: str) -> None:
    data = os.urandom(20 << 20)
    assert values_of(run(workers.echo, {0: (data, b"")}, start_method=method)) == {0: (data, b"")}


@pytest.mark.slow
@each_method
def test_a_value_that_cannot_be_sent_fails_its_rank(method: str) -> None:
    result = run(workers.return_nested_lock, {0: ()}, start_method=method)
    assert result.failures.keys() == {0}
    assert "item 'lock' of item 'model' of the return value" in result.failures[0].message
    assert result.failures[0].exitcode == 1
    result = run(workers.return_never_loads, {0: ()}, start_method=method)
    assert result.return_values == {}
    failure = result.failures[0]
    assert "ValueError" in failure.message
    assert "could not be unpickled in the launcher" in failure.traceback
    assert failure.detail == "it exited with code 0"
    assert result.outcomes[0].state == "failed"
    result = run(workers.return_exits_when_loaded, {0: (os.getpid(),)}, start_method=method)
    assert (result.failures[0].message, result.outcomes[0].state) == ("SystemExit: 5", "failed")


def make_closure(base: int) -> Callable[[int], int]:
    def closure(more: int) -> int:
        return base + more

    return closure


def make_factorial() -> Callable[[int], int]:
    def factorial(number: int) -> int:
        return number * factorial(number - 1) if number else 1

    return factorial


CALLABLES: dict[str, tuple[Callable[..., Any], int]] = {
    "lambda": (lambda more: 40 + more, 42),
    "closure": (make_closure(40), 42),
    "recursive local function": (make_factorial(), 2),
    "partial": (functools.partial(workers.add, 40), 42),
    "partial of a lambda": (functools.partial(lambda base, more: base + more, 40), 42),
    "bound method": (workers.Callable(21).method, 42),
    "object": (workers.Callable(40), 42),
    "builtin": (abs, 2),
    "class": (complex, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLABLES)
def test_callables(kind: str) -> None:
    function, expected = CALLABLES[kind]
    assert values_of(run(function, {0: (2,), 1: (2,)}, start_method="forkserver")) == {0: expected, 1: expected}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_callables_as_arguments(method: str) -> None:
    calls = {rank: (function, 2) for rank, (function, _) in enumerate(CALLABLES.values())}
    values = values_of(run(lambda function, number: function(number), calls, start_method=method))
    assert [*values.values()] == [expected for _, expected in CALLABLES.values()]


MAIN = """
import multiprocessing, sys
from phalanx.multiprocessing import start_processes

class Point:
    def __init__(self, x):
        self.x = x

SCALE = 10

def scaled(point, queue):
    queue.put(Point(point.x + 1))
    return Point(helper(point))

def helper(point):
    return point.x * SCALE

if __name__ == "__main__":
    method = sys.argv[1]
    queue = multiprocessing.get_context(method).Queue()
    with start_processes("main", scaled, {0: (Point(1), queue), 1: (Point(2), queue)}, start_method=method) as group:
        points = [queue.get(timeout=20), queue.get(timeout=20)]
        result = group.wait()
    assert not result.is_failed(), result.root_cause
    assert all(type(point) is Point for point in points), points
    assert sorted(point.x for point in points) == [2, 3]
    values = {rank: (type(value), value.x) for rank, value in result.return_values.items()}
    assert values == {0: (Point, 10), 1: (Point, 20)}, values
    print("fine")
"""


@pytest.mark.slow
@each_method
def test_functions_and_classes_of_a_main_script(tmp_path: Path, method: str) -> None:
    done = run_script(tmp_path, MAIN, method)
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


# --- what multiprocessing shares


@pytest.fixture(scope="module")
def heap() -> Iterator[None]:
    """Have `multiprocessing` make its arena for values and arrays, which it keeps as long as its process lives."""
    value = multiprocessing.Value("i")
    yield
    del value


@pytest.mark.slow
@each_method
@pytest.mark.usefixtures("heap")
def test_queues_connections_locks_and_arrays(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    queue, simple, (ours, theirs) = context.Queue(), context.SimpleQueue(), context.Pipe()
    lock, event, semaphore = context.Lock(), context.Event(), context.Semaphore(0)
    value, array = context.Value("i", 0, lock=False), context.Array("d", 3)
    shared = (workers.use_all, lock, event, semaphore, value, array)
    calls = {
        0: (workers.use_queue, queue, 0), 1: (workers.use_queue, simple, 1), 2: (workers.use_connection, theirs),
        **dict.fromkeys(range(3, 6), shared),
    }  # fmt: skip
    with start_processes("m", lambda function, *args: function(*args), calls, start_method=method) as group:
        pids = group.pids()
        assert [queue.get(timeout=20), simple.get()] == [(0, pids[0]), (1, pids[1])]
        theirs.close()
        ours.send("text")
        assert ours.recv() == "TEXT"
        ours.close()
        for _ in range(3):
            assert semaphore.acquire(timeout=20)  # all three are there
        event.set()
        result = group.wait()
    assert values_of(result) == {0: None, 1: None, 2: "text", 3: 1, 4: 1, 5: 1}
    assert (value.value, array[0]) == (300, 2.5)
    queue.close()
    queue.join_thread()
    simple.close()


SHARED = """
import multiprocessing, sys
from multiprocessing.shared_memory import SharedMemory
from phalanx.multiprocessing import start_processes
from tests.support import workers

def call(function, *args):
    function(*args)

if __name__ == "__main__":
    method = sys.argv[1]
    one, two = segments = [SharedMemory(create=True, size=16) for _ in range(2)]
    for segment in segments:
        segment.buf[:4] = b"data"
    with multiprocessing.get_context(method).Manager() as manager:
        shared = manager.dict()
        calls = {rank: (workers.use_proxies, shared, rank) for rank in range(3)}
        calls |= {3: (workers.use_segment, one), 4: (workers.use_segment, one)}
        calls |= {rank: (workers.use_segment_by_name, two.name) for rank in (5, 6)}
        with start_processes("m", call, calls, start_method=method) as group:
            result = group.wait()
        assert not result.is_failed(), result.root_cause
        assert dict(sorted(shared.items())) == {0: 0, 1: 1, 2: 4}
    for segment in segments:
        assert bytes(segment.buf[:4]) == b"wata"
        SharedMemory(segment.name).close()  # still there
        segment.close()
        segment.unlink()
    print("fine")
"""


@pytest.mark.slow
@each_method
def test_segments_and_managers_leave_no_warning(tmp_path: Path, method: str) -> None:
    done = run_script(tmp_path, SHARED, method)
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


# --- waiting and closing

IGNORES = "import signal; signal.signal(15, signal.SIG_IGN)"


def waiting(ready: Ready, gate: Gate, nprocs: int = 2, **options: Any) -> PContext:
    """A group whose workers have all told that they are there, and wait at the gate."""
    group = start_processes("w", workers.announce, (ready.address, gate.address), nprocs=nprocs, **options)
    try:
        assert sorted(ready.pids(nprocs)) == sorted(group.pids().values())
    except BaseException:
        group.close()
        raise
    return group


def program(ready: Ready, gate: Gate, before: str) -> PContext:
    """A group of one that runs a program, which has told that it is there, and waits at the gate."""
    group = start_processes("w", sys.executable, {0: ("-c", f"{before}; {ready.python()}; {gate.python()}")})
    ready.wait()
    return group


@pytest.mark.slow
@each_method
def test_waiting(ready: Ready, gate: Gate, method: str) -> None:
    with waiting(ready, gate, start_method=method) as group:
        pids = group.pids()
        assert pids.keys() == {0, 1}
        before = time.monotonic()
        assert group.wait(0) is None
        assert group.wait(0.05) is None
        assert 0.05 <= time.monotonic() - before < TIMEOUT
        assert group.wait(0.01, period=60) is None
        gate.open(2)
        result = group.wait(1e12)
        assert result is not None
        assert result.return_values == pids
        assert all(group.wait(*args) is result for args in ((), (0,), (None,)))
        assert group.pids() == pids
    assert group.wait(0) is result


def test_a_group_is_started_once_before_it_is_waited_for() -> None:
    group = MultiprocessContext("n", workers.nothing, {0: ()}, {0: {}}, "spawn", DefaultLogsSpecs())
    for method in (group.wait, group.pids):
        with pytest.raises(RuntimeError, match="'n' has not been started"):
            method()
    assert (group.stdouts, group.stderrs, group.error_files) == ({}, {}, {})
    group.close()  # nothing to close
    with start_processes("n", "true", nprocs=1) as started:
        with pytest.raises(RuntimeError, match="'n' has been started before"):
            started.start()
        started.wait()


@pytest.mark.slow
def test_leaving_the_with_statement_closes(ready: Ready, gate: Gate) -> None:
    """Once and for all: later signals are not sent."""
    with pytest.raises(ZeroDivisionError), waiting(ready, gate) as group:
        raise ZeroDivisionError
    assert not any(map(alive, group.pids().values()))
    group.close()
    group.close(signal.SIGKILL, 0)
    result = group.wait()
    assert (result.state, result.return_values) == ("stopped", {})
    assert [(outcome.state, outcome.exitcode, outcome.signal_sent) for outcome in result.outcomes.values()] == [
        ("stopped", -15, 15)
    ] * 2


@pytest.mark.parametrize("death", [signal.SIGUSR1, 2])
def test_close_with_another_signal(ready: Ready, gate: Gate, death: signal.Signals) -> None:
    group = program(ready, gate, "import signal; signal.signal(2, signal.SIG_DFL)")
    group.close(death)
    result = group.wait()
    assert (result.outcomes[0].exitcode, result.outcomes[0].signal_sent) == (-death, death)
    assert not result.failures


@pytest.mark.parametrize("grace", [0, 0.1])
def test_close_kills_when_the_grace_is_over(ready: Ready, gate: Gate, grace: float) -> None:
    group = program(ready, gate, IGNORES)
    before = time.monotonic()
    group.close(timeout=grace)
    assert grace <= time.monotonic() - before < TIMEOUT
    result = group.wait()
    assert (result.outcomes[0].exitcode, result.outcomes[0].state) == (-9, "stopped")


def test_a_second_close_shortens_the_grace(ready: Ready, gate: Gate) -> None:
    group = program(ready, gate, IGNORES)
    patient = threading.Thread(target=group.close, kwargs={"timeout": 60})
    patient.start()
    before = time.monotonic()
    group.close(timeout=0.1)
    assert time.monotonic() - before < TIMEOUT
    patient.join()
    assert not alive(group.pids()[0])


@pytest.mark.slow
def test_close_from_many_threads_while_the_main_thread_waits(ready: Ready, gate: Gate) -> None:
    group = waiting(ready, gate, 3)
    barrier = threading.Barrier(8)

    def close() -> None:
        barrier.wait()
        group.close()
        left.append({pid for pid in group.pids().values() if alive(pid)})

    left: list[set[int]] = []
    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    result = group.wait()
    for thread in threads:
        thread.join()
    assert left == [set()] * 8
    assert (result.state, {outcome.state for outcome in result.outcomes.values()}) == ("stopped", {"stopped"})
    assert (result.is_failed(), result.succeeded, result.root_cause) == (True, False, None)
    group.close()  # by the main thread, which alone may restore the signal handlers


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks whose values have been unpickled here."""
    ranks: list[int] = []
    monkeypatch.setattr(workers.Restored, "restored", ranks)
    return ranks


def ended(nprocs: int) -> PContext:
    """A group whose processes have ended, and whose values nobody has asked for."""
    group = start_processes("values", workers.Restored, {rank: (rank,) for rank in range(nprocs)})
    assert group._supervisor is not None
    assert group._supervisor.ended.wait(TIMEOUT)
    return group


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SignalException])
def test_an_interrupt_while_values_are_unpickled_loses_none(
    kind: type[BaseException], restored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other threads finish what it has begun."""
    results: list[RunProcsResult] = []
    threads = [threading.Thread(target=lambda: results.append(group.wait())) for _ in range(3)]

    def interrupt(_self: object) -> None:
        if len(restored) == 2:
            for thread in threads:
                thread.start()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(workers.Restored, "on_restore", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            if kind is SignalException:  # another group is open
                stack.enter_context(start_processes("other", workers.nothing, nprocs=1))
            group = stack.enter_context(ended(3))
            with pytest.raises(kind):
                group.wait()
            for thread in threads:
                thread.join()
            assert group.wait() is results[0]
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(map(restored.count, range(3))) == [1, 1, 2], "what was unpickled before it is not once more"
    assert len(results) == 3
    assert len(set(map(id, results))) == 1
    assert {rank: value.rank for rank, value in results[0].return_values.items()} == {0: 0, 1: 1, 2: 2}


def test_a_value_may_wait_for_its_group_as_it_is_unpickled(
    restored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[RunProcsResult] = []

    def wait(_self: object) -> None:
        if len(restored) == 1:
            found.append(group.wait())

    monkeypatch.setattr(workers.Restored, "on_restore", wait)
    with ended(1) as group:
        assert group.wait() is found[0]


@pytest.mark.slow
@each_method
def test_from_a_thread_that_is_not_the_main_one(ready: Ready, gate: Gate, method: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def use() -> None:
        with waiting(ready, gate, start_method=method) as group:
            seen.append(signal.getsignal(signal.SIGTERM))
            gate.open(2)
            seen.append(group.wait())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen[0] == before
    assert isinstance(seen[1], RunProcsResult)
    assert not seen[1].is_failed()
    assert len(seen[1].return_values) == 2


@pytest.mark.slow
def test_a_worker_starts_a_group_of_its_own() -> None:
    def nested() -> dict[int, Any]:
        with start_processes("inner", workers.add, {0: (1, 2), 1: (3, 4)}) as group:
            result = group.wait()
        assert result is not None
        return result.return_values

    assert values_of(run(nested, {0: (), 1: ()})) == {0: {0: 3, 1: 7}, 1: {0: 3, 1: 7}}


# --- outcomes


@pytest.mark.slow
@each_method
def test_one_fails_and_the_rest_are_stopped(ready: Ready, gate: Gate, method: str) -> None:
    def work(rank: int) -> None:
        (workers.fail_after if rank == 1 else workers.announce)(ready_address, gates[rank])

    ready_address, gates = ready.address, {0: gate.address + "0", 1: gate.address, 2: gate.address + "2"}
    for rank in (0, 2):
        os.mkfifo(gates[rank])
    with start_processes("o", work, {rank: (rank,) for rank in range(3)}, start_method=method, settle=0) as group:
        ready.wait(3)
        gate.open()
        result = group.wait()
    assert ([*result.failures], result.return_values) == ([1], {})
    assert result.root_cause is not None
    assert result.root_cause is result.failures[1]
    assert result.root_cause.message == "ValueError: after the gate"
    assert "workers.py" in result.root_cause.traceback
    assert 'worker.py"' not in result.root_cause.traceback.replace("workers.py", "")
    found = {rank: (outcome.state, outcome.signal_sent) for rank, outcome in result.outcomes.items()}
    assert found == {0: ("stopped", signal.SIGTERM), 1: ("failed", None), 2: ("stopped", signal.SIGTERM)}
    assert {rank: outcome.pid for rank, outcome in result.outcomes.items()} == group.pids()


@pytest.mark.parametrize(
    "method, code, exitcode",
    [
        *[(method, *case) for method in METHODS for case in [(0, 0), (3, 3), ("a last word", 1)]],
        *[("forkserver", *case) for case in [(None, 0), (False, 0), (-1, 255), (256, 0), (True, 1), (2.5, 1)]],
    ],
)
def test_system_exit(logs: Path, method: str, code: object, exitcode: int) -> None:
    result = run(workers.leave, {0: (code,)}, start_method=method, redirects=Std.ERR, log_dir=logs)
    assert result.outcomes[0].exitcode == exitcode
    if exitcode:
        assert result.failures[0].exitcode == exitcode
        assert result.failures[0].error_file == "<N/A>"
    else:
        assert values_of(result) == {0: None}
    if isinstance(code, (str, float)):
        assert (logs / "0/stderr.log").read_text() == f"{code}\n"
        assert result.failures[0].stderr_tail == str(code)
    if code in (0, 3):  # likewise without a word to Python
        result = run(workers.leave_at_once, {0: (code,)}, start_method=method)
        assert result.outcomes[0].exitcode == exitcode
        assert not exitcode or result.failures[0].message == "exited with code 3; no error was recorded"


# --- the files of a group


@pytest.mark.parametrize("kind", [*METHODS, "binary"])
def test_a_group_names_its_files(tmp_path: Path, kind: str) -> None:
    entrypoint, method = ("/bin/echo", "spawn") if kind == "binary" else (print, kind)
    for teed in (None, {0: Std.ALL, 1: Std.OUT}):
        specs = DefaultLogsSpecs(str(tmp_path), tee=teed or Std.NONE)
        with start_processes("g", entrypoint, ("hi",), nprocs=2, logs_specs=specs, start_method=method) as group:
            result = group.wait(TIMEOUT)
            assert result is not None
            assert (group.stdouts, group.stderrs) == (result.stdouts, result.stderrs)
            folder = os.path.join(str(specs.run_log_dir), "attempt_0")
            assert group.error_files == {rank: f"{folder}/{rank}/error.json" for rank in range(2)}
            if not teed:
                assert group.stdouts == group.stderrs == {0: "", 1: ""}
            else:
                assert group.stdouts == {rank: f"{folder}/{rank}/stdout.log" for rank in range(2)}
                assert group.stderrs == {0: f"{folder}/0/stderr.log", 1: ""}
                assert Path(group.stdouts[1]).read_text() == "hi\n"


def test_a_group_is_ended_by_a_signal_without_a_name(ready: Ready) -> None:
    number = signal.SIGRTMIN + 1
    assert number not in set(signal.Signals)
    code = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [{number}])
{ready.python("'up'")}
signal.sigwait([{number}])
{ready.python("'got it'")}
signal.sigwait([{number}])
"""
    with start_processes("g", sys.executable, ("-c", code), nprocs=1) as group:
        assert ready.wait() == ["up"]
        group.signal(number)
        assert ready.wait() == ["got it"]
        group.close(number, timeout=TIMEOUT)
        result = group.wait()
    assert result is not None
    assert (result.outcomes[0].signal_sent, result.outcomes[0].exitcode) == (number, 0)


def test_a_group_is_not_copied_nor_sent_what_is_no_signal() -> None:
    with start_processes("g", "sleep", ("600",), nprocs=1) as group:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a group of processes cannot be copied"):
                duplicate(group)
        sends: tuple[Callable[[Any], None], ...] = (group.close, group.signal)
        for send, number in itertools.product(sends, (0, 32, 65, -1, "SIGTERM")):
            with pytest.raises(ValueError, match=r"expected a signal, like signal.SIGTERM or 15, got "):
                send(number)
        assert group.is_open
