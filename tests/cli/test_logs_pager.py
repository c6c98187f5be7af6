"""Who reads `phalanx logs` (a pager, a shell, a person): Ctrl-C, the end of a run or of its reader, a tidy terminal."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_log_options import PYTHON
from tests.runs.test_runs import wait_for_record
from tests.support.command import LIMIT, LOGS, Launcher, Place, logs, read_until, reader, start_sh, terminal
from tests.support.helpers import Gate, Ready
from tests.support.screen import Emulator

COUNT = 40_000

# `phalanx logs`, which would give a reader up soon if it ever did.
IMPATIENT = """
from phalanx._logs.pump import Pump
Pump.__init__.__kwdefaults__["stuck"] = 0.1
from phalanx.cli import main
main()
"""

# A shell's part: both programs in the foreground of a terminal. It notes their exit codes.
PIPELINE = """
import fcntl, json, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, lambda *_: None)
first, second, codes = map(json.loads, sys.argv[1:])
with subprocess.Popen(first, stdout=subprocess.PIPE) as logs:
    with subprocess.Popen(second, stdin=logs.stdout) as reader:
        logs.stdout.close()
with open(codes, "w") as file:
    json.dump([logs.returncode, reader.returncode], file)
"""

# What less is to a pipe: it reads a screen's worth, is deaf to Ctrl-C, and reads on when it is asked to.
PAGER = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: None)
lines = os.read(0, 8192).count(b"\\n")
{ready}
{gate}
while data := os.read(0, 65536):
    lines += data.count(b"\\n")
print(lines, "lines")
"""


def start(place: Place, slave: int, *second: str) -> subprocess.Popen[bytes]:
    first = [*LOGS, "--log-dir", str(place.logs), "-f"]
    argv = [sys.executable, "-c", PIPELINE, *map(json.dumps, (first, second, str(place.folder / "codes")))]
    return subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=place.env)


@pytest.fixture
def script(place: Place, ready: Ready, gate: Gate) -> str:
    return place.write(f"""
        import os
        os.write(1, b"".join(b"line %d\\n" % n for n in range({COUNT})))
        {ready.python()}
        {gate.python()}
        os.write(1, b"one more\\n")
        """)


@pytest.mark.long
def test_a_pager_goes_on_after_an_interrupt(
    place: Place,
    script: str,
    ready: Ready,
    gate: Gate,
    tmp_path: Path,
) -> None:
    """It has all that was written, and what comes."""
    with Ready(tmp_path / "pager") as looked, Gate(tmp_path / "on") as on, place.start("-r", 3, script) as launcher:
        ready.wait()
        pager = PAGER.format(ready=looked.python(), gate=on.python())
        with terminal() as (ours, theirs), start(place, theirs, sys.executable, "-c", pager) as pipeline:
            looked.wait()
            os.write(ours, b"\x03")
            read_until(ours, "^C")
            on.open()
            gate.open()
            assert f"{COUNT + 1} lines" in read_until(ours, " lines")
            pipeline.wait(LIMIT)
        launcher.end()
    assert json.loads((place.folder / "codes").read_text()) == [0, 0]


@pytest.mark.long
def test_an_interrupt_that_ends_the_reader_ends_all(place: Place, script: str, ready: Ready, gate: Gate) -> None:
    with place.start("-r", 3, script) as launcher:
        ready.wait()
        with terminal() as (ours, theirs), start(place, theirs, "cat") as pipeline:
            read_until(ours, f"line {COUNT - 1}\r\n")
            os.write(ours, b"\x03")
            pipeline.wait(LIMIT)
        gate.open()
        launcher.end()
    assert json.loads((place.folder / "codes").read_text()) == [128 + signal.SIGPIPE, -signal.SIGINT]


@pytest.mark.slow
def test_a_reader_that_rests_for_long_gets_everything(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"""
        print("first")
        {ready.python()}
        {gate.python()}
        print("line\\n" * {COUNT}, end="")
        """)
    argv = [sys.executable, "-c", IMPATIENT, "logs", "--log-dir", str(place.logs), "-f"]
    with place.start("-r", 3, script) as launcher:
        ready.wait()
        with Launcher(argv, cwd=place.folder, env=place.env) as follower:
            shown = follower.read_until("first\n", "stdout")  # what comes is followed
            gate.open()
            launcher.end()
            assert follower.process.stderr is not None
            assert not select.select([follower.process.stderr], [], [], 1)[0]  # nothing is missing
            done = follower.end()
    assert (shown + done.out).count("\n") == COUNT + 1
    assert (done.status, done.err) == (0, "")


# --- following, and its end


@pytest.mark.slow
def test_following_ends_by_a_signal_or_with_the_launcher(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"print('one')\n{ready.python()}\n{gate.python()}\nprint('two')")
    with place.start("-r", 3, script) as launcher:
        ready.wait()
        wait_for_record(place)  # without one, nobody will say that it has ended
        for number in (signal.SIGTERM, signal.SIGKILL):
            with reader(place, "-f") as follower:
                follower.read_until("one\n", "stdout")
                if number == signal.SIGTERM:
                    follower.send(number)
                    assert follower.end() == (-number, "", "")
                else:
                    launcher.process.kill()
                    launcher.process.wait()
                    assert follower.end() == (0, "", "")


@pytest.mark.slow
def test_following_ends_with_its_reader(place: Place, ready: Ready, gate: Gate) -> None:
    with place.start("-r", 3, place.write(f"print('one')\n{ready.python()}\n{gate.python()}")) as launcher:
        ready.wait()
        done = logs(place, "-f", head=("bash", "-c", 'set -o pipefail; "$@" | head -1', "bash"))
        assert done == (141, "[0] one\n", "")
        gate.open()
        launcher.end()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["prompt> ", "\\r bar 10"])
def test_an_interrupt_leaves_a_terminal_tidy(place: Place, ready: Ready, gate: Gate, text: str) -> None:
    place.env["TERM"] = "xterm"
    code = f"printf 'one\n{text}'; {shlex.quote(PYTHON)} -c \"$TELL\"; read x <{gate.address}"
    place.env["TELL"] = ready.python("1")
    with start_sh(place, code, "-r", 3) as launcher, terminal() as (ours, theirs):
        ready.wait()
        with reader(place, "-f", "--color", "never", stdout=theirs, stderr=theirs) as follower:
            os.close(theirs)
            shown = read_until(ours, text[-4:])
            follower.send(signal.SIGINT)
            shown += read_until(ours, "what never comes")
            assert follower.process.wait(LIMIT) == 130
        os.write(gate._fd, b"\n")
        launcher.end()
    screen = Emulator(80)
    screen.feed(shown)
    assert screen.wraps
    assert screen.text() == ["[0] one", f"[0] {text.strip(chr(92) + 'r')}".rstrip()]
    assert screen.column == 0
