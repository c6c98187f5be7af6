"""The launcher's waits for its helpers, shortened for a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx._core import silence, supervisor

if TYPE_CHECKING:
    import pytest


def shorten(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Set ``SILENCE``, ``KILL_WAIT`` and others, wherever they are used."""
    for module in (supervisor, silence):
        for name, value in seconds.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
