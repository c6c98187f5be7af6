"""Commands that run when something happens to a job of several machines: one of these runs them."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import until
from tests.support.jobs import Job, everyone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.slow]

ALL_HANG = """
import os, threading
from phalanx import timer
timer.beat()
threading.Event().wait()
"""


def options(folder: Path) -> list[str]:
    """Those of a job whose commands write into ``events`` what they are told, and by which host."""
    command = f'echo "$PHALANX_EVENT of $PHALANX_EVENT_HOST by $(uname -n) $PHALANX_EVENT_CAUSE" >> {folder}/events'
    return ["--on-event", "started,hung,restarted,failed,stopped,succeeded", command]


def events(folder: Path) -> list[str]:
    path = folder / "events"
    return path.read_text().splitlines() if path.exists() else []


def test_one_of_three_machines_runs_the_commands(tmp_path: Path, job: Callable[..., Job]) -> None:
    one = job("3")
    agents = one.start(1, 2, 3, options=[*options(tmp_path), "--max-restarts", "1"])
    everyone(agents, 0, 6)
    one.fail(3, 0)
    everyone(agents, 1, 6)
    one.fail(5, 1)
    assert [agent.end() for agent in agents] == [1] * 3
    assert [event.split(" of ")[0] for event in events(tmp_path)] == ["started", "restarted", "failed"]
    assert "rank 3 on host h" in events(tmp_path)[1]
    assert "rank 5: ValueError: bad batch of rank 5" in events(tmp_path)[2]


def test_a_job_in_which_all_ranks_hang_has_one_event(tmp_path: Path, hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", "static")
    (tmp_path / "train.py").write_text(ALL_HANG)
    agents = one.start(1, 2, 3, options=[*options(tmp_path), "--hang-timeout", "1"])
    assert [agent.end() for agent in agents] == [137] * 3, [agent.said for agent in agents]
    hung = [event for event in events(tmp_path) if event.startswith("hung")]
    assert len(hung) == 1, events(tmp_path)
    host, by = re.findall(r"^hung of (\S+) by (\S+) rank \d on host \S+, Hang: no heartbeat", hung[0])[0]
    assert host == by
    assert [event.split(" of ")[0] for event in events(tmp_path)].count("failed") == 1


def test_a_success_and_a_stop(tmp_path: Path, hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", "static")
    agents = one.start(1, 2, options=options(tmp_path))
    everyone(agents, 0, 4)
    one.finish(*agents)
    assert [event.split(" by ")[0] for event in events(tmp_path)] == ["started of h1", "succeeded of h1"]
    (tmp_path / "events").unlink()
    one.end.unlink()
    agents = one.start(1, 2, options=options(tmp_path))
    everyone(agents, 0, 4)
    agents[1].process.send_signal(signal.SIGINT)
    assert [agent.end() for agent in agents] == [130, 130]
    assert [event.split(" by ")[0] for event in events(tmp_path)] == ["started of h1", "stopped of h1"]


def test_the_loss_of_the_first_machine_is_an_event(tmp_path: Path, job: Callable[..., Job]) -> None:
    one = job("3")
    one.env["TMPDIR"] = str(tmp_path)  # nobody removes what is in that of a machine that is lost
    agents = one.start(1, 2, 3, options=options(tmp_path))
    everyone(agents, 0, 6)
    until(lambda: len(events(tmp_path)) == 1)
    first = next(agent for agent in agents if 0 in agent.last(6)[1])
    first.process.kill()
    rest = [agent for agent in agents if agent is not first]
    assert [agent.end() for agent in rest] == [1, 1], [agent.said for agent in rest]
    assert [event.split(" of ")[0] for event in events(tmp_path)] == ["started", "failed"]


def test_the_loss_of_the_store_is_an_event_all_the_same(tmp_path: Path, hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", "static")
    one.conf.append("away_timeout=3")
    one.env["TMPDIR"] = str(tmp_path)
    agents = one.start(1, 2, 3, options=options(tmp_path))
    everyone(agents, 0, 6)
    until(lambda: len(events(tmp_path)) == 1)
    agents[0].process.kill()
    assert 0 not in [agent.end() for agent in agents[1:]], [agent.said for agent in agents]
    until(lambda: len(events(tmp_path)) > 1)
    assert [event.split(" by ")[0] for event in events(tmp_path)] == ["started of h1", "failed of h2"]
