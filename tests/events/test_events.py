"""`phalanx.events`: texts, destinations, and handlers that raise or block where events are recorded or posted."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx import events
from phalanx.events import Event, EventSource, NodeState, RdzvEvent
from tests.support.helpers import TIMEOUT
from tests.support.told import KeptRecords, fail, unconfigured
from tests.support.workers import ROOT


@pytest.fixture(autouse=True)
def _nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with unconfigured(monkeypatch):
        yield


def event(name: str = "a", **metadata: Any) -> Event:
    return Event(name, EventSource.WORKER, 5, metadata)


def registered(destination: str = "mine", then: Any = lambda _: None) -> KeptRecords:
    handler = KeptRecords(then)
    events.register_logging_handler(destination, handler)
    return handler


def names(handler: KeptRecords) -> list[str]:
    return [json.loads(text)["name"] for text in handler.texts]


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "phalanx.events"]


# --- texts


def test_texts() -> None:
    text = '{"name": "a", "source": "WORKER", "timestamp": 5, "metadata": {"x": 1.5, "y": null, "z": "\\u00fc"}}'
    one = event(x=1.5, y=None, z="ü")
    assert one.serialize() == str(one) == text
    assert Event.deserialize(text) == one
    assert Event.deserialize(one) is one
    assert Event.deserialize(text).source is EventSource.WORKER
    assert pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.asdict(one)["metadata"] == {"x": 1.5, "y": None, "z": "ü"}
    assert dataclasses.replace(one, name="b").name == "b"


def test_texts_of_a_rendezvous() -> None:
    one = RdzvEvent("a", "run", "message", "host", 1, NodeState.FAILED, rank=0)
    assert json.loads(one.serialize()) == {
        "name": "a", "run_id": "run", "message": "message", "hostname": "host", "pid": 1, "node_state": "FAILED",
        "master_endpoint": "", "rank": 0, "local_id": None, "error_trace": "",
    }  # fmt: skip
    assert RdzvEvent.deserialize(one.serialize()) == one


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "Expecting property name"),
        ("[]", "data: expected a JSON object, got list"),
        ("{}", "data: has no 'source'"),
        ('{"source": "NOBODY"}', "data: source: expected one of AGENT, WORKER, got 'NOBODY'"),
        ('{"source": []}', r"data: source: expected one of AGENT, WORKER, got \[\]"),
        ('{"source": "AGENT"}', "data: .*missing 1 required positional argument: 'name'"),
        ('{"source": "AGENT", "name": "a", "x": 1}', "data: .*unexpected keyword argument 'x'"),
        ("[" * 100_000, "data: nested too deeply"),
    ],
    ids=range(8),
)
def test_texts_that_are_no_events(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Event.deserialize(text)


def test_what_is_no_text() -> None:
    for data in (b"{}", None, RdzvEvent("a", "r", "m", "h", 1, NodeState.INIT)):
        with pytest.raises(TypeError, match="data: expected a JSON text or an Event, got"):
            Event.deserialize(data)  # type: ignore[arg-type]  # what is tested


class Unkind:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)

    def __str__(self) -> str:
        raise OSError("str")

    def __float__(self) -> float:
        raise OSError("float")


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "value, shown",
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1.5]), 1.5),
        (np.array([1, 2]), "[1 2]"),
        (Path("/tmp/x"), "/tmp/x"),
        (b"x", "b'x'"),
        (Point(3), {"x": 3}),
        (Point, "<class 'tests.events.test_events.Point'>"),
        (Unkind(), "<Unkind>"),
        (10**5000, "<int>"),
        ({1: {2: 3}}, {"1": {"2": 3}}),
        ({1: {(2, 3): 4}}, "{1: {(2, 3): 4}}"),
        ([np.int64(3), {4}], [3, "{4}"]),
        ("\ud800", "\ud800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_metadata_of_all_kinds(value: Any, shown: Any) -> None:
    assert json.loads(event(x=value, y=1).serialize())["metadata"] == {"x": shown, "y": 1}


def test_metadata_that_hold_themselves() -> None:
    one = event(y=1)
    one.metadata["x"] = one.metadata  # type: ignore[assignment]  # what is tested
    assert json.loads(one.serialize())["metadata"]["y"] == 1
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert json.loads(event(x=deep, y=1).serialize())["metadata"] == {"x": "<list>", "y": 1}


def test_metadata_that_a_thread_changes() -> None:
    one, end = event(), threading.Event()

    def change() -> None:
        while not end.is_set():
            for number in range(100):
                one.metadata[str(number)] = number
            one.metadata.clear()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            json.loads(one.serialize())
    finally:
        end.set()
        thread.join()


# --- destinations


def test_the_handlers_that_there_are() -> None:
    assert isinstance(events.get_logging_handler(), logging.NullHandler)
    assert isinstance(events.get_logging_handler("dynamic_rendezvous"), logging.NullHandler)
    console = events.get_logging_handler("console")
    assert isinstance(console, logging.StreamHandler)
    assert events.get_logging_handler("console") is console


def test_a_destination_that_there_is_not() -> None:
    registered("mine")
    message = r"there is no event handler 'mien': there are 'console', 'dynamic_rendezvous', 'mine', 'null'$"
    for ask in (lambda: events.get_logging_handler("mien"), lambda: events.record(event(), "mien")):
        with pytest.raises(events.UnknownDestinationError, match=message) as raised:
            ask()
        assert isinstance(raised.value, KeyError)


def test_the_console_is_what_stderr_is_now(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    events.record(event("a"), "console")
    assert names_of(capsys.readouterr().err) == ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        events.record(event("b"), "console")
    events.record(event("c"), "console")
    assert names_of(capsys.readouterr().err) == ["c"]
    handler = events.get_logging_handler("console")
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(sys.stdout)
    events.record(event("d"), "console")
    assert names_of(capsys.readouterr().out) == ["d"]


def names_of(lines: str) -> list[str]:
    return [json.loads(line)["name"] for line in lines.splitlines()]


def test_what_a_handler_gets() -> None:
    handler = registered()
    events.record(event(x="100 %s"), "mine")
    (record,) = handler.got
    assert (record.levelno, record.args, record.name) == (logging.INFO, (), "phalanx.events.mine")
    assert record.getMessage() == event(x="100 %s").serialize()


def test_the_root_logger_gets_none() -> None:
    root, mine = KeptRecords(), registered()
    logging.getLogger().addHandler(root)
    try:
        events.record(event(), "mine")
    finally:
        logging.getLogger().removeHandler(root)
    assert (len(mine.got), len(root.got)) == (1, 0)


def test_a_handler_is_replaced() -> None:
    first = registered()
    events.record(event("a"), "mine")
    other = KeptRecords()
    logging.getLogger("phalanx.events.mine").addHandler(other)
    second = registered()
    events.record(event("b"), "mine")
    events.record(event("c"), "mine")
    assert [names(each) for each in (first, second, other)] == [["a"], ["b", "c"], ["b", "c"]]


def test_what_is_silent_can_be_heard() -> None:
    for destination in ("null", "dynamic_rendezvous"):
        events.record(event("a"), destination)
        handler = registered(destination)
        events.record(event("b"), destination)
        assert names(handler) == ["b"]


@pytest.mark.parametrize("destination", ["mine", "null"])
def test_what_is_refused(destination: str) -> None:
    registered("mine")
    with pytest.raises(TypeError, match="event: expected an Event, got 'a'"):
        events.record("a", destination)  # type: ignore[arg-type]  # what is tested
    wrong: Any = print
    with pytest.raises(TypeError, match=r"the handler of 'mine': expected a logging.Handler, got <built-in"):
        events.register_logging_handler("mine", wrong)
    with pytest.raises(TypeError, match="destination: expected a text, got 3"):
        events.register_logging_handler(3, logging.NullHandler())  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    "level, passes",
    [(None, True), ("WARNING", False), ("debug", True), (" info ", True), ("15", True), ("30", False), ("loud", True),
     ("NOTSET", True), ("9" * 5000, True)],
    ids=range(9),
)  # fmt: skip
def test_the_level(level: str | None, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGLEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("LOGLEVEL", level)
    handler = registered()
    events.record(event(), "mine")
    assert len(handler.got) == passes


def plugin(folder: Path) -> str:
    """A distribution with entry points: a class, a function, a handler, and what is none of these."""
    source = "import logging\nHANDLER = logging.NullHandler()\nclass Own(logging.StreamHandler):\n    pass\n"
    source += "def make():\n    return Own()\ndef fail():\n    raise OSError('no such host')\n"
    points = {"class": "Own", "made": "make", "object": "HANDLER", "nothing": "logging", "raises": "fail"}
    (folder / "phalanx_told.py").write_text(source)
    about = folder / "phalanx_told-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx-told\nVersion: 1\n")
    lines = "".join(f"{name} = phalanx_told:{value}\n" for name, value in points.items())
    (about / "entry_points.txt").write_text(f"[phalanx.event_handlers]\n{lines}")
    return str(folder)


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(plugin(tmp_path))
    for name in ("class", "made"):
        handler = events.get_logging_handler(name)
        assert type(handler).__name__ == "Own"
        assert events.get_logging_handler(name) is handler
    assert isinstance(events.get_logging_handler("object"), logging.NullHandler)
    with pytest.raises(TypeError, match=r"the entry point 'nothing' of phalanx.event_handlers: expected"):
        events.get_logging_handler("nothing")
    with pytest.raises(OSError, match="no such host"):
        events.get_logging_handler("raises")
    with pytest.raises(KeyError, match="'class', 'console', 'dynamic_rendezvous', 'made', 'nothing', 'null', 'object'"):
        events.get_logging_handler("other")
    sys.modules.pop("phalanx_told")


# --- rendezvous


def test_an_event_of_a_rendezvous() -> None:
    events.construct_and_record_rdzv_event("run", "nobody listens", NodeState.FAILED)
    handler = registered("dynamic_rendezvous")
    events.construct_and_record_rdzv_event("run", "100 %s", NodeState.RUNNING)
    try:
        fail(0)
    except OSError:
        events.construct_and_record_rdzv_event(
            "run", "x", NodeState.FAILED, "own", "host", 7, master_endpoint="there:1", local_id=2, rank=3
        )
    events.construct_and_record_rdzv_event("run", "x", NodeState.FAILED)
    first, second, third = [RdzvEvent.deserialize(text) for text in handler.texts]
    name = "test_events.py:test_an_event_of_a_rendezvous"
    assert first == RdzvEvent(name, "run", "100 %s", os.uname().nodename, os.getpid(), NodeState.RUNNING)
    assert "OSError: no such host" in second.error_trace
    second.error_trace = ""
    assert second == RdzvEvent("test_events.py:own", "run", "x", "host", 7, NodeState.FAILED, "there:1", 3, 2)
    assert third.error_trace == ""
    events.record_rdzv_event(third)
    assert handler.texts[2] == handler.texts[3]


# --- posted


def test_what_is_posted_may_change() -> None:
    handler = registered()
    one = event("a", x=1)
    events.post(one, "mine")
    one.name, one.metadata["x"] = "b", 2
    assert events.flush(TIMEOUT)
    assert handler.texts == [event("a", x=1).serialize()]


def test_posting_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.syspath_prepend(plugin(tmp_path))
    wrong: Any = "a"
    for one, destination in ((event(), "mien"), (wrong, "console"), (event(), "raises"), (event(), "mien")):
        events.post(one, destination)
    assert events.flush(TIMEOUT)
    assert sorted(reports(caplog)) == [
        f"the destination {name!r} raised; what else it raises is not reported"
        for name in ("console", "mien", "raises")
    ]
    assert "there is no event handler 'mien'" in caplog.text
    sys.modules.pop("phalanx_told")


def test_nothing_is_begun_for_nowhere() -> None:
    code = (
        "import sys; from phalanx.events import post, flush; "
        "print(post(None), post(None, 'dynamic_rendezvous')); "
        "print({'logging', 'dataclasses', 'json', 'phalanx._base.delivery'} & {*sys.modules}, flush(5))"
    )
    done = program(code)
    assert (done.stdout, done.stderr) == ("True True\nset() True\n", "")


def program(code: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": f"{ROOT}/src"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True, timeout=TIMEOUT
    )
