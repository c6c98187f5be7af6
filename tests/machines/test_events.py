"""What programs are told of a job of several machines: torch's events, and the state of each agent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.jobs import Agent, Job, at, everyone

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long

ASK = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:29777/{}', timeout=5).read().decode())"


def posted(agent: Agent) -> list[dict[str, Any]]:
    """What its console has of torch's events, in their order."""
    found = [json.loads(line) for line in re.findall(r'(?m)^.*?(\{"name": "torchelastic.*\})$', agent.said)]
    return [
        {**one["metadata"], "source": one["source"], "more": json.loads(one["metadata"]["metadata"])} for one in found
    ]


def test_each_machine_posts_its_own_events_with_its_place(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", "10.77.0.2"))
    agents = one.start(2, 1, options=["--event-log-handler", "console", "--max-restarts", "1"])
    everyone(agents, 0, 4)
    one.fail(0, 0)
    everyone(agents, 1, 4)
    one.finish(*agents)
    first = {int(min(agent.last(4)[1])): agent for agent in agents}
    begin = ["AGENT RENDEZVOUS", "AGENT ASSIGN_WORKER_RANKS", "WORKER START", "WORKER START"]
    for rank, agent in first.items():
        told = posted(agent)
        assert [f"{each['source']} {each['state']}" for each in told] == [
            *begin, *begin, "WORKER SUCCEEDED", "WORKER SUCCEEDED", "AGENT SUCCEEDED",
        ]  # fmt: skip
        assert {(each["group_rank"], each["more"]["group_world_size"]) for each in told} == {(rank // 2, 2)}
        workers = [each for each in told if each["source"] == "WORKER"]
        assert [each["global_rank"] for each in workers] == [rank, rank + 1] * 3
        assert [each["more"]["local_rank"] for each in workers] == [[0], [1]] * 3
        assert {each["more"]["role_world_size"][0] for each in workers} == {4}
        assert [each["agent_restarts"] for each in workers] == [0, 0, 1, 1, 1, 1]


def test_the_failed_machine_posts_failed_and_others_do_not(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", "10.77.0.2"))
    agents = one.start(2, 1, options=["--event-log-handler", "console"])
    everyone(agents, 0, 4)
    rank = min(agents[1].last(4)[1])
    one.fail(rank, 0)
    assert [agent.end() for agent in agents] == [1, 1]
    ends = {agent: [each for each in posted(agent) if each["state"] in ("FAILED", "TERMINATED")] for agent in agents}
    assert [each["state"] for each in ends[agents[0]]] == ["TERMINATED"] * 2
    assert sorted(each["state"] for each in ends[agents[1]]) == ["FAILED", "TERMINATED"]
    [failed] = [each for each in ends[agents[1]] if each["state"] == "FAILED"]
    assert (failed["global_rank"], failed["more"]["exit_code"]) == (rank, [1])
    assert "bad batch" in failed["raw_error"]


def test_a_spare_that_was_not_needed_posts_nothing(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", "10.77.0.2"))
    agents = one.start(2, 1)
    everyone(agents, 0, 4)
    [spare] = one.start(3, options=["--event-log-handler", "console"])
    spare.wait_for("this node is a spare")
    one.finish(*agents, spare)
    assert posted(spare) == []


def asked(job: Job, number: int, path: str) -> str:
    """What the agent on a host answers."""
    command = [*job.hosts.on(number), sys.executable, "-c", ASK.format(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_health_of_an_agent_follows_its_attempts(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", "10.77.0.2"))
    agents = one.start(2, 1, options=["--max-restarts", "1"], TORCHELASTIC_HEALTH_CHECK_PORT="29777")
    everyone(agents, 0, 4)
    for number, attempt in ((1, 0), (2, 0), (1, 1), (2, 1)):
        if attempt == 1 and number == 1:
            one.fail(0, 0)
            everyone(agents, 1, 4)
        until = time.monotonic() + 20
        while True:
            told = json.loads(asked(one, number, "healthz"))
            if (told["state"], told["attempt"]) == ("RUNNING", attempt):
                break
            assert time.monotonic() < until, told
        counted = re.findall(r'(?m)^phalanx_restarts_total\{cause="failure"\} (.*)$', asked(one, number, "metrics"))
        assert counted == [f"{attempt}.0"]  # on the node that has not failed, too
    one.finish(*agents)
