"""Fixtures for all tests, and the leak checks for all tests and doctests."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest

from tests import leaks
from tests.disks import Disk, mounted
from tests.helpers import Gate, Ready

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_configure(config: pytest.Config) -> None:
    """Register the leak checks as a plugin: fixtures of a conftest would not reach the doctests under src."""
    config.pluginmanager.register(leaks, "leaks")


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Ready]:
    """Where workers tell the test that they have come so far."""
    with Ready(tmp_path / "ready") as it:
        yield it


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Where workers wait until the test lets them go on."""
    with Gate(tmp_path / "gate") as it:
        yield it


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A new, empty folder."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk that can be made to answer no write."""
    with mounted(tmp_path) as it:
        yield it


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let temporary files be the test's own: the error files of a group that failed stay, which is no leak."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
