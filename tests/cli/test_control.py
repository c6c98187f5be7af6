"""`phalanx stop`, `restart`, `signal`, `pause` and `resume`, and `phalanx.attach`: a hand on a run from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import phalanx
from tests.support.command import Done, Launcher, Place
from tests.support.helpers import TIMEOUT, Ready, alive, descendants, refusal_of_another_user, wait_gone

WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("got", os.environ["RANK"], flush=True))
{ready}
while True:
    signal.pause()
"""
Live = Callable[..., tuple[Launcher, list[int]]]
BY = rf"user {re.escape(__import__('pwd').getpwuid(os.geteuid()).pw_name)}, pid \d+"


def phalanx_(place: Place, *argv: object) -> Done:
    """Run a command on the runs of a place."""
    command, *rest = map(str, argv)
    return place.program(sys.executable, "-m", "phalanx", command, "--log-dir", place.logs, *rest)


def wait_for_states(pids: list[int], states: str) -> None:
    """Wait until the state of each process is one of these, as proc_pid_stat(5) has it."""
    until = time.monotonic() + TIMEOUT
    while not all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in states for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def live(place: Place, ready: Ready) -> Iterator[Live]:
    """Starts a run of two workers, or of another program. Returns it, and the pids of the workers."""
    launchers: list[Launcher] = []

    def start(*options: object, program: str = WORKER) -> tuple[Launcher, list[int]]:
        script = place.write(program.format(ready=ready.python()))
        launchers.append(place.start("--nproc-per-node", 2, *options, script))
        return launchers[-1], ready.pids(2)

    yield start
    for launcher in launchers:
        with launcher:
            pass


def test_a_run_is_stopped_as_by_a_signal(place: Place, live: Live) -> None:
    """Also one that is paused."""
    launcher, pids = live()
    assert phalanx_(place, "pause").out.endswith(": 2 workers paused; phalanx resume continues\n")
    done = phalanx_(place, "stop")
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(rf"\S+: stopped: phalanx stop \({BY}\)\n", done.out)
    ended = launcher.end()
    assert ended.status == 128 + signal.SIGTERM
    assert re.search(rf"^phalanx: phalanx stop \({BY}\): stopping the workers \(at most 30 s;", ended.err, re.MULTILINE)
    assert re.search(rf"cause +: phalanx stop \({BY}\)", phalanx_(place, "report").out)
    assert not wait_gone(pids)
    again = phalanx_(place, "stop")
    assert again.status == 1
    assert "is running; the latest is" in again.err


def test_a_stop_now_kills_who_ignores_sigterm(place: Place, live: Live) -> None:
    launcher, pids = live(program="import signal; signal.signal(15, signal.SIG_IGN)\n" + WORKER)
    done = phalanx_(place, "stop", "--now")
    assert done.status == 0
    ended = launcher.end()
    assert ended.status == 128 + signal.SIGKILL
    assert "killing the workers" in ended.err
    assert not wait_gone(pids)


def test_a_restart_is_another_attempt(place: Place, ready: Ready, live: Live) -> None:
    """A launcher that is stopped is named."""
    launcher, pids = live()
    launcher.send(signal.SIGSTOP)
    try:
        done = phalanx_(place, "pause")
        assert (done.status, "its launcher has not answered within 3 s" in done.err) == (1, True)
    finally:
        launcher.send(signal.SIGCONT)
    assert all(map(alive, pids))
    assert phalanx_(place, "restart").status == 0
    later = ready.pids(2)
    assert not set(pids) & set(later)
    assert phalanx_(place, "stop").status == 0
    ended = launcher.end()
    assert re.search(rf"^phalanx: ending attempt 0: phalanx restart \({BY}\)$", ended.err, re.MULTILINE)
    report = phalanx_(place, "report").out
    assert re.search(rf"attempt 0, .*: phalanx restart \({BY}\)", report)


def test_a_signal_goes_to_the_ranks_that_are_named(place: Place, live: Live) -> None:
    launcher, _ = live()
    done = phalanx_(place, "signal", "usr1", "--rank", 1)
    assert (done.status, done.err) == (0, "")
    assert done.out.endswith(": SIGUSR1 to rank 1\n")
    launcher.read_until("[1] got 1", "stdout")
    done = phalanx_(place, "signal", "10", "--rank", "0,7")
    assert (done.status, done.err) == (1, "phalanx: rank 7: no such worker runs\n")
    launcher.read_until("[0] got 0", "stdout")
    assert phalanx_(place, "signal", "SIGKILL").status == 0
    ended = launcher.end()
    assert ended.status == 128 + signal.SIGKILL
    assert re.search(rf"^phalanx: phalanx signal \({BY}\): SIGKILL to ranks 0-1$", ended.err, re.MULTILINE)


HEARTBEATS = """
import os, signal, subprocess, sys, threading
from phalanx import timer
child = subprocess.Popen(["sleep", "1000"])
timer.beat()
{ready}
threading.Event().wait()
"""


def test_a_pause_stops_all_processes_and_timers(place: Place, live: Live) -> None:
    launcher, pids = live("--hang-timeout", 3, program=HEARTBEATS)
    all_of_it = [*pids, *(child for pid in pids for child in descendants(pid))]
    assert len(all_of_it) == 4
    run = phalanx.attach(log_dir=str(place.logs))
    assert run.pause() == [0, 1]
    wait_for_states(all_of_it, "T")
    assert run.pause() == [0, 1]
    assert launcher.process.poll() is None
    assert run.resume() == [0, 1]
    wait_for_states(all_of_it, "SR")
    ended = launcher.end()  # nobody beats: after the pause, the hang timeout goes on
    assert ended.status
    assert "heartbeat" in ended.err
    assert len(re.findall(rf"phalanx pause \({BY}\): the workers are paused until phalanx resume", ended.err)) == 1
    assert re.search(rf"phalanx resume \({BY}\): the workers go on", ended.err)
    assert not wait_gone(all_of_it)


def test_a_run_that_ends_is_neither_paused_nor_restarted(place: Place, live: Live) -> None:
    launcher, pids = live(program="import signal; signal.signal(15, signal.SIG_IGN)\n" + WORKER)
    run = phalanx.attach(log_dir=str(place.logs))
    with pytest.raises(RuntimeError, match="its workers are not paused"):
        run.resume()
    run.stop()
    launcher.read_until("once more to kill them")
    done = phalanx_(place, "pause")
    assert done.status == 1
    assert "they cannot be paused now" in done.err
    done = phalanx_(place, "restart")
    assert done.status == 1
    assert "no other attempt follows" in done.err
    assert run.wait(0) is None
    run.stop(now=True)
    assert run.wait(TIMEOUT) == "stopped"
    assert "are paused" not in launcher.end().err
    assert not wait_gone(pids)


def test_nobody_stays_paused_when_the_launcher_is_killed(place: Place, live: Live) -> None:
    launcher, pids = live(program=HEARTBEATS)
    all_of_it = [*pids, *(child for pid in pids for child in descendants(pid))]
    assert phalanx.attach(log_dir=str(place.logs)).pause() == [0, 1]
    launcher.process.kill()
    launcher.process.wait()
    assert not wait_gone(all_of_it)
    done = phalanx_(place, "resume")
    assert done.status == 1
    assert "(lost)" in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process takes root")
def test_the_run_of_another_user_is_refused(place: Place, live: Live) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # pytest's own is its user's alone
        Path(shared).chmod(0o755)
        place.logs = Path(shared) / "logs"
        launcher, pids = live("--log-mode", "755")
        (folder,) = place.logs.iterdir()
        run = phalanx.attach(folder.name, log_dir=str(place.logs))
        assert len(run.status()) == 1
        why = f"{folder.name}: it belongs to user root: only that user, and root, can ask its launcher"
        assert refusal_of_another_user(run.pause) == why
        assert refusal_of_another_user(lambda: phalanx.attach(folder.name, log_dir=str(place.logs)).stop()) == why
        assert all(map(alive, pids))
        run.stop()
        launcher.end()
        assert not wait_gone(pids)


def test_attach_refuses_what_does_not_run(place: Place) -> None:
    with pytest.raises(LookupError, match="there are no runs in"):
        phalanx.attach(log_dir=str(place.logs))
    script = place.write("pass")
    assert place.run(script).status == 0
    (folder,) = place.logs.iterdir()
    with pytest.raises(LookupError, match="has ended \\(succeeded\\); see phalanx report"):
        phalanx.attach(folder.name, log_dir=str(place.logs))
    assert not (folder / "control.sock").exists()
    assert json.loads((folder / "run.json").read_text())["state"] == "succeeded"
