"""What a machine runs before each attempt."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from phalanx._run import node_check
from tests.support.command import Place
from tests.support.helpers import PYTHON, Ready, wait_gone

pytestmark = pytest.mark.slow


def run_check(command: str) -> str:
    with node_check.NodeCheck(command) as check:
        return check.wait()


@pytest.mark.parametrize(
    "command, why",
    [
        ("true", ""),
        ("echo fine; echo GPU 3 is broken >&2; exit 4", "exit code 4: GPU 3 is broken"),
        ("echo the disk is full; exit 1", "exit code 1: the disk is full"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("no-such-program", "exit code 127: sh: 1: no-such-program: not found"),
    ],
)
def test_a_check(command: str, why: str) -> None:
    found = run_check(command)
    assert found == why or (why and found.endswith("no-such-program: not found"))


def test_a_check_does_not_find_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "0123456789abcdef")
    assert run_check('test -z "$PHALANX_JOB_SECRET"') == ""


def test_a_check_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "LONGEST", 0.2)
    assert run_check("sleep 1000") == "it has not ended within 0.2s"


def test_what_a_check_writes_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    has_room = f"test $(du -sk {tmp_path} | cut -f1) -lt 1000"
    with node_check.NodeCheck(f"yes | head -c 4000000; {has_room} && echo the end") as check:
        assert check.wait() == ""
        check.write(str(tmp_path))
    log = (tmp_path / "node-check.log").read_text()
    assert log.endswith("\ny\nthe end\n")
    assert len(log) < 70_000


def test_what_a_check_leaves_behind_is_told_as_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_check("sleep 1000 & exit 0") == ""
    assert capfd.readouterr().err.startswith("phalanx: [node-check] ended what was left behind: pid ")


def test_it_is_tried_again_after_longer_and_longer_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_check, "_FIRST", 0.02)
    command = f"echo >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) = 3"
    with node_check.NodeCheck(command) as check:
        assert node_check.pass_check(check, 60.0, lambda: 0.0) == ""
    said = capfd.readouterr().err
    assert len(re.findall(r"exit code 1; this machine takes no part, and is checked again in \d+ms", said)) == 2
    with node_check.NodeCheck("exit 2") as check:
        assert node_check.pass_check(check, 0.0) == "this machine has failed its check once: exit code 2"


def test_a_check_that_could_not_be_started_counts_for_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with node_check.NodeCheck("sleep 600") as check:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(tmp_path))
            with pytest.raises(OSError, match=r"--node-check: .*no such binary: 'sh'"):
                check.begin("attempt 0", lambda: None)
        check.begin("attempt 0", lambda: None)
        assert check.is_under_way


# --- phalanx run


def record(place: Place) -> dict[str, Any]:
    (path,) = place.logs.glob("*/run.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def counted(place: Place, least: int) -> str:
    """A command that fails from the time on for which it runs the ``least``th time."""
    path = place.folder / "checks"
    return (
        f"echo checked; echo >> {path}; test $(wc -l < {path}) -lt {least} || {{ echo GPU 3 is broken >&2; exit 4; }}"
    )


FAILS_ONCE = """
    import os, sys
    sys.exit(3 * (os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0"))
    """


@pytest.mark.parametrize("options", [(), ("--nproc-per-node", "8", "--preload", "json")])
def test_it_runs_before_each_attempt_on_one_machine(place: Place, options: tuple[str, ...]) -> None:
    script = place.write(FAILS_ONCE)
    done = place.run("--max-restarts", 2, *options, "--node-check", counted(place, 9), script)
    assert done.status == 0, done
    (log,) = place.logs.glob("*/node-check.log")
    lines = log.read_text().splitlines()
    assert [line.partition(",")[0] for line in lines[::2]] == ["== attempt 0", "== attempt 1"]
    assert lines[0].endswith(": exit code 0")
    assert lines[1::2] == ["checked", "checked"]


def test_no_worker_starts_on_a_machine_that_fails_its_check(place: Place) -> None:
    script = place.write(f"open({str(place.folder / 'started')!r}, 'w')")
    done = place.run("--max-restarts", 2, "--nproc-per-node", 2, "--node-check", counted(place, 1), script)
    assert done.status == 1
    assert done.err.splitlines() == [
        "phalanx: [node-check] checked",
        "phalanx: [node-check] GPU 3 is broken",
        "phalanx: Error: --node-check: exit code 4: GPU 3 is broken",
    ]
    assert not (place.folder / "started").exists()


def test_a_fifo_in_place_of_the_log_holds_up_no_restart(place: Place) -> None:
    script = place.write("""
        import os, sys
        folder, attempt, _ = os.environ["TORCHELASTIC_ERROR_FILE"].partition("attempt_0")
        if attempt:
            os.mkfifo(folder + "fifo")
            os.replace(folder + "fifo", folder + "node-check.log")
            sys.exit(3)
        """)
    done = place.run("--max-restarts", 1, "--node-check", "echo checked", script)
    assert done.status == 0, done
    assert "phalanx: --node-check: its output is lost: " in done.err


def test_a_check_that_fails_before_a_restart_ends_the_run(place: Place) -> None:
    done = place.run("--max-restarts", 9, "--node-check", counted(place, 2), place.write(FAILS_ONCE))
    assert done.status == 1
    (log,) = place.logs.glob("*/node-check.log")
    why = f"--node-check: exit code 4: GPU 3 is broken; its output is in {log}"
    assert f"phalanx: Error: {why}\n" in done.err
    assert done.err.splitlines()[-2].startswith("phalanx: attempt 0, "), "what failed before is listed"
    assert "GPU 3 is broken\n" in log.read_text()
    run = record(place)
    assert (run["state"], run["exit_code"], run["cause"]) == ("failed", 1, f"attempt 1: {why}")
    assert len(run["attempts"]) == 2


@pytest.mark.parametrize("number, workers, attempt", [(signal.SIGTERM, 2, 0), (signal.SIGINT, 1, 1)])
def test_a_signal_during_a_check_stops_the_run(
    place: Place, ready: Ready, number: signal.Signals, workers: int, attempt: int
) -> None:
    path = place.folder / "checks"
    say = place.write(f"import os\n{ready.python('os.getppid()')}", "say.py")
    hangs = f"echo >> {path}; test $(wc -l < {path}) -le {attempt} || {{ {PYTHON} {say}; sleep 600; }}"
    script = place.write("raise SystemExit(3)")
    with place.start("--max-restarts", 9, "--nproc-per-node", workers, "--node-check", hangs, script) as launcher:
        pids = ready.pids()
        launcher.send(number)
        done = launcher.end()
    assert done.status == 128 + number, done
    assert wait_gone(pids) == set()
    assert f"phalanx: {number.name}: ending --node-check; no attempt is started\n" in done.err
    if attempt:
        assert "attempt 0, " in done.err, "what failed before is listed"
        assert record(place)["state"] == "stopped"


STRUCK = """
import os, signal, sys
from phalanx import cli

moment = tuple(sys.argv.pop(1).split())

def trace(frame, what, _):
    if (what, frame.f_code.co_qualname) == moment:
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGTERM)
    return trace if frame.f_code.co_qualname == moment[1] else None

sys.settrace(trace)
cli.main()
"""
"""A command that is sent SIGTERM at a moment of its first check."""


@pytest.mark.parametrize("moment", ["return PContext.start", "call PContext.when_gone"])
def test_a_signal_at_the_worst_moment_of_a_check_is_one_signal(place: Place, moment: str) -> None:
    script = place.write("raise SystemExit(3)")
    command = ("run", "--log-dir", place.logs, "--node-check", "exec sleep 600", script)
    done = place.program(sys.executable, "-c", STRUCK, moment, *command)
    assert done.status == 128 + signal.SIGTERM, done
    assert done.err == "phalanx: SIGTERM: ending --node-check; no attempt is started\n"


STRUCK_AT_A_LINE = """
import linecache, os, signal, sys
from phalanx import cli

left = [int(sys.argv.pop(1))]
PARTS = os.environ["PARTS"].split()

def trace(frame, event, _):
    name = frame.f_code.co_filename
    if not any(part in name for part in PARTS) or frame.f_code.co_name == "__del__":
        return None
    # Lines of `with` are passed over: they are run again before `__exit__` is called, where no real signal raises.
    text = linecache.getline(name, frame.f_lineno).lstrip()
    is_handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if event == "line" and is_handled and not text.startswith("with "):
        left[0] -= 1
        if not left[0]:
            sys.settrace(None)
            while frame:
                frame.f_trace, frame = None, frame.f_back
            os.write(1, b"struck\\n")
            os.kill(os.getpid(), signal.SIGTERM)
    return trace

sys.settrace(trace)
cli.main()
"""
"""A command that is sent SIGTERM when a line of ours is about to run, counted from where signals are handled."""


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--preload", "json")])
def test_a_signal_between_any_two_lines_is_one_signal(place: Place, options: tuple[object, ...]) -> None:
    place.env["PARTS"] = "/cli/_run /_run/"
    script = place.write(FAILS_ONCE)
    command = ("run", "--log-dir", place.logs, "--max-restarts", 1, *options, "--node-check", "sleep 0.1", script)
    moment, step = 1, int(os.environ.get("PHALANX_STEP", "61"))
    while True:
        done = place.program(sys.executable, "-c", STRUCK_AT_A_LINE, moment, *command)
        if not done.out.startswith("struck"):
            break
        assert done.status in (0, 128 + signal.SIGTERM), (moment, done)
        assert "SIGKILL" not in done.err, (moment, done)
        assert "Traceback" not in done.err, (moment, done)
        moment += step
    assert moment > 500
    assert done.status == 0, "no signal came"


@pytest.mark.parametrize(
    "options", [(), ("--nnodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1", "--master-port", 9)]
)
def test_a_check_that_cannot_be_started(place: Place, options: tuple[object, ...]) -> None:
    place.env["PATH"] = str(place.folder)
    done = place.run(*options, "--node-check", "true", place.write(""))
    assert (done.status, done.err.count("\n")) == (1, 1), done
    assert done.err.startswith("Error: --node-check: ")
    assert "no such binary: 'sh'" in done.err


@pytest.mark.long
def test_a_signal_during_the_start_leaves_no_unrecorded_run(place: Place) -> None:
    place.env["PARTS"] = "/_group/ /_logs/specs /_logs/layout"
    moment, step, found = 1, int(os.environ.get("PHALANX_STEP", "17")), 0
    while True:
        argv = ("run", "--log-dir", place.logs, "--no-python", "true")
        done = place.program(sys.executable, "-c", STRUCK_AT_A_LINE, moment, *argv)
        if not done.out.startswith("struck"):
            break
        runs = list(place.logs.glob("*/"))
        assert all((run / "run.json").exists() for run in runs), (moment, done)
        found = max(found, len(runs))
        moment += step
    assert moment > 300
    assert found > 10
