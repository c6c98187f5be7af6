"""Run sessions of noxfile.py: one in the foreground, or several at a time, each line of theirs marked with its name.

    python tools/sessions.py [--rounds N] SESSION... [-- ARGUMENTS]

This is what nox leaves open: that two calls may set up one environment at the same time, and that the output of
sessions that run side by side is seen while it is written (`nox --parallel` holds it back until each has ended).
Python is the one that PYTHON names, else python3; `tests` runs on every supported version that PATH or pyenv has.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from python_discovery import get_interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
ENVIRONMENTS = ROOT / ".nox" / VERSION
NOX = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "--envdir", str(ENVIRONMENTS)]

ENDING = 15.0
"""How many seconds what was interrupted may take to end before it is killed."""

BUSY = """
import os
os.nice(19)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""A busy loop that ends by itself as soon as its parent is another one: `kill -9` leaves none behind."""

stopping = threading.Event()


def say(text: str) -> None:
    """Write a line of ours to stderr."""
    sys.stderr.write(f"== {text}\n")  # one write: lines of several threads are not mixed


def with_pyenv() -> None:
    """Let PATH end with the Pythons of pyenv, the newest first, so that nox finds those that no shim leads to."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(
        (tuple(map(int, match.groups())), str(path))
        for path in root.glob("versions/*/bin")
        if (match := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", path.parent.name))
    )
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *(path for _, path in reversed(found))])


def sessions(names: list[str], options: list[str]) -> list[str]:
    """The sessions that nox knows by these names, without those whose Python is not here."""
    listed = subprocess.run(
        [*NOX, *options, "--list", "--json", "--session", *names], check=False, stdout=subprocess.PIPE, text=True
    )
    if listed.returncode:
        sys.exit(listed.returncode)
    found = []
    for session in sorted(json.loads(listed.stdout), key=lambda session: names.index(session["name"])):
        if (version := session["python"]) and get_interpreter(version) is None:
            say(f"{session['session']}: there is no Python {version} here, left out")
        elif session["name"] == "pythons" and version == VERSION and len(names) > 1:
            say(f"{session['session']}: left out, `make test` runs these tests on this Python")
        else:
            found.append(session["session"])
    return found


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of a session's environment: of two makes at once, the second waits."""
    with open(ENVIRONMENTS / f"{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Session:
    """One session: its environment is brought up to date, then it runs."""

    def __init__(self, name: str, options: list[str], arguments: list[str], *, alone: bool) -> None:
        self.name = name
        self._options = options
        self._arguments = arguments
        self._alone = alone
        self._foreground = alone and sys.stdin is not None and sys.stdin.isatty()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = list[str]()
        self._first = list[str]()
        self._last = collections.deque[str](maxlen=8)
        self.failed = False

    def run(self) -> None:
        """Run it. What it prints goes to stdout, marked with its name if it is not alone."""
        with locked(self.name):
            status = self._call("--install-only", quiet=True)
        if status == 0 and not stopping.is_set():
            status = self._call("-R", quiet=False)
        self.failed = status != 0

    def _call(self, option: str, *, quiet: bool) -> int:
        command = [*NOX, *self._options, option, "--session", self.name, "--", *self._arguments]
        piped = quiet or not self._alone
        with subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=None if self._alone else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            # A group of its own is ended as one. But who has the terminal keeps it: `--pdb` reads from there.
            process_group=None if self._foreground else 0,
        ) as process:
            self._process = process
            held = []
            for line in process.stdout or ():
                text = line.decode(errors="replace")
                if quiet:
                    held.append(text)
                else:
                    self._show(text)
        self._process = None
        if process.returncode:
            for text in held:
                self._show(text)
        return process.returncode

    def _show(self, text: str) -> None:
        text = text.rstrip("\n")
        if text.startswith("E  "):
            self._first.append(text)
        elif text.startswith(("FAILED ", "ERROR ")):
            self._errors.append(text)
        if text.strip() and not text.startswith("nox > "):
            self._last.append(text)
        sys.stdout.write(f"{text}\n" if self._alone else f"{self.name} | {text}\n")
        sys.stdout.flush()

    def end(self, number: int, cause: int) -> None:
        """Send a signal to all that runs of it, for it is to end because of the signal `cause`."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if not self._foreground:
                os.killpg(process.pid, number)
            elif cause != signal.SIGINT or number != signal.SIGINT:  # else the terminal has sent it already
                process.send_signal(number)

    def say_why(self) -> None:
        """Say again, in few lines, what failed."""
        for text in [*self._first[:5], *(self._errors[:8] or self._last)]:
            print(f"{self.name} | {text[:200]}", file=sys.stderr)


class Interrupted(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def interrupted(number: int, _frame: FrameType | None) -> NoReturn:
    """Raise what ends everything."""
    raise Interrupted(number)


def together(todo: list[Session]) -> None:
    """Run the sessions, five at a time where there are two processors, for they mostly wait.

    So `make matrix` begins with what runs tests, and goes on with the package and the site: they end together.
    """
    left = collections.deque(todo)
    marked = len(todo) > 1

    def lane() -> None:
        while left and not stopping.is_set():
            session = left.popleft()
            if marked:
                say(f"{session.name}: begins")
            session.run()
            if marked:
                say(f"{session.name}: {'failed' if session.failed else 'passed'}")

    several = len(os.sched_getaffinity(0)) > 1
    lanes = [threading.Thread(target=lane, daemon=True) for _ in range(min(len(todo), 5 if several else 1))]
    for thread in lanes:
        thread.start()
    try:
        for thread in lanes:
            thread.join()
    except Interrupted as interrupt:
        stopping.set()
        end(todo, lanes, interrupt.number)
        raise


def end(running: list[Session], lanes: list[threading.Thread], cause: int) -> None:
    """Interrupt what runs, and kill what has not ended in time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number, seconds in ((signal.SIGINT, ENDING), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + seconds
        for session in running:
            session.end(number, cause)
        for thread in lanes:
            thread.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """Keep each processor busy meanwhile."""
    load = [subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.DEVNULL) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def main() -> int:
    """Run what the command line names. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="how often; every second time under load")
    parser.add_argument("names", nargs="+", metavar="SESSION")
    mine, arguments = sys.argv[1:], list[str]()
    if "--" in mine:
        mine, arguments = mine[: mine.index("--")], mine[mine.index("--") + 1 :]
    options = parser.parse_args(mine)
    with_pyenv()
    # What PYTHON names is the only one; else python3 is one of them, supported or not.
    versions = ["--force-python" if os.environ.get("PYTHON") else "--extra-python", VERSION]
    names = sessions(options.names, versions)
    failed = list[str]()
    try:
        for number in range(1, options.rounds + 1):
            if options.rounds > 1:
                say(f"round {number} of {options.rounds}{', under load' if number % 2 == 0 else ''}")
            todo = [Session(name, versions, arguments, alone=len(names) == 1) for name in names]
            with loaded() if number % 2 == 0 else contextlib.nullcontext():
                together(todo)
            wrong = [session for session in todo if session.failed]
            for session in wrong if len(todo) > 1 else ():
                session.say_why()
            failed += [f"{session.name} (round {number})" if options.rounds > 1 else session.name for session in wrong]
    except Interrupted as interrupt:
        return 128 + interrupt.number
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)  # SIGINT, too: what a shell starts with `&` ignores it, and its children do
    sys.exit(main())
