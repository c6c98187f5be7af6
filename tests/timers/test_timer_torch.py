"""The timers have torch's names, parameters in torch's order, and torch's defaults."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import phalanx.timer

pytestmark = pytest.mark.torch

THERE = "torch.distributed.elastic.timer"
CLASSES = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
]


@pytest.fixture(scope="module")
def torch_timer() -> Any:
    return importlib.import_module(THERE)


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(name, each.default) for name, each in inspect.signature(function).parameters.items()]


def _public(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} | {"__init__"}


def test_every_public_name_is_here(torch_timer: Any) -> None:
    modules = {name for name in dir(torch_timer) if inspect.ismodule(getattr(torch_timer, name))}
    names = {name for name in dir(torch_timer) if not name.startswith("_")} - modules | {"debug_info_logging"}
    assert names <= set(phalanx.timer.__all__)


@pytest.mark.parametrize("name", [*CLASSES, "configure", "expires"])
def test_arguments_have_torchs_names_order_and_defaults(torch_timer: Any, name: str) -> None:
    theirs, ours = getattr(torch_timer, name), getattr(phalanx.timer, name)
    if not inspect.isclass(theirs):
        assert _parameters(ours) == _parameters(theirs)
        return
    members = _public(theirs)
    assert members - _public(ours) <= {"is_process_running"}  # of a pid, which is no identity here
    for member in members & _public(ours):
        method = inspect.getattr_static(theirs, member)
        if inspect.isfunction(method):
            known = _parameters(method)
            given = _parameters(inspect.getattr_static(ours, member))[: len(known)]
            assert [name for name, _ in given] == [name for name, _ in known], member
            # What is required there may be left out here, and never the other way.
            assert all(
                mine == other or other is inspect.Parameter.empty
                for (_, mine), (_, other) in zip(given, known, strict=True)
            )
