"""A rank of one host hangs: where the ranks of all hosts are, on every console, and in files."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from phalanx._run.node_team import MachineTeam
from phalanx._run.node_workers import LOOK, LastLook
from phalanx._stacks.snapshot import Snapshot
from phalanx._timers.hang_reporter import HangReporter
from phalanx._timers.table import TimerTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.jobs import Job

pytestmark = pytest.mark.long


WORKER = """
import os, threading
from phalanx import timer

def read_batch():
    threading.Event().wait()

def all_reduce():
    threading.Event().wait()

hangs = os.environ["RANK"] == "3"
with timer.expires(after=1 if hangs else 600, scope="step"):
    read_batch() if hangs else all_reduce()
"""


@pytest.mark.slow
def test_a_hang_on_one_host_shows_where_all_ranks_are(tmp_path: Path, hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", "static")
    (tmp_path / "train.py").write_text(WORKER)
    agents = one.start(1, 2, 3)
    agents[0].wait_for("rank 3 on host h2, Hang: 'step' .* was not left within 1 s; stopping the workers")
    heard = time.monotonic()
    assert [agent.end() for agent in agents] == [137] * 3, [agent.said for agent in agents]
    assert time.monotonic() - heard < LOOK + 5  # it takes half a second where nobody else is busy
    where = r"5 of 6 ranks wait in all_reduce \(train.py:9\); rank 3 on host h2 is in read_batch \(train.py:6\)\n"
    for agent in agents:
        assert re.search(r"Root Cause.*\n.*\n +host +: h2\n +rank +: 3 \(local_rank: 1\)", agent.said), agent.said
        assert len(re.findall(rf"\n[ a-z:]+{where}", agent.said)) == 1, agent.said
        assert "ranks 0-2, 4-5: stopped by us (SIGTERM)" in agent.said
    for number in (1, 2, 3):
        texts = [path.read_text() for path in (tmp_path / f"home{number}").rglob("stacks-1.txt")]
        assert sum("in all_reduce" in text for text in texts) == (1 if number == 2 else 2)
        assert len(texts) == 2


class Group:
    """A group whose stacks are taken when the test says so."""

    def take_stacks(self, seconds: float, then: Callable[[], None]) -> None:
        assert seconds < LOOK <= 3
        self.taken = then


def test_the_end_waits_for_the_stacks_but_not_long() -> None:
    group, look = Group(), LastLook()
    woken: list[int] = []
    assert not look.puts_off(10.0)  # no rank hangs
    assert not look.is_over(10.0)
    look.begin(group, lambda: woken.append(1))  # type: ignore[arg-type] # it has what is used of a group
    assert not look.is_over(99.0)  # no end was ordered
    assert look.puts_off(10.0)
    assert not look.is_over(10.0 + LOOK - 0.1)
    assert look.is_over(10.0 + LOOK)
    group.taken()
    assert (woken, look.is_over(10.1), look.puts_off(10.1)) == ([1], True, False)


def test_a_death_does_not_prolong_the_wait_for_stacks() -> None:
    """A death by a signal that stops runs is held back; the end of the others is looked at as often as before."""
    look = LastLook()
    look.begin(Group(), lambda: None)  # type: ignore[arg-type] # as above
    assert look.puts_off(10.0)
    held = deque([(0.0, 0, None)])
    team: Any = SimpleNamespace(
        common=SimpleNamespace(has_come=False), _workers=SimpleNamespace(last_look=look), _held=held, poll_seconds=LOOK
    )
    MachineTeam._tell_held(team)
    assert (team.poll_seconds, len(held)) == (LOOK, 0)


def test_a_signal_does_not_wait_for_the_stacks() -> None:
    group, look = Group(), LastLook()
    look.begin(group, lambda: None)  # type: ignore[arg-type] # as above
    assert look.puts_off(10.0)
    look.drop()
    group.taken()
    assert not look.is_over(99.0)  # nothing is ordered a second time
    assert not look.puts_off(99.0)


def test_the_end_of_a_group_waits_for_no_look_that_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def take(*_args: object, **_more: object) -> NoReturn:
        begun.set()
        gate.wait(60)
        raise OSError

    monkeypatch.setattr(Snapshot, "take", take)
    shown: list[str] = []
    done = threading.Event()
    report = HangReporter(TimerTable(1), (), {0: str(tmp_path / "error.json")}, shown.append)
    try:
        report.look({0: os.getpid()}, {}, 60.0, done.set)
        assert begun.wait(60)
        report.hurry()
        report.finish()
        assert shown == ["evidence of timers is not complete: that takes too long"]
        assert not done.is_set()
    finally:
        gate.set()
        assert done.wait(60)  # though it has failed
        report.finish()
        report.close()
    assert len(shown) == 1
    assert report.whereabouts == {}
