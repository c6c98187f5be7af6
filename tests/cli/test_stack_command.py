"""`phalanx stack` as a person uses it: which run, which ranks, what is shown, and that nothing happens to the run."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from phalanx._runs import record
from tests.runs.test_runs import put, wait_for_record
from tests.support.command import Done, Launcher, Place, read_until, terminal
from tests.support.helpers import PYTHON, TIMEOUT, Gate, Ready, alive, wait_gone
from tests.support.records import write

# `phalanx stack`, in which a person waits longer for the ranks: on a machine that is busy not all are in time.
PATIENT = "from phalanx.cli import main, stack; stack._PATIENCE = 15.0; main()"
STACK = (sys.executable, "-c", PATIENT, "stack")


def stack(place: Place, *options: object) -> Done:
    """What `phalanx stack` says."""
    return place.program(*STACK, "--log-dir", place.logs, *options)


# To say that it is there and to stay there is one line, without a call of Python: whenever one looks, it is there.
SCRIPT = """\
import os, socket, sys, threading
address, gate = sys.argv[1:]
rank = int(os.environ["RANK"])
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

def all_reduce():
    sock.sendto(b"here", address), open(gate, "rb", 0).read(1)

def read_batch():
    sock.sendto(b"here", address), open(gate, "rb", 0).read(1)

def idle():
    up.release(), lock.acquire()

if rank == 2:
    up, lock = threading.Lock(), threading.Lock()
    up.acquire(), lock.acquire()
    for _ in range(3):
        threading.Thread(target=idle, daemon=True).start()
        up.acquire()
read_batch() if rank == 3 else all_reduce()
"""

SHOWN = """\
3 of 4 ranks are in all_reduce (train.py:7); rank 3 is in read_batch (train.py:10)

ranks 0-1:
    all_reduce  train.py:7
    <module>    train.py:21

rank 2:
  main thread:
    all_reduce  train.py:7
    <module>    train.py:21
  3 threads, alike:
    idle              train.py:13
    run               threading.py:N
    _bootstrap_inner  threading.py:N
    _bootstrap        threading.py:N

rank 3:
    read_batch  train.py:10
    <module>    train.py:21
"""


def start(place: Place, ready: Ready, gate: Gate, *options: object, n: int = 4, name: str = "train.py") -> Launcher:
    """A run whose ranks are where they are going to stay, or are about to be there, and whose record is written."""
    launcher = place.start(*options, "--nproc-per-node", n, place.write(SCRIPT, name), ready.address, gate.address)
    try:
        ready.wait(n)
        wait_for_record(place)
    except BaseException:
        launcher.process.kill()
        raise
    return launcher


@pytest.mark.long
@pytest.mark.each_python
def test_where_the_ranks_are(place: Place, ready: Ready, gate: Gate) -> None:
    with start(place, ready, gate, "--run-id", "night") as launcher:
        for _ in range(2):
            done = stack(place)
            assert (done.status, done.err) == (0, "")
            assert re.sub(r"(threading.py):\d+", r"\1:N", done.out) == SHOWN
        done = stack(place, "night", "--rank", 3, "--rank", "1")
        assert done.status == 0
        assert [f"rank {rank}:\n" in done.out for rank in range(4)] == [False, True, False, True]
        (run,) = place.logs.iterdir()
        done = place.program(*STACK, run, "--rank", 0)
        assert (done.status, "rank 0:\n" in done.out) == (0, True)
        done = stack(place, "--rank", 4, "--rank", 7)
        assert (done.status, done.out) == (2, "")
        assert done.err.endswith("Error: --rank: this run has no rank 4, 7\n")
        gate.open(4)
        assert launcher.end().status == 0
        assert not list(place.logs.glob("*/control.sock"))
    assert not list(place.logs.glob("*/attempt_0/*/*.stacks"))  # nobody was sent a signal


@pytest.mark.long
def test_a_shell_between_shows_the_python_below_it(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"\n{ready.python()}; {gate.python()}", "train.py")  # in one line: it is there when it is up
    shell = place.write(f"{PYTHON} {script}\ntrue\n", "run.sh")
    with place.start("--no-python", "sh", shell) as launcher:
        ready.wait()
        wait_for_record(place)
        done = stack(place)
        assert done.status == 0
        assert done.out.startswith("rank 0 is in train.py:2\n")
        gate.open()
        assert launcher.end().status == 0


@pytest.mark.long
def test_a_rank_that_has_exited(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"import os\n{ready.python()}\nif os.environ['RANK'] == '1': {gate.python()}")
    with place.start("--nproc-per-node", 2, script) as launcher:
        pids = ready.pids(2)
        wait_for_record(place)
        (record,) = place.logs.glob("*/run.json")
        ranks = json.loads(record.read_text())["attempts"][0]["ranks"]
        assert {rank["pid"] for rank in ranks} == set(pids)
        assert wait_gone([ranks[0]["pid"]]) == set()
        done = stack(place)
        assert done.status == 0
        assert "; rank 0 has ended\n" in done.out
        assert "\nrank 0: no Python stack: it has exited\n" in done.out
        done = stack(place, "--rank", 0)
        assert (done.status, done.err) == (1, "")
        gate.open()
        assert launcher.end().status == 0


@pytest.mark.long
def test_few_descriptors_silence_nobody(place: Place, ready: Ready, gate: Gate) -> None:
    count = 24
    with start(place, ready, gate, n=count) as launcher:
        done = place.program("sh", "-c", 'ulimit -n 48; exec "$@"', "sh", *STACK, "--log-dir", place.logs)
        assert (done.status, done.err) == (0, "")
        assert done.out.startswith(
            f"{count - 1} of {count} ranks are in all_reduce (train.py:7); rank 3 is in read_batch"
        )
        gate.open(count)
        assert launcher.end().status == 0


@pytest.mark.long
def test_binaries_show_facts_and_live(place: Place) -> None:
    with place.start("--no-python", "sh", "-c", "echo up; exec cat /dev/zero >/dev/null") as run:
        run.read_until("[0] up\n", "stdout")
        wait_for_record(place)
        done = stack(place)
        assert (done.status, done.err) == (1, "")
        assert done.out.startswith("rank 0 shows no Python stack (it is no Python program)\n")
        assert "rank 0: no Python stack: it is no Python program\n  Name: " in done.out
        (record,) = place.logs.glob("*/run.json")
        assert all(alive(rank["pid"]) for rank in json.loads(record.read_text())["attempts"][0]["ranks"])
        run.send(signal.SIGTERM)
        assert run.end().status == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_pid_that_is_anothers_by_now_is_left_alone(place: Place, ready: Ready, gate: Gate) -> None:
    """The record says when the rank's process started; one with another start is not that one."""
    with start(place, ready, gate, n=1) as launcher:
        (folder,) = place.logs.iterdir()
        run = record.read(str(folder))
        (rank,) = run.attempts[0].ranks
        for started in (rank.pid_started + 1, 0):
            ranks = [rank.replace(pid_started=started)]
            attempts = [run.attempts[0].replace(ranks=ranks)]
            write(folder, run.replace(attempts=attempts))
            done = stack(place)
            assert done.status == 1
            assert done.out.startswith("rank 0 has ended\n")
        gate.open()
        assert launcher.end().status == 0
    assert not list(place.logs.glob("*/attempt_0/0/*.stacks"))


@pytest.mark.long
def test_the_latest_is_the_default_and_a_terminal_has_colours(place: Place, ready: Ready, gate: Gate) -> None:
    with start(place, ready, gate, n=1) as launcher:
        place.run("--no-python", "true")
        place.env.pop("NO_COLOR", None)
        with terminal() as (ours, theirs):
            command = [*STACK, "--log-dir", str(place.logs)]
            with Launcher(command, cwd=place.folder, env={**place.env, "TERM": "xterm"}, stdout=theirs) as asking:
                text = read_until(ours, "train.py:21")
                assert asking.process.wait(TIMEOUT) == 0
        assert "\x1b[1mrank 0 is in all_reduce (train.py:7)\x1b[0m" in text
        assert "\x1b[36m\x1b[1mrank 0:\x1b[0m" in text
        assert "\n    all_reduce  train.py:7\r" in text
        gate.open()
        launcher.end()


# --- runs that cannot be asked


@pytest.mark.long
def test_runs_that_cannot_be_asked_have_no_stacks(place: Place) -> None:
    assert stack(place) == (1, "", f"Error: there are no runs in {place.logs}\n")
    place.run("--no-python", "--run-id", "night", "true")
    (run,) = place.logs.iterdir()
    why = f"no run in {place.logs} is running; the latest is {run.name} (succeeded)"
    assert stack(place) == (1, "", f"Error: {why}\n")
    why = f"{run.name} has ended (succeeded); see phalanx report {run.name}"
    assert stack(place, "night") == (1, "", f"Error: {why}\n")
    put(place.logs, "elsewhere", boot_id="another", host="node7")
    done = stack(place, "elsewhere")
    assert done.err == "Error: elsewhere runs on node7, in another container or boot of it: ask there\n"
    put(place.logs, "empty", attempts=[])
    assert stack(place, "empty").err == "Error: empty has no workers yet\n"
    (place.logs / "empty" / "run.json").write_text("{")
    done = stack(place, "empty")
    assert (done.status, done.err.startswith("Error: empty cannot be asked: ")) == (1, True)
