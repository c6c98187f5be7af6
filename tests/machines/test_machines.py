"""Jobs of several hosts, and what becomes of them when something is killed or cut off.

They meet at a real etcd; and where that makes no difference, at one of their own agents, too.

What a user sees is looked at on every host: its console, its exit code, its workers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from tests.support.helpers import descendants, wait_gone
from tests.support.jobs import SOON, STORE, EtcdJob, Job, everyone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

UNCOUNTED = r"attempt 1 follows \(not counted as a restart\)"

LAUNCHES = """
import os, signal, sys
from phalanx.errors import ChildFailedError
from phalanx.launcher import LaunchConfig, elastic_launch

def train():
    if os.environ["RANK"] == "3":
        raise ValueError("bad batch")
    signal.pause()

if __name__ == "__main__":
    where = {"rdzv_backend": "etcd", "rdzv_endpoint": sys.argv[1], "run_id": sys.argv[2]}
    try:
        elastic_launch(LaunchConfig(2, 2, 2, max_restarts=0, **where), train)()
    except ChildFailedError as error:
        print(error)
        sys.exit(7)
"""
"""A program that launches a job, which fails on the second host, and prints the error."""


def test_a_worker_fails_and_all_start_again(any_job: Callable[..., Job]) -> None:
    one = any_job("3")
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    one.fail(3, 0)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents:
        early = r"rank 3 on host h\d, (?:exit code 1|ValueError: .*); stopping the workers"
        assert len(re.findall(early, agent.said)) == 1
        cause = r"rank 3 on host h\d, ValueError: bad batch of rank 3"
        follows = r"attempt 1 follows \(restart 1 of at most 1\)"
        assert re.search(rf"attempt 0 failed after \S+: {cause}; {follows}", agent.said)
        assert "attempt 1 has succeeded" in agent.said


def test_one_report_is_the_same_on_every_host(any_job: Callable[..., Job]) -> None:
    one = any_job("3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    one.fail(4, 0)
    assert [agent.end() for agent in agents] == [1, 1, 1]
    reports, pages = zip(
        *(agent.said[agent.said.index("=" * 72) :].split("phalanx: page: ") for agent in agents), strict=True
    )
    assert (len(set(reports)), len(set(pages))) == (1, 3)
    report = reports[0]
    assert re.search(r"host      : h\d\n  rank      : 4 \(local_rank: 0\)", report)
    assert "ValueError: bad batch of rank 4" in report
    assert "ranks 0-3, 5: stopped by us (SIGTERM)" in report


@pytest.mark.long
def test_a_launching_program_raises_one_report_on_all_hosts(job: Callable[..., EtcdJob]) -> None:
    one = job("2")
    script = one.folder / "launches.py"
    script.write_text(LAUNCHES)
    command = [sys.executable, str(script), one.etcd.endpoints, one.folder.name]
    env = {**os.environ, "HOME": str(one.folder), "TMPDIR": str(one.folder)}
    launchers = [
        subprocess.Popen([*one.hosts.on(number), *command], stdout=subprocess.PIPE, text=True, env=env)
        for number in (1, 2)
    ]
    reports = {launcher.communicate(timeout=SOON)[0] for launcher in launchers}
    assert [launcher.returncode for launcher in launchers] == [7, 7]
    (report,) = reports
    assert re.search(r"host      : h[12]\n  rank      : 3 \(local_rank: 1\)\n  exitcode  : 1 ", report), report
    assert 'raise ValueError("bad batch")\n    ValueError: bad batch\n' in report
    assert "ranks 0-2: stopped by us (SIGTERM)" in report


def test_an_agent_that_is_killed_is_gone_on_without(any_job: Callable[..., Job]) -> None:
    one = any_job("2:3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    below = descendants(agents[0].launcher())
    os.kill(agents[0].launcher(), signal.SIGKILL)
    agents[0].process.wait()
    assert not wait_gone(below)
    everyone(agents[1:], 1, 4)
    one.finish(*agents[1:])
    for agent in agents[1:]:
        lost = r"node \d is lost: its agent on host h1 is gone, or cut off"
        assert re.search(rf"{lost}; stopping the workers", agent.said)
        assert re.search(rf"attempt 0 ended after \S+: {lost}; {UNCOUNTED}", agent.said)  # and has not failed
        assert "attempt 1 has succeeded" in agent.said


@pytest.mark.long
def test_a_host_that_comes_takes_part(job: Callable[..., Job]) -> None:
    one = job("2:3")
    agents = one.start(1, 2)
    everyone(agents, 0, 4)
    agents += one.start(3)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents[:2]:
        assert "host h3 can take part, and takes part from now on; stopping the workers" in agent.said
    assert "the job runs on 2 nodes; this node takes part soon" in agents[2].said
    for agent in agents:
        assert re.search(r"attempt 1: 3 nodes \(\w+, \w+, h3\), 6 workers; this is node \d, with ranks", agent.said)
        assert "attempt 1 has succeeded" in agent.said


@pytest.mark.long
def test_leases_that_etcd_ends_by_mistake_cost_no_node(job: Callable[..., EtcdJob]) -> None:
    """As it does, before 3.5.13, when a leader goes on that was stopped for longer than their ttl: all, or some."""
    one = job("3")
    one.conf[0] = "lease_ttl=5"
    agents = one.start(1, 2, 3, options=["--max-restarts", "1"])
    everyone(agents, 0, 6)
    for count in (1, 3):
        for lease in one.leases(3)[:count]:
            one.ask("kv/lease/revoke", json.dumps({"ID": lease}))
    one.fail(3, 0)
    everyone(agents, 1, 6)
    one.finish(*agents)
    for agent in agents:
        assert re.search(r"attempt 0 failed after \S+: rank 3 on host h\d, ValueError: bad batch", agent.said)
        assert not re.search("lost|answer", agent.said)


@pytest.mark.long
def test_an_etcd_back_without_its_data_is_not_the_jobs(job: Callable[..., EtcdJob]) -> None:
    """Also where others have written into it as often as was written before. The workers go on, and end."""
    one = job("3")
    agents = one.start(1, 2, 3, options=["--exit-barrier-timeout", "0.5"])
    everyone(agents, 0, 6)
    (member,) = one.etcd.members
    member.kill()
    member.wipe()
    one.etcd.start()
    one.ask("kv/put", '{"key": "eA=="}', times=200)
    for agent in agents:
        agent.wait_for(r"does not answer \(.*: it has lost what it held: it has not written .* at revision \d+\)")
        assert not re.search("stopping|answers again|lost:", agent.said.replace("it has lost what it held", ""))
    one.finish(*agents)


@pytest.mark.long
def test_a_host_that_is_stopped_for_longer_than_its_lease(any_job: Callable[..., Job]) -> None:
    one = any_job("2:3", store=1)
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    stopped = [agents[1].launcher(), *descendants(agents[1].launcher())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    everyone([agents[0], agents[2]], 1, 4)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    everyone(agents, 2, 6)
    one.finish(*agents)
    for agent in agents:
        assert re.search(r"node \d is lost: its agent on host h2 is gone, or cut off; stopping the workers", agent.said)
        assert "attempt 2 has succeeded" in agent.said


def test_ctrl_c_on_one_host_stops_the_job_on_all(any_job: Callable[..., Job]) -> None:
    one = any_job("3")
    agents = one.start(1, 2, 3)
    everyone(agents, 0, 6)
    os.kill(agents[1].launcher(), signal.SIGINT)
    assert [agent.end() for agent in agents] == [130, 130, 130]
    assert "SIGINT: stopping the job on all nodes" in agents[1].said
    for agent in agents:
        assert "the job was stopped: SIGINT on host h2" in agent.said
        assert re.search(r"STOPPED\n-+\n  cause     : SIGINT on host h2\n", agent.report)
    assert not any(descendants(agent.process.pid) for agent in agents)


@pytest.mark.long
def test_a_machine_that_fails_its_check_before_an_attempt_leaves(job: Callable[..., Job], tmp_path: Path) -> None:
    one, checks = job("2"), tmp_path / "checks"
    check = f"echo checked; echo >> {checks}; test $(wc -l < {checks}) = 1 || {{ echo GPU 3 is broken; exit 4; }}"
    budget = ("--max-restarts", "1")
    agents = [*one.start(1, options=budget), *one.start(2, options=[*budget, "--node-check", check])]
    everyone(agents, 0, 4)
    (spare,) = one.start(3, options=budget)
    spare.wait_for("this node is a spare")
    one.fail(3, 0)
    why = "--node-check: exit code 4: GPU 3 is broken; its output is in "
    assert agents[1].end() == 1
    assert f"phalanx: Error: this node has left the job: {why}" in agents[1].said
    agents[0].wait_for(rf"attempt 1 ended after \S+: host h2 leaves: {why}\S+; attempt 2 follows \(not counted")
    everyone([agents[0], spare], 2, 4)
    one.finish(agents[0], spare)
    (log,) = (one.folder / "home2").glob("**/node-check.log")
    assert log.read_text().count("checked\n") == 2


@pytest.mark.long
def test_a_stop_between_two_attempts_is_what_ends_the_job(job: Callable[..., Job]) -> None:
    one = job("2")
    agents = one.start(1, 2, options=["--max-restarts", "1", "--backoff", "1h:1h"])
    everyone(agents, 0, 4)
    one.fail(3, 0)
    agents[0].wait_for(r"attempt 1 follows in \S+ \(restart 1 of at most 1\)")
    os.kill(agents[0].launcher(), signal.SIGTERM)
    assert [agent.end() for agent in agents] == [143, 143]
    for agent in agents:
        assert re.search(r"attempt 0, after \S+: rank 3 on host h\d, ValueError: bad batch of rank 3\n", agent.said)
        assert agent.said.endswith("phalanx: the job was stopped: SIGTERM on host h1\n")


@pytest.mark.long
def test_who_was_told_of_another_job_is_refused(any_job: Callable[..., Job], tmp_path: Path) -> None:
    one = any_job("2")
    agents = one.start(1, 2, options=["--max-restarts", "1"])
    everyone(agents, 0, 4)
    ours = one.command
    other = shutil.copy(ours[0], str(tmp_path / "eval.py"))
    for nodes, command, restarts, why in (
        ("3", ours, ["1"], "the job is one of 2 nodes, and this node was told 3"),
        ("2", [other, *ours[1:]], ["1"], "the job of this id runs train.py, and this node was told eval.py: another"),
        (
            "2",
            [*ours, "--lr", "0.2"],
            ["1"],
            "the job of this id runs train.py with other arguments: another job needs",
        ),
        ("2", ours, ["3", "--backoff", "2"], "the job has --max-restarts 1, and this node was told --max-restarts 3 "),
    ):
        one.nodes, one.command = nodes, command
        (stranger,) = one.start(3, options=["--max-restarts", *restarts])
        assert stranger.end() == 1
        assert f"Error: this node is not taken: {why}" in stranger.said
    one.nodes, one.command = "2", [other, *ours[1:]]
    (spare,) = one.start(3, options=["--max-restarts", "1", "--role", "evaluator"])
    spare.wait_for("this node is a spare")
    one.finish(*agents, spare)
    assert "this node was a spare, and was not needed: the job has succeeded on 2 nodes" in spare.said


READ = """
import base64, json, sys, urllib.request

def coded(text):
    return base64.b64encode(text.encode()).decode()

first = f"/phalanx/{sys.argv[2]}/"
query = {"key": coded(first), "range_end": coded(first[:-1] + "0")}
url = f"http://{sys.argv[1]}/v3/kv/range"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, data=json.dumps(query).encode()), timeout=5))
pairs = [[base64.b64decode(each[name]).decode() for name in ("key", "value")] for each in answer.get("kvs", ())]
print(json.dumps({key.removeprefix(first): value for key, value in pairs}))
"""


@pytest.mark.long
def test_what_a_job_was_is_kept_and_the_next_one_begins_as_ever(job: Callable[..., EtcdJob]) -> None:
    one = job("2")

    def left() -> dict[str, str]:
        """What is in the store: read on its own host."""
        command = [*one.hosts.on(STORE), sys.executable, "-c", READ, one.etcd.members[0].endpoint, one.folder.name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert isinstance(found, dict)
        return found

    agents = one.start(1, 2, options=["--keep"])
    everyone(agents, 0, 4)
    one.fail(2, 0)
    assert [agent.end() for agent in agents] == [1, 1]
    failed = left()
    state = json.loads(failed["kept/job/state"])
    assert (state["verdict"]["state"], state["verdict"]["stop"]["rank"]) == ("failed", 2)
    names = [f"kept/evidence/0/{member['id']}" for member in state["members"]]
    assert failed.keys() == {"kept/job/state", *names}
    assert sum("bad batch of rank 2" in failed[name] for name in names) == 1
    (one.folder / "end.fail.2.0").unlink()

    agents = one.start(1)
    until = time.monotonic() + SOON
    while "job/state" not in left():  # it makes the job: what the other one says does not count
        assert time.monotonic() < until
    agents += one.start(2, options=["--keep"])
    everyone(agents, 0, 4)
    one.finish(*agents)
    agents[1].wait_for("--keep is without effect: the job was begun by a machine without it")
    assert left() == failed
    one.end.unlink()

    agents = one.start(1, 2, options=["--keep"])
    everyone(agents, 0, 4)
    one.finish(*agents)
    [(key, value)] = left().items()
    assert (key, json.loads(value)["verdict"]["state"]) == ("kept/job/state", "succeeded")


def test_a_master_address_that_fits_each_host_is_reported(any_job: Callable[..., Job]) -> None:
    one = any_job("2")
    agents = one.start(2, 1, options=["--local-addr", "127.0.0.1"])
    for agent in agents:
        agent.wait_for(
            r"MASTER_ADDR is 127\.0\.0\.1, which is another machine on each of h\d, h\d: give each its address"
        )
    everyone(agents, 0, 4)
    one.finish(*agents)
