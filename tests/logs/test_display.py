"""What shows lines may take its time, fail, or never return: nobody who supervises notices."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx._base.loop import Loop
from phalanx._base.threads import SerialExecutor
from phalanx._engine import group_events, keeper_link
from phalanx._logs import display
from phalanx._logs.pump import Pump
from phalanx._logs.sink import Sink
from phalanx._logs.terminal import PlainOutput
from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, KeeperLostError, Std, start_processes
from phalanx.timer import TimerSpecs
from tests.support import workers
from tests.support.command import read_to_the_end
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, pass_gate, tell, wait_gone
from tests.support.screen import Emulator

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
RUN = (sys.executable, "-m", "phalanx", "run")
SLACK = 10.0


# --- more than can be shown

FLOOD = """
import os, sys
if os.environ["RANK"] != "2":
    {ready}
    lines = b"".join(b"%d short line\\n" % number for number in range(4000))
    while True:
        os.write(1, lines)
{ready}
{gate}
os._exit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize("options", [("--log-format", "json"), ("--grep", "^[0-9]+ (s|t)"), ("--fold",), ()])
def test_a_flood_hides_no_failure(tmp_path: Path, ready: Ready, gate: Gate, options: tuple[str, ...]) -> None:
    """Two ranks write faster than can be rendered; the third fails."""
    script = tmp_path / "train.py"
    script.write_text(FLOOD.format(ready=ready.python(), gate=gate.python()))
    command = [*RUN, "--nproc-per-node", "3", "--log-dir", str(tmp_path), "--drain", "0.1", *options, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        reader = threading.Thread(target=read_to_the_end, args=(run.stdout.fileno(),))
        reader.start()
        pids = ready.pids(3)
        gate.open()
        assert wait_gone(pids, 0.1 + SLACK) == set()
        reader.join(TIMEOUT)
        assert run.stderr is not None
        assert b"rank      : 2 (local_rank: 2)" in run.stderr.read()
        assert run.wait(TIMEOUT) == 3


def test_a_loop_serves_what_was_asked_before_the_turn_began() -> None:
    """Who asks again and again has a turn each time, and no more."""
    loop, order, writes = Loop(), "", list[int]()
    out, into = os.pipe()

    def again() -> None:
        nonlocal order
        order += "a"
        if len(order) < 6:
            loop.call(again)

    def readable(_events: int) -> None:
        nonlocal order
        order += "r"
        os.read(out, 1)

    try:
        loop.watch(out, readable)
        loop.call(again)
        loop.call(lambda: writes.append(os.write(into, b".")))
        while len(order) < 6:
            loop.once()
        assert order.index("r") <= 3, order
    finally:
        loop.close()
        os.close(out)
        os.close(into)


# --- what fails


class Stream:
    """A notebook's stdout, as far as it goes."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write

    def flush(self) -> None:
        pass


def prints_and_waits(rank: int, address: str, gate: str) -> int:
    print("a line", flush=True)  # noqa: T201 - what is shown
    tell(address, str(os.getpid()))
    pass_gate(gate)
    return rank


def group_of_two(tmp_path: Path, ready: Ready, gate: Gate, **options: Any) -> Any:
    args = {rank: (rank, ready.address, gate.address) for rank in range(2)}
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.OUT)
    return start_processes("g", prints_and_waits, args, logs_specs=specs, start_method="fork", **options)


@pytest.mark.parametrize("method", ["write", "fileno", "flush"])
def test_a_stream_object_that_is_not_all_that_a_file_is(
    tmp_path: Path,
    ready: Ready,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    method: str,
) -> None:
    """It is asked whether it has a descriptor, before the workers start."""
    seen: list[str] = []

    def fail(*_: object) -> None:
        raise NotImplementedError("no more cells")

    stream = Stream(seen.append)
    monkeypatch.setattr(stream, method, fail, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    with group_of_two(tmp_path, ready, gate) as group:
        ready.wait(2)
        gate.open(2)
        assert group.wait(TIMEOUT).return_values == {0: 0, 1: 1}
    assert capfd.readouterr().err.count("no more cells") == (method != "fileno")
    assert method == "write" or {"[0] a line", "[1] a line"}.issuperset(seen[0].splitlines())


@pytest.mark.slow
def test_a_stream_object_that_does_not_return(
    tmp_path: Path, ready: Ready, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers are started, stopped and reported without it."""
    go_on = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Stream(lambda _text: go_on.wait()))
        group = group_of_two(tmp_path, ready, gate, console=ConsoleSpecs(drain=0.3))
    pids = ready.pids(2)
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < TIMEOUT / 2
    assert [pid for pid in pids if alive(pid)] == []
    assert capfd.readouterr().err.count("1 more line in ") == 2
    # The next group has the display that there is.
    with group_of_two(tmp_path / "next", ready, gate) as following:
        ready.wait(2)
        gate.open(2)
        assert following.wait(TIMEOUT).succeeded
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "phalanx-write":
            thread.join(TIMEOUT)


@pytest.mark.slow
def test_a_display_that_stops_in_the_midst_of_the_end(
    tmp_path: Path, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is asked again and again whether it is there: the time that it may take is for one that shows something."""
    monkeypatch.setattr(display, "REACTION", 0.3)
    go_on = threading.Event()
    finish = Pump.finish

    def stops(pump: Pump, done: Callable[[], None]) -> None:
        def wait() -> None:
            go_on.wait()
            finish(pump, done)

        assert pump._loop is not None
        pump._loop.after(0.1, wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pump, "finish", stops)
        with group_of_two(tmp_path, ready, gate) as group:
            ready.wait(2)
            gate.open(2)
            began = time.monotonic()
            assert group.wait(TIMEOUT).succeeded
            assert time.monotonic() - began < 10  # of 16
    assert "what shows the lines does not return" in capfd.readouterr().err
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "phalanx-display":
            thread.join(TIMEOUT)


@pytest.mark.slow
def test_an_exception_in_the_display_ends_the_display_alone(
    tmp_path: Path, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Pump._run

    def fails(self: Pump) -> None:
        run(self)
        raise IndexError("a mistake of ours")

    monkeypatch.setattr(Pump, "_run", fails)
    with group_of_two(tmp_path, ready, gate) as group:
        ready.wait(2)
        gate.open(2)
        assert group.wait(TIMEOUT).return_values == {0: 0, 1: 1}
    said = capfd.readouterr().err
    assert said.count("what is shown ends here, the log files have everything: IndexError: a mistake of ours") == 1


@pytest.mark.slow
def test_an_exception_in_the_supervisor_leaves_no_worker(
    tmp_path: Path, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is told that the group has ended before it has."""

    def fail(*_arguments: object) -> None:
        raise IndexError("a mistake of ours")

    monkeypatch.setitem(keeper_link._ON_MESSAGE, "state", fail)
    with group_of_two(tmp_path, ready, gate) as group:
        pids = ready.pids(2)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(KeeperLostError, match="supervisor failed: IndexError"):
            group.wait(TIMEOUT)
        assert [pid for pid in pids if alive(pid)] == []


def test_an_exception_while_it_lets_go_leaves_no_worker(
    tmp_path: Path, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_self: object) -> None:
        closed(_self)  # type: ignore[arg-type]  # it is one
        raise IndexError("a mistake of ours")

    closed = display.GroupDisplay.close
    monkeypatch.setattr(display.GroupDisplay, "close", fail)
    group = group_of_two(tmp_path, ready, gate)
    pids = ready.pids(2)
    group.close()
    assert [pid for pid in pids if alive(pid)] == []
    assert "a mistake of ours" in capfd.readouterr().err


def hangs(address: str) -> None:
    from phalanx.timer import expires

    with expires(after=0.1, scope="load"):
        tell(address, str(os.getpid()))
        while True:
            signal.pause()


@pytest.mark.slow
def test_a_listener_that_does_not_return(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hung rank is killed, and the end of the group waits for the listener no longer than it says."""
    monkeypatch.setattr(group_events, "PATIENCE", 0.3)
    go_on = threading.Event()

    def wait(_event: object) -> None:
        go_on.wait()

    timers = TimerSpecs(on_event=wait)
    began = time.monotonic()
    with start_processes("g", hangs, (ready.address,), nprocs=1, timers=timers, start_method="fork") as group:
        result = group.wait(TIMEOUT)
    assert time.monotonic() - began < 8
    go_on.set()
    assert result is not None
    assert result.root_cause is not None
    assert result.root_cause.message.startswith("Hang: 'load' (")


def test_calls_on_a_thread_of_their_own() -> None:
    aside, done = SerialExecutor("aside", most=3), []
    runs, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        runs.set()
        go_on.wait()

    assert aside.drain(0)
    assert aside.submit(hold)
    assert runs.wait(TIMEOUT)
    assert [aside.submit(lambda number=number: done.append(number)) for number in range(5)].count(True) == 3  # type: ignore[misc]  # the type of a lambda with a default
    assert not aside.drain(0.01)
    go_on.set()
    assert aside.drain(TIMEOUT)
    assert done == list(range(len(done)))


def test_what_a_call_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no")

    aside, done = SerialExecutor("aside"), []
    aside.submit(fail)
    aside.submit(lambda: done.append(1))
    assert aside.drain(TIMEOUT)
    assert done == [1]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == ["aside"]


# --- no inotify

BLIND = """
import sys
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.logs.test_rotation import forbid

forbid(int(sys.argv[2]), int(sys.argv[3]))
code = "import time; print('one', flush=True); time.sleep(0.3); print('two')"
specs = DefaultLogsSpecs(sys.argv[1], tee=Std.OUT)
with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=2, logs_specs=specs) as group:
    assert group.wait().succeeded
"""


@pytest.mark.long
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call is this machine's")
def test_without_inotify_files_are_polled_and_that_is_reported(tmp_path: Path) -> None:
    done = workers.run_script(tmp_path, BLIND, str(tmp_path / "logs"), "294", str(errno.EMFILE))  # inotify_init1(2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]
    why = r"too many inotify instances or open files \(.*\)"
    said = rf"phalanx: {why}: log files are looked at 10 times a second\n"
    assert re.fullmatch(said, done.stderr), done.stderr


# --- two groups, one terminal

TWO_GROUPS = """
import sys, threading
from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, Std, start_processes

code = '''
import sys, time
name = sys.argv[1]
for number in range(150):
    sys.stdout.write(f"\\\\r{name} bar {number}" if number % 3 else f"\\\\r{name} line {number} {'x' * 60} {name}\\\\n")
    sys.stdout.flush()
    time.sleep(0.002)
print()
'''
def run(name):
    specs = DefaultLogsSpecs(sys.argv[1], tee=Std.OUT)
    args = {rank: ("-S", "-c", code, f"{name}{rank}") for rank in range(2)}
    console = ConsoleSpecs(color="never")
    with start_processes(name, sys.executable, args, logs_specs=specs, console=console) as group:
        assert group.wait().succeeded

threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def watch(fd: int, screen: Emulator) -> None:
    while select.select((fd,), (), (), TIMEOUT)[0]:
        screen.feed(os.read(fd, 512).decode())


@pytest.mark.slow
def test_two_groups_on_one_terminal_cut_no_line_and_erase_no_bar(tmp_path: Path) -> None:
    """Its reader is slow, so that much is written in pieces."""
    script = tmp_path / "script.py"
    script.write_text(TWO_GROUPS)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join([workers.ROOT, *filter(None, sys.path)])}
    screen = Emulator(100)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=env, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):  # the other end is closed
            watch(ours, screen)
        os.close(ours)
        assert run.wait(TIMEOUT) == 0
    lines = screen.text()
    for name in ("a0", "a1", "b0", "b1"):
        rank = name[1]
        expected = [f"[{rank}] {name} line {number} {'x' * 60} {name}" for number in range(0, 150, 3)]
        assert [line for line in lines if f" {name} line" in line] == expected
    whole = re.compile(r"\[\d\] [ab][01] (line \d+ x{60} [ab][01]|bar \d+)|\[\d\]")
    assert [line for line in lines if not whole.fullmatch(line)] == []


def test_an_output_is_shared_until_all_have_closed_it(tmp_path: Path) -> None:
    def make() -> PlainOutput:
        return PlainOutput(Sink(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), own=True))

    first = display.shared_output("place", make)
    assert display.shared_output("place", make) is first
    another = display.shared_output("another", make)
    assert another is not first
    first.sink.close()
    assert display.shared_output("place", make) is first
    for _ in range(2):
        first.sink.close()
    second = display.shared_output("place", make)
    assert second is not first
    for output in (second, another):
        output.sink.close()


def test_lines_go_to_the_file_of_a_descriptor_at_the_start(tmp_path: Path) -> None:
    """The host closes it as soon as the group has started, and the number comes to mean another file."""
    other = tmp_path / "other"
    other.write_text("precious\n")
    for name in ("one", "two"):
        with open(tmp_path / name, "w") as stream, open(other, "r+") as precious:
            with contextlib.redirect_stdout(stream):
                group = start_processes(
                    "said", "sh", ("-c", f"echo {name}"), nprocs=2, logs_specs=DefaultLogsSpecs(tee=Std.OUT)
                )
            os.dup2(precious.fileno(), stream.fileno())
            with group:
                assert group.wait(TIMEOUT) is not None
        assert sorted((tmp_path / name).read_text().splitlines()) == [f"[0] {name}", f"[1] {name}"]
    assert other.read_text() == "precious\n"


def test_console_specs_of_two_groups_are_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They share the stream, not what is chosen for it."""
    groups = [
        start_processes(
            name,
            "/bin/sh",
            ("-c", f"echo {name}"),
            nprocs=1,
            logs_specs=DefaultLogsSpecs(str(tmp_path), tee=Std.OUT),
            console=ConsoleSpecs(format=form),
        )
        for name, form in (("one", "text"), ("two", "json"))
    ]
    for group in groups:
        assert group.wait(TIMEOUT).succeeded  # type: ignore[union-attr]  # it ends at once
        group.close()
    out = capfd.readouterr().out
    assert "[0] one\n" in out
    assert re.search(r'^\{"time": .* "text": "two"\}$', out, re.MULTILINE)
