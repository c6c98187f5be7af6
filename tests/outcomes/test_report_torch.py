"""What a worker finds under `phalanx run`, and what a failed run shows, beside torchrun: the same script under both."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx.timer
from tests.project.test_documented import in_environment
from tests.support.command import Place

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

LIMIT = 90.0
ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
    import json, os, sys, time
    with open(sys.argv[1] + "new", "a") as file:
        file.write(json.dumps([os.environ["RANK"], dict(os.environ)]) + chr(10))
    os.symlink(os.readlink("/proc/self/fd/0"), sys.argv[1] + "stdin" + os.environ["RANK"])
    if os.environ["RANK"] == "1":
        while len(open(sys.argv[1] + "new").read().splitlines()) < 2:
            time.sleep(0.01)
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def fail():
            raise ValueError("bad batch")
        fail()
    import signal
    signal.pause()
    """

OTHER_VALUES = {
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
}  # fmt: skip


def environment(path: Path) -> dict[str, str]:
    """What rank 0 has found."""
    found: dict[str, dict[str, str]] = dict(json.loads(line) for line in path.read_text().splitlines())
    return found["0"]


def test_environment_report_and_error_file_are_those_of_torchrun(place: Place) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    script = place.write(SCRIPT)
    for name in in_environment() | {"TORCHELASTIC_SIGNALS_TO_HANDLE"}:
        place.env.pop(name, None)
    place.env["OMP_NUM_THREADS"] = "1"  # the one number that they choose differently
    told = place.env | {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR1"}  # which torchrun replaces
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", "there", "-r", "3"]
    there = subprocess.run(
        [*torchrun, script, "theirs-"], cwd=place.folder, env=told, input="", capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    here = place.run("--nproc-per-node", 2, "--notice", "USR1:60", "-r", 3, script, "ours-")
    assert (there.returncode, here.status) == (1, 1), (there.stderr, here)

    stdins = [os.readlink(place.folder / f"{name}0") for name in ("theirs-stdin", "ours-stdin")]
    assert stdins[0].startswith("pipe:")
    assert stdins[1] == "/dev/null"

    theirs, ours = (environment(place.folder / f"{whose}-new") for whose in ("theirs", "ours"))
    own = {name for name in in_environment() if name.startswith("PHALANX_")}
    assert theirs.keys() - ours.keys() == set()
    assert ours.keys() - theirs.keys() == own
    assert {name for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]} <= OTHER_VALUES

    report = there.stderr[there.stderr.index("====") :]
    for heading in (f"{script} FAILED", "Root Cause (first observed failure):"):
        assert re.search(rf"^{re.escape(heading)}$", here.err, re.MULTILINE)
        assert heading in report
    labels = re.findall(r"^  (\w[\w ]{9}):", report[report.index("Root Cause") :], re.MULTILINE)[
        :6
    ]  # below them, the exception is in such a place
    assert labels == ["time      ", "host      ", "rank      ", "exitcode  ", "error_file", "traceback "]
    block = here.err[here.err.index("Root Cause") :]
    assert [label for label in re.findall(r"^  (\w[\w ]{9}):", block, re.MULTILINE) if label in labels] == labels
    for line in ("  rank      : 1 (local_rank: 1)\n", "  exitcode  : 1 (pid: "):
        assert line in report
        assert line in block

    for folder in ("there", "logs"):
        (path,) = (place.folder / folder).glob("*/attempt_0/1/error.json")
        failure = ProcessFailure(1, 4242, 1, str(path))
        assert failure.message["message"] == "ValueError: bad batch"
        assert set(json.loads(path.read_text())) == {"message"}
        assert {"py_callstack", "timestamp"} <= set(failure.message["extraInfo"])
        assert isinstance(failure.message["extraInfo"]["timestamp"], str)


def test_the_words_for_a_signal_are_torchs(place: Place) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    script = place.write("import os; os.kill(os.getpid(), 9)")
    done = place.run("--nproc-per-node", 1, script)
    (pid,) = re.findall(r"exitcode  : -9 \(pid: (\d+)\)", done.err)
    failure = ProcessFailure(0, int(pid), -signal.SIGKILL, "<N/A>")
    report = str(ChildFailedError("script.py", {0: failure}))
    for text in (failure.message, f"(pid: {pid}) ", "(SIGKILL)"):
        assert text in report
        assert text.strip() in done.err
    assert f"exitcode  : -9 (pid: {pid})  (SIGKILL)\n" in report
    assert f"exitcode  : -9 (pid: {pid}) (SIGKILL)\n" in done.err
    for text in ("Failures:\n  <NO_OTHER_FAILURES>\n", "[0]:\n", "error_file: <N/A>"):
        assert text in report
        assert text not in done.err
    assert f"host      : {socket.getfqdn()}\n" in report
    assert f"host      : {os.uname().nodename}\n" in done.err


def signature(function: Any) -> list[tuple[str, Any]] | None:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(parameter.name, parameter.default) for parameter in found]


def test_names_and_arguments_of_timers_are_kept() -> None:
    from torch.distributed.elastic import timer as original

    missing, different = set(), set()
    for name, there in vars(original).items():
        if name.startswith("_") or inspect.ismodule(there):
            continue
        if not hasattr(phalanx.timer, name):
            missing.add(name)
            continue
        members = [member for member in dir(there) if not member.startswith("_")] if inspect.isclass(there) else []
        for path in ("", *members):
            theirs = getattr(there, path) if path else there
            ours = getattr(phalanx.timer, name) if not path else getattr(getattr(phalanx.timer, name), path, None)
            if ours is None:
                missing.add(f"{name}.{path}")
            elif callable(theirs) and (signature(ours) or [])[: len(signature(theirs) or [])] != signature(theirs):
                different.add(f"{name}.{path}".rstrip("."))
    text = (ROOT / "docs" / "timers.md").read_text(encoding="utf-8").partition("## Coming from torch")[2]
    assert missing == {"FileTimerServer.is_process_running"}
    assert different == {"FileTimerServer"}  # which has a default more: `run_id`
    assert all(f"`{name}" in text for name in missing | different)
