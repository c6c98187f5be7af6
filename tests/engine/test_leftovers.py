"""What workers leave behind: it may go on for a while when all is well, and what is ended is told, and whose it was."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._engine.keeper import keeper
from phalanx._engine.keeper.sweep import COMMAND, MemoryReader
from phalanx._engine.mirror import line_of_waiting, lines_of_ended
from phalanx.multiprocessing import Leftover, start_processes
from tests.support.disks import sleeping_on_disks, until
from tests.support.families import fork_daemon, fork_plain, fork_session, leaves
from tests.support.helpers import PYTHON, TIMEOUT, alive, wait_gone
from tests.support.insides import state_of, supervisor_of
from tests.support.waits import tell_keepers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.multiprocessing import PContext
    from tests.support.disks import Disk
    from tests.support.helpers import Gate, Ready

pytestmark = [pytest.mark.usefixtures("own_temporary_folder"), pytest.mark.slow]
RUN = (sys.executable, "-m", "phalanx", "run")


def uploader(done: Path, gate: Gate, ready: Ready) -> str:
    """A program in a session of its own that finishes its work when the gate opens."""
    code = f"import os; {ready.python()}; {gate.python()}; open({str(done)!r}, 'w').close()"
    return f"setsid {PYTHON} -S -c {shlex.quote(code)}"


@contextlib.contextmanager
def leaving(tmp_path: Path, gate: Gate, ready: Ready, **options: Any) -> Iterator[tuple[PContext, int]]:
    """A group whose worker has left an `uploader` behind, and the pid of that."""
    os.mkfifo(tmp_path / "go")
    script = f"{uploader(tmp_path / 'done', gate, ready)} & read line <{tmp_path}/go"
    with start_processes("g", "/bin/sh", ("-c", script), nprocs=1, **options) as group:
        [pid] = ready.pids()
        (tmp_path / "go").write_text("\n")
        yield group, pid


def test_what_successful_workers_left_behind_may_finish(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    with leaving(tmp_path, gate, ready, linger=TIMEOUT) as (group, _pid):
        until(lambda: state_of(group) == "LINGERING")
        assert group.wait(0.3) is None
        assert state_of(group) == "LINGERING"
        gate.open()
        result = group.wait()
    assert result.succeeded
    assert result.leftovers == ()
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("options", [{"linger": 0.3}, {}], ids=["lingers", "in the library, nothing does unless asked"])
def test_it_is_ended_when_its_time_is_over(
    tmp_path: Path, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    tell_keepers(keeper, "PATIENCE", TIMEOUT, monkeypatch.setattr)  # for its end, once it has been asked
    began = time.monotonic()
    with leaving(tmp_path, gate, ready, **options) as (group, pid):
        result = group.wait()
    assert time.monotonic() - began >= options.get("linger", 0)
    assert result.succeeded
    [left] = result.leftovers
    assert (left.pid, left.local_rank, left.signal_sent, left.exitcode) == (pid, 0, 15, -15)
    assert left.command.startswith(f"{os.path.basename(sys.executable)} -S -c import os;")
    assert 0 < left.age < TIMEOUT
    assert not (tmp_path / "done").exists()


def test_nothing_lingers_of_a_group_that_failed(ready: Ready) -> None:
    code = f"import os, subprocess, sys; subprocess.Popen(['sleep', '600']); {ready.python()}; sys.exit(3)"
    began = time.monotonic()
    with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=1, linger=TIMEOUT) as group:
        result = group.wait()
    assert time.monotonic() - began < TIMEOUT / 2
    assert [left.command for left in result.leftovers] == ["sleep 600"]


@pytest.mark.parametrize("way", ["close", "kill"])
def test_a_close_ends_the_lingering(ready: Ready, way: str) -> None:
    code = f"import os, subprocess; subprocess.Popen(['sleep', '600']); {ready.python()}"
    with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=1, linger=TIMEOUT * 10) as group:
        assert supervisor_of(group).mirror.workers[0].ended.wait(TIMEOUT)
        assert group.wait(0) is None
        group.close(signal.SIGKILL if way == "kill" else signal.SIGTERM, timeout=TIMEOUT)
        result = group.wait(0)
    assert result is not None
    assert result.outcomes[0].state == "succeeded"
    assert [(left.command, left.exitcode) for left in result.leftovers] == [("sleep 600", -9 if way == "kill" else -15)]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("way", [fork_plain, fork_session, fork_daemon])
def test_whose_it_was(ready: Ready, gate: Gate, method: str, way: Callable[[str], None]) -> None:
    """Of a fork in another session its memory tells: its environment in /proc is that of the last exec."""
    args = dict.fromkeys(range(3), (ready.address, way, gate.address))
    with start_processes("g", leaves, args, start_method=method) as group:
        pids = ready.pids(3)
        gate.open(3)
        result = group.wait()
    assert {left.pid for left in result.leftovers} == set(pids)
    assert sorted(left.local_rank for left in result.leftovers if left.local_rank is not None) == [0, 1, 2]
    assert {left.exitcode for left in result.leftovers} <= {-15, -9}


@pytest.mark.each_python
@pytest.mark.parametrize("options", [(), ("--preload", "json")], ids=["executed", "preloaded"])
def test_a_fork_of_a_worker_is_called_as_the_program_is(tmp_path: Path, ready: Ready, options: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    fork = f"import os, time; pid = os.fork(); pid or (os.setsid(), time.sleep(600)); {ready.python()}"
    script.write_text(fork)
    argv = (*RUN, "--linger", "0", "--log-dir", str(tmp_path), *options, str(script), "--lr", "1")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    program = ", forked by its worker" if options else f" {script} --lr 1"
    assert re.search(rf"ended what was left behind: pid \d+ \(python[0-9.]*{re.escape(program)[:60]}", done.stderr)


def test_one_that_ignores_sigterm_is_killed(ready: Ready) -> None:
    code = (
        f"import os, signal\nif os.fork() == 0:\n    signal.signal(15, signal.SIG_IGN); os.setsid(); {ready.python()}; "
        "signal.pause()\nsignal.pause()"
    )
    with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=1) as group:
        [pid] = ready.pids()
        group.close(timeout=TIMEOUT)
        result = group.wait(0)
    assert result is not None
    assert [(left.pid, left.signal_sent, left.exitcode) for left in result.leftovers] == [(pid, 9, -9)]


def test_what_ends_by_itself_is_not_told(tmp_path: Path) -> None:
    """A resource tracker ignores SIGTERM, and ends when its worker has: it may have to be waited for."""
    script = tmp_path / "script.py"
    script.write_text("import multiprocessing; multiprocessing.get_context('spawn').Lock(); print('done')")
    done = subprocess.run([*RUN, "--log-dir", str(tmp_path), str(script)], capture_output=True, text=True, check=True)
    assert "ended what was left behind" not in done.stdout + done.stderr


def test_many_are_counted() -> None:
    script = "for i in $(seq 100); do setsid sleep 600 & done; exit 0"
    with start_processes("g", "/bin/sh", ("-c", script), nprocs=1) as group:
        result = group.wait()
    assert len(result.leftovers) == 64
    assert supervisor_of(group).mirror.leftovers_beyond >= 36
    assert not any(alive(left.pid) for left in result.leftovers)


# --- what a person is told


@contextlib.contextmanager
def running(tmp_path: Path, gate: Gate, ready: Ready, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`phalanx run` of a script that has left an `uploader` behind, and the pid of that."""
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\n{uploader(tmp_path / 'done', gate, ready)} &\nread line <{tmp_path}/go\n")
    script.chmod(0o755)
    os.mkfifo(tmp_path / "go")
    command = [*RUN, *options, "--log-dir", str(tmp_path / "logs"), "--no-python", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        [pid] = ready.pids()
        (tmp_path / "go").write_text("\n")
        yield run, pid


def test_phalanx_run_waits_and_says_for_whom(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    with running(tmp_path, gate, ready) as (run, pid):
        assert run.stdout is not None
        lines = [run.stdout.readline(), run.stdout.readline()]
        said = rf"phalanx: waiting at most 10 s for what is left behind: pid {pid} \(.*\) of rank 0, [\d.]+m?s old\n"
        assert re.fullmatch(said, lines[1]), lines
        gate.open()
        assert run.stdout.read() == ""
        assert run.wait(TIMEOUT) == 0
    assert (tmp_path / "done").exists()


def test_what_was_ended_is_on_the_console_and_in_run_json(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    with running(tmp_path, gate, ready, "--linger", "0") as (run, pid):
        out, _ = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 0
    # It has left its worker's session: on a busy machine, its 50 ms are over before it dies of the first signal.
    said = re.search(
        rf"phalanx: ended what was left behind: pid {pid} \(.*\) of rank 0, [\d.]+m?s old: SIG(TERM|KILL)\n", out
    )
    assert said, out
    [record] = (tmp_path / "logs").glob("*/run.json")
    [left] = json.loads(record.read_text())["attempts"][0]["leftovers"]
    assert (left["pid"], left["local_rank"]) == (pid, 0)
    assert left["signal_sent"] == signal.Signals[f"SIG{said[1]}"]
    assert left["exitcode"] in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_library_logs_what_no_console_shows(caplog: pytest.LogCaptureFixture) -> None:
    script = "setsid sleep 600 & until grep -qa ^sleep /proc/$!/cmdline; do :; done"  # before, it has no command line
    with (
        caplog.at_level(logging.WARNING, "phalanx"),
        start_processes("g", "/bin/sh", ("-c", script), nprocs=1) as group,
    ):
        group.wait(TIMEOUT)
    [record] = caplog.records
    # It has left its worker's session: on a busy machine, its 50 ms are over before it dies of the first signal.
    said = r"ended what was left behind: pid \d+ \(.*sleep 600.*\) of rank 0, [\d.]+m?s old: SIG(TERM|KILL)"
    assert re.fullmatch(said, record.getMessage())


def some(count: int, **changes: Any) -> list[Leftover]:
    first = Leftover(100, "sleep 600", 0, 7300.0, 15, -15).replace(**changes)
    return [first.replace(pid=100 + number, local_rank=number) for number in range(count)]


def test_lines() -> None:
    assert list(lines_of_ended(some(1, exitcode=None, signal_sent=9), 0)) == [
        "ended what was left behind: pid 100 (sleep 600) of rank 0, 2h01m old: SIGKILL, and it is still there"
    ]
    assert list(lines_of_ended(some(7), 30))[4:] == ["ended what was left behind: 33 more processes of ranks 4-6"]
    assert list(lines_of_ended(some(5), 0))[4:] == ["ended what was left behind: 1 more process of rank 4"]
    assert line_of_waiting(some(1, command="a\x1b[2Jb" + "c" * 200, age=3.0), 1, 10) == (
        f"waiting at most 10 s for what is left behind: pid 100 (a?[2Jb{'c' * 73}…) of rank 0, 3.0s old"
    )
    assert line_of_waiting(some(6), 20, 1.5).endswith(" and 16 more of ranks 4-5")


@pytest.mark.slow
def test_a_look_that_has_no_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is awake all the time."""

    def endless(_self: MemoryReader, _pid: int, _what: int) -> bytes:
        while True:
            pass

    monkeypatch.setattr(MemoryReader, "_read_one", endless)
    reader = MemoryReader(b"NONE", b"none", 0.05)
    assert reader.read([(os.getpid(), COMMAND)]) == {}
    [fork] = reader.forks
    assert os.waitpid(fork, 0)[1] == signal.SIGKILL
    assert reader.read([(os.getpid(), COMMAND)]) == {}
    assert reader.forks == {fork}  # there was no time for another one


HOLDS_ITS_MEMORY = """
import ctypes, mmap, os, sys, threading
libc = ctypes.CDLL(None)
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 4096)
page = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(shared)))
TELL
with open(sys.argv[2]) as fifo:
    fifo.read()
threading.Thread(target=libc.memset, args=(page, 1, 1)).start()  # waits for the disk
with open(sys.argv[2]) as fifo:
    fifo.read()
libc.munmap(page, 4096)  # waits for that one, with the lock of all of its memory
"""


def test_what_waits_for_a_disk_holds_up_nobody_who_looks_at_it(
    disk: Disk, ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command line can be read only when the disk has answered, which may be never."""
    monkeypatch.setattr(keeper, "KILL_WAIT", 0.5)  # in the keeper, which is a fork of this process
    (disk.folder / "file").write_bytes(bytes(4096))
    for name in ("fifo", "end"):
        os.mkfifo(tmp_path / name)
    code = HOLDS_ITS_MEMORY.replace("TELL", ready.python())
    holder = f"setsid {PYTHON} -S -c {shlex.quote(code)} {disk.folder}/file {tmp_path}/fifo"
    command = f"{holder} & read line <{tmp_path}/end"
    with start_processes("g", os.system, (command,), nprocs=1, start_method="fork") as group:
        [pid] = ready.pids(1)
        os.sync()
        disk.freeze()
        try:
            (tmp_path / "fifo").write_text("\n")
            until(lambda: sleeping_on_disks(pid) == 1)
            (tmp_path / "fifo").write_text("\n")
            until(lambda: sleeping_on_disks(pid) == 2)
            (tmp_path / "end").write_text("\n")
            result = group.wait()
        finally:
            disk.thaw()
    assert result.succeeded
    [left] = result.leftovers
    assert (left.pid, left.command, left.exitcode) == (pid, Path(sys.executable).name[:15], None)
    assert wait_gone([pid]) == set()
