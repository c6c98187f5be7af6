"""Hosts for the tests of many machines, and jobs that meet at an etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import hosts as hosts_of
from tests.support.etcd import Etcd
from tests.support.hosts import Hosts
from tests.support.jobs import STORE, EtcdJob

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
