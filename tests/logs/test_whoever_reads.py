"""The files of a run hold the same, whoever reads the console, and however: nobody, slowly, or no longer."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import LIMIT, Launcher, Place, path_of, read_to_the_end, read_until
from tests.support.helpers import TIMEOUT, Gate, Ready

COUNT = 20_000
LINES = b"".join(b"line %d\n" % n for n in range(COUNT)) + b"the end 7"
CHOSEN = b"".join(b"[0] " + line + b"\n" for line in LINES.split(b"\n") if b"7" in line)

# The superuser may open any terminal, unless it is without this capability (CAP_DAC_OVERRIDE, capabilities(7)).
WITHOUT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"


@contextlib.contextmanager
def a_fast_one() -> Iterator[dict[str, Any]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as cat:
        yield {"stdout": cat.stdin}


@contextlib.contextmanager
def one_that_is_held() -> Iterator[dict[str, Any]]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    yield {"stdout": writer}
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def none() -> Iterator[dict[str, Any]]:
    yield {"head": ("sh", "-c", 'exec "$0" "$@" >&- 2>&-')}


@contextlib.contextmanager
def one_that_is_gone() -> Iterator[dict[str, Any]]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.close(reader)
    yield {"stdout": writer}
    os.close(writer)


@contextlib.contextmanager
def one_that_is_killed() -> Iterator[dict[str, Any]]:
    """After it has read a little."""
    with subprocess.Popen(["sh", "-c", "head -c 3000 >/dev/null; kill -9 $$"], stdin=subprocess.PIPE) as viewer:
        yield {"stdout": viewer.stdin}


@contextlib.contextmanager
def a_terminal(*, read: bool) -> Iterator[dict[str, Any]]:
    """One that cannot be opened anew, as after ``su``. Writing to it blocks."""
    ours, theirs = pty.openpty()
    os.chmod(os.ttyname(theirs), 0)
    reader = threading.Thread(target=read_to_the_end, args=(ours,))
    if read:
        reader.start()
    yield {"stdout": theirs, "head": (sys.executable, "-c", WITHOUT) if os.geteuid() == 0 else ()}
    os.close(theirs)
    if read:
        reader.join()
    os.close(ours)


def grows_to(path: Path, data: bytes) -> None:
    """Wait until a file holds this."""
    deadline = time.monotonic() + TIMEOUT
    while not path.exists() or path.stat().st_size < len(data):
        assert time.monotonic() < deadline, f"{path} does not grow any more"
        time.sleep(0.01)
    assert path.read_bytes() == data


CONSOLES: dict[str, Callable[[], Any]] = {
    "fast": a_fast_one,
    "held": one_that_is_held,
    "none": none,
    "gone": one_that_is_gone,
    "killed": one_that_is_killed,
    "another user's": lambda: a_terminal(read=True),
    "another user's, held": lambda: a_terminal(read=False),
}


@pytest.mark.long
@pytest.mark.parametrize("kind, rotated", [*((kind, False) for kind in CONSOLES), ("fast", True), ("held", True)])
def test_files_are_the_same(kind: str, rotated: bool, place: Place, ready: Ready, gate: Gate) -> None:
    """While the run goes on, and at its end."""
    script = place.write(f"""
        import os, threading
        lines = b"".join(b"line %d\\n" % n for n in range({COUNT})) + b"the end 7"
        def write(fd):
            data = lines
            while data:
                data = data[os.write(fd, data[:1000]):]
        for fd in (1, 2):
            write(fd)
        {ready.python()}
        {gate.python()}
        """)
    options: list[object] = ["--duplicate-stdout-filters", "7", "--duplicate-stderr-filters", "7", "--drain", "0.2"]
    options += ["--log-max-size", "50k"] if rotated else []
    with CONSOLES[kind]() as settings:
        settings.setdefault("stderr", settings.get("stdout"))
        with place.start(*options, script, **settings) as launcher:
            ready.wait()
            folder = path_of(place, 0).parent.parent
            filtered = [folder / f"filtered_{name}.log" for name in ("stdout", "stderr")]
            ended = CHOSEN.removesuffix(b"[0] the end 7\n")
            for path in filtered:
                grows_to(path, ended)
            gate.open()
            launcher.process.wait(LIMIT)
            assert launcher.process.returncode == 0
    for path in filtered:
        assert path.read_bytes() == CHOSEN
    for name in ("stdout.log", "stderr.log"):
        path = folder / "0" / name
        parts = [folder / "0" / f"{name}.{n}" for n in range(1, len(list(path.parent.glob(f"{name}.*"))) + 1)]
        assert b"".join(part.read_bytes() for part in [*parts, path]) == LINES
        assert bool(parts) == rotated


def test_such_a_terminal_cannot_be_opened_anew() -> None:
    """Else the test above would show nothing."""
    code = (
        "import os; from phalanx._base import linux; print(linux.open_nonblocking(1)[1], file=__import__('sys').stderr)"
    )
    with a_terminal(read=True) as settings:
        argv = [*settings["head"], sys.executable, "-c", code]
        with Launcher(argv, stdout=settings["stdout"]) as launcher:
            assert launcher.end().err == "4096\n"


@pytest.mark.slow
def test_a_run_whose_reader_has_gone_goes_on_and_notes_that_once(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"""
        import os
        print("one", flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            {ready.python()}
            {gate.python()}
        print("two", flush=True)
        raise SystemExit(3)
        """)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with place.start("--max-restarts", 1, script, stdout=writer) as launcher:
        os.close(writer)
        ready.wait()
        assert read_until(reader, "[0] one\n")
        os.close(reader)
        gone = launcher.read_until("its log files have all lines\n")
        gate.open()
        done = launcher.end()
    assert done.status == 3
    note = "phalanx: nobody reads stdout any more; the run goes on, and its log files have all lines\n"
    assert (gone + done.err).count(note) == 1
    (folder,) = place.logs.iterdir()
    logs = [(folder / f"attempt_{number}" / "0" / "stdout.log").read_text() for number in range(2)]
    assert logs == ["one\ntwo\n"] * 2
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    closed = [(event["attempt"], event["stream"]) for event in events if event["name"] == "console.closed"]
    assert closed == [(0, "stdout")]
