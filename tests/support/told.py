"""Handlers of metrics and of logging for tests, and what puts back what was configured."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.events import _recording
from phalanx.metrics import MetricData, MetricHandler, NullMetricHandler, _handlers


class Kept(MetricHandler):
    """Keeps what it gets; ``then`` is called with each."""

    def __init__(self, then: Callable[[Any], object] = lambda _: None) -> None:
        self.got: list[MetricData] = []
        self.threads: list[int] = []
        self.then = then

    def emit(self, metric_data: MetricData) -> None:
        self.got.append(metric_data)
        self.threads.append(threading.get_ident())
        self.then(metric_data)

    @property
    def names(self) -> list[str]:
        return [data.name for data in self.got]


class KeptRecords(logging.Handler):
    """The same for records."""

    def __init__(self, then: Callable[[Any], object] = lambda _: None) -> None:
        super().__init__()
        self.got: list[logging.LogRecord] = []
        self.threads: list[int] = []
        self.then = then

    def emit(self, record: logging.LogRecord) -> None:
        self.got.append(record)
        self.threads.append(threading.get_ident())
        self.then(record)

    @property
    def texts(self) -> list[str]:
        return [record.msg for record in self.got]


class Gated:
    """What a handler does that has begun, and goes on when it may."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()

    def __call__(self, _: object) -> None:
        self.begun.set()
        self.may.wait()


def fail(_: object) -> None:
    raise OSError("no such host")


@contextlib.contextmanager
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nothing be configured or registered, and nothing have been reported."""
    monkeypatch.setattr(_handlers, "_handlers", {})
    monkeypatch.setattr(_handlers, "_default", NullMetricHandler())
    monkeypatch.setattr(_handlers.GUARD, "_reported", {})
    monkeypatch.setattr(_recording.GUARD, "_reported", {})
    for name in ("_made", "_attached", "_deliveries"):
        monkeypatch.setattr(_recording, name, {})
    before = dict(_recording.registered)
    _recording.registered.clear()
    yield
    _recording.registered.clear()
    _recording.registered.update(before)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("phalanx.events.") and isinstance(logger, logging.Logger):
            logger.handlers = []
