"""`phalanx stack` on one host of a job: where the ranks of all hosts are."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import SOON, Agent, EtcdJob, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.hosts import Hosts

pytestmark = pytest.mark.long

# To say that it is there and to stay there is one line, without a call of Python: whenever one looks, it is there.
WORKER = """
import os, sys

def read_batch():
    os.write(1, b"there\\n"), open(sys.argv[1], "rb", 0).read(1)

def all_reduce():
    os.write(1, b"there\\n"), open(sys.argv[1], "rb", 0).read(1)

read_batch() if os.environ["RANK"] == "3" else all_reduce()
"""


class Question:
    """`phalanx stack` on a host, with the time that a busy machine takes for it."""

    def __init__(self, job: Job, number: int, *options: str) -> None:
        home = str(job.folder / f"home{number}")
        env = {**os.environ, "HOME": home, "XDG_STATE_HOME": home}
        command = [*job.hosts.on(number), sys.executable, "-m", "phalanx", "stack", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=job.folder
        )

    def answer(self, code: int = 0) -> tuple[str, str]:
        """What it writes to stdout and to stderr."""
        out, err = self.process.communicate(timeout=SOON)
        assert self.process.returncode == code, (out, err)
        return out, err


def started(one: Job) -> list[Agent]:
    """Start a job of three hosts, whose ranks are where they are going to stay then."""
    (one.folder / "train.py").write_text(WORKER)
    os.mkfifo(one.end)
    agents = one.start(1, 2, 3)
    for agent in agents:
        agent.wait_for("there", 2)
    return agents


def ask(one: Job, numbers: Sequence[int], pattern: str, *options: str, err: str = "") -> None:
    """Ask on hosts, on all at once, until each shows that: on a busy machine, not every rank is read in time."""
    until = time.monotonic() + SOON
    while True:
        said = [question.answer() for question in [Question(one, number, *options) for number in numbers]]
        if all(re.fullmatch(pattern, out, re.DOTALL) for out, _ in said):
            assert {what for _, what in said} == {err}
            return
        assert time.monotonic() < until, said


def everywhere(one: Job, host: str) -> str:
    """What is shown where rank 3 is on that host."""
    script = re.escape(str(one.folder / "train.py"))
    return (
        rf"5 of 6 ranks are in all_reduce \(train.py:8\); rank 3 on host {host} is in read_batch \(train.py:5\)\n\n"
        rf"ranks 0-2, 4-5 on hosts h\d, h\d, h\d:\n    all_reduce  {script}:8\n    <module>    {script}:10\n\n"
        rf"rank 3 on host {host}:\n    read_batch  {script}:5\n    <module>    {script}:10\n"
    )


def test_where_the_ranks_of_all_hosts_are(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", "static")
    one.conf.append("lease_ttl=30")  # an agent that is stopped is not lost
    agents = started(one)
    ask(one, [3, 1], everywhere(one, "h2"))
    two = r"rank 1 on host h1 is in all_reduce \(.*\); rank 3 on host h2 is in read_batch \(.*"
    ask(one, [1], two, "--rank", "3", "--rank", "1")
    ask(one, [3], r"both ranks are in all_reduce \(train.py:8\)\n\nranks 4-5:.*", "--local")
    _, err = Question(one, 2, "--rank", "7").answer(2)
    assert err.endswith("Error: --rank: this run has no rank 7\n")
    _, err = Question(one, 2, "--rank", "1", "--local").answer(2)
    assert err.endswith("Error: --rank: this machine has no rank 1\n")

    os.kill(agents[1].launcher(), signal.SIGSTOP)
    on_its_own = Question(one, 2)
    why = "its agent has not answered within 5.0s"
    rest = rf"4 of 6 ranks are in all_reduce \(.*\); ranks 2-3 on host h2 show no Python stack \({why}\)\n"
    ask(one, [1], rf"{rest}.*\nranks 2-3 on host h2: no Python stack: {why}\n")
    alone = "phalanx: these are the ranks of this machine alone: its launcher has not answered within 3 s\n"
    out, err = on_its_own.answer()
    shown = " ".join(re.findall(r"(?m)^ranks? ([\d, -]+):", out))
    assert (set(re.findall(r"\d+", shown)), err) == ({"2", "3"}, alone)
    os.kill(agents[1].launcher(), signal.SIGCONT)
    ask(one, [2], everywhere(one, "h2"))

    assert len([*one.folder.rglob("control.sock")]) == len(agents)
    os.kill(agents[2].launcher(), signal.SIGINT)
    assert [agent.end() for agent in agents] == [130] * 3
    assert [*one.folder.rglob("control.sock")] == []


def keys(one: EtcdJob) -> list[str]:
    """The keys that the etcd has."""
    (answer,) = one.ask("kv/range", json.dumps({"key": "AA==", "range_end": "AA==", "keys_only": True}))
    found = [base64.b64decode(each["key"]).decode() for each in answer["kvs"]]
    assert any(key.endswith("/job/state") for key in found)
    return found


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="the extra `etcd` is not installed")
def test_an_etcd_keeps_nothing_of_a_look_and_may_be_away(job: Callable[..., EtcdJob]) -> None:
    one = job("3")
    agents = started(one)
    # Ranks are given in the order of coming: which host has rank 3 is seen.
    number = next(agent.number for agent in agents if "ranks 2-3" in agent.said)
    ask(one, [1, 2, 3], everywhere(one, f"h{number}"))
    until = time.monotonic() + SOON
    while any("look" in key for key in keys(one)):
        assert time.monotonic() < until

    one.etcd.members[0].signal(signal.SIGSTOP)
    try:
        agents[number - 1].wait_for("does not answer .*; the workers go on")
        alone = "phalanx: these are the ranks of this machine alone: the store does not answer\n"
        ask(one, [number], r"rank 2 is in all_reduce \(.*\); rank 3 is in read_batch \(.*", err=alone)
    finally:
        one.etcd.members[0].signal(signal.SIGCONT)


GUEST = """
import sys
from phalanx.rendezvous import ManyMachinesRendezvous, RendezvousParameters

where, rank = sys.argv[1:]
params = RendezvousParameters("static", where, "none", 2, 2, rank=int(rank))
handler = ManyMachinesRendezvous(params, nproc=3, insecure=True)
try:
    print(handler.next_rendezvous().rank, flush=True)
    sys.stdin.read()
finally:
    handler.shutdown()
"""


def test_an_agent_that_shows_no_stacks_is_named(hosts: Hosts, hosted_job: Callable[..., Job]) -> None:
    where = ["--node-rank", "0", "--master-addr", hosts.address(1), "--master-port", "29500", "--insecure"]
    one = hosted_job("2", lambda _: where)
    one.env.clear()
    (one.folder / "train.py").write_text(WORKER)
    os.mkfifo(one.end)
    command = [*hosts.on(2), sys.executable, "-c", GUEST, f"{hosts.address(1)}:29500", "1"]
    agents = one.start(1)
    guest = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        agents[0].wait_for("there", 2)
        none = r"ranks 2-4 on host h2 show no Python stack \(its agent is a program that shows no stacks\)"
        ask(one, [1], rf"2 of 5 ranks are in all_reduce \(train.py:8\); {none}\n.*")
        said, _ = guest.communicate("", timeout=SOON)
        assert (guest.returncode, said) == (0, "1\n")
    finally:
        guest.kill()
        guest.communicate()
