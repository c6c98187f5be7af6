"""Hosts for the tests of many machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import hosts as hosts_of
from tests.support.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def hosts() -> Iterator[Hosts]:
    """Three hosts for agents, and one for an etcd."""
    hosts_of.check()
    with Hosts(4) as it:
        yield it
