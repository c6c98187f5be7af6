"""The launcher is killed, and the workers have the orphan grace: SIGTERM, some time, SIGKILL; and nobody is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._base import procfs
from phalanx._timers.escalation import EVIDENCE_WAIT
from phalanx.multiprocessing import KeeperLostError, start_processes
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, descendants, pass_gate, rest, tell, wait_gone
from tests.support.insides import stop, supervisor_of
from tests.support.workers import ROOT, started_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from phalanx.multiprocessing import PContext
    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.slow

LONG = 20 * TIMEOUT
"""An orphan grace that no test waits for."""

LAUNCHER = """
import os, signal, sys, time
from phalanx.multiprocessing import DefaultLogsSpecs, Std
from tests.engine import test_orphan_grace
from tests.support.helpers import tell

kind, address, gate, folder, grace, size, forks = sys.argv[1:]
if __name__ == "__main__":
    specs = DefaultLogsSpecs(folder, redirects=Std.ALL, max_size=int(size) or None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # it may be sent as soon as the workers are up
    with test_orphan_grace.start(kind, address, gate, specs, float(grace)) as group:
        signal.signal(signal.SIGUSR1, lambda *_: group.pause())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        if int(forks) and not os.fork():
            tell(address, "forked")
            while True:
                time.sleep(3600)
        group.wait()
"""


def saves(address: str, gate: str) -> None:
    """At SIGTERM, say so, wait at the gate, and write much; or ignore it, as rank 1."""

    def save(*_: object) -> None:
        tell(address, "SIGTERM")
        pass_gate(gate)
        for number in range(2000):
            sys.stdout.write(f"saved {number}\n")
        sys.stdout.flush()
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    if not os.fork():  # the grandchild, which never ends by itself
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
    tell(address, str(os.getpid()))
    rest()


def start(kind: str, address: str, gate: str, specs: object, grace: float) -> PContext:
    options: dict[str, Any] = {"logs_specs": specs, "nprocs": 2, "orphan_grace": grace}
    if kind == "binary":
        code = f"import sys; sys.path[:0] = {[ROOT, *sys.path]!r}; from tests.engine import test_orphan_grace as it; "
        return start_processes("g", sys.executable, ("-c", f"{code}it.saves({address!r}, {gate!r})"), **options)
    return start_processes("g", saves, (address, gate), start_method=kind, **options)


@contextlib.contextmanager
def launched(
    kind: str, ready: Ready, gate: Gate, folder: Path, grace: float, *, size: int = 0, forks: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A launcher of two workers in a process of its own."""
    (folder / "logs").mkdir()
    words = (kind, ready.address, gate.address, folder / "logs", grace, size, int(forks))
    with started_script(folder, LAUNCHER, *words) as launcher:
        yield launcher


def everybody(launcher: subprocess.Popen[str], ready: Ready) -> tuple[set[int], int, int]:
    """All processes below the launcher, its guard, and its keeper."""
    workers = set(ready.pids(4))
    found = descendants(launcher.pid) | workers
    keepers = {procfs.Stat(pid).parent for pid in workers} - workers
    [keeper] = {pid for pid in keepers if procfs.Stat(procfs.Stat(pid).parent).pid in found}
    return found, procfs.Stat(keeper).parent, keeper


def lines(folder: Path) -> list[str]:
    """What the workers wrote, of all files of both ranks, the oldest first."""
    found = []
    for rank in ("0", "1"):
        files = [path for path in folder.rglob("stdout.log*") if path.parent.name == rank]
        files.sort(key=lambda path: -int(path.suffix.removeprefix(".")) if path.suffix != ".log" else 1)
        found += sorted(line for path in files for line in path.read_text().splitlines())
    return found


SAVED = 2 * sorted(f"saved {number}" for number in range(2000))


@pytest.mark.each_python
@pytest.mark.parametrize("kind", ["binary", "spawn", "forkserver", "fork"])
def test_workers_have_time_to_save_when_the_launcher_was_killed(
    kind: str, ready: Ready, gate: Gate, tmp_path: Path
) -> None:
    with launched(kind, ready, gate, tmp_path, LONG) as launcher:
        found, _guard, _keeper = everybody(launcher, ready)
        launcher.kill()
        launcher.wait()
        assert ready.wait(2) == ["SIGTERM", "SIGTERM"]
        gate.open(2)
        assert wait_gone(found) == set()  # what they left behind as well, at once: the rest of the grace is for them
    assert lines(tmp_path) == SAVED


def test_log_files_that_are_bounded_in_size_are_complete(ready: Ready, gate: Gate, tmp_path: Path) -> None:
    with launched("spawn", ready, gate, tmp_path, LONG, size=4096) as launcher:
        found, _guard, _keeper = everybody(launcher, ready)
        launcher.kill()
        assert ready.wait(2) == ["SIGTERM", "SIGTERM"]
        gate.open(2)
        assert wait_gone(found) == set()
    assert len(list(tmp_path.rglob("stdout.log*"))) > 4
    assert lines(tmp_path) == SAVED


def test_without_one_they_are_killed_at_once(ready: Ready, gate: Gate, tmp_path: Path) -> None:
    with launched("binary", ready, gate, tmp_path, 0) as launcher:
        found, _guard, _keeper = everybody(launcher, ready)
        launcher.kill()
        assert wait_gone(found) == set()
    with pytest.raises(AssertionError, match="0 of 1 messages"):
        ready.wait(timeout=0.1)


@pytest.mark.parametrize(
    "grace, who, number, is_late",
    [
        (0.5, None, 0, False),
        (LONG, "guard", signal.SIGKILL, True),
        (LONG, "keeper", signal.SIGKILL, True),
        (LONG, "keeper", signal.SIGSTOP, False),  # it is woken as the launcher dies,
        (1.0, "keeper", signal.SIGSTOP, True),  # and at the end of the grace
    ],
)
def test_the_orphan_grace_ends(
    grace: float, who: str | None, number: int, is_late: bool, ready: Ready, gate: Gate, tmp_path: Path
) -> None:
    """At its time, whatever happens to a helper, before the launcher's death or after it; or as all have saved."""
    with launched("binary", ready, gate, tmp_path, grace) as launcher:
        found, guard, keeper = everybody(launcher, ready)
        helper = {None: 0, "guard": guard, "keeper": keeper}[who]
        began = time.monotonic()
        if who and not is_late:
            os.kill(helper, number)
        launcher.kill()
        assert ready.wait(2) == ["SIGTERM", "SIGTERM"]
        if who and is_late:
            os.kill(helper, number)
        if number == signal.SIGSTOP and not is_late:
            gate.open(2)
        assert wait_gone(found) == set()
        assert number == signal.SIGKILL or grace == LONG or time.monotonic() - began >= grace
    assert lines(tmp_path) == (SAVED if number == signal.SIGSTOP and not is_late else [])


def test_a_fork_that_holds_the_launchers_socket_delays_nothing(ready: Ready, gate: Gate, tmp_path: Path) -> None:
    with launched("binary", ready, gate, tmp_path, LONG, forks=True) as launcher:
        messages = ready.wait(5)
        workers = {int(message) for message in messages if message != "forked"}
        [own] = {pid for pid in procfs.children(launcher.pid) if len(procfs.children(pid)) == 0}
        found = descendants(launcher.pid) | workers
        launcher.kill()
        assert ready.wait(2) == ["SIGTERM", "SIGTERM"]
        gate.open(2)
        assert wait_gone(found - {own}) == set()
        assert alive(own)
        os.kill(own, signal.SIGKILL)
        assert wait_gone([own]) == set()


def test_a_launcher_that_lives_gives_no_orphan_grace(ready: Ready) -> None:
    code = f"import signal; signal.signal(15, signal.SIG_IGN); {ready.python()}; signal.pause()"

    def fail() -> None:
        raise IndexError

    with start_processes("g", sys.executable, ("-c", code), nprocs=2, orphan_grace=LONG) as group:
        pids = ready.pids(2)
        supervisor = supervisor_of(group)
        supervisor._loop.call(fail)
        with pytest.raises(KeeperLostError, match="supervisor failed: IndexError"):
            group.wait(TIMEOUT)
        assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.parametrize("value, error", [(-1, ValueError), (float("inf"), ValueError), ("5", TypeError)])
def test_an_orphan_grace_is_finite(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^orphan_grace: expected "):
        start_processes("g", "true", (), nprocs=1, orphan_grace=value)


# --- What must happen happens on time though the launcher is stopped, or busy; and it reports it truly when it goes on


SLACK = TIMEOUT
"""Seconds beyond what is promised that a loaded machine may take."""

BUSY = 100.0
"""Seconds of a call that holds the GIL, unless a signal ends it before."""

DECIDED = """
import json, sys
from phalanx.multiprocessing import start_processes
from phalanx.timer import TimerSpecs
from tests.support import workers

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    timers = TimerSpecs() if options.pop("timers", False) else None
    busy = options.pop("busy", 0)
    with start_processes("g", getattr(workers, options.pop("function")), timers=timers, **options) as group:
        if busy:
            workers.hold_the_gil(options["args"]["0"][0], busy)
        result = group.wait()
    print(json.dumps({
        "state": result.state,
        "root": None if result.root_cause is None else [result.root_cause.local_rank, result.root_cause.message],
        "outcomes": [[outcome.state, outcome.exitcode, outcome.signal_sent] for outcome in result.outcomes.values()],
    }))
"""


@contextlib.contextmanager
def decided(tmp_path: Path, ready: Ready, gate: Gate, function: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A launcher of three workers in a process of its own. It prints what became of them."""
    args = {rank: (ready.address, gate.address, rank) for rank in range(3)}
    text = DECIDED.replace(
        "**options)", '**{**options, "args": {int(k): tuple(v) for k, v in options["args"].items()}})'
    )
    words = json.dumps({"function": function, "args": args, **options})
    with started_script(tmp_path, text, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        try:
            yield launcher
        except AssertionError as error:
            launcher.kill()
            error.add_note(f"the launcher ({launcher.wait()}) said: {launcher.communicate()}")
            raise
        finally:
            launcher.send_signal(signal.SIGCONT)


def goes_on(launcher: subprocess.Popen[str], expected: str = "", *, busy: bool = False) -> dict[str, Any]:
    """What the launcher says in the end."""
    if busy:
        launcher.send_signal(signal.SIGUSR1)
    launcher.send_signal(signal.SIGCONT)
    out, err = launcher.communicate(timeout=TIMEOUT)
    err, announced = re.subn("phalanx: the group 'g' has failed: rank 0, .*\n", "", err)
    assert announced == 1
    assert re.fullmatch(expected, err), err
    said: dict[str, Any] = json.loads(out)
    for outcome in said["outcomes"]:
        if outcome == ["stopped", -15, 9]:  # it had died of SIGTERM, but was not gone yet when the grace was over
            outcome[2] = 15
    return said


FAILED = {
    "state": "failed",
    "root": [0, "exited with code 3; no error was recorded"],
    "outcomes": [["failed", 3, None], ["stopped", -15, 15], ["stopped", -9, 9]],
}


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_launcher_that_is_stopped_holds_up_no_stop_and_no_kill(
    tmp_path: Path, ready: Ready, gate: Gate, method: str
) -> None:
    settle, grace = 0.1, 0.5
    with decided(tmp_path, ready, gate, "one_fails", start_method=method, settle=settle, grace=grace) as launcher:
        pids = ready.pids(3)
        stop(launcher.pid)
        gate.open()
        assert wait_gone(pids, settle + grace + SLACK) == set()
        assert procfs.Stat(launcher.pid).state == "T"
        assert goes_on(launcher) == FAILED


@pytest.mark.parametrize("when", ["settling", "stopping"])
def test_a_launcher_that_is_stopped_meanwhile(tmp_path: Path, ready: Ready, gate: Gate, when: str) -> None:
    settle, grace = (2.0, 0.3) if when == "settling" else (0.0, 2.0)
    with decided(tmp_path, ready, gate, "one_fails", settle=settle, grace=grace) as launcher:
        first, *others = sorted(ready.pids(3))
        gate.open()
        assert wait_gone([first]) == set()
        stop(launcher.pid)  # in time, unless this machine has kept us waiting: then it has ended, as it should
        in_time = any(map(alive, others))
        assert wait_gone(others, settle + grace + SLACK) == set()
        assert not in_time or procfs.Stat(launcher.pid).state == "T"
        assert goes_on(launcher) == FAILED


def test_a_launcher_in_a_call_that_holds_the_gil(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    settle, grace = 0.1, 0.5
    with decided(tmp_path, ready, gate, "one_fails", settle=settle, grace=grace, busy=BUSY) as launcher:
        messages = ready.wait(4)
        pids = [int(message) for message in messages if message != "busy"]
        gate.open()
        assert wait_gone(pids, settle + grace + SLACK) == set()
        assert launcher.poll() is None
        assert goes_on(launcher, busy=True) == FAILED


def stopped(launcher: subprocess.Popen[str], _ready: Ready) -> None:
    stop(launcher.pid)


def busy(launcher: subprocess.Popen[str], _ready: Ready) -> None:
    """It has said so."""
    assert launcher.poll() is None


@pytest.mark.long
@pytest.mark.parametrize("how", [stopped, busy])
def test_a_hung_rank_is_killed_at_its_deadline(
    tmp_path: Path, ready: Ready, gate: Gate, how: Callable[[subprocess.Popen[str], Ready], None]
) -> None:
    options = {"timers": True, "settle": 0.1, "grace": 0.5, "busy": BUSY if how is busy else 0}
    with decided(tmp_path, ready, gate, "one_hangs", **options) as launcher:
        pids = {int(message) for message in ready.wait(5 if how is busy else 4) if message != "busy"}
        how(launcher, ready)
        gate.open()
        assert wait_gone(pids, 0.3 + EVIDENCE_WAIT + 0.1 + 0.5 + SLACK) == set()
        assert launcher.poll() is None
        expected = r"rank 0: 'load' \(.*\) was not left within 0.3 s; [\d.]+m?s over; .*; SIGKILL\n"
        said = goes_on(launcher, expected, busy=how is busy)
    rank, message = said["root"]
    assert rank == 0
    assert message.startswith("Hang: 'load' (")
    assert said["outcomes"] == [["failed", -9, None], ["stopped", -15, 15], ["stopped", -15, 15]]
