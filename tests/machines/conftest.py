"""Hosts for the tests of many machines, and jobs that meet at an etcd, or at one of their own agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import hosts as hosts_of
from tests.support.etcd import Etcd
from tests.support.hosts import Hosts
from tests.support.jobs import STORE, EtcdJob, Job, at, by_master, ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
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


@pytest.fixture
def hosted_job(tmp_path: Path, hosts: Hosts) -> Iterator[Callable[..., Job]]:
    """Makes a job of so many nodes, one of which has the store.

    The first one, by a backend; or as ``meeting`` says. ``names``: what hosts call themselves and others.
    """

    def make(nodes: str, meeting: str | Callable[[int], Sequence[str]], **names: str) -> Job:
        for host, text in names.items():
            hosts.names[int(host[1:])] = path = tmp_path / host
            path.write_text(f"127.0.0.1 localhost\n::1 localhost\n{text}")
        if isinstance(meeting, str):
            first = hosts.address(1)
            meeting = by_master(first) if meeting == "static" else at(meeting, first)
        made.append(Job(tmp_path, hosts, nodes, meeting))
        return made[-1]

    with ending(hosts) as made:
        yield make


@pytest.fixture(params=["etcd", pytest.param("c10d", marks=pytest.mark.long)])
def any_job(
    request: pytest.FixtureRequest, hosts: Hosts, job: Callable[..., EtcdJob], hosted_job: Callable[..., Job]
) -> Callable[..., Job]:
    """Makes a job of so many nodes, which meet at an etcd; or at the agent of one of them, ``store``."""

    def make(nodes: str, store: int = 2) -> Job:
        return job(nodes) if request.param == "etcd" else hosted_job(nodes, at("c10d", hosts.address(store)))

    return make
