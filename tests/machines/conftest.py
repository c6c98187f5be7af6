"""Hosts for the tests of many machines, and jobs that meet at an etcd, or at one of their own agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import hosts as hosts_of
from tests.support.etcd import Etcd
from tests.support.hosts import Hosts
from tests.support.jobs import STORE, EtcdJob, Job, ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="package")
def hosts() -> Iterator[Hosts]:
    """Three hosts for agents, and one for an etcd."""
    hosts_of.check()
    with Hosts(4) as it:
        yield it


@pytest.fixture
def job(tmp_path: Path, hosts: Hosts) -> Iterator[Callable[..., EtcdJob]]:
    """Makes a job of so many nodes, with an etcd of its own."""
    made: list[tuple[Etcd, EtcdJob]] = []

    def make(nodes: str, members: int = 1) -> EtcdJob:
        etcd = Etcd(members, hosts.address(STORE), hosts.on(STORE))
        made.append((etcd, EtcdJob(tmp_path, hosts, etcd, nodes)))
        etcd.start()
        return made[-1][1]

    try:
        yield make
    finally:
        for number in hosts.numbers:
            hosts.heal(number)
        for etcd, one in made:
            one.close()
            etcd.close()


@pytest.fixture(params=["etcd", pytest.param("c10d", marks=pytest.mark.long)])
def any_job(
    request: pytest.FixtureRequest, tmp_path: Path, hosts: Hosts, job: Callable[..., EtcdJob]
) -> Iterator[Callable[..., Job]]:
    """Makes a job of so many nodes, which meet at an etcd; or at the agent of one of them, ``store``."""

    def make(nodes: str, store: int = 2) -> Job:
        if request.param == "etcd":
            return job(nodes)
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.address(store)}:29400"]
        made.append(Job(tmp_path, hosts, nodes, lambda _: [*where, "--run-id", tmp_path.name]))
        made[-1].env = {"PHALANX_JOB_SECRET": "0123456789abcdef0123456789abcdef"}
        return made[-1]

    with ending(hosts) as made:
        yield make
