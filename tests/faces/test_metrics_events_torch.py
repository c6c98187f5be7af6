"""The same programs emit the same metrics and record the same events with torch and with Phalanx: both are run."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from tests.support.told import unconfigured

F = TypeVar("F")

ELASTIC = "torch.distributed.elastic"

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    theirs = importlib.import_module(f"{ELASTIC}.metrics.api")
    monkeypatch.setattr(theirs, "_metrics_map", {})
    monkeypatch.setattr(theirs, "_default_metrics_handler", theirs.NullMetricHandler())
    handlers = importlib.import_module(f"{ELASTIC}.events.handlers")
    monkeypatch.setattr(handlers, "_log_handlers", dict(handlers._log_handlers))
    monkeypatch.setattr(importlib.import_module(f"{ELASTIC}.events"), "_events_loggers", {})
    with unconfigured(monkeypatch):
        yield
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torchelastic-events-") and isinstance(logger, logging.Logger):
            logger.handlers = []


def both(module: str, program: Callable[[Any], None]) -> tuple[str, str]:
    """What a program prints with each, without times."""
    found = []
    for package in (ELASTIC, "phalanx"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            program(importlib.import_module(f"{package}.{module}"))
        found.append(re.sub(r"\d+\.\d{3,}", "TIME", out.getvalue()))
    return found[0], found[1]


def show(*values: object) -> None:
    sys.stdout.write(" ".join(map(str, values)) + "\n")


def typed(decorator: Any) -> Callable[[F], F]:
    """Say of either package's decorator what it is."""
    return decorator  # type: ignore[no-any-return]  # of torch's, nothing is known


def shown(metrics: Any) -> Any:
    class Shown(metrics.MetricHandler):  # type: ignore[misc]  # either package's
        def emit(self, metric_data: Any) -> None:
            timestamp, group, name, value = metric_data
            assert metric_data == (metric_data.timestamp, metric_data.group_name, metric_data.name, metric_data.value)
            show(type(timestamp), group, name, type(value), value if "duration" not in name else value >= 0)

    return Shown()


def emits(metrics: Any) -> None:
    """What is configured, how, and what comes of it."""
    metrics.put_metric("before", 1)
    stream = metrics.getStream("late")
    metrics.configure(shown(metrics))
    metrics.configure(metrics.NullMetricHandler(), group="nowhere")
    metrics.configure(metrics.ConsoleMetricHandler(), "console")
    stream.add_value("before", 1)
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2.5, "mine")
    metrics.put_metric("c", None, metric_group="nowhere")
    metrics.put_metric("d", {"x": 1}, "console")
    metrics.getStream("mine").add_value("e", 3)
    metrics.publish_metric("mine", "f", 4)
    metrics.ConsoleMetricHandler().emit(metrics.MetricData(1.5, "g", "n", 3))
    show(metrics.MetricData(1, "g", "n", 3), metrics.MetricsConfig().params, metrics.MetricsConfig({"a": "b"}).params)
    show(metrics.initialize_metrics(), metrics.initialize_metrics(metrics.MetricsConfig()))
    show(metrics.getStream("mine").group_name, type(metrics.get_elapsed_time_ms(1.0)))
    with pytest.raises(TypeError, match="abstract"):
        metrics.MetricHandler()


def measures(metrics: Any) -> None:
    """What the decorators emit, and leave of the function."""
    metrics.configure(shown(metrics))

    def plain(value: int, *, error: BaseException | None = None) -> int:
        """A docstring."""
        if error:
            raise error
        return value

    at_top = type(sys)("package.module")
    exec("def top():\n    return 3", at_top.__dict__)  # noqa: S102 - a function at the top of a module
    at_top.top.__module__ = "package.module"

    class Own:
        @typed(metrics.prof)
        def method(self) -> int:
            return 1

        @typed(metrics.prof(group="mine"))
        def generator(self) -> Iterator[int]:
            yield 2

        @staticmethod
        @typed(metrics.prof)
        def static() -> int:
            return 3

        @classmethod
        @typed(metrics.prof)
        def made(cls) -> str:
            return cls.__name__

    show(metrics.prof(plain)(7), metrics.prof(at_top.top)(), metrics.prof(max)(1, 2), metrics.prof(plain).__doc__)
    show(Own().method(), next(Own().generator()), Own.static(), Own.made(), Own().made())
    for error in (ValueError("x"), KeyboardInterrupt(), SystemExit(0)):
        for function in (metrics.prof(plain), metrics.prof(group="mine")(plain), metrics.profile("old")(plain)):
            with pytest.raises(type(error)) as caught:
                function(7, error=error)
            show(caught.value is error)
    show(metrics.profile()(plain)(8))


def warns(metrics: Any) -> None:
    calls: list[Callable[[], Any]] = [lambda: metrics.publish_metric("g", "n", 1), lambda: metrics.profile("g")]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        show([(each.category.__name__, each.filename == __file__) for each in caught])


@pytest.mark.parametrize("program", [emits, measures, warns])
def test_metrics(program: Callable[[Any], None]) -> None:
    there, here = both("metrics", program)
    assert here == there
    assert len(here.splitlines()) > 1


def texts(events: Any) -> None:
    """Texts of events, and events of texts."""
    for source in events.EventSource:
        show(source, repr(source), source.value, source == source.value)
    for metadata in ({}, {"a": 1, "b": 2.5, "c": "ü\n", "d": None, "e": True}, {"x": float("nan")}, {1: [2, {"y": 3}]}):
        event = events.Event("name", events.EventSource.WORKER, 1700000000000, metadata)
        show(event, repr(event), event.serialize())
        again = events.Event.deserialize(event.serialize())
        show(again, again == event, events.Event.deserialize(event) is event)
    show(events.Event("a", events.EventSource.AGENT), events.Event(source="AGENT", name="b").serialize())
    for state in events.NodeState:
        event = events.RdzvEvent("name", "run", "message", "host", 3, state, "there:1", 2, 1, "trace")
        show(state, repr(event), event, events.RdzvEvent.deserialize(event.serialize()) == event)
    show(events.RdzvEvent("name", "run", "message", "host", 3, events.NodeState.INIT))
    for wrong in (3, "{", "{}", '{"source": "x"}', '{"source": "AGENT", "x": 1}'):
        try:
            events.Event.deserialize(wrong)
        except Exception:  # noqa: BLE001 - which, differs
            show("refused", wrong)
    show(events.EventMetadataValue)


class Shown(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        show(record.levelname, record.args, record.getMessage())


def put_handler(events: Any, destination: str) -> None:
    """Register a handler, as far as torch lets one."""
    if events.__name__.startswith("torch"):
        importlib.import_module(f"{events.__name__}.handlers")._log_handlers[destination] = Shown()
    else:
        events.register_logging_handler(destination, Shown())


def records(events: Any) -> None:
    get_logging_handler = importlib.import_module(f"{ELASTIC}.events").get_logging_handler
    event = events.Event("name", events.EventSource.WORKER, metadata={"a": "100 %s"})
    events.record(event)
    events.record(event, "null")
    events.record(event, destination="dynamic_rendezvous")
    show(type(events.get_logging_handler()).__name__, isinstance(get_logging_handler("console"), logging.StreamHandler))
    calls: list[Callable[[], Any]] = [
        lambda: events.record(event, "nobody"),
        lambda: events.get_logging_handler("nobody"),
    ]
    for call in calls:
        with pytest.raises(KeyError, match="nobody"):
            call()
    put_handler(events, "mine")
    events.record(event, "mine")
    events.record(events.RdzvEvent("n", "r", "m", "h", 1, events.NodeState.INIT), "mine")


def records_of_a_rendezvous(events: Any) -> None:
    def function(**more: Any) -> None:
        events.construct_and_record_rdzv_event("run", "100 %s", events.NodeState.RUNNING, hostname="h", **more)

    function()
    put_handler(events, "dynamic_rendezvous")
    function()
    function(name="own", pid=7, master_endpoint="there:1", local_id=0, rank=0)
    function(pid=0)
    try:
        fail()
    except ZeroDivisionError:
        events.construct_and_record_rdzv_event("run", "m", events.NodeState.FAILED, "own", "h", 1)
    events.record_rdzv_event(events.RdzvEvent("n", "r", "m", "h", 1, events.NodeState.SUCCEEDED))


def fail() -> None:
    _ = 1 // 0


@pytest.mark.parametrize("program", [texts, records, records_of_a_rendezvous])
def test_events(program: Callable[[Any], None]) -> None:
    there, here = both("events", program)
    assert here == there
    assert len(here.splitlines()) > 1


def test_the_console(capfd: pytest.CaptureFixture[str]) -> None:
    """On stderr: torch's handler keeps what that was when it was imported, in a test that may have closed it since."""
    found = []
    for package in (ELASTIC, "phalanx"):
        events = importlib.import_module(f"{package}.events")
        handler = events.get_logging_handler("console")
        handler.stream = sys.stderr
        events.record(events.Event("name", events.EventSource.AGENT), "console")
        found.append(capfd.readouterr().err)
    assert found[0] == found[1]
    assert json.loads(found[0])["name"] == "name"


def test_what_is_read_by_the_other() -> None:
    ours, theirs = (importlib.import_module(f"{package}.events") for package in ("phalanx", ELASTIC))
    for one, other in ((ours, theirs), (theirs, ours)):
        event = one.Event("name", one.EventSource.AGENT, 5, {"a": 1})
        assert other.Event.deserialize(event.serialize()).serialize() == event.serialize()
        event = one.RdzvEvent("n", "r", "m", "h", 1, one.NodeState.INIT)
        assert other.RdzvEvent.deserialize(event.serialize()).serialize() == event.serialize()


NAMES = ("torchelastic-events-", "phalanx.events.")
"""How the loggers of destinations are called: torch's, and ours."""


def test_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As the tables of the pages say."""

    def lines() -> list[str]:
        return capsys.readouterr().out.splitlines()

    ours, theirs = (importlib.import_module(f"{package}.metrics") for package in ("phalanx", ELASTIC))

    class Fails:
        def emit(self, metric_data: Any) -> None:  # noqa: ARG002 - it raises
            raise OSError("no such host")

    function = {package: package.prof(lambda: 3) for package in (ours, theirs)}
    for package in (ours, theirs):
        package.configure(Fails())
    ours.put_metric("a", 1)
    assert function[ours]() == 3
    for call in (lambda: theirs.put_metric("a", 1), function[theirs]):
        with pytest.raises(OSError, match="host"):
            call()
    theirs.configure(3)
    with pytest.raises(TypeError):
        ours.configure(3)

    ours, theirs = (importlib.import_module(f"{package}.events") for package in ("phalanx", ELASTIC))
    for text, error in ((3, UnboundLocalError), ("{}", KeyError), ('{"source": "AGENT", "x": 1}', TypeError)):
        with pytest.raises(error):
            theirs.Event.deserialize(text)
    event = {package: package.Event("a", package.EventSource.AGENT, 0, {"x": object}) for package in (ours, theirs)}
    assert "class 'object'" in event[ours].serialize()
    with pytest.raises(TypeError):
        event[theirs].serialize()
    monkeypatch.setenv("LOGLEVEL", "debug")
    put_handler(ours, "mine")
    put_handler(theirs, "mine")
    ours.record(event[ours], "mine")
    assert len(lines()) == 1
    with pytest.raises(ValueError, match="debug"):
        theirs.record(theirs.Event("a", theirs.EventSource.AGENT), "mine")

    monkeypatch.delenv("LOGLEVEL")
    put_handler(theirs, "other")
    for package, destination in ((ours, "mine"), (theirs, "other")):
        for shown in (1, int(package is ours)):
            package.record(package.Event("a", package.EventSource.AGENT), destination)
            assert len(lines()) == shown
            logging.getLogger(f"{NAMES[package is ours]}{destination}").disabled = True  # as logging.config does
