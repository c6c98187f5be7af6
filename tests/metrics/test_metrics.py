"""`phalanx.metrics`: which handler gets what, and what a handler that raises, blocks or emits does to a program."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx import metrics
from phalanx._base import clock
from phalanx._base.handler_guard import MOST_REPORTED
from tests.support.helpers import TIMEOUT
from tests.support.told import Gated, Kept, KeptRecords, fail, unconfigured
from tests.support.workers import ROOT


@pytest.fixture(autouse=True)
def _nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with unconfigured(monkeypatch):
        yield


@pytest.fixture
def kept() -> Kept:
    handler = Kept()
    metrics.configure(handler)
    return handler


# --- groups


def test_a_metric_goes_to_the_handler_of_its_group() -> None:
    everything, own = Kept(), Kept()
    metrics.put_metric("before", 1)
    metrics.configure(everything)
    metrics.configure(own, "mine")
    before = time.time()
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2, "mine")
    metrics.getStream("other").add_value("c", 3)
    assert [data[1:] for data in everything.got] == [("torchelastic", "a", 1), ("other", "c", 3)]
    assert [data[1:] for data in own.got] == [("mine", "b", 2)]
    assert before <= own.got[0].timestamp <= time.time()


def test_a_stream_keeps_the_handler_that_the_group_had(kept: Kept) -> None:
    stream = metrics.getStream("mine")
    metrics.configure(metrics.NullMetricHandler(), "mine")
    stream.add_value("a", 1)
    metrics.put_metric("b", 1, "mine")
    assert kept.names == ["a"]
    assert stream.handler is kept
    stream.handler = other = Kept()
    stream.add_value("c", 1)
    assert other.names == ["c"]


@pytest.mark.parametrize("wrong", [None, 3, metrics.ConsoleMetricHandler, print])
def test_what_is_no_handler_is_refused(wrong: Any) -> None:
    for configure in (metrics.configure, metrics.BackgroundMetricHandler):
        with pytest.raises(TypeError, match="handler: expected an object with a method emit, got"):
            configure(wrong)


def test_any_object_that_can_emit_is_a_handler() -> None:
    class Own:
        def emit(self, metric_data: metrics.MetricData) -> None:
            found.append(metric_data.name)

    found: list[str] = []
    metrics.configure(Own())  # type: ignore[arg-type]  # as of another library
    metrics.put_metric("a", 1)
    assert found == ["a"]


def test_a_metric_is_a_named_tuple() -> None:
    data = metrics.MetricData(1.5, "g", "n", 3)
    assert pickle.loads(pickle.dumps(data)) == data == (1.5, "g", "n", 3)
    assert repr(data) == "MetricData(timestamp=1.5, group_name='g', name='n', value=3)"


def test_old_names_warn(kept: Kept) -> None:
    with pytest.warns(FutureWarning, match="call put_metric") as warnings:
        metrics.publish_metric("g", "n", 3)
    assert warnings[0].filename == __file__
    with pytest.warns(FutureWarning, match="use prof") as warnings:
        wrapped = metrics.profile("g")(fail)
    assert warnings[0].filename == __file__
    with pytest.raises(OSError, match="host"):
        wrapped(0)
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="parentheses"):
        metrics.profile(fail)  # type: ignore[arg-type]  # what a decorator without parentheses does
    assert kept.names == ["n", "fail.failure", "fail.duration.ms"]
    assert {data.group_name for data in kept.got} == {"g"}


# --- prof


class Trainer:
    @metrics.prof
    def step(self, wrong: BaseException | None = None) -> int:
        """Make a step."""
        if wrong:
            raise wrong
        return 7

    @metrics.prof(group="static")
    @staticmethod
    def fixed(value: int) -> int:
        return value

    @metrics.prof
    @classmethod
    def made(cls) -> type[Trainer]:
        return cls

    @metrics.prof
    async def wait(self, wrong: BaseException | None = None) -> int:
        await asyncio.sleep(0)
        return self.step(wrong)


@metrics.prof
def function() -> None:
    pass


def test_names_of_functions(kept: Kept) -> None:
    @metrics.prof()
    def inner() -> None:
        pass

    class Called:
        def __call__(self, value: int) -> int:
            return value

    assert Trainer().step() == 7
    assert (Trainer.fixed(3), Trainer().fixed(4)) == (3, 4)
    assert (Trainer.made(), Trainer().made()) == (Trainer, Trainer)
    function()
    inner()
    assert metrics.prof(functools.partial(pow, 2))(5) == 32
    assert metrics.prof(Called())(5) == 5
    inside = f"{test_names_of_functions.__name__}.<locals>"
    expected = ["Trainer.step", "Trainer.fixed", "Trainer.fixed", "Trainer.made", "Trainer.made"]
    expected += ["test_metrics.function", f"{inside}.inner", "builtins.pow", f"{inside}.Called"]
    assert kept.names == [f"{name}.{end}" for name in expected for end in ("success", "duration.ms")]
    assert {data.group_name for data in kept.got if "fixed" in data.name} == {"static"}
    assert Trainer.step.__doc__ == "Make a step."


@pytest.mark.parametrize(
    "error, ends",
    [(ValueError("x"), ["failure", "duration.ms"]), (KeyboardInterrupt(), ["duration.ms"]),
     (SystemExit(0), ["duration.ms"])],
)  # fmt: skip
def test_a_function_that_raises(kept: Kept, error: BaseException, ends: list[str]) -> None:
    with pytest.raises(type(error)) as raised:
        Trainer().step(error)
    assert raised.value is error
    assert error.__context__ is None
    assert kept.names == [f"Trainer.step.{end}" for end in ends]


def test_a_coroutine_is_measured_to_its_end(kept: Kept) -> None:
    assert asyncio.run(Trainer().wait()) == 7
    assert kept.names[2:] == ["Trainer.wait.success", "Trainer.wait.duration.ms"]
    with pytest.raises(ValueError, match="x"):
        asyncio.run(Trainer().wait(ValueError("x")))
    assert kept.names[6:] == ["Trainer.wait.failure", "Trainer.wait.duration.ms"]


def test_a_coroutine_that_is_cancelled_has_a_duration_alone(kept: Kept) -> None:
    async def main() -> None:
        @metrics.prof
        async def forever() -> None:
            begun.set()
            await asyncio.Event().wait()

        begun = asyncio.Event()
        task = asyncio.create_task(forever())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert [name.rpartition("forever.")[2] for name in kept.names] == ["duration.ms"]


def test_durations_do_not_follow_the_wall_clock(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 100.25])
    monkeypatch.setattr(clock, "now", lambda: next(moments))
    monkeypatch.setattr(clock, "wall", lambda: 5.0)
    function()
    assert kept.got[1].value == 250
    assert isinstance(kept.got[1].value, int)


@pytest.mark.parametrize("wrong", ["group", 3, property(fail)])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"prof: expected a function, got .*; a group is given by name"):
        metrics.prof(wrong)


# --- handlers that fail


def reports(caplog: pytest.LogCaptureFixture, name: str = "phalanx.metrics") -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


def test_a_handler_that_raises_changes_no_function() -> None:
    handler = Kept(fail)
    metrics.configure(handler)
    assert Trainer().step() == 7
    with pytest.raises(ValueError, match="x") as raised:
        Trainer().step(ValueError("x"))
    assert raised.value.__context__ is None
    assert [name.rpartition("step.")[2] for name in handler.names] == [
        "success", "duration.ms", "failure", "duration.ms",
    ]  # fmt: skip


def test_logging_that_emits_metrics_or_raises_ends() -> None:
    """A failure is logged, the logging emits a metric, which fails, and raises."""

    def emit_and_raise(_record: object) -> None:
        metrics.put_metric("logged", 1)
        raise OSError("logging")

    logged = KeptRecords(emit_and_raise)
    kept = Kept(fail)
    metrics.configure(kept)
    logging.getLogger("phalanx.metrics").addHandler(logged)
    try:
        metrics.put_metric("a", 1)
    finally:
        logging.getLogger("phalanx.metrics").removeHandler(logged)
    assert kept.names == ["a", "logged"]
    assert len(logged.got) == 1


def test_reports_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A program that makes a handler for each metric keeps a bounded number of them, and of log lines."""
    for _ in range(MOST_REPORTED + 5):
        metrics.MetricStream("g", Kept(fail)).add_value("a", 1)
    assert len(reports(caplog)) == MOST_REPORTED


def test_the_console_gets_whole_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", Stream())
    metrics.ConsoleMetricHandler().emit(metrics.MetricData(1.5, "g", "n", 3))
    assert written == ["[1.5][g]: n=3\n"]
    metrics.configure(metrics.ConsoleMetricHandler())
    monkeypatch.setattr(sys, "stdout", None)
    metrics.put_metric("a", 1)
    assert len(reports(caplog)) == 1


@pytest.mark.parametrize(
    "value", [10**5000, "\ud800", object(), float("nan"), None, b"\0"], ids=lambda it: type(it).__name__
)
def test_values_of_all_kinds(value: Any, kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    metrics.put_metric("a", value)
    assert kept.got[0].value is value
    metrics.configure(metrics.ConsoleMetricHandler())
    metrics.put_metric("a", value)
    assert len(reports(caplog)) == (isinstance(value, int))  # Python refuses to write so many digits


# --- threads, forks, signals


@pytest.fixture
def gated() -> Iterator[Gated]:
    it = Gated()
    yield it
    it.may.set()


def test_what_is_too_much_for_the_background_is_dropped(gated: Gated) -> None:
    """It is reported, once, and who emits does not wait for logging, either."""
    report = Gated()
    told, kept = KeptRecords(report), Kept(gated)
    logging.getLogger("phalanx.metrics").addHandler(told)
    handler = metrics.BackgroundMetricHandler(kept)
    handler._delivery._most = 3
    metrics.configure(handler)
    metrics.put_metric("first", 0)
    gated.begun.wait()
    for count in range(5):
        metrics.put_metric(str(count), count)
    gated.may.set()
    assert handler.flush(TIMEOUT)
    assert kept.names == ["first", "0", "1", "2"]
    assert handler._delivery.dropped == 2
    report.begun.wait()
    report.may.set()
    logging.getLogger("phalanx.metrics").removeHandler(told)
    assert [record.getMessage() for record in told.got] == [
        "the handler tests.support.told.Kept is too slow, or has no thread: what finds no room in its queue is dropped"
    ]


def test_a_handler_that_flushes_itself_does_not_wait() -> None:
    answers: list[bool] = []
    handler = metrics.BackgroundMetricHandler(Kept(lambda _: answers.append(handler.flush(TIMEOUT))))
    metrics.configure(handler)
    metrics.put_metric("a", 1)
    assert handler.flush(TIMEOUT)
    assert answers == [False]


def test_a_signal_handler_may_emit_at_any_moment(gated: Gated) -> None:
    """In the midst of a submission, too: the thread holds its lock."""
    kept = Kept(gated)
    handler = metrics.BackgroundMetricHandler(kept)
    metrics.configure(handler)
    metrics.put_metric("first", 0)
    gated.begun.wait()
    executor = handler._delivery._executor()
    with executor._lock:
        metrics.put_metric("second", 0)
    gated.may.set()
    assert handler.flush(TIMEOUT)
    assert kept.names == ["first", "second"]


SHOWS = """
import multiprocessing, sys, threading
from phalanx import metrics

class Shown(metrics.MetricHandler):
    def emit(self, metric_data):
        if metric_data.value == int(sys.argv[1]):
            threading.Event().wait()
        print(metric_data.name, flush=True)

def work():
    metrics.configure(metrics.BackgroundMetricHandler(Shown()))
    for count in range(100):
        metrics.put_metric(str(count), count)

"""
ENDS = {
    "a program": "work()",
    "a fork": 'it = multiprocessing.get_context("fork").Process(target=work); it.start(); it.join()',  # by `os._exit`
}


@pytest.mark.parametrize("blocks", [-1, pytest.param(98, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ENDS)
def test_the_end_waits_for_the_background_and_so_long(what: str, blocks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOWS + ENDS[what], str(blocks)],
        env={"PYTHONPATH": f"{ROOT}/src"}, check=True, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.stdout.split() == [str(count) for count in range(blocks if blocks > 0 else 100)]
    lost = "phalanx-metrics: 2 not delivered in 2 s at the interpreter's exit\n"
    assert done.stderr == (lost if blocks > 0 else "")
