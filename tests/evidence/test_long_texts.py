"""Texts of workers of any length and kind: what is kept of them, and the work that they are, is bounded; it is said."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx._base.tty import plain
from phalanx._evidence import recording
from phalanx._evidence.describe import KEPT_LIMIT, describe, truncate_data, without_own_frames
from phalanx._evidence.error_file import READ_LIMIT, message_of, read_error_file, write_error_file
from phalanx._outcomes import report as report_module
from phalanx._stacks.dump import location
from phalanx.errors import ProcessFailure, format_report
from phalanx.spawn import _exceptions
from tests.support.helpers import TIMEOUT

MIB = 1 << 20
KEPT = KEPT_LIMIT

PIECES = [
    "\n", " ", "0", "a\n", "  File", "(", '"', "\x1b", "\x1b[", "\x1b]", "\r", "\t", "é", "\ud800", "\x00", " \n",
    "\n ", "_",
    "native frames (py-spy):\n", "\nnative frames (py-spy):", "Thread 0x1 (most recent call first):  ",
    '  File "', '", line 1 in ', "pid ", "process", "rank", "local_rank 0", "0xa", "0xabcdef ", "1ms ", "12.3s over",
    "cuda:", "peer ", "connection was ", "Error", "\n \t", "x native frames (py-spy):\n", "0x", "1.", "x\r\n",
    "rank rank_",
]  # fmt: skip
HEADS = {"f": "0x", "9": "pid", "0": "\x1b[", "x": "\x1b]"}
"""What may stand before a text that is one piece again and again."""


@contextmanager
def not_for_ever() -> Iterator[None]:
    """Fail when it takes far longer than it can where time grows with the length, on however slow a machine."""

    def give_up(*_signal: object) -> None:
        raise AssertionError(f"not over after {TIMEOUT} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def of(piece: str, size: int) -> str:
    return HEADS.get(piece, "") + (piece * (size // len(piece) + 1))[:size]


def fails(message: str, stack: str = "", **more: Any) -> ProcessFailure:
    return ProcessFailure(0, 77, 1, "<N/A>", told=(message, stack, 5), observed_ns=6, **more)


def size_of(value: object) -> int:
    """How many characters, and how many members, a failure or its data holds."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(size_of(name) + size_of(each) for name, each in value.items()) + 8
    if isinstance(value, list):
        return sum(map(size_of, value)) + 8
    return 8


@pytest.mark.parametrize("piece", [*PIECES, *HEADS])
def test_no_text_takes_more_than_its_length(piece: str) -> None:
    text, long = of(piece, 64 << 10), of(piece, MIB)
    dump = f"Current thread 0x01 (most recent call first):\n{text}"
    data = {"message": {"message": text, "extraInfo": {"py_callstack": text}}}
    failure = fails(text)
    todo: dict[str, Callable[[], object]] = {
        "describing": lambda: describe(ValueError(text)),
        "finding": lambda: recording._tells_of(data, f"{text[1:]}x"),
        "stacks": lambda: (location(dump), without_own_frames(dump)),
        "cleaning": lambda: plain(text),
        "masking": lambda: report_module._masked(text, failure),
        "a report": lambda: format_report("x", {0: fails(long), 1: fails("E", long, detail=long, stderr_tail=long)}),
    }
    with not_for_ever():
        for job in todo.values():
            job()


# --- what is kept


def test_of_a_long_text_both_ends_are_kept_and_the_rest_is_said(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    text = f"begins {'x' * MIB} ends"
    write_error_file(path, text, text, monotonic_ns=5, pid=77, left=True)
    failure = ProcessFailure(0, 77, 1, path, observed_ns=6)
    for kept in (failure.message, failure.traceback, failure.error_file_data["message"]["message"]):
        assert kept.startswith("begins xx")
        assert kept.endswith("xx ends")
        assert f"\n... {len(text) - KEPT} characters cut; all in {path} ...\n" in kept
    assert size_of(failure.__getstate__()) < 5 * KEPT
    assert "characters cut; all in" in format_report("x", {0: failure})


def test_what_is_short_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    data = {
        "message": {"message": "m" * KEPT, "extraInfo": {"py_callstack": "s" * KEPT, "more": [{"a": [1, None, 2.5]}]}}
    }
    path.write_text(json.dumps(data))
    assert ProcessFailure(0, 77, 1, path).error_file_data == data


HOSTILE: dict[str, Callable[[], dict[str, object]]] = {
    "many members": lambda: {str(number): number for number in range(200_000)},
    "a long list": lambda: {"list": [0] * 1_000_000},
    "many lists": lambda: {"list": [[]] * 1_000_000},
    "long names": lambda: {"n" * MIB: {"n" * MIB: 5}},
    "many texts": lambda: {"list": ["t" * 1000] * 3000},
    "a number": lambda: {"n": 10**4000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_data_of_any_form_are_bounded(name: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "m", **HOSTILE[name]()}))
    assert path.stat().st_size <= READ_LIMIT
    failure = ProcessFailure(0, 77, 1, path)
    assert failure.message == "m"
    assert size_of(failure.__getstate__()) < 5 * KEPT
    assert "cut ..." in json.dumps(failure.error_file_data)


def test_data_of_great_depth_are_bounded() -> None:
    data: Any = "deep"
    for _ in range(500):
        data = {"d": data}
    assert json.dumps(truncate_data(data)).count("d") < 30


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=50),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
        max_leaves=50,
    )
)
def test_data_that_are_small_are_not_touched(value: Any) -> None:
    data = {"message": "m", "value": value}
    assert truncate_data(data) == data


@pytest.mark.parametrize("piece", ["x", "\x00", "\ud800", "𝄞", "é", '"'])
def test_what_is_recorded_can_be_read_whatever_it_takes_as_json(piece: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert recording.record(ValueError(piece * (2 * MIB)), str(path))
    assert path.stat().st_size <= READ_LIMIT
    data, why = read_error_file(str(path))
    assert why == ""
    assert (message_of(data) or "").startswith("ValueError: ")
    assert "characters cut" in (message_of(data) or "")


# --- many ranks


def differing(count: int, size: int) -> dict[int, ProcessFailure]:
    failures = {}
    for rank in range(count):
        text = of(f"step {rank}x of rank {rank}\n", size)
        failures[rank] = fails(text, f"Traceback of {rank}x\n{text}")
    return failures


@pytest.mark.long
def test_many_different_tracebacks_make_a_readable_report() -> None:
    failures = differing(120, 40_000)
    with not_for_ever():
        report = format_report("x", failures)
    assert len(report) < 120 * 200 + 9 * report_module.ROOT_LINES * report_module.LINE
    assert len(report.split("\n")) < 1400
    error = _exceptions.failed(SimpleNamespace(failures=failures, outcomes={}))  # type: ignore[arg-type]  # it has what is read
    assert len(str(error)) < 120 * 500 + 2 * KEPT


def test_long_texts_are_equal_by_their_ends() -> None:
    texts = [f"{'a' * 50_000}{middle}{'b' * 50_000}{end}" for middle, end in (("m", "e"), ("n", "e"), ("m", "f"))]
    first, second, third = (report_module.signature(fails(text)) for text in texts)
    assert first == second != third
