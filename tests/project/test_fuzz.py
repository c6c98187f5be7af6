"""Whatever a worker, or another user, writes: nothing is raised, nothing grows, nobody else is signalled."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz import TARGETS, Fuzz, changed

INPUTS = int(os.environ.get("PHALANX_TEST_INPUTS", "10000"))
"""Inputs, of all targets together."""


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Fuzz]:
    with Fuzz() as it:
        yield it


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_do(fuzz: Fuzz, name: str) -> None:
    target = fuzz.targets[name]
    noise = st.binary(max_size=2000)
    examples = st.integers(0, 1 << 64).map(lambda seed: changed(target.seeds, random.Random(seed)))  # noqa: S311 - no secret

    @settings(
        max_examples=INPUTS // len(TARGETS), deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(noise | examples | examples)
    def holds(data: bytes) -> None:
        target.check(data)

    for seed in target.seeds:
        target.check(seed)
    holds()
