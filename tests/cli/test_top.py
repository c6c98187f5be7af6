"""`phalanx top` on a terminal, as a person uses it, and into a pipe; and that it leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.cli.status import status
from phalanx.cli.top import top as command
from tests.cli.test_status import phalanx, start, until_answered
from tests.support.command import Launcher, Place, read_until, terminal
from tests.support.helpers import Gate, Ready, refusal_of_another_user

pytestmark = pytest.mark.long

KEYS = "q quit | sort: "
ENTERS, LEAVES = "\033[?1049h", "\033[?1049l"
DOWN = "\033[B"


class Screen:
    """`phalanx top` on a terminal of 80 columns and 24 rows."""

    def __init__(self, launcher: Launcher, ours: int, theirs: int) -> None:
        self.top, self.ours, self._theirs = launcher, ours, theirs

    def read(self, text: str) -> str:
        return read_until(self.ours, text)

    def press(self, keys: str, shown: str) -> str:
        os.write(self.ours, keys.encode())
        return self.read(shown)

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def is_as_before(self) -> bool:
        return bool(self.modes()[3] & termios.ECHO and self.modes()[3] & termios.ICANON)

    def end(self) -> tuple[int, str]:
        """Its exit code, and what is on the screen after it."""
        code = self.top.process.wait()
        assert self.is_as_before()
        os.write(self._theirs, b"\nthe end")
        shown = self.read("the end")
        assert LEAVES in shown
        return code, shown.rpartition(LEAVES)[2]


@contextlib.contextmanager
def top(place: Place, *options: object, width: int = 80) -> Iterator[Screen]:
    argv = [sys.executable, "-m", "phalanx", "top", "--interval", "0.2", "--log-dir", str(place.logs)]
    with terminal() as (ours, theirs):
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        with Launcher([*argv, *map(str, options)], cwd=place.folder, env=place.env, process_group=0, **streams) as one:
            screen = Screen(one, ours, theirs)
            assert ENTERS in screen.read(KEYS)
            assert not screen.modes()[3] & termios.ICANON
            yield screen


SCRIPT = """\
import signal
def told(*_):
    {ready}
signal.signal(signal.SIGUSR1, told)
def wait_for_all():
    {ready}; {gate}; {gate}
print("the first line\\nthe second line", flush=True)
wait_for_all()
"""


def test_keys_sort_filter_and_ask(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(SCRIPT.format(ready=ready.python("'here'"), gate=gate.python()), "train.py")
    with place.start("--nproc-per-node", 2, script):
        ready.wait(2)
        until_answered(place, "the second line")
        with top(place) as screen:
            shown = screen.read("the second line")
            assert "running for" in shown
            assert f"2 ranks on {os.uname().nodename}, launcher " in shown
            assert "RANK    PID  STATE    UPTIME  CPU%" in re.sub(" +PID", "    PID", shown)
            screen.press("k", "choose a rank first, by the arrows")
            screen.press(DOWN + DOWN + "k", "signal to rank 1, like USR1: ")
            screen.press("nonsense\n", "'nonsense': expected a signal")
            screen.press("kuse\x7fr1\n", "SIGUSR1 to rank 1")
            assert ready.wait() == ["here"]
            assert "the first line" in screen.press("l", "any key: back")
            assert "wait_for_all  train.py:6" in screen.press(" t", "any key: back")
            screen.press(" f", "only ranks (like 0-7,12; none: all): ")
            screen.press("x\n", "expected ranks")
            screen.press("f1\n", "only 1 of the ranks")
            screen.press("f\033c", KEYS)
            os.write(screen.ours, b"q")
            assert screen.end() == (0, "\r\nthe end")


def test_a_rank_is_debugged_and_the_screen_comes_back(place: Place) -> None:
    script = place.write("import os\nloss = 41\nif os.environ['RANK'] == '1': breakpoint()\nopen('gate').read()")
    os.mkfifo(place.folder / "gate")
    with place.start("--nproc-per-node", 2, script) as run:
        run.read_until(" stopped at ")
        until_answered(place, "breakpoint")
        with top(place) as screen:
            screen.read("breakpoint")
            screen.press("d", "choose a rank first, by the arrows")
            shown = screen.press(DOWN + "d", "Enter: back to phalanx top")
            assert "rank 0 stands at no breakpoint" in shown
            screen.press("\n", KEYS)
            os.write(screen.ours, DOWN.encode())
            shown = screen.press("d", "(Pdb) ")
            assert LEAVES in shown
            assert "42" in screen.press("p loss + 1\n", "(Pdb) ")
            os.killpg(screen.top.process.pid, signal.SIGINT)  # as Ctrl-C does: it is the debugger's own
            screen.read("(Pdb) ")
            shown = screen.press("\x04", KEYS)
            assert ENTERS in shown
            assert not screen.is_as_before()
            os.write(screen.ours, b"q")
            assert screen.end()[0] == 0


def test_a_signal_while_it_debugs_leaves_the_terminal_as_it_was(place: Place) -> None:
    with place.start("--stdin", "none", place.write("breakpoint()")) as run:
        run.read_until(" stopped at ")
        until_answered(place, "breakpoint")
        with top(place) as screen:
            screen.read("breakpoint")
            screen.press(DOWN + "d", "(Pdb) ")
            screen.top.send(signal.SIGTERM)
            assert screen.top.process.wait() == 143
            assert screen.is_as_before()


def test_ranks_that_do_not_fit_have_a_map(place: Place) -> None:
    with start(place, n=30), top(place) as screen:
        shown = screen.read(". 30 idle")
        assert "    0 " in shown
        os.write(screen.ours, b"q")
        assert screen.end()[0] == 0


def test_it_ends_with_the_run_and_tells_of_its_end_later(place: Place) -> None:
    with start(place, n=1), top(place) as screen:
        screen.read("line of 0")
        assert phalanx(place, "stop").status == 0
        code, shown = screen.end()
        assert code == 0
        assert ": stopped with exit code 143 after " in shown
    done = phalanx(place, "top")
    assert (done.status, done.err, ": stopped with exit code 143 after " in done.out) == (0, "", True)


def test_a_killed_launcher_ends_it(place: Place) -> None:
    with start(place, n=1) as launcher, top(place, "--interval", "1h") as screen:
        screen.read("line of 0")
        launcher.send(signal.SIGKILL)
        code, shown = screen.end()
        assert code == 1
        assert ": lost: its launcher, process " in shown


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_the_terminal_is_as_before(place: Place, number: signal.Signals) -> None:
    with start(place, n=1), top(place) as screen:
        screen.read("line of 0")
        screen.top.send(number)
        assert screen.end() == (128 + number, "\r\nthe end")


def test_it_can_be_stopped_and_goes_on(place: Place) -> None:
    with start(place, n=1), top(place) as screen:
        screen.read("line of 0")
        for _ in range(2):
            screen.top.send(signal.SIGTSTP)
            os.waitid(os.P_PID, screen.top.process.pid, os.WSTOPPED)
            assert screen.is_as_before()
            assert screen.read(LEAVES)
            screen.top.send(signal.SIGCONT)
            assert screen.read(ENTERS)
            screen.read("line of 0")
            assert not screen.is_as_before()
        os.write(screen.ours, b"q")
        assert screen.end()[0] == 0


def test_a_launcher_that_does_not_answer_is_named(place: Place) -> None:
    with start(place, n=1) as launcher, top(place) as screen:
        screen.read("line of 0")
        launcher.send(signal.SIGSTOP)
        screen.read("its launcher has not answered within")
        launcher.send(signal.SIGCONT)
        os.write(screen.ours, b"q")
        assert screen.end()[0] == 0


def piped(place: Place) -> Launcher:
    argv = [sys.executable, "-m", "phalanx", "top", "--interval", "0.1", "--log-dir", str(place.logs)]
    return Launcher(argv, cwd=place.folder, env=place.env)


def test_without_a_terminal_it_prints_tables_or_why_not(place: Place) -> None:
    with start(place, n=1) as launcher:
        launcher.send(signal.SIGSTOP)
        with piped(place) as one:
            (run,) = place.logs.iterdir()
            why = f"phalanx: {run.name}: its launcher has not answered within 3 s\n"
            assert one.read_until("its launcher") == why
            launcher.send(signal.SIGCONT)
            for _ in range(3):
                one.read_until("line of 0", "stdout")
            assert phalanx(place, "stop").status == 0
            done = one.end()
    assert (done.status, done.err) == (0, "")
    assert "\033" not in done.out
    assert ": stopped with exit code 143 after " in done.out


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process takes root")
def test_the_run_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # pytest's own is its user's alone
        Path(shared).chmod(0o755)
        place = Place(Path(shared))
        with start(place, "--log-mode", "755", n=1):
            (run,) = place.logs.iterdir()
            argv = ["--log-dir", str(place.logs), run.name]
            assert CliRunner().invoke(status, argv).exit_code == 0  # which loads what `top` needs
            assert refusal_of_another_user(lambda: command.main(argv, standalone_mode=False)) == (
                f"{run.name}: it belongs to user root: only that user, and root, can ask its launcher"
            )
