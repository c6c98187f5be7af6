"""`phalanx run --sample`: the file of samples, and which ranks are slow."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._run.samples import SampleFile, Slow, StepTime, Stragglers
from tests.support.command import Place
from tests.support.disks import fill, small, until
from tests.support.helpers import Gate, Ready

if TYPE_CHECKING:
    from pathlib import Path

# --- who is slow: scripts of samples, 5 s apart

EVERY = 5.0


def told(stragglers: Stragglers, *medians: dict[int, float], steps: int = 4, age: float = 1.0, attempt: int = 0) -> Any:
    """Return who is found at which sample. ``medians``: of each sample, by rank. ``steps``: from one to the next."""
    found = {}
    for number, sample in enumerate(medians):
        times = {rank: StepTime(median, 10 + steps * number, age) for rank, median in sample.items()}
        slow = stragglers.add(number * EVERY, attempt, times)
        if slow:
            found[number * EVERY] = slow
    return found


EVEN = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.2}
ONE = {**EVEN, 2: 2.0}
WITHOUT = {rank: median for rank, median in EVEN.items() if rank != 2}


def test_a_rank_that_is_slow_for_thirty_seconds_is_found() -> None:
    stragglers = Stragglers()
    found = told(stragglers, *[ONE] * 10)
    assert found == {30.0: [Slow(2, 2.0, 30.0)]}
    assert stragglers.slow == {2: 2.0}


def test_one_that_is_found_is_slow_as_long_as_it_is() -> None:
    stragglers = Stragglers()
    assert list(told(stragglers, *[ONE] * 7, EVEN)) == [30.0]
    assert stragglers.slow == {}
    assert list(told(stragglers, *[ONE] * 7)) == []  # it was said in this attempt
    assert stragglers.slow == {2: 2.0}
    assert list(told(stragglers, *[ONE] * 7, attempt=1)) == [30.0]


def test_one_whose_short_step_delays_all_is_found() -> None:
    assert list(told(Stragglers(), *[{0: 0.05, 1: 0.05, 2: 0.1}] * 10, steps=50)) == [30.0]


def test_ranks_that_become_slow_together_are_found_together() -> None:
    both = {**dict.fromkeys(range(6), 1.0), 4: 1.6, 5: 3.0}
    (slow,) = told(Stragglers(), *[both] * 9).values()
    assert [(one.rank, one.ratio) for one in slow] == [(4, 1.6), (5, 3.0)]


@pytest.mark.parametrize(
    "medians, facts",
    [
        ([EVEN] * 20, {}),
        ([{**EVEN, 2: 1.49}] * 20, {}),
        ([*[ONE] * 6, EVEN] * 5, {}),  # never for 30 s
        ([{0: 1.0, 1: 2.0}] * 20, {}),  # of two ranks nobody can say which one is slow
        ([{0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}] * 20, {}),
        ([{0: 0.0, 1: 0.0, 2: 1.0}] * 20, {}),
        ([{0: 0.001, 1: 0.001, 2: 0.004}] * 20, {"steps": 50}),  # all wait for most of their time
        ([ONE] * 20, {"steps": 0}),  # they take no step
        ([ONE] * 20, {"age": 31.0}),
        ([{}] * 20, {}),
    ],
)
def test_nobody_else_is_slow(medians: list[dict[int, float]], facts: dict[str, Any]) -> None:
    stragglers = Stragglers()
    assert told(stragglers, *medians, **facts) == {}
    assert stragglers.slow == {}


def test_time_in_which_nothing_is_known_does_not_count() -> None:
    """It stands at a breakpoint in every second sample."""
    assert list(told(Stragglers(), *[ONE, WITHOUT] * 10)) == [60.0]


def test_one_long_pause_of_the_launcher_is_no_evidence() -> None:
    stragglers = Stragglers()
    times = {rank: StepTime(median, 10, 1.0) for rank, median in ONE.items()}
    later = {rank: StepTime(median, 4000, 1.0) for rank, median in ONE.items()}
    assert [stragglers.add(now, 0, each) for now, each in ((0.0, times), (3600.0, later))] == [[], []]


# --- the file


def sample(number: int) -> dict[str, Any]:
    return {"number": number, "ranks": list(range(20))}


def test_a_full_file_has_older_samples_further_apart(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SampleFile(str(path), pytest.fail, most=4096)
    for number in range(500):
        file.write(sample(number))
        assert path.stat().st_size <= 4096
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    apart = [later - earlier for earlier, later in itertools.pairwise(numbers)]
    assert (numbers[0], numbers[-1], apart[-1]) == (0, 499, 1)
    assert apart == sorted(apart, reverse=True)
    assert os.listdir(tmp_path) == [path.name]


def test_a_line_that_a_launcher_has_not_ended_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"number": 0}\n{"num')
    SampleFile(str(path), pytest.fail).write(sample(1))
    assert path.read_bytes().startswith(b'{"number": 0}\n{"num\n{"number":1')


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / "samples.jsonl").symlink_to("other")
    said: list[str] = []
    file = SampleFile(str(tmp_path / "samples.jsonl"), said.append)
    file.write(sample(1))
    file.write(sample(2))
    assert len(said) == 1
    assert said[0].startswith("samples.jsonl is not complete: ")
    assert (tmp_path / "other").read_text() == "mine"


# --- the command

STEPS = """\
import os, time
from phalanx import timer
for step in range(1, 11):
    timer.progress(step)
    time.sleep(0.01)
{ready}
{gate}
"""

LINE = {"time", "attempt", "ranks", "cpu", "memory", "threads", "fds", "step", "step_time", "beat", "gpu", "gpu_memory"}


def samples_of(place: Place) -> list[dict[str, Any]]:
    found = [path.read_text() for path in place.logs.glob("*/samples.jsonl")]
    return [json.loads(line) for text in found for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.long
def test_samples_are_in_the_runs_folder(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(STEPS.format(ready=ready.python(), gate=gate.python()))
    with place.start("--sample", "0.05", "--nproc-per-node", 2, script) as launcher:
        ready.wait(2)
        until(lambda: any(line["step"] == [10, 10] for line in samples_of(place)))
        gate.open(2)
        assert launcher.end().status == 0
    last = next(line for line in samples_of(place) if line["step"] == [10, 10])
    assert last.keys() == LINE
    assert (last["attempt"], last["ranks"], last["threads"]) == (0, [0, 1], [1, 1])
    for field in LINE - {"time", "attempt"}:
        assert len(last[field]) == 2
    assert all(0.01 <= seconds < 60 for seconds in last["step_time"])
    assert all(3 <= count < 100 for count in last["fds"])
    assert all(memory > 1 << 20 for memory in last["memory"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--sample", "0"), ()])
def test_there_are_none_if_nobody_wants_them_or_so_soon(place: Place, options: tuple[str, ...]) -> None:
    assert place.run(*options, place.write("pass")).status == 0
    assert list(place.logs.glob("*/samples.jsonl*")) == []
    assert len(list(place.logs.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    with small(tmp_path, kib=1024, inodes=200) as disk:
        path = disk / "samples.jsonl"
        file = SampleFile(str(path), said.append)
        file.write(sample(0))
        fill(disk)
        for number in range(1, 1000):  # what is left of the last block takes some
            file.write(sample(number))
        lines = path.read_text().splitlines(keepends=True)
    assert len(said) == 1
    assert said[0].startswith("samples.jsonl is not complete: No space left on device")
    assert [json.loads(line)["number"] for line in lines] == list(range(len(lines)))


COUPLED = """\
import os, socket, sys, time
from contextlib import nullcontext
from phalanx import timer

rank, slow, couples, waits = int(os.environ["RANK"]), *map(int, sys.argv[1:])
address = "127.0.0.1", int(os.environ["MASTER_PORT"])
peers = []
if couples and rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(3)]
elif couples:
    while not peers:
        try:
            peers = [socket.create_connection(address)]
        except OSError:
            time.sleep(0.1)

def barrier():
    for receives in (rank == 0, rank != 0):
        for peer in peers:
            peer.recv(1) if receives else peer.sendall(b"x")

step = 0
while True:
    time.sleep(0.5 if rank == slow else 0.25)
    if couples:
        with timer.waiting() if waits else nullcontext():
            barrier()
    step += 1
    timer.progress(step)
"""

NAMED = re.compile(r"^phalanx: (.*is slow.*|.*are slow.*)$", re.MULTILINE)


def events_of(place: Place, run_id: str, name: str) -> list[dict[str, Any]]:
    """Return the events of this name of a run."""
    lines = [line for path in place.logs.glob(f"{run_id}_*/events.jsonl") for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["name"] == name]


@pytest.mark.long
def test_a_rank_at_half_speed_is_named_within_a_minute(place: Place) -> None:
    """By itself, and where all wait for it in each step; unless that is not taken out: then all are equally slow."""
    script = place.write(COUPLED)
    runs = {"alone": (2, 0, 0), "coupled": (2, 1, 1), "unsaid": (2, 1, 0), "even": (-1, 0, 0), "all": (-1, 1, 1)}
    begun = time.monotonic()
    with ExitStack() as held:
        launchers = {
            name: held.enter_context(place.start("--nproc-per-node", 4, "--run-id", name, script, *arguments))
            for name, arguments in runs.items()
        }
        found: dict[str, list[dict[str, Any]]] = {}
        while not (found and all(found.values())):
            assert time.monotonic() < begun + 60
            time.sleep(0.5)
            found = {name: events_of(place, name, "rank.slow") for name in ("alone", "coupled")}
        for launcher in launchers.values():
            launcher.send(signal.SIGTERM)
        done = {name: launcher.end() for name, launcher in launchers.items()}
    named = {name: NAMED.findall(one.err) for name, one in done.items()}
    said = rf"rank 2 \(host {os.uname().nodename}\) is slow: (1\.[89]|2\.[012]) x the median step for 3\d s"
    for name in ("alone", "coupled"):
        (line,), (event,) = named.pop(name), found[name]
        assert re.fullmatch(said, line)
        assert (event["rank"], event["host"], event["attempt"]) == (2, os.uname().nodename, 0)
        assert 1.7 < event["ratio"] < 2.3
    assert named == {"unsaid": [], "even": [], "all": []}
