"""What the report of a hang says, for each way to hang that people meet: which rank, and where."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator

import pytest

from tests.support.command import Launcher, Place
from tests.support.disks import Disk
from tests.support.helpers import Gate, Ready, wait_gone
from tests.support.timer_workers import wait_asleep
from tests.support.workers import ROOT

# Ranks 0, 1 and 2 wait for rank 3, which hangs in its own way. They wait in one line, wherever they are looked at: by
# then they are there, however long each took to start.
PROGRAM = """
import os, sys, threading
from phalanx import timer

RANK, GATE = int(os.environ["RANK"]), {gate!r}

def wait():
    return os.read(os.open(GATE, os.O_RDONLY), 1)

def all_reduce():
    return wait()

{stuck}

{ready}
if RANK in {late}:
    {go}
if RANK == 3:
    hang()
else:
    with timer.expires(after={after}, scope="step"):
        all_reduce()
"""

# As `phalanx run`, but that on a machine that is busy the ranks, and py-spy, have more time for stacks.
PATIENT = """
import os
from phalanx._stacks import snapshot
from phalanx.cli import main
from tests.support.waits import wait_long_for_stacks
wait_long_for_stacks()
snapshot.WAIT = float(os.environ.pop("WAIT"))
main()
"""

FIRST = "    with timer.expires(after=0.8, scope='step'):\n"

WITH_GIL = f"""
def count():
    return sum(range(10 ** 15))

def hang():
{FIRST}        count()
"""

IMPORT = f"""
def load():
    import never

def hang():
    with open(f"{{os.path.dirname(__file__)}}/never.py", "w") as file:
        file.write("import os\\nos.read(os.open(os.environ['NEVER'], os.O_RDONLY), 1)\\n")
    os.environ["NEVER"] = GATE
    threading.Thread(target=__import__, args=("never",), daemon=True).start()
    while "never" not in sys.modules:
        pass
{FIRST}        load()
"""

CHILD = """
import subprocess

def hang():
    program = (
        "import os, threading\\nfrom phalanx import timer\\n"
        "def fetch():\\n threading.Event().wait()\\n"
        "with timer.expires(after=0.8, scope='step'):\\n fetch()\\n"
    )
    subprocess.run([sys.executable, "-c", program])
"""

CHILDREN = """
import subprocess

def hang():
    program = (
        "import sys, threading\\nfrom phalanx import timer\\n"
        "def fetch():\\n threading.Event().wait()\\n"
        "def load():\\n threading.Event().wait()\\n"
        "with timer.expires(after=0.8, scope=sys.argv[1]):\\n globals()[sys.argv[1]]()\\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, scope]) for scope in ("fetch", "load")]
    children[0].wait()
"""

LOADER = f"""
import multiprocessing

def read_batch(queue):
    wait()

def next_batch(queue):
    return queue.get()

def hang():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    loader = context.Process(target=read_batch, args=(queue,))
    loader.start()
    with open(f"/proc/{{loader.pid}}/stat") as file:
        while file.read().split()[2] != "S":
            file.seek(0)
{FIRST}        next_batch(queue)
"""

THREAD = """
def fetch():
    threading.Event().wait()

def prefetch():
    with timer.expires(after=0.8, scope='step'):
        fetch()

def go_on():
    while True:
        pass

def hang():
    threading.Thread(target=prefetch, daemon=True).start()
    go_on()
"""

SLEEPER = f"""
def save():
    with open(os.environ["DISK"] + "/checkpoint", "wb", buffering=0) as file:
        file.write(bytes(1 << 20))

def hang():
{FIRST}        save()
"""

FINISHED = """
def hang():
    pass
"""

PAUSED = f"""
import signal

def compute():
    os.kill(os.getpid(), signal.SIGSTOP)

def hang():
{FIRST}        compute()
"""

THREADS = f"""
def take(lock):
    lock.acquire()

def hang():
    for _ in range(130):
        threading.Thread(target=wait, daemon=True).start()
    lock = threading.Lock()
    lock.acquire()
{FIRST}        take(lock)
"""


@contextlib.contextmanager
def started(place: Place, ready: Ready, gate: Gate, stuck: str) -> Iterator[Launcher]:
    """A run of four ranks, of which rank 3 goes to hang when the others wait for it, or where it returns, before."""
    returns = stuck == FINISHED
    with Gate(place.folder / "go") as go:
        program = PROGRAM.format(
            stuck=stuck,
            ready=ready.python("f'{RANK} {os.getpid()}'"),
            gate=gate.address,
            go=go.python(),
            late=(0, 1, 2) if returns else (3,),
            after=1.2 if returns else 60,
        )
        command = [sys.executable, "-c", PATIENT, "run", "--log-dir", str(place.logs), "--nproc-per-node", "4"]
        command.append(place.write(program, "train.py"))
        path = os.pathsep.join([ROOT, *filter(None, [place.env.get("PYTHONPATH")])])
        # Who waits for a disk gives no stack of its own: there, all of the time is spent.
        env = place.env | {"PYTHONPATH": path, "WAIT": "4" if stuck == SLEEPER else "8"}
        with Launcher(command, cwd=place.folder, env=env) as launcher:
            pids = {int(rank): int(pid) for rank, pid in map(str.split, ready.wait(4))}
            if returns:
                assert wait_gone([pids[3]]) == set()
                go.open(3)
            else:
                for rank in range(3):
                    wait_asleep(pids[rank])
                go.open()
            yield launcher


def told(place: Place, ready: Ready, gate: Gate, stuck: str) -> tuple[str, str]:
    """Of a run that ends by a hang: the rank that its report names first, and the lines on what is known of it."""
    with started(place, ready, gate, stuck) as launcher:
        done = launcher.end()
    assert done.status != 0
    return first_of(done.err)


def first_of(report: str) -> tuple[str, str]:
    found = re.search(r"\n  rank      : (\d+) ", report)
    error = re.search(r"\n  error     : (Hang: .*)\n  detail    : .*\n((?:              .*\n)+)", report)
    assert found is not None, report
    assert error is not None, report
    return found[1], error[1] + "\n" + "\n".join(line.strip() for line in error[2].splitlines())


@pytest.mark.long
@pytest.mark.parametrize(
    "stuck, where",
    [
        (WITH_GIL, r"rank 3 is in count \(train\.py:\d+\)"),
        (IMPORT, r"rank 3 is in load \(train\.py:\d+\)"),
        (CHILD, r"rank 3 is in fetch \(<string>:4\)"),
        (LOADER, r"rank 3 is in next_batch \(train\.py:\d+\)"),
        (THREAD, r"rank 3 is in fetch \(train\.py:\d+\)"),
        (PAUSED, r"rank 3 is in compute \(train\.py:\d+\), stopped, by SIGSTOP or a debugger"),
        (THREADS, r"rank 3 is in take \(train\.py:\d+\)"),
    ],
    ids=["gil", "import", "child", "loader", "thread", "paused", "130-threads"],
)
def test_a_rank_that_hangs_is_named_and_where(place: Place, ready: Ready, gate: Gate, stuck: str, where: str) -> None:
    rank, text = told(place, ready, gate, stuck)
    assert rank == "3"
    assert text.startswith("Hang: 'step' (")
    assert re.search(rf"3 of 4 ranks wait in wait \(train\.py:\d+\); {where}$", text, re.MULTILINE), text
    if stuck in (CHILD, LOADER):
        other = "hang" if stuck is CHILD else r"wait"
        assert re.search(rf"^process \d+ of the same rank is in {other} \(train\.py:\d+\)$", text, re.MULTILINE), text


@pytest.mark.long
def test_the_report_of_two_hung_children_places_the_right_one(place: Place, ready: Ready, gate: Gate) -> None:
    rank, text = told(place, ready, gate, CHILDREN)
    assert rank == "3"
    scope = text.split("'")[1]
    assert re.search(rf"rank 3 is in {scope} \(<string>:\d+\)$", text, re.MULTILINE), text


@pytest.mark.long
def test_a_rank_that_waits_for_a_disk_is_named_and_where(place: Place, ready: Ready, gate: Gate, disk: Disk) -> None:
    place.env["DISK"] = str(disk.folder)
    disk.freeze()
    with started(place, ready, gate, SLEEPER) as launcher:
        launcher.read_until("SIGKILL\n", "stderr")
        disk.thaw()  # before that not even SIGKILL ends it
        done = launcher.end()
    rank, text = first_of(done.err)
    assert rank == "3"
    where = r"rank 3 is in save \(train\.py:\d+\), in an uninterruptible sleep"
    assert re.search(rf"3 of 4 ranks wait in wait \(train\.py:\d+\); {where}$", text, re.MULTILINE), text


@pytest.mark.long
def test_a_rank_that_has_returned_is_what_the_others_wait_for(place: Place, ready: Ready, gate: Gate) -> None:
    rank, text = told(place, ready, gate, FINISHED)
    assert rank in "012"
    known = r"3 of 4 ranks, rank \d among them, are in wait \(train\.py:\d+\); rank 3 has ended \(exit code 0\)"
    assert re.search(known, text), text
