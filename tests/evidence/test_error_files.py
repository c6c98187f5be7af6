"""Errors: evidence written by real processes, read back without trust, and the report that comes of it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import errno
import faulthandler
import functools
import inspect
import io
import json
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx import errors
from phalanx._engine.worker import script
from phalanx._evidence import recording
from phalanx._evidence.cleanup import remove_empty
from phalanx._evidence.describe import OWN_FOLDERS, TEXT_LIMIT, describe, without_own_frames
from phalanx._evidence.error_file import (
    ERROR_FILE_ENV,
    READ_LIMIT,
    handled_at,
    has_left,
    read_error_file,
    remove_timer_evidence,
    timer_detail,
    write_error_file,
    written_by,
)
from phalanx._outcomes.failure import WHILE_LEAVING
from phalanx.errors import ChildFailedError, ErrorHandler, Outcome, ProcessFailure, format_ranks, format_report, record
from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.each_python

SOURCES = Path(phalanx.__file__).resolve().parent.parent

MS = 1_000_000


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process is to leave its evidence, as a worker would."""
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE_ENV, str(path))
    return path


def start(code: str, error_file: Path, *argv: str) -> subprocess.Popen[str]:
    """Start `code` in a Python process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        env=os.environ | {ERROR_FILE_ENV: str(error_file), "PYTHONPATH": str(SOURCES)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, error_file: Path) -> tuple[subprocess.Popen[str], str]:
    """Run `code` to its end; return the process and what it wrote to stderr."""
    with start(code, error_file) as process:
        stderr = process.communicate(timeout=30)[1]
    return process, stderr


def info(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())["message"]["extraInfo"]
    assert isinstance(found, dict)
    return found


def raised(exc: BaseException) -> BaseException:
    """`exc` with a traceback."""
    try:
        raise exc  # noqa: TRY301 (this is the frame that the tests look for)
    except BaseException as caught:  # noqa: BLE001 - any exception is what it is given
        return caught


# --- describe ---------------------------------------------------------------------------------------------------------


class Hostile(Exception):  # noqa: N818 - not an error, a trial
    """Raises from whatever it is asked; even what is no `Exception`."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    def __repr__(self) -> str:
        raise SystemExit


class BadText(Exception):  # noqa: N818 - as above
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307 (that is what is bad about it)


def caused(exc: BaseException, cause: BaseException) -> BaseException:
    exc.__cause__ = cause
    return exc


def noted(exc: BaseException) -> BaseException:
    exc.add_note("in layer 3")
    return exc


DESCRIBED: dict[str, tuple[Callable[[], BaseException], str, tuple[str, ...]]] = {
    "as the interpreter prints it": (
        lambda: caused(noted(ValueError("bad shape")), KeyError("w")),
        "ValueError: bad shape",
        ("in layer 3", "direct cause"),
    ),
    "a group": (
        lambda: ExceptionGroup("two", [ValueError("a"), TypeError("b")]),
        "ExceptionGroup: two (2 sub-exceptions)",
        ("ValueError: a", "TypeError: b"),
    ),
    "a hostile one": (lambda: Hostile("x"), "Hostile: <__str__ raised ", ("Hostile",)),
    "a text that is none": (lambda: BadText("x"), "BadText: <__str__ raised ", ("BadText",)),
    "a hostile cause": (lambda: caused(ValueError("x"), raised(Hostile("y"))), "ValueError: x", ()),
    "a lone surrogate": (lambda: ValueError("a\udc80b"), "ValueError: a\\udc80b", ()),
    "a long chain": (
        lambda: functools.reduce(lambda exc, number: caused(ValueError(number), exc), range(3000), KeyError()),  # type: ignore[arg-type, return-value]  # of exceptions
        "ValueError: 2999",
        ("ValueError: 2999",),
    ),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_describe_gives_message_and_stack_of_any_exception(name: str) -> None:
    make, expected, parts = DESCRIBED[name]
    exc = raised(make())
    message, stack = describe(exc)
    assert message.startswith(expected) if "<" in expected else message == expected
    assert "in raised" in stack
    assert all(part in stack for part in parts)
    (message + stack).encode()
    if name == "as the interpreter prints it":
        assert stack == "".join(traceback.format_exception(exc))


def test_describe_says_how_much_it_cut() -> None:
    text = "x" * (TEXT_LIMIT + 1000) + "THE END"
    message, stack = describe(raised(ValueError(text)))
    assert message.endswith(" characters cut ...")
    assert f"... {len('ValueError: ') + 1007} characters cut ..." in message
    assert stack.startswith("Traceback")
    assert " characters cut ...\n" in stack
    assert stack.endswith("THE END\n")
    assert len(stack) < TEXT_LIMIT + 100


def test_describe_of_endless_recursion_and_in_it() -> None:
    seen: list[tuple[str, str]] = []

    def deeper() -> None:
        try:
            deeper()
        except RecursionError as exc:
            if not seen:
                seen.append(describe(exc))  # here the stack is still full
            raise

    with pytest.raises(RecursionError) as caught:
        deeper()
    for message, stack in (seen[0], describe(caught.value)):
        assert message.startswith("RecursionError: ")
        assert "in deeper" in stack


# --- the error file ---------------------------------------------------------------------------------------------------


def test_the_file_has_the_well_known_format_and_our_keys(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    before = time.monotonic_ns()
    write_error_file(str(path), "ValueError: x", "Traceback ...", step=7, odd={1, 2}.__class__)
    data = json.loads(path.read_text())
    extra = data["message"].pop("extraInfo")
    assert data == {"message": {"message": "ValueError: x"}}
    assert before <= extra.pop("monotonic_ns") <= time.monotonic_ns()
    assert abs(int(extra.pop("timestamp")) - time.time()) < 5
    assert extra == {"py_callstack": "Traceback ...", "pid": os.getpid(), "step": 7, "odd": "<class 'set'>"}
    assert os.listdir(tmp_path) == ["error.json"]


def test_the_file_holds_any_text(tmp_path: Path) -> None:
    path = str(tmp_path / "to be made" / ("x" * 255))  # as long a name as the file system allows
    write_error_file(path, "a\udc80 \x00 é 𝄞", "")
    data, why = read_error_file(path)
    assert why == ""
    assert data is not None
    assert data["message"]["message"] == "a\udc80 \x00 é 𝄞"
    assert ProcessFailure(0, os.getpid(), 1, path).message == "a\\udc80 \x00 é 𝄞"


def test_a_write_that_fails_leaves_nothing_over(tmp_path: Path) -> None:
    target = tmp_path / "error.json"
    target.mkdir()
    with pytest.raises(IsADirectoryError):
        write_error_file(str(target), "m", "")
    (tmp_path / "plain").touch()
    with pytest.raises(NotADirectoryError):
        write_error_file(str(tmp_path / "plain" / "0" / "error.json"), "m", "")
    assert sorted(os.listdir(tmp_path)) == ["error.json", "plain"]


def test_a_write_without_room_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(str(path), "old", "")
    code = (
        "import resource, signal, sys; from phalanx._evidence import recording\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "print(recording.record(ValueError('x' * 100000)))\n"
    )
    with start(code, path) as process:
        assert process.communicate(timeout=30) == ("False\n", "")
    assert json.loads(path.read_text())["message"]["message"] == "old"
    assert os.listdir(tmp_path) == ["error.json"]


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert recording.record(ValueError("x"), str(path))
        assert json.loads(os.read(reader, 4096))["message"]["message"] == "ValueError: x"
    finally:
        os.close(reader)
    assert path.is_fifo()
    assert not recording.record(ValueError("y"), str(path)), "nobody reads, and nobody waits for that"
    path.unlink()
    path.symlink_to(tmp_path / "far" / "real.json")
    assert recording.record(ValueError("y"), str(path))
    assert recording.record(ValueError("z"), str(path))
    assert path.is_symlink()
    assert told(tmp_path / "far" / "real.json") == "ValueError: z"


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES])
def test_a_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_paths: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "error.json"
    path.write_text("x" * 100_000)
    inode = path.stat().st_ino
    monkeypatch.setattr("os.replace", refuse)
    assert recording.record(ValueError("x"), str(path))
    assert (told(path), path.stat().st_ino) == ("ValueError: x", inode)
    assert os.listdir(tmp_path) == [path.name]
    assert not recording.record(ValueError("x"), str(tmp_path / "new.json"))


@pytest.mark.slow
def test_readers_never_see_half_a_file_that_many_processes_write(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    path, seen_enough = tmp_path / "error.json", tmp_path / "seen"
    code = (
        "import os; from phalanx._evidence.error_file import write_error_file\n"
        f"{ready.python()}\n"
        f"{gate.python()}\n"
        f"while not os.path.exists({str(seen_enough)!r}):\n"
        f"    write_error_file({str(path)!r}, str(os.getpid()), 'x' * 50000 + str(os.getpid()))\n"
    )
    writers = [start(code, path) for _ in range(4)]
    try:
        pids = {str(pid) for pid in ready.pids(4)}
        gate.open(4)
        seen = 0
        while any(writer.poll() is None for writer in writers):
            if seen == 300:
                seen_enough.touch()
            data, why = read_error_file(str(path))
            if data is None:
                assert why == "missing"
                continue
            seen += 1
            pid = data["message"]["message"]
            assert pid in pids
            assert data["message"]["extraInfo"]["py_callstack"].endswith("x" + pid)
        assert seen >= 300
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert {writer.returncode for writer in writers} == {0}
    assert "error.json" in os.listdir(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def by_path() -> dict[str, Any]:
    """What the runner of a script has loaded by path: the functions of `recording` once more."""
    sys.path.insert(0, "the folder of the runner, which it removes")
    found = runpy.run_path(script.__file__)
    assert found["record"] is not recording.record
    return found


def told(path: Path) -> str:
    message = json.loads(path.read_text())["message"]
    return str(message["message"] if isinstance(message, dict) else message)


def test_what_is_recorded_last_counts_and_says_what_was_before(error_file: Path) -> None:
    for number in range(5):
        before = time.monotonic_ns()
        assert recording.record(ValueError(str(number)))
        assert told(error_file) == f"ValueError: {number}"
        assert info(error_file)["monotonic_ns"] >= before
    assert info(error_file)["before"]["message"] == "ValueError: 3"
    assert "before" not in info(error_file)["before"], "no longer with each"


def test_the_same_exception_again_keeps_its_date_and_text(error_file: Path) -> None:
    exc = raised(ValueError("one"))
    assert recording.record(exc)
    first = error_file.read_text()
    exc.args = ("another text",)
    exc.add_note("and a note")
    assert recording.record(exc)
    assert by_path()["record"](exc), "the other copy of the module knows"
    assert error_file.read_text() == first
    assert by_path()["record"](exc, left=True)
    data = json.loads(first)
    data["message"]["extraInfo"]["left"] = True
    del data["message"]["extraInfo"]["handled_ns"]
    assert json.loads(error_file.read_text()) == data
    # Another has taken its place: it is written once more, and still began when it began.
    assert recording.record(raised(KeyError("between")), left=True)
    assert recording.record(exc, left=True)
    assert told(error_file) == "ValueError: another text"
    assert info(error_file)["monotonic_ns"] == data["message"]["extraInfo"]["monotonic_ns"]


@pytest.mark.parametrize("how", ["cause", "context", "group", "far"])
def test_what_has_come_of_another_has_its_date_and_its_own_text(error_file: Path, how: str) -> None:
    first = raised(ValueError("first"))
    assert by_path()["record"](first)
    began = info(error_file)["monotonic_ns"]
    later: BaseException = KeyError("later")
    if how == "cause":
        later.__cause__ = first
    elif how == "context":
        later.__context__ = first
    elif how == "group":
        later = BaseExceptionGroup("later", [TypeError(), ValueError(), first])
    else:
        between = RuntimeError()
        later.__cause__, between.__context__, first.__context__ = between, first, later  # a cycle, besides
    assert recording.record(later)
    assert told(error_file).startswith(type(later).__name__)
    assert info(error_file)["monotonic_ns"] == began
    assert info(error_file)["recorded_ns"] > began
    assert info(error_file)["before"]["message"] == "ValueError: first"


def test_a_recorded_exception_is_held_by_nobody(error_file: Path) -> None:
    class Seen(Exception):  # noqa: N818 - one that can be referred to weakly
        pass

    exc: Seen | None = None
    try:
        raise Seen("x")  # noqa: TRY301 - here, and in no frame that would hold it
    except Seen as caught:
        exc = caught
    gone = weakref.ref(exc)
    assert recording.record(exc)
    assert pickle.loads(pickle.dumps(raised_and_recorded("y"))).args == ("y",)
    assert recording.record(exc)
    assert handled_at(read_error_file(str(error_file))[0]) is None
    before = time.monotonic_ns()
    exc = None
    assert gone() is None
    assert before <= (handled_at(read_error_file(str(error_file))[0]) or 0) <= time.monotonic_ns()


def handle(text: str) -> None:
    """Raise an exception, record it and let go of it."""
    try:
        raise ValueError(text)  # noqa: TRY301 - as above
    except ValueError as exc:
        recording.record(exc)


def raised_and_recorded(text: str) -> BaseException:
    exc = raised(ValueError(text))
    assert recording.record(exc)
    return exc


def test_what_a_thread_records_amid_a_handling_is_not_lost(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = written_by

    def late(data: dict[str, Any] | None) -> int | None:
        monkeypatch.setattr("phalanx._evidence.error_file.written_by", look)
        assert recording.record(KeyError("the end"), left=True)
        return look(data)

    exc: Exception | None = None
    try:
        raise ValueError("handled")  # noqa: TRY301 - as above
    except ValueError as caught:
        exc = caught
    assert recording.record(exc)
    monkeypatch.setattr("phalanx._evidence.error_file.written_by", late)
    exc = None
    assert told(error_file) == "KeyError: 'the end'"
    assert has_left(read_error_file(str(error_file))[0])


def test_each_handled_exception_writes_one_file(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    replace = os.replace

    def count(*paths: str) -> None:
        written.append(paths)
        replace(*paths)

    monkeypatch.setattr("os.replace", count)
    for number in range(10):
        handle(f'"handled_ns": null {number}')
    assert len(written) == 10
    data = read_error_file(str(error_file))[0]
    assert handled_at(data) is not None
    assert told(error_file) == 'ValueError: "handled_ns": null 9'


def test_a_mark_means_nothing_in_another_process(error_file: Path) -> None:
    exc = raised_and_recorded("x")
    copy = pickle.loads(pickle.dumps(exc))
    assert list(vars(copy).values()) == [None]
    pid = os.fork()
    if pid == 0:
        del exc, copy  # handled, but by a fork
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert info(error_file)["handled_ns"] is None


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818 - not an error, a trial
    text: str


class Slotted(Exception):  # noqa: N818 - not an error, a trial
    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_phalanx"):
            raise KeyboardInterrupt
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise SystemExit


@pytest.mark.parametrize("kind", [Frozen, Slotted])
def test_exceptions_without_attributes_are_marked(error_file: Path, kind: type[Exception]) -> None:
    exc = raised(kind("x"))
    assert recording.record(exc)
    first = error_file.read_text()
    assert recording.record(exc)
    assert error_file.read_text() == first


# --- a file that is not ours ------------------------------------------------------------------------------------------

FOREIGN: dict[str, dict[str, Any]] = {
    "as torch has it": {
        "message": {
            "message": "ValueError: bad",
            "errorCode": 77,
            "extraInfo": {"py_callstack": "Traceback\nValueError: bad\n", "timestamp": "5"},
        },
        "custom": [1],
    },
    "in the traceback": {
        "message": {"message": "E77", "extraInfo": {"py_callstack": "Traceback\nmod.ValueError: bad"}}
    },
    "flat": {"message": "ValueError: bad", "timestamp": 1700000000, "errorCode": 77},
    "of another": {"message": {"message": "disk 7 is full", "errorCode": 77}},
    "of another, flat": {"message": "disk 7 is full", "errorCode": 77},
    "without a message": {"errorCode": 77},
}


@pytest.mark.parametrize("old", [False, True], ids=["fresh", "old"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_the_users_code_wrote_is_not_lost(error_file: Path, kind: str, old: bool) -> None:
    error_file.write_text(json.dumps(FOREIGN[kind]))
    if old:
        os.utime(error_file, (time.time() - 3600,) * 2)
    assert recording.record(raised(ValueError("bad")), left=True)
    data = json.loads(error_file.read_text())
    failure = ProcessFailure(0, os.getpid(), 1, error_file, observed_ns=time.monotonic_ns())
    assert failure.error_file_data == data
    assert failure.evidence_ns is not None
    same = kind in ("as torch has it", "in the traceback", "flat")
    if kind == "without a message" or (old and not same):
        assert failure.message == "ValueError: bad"
        assert info(error_file)["before"] == FOREIGN[kind]
        return
    theirs = FOREIGN[kind]["message"]
    assert failure.message == (theirs if isinstance(theirs, str) else theirs["message"])
    assert failure.detail == ""
    assert ("Afterwards:\nTraceback" in failure.traceback) == (not same)
    assert ("ValueError: bad" in failure.traceback) == (kind != "flat")
    assert data.get("custom") == FOREIGN[kind].get("custom")
    assert '"errorCode": 77' in json.dumps(data) or kind == "in the traceback"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1 << 20, 15 << 20])
def test_a_large_file_of_the_user_leaves_a_readable_one(error_file: Path, size: int) -> None:
    for message in ("ValueError: x", "another"):
        error_file.write_text(json.dumps({"message": message, "much": "m" * size}))
        os.utime(error_file, (time.time() - 3600,) * 2)
        assert recording.record(ValueError("\udc80" * TEXT_LIMIT))
        data, why = read_error_file(str(error_file))
        assert (why, data is None) == ("", False)


def test_a_launcher_that_torch_recorded_keeps_the_cause(error_file: Path) -> None:
    class ChildFailedError(Exception):
        def get_first_failure(self) -> None: ...

    cause = {"message": {"message": "below", "extraInfo": {"pid": 5, "timestamp": "7", "py_callstack": "tb"}}}
    for exc in (ChildFailedError("report"), RuntimeError("of it")):
        error_file.write_text(json.dumps(cause))
        os.utime(error_file, (time.time() - 3600,) * 2)
        if isinstance(exc, RuntimeError):
            exc.__cause__ = ChildFailedError("report")
        assert recording.record(raised(exc), left=True)
        assert told(error_file) == "below"
        assert info(error_file)["afterwards"] == f"{type(exc).__name__}: {exc}"
        assert (info(error_file)["origin_pid"], info(error_file)["pid"]) == (5, os.getpid())


# --- what stands ------------------------------------------------------------------------------------------------------

SECOND = 1_000_000_000
RECORDED = 5000 * SECOND
AGO = "it had recorded ValueError: bad shape {} before, and gone on"


def ended(
    path: Path, exitcode: int, after: float, *, by: int = 7, stopped: float | None = None, **extra: Any
) -> ProcessFailure:
    """What is made of evidence that process 7 has left, which ends ``after`` seconds later."""
    write_error_file(str(path), "ValueError: bad shape", "tb", monotonic_ns=RECORDED, pid=by, **extra)
    mtime = time.time() - (time.monotonic() - RECORDED / SECOND)
    os.utime(path, (mtime, mtime))
    return ProcessFailure(
        0, 7, exitcode, path, observed_ns=RECORDED + int(after * SECOND),
        signalled_ns=None if stopped is None else RECORDED + int(stopped * SECOND),
    )  # fmt: skip


HANDLED = {"handled_ns": RECORDED + 1}


@pytest.mark.parametrize(
    "exitcode, after, extra, stands",
    [
        (1, 3600, {}, True),
        (7, 3600, {}, False),
        (-9, 3600, {}, False),
        (-11, 3600, {}, False),
        (7, 5, {}, True),
        (-9, 5, {}, True),
        (7, 3600, {"left": True}, True),
        (-9, 3600, {"left": True}, True),
        (-15, 3600, {"stopped": 3599.0}, True),
        (-15, 3600, {"stopped": 3599.0, **HANDLED}, False),
        (-15, 12, {"stopped": 3.0, **HANDLED}, True),
        (1, 3600, HANDLED, False),
        (1, 5, HANDLED, True),
        (-9, 5, HANDLED, False),
        (7, 3600, {"recorded_ns": RECORDED + 3595 * SECOND}, True),
        (7, 3600, {"observer": "timer", "detail": "why"}, True),
    ],
)
def test_evidence_stands_unless_the_process_has_gone_on(
    tmp_path: Path, exitcode: int, after: float, extra: dict[str, Any], stands: bool
) -> None:
    failure = ended(tmp_path / "error.json", exitcode, after, **extra)
    assert failure.error_file_data["message"]["message"] == "ValueError: bad shape"
    if stands:
        assert (failure.message, failure.detail, failure.traceback) == ("ValueError: bad shape", "", "tb")
        assert failure.evidence_ns == RECORDED
        return
    words = "exited with code" if exitcode > 0 else f"Signal {-exitcode} "
    assert failure.message.startswith(words)
    assert "no error" not in failure.message
    assert failure.detail == AGO.format("5.0s" if after == 5 else "59m59s" if "stopped" in extra else "1h00m")
    assert (failure.evidence_ns, failure.traceback) == (None, "")
    assert failure.first_key > RECORDED + 4 * SECOND


@pytest.mark.parametrize("after", [1.5, 3600])
def test_a_sys_exit_that_did_not_come_of_it_is_the_failure(tmp_path: Path, after: float) -> None:
    path = tmp_path / "error.json"
    exits = RECORDED + int(after * SECOND)
    (tmp_path / "error.json.exit").write_text(f"7 1 {exits}\n")
    failure = ended(path, 1, after + 1)
    assert failure.message == "exited with code 1"
    assert failure.detail == AGO.format("1.5s" if after == 1.5 else "1h00m")
    # Of "except Exception: return 1", the failure began with the exception; peers have lost their connection by then.
    assert failure.evidence_ns == (RECORDED if after == 1.5 else exits)
    assert failure.traceback == ("tb" if after == 1.5 else "")
    stood = ended(path, 1, after + 1, left=True)
    assert (stood.message, stood.evidence_ns) == ("ValueError: bad shape", RECORDED)


@pytest.mark.parametrize("handled", [False, True])
def test_sys_exit_in_a_handler_has_come_of_what_it_handles(error_file: Path, handled: bool) -> None:
    exc = raised_and_recorded("x")
    leave = SystemExit(3)
    if not handled:
        leave.__context__ = RuntimeError()
        leave.__context__.__context__ = exc
    by_path()["note_exit"](leave)
    failure = ProcessFailure(0, os.getpid(), 3, error_file, observed_ns=time.monotonic_ns())
    assert failure.message == ("exited with code 3" if handled else "ValueError: x")
    said = re.search(r"it had recorded ValueError: x [\d.]+m?s before, and gone on", failure.detail)
    assert (said is not None) == handled


def test_evidence_of_a_process_below_is_said_to_be_that(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    failure = ended(path, 1, 12, by=123)
    assert (failure.message, failure.traceback) == ("ValueError: bad shape", "tb")
    assert failure.detail == "recorded by process 123, below the worker, 12.0s before its end"
    assert failure.evidence_ns is None
    killed = ended(path, -9, 3600, by=123)
    assert killed.message == "Signal 9 (SIGKILL) received by PID 7"
    assert killed.detail == "recorded by process 123, below the worker, 1h00m before its end: ValueError: bad shape"


def test_a_file_from_long_before_the_end_is_named_so(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "flat"}')
    now, wall = time.monotonic_ns(), time.time_ns()
    os.utime(path, ns=(wall, wall))
    failure = ProcessFailure(0, 7, 3, path, observed_ns=now + 3600 * SECOND)
    assert (failure.message, failure.detail) == ("flat", "its error file was written 1h00m before its end")
    assert ProcessFailure(0, 7, 3, path, observed_ns=now).detail == ""


@pytest.mark.parametrize("after, dated", [(0.0, False), (2.0, True), (12.0, False), (-2.0, False)])
def test_a_file_that_is_not_ours_is_dated_by_its_own_time(tmp_path: Path, after: float, dated: bool) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "flat"}')
    now, wall = time.monotonic_ns(), time.time_ns()
    os.utime(path, ns=(wall, wall - int(after * SECOND)))
    failure = ProcessFailure(0, 7, 3, path, observed_ns=now)
    assert failure.message == "flat"
    if dated:
        assert abs(failure.first_key - (now - after * SECOND)) < SECOND / 2
    else:
        assert failure.evidence_ns is None


def test_ranks_that_differ_in_times_alone_failed_alike(tmp_path: Path) -> None:
    failures = {
        rank: ended(tmp_path / f"{rank}.json", -9, 3600 + rank, by=100 + rank).replace(pid=5000 + rank)
        for rank in range(3)
    }
    assert "ranks 1-2: the same" in format_report("x", failures)


def test_what_follows_an_expired_timer_is_added_to_it(error_file: Path) -> None:
    write_error_file(str(error_file), "Hang: x", "in f\n", monotonic_ns=5, observer="timer", detail="why")
    assert recording.record(ValueError("second"))
    assert recording.record(ValueError("third"))
    assert json.loads(error_file.read_text())["message"]["message"] == "Hang: x"
    assert info(error_file)["monotonic_ns"] == 5
    assert info(error_file)["py_callstack"] == "in f\n\nAfterwards:\nValueError: second\n"
    remove_timer_evidence(str(error_file))
    assert error_file.exists(), "the exception is not the timer's"
    assert timer_detail(str(error_file)) == "why"


def test_what_follows_an_exception_that_has_left_is_added_to_it(error_file: Path) -> None:
    assert recording.record(raised(ValueError("the end")), left=True)
    for text in ("in an exit handler", "in a thread"):
        handle(text)
    failure = ProcessFailure(0, os.getpid(), 1, error_file, observed_ns=time.monotonic_ns())
    assert failure.message == "ValueError: the end"
    assert info(error_file)["afterwards"] == "ValueError: in an exit handler"
    assert recording.record(OSError("another end"), left=True)
    assert told(error_file) == "OSError: another end"


def test_evidence_of_a_stranger_yields_to_ours(error_file: Path) -> None:
    write_error_file(str(error_file), "a child's", "", pid=os.getpid() + 1)
    assert recording.record(ValueError("ours"))
    assert told(error_file) == "ValueError: ours"
    write_error_file(str(error_file), "the parent's", "", pid=os.getppid())
    assert not recording.record(ValueError("ours"))
    assert json.loads(error_file.read_text())["message"]["message"] == "the parent's"


def test_record_never_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ERROR_FILE_ENV, raising=False)
    assert not recording.record(ValueError("nowhere to go"))
    (tmp_path / "plain").touch()
    for path in (str(tmp_path), str(tmp_path / "plain" / "x"), "a\0b"):
        assert not recording.record(raised(Hostile("x")), path)


def test_stacks_show_none_of_our_frames_and_all_of_the_users() -> None:
    ours, theirs = os.path.join(OWN_FOLDERS[0], "_engine", "worker", "function.py"), "/home/me/phalanx/train.py"
    timer = os.path.join(OWN_FOLDERS[0], "timer", "_expires.py")

    def stack(*frames: str) -> str:
        return "".join(
            f'  File "{path}", line {number} in f\n' for path, number in [each.split(":") for each in frames]
        )

    boot = '  File "<string>", line 1 in <module>\n'
    head = "Current thread 0x01 (most recent call first):\n"
    for found, left in (
        (stack(f"{theirs}:4", f"{ours}:1", f"{ours}:2") + boot, stack(f"{theirs}:4")),
        (stack(f"{theirs}:4", f"{timer}:2", f"{theirs}:9"), stack(f"{theirs}:4", f"{theirs}:9")),
        (stack(f"{theirs}:4", f"{timer}:2") + boot, stack(f"{theirs}:4") + boot),  # of a program that -c gives
        (stack(f"{ours}:2") + "\n" + boot, "\n" + boot),
    ):
        assert without_own_frames(head + found) == head + left


def test_what_a_script_loads_by_path_runs_on_old_pythons() -> None:
    loaded = [script.__file__]
    for path in loaded:
        tree = ast.parse(Path(path).read_text(), feature_version=(3, 8))
        at_once = [
            each for node in tree.body for each in (node.body if isinstance(node, (ast.Try, ast.With)) else [node])
        ]
        imported = {alias.name for node in at_once if isinstance(node, ast.Import) for alias in node.names}
        assert imported <= {"os", "sys", "time", "errno", "stat", "_frozen_importlib_external"}
        for node in at_once:
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                assert node.module is not None
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    file = str(SOURCES / name.replace(".", "/")) + ".py"
                    if os.path.isfile(file) and file not in loaded:
                        loaded.append(file)
    names = {os.path.relpath(path, phalanx.__path__[0]).removesuffix(".py") for path in loaded}
    assert {"_engine/worker/script", "_base/linux", "_base/files", "_evidence/recording"} < names
    assert {os.path.dirname(name) for name in names} == {"_engine/worker", "_base", "_evidence"}


# --- reading without trust --------------------------------------------------------------------------------------------


def damaged(path: Path, kind: str) -> None:
    good = json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "tb", "timestamp": "5"}}})
    contents = {
        "half": good[:30].encode(),
        "empty": b"",
        "a list": b"[1]",
        "a number": b"5",
        "UTF-16": good.encode("utf-16"),
        "binary": bytes(range(256)),
        "deep": b"[" * 200_000,
        "a long number": b'{"message": ' + b"9" * 10_000 + b"}",
    }
    if kind == "huge":
        with path.open("wb") as file:
            file.truncate(READ_LIMIT + 1)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a loop":
        path.symlink_to(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(contents[kind])


KINDS = (
    "half", "empty", "a list", "a number", "UTF-16", "binary", "deep", "a long number",
    "huge", "a folder", "a FIFO", "a loop", "a device",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_unreadable_and_nothing_worse(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "error.json"
    damaged(path, kind)
    failure = ProcessFailure(0, 4242, -9, str(path))
    assert failure.unreadable.startswith("unreadable: ")
    assert failure.error_file == str(path)
    assert failure.error_file_data == {"message": "<NONE>"}
    assert failure.message == "Signal 9 (SIGKILL) received by PID 4242"
    assert failure.traceback == ""
    assert failure.evidence_ns is None
    assert abs(failure.timestamp - time.time()) < 5
    assert f"error_file: {path} (unreadable: " in format_report("train.py", {0: failure})
    assert pickle.loads(pickle.dumps(failure)) == failure


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"message": None},
        {"message": 5},
        {"message": {"message": {"deeper": 1}}},
        {"message": {"extraInfo": [1]}},
        {"message": {"extraInfo": {"py_callstack": 5, "timestamp": [], "pid": "x", "monotonic_ns": "soon"}}},
        {"message": {"extraInfo": {"timestamp": "NaN", "monotonic_ns": True}}},
        {"message": {"extraInfo": {"timestamp": 1e300, "monotonic_ns": 1.5}}},
        {"message": {"extraInfo": {"timestamp": "-5", "monotonic_ns": -5}}},
        {"message": {"extraInfo": {"timestamp": "253402300800", "monotonic_ns": 1 << 70}}},
        {"other": 1},
    ],
)
def test_json_of_the_wrong_shape_tells_nothing(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps(data))
    moment = time.monotonic_ns()
    failure = ProcessFailure(0, 4242, 1, str(path), observed_ns=moment)
    assert failure.unreadable == "unreadable: it has no message"
    assert failure.error_file_data == data
    assert failure.message == "exited with code 1; no error was recorded"
    assert (failure.traceback, failure.evidence_ns, failure.first_key) == ("", None, moment - 5 * MS)
    assert abs(failure.timestamp - time.time()) < 5
    failure.timestamp_isoformat()


def test_bytes_that_are_not_utf8_cost_themselves_only(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(b'{"message": {"message": "caf\xe9", "extraInfo": {"py_callstack": "tb"}}}')
    failure = ProcessFailure(0, 1, 1, str(path))
    assert (failure.message, failure.traceback) == ("caf\N{REPLACEMENT CHARACTER}", "tb")


# --- ProcessFailure ---------------------------------------------------------------------------------------------------


def test_a_failure_without_a_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", "<N/A>", "", tmp_path / "none" / "x"):
        failure = ProcessFailure(2, 4242, -15, path)
        assert failure.host == os.uname().nodename
        assert failure.error_file == "<N/A>"
        assert failure.error_file_data == {"message": "<NONE>"}
        assert failure.message == "Signal 15 (SIGTERM) received by PID 4242"
        assert failure.signal_name() == "SIGTERM"
        assert failure.unreadable == ""


@pytest.mark.parametrize(
    "exitcode, name, message",
    [
        (1, "<N/A>", "exited with code 1; no error was recorded"),
        (0, "<N/A>", "exited with code 0; no error was recorded"),
        (127, "<N/A>", "exited with code 127 (command not found); no error was recorded"),
        (-11, "SIGSEGV", "Signal 11 (SIGSEGV) received by PID 7"),
        (-signal.SIGRTMIN, "SIGRTMIN", f"Signal {signal.SIGRTMIN:d} (SIGRTMIN) received by PID 7"),
        (-signal.SIGRTMIN - 3, "SIGRTMIN+3", f"Signal {signal.SIGRTMIN + 3} (SIGRTMIN+3) received by PID 7"),
        (-99, "<N/A>", "Signal 99 (<N/A>) received by PID 7"),
    ],
)
def test_exits_in_words(exitcode: int, name: str, message: str) -> None:
    failure = ProcessFailure(0, 7, exitcode, "<N/A>")
    assert (failure.signal_name(), failure.message) == (name, message)


def test_a_failure_is_a_frozen_value() -> None:
    failure = ProcessFailure(0, 7, 1, "<N/A>", rank=8, host="node1", observed_ns=5, detail="d", stderr_tail="t")
    with pytest.raises(AttributeError, match="frozen"):
        failure.pid = 8
    with pytest.raises(AttributeError, match="frozen"):
        del failure.pid
    copy = pickle.loads(pickle.dumps(failure))
    assert copy == failure
    assert hash(copy) == hash(failure)
    assert failure.replace(detail="e").detail == "e"
    assert failure.replace(detail="e") != failure
    with pytest.raises(TypeError, match="no field 'nothing'"):
        failure.replace(nothing=1)
    assert repr(failure) == "<ProcessFailure of rank 8, pid 7, exit code 1: exited with code 1; stderr ends with: t>"
    with pytest.raises(TypeError):
        ProcessFailure(0, 7, 1)  # type: ignore[call-arg]  # one is missing on purpose


def test_the_first_failure_is_the_one_with_the_first_evidence(tmp_path: Path) -> None:
    def failure(
        rank: int, evidence_ms: int | None, observed_ms: int | None, pid: int | None = None, exitcode: int = 1
    ) -> ProcessFailure:
        path = tmp_path / f"{rank}.json"
        if evidence_ms is not None:
            write_error_file(str(path), "m", "", monotonic_ns=evidence_ms * MS, pid=pid or 100 + rank)
        observed = None if observed_ms is None else observed_ms * MS
        return ProcessFailure(rank, 100 + rank, exitcode, str(path), observed_ns=observed)

    def first(*failures: ProcessFailure) -> int:
        return ChildFailedError("x", {each.local_rank: each for each in failures}).get_first_failure()[0]

    late_exit = failure(0, 1000, 9000)
    assert first(failure(1, None, 2000), late_exit) == 0
    assert first(failure(2, None, 500), late_exit) == 2
    assert first(failure(3, 10, 9500, pid=99999), late_exit) == 0  # a child's evidence tells no time of its parent
    assert first(failure(4, None, None), failure(5, None, None)) == 4
    assert first(failure(6, None, None), late_exit) == 0
    # A dying process is seen by its peers before its exit is told: 5 ms, and 100 ms after a SIGKILL.
    assert first(late_exit, failure(7, None, 1004)) == 7
    assert first(late_exit, failure(8, None, 1006)) == 0
    assert first(late_exit, failure(9, None, 1099, exitcode=-9)) == 9
    assert first(late_exit, failure(10, None, 1101, exitcode=-9)) == 0
    assert first(late_exit, failure(11, None, 1006, exitcode=-11)) == 0


def test_the_timestamp_orders_failures_without_a_moment(tmp_path: Path) -> None:
    failures = {}
    for rank, timestamp in enumerate(["9", "5", "7"]):
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps({"message": {"message": "E", "extraInfo": {"timestamp": timestamp}}}))
        failures[rank] = ProcessFailure(rank, 7, 1, path)
    failures[3] = ProcessFailure(3, 7, 1, "")
    assert ChildFailedError("x", failures).get_first_failure()[0] == 1


@pytest.mark.parametrize("caught", [True, False])
def test_a_fatal_signal_leaves_the_stack(tmp_path: Path, caught: bool) -> None:
    """In the file of a worker, and on stderr where there is none, also if `record` was called since."""
    path = tmp_path / "error.json"
    code = SCRIPT.format("import faulthandler as f, resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0)); f._sigsegv()")
    if caught:
        code = f"from phalanx._evidence.stack_signals import catch_fatal_signals as catch; assert catch()\n{code}"
    process, stderr = run(code, path)
    assert process.returncode == -signal.SIGSEGV
    if not caught:
        assert "in main" in stderr
        return
    assert stderr == ""
    failure = ProcessFailure(0, process.pid, process.returncode, str(path))
    assert failure.message == f"Signal 11 (SIGSEGV) received by PID {process.pid}"
    assert "in main" in failure.traceback
    assert ProcessFailure(0, process.pid, -9, str(path)).traceback == ""
    remove_empty(str(path))
    assert os.listdir(tmp_path) == ["error.json.fatal"]


def test_an_unused_file_for_fatal_signals_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    code = "from phalanx._evidence.stack_signals import catch_fatal_signals as catch; assert catch(); catch()"
    assert run(code, path)[0].returncode == 0
    assert os.listdir(tmp_path) == ["error.json.fatal"]
    remove_empty(str(path))
    remove_empty(str(path))
    assert os.listdir(tmp_path) == []


# --- record -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from phalanx.errors import record
@record
def main():
    {}
main()
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "body, exitcode, recorded",
    [
        ("pass", 0, None),
        ("sys.exit(0)", 0, None),
        ("sys.exit()", 0, None),
        ("sys.exit(3)", 3, None),
        ("sys.exit('bad')", 1, None),
        ("raise ValueError('x')", 1, "ValueError: x"),
        ("raise BaseExceptionGroup('two', [ValueError()])", 1, "ExceptionGroup: two (1 sub-exception)"),
        ("raise KeyboardInterrupt", -signal.SIGINT, None),
        ("import os; os.kill(os.getpid(), 9)", -9, None),
    ],
)
def test_record_in_a_process(tmp_path: Path, body: str, exitcode: int, recorded: str | None) -> None:
    path = tmp_path / "error.json"
    process, stderr = run(SCRIPT.format(body), path)
    assert process.returncode == exitcode
    assert ("went on" in stderr) == (exitcode == 0)
    failure = ProcessFailure(0, process.pid, process.returncode, str(path))
    if recorded is None:
        assert os.listdir(tmp_path) == []
        return
    assert failure.message == recorded
    assert failure.evidence_ns is not None
    assert set(failure.traceback.splitlines()) <= set(stderr.splitlines())
    assert "in main" in failure.traceback
    assert "phalanx" not in stderr
    # It was handled by nobody, however long the interpreter has taken to end of it.
    assert handled_at(failure.error_file_data) is None
    late = ProcessFailure(0, process.pid, 1, str(path), observed_ns=time.monotonic_ns() + 3600 * SECOND)
    assert late.message == recorded


def test_record_in_a_process_that_cannot_write(tmp_path: Path) -> None:
    process, stderr = run(SCRIPT.format("raise ValueError('x')"), tmp_path / "gone" / "error.json")
    assert process.returncode == 1
    assert stderr.rstrip().endswith("ValueError: x")
    assert "During handling" not in stderr


def test_a_function_that_succeeds_leaves_no_failure(error_file: Path) -> None:
    """Whatever becomes of the record of its success, which older handlers know nothing of."""

    class Fails(ErrorHandler):
        def record_success(self) -> None:
            raise OSError("no telemetry")

    class Older:
        def __init__(self) -> None:
            self.began = 0

        def initialize(self) -> None:
            self.began += 1

    @record
    def add(a: int, *, b: int) -> int:
        """Add."""
        return a + b

    assert add(1, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    with pytest.raises(OSError, match="no telemetry"):
        record(list, Fails())()
    older = Older()
    assert record(list, older)() == []  # type: ignore[call-overload]  # it has what older handlers had
    assert older.began == 1
    assert not error_file.exists()


def test_record_with_parentheses_and_a_handler() -> None:
    class Kept(ErrorHandler):
        def __init__(self) -> None:
            self.seen: list[BaseException | None] = []

        def initialize(self) -> None:
            self.seen.append(None)

        def record_exception(self, e: BaseException) -> None:
            self.seen.append(e)
            raise RuntimeError("the handler's own trouble")

    kept = Kept()

    @record(error_handler=kept)
    def main() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as caught:
        main()
    assert kept.seen == [None, caught.value]
    assert [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)][1:] == ["main"]


class Told(ErrorHandler):
    """What `record` tells a handler, in order."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def initialize(self) -> None:
        self.told.append(self._fn_name)

    def record_success(self) -> None:
        self.told.append("success")

    def record_exception(self, e: BaseException) -> None:
        self.told.append(type(e))


def test_a_handler_is_told_of_whom_and_how_it_ended() -> None:
    def main(end: Callable[[], object]) -> None:
        end()

    async def waits() -> str:
        await asyncio.sleep(0)
        return "its value"

    told = Told()
    record(main, told)(list)
    with pytest.raises(ZeroDivisionError):
        record(main, told)(lambda: 1 // 0)
    record(main, told)(sys.exit)
    record(functools.partial(main, list), told)()
    assert asyncio.run(record(waits, told)()) == "its value"
    here = f"{test_a_handler_is_told_of_whom_and_how_it_ended.__name__}.<locals>"
    assert told.told == [
        f"{here}.main", "success", f"{here}.main", ZeroDivisionError, f"{here}.main", None, "success",
        f"{here}.waits", "success",
    ]  # fmt: skip


def test_record_of_a_coroutine_function(error_file: Path) -> None:
    @record()
    async def main(how: BaseException) -> None:
        await asyncio.sleep(0)
        raise how

    async def all_ways() -> None:
        await main(SystemExit(0))
        with pytest.raises(asyncio.CancelledError):
            await main(asyncio.CancelledError())
        assert os.listdir(error_file.parent) == []
        with pytest.raises(ValueError, match="x"):
            await main(ValueError("x"))

    assert inspect.iscoroutinefunction(main)
    asyncio.run(all_ways())
    assert "recorded" not in info(error_file)["py_callstack"]
    assert "in main" in info(error_file)["py_callstack"]


def test_a_failed_launcher_passes_the_root_cause_on(error_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root.json"
    write_error_file(str(root), "ROOT", "its traceback", pid=5, monotonic_ns=1)

    @record
    def launcher() -> None:
        late = ProcessFailure(1, 6, 1, "<N/A>", observed_ns=100 * MS)
        raise ChildFailedError("x", {1: late, 0: ProcessFailure(0, 5, 7, str(root), observed_ns=200 * MS)})

    began = time.monotonic_ns()
    with pytest.raises(ChildFailedError) as caught:
        launcher()
    ours = ProcessFailure(0, os.getpid(), 1, str(error_file))
    assert (ours.message, ours.traceback) == ("ROOT", "its traceback")
    data = json.loads(root.read_text())
    data["message"]["errorCode"] = 7
    assert ours.error_file_data == data, "a copy, but for the code"
    assert ours.detail.startswith("recorded by process 5, below the worker")
    assert ours.evidence_ns is None
    # Who runs the script leaves the copy as it is, and notes when the exception left it.
    for recorder in (recording.record, by_path()["record"]):
        assert recorder(caught.value, left=True)
        assert json.loads(error_file.read_text()) == data
    dated = ProcessFailure(0, os.getpid(), 1, str(error_file))
    assert dated.message == "ROOT"
    assert began <= (dated.evidence_ns or 0) <= time.monotonic_ns()
    # What comes of it is added. What does not replaces it.
    later = ValueError("later")
    later.__cause__ = caught.value
    assert recording.record(later)
    assert (told(error_file), info(error_file)["afterwards"]) == ("ROOT", "ValueError: later")
    error_file.write_text(json.dumps(data))
    assert recording.record(ValueError("unrelated"))
    assert told(error_file) == "ValueError: unrelated"
    assert info(error_file)["before"] == data


@pytest.mark.parametrize("contents", [None, b'{"message": {"mess'])
def test_a_failed_launcher_without_a_cause_records_its_report(
    error_file: Path, tmp_path: Path, contents: bytes | None
) -> None:
    root = tmp_path / "root.json"
    if contents is not None:
        root.write_bytes(contents)

    @record
    def launcher() -> None:
        raise ChildFailedError("inner", {0: ProcessFailure(0, 5, -9, str(root))})

    with pytest.raises(ChildFailedError):
        launcher()
    message = json.loads(error_file.read_text())["message"]["message"]
    assert "inner FAILED" in message
    assert "Signal 9 (SIGKILL) received by PID 5" in message


def test_dump_error_file(
    error_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root.json"
    handler = errors.get_error_handler()
    with pytest.raises(FileNotFoundError):
        handler.dump_error_file(str(root))
    root.write_text("{")
    with pytest.raises(ValueError, match="half written"):
        handler.dump_error_file(str(root))
    root.write_text('{"message": "flat", "more": 1}')
    handler.dump_error_file(str(root), 3)
    assert "no place for the error code 3" in caplog.text
    assert json.loads(error_file.read_text()) == {"message": "flat", "more": 1}
    root.write_text('{"message": null}')
    handler.dump_error_file(str(root), 3)
    assert json.loads(error_file.read_text()) == {"message": None}
    error_file.unlink()
    monkeypatch.delenv(ERROR_FILE_ENV)
    handler.dump_error_file(str(root))
    assert not error_file.exists()


@pytest.mark.parametrize("answer", ["elsewhere", "nowhere", "raises"])
def test_an_overridden_path_is_heeded(error_file: Path, tmp_path: Path, answer: str) -> None:
    class Elsewhere(ErrorHandler):
        def _get_error_file_path(self) -> str | None:
            if answer == "raises":
                raise OSError("no path")
            return str(tmp_path / "own.json") if answer == "elsewhere" else None

    root = tmp_path / "root.json"
    root.write_text('{"message": "flat"}')
    handler = Elsewhere()
    refused = pytest.raises(OSError, match="no path") if answer == "raises" else contextlib.nullcontext()
    with refused:
        handler.record_exception(raised(ValueError("x")))
    assert (told(tmp_path / "own.json") == "ValueError: x") if answer == "elsewhere" else os.listdir(tmp_path)
    with refused:
        handler.dump_error_file(str(root))
    assert sorted(os.listdir(tmp_path)) == [*(["own.json"] if answer == "elsewhere" else []), "root.json"]

    @record(error_handler=handler)
    def main(exc: BaseException) -> None:
        raise exc

    for exc in (ValueError("y"), ChildFailedError("x", {0: ProcessFailure(0, 5, 7, str(root))})):
        with pytest.raises(type(exc)) as caught:
            main(exc)
        assert caught.value is exc
    assert not error_file.exists()
    # It was recorded there, and not yet where the runner of a script looks.
    assert by_path()["record"](exc, left=True)
    assert "x FAILED" in told(error_file)


def test_initialize_warns_where_no_stack_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    try:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with pytest.warns(
            UserWarning, match="no stack will be printed on a fatal signal: UnsupportedOperation: fileno"
        ):
            ErrorHandler().initialize()
        assert not faulthandler.is_enabled()
        monkeypatch.setattr(sys, "stderr", None)
        with pytest.warns(UserWarning, match="RuntimeError"):
            record(lambda: None)()
    finally:
        monkeypatch.undo()
        if enabled:
            faulthandler.enable()


# --- ChildFailedError, Outcome ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, None, (0, None), (0, ProcessFailure(0, 1, 1, "")), OSError("x")])
def test_record_of_an_exception_with_a_method_of_that_name(error_file: Path, first: object) -> None:
    class Vote(Exception):  # noqa: N818 - not an error, a trial
        def get_first_failure(self) -> object:
            if isinstance(first, Exception):
                raise first
            return first

    @record
    def main() -> None:
        raise Vote("x")

    with pytest.raises(Vote):
        main()
    assert told(error_file) == "Vote: x"


def test_a_child_failed_error_travels() -> None:
    error = ChildFailedError(
        "train.py",
        {3: ProcessFailure(3, 7, 1, "<N/A>")},
        outcomes={0: Outcome(0, 6, "stopped", -15, 15)},
        log_dir="/logs",
    )
    error.add_note("while testing")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.name, copy.failures, copy.outcomes) == (error.name, error.failures, error.outcomes)
    assert copy.__notes__ == ["while testing"]


def test_a_child_failed_error_needs_a_failure() -> None:
    with pytest.raises(ValueError, match="at least one failure"):
        ChildFailedError("x", {})


def test_an_outcome_has_one_of_four_states() -> None:
    outcome = Outcome(0, 5, "stopped", 3, 15)
    assert outcome.describe() == "stopped by us (SIGTERM), exited with code 3"
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    with pytest.raises(ValueError, match="one of succeeded, failed, stopped, abandoned; got 'gone'"):
        Outcome(0, 5, "gone")


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.sets(st.integers(0, 60)))
def test_rank_ranges_can_be_read_back(ranks: set[int]) -> None:
    read_back: list[int] = []
    for part in filter(None, format_ranks(ranks).split(", ")):
        first, _, last = part.partition("-")
        read_back += range(int(first), int(last or first) + 1)
    assert read_back == sorted(ranks)


def failed(
    rank: int, message: str = "", stack: str = "", *, pid: int = 0, exitcode: int = 1, **more: Any
) -> ProcessFailure:
    """A failure with a fixed time and host."""
    failure = ProcessFailure(rank, pid or 100 + rank, exitcode, "<N/A>", host="node1", observed_ns=1000 + rank, **more)
    return failure.replace(timestamp=0, traceback=stack, message=message or failure.message)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_a_full_report() -> None:
    def stack(pid: int, rank: int) -> str:
        return (
            "Traceback (most recent call last):\n"
            f'  File "train.py", line 3, in step\n    fail(<object at 0x7f00{pid:08x}>)\n'
            f"RuntimeError: [rank{rank}] no\n"
        )

    failures = {rank: failed(rank, f"RuntimeError: [rank{rank}] no", stack(100 + rank, rank)) for rank in (4, 5, 6, 9)}
    failures[3] = failed(3, "RuntimeError: [rank3] no", stack(103, 3), stdout_file="/l/3/out", stderr_file="/l/3/err")
    failures[8] = failed(8, exitcode=2, stderr_tail="Loading: 10%\rLoading: 90%\n\x1b[31musage: train\x1b[0m\n")
    failures[11] = failed(11, exitcode=-11, detail="2.3 GiB of memory were in use")
    outcomes = {rank: Outcome(rank, 100 + rank, "stopped", -15, 15) for rank in (0, 1, 2)}
    outcomes[7] = Outcome(7, 107, "abandoned", None, 9)
    outcomes[10] = Outcome(10, 110, "succeeded", 0)
    outcomes[3] = Outcome(3, 103, "failed", 1)
    assert str(ChildFailedError("train.py", failures, outcomes=outcomes, log_dir="/l"))[:7] == "\n======"
    assert (
        format_report("train.py", failures, outcomes=outcomes, log_dir="/l")
        == """\
========================================================================
train.py FAILED
------------------------------------------------------------------------
Root Cause (first observed failure):
  time      : 1970-01-01_00:00:00
  host      : node1
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 103)
  stdout    : /l/3/out
  stderr    : /l/3/err
  error     : RuntimeError: [rank3] no
  traceback :
    Traceback (most recent call last):
      File "train.py", line 3, in step
        fail(<object at 0x7f0000000067>)
    RuntimeError: [rank3] no
  logs      : /l
------------------------------------------------------------------------
Other Failures:
ranks 4-6, 9: the same
rank 8:
  time      : 1970-01-01_00:00:00
  host      : node1
  rank      : 8 (local_rank: 8)
  exitcode  : 2 (pid: 108)
  error     : exited with code 2; stderr ends with: usage: train
  last lines of stderr:
    Loading: 90%
    usage: train
rank 11:
  time      : 1970-01-01_00:00:00
  host      : node1
  rank      : 11 (local_rank: 11)
  exitcode  : -11 (pid: 111) (SIGSEGV)
  error     : Signal 11 (SIGSEGV) received by PID 111
  detail    : 2.3 GiB of memory were in use
------------------------------------------------------------------------
ranks 0-2: stopped by us (SIGTERM)
rank 7: abandoned: pid 107 still there after SIGKILL
rank 10: succeeded
========================================================================"""
    )


PEER = "RuntimeError: pair.cc:{} Connection closed by peer {}. Why?"
NATIVE = "Thread 0x1 (most recent call first):\n  File x\n \n  {}native frames (py-spy):\n    f (libc.so)"
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in step\nValueError: no'

ALIKE: dict[str, tuple[list[dict[str, Any]], bool]] = {
    **{
        f"the port of a lost peer: {peer}": (
            [{"message": PEER.format(553, peer.format(port))} for port in (1, 8)],
            True,
        )
        for peer in ("[127.0.0.1]:4802{}", "10.0.0.7:4802{}", "[fe80::1%eth0]:4802{}", "[localhost]:4802{}")
    },
    "another line": ([{"message": PEER.format(line, "[127.0.0.1]:48021")} for line in (553, 554)], False),
    **{
        f"no port: {text}": ([{"message": text.format(number)} for number in (1, 2)], False)
        for text in (
            "IndexError: loss[3]:{}000",
            "ValueError: slice [0.5:{}000]",
            "[/src/pair.cpp]:{}000 x < 3",
            "v1.2:{}000",
        )
    },
    "our signal in the teardown": (
        [
            {"message": "ValueError: nan"},
            {"message": "ValueError: nan", "detail": f"SIGTERM, sent by us, {WHILE_LEAVING}"},
        ],
        True,
    ),
    "another detail": (
        [{"message": "ValueError: nan", "detail": text} for text in ("", "2.3 GiB of memory were in use")],
        False,
    ),
    "a stop after the exception": (
        [{"message": "ValueError: no", "stack": TRACE, "exitcode": code} for code in (1, -15)],
        True,
    ),
    "another shape": ([{"message": f"ValueError: shape [{number}]"} for number in (3, 4)], False),
    "the same signal": ([{"exitcode": -9}] * 2, True),
    "another signal": ([{"message": "ValueError: shape [3]"}, {"exitcode": -9}], False),
    "native frames": ([{"message": "E", "stack": stack} for stack in (NATIVE[:47], NATIVE.format(""))], True),
    "text like that": ([{"message": "E", "stack": stack} for stack in (NATIVE[:47], NATIVE.format("no "))], False),
}


@pytest.mark.parametrize("name", ALIKE)
def test_failures_that_are_alike_are_reported_once(name: str) -> None:
    kinds, alike = ALIKE[name]
    failures = {rank: failed(rank, **kind) for rank, kind in enumerate(kinds)}
    report = format_report("x", failures)
    assert ("rank 1: the same" in report) == alike
    assert alike or failures[1].message in report


def test_a_report_is_bounded() -> None:
    root = failed(0, "E: " + "x" * 10_000, "\n".join(f"line {n}" for n in range(5000)), stderr_tail="not shown")
    others = {rank: failed(rank, f"E{'x' * rank}: no", "l\n" * 500) for rank in range(1, 200)}
    report = format_report("x", {0: root, **others})
    assert len(report.splitlines()) < 800
    assert max(map(len, report.splitlines())) < 600
    assert "4,880 lines left out" in report
    assert "line 4999" in report
    assert "not shown" not in report


def test_nothing_in_a_report_can_act_on_a_terminal() -> None:
    nasty = "\x1b[2Ja\x00b\x1b]0;title\x07c\x08\udc80\x9b2J\x1b\x1b[2J[31m\u202e"
    failure = failed(0, nasty, nasty + "\ntail", detail=nasty, stdout_file=nasty)
    report = format_report(nasty, {0: failure}, log_dir=nasty)
    assert "a\\x00bc\\x08\\x80\\x9b2J\\x1b[31m\\u202e" in report
    assert not set(report) - {"\n"} & set(map(chr, [*range(32), *range(127, 160)]))
    report.encode()


def test_a_style_sees_each_line_and_its_kind() -> None:
    seen = []

    def style(kind: str, line: str) -> str:
        seen.append(kind)
        return f"<{line}>"

    report = format_report("x", {0: failed(0), 1: failed(1)}, style=style)
    assert all(line.startswith("<") and line.endswith(">") for line in report.splitlines())
    assert set(seen) == {"rule", "title", "heading", "field", "error"}


# --- the module -------------------------------------------------------------------------------------------------------


def test_the_well_known_names() -> None:
    from phalanx.multiprocessing import errors as known

    assert {name: getattr(known, name) for name in known.__all__} == {
        name: getattr(errors, name) for name in known.__all__
    }
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        errors.nothing  # noqa: B018 - the access is the test
    assert all(hasattr(errors, name) for name in errors.__all__)


def test_the_import_is_cheap(tmp_path: Path) -> None:
    code = (
        "import re, subprocess, sys; before = set(sys.modules); import phalanx.errors\n"
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('phalanx')))\n"
    )
    with start(code, tmp_path / "error.json") as process:
        assert process.communicate(timeout=30) == ("__future__\n", "")
