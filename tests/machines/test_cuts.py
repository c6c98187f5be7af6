"""Hosts that are cut off for a definite time, in each way in which that happens; etcds that stand still, or are parted.

What a user sees is looked at on every host. ``PHALANX_CUTS=long`` cuts hosts off for 60 s, and stops etcds for 20 s;
else that is as short as it can be to have the same consequences. Several jobs run side by side, each on hosts of its
own: most of the time they wait.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from tests.support import hosts as hosts_of
from tests.support.etcd import Etcd
from tests.support.hosts import Hosts
from tests.support.jobs import UNKNOWN, EtcdJob, everyone, together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

IS_LONG = os.environ.get("PHALANX_CUTS") == "long"
CUT = 60.0 if IS_LONG else 8.0
"""Seconds for which hosts are cut off: several times their ttl of 2."""

STOP = 20.0 if IS_LONG else 7.0
"""Seconds for which an etcd stands still: longer than a ttl of 5."""

WAYS = ("silence", "cut", "deafen", "mute")
"""How a host is cut off: silently; with its carrier; it hears nothing; nobody hears it."""

LONG = 120.0
"""Seconds that the start of several jobs may take; spent only by a test that fails."""


@contextmanager
def job_on(hosts: Hosts, folder: Path, nodes: str, etcd: Etcd) -> Iterator[EtcdJob]:
    """Make a job that meets at an etcd of its own, which is started."""
    folder.mkdir()
    with etcd:
        one = EtcdJob(folder, hosts, etcd, nodes)
        try:
            yield one
        finally:
            for number in hosts.numbers:
                hosts.heal(number)
            one.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Makes jobs, each on hosts of its own."""
    hosts_of.check()
    with ExitStack() as stack:
        yield Jobs(tmp_path, stack)


class Jobs:
    """Jobs, each on hosts of its own, of which the last one has the etcd."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def make(self, name: str, nodes: str, hosts: int, members: int = 1, *, apart: bool = False) -> EtcdJob:
        """Make a job. ``apart``: each member of the etcd is on a host of its own, from the first one on."""
        there = self._stack.enter_context(Hosts(hosts))
        numbers = there.numbers[:members] if apart else [hosts] * members
        etcd = Etcd(places=[(there.address(number), there.on(number)) for number in numbers])
        return self._stack.enter_context(job_on(there, self._folder / name, nodes, etcd))


def until(moment: float) -> None:
    """Wait until a moment: how long something lasts is what the tests are about."""
    time.sleep(max(0.0, moment - time.monotonic()))


def test_hosts_that_are_cut_off_for_a_minute(jobs: Jobs) -> None:
    """Of a range, the others go on without them, and take them in again. Of a fixed number, a restart waits for them;
    without one the job has failed on all hosts, also on the one that comes back."""
    ranged, fixed, failing = jobs.make("ranged", "1:5", 6), jobs.make("fixed", "3", 4), jobs.make("failing", "2", 3)
    five = ranged.start(1, 2, 3, 4, 5)
    three = fixed.start(1, 2, 3, options=["--max-restarts", "1"])
    two = failing.start(1, 2)
    sizes = ((five, 10), (three, 6), (two, 4))
    for agents, size in sizes:
        together(agents, size, seconds=LONG)
    away = [*five[:4], three[1], two[1]]
    before = [len(agent.said) for agent in away]  # of a range, those that had come first have stopped for the others
    began = time.monotonic()
    for number, way in enumerate(WAYS, 1):
        getattr(ranged.hosts, way)(number)
    fixed.hosts.silence(2)
    failing.hosts.cut(2)

    alone = together(five[4:], 2)
    lost = r"node \d is lost: its agent on host h2 is gone, or cut off"
    for agent in (three[0], three[2]):
        agent.wait_for(rf"{lost}; stopping the workers")
        agent.wait_for(rf"attempt 0 failed after \S+: {lost}; attempt 1 follows")
    assert two[0].end() == 1
    assert re.search(rf"Error: {lost}", two[0].said)
    for agent in away:
        agent.wait_for("does not answer .*; the workers go on")
    until(began + CUT)
    for agent, length in zip(away, before, strict=True):
        assert agent.process.poll() is None
        assert "stopping the workers" not in agent.said[length:]

    for number in range(1, 5):
        ranged.hosts.heal(number)
    fixed.hosts.heal(2)
    failing.hosts.heal(2)
    for agent in away:
        agent.wait_for("answers again")
    together(five, 10, alone)
    assert together(three, 6, 0) == 1
    assert two[1].end() == UNKNOWN
    assert "Error: how the job ends is not known here: it has ended without this node" in two[1].said
    ranged.finish(*five)
    fixed.finish(*three)
    for agent in five:
        assert re.search(r"attempt \d+ has succeeded", agent.said)
    for agent in three:
        assert "attempt 1 has succeeded" in agent.said


def test_three_members_lose_their_leader_and_then_the_quorum(jobs: Jobs) -> None:
    """A worker fails while there is none: it is named when there is one again, and nobody is lost."""
    one = jobs.make("job", "3", 4, 3)
    one.conf[0] = "lease_ttl=5"
    agents = one.start(1, 2, 3, options=["--max-restarts", "2"])
    everyone(agents, 0, 6)
    one.leader().kill()
    one.fail(1, 0)
    everyone(agents, 1, 6)
    rest = [member for member in one.etcd.members if member.process is not None]
    began = time.monotonic()
    rest[0].signal(signal.SIGSTOP)
    for agent in agents:
        agent.wait_for("does not answer .*; the workers go on")
    one.fail(2, 1)
    until(began + STOP)
    assert not any("attempt 1 failed" in agent.said for agent in agents)
    rest[0].signal(signal.SIGCONT)
    everyone(agents, 2, 6)
    one.finish(*agents)
    for agent in agents:
        assert "answers again" in agent.said
        assert "lost" not in agent.said
        causes = re.findall(r"attempt \d failed after \S+: rank (\d) on host h\d, ValueError: bad batch", agent.said)
        assert causes == ["1", "2"]
        assert "attempt 2 has succeeded" in agent.said


def test_etcds_that_stand_still_or_are_parted_cost_no_node(jobs: Jobs) -> None:
    """The leader of three members is stopped; the only member is; one that agents use is parted from the others.

    A worker fails as that begins, and another one as it ends: they are named on each host, and nobody is lost.
    """
    led, parted = jobs.make("led", "2", 3, 3), jobs.make("parted", "2", 4, 3, apart=True)
    alone = jobs.make("alone", "2", 3)
    leader = led.leader()
    led.endpoints.sort(key=lambda endpoint: endpoint != leader.endpoint)
    pairs = {}
    for one, numbers in ((led, (1, 2)), (parted, (3, 4)), (alone, (1, 2))):
        one.conf[0] = "lease_ttl=5"
        pairs[one] = one.start(*numbers, options=["--max-restarts", "2"])
    for agents in pairs.values():
        together(agents, 4, seconds=LONG)
    began = time.monotonic()
    leader.signal(signal.SIGSTOP)
    alone.etcd.members[0].signal(signal.SIGSTOP)
    parted.hosts.part(1, 2, 3)
    for one in pairs:
        one.fail(1, 0)
    for one in (led, parted):
        assert together(pairs[one], 4, 0) == 1
    until(began + STOP)
    for one in (led, parted):
        one.fail(0, 1)
    leader.signal(signal.SIGCONT)
    alone.etcd.members[0].signal(signal.SIGCONT)
    parted.hosts.heal(1)
    for one, agents in pairs.items():
        failed = [1] if one is alone else [1, 0]
        assert together(agents, 4, len(failed) - 1) == len(failed)
        one.finish(*agents)
        for agent in agents:
            causes = re.findall(r"attempt \d failed after \S+: rank (\d) on host h\d, ValueError: bad b", agent.said)
            assert list(map(int, causes)) == failed, agent.said
            assert "lost" not in agent.said
            assert f"attempt {len(failed)} has succeeded" in agent.said
