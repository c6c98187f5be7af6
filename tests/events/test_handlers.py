"""What every handler keeps to, of metrics and of events, called at once or by a thread: it fails, blocks, emits."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx import events, metrics
from phalanx._base.handler_guard import MOST_NESTED
from phalanx.events import Event, EventSource
from phalanx.multiprocessing import SignalException
from tests.support.forks import code_of_fork
from tests.support.helpers import TIMEOUT
from tests.support.told import Gated, Kept, KeptRecords, fail, unconfigured


@pytest.fixture(autouse=True)
def _nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with unconfigured(monkeypatch):
        yield


class Way:
    """One way to a handler: of metrics or of events, in the caller's thread or in the background."""

    def __init__(self, kind: str) -> None:
        self.logger = f"phalanx.{kind.split(maxsplit=1)[0]}"
        self.background = kind.endswith("background")
        self._of_metrics = kind.startswith("metrics")
        self._behind: dict[str, metrics.BackgroundMetricHandler] = {}

    def attach(self, then: Callable[[Any], object] = lambda _: None, group: str = "mine") -> Any:
        """Have a handler that keeps what it gets in a place, instead of the one that is there."""
        if not self._of_metrics:
            records = KeptRecords(then)
            events.register_logging_handler(group, records)
            return records
        kept = Kept(then)
        if self.background:
            self._behind[group] = metrics.BackgroundMetricHandler(kept)
        metrics.configure(self._behind.get(group, kept), group)
        return kept

    def emit(self, name: str, group: str = "mine") -> None:
        if self._of_metrics:
            metrics.put_metric(name, 1, group)
        else:
            (events.post if self.background else events.record)(Event(name, EventSource.WORKER, 5), group)

    def flush(self, seconds: float = TIMEOUT) -> bool:
        if self._of_metrics:
            return all(handler.flush(seconds) for handler in self._behind.values())
        return events.flush(seconds)

    def names(self, handler: Any) -> list[str]:
        return handler.names if self._of_metrics else [json.loads(text)["name"] for text in handler.texts]

    def reports(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == self.logger]


BACKGROUND = ["metrics in the background", "events in the background"]


@pytest.fixture(params=["metrics", "events", *BACKGROUND])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


@pytest.fixture(params=BACKGROUND)
def behind(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


@pytest.fixture
def gated() -> Iterator[Gated]:
    it = Gated()
    yield it
    it.may.set()


def test_a_handler_that_raises_is_reported_once(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    handler = way.attach(fail)
    for name in ("a", "b", "c"):
        way.emit(name)
    assert way.flush()
    assert way.names(handler) == ["a", "b", "c"]
    (report,) = way.reports(caplog)
    assert report.startswith(f"the handler tests.support.told.{type(handler).__name__} raised; ")
    assert "no such host" in caplog.text
    way.attach(fail, "other")
    way.emit("a", "other")
    assert way.flush()
    assert len(way.reports(caplog)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), SignalException("x", signal.SIGTERM)])
def test_what_ends_a_program_passes_a_handler(error: BaseException, way: Way, caplog: pytest.LogCaptureFixture) -> None:
    """In the background there is no program to end: it is reported, and the handler gets the rest."""

    def end(_: object) -> None:
        raise error

    handler = way.attach(end)
    if way.background:
        for name in ("a", "b"):
            way.emit(name)
        assert way.flush()
        assert way.names(handler) == ["a", "b"]
    else:
        with pytest.raises(type(error)) as raised:
            way.emit("a")
        assert raised.value is error
    assert len(way.reports(caplog)) == way.background


def test_a_handler_that_emits_to_itself_is_cut_short(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    def twice(_: object) -> None:
        way.emit("again")
        way.emit("again")

    handler = way.attach(twice)
    way.emit("a")
    assert way.flush()
    # In the background each metric is within two calls: to be queued, and of the handler.
    levels = MOST_NESTED // 2 if way.background and isinstance(handler, Kept) else MOST_NESTED
    assert len(handler.got) == 2**levels - 1
    (report,) = way.reports(caplog)
    assert report.endswith(" causes calls of itself: those that are more than 8 deep are dropped")
    way.emit("a")
    assert way.flush()
    assert len(handler.got) == 2 * (2**levels - 1)


def test_a_handler_may_emit_to_another_one(way: Way) -> None:
    last = way.attach(group="last")
    way.attach(lambda _: way.emit("seen", "last"))
    way.emit("a")
    while way.background and not last.got:
        way.flush(0.01)
    assert way.names(last) == ["seen"]


def test_threads_may_emit_and_configure_at_once(way: Way) -> None:
    handlers, every, barrier = [way.attach()], 200, threading.Barrier(4)

    def emit(number: int) -> None:
        barrier.wait()
        for count in range(every):
            way.emit(f"{number}.{count}")

    def configure() -> None:
        barrier.wait()
        for _ in range(every):
            handlers.append(way.attach())
            assert way.flush()

    threads = [threading.Thread(target=emit, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=configure))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert way.flush()
    found = sorted(name for handler in handlers for name in way.names(handler))
    assert found == sorted(f"{number}.{count}" for number in range(3) for count in range(every))


def test_nobody_waits_for_the_background(behind: Way, gated: Gated) -> None:
    blocked, other = behind.attach(gated), behind.attach(group="other")
    for count in range(100):
        behind.emit(str(count))  # returns, though the first call of the handler does not
    gated.begun.wait()
    assert not behind.flush(0)
    behind.emit("a", "other")  # has a thread of its own
    while not other.got:
        behind.flush(0.01)
    assert not behind.flush(0.01)
    gated.may.set()
    assert behind.flush()
    assert behind.names(blocked) == [str(count) for count in range(100)]
    assert threading.get_ident() not in blocked.threads + other.threads


def test_a_fork_has_a_queue_of_its_own(behind: Way, gated: Gated) -> None:
    """While the parent's is full, and its thread in a call."""
    handler = behind.attach(gated)
    behind.emit("first")
    gated.begun.wait()
    behind.emit("second")

    def work() -> bool:
        handler.then = lambda _: None
        before = len(handler.got)
        assert behind.flush(0)
        behind.emit("of the child")
        return behind.flush() and behind.names(handler)[before:] == ["of the child"]

    assert code_of_fork(work) == 0
    gated.may.set()
    assert behind.flush()
    assert behind.names(handler) == ["first", "second"]
