"""`phalanx.spawn` on real processes: what is called, what is raised, what is left."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import pytest

import phalanx.spawn as mp
from phalanx.errors import format_ranks
from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, KeeperLostError, Std, UnpicklableError
from phalanx.timer import TimerSpecs
from tests.support import spawned
from tests.support.helpers import Gate, Ready, alive, descendants, wait_gone
from tests.support.waits import when_we_wait
from tests.support.workers import run_script

pytestmark = pytest.mark.each_python

METHODS = ("spawn", "forkserver", "fork")

each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def interruptible(no_leaks: None) -> Iterator[None]:  # noqa: ARG001 - it is to see the handler of before
    """Have SIGINT interrupt, also when the tests are run by a shell's `&`, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def message_of(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


# --- calls


@pytest.mark.slow
@each_method
def test_the_function_gets_its_index_and_the_arguments(method: str) -> None:
    queue = mp.get_context(method).SimpleQueue()
    assert mp.spawn(spawned.put, args=(queue, "x"), nprocs=3, start_method=method) is None
    assert sorted(queue.get() for _ in range(3)) == [(0, "x"), (1, "x"), (2, "x")]
    queue.close()


def test_the_historical_order_of_the_arguments() -> None:
    context = mp.start_processes(spawned.nothing, (1, 2), 2, False, True, "forkserver")
    assert type(context) is mp.ProcessContext
    assert context.join()


@pytest.mark.slow
def test_options_of_groups_are_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    envs = {0: {"WHO": "ada"}, 1: {"WHO": "bob"}}
    logs, console = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT), ConsoleSpecs(timestamps="elapsed", ranks={1})
    options: dict[str, Any] = {"envs": envs, "logs_specs": logs, "console": console}
    mp.spawn(lambda _i: os.write(1, os.environb[b"WHO"] + b"\n"), nprocs=2, **options)
    assert sorted(path.read_text() for path in tmp_path.rglob("stdout.log")) == ["ada\n", "bob\n"]
    assert re.fullmatch(r"\[1\] \d+\.\d{3} bob\n", capfd.readouterr().out)


@pytest.mark.slow
def test_timers() -> None:
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        mp.spawn(spawned.hang, nprocs=1, timers=TimerSpecs())


def test_a_preload() -> None:
    mp.spawn(spawned.leave_unless_loaded, ("wave",), 2, start_method="forkserver", preload=["wave"])


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    mp.spawn(spawned.spawn_again, (str(tmp_path),), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.slow
def test_streams_are_the_parents(capfd: pytest.CaptureFixture[str]) -> None:
    mp.spawn(lambda i: os.write(1 + i, b"directly\n"), nprocs=2)
    assert capfd.readouterr() == ("directly\n", "directly\n")


# --- failures


@pytest.mark.slow
@each_method
def test_an_exception(method: str) -> None:
    with pytest.raises(mp.ProcessRaisedException) as caught:
        mp.spawn(spawned.fail, (1, "a bad shape"), 3, start_method=method)
    error = caught.value
    assert error.error_index == 1
    assert not alive(error.error_pid)
    assert str(error) == error.msg
    text = str(error)
    assert text.startswith(
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
    )
    assert text.endswith("ValueError: a bad shape\n")
    assert text.count("  File ") == 1, "frames of ours are in it"
    assert notes_of(error) == []


@pytest.mark.parametrize("method,code,expected", [("spawn", 3, 3), ("forkserver", "text", 1), ("fork", 3, 3)])
def test_an_exit_code(method: str, code: object, expected: int) -> None:
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(spawned.leave, (code,), 2, start_method=method)
    error = caught.value
    assert str(error) == f"process 1 terminated with exit code {expected}"
    assert (error.error_index, error.exit_code, error.signal_name) == (1, expected, None)


@pytest.mark.slow
def test_an_exit_while_an_exception_is_handled_is_an_exit() -> None:
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(spawned.leave_of_an_error, (3,), 2)
    error = caught.value
    assert (str(error), error.exit_code) == (f"process {error.error_index} terminated with exit code 3", 3)
    assert any(note.endswith("ValueError: loss is nan\n") for note in notes_of(error))  # the other may have left, too
    assert notes_of(error)[-1] == str(error)


@pytest.mark.slow
@pytest.mark.parametrize("method,code", [("spawn", None), ("forkserver", 0), ("fork", None)])
def test_exit_code_0_is_no_failure(method: str, code: object) -> None:
    mp.spawn(lambda _i: sys.exit(code), nprocs=2, start_method=method)  # type: ignore[arg-type]  # what sys.exit takes


@pytest.mark.slow
@pytest.mark.parametrize(
    "method,number",
    [
        *((method, number) for method in METHODS for number in (signal.SIGSEGV, signal.SIGINT)),
        ("spawn", signal.SIGKILL),
        ("fork", signal.SIGRTMIN + 1),
    ],
)
def test_a_signal_that_ends_a_process_is_named(method: str, number: int) -> None:
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(spawned.die, (number,), 2, start_method=method)
    error = caught.value
    name = "SIGRTMIN+1" if number > signal.SIGRTMIN else signal.Signals(number).name
    assert str(error) == f"process 1 terminated with signal {name}"
    assert (error.error_index, error.exit_code, error.signal_name) == (1, -number, name)
    if number == signal.SIGSEGV:
        assert any("Segmentation fault" in note for note in notes_of(error))
    if number == signal.SIGINT:
        assert any("KeyboardInterrupt" in note for note in notes_of(error))


@pytest.mark.slow
@each_method
def test_the_first_of_several_failures_is_raised(method: str, tmp_path: Path, ready: Ready) -> None:
    """Two exceptions, a signal and an exit code, all within the settle window.

    An exit without evidence is dated back by 5 ms: they do not follow the exceptions at once.
    """
    gates = [Gate(tmp_path / f"gate{index}") for index in range(4)]
    addresses = [gate.address for gate in gates]
    context = mp.spawn(
        spawned.fail_one_after_another, (ready.address, addresses), 4, join=False, start_method=method, settle=15
    )
    ready.wait(4)
    for index in (2, 1, 3, 0):
        assert not context.join(0.02)
        gates[index].open()
        context.processes[index].join(10)
    with pytest.raises(mp.ProcessRaisedException) as caught:
        context.join()
    for gate in gates:
        gate.close()
    error = caught.value
    assert (error.error_index, message_of(error)) == (2, "ValueError: the first")
    assert str(error).splitlines()[:7] == [
        "",
        "",
        "-- Process 1 raised ValueError: the second",
        "-- Process 3 terminated with signal SIGUSR1",
        "-- Process 0 terminated with exit code 7",
        "-- Process 2 terminated with the following error:",
        "Traceback (most recent call last):",
    ]
    assert notes_of(error) == []


@pytest.mark.slow
def test_failures_that_are_the_same_are_told_together() -> None:
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(spawned.leave_at_once, (5,), 4, settle=15)
    note, last = notes_of(caught.value)
    assert last == str(caught.value) == f"process {caught.value.error_index} terminated with exit code 5"
    others = sorted({0, 1, 2, 3} - {caught.value.error_index})
    assert set(map(int, re.findall(r"\d(?=[-, ])", note.partition(" terminated")[0] + " "))) <= set(others)
    assert note.startswith("-- Processes ")
    assert note.endswith("terminated with exit code 5")
    with pytest.raises(mp.ProcessRaisedException, match="what all say") as raised:
        mp.spawn(spawned.fail_at_once, ("what all say",), 4, settle=15)
    others = sorted({0, 1, 2, 3} - {raised.value.error_index})
    assert f"{type(raised.value).__module__}.{type(raised.value).__name__}" == "phalanx.spawn.ProcessRaisedException"
    assert str(raised.value).startswith(
        f"\n\n-- Processes {format_ranks(others)} terminated with the same error\n-- Process "
    )
    assert str(raised.value).endswith("ValueError: what all say\n")


@pytest.mark.slow
def test_a_process_stopped_in_its_teardown_has_raised_before() -> None:
    """Its signal is ours, and tells nothing."""
    failed = multiprocessing.get_context("spawn").Event()
    with pytest.raises(mp.ProcessRaisedException, match="in rank 0") as caught:
        mp.spawn(spawned.fail_one_after_the_other, (failed,), 3, grace=0.2)
    assert caught.value.error_index == 0
    # On a busy machine, process 1 is stopped before it has failed.
    text = str(caught.value).replace("-- Process 1 raised ValueError: because of rank 0\n", "")
    assert text.startswith("\n\n-- Process 0 terminated with the following error:\n")


@pytest.mark.slow
def test_the_grace_period_of_a_join_replaces_that_of_the_start(ready: Ready) -> None:
    context = mp.spawn(spawned.wait_for_ever, (ready.address, (signal.SIGTERM,)), 2, join=False, grace=1000)
    ready.wait(2)
    context.processes[0].kill()
    assert not context.join(timeout=0.3)  # it is being stopped
    with pytest.raises(mp.ProcessExitedException):
        context.join(grace_period=0.1)


@pytest.mark.parametrize(
    "error",
    [
        mp.ProcessException("it failed", 1, 42),
        mp.ProcessRaisedException("\n\n-- Process 1 …", 1, 42),
        mp.ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 42, -9, "SIGKILL"),
        mp.ProcessExitedException("process 1 terminated with exit code 3", 1, 42, exit_code=3),
    ],
)
def test_the_exceptions_survive_pickling(error: mp.ProcessException) -> None:
    error.add_note("and another")
    ways = [copy.copy(error), copy.deepcopy(error)]
    ways += [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in ways:
        assert type(other) is type(error)
        assert other.args == error.args
        assert vars(other) == vars(error)
        assert notes_of(other) == ["and another"]


@pytest.mark.slow
@each_method
def test_a_lost_keeper(method: str, ready: Ready) -> None:
    context = mp.spawn(spawned.wait_for_ever, (ready.address,), 2, join=False, start_method=method)
    ready.wait(2)
    (guard,) = {pid for pid in descendants(os.getpid()) if context.pids()[0] in descendants(pid)} - {
        keeper
        for guard in descendants(os.getpid())
        for keeper in descendants(guard)
        if context.pids()[0] in descendants(keeper)
    }
    os.kill(guard, signal.SIGKILL)
    with pytest.raises(KeeperLostError):
        context.join()
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL] * 2


# --- the context


@pytest.mark.slow
@each_method
def test_join_with_a_timeout(method: str, ready: Ready, gate: Gate) -> None:
    context = mp.spawn(spawned.wait, (ready.address, gate.address), 2, join=False, start_method=method)
    ready.wait(2)
    before = time.monotonic()
    assert not context.join(timeout=0.2)
    assert 0.2 <= time.monotonic() - before < 5
    assert not context.join(timeout=0)
    assert not context.join(timeout=-1)
    gate.open()
    wait_for(list(context.sentinels))
    assert not context.join(0)
    gate.open()
    assert context.join(timeout=20)
    assert context.join()
    assert context.sentinels == {}


@pytest.mark.slow
@each_method
def test_the_processes(method: str, ready: Ready, gate: Gate) -> None:
    context = mp.spawn(spawned.wait, (ready.address, gate.address), 2, False, True, method)
    assert context is not None
    said = {int(index): int(pid) for index, pid in map(str.split, ready.wait(2))}
    assert context.pids() == [said[0], said[1]]
    assert isinstance(context, mp.ProcessContext)
    assert isinstance(context, mp.SpawnContext) == (method == "spawn")
    assert len(context.error_files) == 2
    for index, process in enumerate(context.processes):
        assert (process.pid, process.ident) == (said[index], said[index])
        kind = {"spawn": "SpawnProcess", "forkserver": "ForkServerProcess", "fork": "ForkProcess"}[method]
        assert re.fullmatch(rf"{kind}-\d+", process.name)
        assert process.daemon
        assert process.is_alive()
        assert process.exitcode is None
        process.join(0)
    assert "2 of 2" in repr(context)
    assert "running" in repr(context.processes[0])
    gate.open(2)
    for process in context.processes:
        process.join()
        assert not process.is_alive()
        assert process.exitcode == 0
    assert "ended 0" in repr(context.processes[0])
    assert context.join()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_process_that_the_owner_ends_is_a_failure(how: str, ready: Ready) -> None:
    context = mp.spawn(spawned.wait_for_ever, (ready.address,), 2, join=False)
    ready.wait(2)
    getattr(context.processes[1], how)()
    number = signal.SIGTERM if how == "terminate" else signal.SIGKILL
    with pytest.raises(mp.ProcessExitedException) as caught:
        context.join()
    assert str(caught.value) == f"process 1 terminated with signal {number.name}"
    getattr(context.processes[1], how)()  # nobody is there any more


@pytest.mark.slow
def test_sentinels(ready: Ready, gate: Gate) -> None:
    context = mp.spawn(spawned.wait, (ready.address, gate.address), 3, join=False)
    ready.wait(3)
    sentinels = context.sentinels
    assert sorted(sentinels.values()) == [0, 1, 2]
    assert context.sentinels == sentinels
    assert [process.sentinel for process in context.processes] == list(sentinels)
    assert wait_for(list(sentinels), 0) == []
    gate.open()
    (ended,) = wait_for(list(sentinels), 20)
    assert context.processes[sentinels[ended]].exitcode == 0  # type: ignore[index]  # these are descriptors
    assert not context.join(0)
    assert set(context.sentinels) == set(sentinels) - {ended}, "a loop over what is left must not spin"
    gate.open(2)
    assert context.join()
    assert set(wait_for(list(sentinels), 0)) == set(sentinels), "open for as long as somebody may look"


@pytest.mark.slow
def test_sentinels_of_processes_that_nobody_has_any_more(ready: Ready, gate: Gate) -> None:
    context = mp.spawn(spawned.wait, (ready.address, gate.address), 2, join=False)
    sentinels = [os.dup(process.sentinel) for process in context.processes]
    ready.wait(2)
    del context
    gate.open(2)
    for sentinel in sentinels:
        assert wait_for([sentinel], 20) == [sentinel]
        os.close(sentinel)


@pytest.mark.slow
def test_the_evidence_goes_with_the_join() -> None:
    context = mp.spawn(spawned.fail, (0, "x"), 2, join=False)
    with pytest.raises(mp.ProcessRaisedException):
        context.join()
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: x"):
        context.join()
    assert not any(map(os.path.exists, context.error_files))


# --- bad input


@pytest.mark.parametrize(
    "arguments,kind,text",
    [
        ({"fn": "name"}, TypeError, "fn: expected a callable, got 'name'"),
        ({"fn": None}, TypeError, "fn: expected a callable"),
        ({"args": 3}, TypeError, "args: expected a tuple of arguments, got 3"),
        ({"nprocs": 0}, ValueError, "nprocs: expected at least 1"),
        ({"start_method": "thread"}, ValueError, "start_method: expected one of spawn, forkserver, fork"),
        ({"envs": {1: {}}}, ValueError, "envs: expected exactly the local ranks 0 to 0"),
        ({"logs_specs": "folder"}, TypeError, "logs_specs: expected a LogsSpecs, got 'folder'"),
        ({"grace": -1}, ValueError, "grace: expected 0 seconds or more"),
        ({"settle": "1"}, TypeError, "settle: expected seconds"),
        ({"preload": ["json"]}, ValueError, "start_method is 'spawn'"),
        ({"placement": 3}, TypeError, "placement"),
        ({"timers": 3}, TypeError, "timers: expected"),
        ({"console": 3}, TypeError, "console: expected"),
        ({"no_such": 3}, TypeError, "no_such"),
        ({"args": (threading.Lock(),)}, UnpicklableError, "argument 0"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        mp.spawn(**{"fn": spawned.nothing, **arguments})
    assert text in str(caught.value)


def test_bad_times_of_a_join() -> None:
    context = mp.spawn(spawned.nothing, join=False)
    with pytest.raises(ValueError, match="grace_period: expected 0 seconds or more"):
        context.join(grace_period=-1)
    with pytest.raises(TypeError, match="timeout: expected seconds, got '1'"):
        context.join("1")  # type: ignore[arg-type]  # as somebody will
    assert context.join()


# --- the names


def test_what_multiprocessing_exports_is_here() -> None:
    for name in multiprocessing.__all__:
        assert getattr(mp, name) is getattr(multiprocessing, name)
        assert name in mp.__all__
        assert name in dir(mp)
    assert mp.connection is multiprocessing.connection  # type: ignore[attr-defined]  # a module that happens to be loaded
    with pytest.raises(AttributeError, match=r"stays torch's: call torch.multiprocessing.set_sharing_strategy$"):
        mp.set_sharing_strategy  # type: ignore[attr-defined]  # noqa: B018 - torch's own


@pytest.mark.slow
def test_star(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
from phalanx.spawn import *
set_start_method("forkserver")
assert get_start_method() == "forkserver" in get_all_start_methods()
queue = get_context("spawn").Queue()
spawn(lambda i, queue: queue.put(i), args=(queue,), nprocs=2, main="value")
print(sorted(queue.get() for _ in range(2)), ProcessRaisedException.__name__, cpu_count() > 0)
""",
    )
    assert (done.stdout, done.stderr) == ("[0, 1] ProcessRaisedException True\n", "")


def test_import_loads_no_multiprocessing(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import sys, phalanx.spawn\nassert 'multiprocessing' not in sys.modules")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# --- signals and the exit of the host


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@each_method
def test_the_hosts_signal_handlers_are_left_alone(method: str, ready: Ready, gate: Gate) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    context = mp.spawn(spawned.wait, (ready.address, gate.address), join=False, start_method=method)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    gate.open()
    assert context.join()


@pytest.mark.slow
@each_method
def test_ctrl_c_in_a_join_stops_the_group(method: str, ready: Ready) -> None:
    context = mp.spawn(spawned.wait_for_ever, (ready.address,), 2, join=False, start_method=method)
    ready.wait(2)
    interrupting = when_we_wait(os.kill, os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        context.join()
    interrupting.join()
    assert [process.exitcode for process in context.processes] == [-signal.SIGINT] * 2
    with pytest.raises(mp.ProcessExitedException, match="process 0 terminated with signal SIGINT"):
        context.join()


INTERRUPTED = """
import sys, threading
import phalanx.spawn as mp
from tests.support import spawned

if __name__ == "__main__":
    try:
        mp.spawn(spawned.wait_for_ever, (sys.argv[1], tuple(map(int, sys.argv[3:]))), 2, start_method=sys.argv[2])
    except KeyboardInterrupt:
        print("KeyboardInterrupt", threading.active_count(), flush=True)
        raise
"""

UNJOINED = """
import sys, time
import phalanx.spawn as mp
from tests.support import spawned

if __name__ == "__main__":
    mp.spawn(spawned.wait_for_ever, (sys.argv[1],), 2, join=False, start_method=sys.argv[2])
    while True:
        time.sleep(0.1)
"""


def host(tmp_path: Path, text: str, *arguments: object) -> subprocess.Popen[str]:
    path = tmp_path / "host.py"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.slow
@each_method
def test_ctrl_c_in_a_program(method: str, tmp_path: Path, ready: Ready) -> None:
    program = host(tmp_path, INTERRUPTED, ready.address, method)
    pids = [int(line.split()[1]) for line in ready.wait(2)]
    below = descendants(program.pid)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=20)
    assert out == "KeyboardInterrupt 1\n"
    assert err.strip().endswith("KeyboardInterrupt")
    assert program.returncode == -signal.SIGINT
    assert not any(map(alive, {*pids, *below})), "nothing may be left by then"


@pytest.mark.slow
def test_ctrl_c_once_more_kills(tmp_path: Path, ready: Ready) -> None:
    program = host(tmp_path, INTERRUPTED, ready.address, "spawn", signal.SIGINT.value, signal.SIGTERM.value)
    pids = [int(line.split()[1]) for line in ready.wait(2)]
    program.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.5)
    assert all(map(alive, pids)), "they are deaf to it, and have the grace period"
    program.send_signal(signal.SIGINT)
    out, _err = program.communicate(timeout=20)
    assert out == "KeyboardInterrupt 1\n"
    assert not any(map(alive, pids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method,number", [("spawn", signal.SIGTERM), ("forkserver", signal.SIGKILL), ("fork", signal.SIGKILL)]
)
def test_a_host_that_is_killed_takes_the_group_with_it(
    method: str, number: signal.Signals, tmp_path: Path, ready: Ready
) -> None:
    program = host(tmp_path, INTERRUPTED, ready.address, method)
    pids = [int(line.split()[1]) for line in ready.wait(2)]
    below = descendants(program.pid)
    program.send_signal(number)
    out, err = program.communicate(timeout=20)
    assert (out, err, program.returncode) == ("", "", -number)
    assert wait_gone({*pids, *below}) == set()


@pytest.mark.slow
@each_method
def test_ctrl_c_outside_a_join_stops_the_group_at_the_exit(method: str, tmp_path: Path, ready: Ready) -> None:
    program = host(tmp_path, UNJOINED, ready.address, method)
    pids = [int(line.split()[1]) for line in ready.wait(2)]
    program.send_signal(signal.SIGINT)
    _out, err = program.communicate(timeout=20)
    assert err.strip().endswith("KeyboardInterrupt")
    assert not any(map(alive, pids))


NESTED = """
import multiprocessing
import sys
import phalanx.spawn as mp
from tests.support import spawned

if __name__ == "__main__":
    how, method, *arguments = sys.argv[1:]
    if how == "program":
        spawned.host(0, *arguments, method)
    elif how == "multiprocessing":
        child = multiprocessing.get_context(method).Process(target=spawned.host, args=(0, *arguments))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    else:
        mp.spawn(spawned.host, tuple(arguments), start_method=method)
"""

each_child = pytest.mark.parametrize(
    "how,method",
    [("program", "spawn"), *((how, method) for how in ("multiprocessing", "phalanx") for method in METHODS)],
)


@pytest.fixture
def host_gate(tmp_path: Path) -> Iterator[Gate]:
    """Where the host of a group waits until the test lets it leave."""
    with Gate(tmp_path / "host_gate") as it:
        yield it


@pytest.mark.slow
@each_child
def test_the_end_waits_for_processes_that_are_no_daemons(
    how: str, method: str, tmp_path: Path, ready: Ready, gate: Gate, host_gate: Gate
) -> None:
    program = host(tmp_path, NESTED, how, method, ready.address, gate.address, "plain", host_gate.address)
    pids = [int(line.split()[1]) for line in ready.wait(2)]
    host_gate.open()
    child = int(ready.wait()[0].removeprefix("leaving "))
    assert wait_gone([child], 0.3) == {child}
    assert all(map(alive, pids))
    gate.open(2)
    assert program.communicate(timeout=20) == ("", "")
    assert program.returncode == 0
    assert sorted(ready.wait(2)) == ["0 done", "1 done"]


@pytest.mark.slow
@each_child
def test_daemons_end_with_the_program_or_child(
    how: str, method: str, tmp_path: Path, ready: Ready, gate: Gate, host_gate: Gate
) -> None:
    program = host(tmp_path, NESTED, how, method, ready.address, gate.address, "daemon", host_gate.address)
    pids = [int(line.split()[1]) for line in ready.wait(2)]
    host_gate.open()
    assert program.communicate(timeout=20) == ("", "")
    assert program.returncode == 0
    assert sorted(ready.wait(3)[1:]) == ["0 stopped", "1 stopped"], "a SIGTERM came first"
    assert not any(map(alive, pids))


@pytest.mark.slow
@each_child
def test_a_failure_that_nobody_joins_is_told_at_the_end(how: str, method: str, tmp_path: Path) -> None:
    program = host(tmp_path, NESTED, how, method, "", "", "failing", "")
    out, err = program.communicate(timeout=20)
    assert out == ""
    assert err.count("-- Process 1 terminated with the following error:") == 1
    assert err.endswith("ValueError: nobody joined me\n\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="children run exit handlers when the exception has gone")
@each_method
def test_an_interrupted_child_stops_those_that_nobody_joined(
    method: str, tmp_path: Path, ready: Ready, gate: Gate, host_gate: Gate
) -> None:
    arguments = (ready.address, gate.address, "interrupted", host_gate.address)
    program = host(tmp_path, NESTED, "multiprocessing", method, *arguments)
    pids = [int(line.split()[1]) for line in ready.wait(2)]
    host_gate.open()
    _out, err = program.communicate(timeout=20)
    assert "KeyboardInterrupt" in err
    assert sorted(ready.wait(3)[1:]) == ["0 interrupted", "1 interrupted"], "a SIGINT came first"
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_a_dropped_context_lets_go_of_processes_that_end(ready: Ready, gate: Gate) -> None:
    from phalanx.spawn import _context

    mp.spawn(spawned.wait, (ready.address, gate.address), 2, join=False)
    ready.wait(2)
    assert len(_context._kept) == 1
    pids = [worker.pid for group in _context._kept for worker in group._started().mirror.workers.values()]
    assert all(map(alive, pids))
    gate.open(2)
    assert wait_gone(pids) == set()


# --- beside torch
