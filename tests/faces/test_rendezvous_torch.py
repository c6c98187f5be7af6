"""The same calls of torch's registry of rendezvous backends and of ours: what they return, and what they raise."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx.rendezvous

pytestmark = pytest.mark.torch


def said(call: Any) -> Any:
    """What a call returns, or the name of what it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it is what the test is about
        return type(error).__name__


def of_registries(rendezvous: Any) -> list[Any]:
    """What a registry makes of names."""
    registry, parameters = rendezvous.RendezvousHandlerRegistry(), rendezvous.RendezvousParameters

    class Alone:
        def __init__(self, params: Any) -> None:
            self.params = params

        def get_backend(self) -> str:
            return "alone"

    handler = [registry.register("alone", Alone), registry.register("alone", Alone)]
    params = parameters("alone", "", "job", 1, 1)
    made = registry.create_handler(params)
    return [
        *handler,
        made.params is params,
        said(lambda: registry.register("alone", print)),
        said(lambda: registry.register("", print)),
        said(lambda: registry.create_handler(parameters("else", "", "job", 1, 1))),
        said(
            lambda: registry.register("other", Alone) or registry.create_handler(parameters("other", "", "job", 1, 1))
        ),
        said(lambda: rendezvous.rendezvous_handler_registry.create_handler(parameters("else", "", "job", 1, 1))),
    ]


def test_registries_say_the_same() -> None:
    theirs = pytest.importorskip("torch.distributed.elastic.rendezvous")
    assert of_registries(phalanx.rendezvous) == of_registries(theirs)
