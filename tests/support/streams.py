"""Streams of events whose observer is a function of the test's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from phalanx._events.stream import EventStream, Listener
from tests.support.helpers import TIMEOUT


@contextlib.contextmanager
def observed_by(observe: Callable[[str, dict[str, Any]], object] | None) -> Iterator[EventStream]:
    """A stream that calls ``observe`` with the name of each event and its facts; at the end it has been called."""

    def call(event: dict[str, Any]) -> None:
        assert observe is not None
        facts = {name: value for name, value in event.items() if name not in ("name", "timestamp", "monotonic_ns")}
        observe(event["name"], facts)

    stream = EventStream()
    if observe is not None:
        stream.subscribe("observer", Listener(call, "tests"))
    try:
        yield stream
    finally:
        assert stream.close(TIMEOUT) == []
