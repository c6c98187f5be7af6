"""Error files and the files of a group, beside those of the original."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx import errors
from phalanx._evidence import recording
from phalanx._evidence.error_file import ERROR_FILE_ENV
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.support.helpers import TIMEOUT

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_temporary_folder")]

FILES: dict[str, Any] = {
    "of record": {
        "message": {"message": "E: x", "errorCode": 1, "extraInfo": {"timestamp": "5", "py_callstack": "tb"}}
    },
    "custom": {"message": {"message": "E: x", "extraInfo": {"timestamp": 6}}, "custom": [1, None]},
    "flat": {"message": "text", "timestamp": 1700000000},
    "flat, with a text for time": {"message": "text", "timestamp": "1700000001"},
    "flat, with parts of a second": {"message": "text", "timestamp": 1700000001.7},
}


@pytest.mark.parametrize("kind", FILES)
def test_error_files_are_read_as_the_original_reads_them(tmp_path: Path, kind: str) -> None:
    from torch.distributed.elastic.multiprocessing import errors as original

    path = tmp_path / "error.json"
    path.write_text(json.dumps(FILES[kind]))
    ours, theirs = errors.ProcessFailure(0, 7, 1, str(path)), original.ProcessFailure(0, 7, 1, str(path))
    assert (ours.timestamp, ours.error_file_data) == (theirs.timestamp, theirs.error_file_data)
    assert ours.message == (theirs.message if isinstance(theirs.message, str) else theirs.message["message"])


@pytest.mark.parametrize("code", [0, 1, -9])
@pytest.mark.parametrize("kind", [*FILES, "no message", "no text"])
def test_an_error_file_is_passed_on_as_the_original_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    from torch.distributed.elastic.multiprocessing import errors as original

    source = tmp_path / "source.json"
    source.write_text(json.dumps({**FILES, "no message": {"a": 1}, "no text": {"message": None}}[kind]))
    if kind == "no text":
        code = 0  # the original raises TypeError for others
    texts = []
    for number, handler in enumerate((errors.ErrorHandler(), original.ErrorHandler())):
        own = tmp_path / f"{number}.json"
        monkeypatch.setenv(ERROR_FILE_ENV, str(own))
        handler.dump_error_file(str(source), code)
        texts.append(json.loads(own.read_text()))
    assert texts[0] == texts[1]


def test_what_torch_recorded_and_was_handled_is_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing import errors as original

    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE_ENV, str(path))

    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as caught:
        original.record(fail)()
    first = json.loads(path.read_text())
    assert recording.record(caught.value, left=True)
    found = json.loads(path.read_text())
    assert found["message"].pop("extraInfo").items() >= first["message"].pop("extraInfo").items()
    assert found == first
    with pytest.raises(ValueError, match="x"):
        original.record(fail)()
    first = json.loads(path.read_text())
    os.utime(path, (1700000000, 1700000000))
    assert recording.record(KeyError("y"), left=True)
    found = json.loads(path.read_text())
    assert found["message"]["message"] == "KeyError: 'y'"
    assert found["message"]["extraInfo"]["before"] == first


@pytest.mark.parametrize("options", [{}, {"redirects": Std.ALL}, {"tee": {0: Std.ALL, 1: Std.OUT}}])
def test_the_files_of_a_group_are_those_of_the_originals(tmp_path: Path, options: dict[str, Any]) -> None:
    from torch.distributed.elastic import multiprocessing as original

    there = {
        name: value if not isinstance(value, dict) else {rank: original.Std(std) for rank, std in value.items()}
        for name, value in options.items()
    }
    there = {name: original.Std(value) if isinstance(value, Std) else value for name, value in there.items()}
    found = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}  # which the original leaves changed
    for kind, specs in (
        (start_processes, DefaultLogsSpecs(str(tmp_path / "ours"), **options)),
        (original.start_processes, original.DefaultLogsSpecs(str(tmp_path / "theirs"), **there)),
    ):
        group = kind("files", "/bin/true", {0: (), 1: ()}, {0: {}, 1: {}}, specs)
        try:
            group.wait(TIMEOUT)
            files = (group.stdouts, group.stderrs, group.error_files)
        finally:
            group.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        # Below the folder of the run, the name of which is made up.
        found.append([{rank: path.partition("attempt_0")[2] for rank, path in each.items()} for each in files])
    assert found[0] == found[1]
