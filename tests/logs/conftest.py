"""What tests of logs share: a clock that moves when told."""

from __future__ import annotations

import pytest

from phalanx._base import clock
from tests.support.fake_clock import FakeClock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock that moves when told."""
    fake = FakeClock(100.0)
    monkeypatch.setattr(clock, "now", fake)
    return fake
