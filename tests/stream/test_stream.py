"""The stream of events: order, slow observers, observers that raise, bounds, threads, signals, forks."""

from __future__ import annotations

import gc
import signal
import threading
from types import FrameType

import pytest

from phalanx._base import stderr
from phalanx._base.threads import Latch
from phalanx._events import stream as stream_module
from phalanx._events.kinds import Event, EventsDropped, GroupState
from phalanx._events.stream import EventStream
from tests.support.forks import code_of_fork
from tests.support.helpers import TIMEOUT


def emit(stream: EventStream, number: int, attempt: int = 0) -> None:
    stream.emit(GroupState, attempt, number, state="RUNNING")


class Kept:
    """Keeps what it gets; each call waits for ``gate``, if there is one, and then raises ``error``."""

    def __init__(self, gate: Latch | None = None, error: BaseException | None = None) -> None:
        self.events: list[Event] = []
        self.called = Latch()
        self._gate = gate
        self._error = error

    def __call__(self, events: list[Event]) -> None:
        self.called.open()
        if self._gate is not None:
            assert self._gate.wait(TIMEOUT)
        self.events += events
        if self._error is not None:
            raise self._error

    @property
    def numbers(self) -> list[int]:
        return [event.moment for event in self.events if isinstance(event, GroupState)]


def test_a_slow_observer_holds_up_nobody_and_misses_nothing() -> None:
    stream, gate = EventStream(), Latch()
    slow, quick = Kept(gate), Kept()
    stream.subscribe("slow", slow)
    stream.subscribe("quick", quick)
    for number in range(5000):
        emit(stream, number)
    assert stream.drain(TIMEOUT, ("quick",)) == []
    assert quick.numbers == list(range(5000))
    assert slow.events == []
    assert stream.drain(0.01, ("slow",)) == ["slow"]
    gate.open()
    assert stream.close(TIMEOUT) == []
    assert slow.numbers == list(range(5000))
    assert [event.to_object() for event in slow.events] == [event.to_object() for event in quick.events]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_one_that_raises_gets_the_rest_and_is_said_once(
    error: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = EventStream()
    bad, good = Kept(error=error), Kept()
    stream.subscribe("bad", bad)
    stream.subscribe("good", good)
    for number in range(3):
        emit(stream, number)
        assert stream.drain(TIMEOUT) == []
    assert stream.close(TIMEOUT) == []
    assert bad.numbers == good.numbers == [0, 1, 2]
    stderr.finish()
    assert capfd.readouterr().err == f"phalanx: bad: an observer of events has raised: {error!r}\n"


def test_what_finds_no_room_is_counted_and_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stream_module, "MOST", 3)
    stream, gate = EventStream(), Latch()
    slow, quick = Kept(gate), Kept()
    stream.subscribe("slow", slow)
    stream.subscribe("quick", quick)
    for number in range(10):
        emit(stream, number)
        if not number:
            assert slow.called.wait(TIMEOUT)
        assert stream.drain(TIMEOUT, ("quick",)) == []
    gate.open()
    assert stream.drain(TIMEOUT) == []
    emit(stream, 10)
    assert stream.close(TIMEOUT) == []
    assert quick.numbers == list(range(11))
    assert slow.numbers == [0, 1, 2, 3, 10]
    assert [event.count for event in slow.events if isinstance(event, EventsDropped)] == [6]
    assert [type(event) for event in slow.events[-2:]] == [EventsDropped, GroupState]
    stderr.finish()
    assert capfd.readouterr().err == "phalanx: slow is too slow: events were dropped, 6 so far\n"


def test_events_of_many_threads_are_all_there_each_in_its_order() -> None:
    stream, kept = EventStream(), Kept()
    stream.subscribe("kept", kept)

    def work(thread: int) -> None:
        for number in range(2000):
            emit(stream, number, thread)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.close(TIMEOUT) == []
    for number in range(8):
        assert [event.moment for event in kept.events if event.attempt == number] == list(range(2000))


@pytest.mark.long
def test_a_signal_between_two_lines_loses_nothing() -> None:
    """Its handler raises, as ours do; what was emitted before is delivered all the same."""

    class RaisedError(Exception):
        pass

    def raises(_number: int, _frame: FrameType | None) -> None:
        raise RaisedError

    stream, kept = EventStream(), Kept()
    stream.subscribe("kept", kept)
    emitted, raised, number = set[int](), [False], 0
    before = signal.signal(signal.SIGVTALRM, raises)
    try:
        gc.disable()  # an exception that is raised in a callback of it is lost
        for _ in range(20):
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0002)
                for _ in range(20_000):
                    emit(stream, number)
                    emitted.add(number)
                    number += 1
                    raised.append(False)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except RaisedError:
                number += 1
                raised[-1:] = [True]
            assert stream.drain(TIMEOUT) == []
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        gc.enable()
    assert stream.close(TIMEOUT) == []
    assert kept.numbers == sorted(set(kept.numbers))
    assert emitted <= set(kept.numbers)
    assert sum(raised) > 10


def test_a_fork_of_the_process_has_no_observers() -> None:
    stream, kept = EventStream(), Kept()
    stream.subscribe("kept", kept)
    emit(stream, 1)
    assert stream.drain(TIMEOUT) == []

    def work() -> bool:
        emit(stream, 2)
        return stream.drain(TIMEOUT) == [] and stream.close(TIMEOUT) == [] and kept.numbers == [1]

    assert code_of_fork(work) == 0
    emit(stream, 3)
    assert stream.close(TIMEOUT) == []
    assert kept.numbers == [1, 3]


def test_what_comes_after_its_end_is_delivered_to_who_waits() -> None:
    """A group that is dropped ends its stream before its last events are emitted."""
    stream, kept = EventStream(), Kept()
    stream.subscribe("kept", kept)
    stream.end()
    for thread in threading.enumerate():
        if thread.name == "kept":
            thread.join(TIMEOUT)
    emit(stream, 1)
    assert stream.drain(TIMEOUT) == []
    assert kept.numbers == [1]
    assert stream.close(TIMEOUT) == []


def test_where_no_thread_can_be_started_who_waits_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream, kept = EventStream(), Kept()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        stream.subscribe("kept", kept)
    emit(stream, 1)
    assert kept.events == []
    assert stream.close(TIMEOUT) == []
    assert kept.numbers == [1]


@pytest.mark.parametrize("begins", [True, False])
def test_what_is_held_is_delivered_later(*, begins: bool) -> None:
    """No thread is there when somebody forks."""
    stream, kept = EventStream(is_held=True), Kept()
    stream.subscribe("kept", kept)
    emit(stream, 1)
    assert [thread.name for thread in threading.enumerate() if thread.name == "kept"] == []
    if begins:
        stream.begin()
        assert kept.called.wait(TIMEOUT)
        emit(stream, 2)
    assert stream.close(TIMEOUT) == []
    assert kept.numbers == [1, 2][: 1 + begins]


def test_an_observer_that_waits_for_itself_does_not_wait() -> None:
    stream = EventStream()
    late: list[list[str]] = []
    stream.subscribe("itself", lambda _events: late.append(stream.drain(TIMEOUT)))
    emit(stream, 1)
    assert stream.close(TIMEOUT) == []
    assert late == [[]]


def test_an_entry_that_cannot_be_made_loses_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    stream, kept = EventStream(), Kept()
    stream.subscribe("kept", kept)
    stream.emit(GroupState, 0, 1)
    emit(stream, 2)
    assert stream.close(TIMEOUT) == []
    assert kept.numbers == [2]
    stderr.finish()
    assert "GroupState: expected the fields state, got" in capfd.readouterr().err
