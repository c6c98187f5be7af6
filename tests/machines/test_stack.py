"""`phalanx stack` on one host of a job: where the ranks of all hosts are."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd
from tests.support.jobs import SOON, Agent, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.support.hosts import Hosts

pytestmark = [pytest.mark.once, pytest.mark.slow]

# To say that it is there and to stay there is one line, without a call of Python: whenever one looks, it is there.
WORKER = """
import os, sys

def read_batch():
    os.write(1, b"there\\n"), open(sys.argv[1], "rb", 0).read(1)

def all_reduce():
    os.write(1, b"there\\n"), open(sys.argv[1], "rb", 0).read(1)

read_batch() if os.environ["RANK"] == "3" else all_reduce()
"""
HEAD = "5 of 6 ranks are in all_reduce (train.py:8); rank 3 on host h2 is in read_batch (train.py:5)\n\n"
SHOWN = [
    "ranks 0-2, 4-5 on hosts h1, h2, h3:\n    all_reduce  {}:8\n    <module>    {}:10\n",
    "rank 3 on host h2:\n    read_batch  {}:5\n    <module>    {}:10\n",
]


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


def started(folder: Path, hosts: Hosts, meeting: Callable[[int], Sequence[str]], *conf: str) -> tuple[Job, list[Agent]]:
    """A job of three hosts, whose ranks are where they are going to stay."""
    one = Job(folder, hosts, "3", meeting)
    one.conf += conf
    (folder / "train.py").write_text(WORKER)
    os.mkfifo(one.end)
    try:
        agents = one.start(1, 2, 3)
        for agent in agents:
            agent.wait_for("there", 2)
    except BaseException:
        one.close()
        raise
    return one, agents


def check_everywhere(one: Job, *numbers: int) -> None:
    """See that each of these hosts, all of which ask at once, shows where all ranks are."""
    script = str(one.folder / "train.py")
    for question in [Question(one, number) for number in numbers]:
        out, err = question.answer()
        assert (out, err) == (HEAD + "\n".join(SHOWN).format(*[script] * 4), "")


def test_where_the_ranks_of_all_hosts_are(tmp_path: Path, hosts: Hosts) -> None:
    def meeting(number: int) -> list[str]:
        return ["--node-rank", f"{number - 1}", "--master-addr", hosts.address(1), "--insecure"]

    one, agents = started(tmp_path, hosts, meeting, "lease_ttl=30")  # an agent that is stopped is not lost
    try:
        check_everywhere(one, 3, 1)
        some = [Question(one, 1, *options.split()) for options in ("--rank 3 --rank 1", "--rank 7", "--local")]
        out, _ = some[0].answer()
        assert out.startswith("rank 1 on host h1 is in all_reduce (train.py:8); rank 3 on host h2 is in read_batch")
        assert some[1].answer(2)[1].endswith("Error: --rank: this run has no rank 7\n")
        out, err = some[2].answer()
        assert (out.partition("\n")[0], err) == ("both ranks are in all_reduce (train.py:8)", "")

        os.kill(agents[1].launcher(), signal.SIGSTOP)
        of_others, of_its_own = Question(one, 1), Question(one, 2)
        out, err = of_others.answer()
        why = "its agent has not answered within 5.0s"
        head = f"4 of 6 ranks are in all_reduce (train.py:8); ranks 2-3 on host h2 show no Python stack ({why})\n"
        assert (out.startswith(head), err) == (True, "")
        assert f"\nranks 2-3 on host h2: no Python stack: {why}\n" in out
        out, err = of_its_own.answer()
        assert err == "phalanx: these are the ranks of this machine alone: its agent has not answered within 3 s\n"
        assert out.startswith("rank 2 is in all_reduce (train.py:8); rank 3 is in read_batch (train.py:5)\n")
        os.kill(agents[1].launcher(), signal.SIGCONT)
        check_everywhere(one, 2)

        assert len([*tmp_path.rglob("stack.sock")]) == 3
        os.kill(agents[2].launcher(), signal.SIGINT)
        assert [agent.end() for agent in agents] == [130] * 3
        assert [*tmp_path.rglob("stack.sock")] == []
    finally:
        one.close()


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="the extra `etcd` is not installed")
def test_an_etcd_keeps_nothing_of_a_look_and_may_be_away(tmp_path: Path, hosts: Hosts) -> None:
    etcd = Etcd(1, hosts.address(4), hosts.on(4))
    where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints, "--run-id", "night"]
    try:
        etcd.start()
        one, agents = started(tmp_path, hosts, lambda _: where)
        try:
            # Ranks are given in the order of coming: which host has rank 3, is seen.
            number = next(agent.number for agent in agents if "ranks 2-3" in agent.said)
            outs = {Question(one, agent.number).answer() for agent in agents}
            assert len(outs) == 1
            head = (
                f"5 of 6 ranks are in all_reduce (train.py:8); rank 3 on host h{number} is in read_batch (train.py:5)"
            )
            assert outs.pop()[0].partition("\n")[0] == head
            until = time.monotonic() + SOON
            while any("look" in key for key in keys(one, etcd)):
                assert time.monotonic() < until

            etcd.members[0].signal(signal.SIGSTOP)
            agents[0].wait_for("does not answer .*; the workers go on")
            out, err = Question(one, agents[0].number).answer()
            assert err == "phalanx: these are the ranks of this machine alone: the store does not answer\n"
            assert out.startswith(
                ("both ranks are in all_reduce (train.py:8)\n", "rank 2 is in all_reduce (train.py:8)")
            )
            assert " on host" not in out
        finally:
            etcd.members[0].signal(signal.SIGCONT)
            one.close()
    finally:
        etcd.close()


def keys(job: Job, etcd: Etcd) -> list[str]:
    """The keys that the etcd has, asked on its own host."""
    script = (
        "import sys, urllib.request\n"
        "request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode())\n"
        "print(urllib.request.urlopen(request, timeout=20).read().decode())\n"
    )
    what = json.dumps({"key": "AA==", "range_end": "AA==", "keys_only": True})
    url = f"http://{etcd.endpoints}/v3/kv/range"
    command = [*job.hosts.on(4), sys.executable, "-c", script, url, what]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SOON).stdout
    found = [base64.b64decode(one["key"]).decode() for one in json.loads(said)["kvs"]]
    assert any(key.endswith("/job/state") for key in found)
    return found
