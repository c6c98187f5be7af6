"""Runs commands as a person or a script does: `phalanx run`, `phalanx logs`, on consoles and terminals."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple, Self

from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, RunProcsResult, Std, start_processes
from tests.support.helpers import TIMEOUT, wait_gone

LIMIT = 60.0
RUN = (sys.executable, "-m", "phalanx", "run")
LOGS = (sys.executable, "-m", "phalanx", "logs")
VARIABLES = [
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
]  # fmt: skip
COUNT = "import os\nfor n in range({count}): os.write(1, b'line %d\\n' % n)\n"
PATIENT = "from phalanx._logs import dedup; dedup.WINDOW = 60.0\n"


class Done(NamedTuple):
    """How a launcher ended, and what it showed."""

    status: int
    out: str
    err: str


class Launcher:
    """A launcher that runs. Leaving the context kills it; its workers must then be gone by themselves."""

    def __init__(self, argv: list[str], **settings: Any) -> None:
        settings.setdefault("stdout", subprocess.PIPE)
        settings.setdefault("stderr", subprocess.PIPE)
        settings.setdefault("stdin", subprocess.DEVNULL)
        self.process = subprocess.Popen(argv, **settings)
        self._read = {"stdout": b"", "stderr": b""}  # and not returned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        with self.process:
            pass

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def read_until(self, text: str, stream: str = "stderr") -> str:
        """What the launcher shows up to the line with `text`. What comes behind that line is left to others."""
        pipe = getattr(self.process, stream)
        shown = read_until(pipe.fileno(), text, before=self._read[stream]).encode()
        line_end = shown.find(b"\n", shown.find(text.encode()))
        end = line_end + 1 if line_end >= 0 and text.encode() in shown else len(shown)
        self._read[stream] = shown[end:]
        return shown[:end].decode()

    def end(self) -> Done:
        out, err = self.process.communicate(timeout=LIMIT)
        out, err = self._read["stdout"] + (out or b""), self._read["stderr"] + (err or b"")
        return Done(self.process.returncode, out.decode(), err.decode())


def read_until(fd: int, text: str, timeout: float = TIMEOUT, before: bytes = b"") -> str:
    """Read a descriptor until `text` has come, or the end. What comes with it is read, and returned, too."""
    deadline = time.monotonic() + timeout
    data = before
    while text.encode() not in data:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {text!r} within {timeout} s: {data!r}"
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # EIO: the last user of the terminal has gone
            chunk = b""
        if not chunk:
            break
        data += chunk
    return data.decode()


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Our end and the program's end of a pseudo-terminal."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        with contextlib.suppress(OSError):
            os.close(theirs)


def on_a_terminal(place: Place, argv: Iterable[object], typed: str | None = None, **env: str) -> tuple[int, bytes]:
    """Run a program on a terminal, where somebody has ``typed``, or nobody is. Its status, and what it writes there."""
    settings = {name: value for name, value in place.env.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | env
    with terminal() as (ours, theirs):
        os.write(ours, (typed or "").encode())
        stdin = subprocess.DEVNULL if typed is None else theirs
        with subprocess.Popen(
            [*map(str, argv)], env=settings, cwd=place.folder, stdin=stdin, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            sent = read_to_the_end(ours)
    return process.returncode, sent.replace(b"\r\n", b"\n")


def read_to_the_end(fd: int) -> bytes:
    """Read all that comes until nobody has the other end open any more; of a terminal, too."""
    data = b""
    with contextlib.suppress(OSError):  # EIO
        while chunk := os.read(fd, 65536):
            data += chunk
    return data


class Place:
    """A folder with scripts, an environment without a launcher above us, and the ways to start a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.env = {
            name: value
            for name, value in os.environ.items()
            if name not in VARIABLES and not name.startswith(("PHALANX_", "PET_", "TORCHELASTIC_"))
        } | {"TERM": "xterm", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}  # else a line says what the last was set to

    def write(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(dedent(text))
        return str(path)

    def start(self, *argv: object, head: tuple[str, ...] = (), logs: bool = True, **settings: Any) -> Launcher:
        where = ("--log-dir", str(self.logs)) if logs else ()
        return Launcher([*head, *RUN, *where, *map(str, argv)], cwd=self.folder, env=self.env, **settings)

    def run(self, *argv: object, **settings: Any) -> Done:
        with self.start(*argv, **settings) as launcher:
            return launcher.end()

    def program(self, *argv: object) -> Done:
        """Run any program here."""
        with Launcher([str(arg) for arg in argv], cwd=self.folder, env=self.env) as launcher:
            return launcher.end()

    def log(self, rank: int, name: str = "stdout.log") -> str:
        (path,) = self.logs.glob(f"*/attempt_0/{rank}/{name}")
        return path.read_text()


class Shell:
    """An interactive shell with job control, on a terminal."""

    def __init__(self, place: Place) -> None:
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.chdir(place.folder)
            # `set -b`: what becomes of a job is printed at once.
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**place.env, "PS1": "$ ", "TERM": "dumb"})
        self._rest = ""
        self._run = shlex.join([*RUN, "--log-dir", str(place.logs)])
        self.until("$ ")
        self.type("set -b; unset HISTFILE\n")
        self.until("$ ")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self.terminal)  # hangs up: the shell ends, and so does every job
        assert not wait_gone([self.pid])
        os.waitpid(self.pid, 0)

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def run(self, *argv: str) -> None:
        self.type(f"{self._run} {shlex.join(argv)}; echo code $?\n")
        self.until("echo code $?")

    def until(self, text: str) -> str:
        """What comes up to `text`; what has come behind it is there for the next call."""
        seen = self._rest if text in self._rest else self._rest + read_until(self.terminal, text)
        before, found, self._rest = seen.partition(text)
        assert found, seen
        return before

    @property
    def has_terminal(self) -> bool:
        return os.tcgetpgrp(self.terminal) == self.pid


def refused(done: Done, *words: str) -> None:
    """A usage error: status 2, words that help, no traceback, and nothing started."""
    assert done.status == 2, done
    assert "Traceback" not in done.err
    assert "logs in" not in done.err
    text = " ".join(done.err.split())
    for word in words:
        assert word in text


def sh(place: Place, code: str, *options: object, n: int = 1, **settings: Any) -> Done:
    """Run a shell script in every rank."""
    return place.run("--nproc-per-node", n, *options, "--no-python", "sh", "-c", code, **settings)


def start_sh(place: Place, code: str, *options: object, n: int = 1, **settings: Any) -> Launcher:
    return place.start("--nproc-per-node", n, *options, "--no-python", "sh", "-c", code, **settings)


def reader(place: Place, *options: object, head: tuple[str, ...] = (), **settings: Any) -> Launcher:
    argv = [*head, *LOGS, "--log-dir", str(place.logs), *map(str, options)]
    return Launcher(argv, cwd=place.folder, env=place.env, **settings)


def logs(place: Place, *options: object, **settings: Any) -> Done:
    """What `phalanx logs` says."""
    with reader(place, *options, **settings) as launcher:
        return launcher.end()


def workers_said(text: str) -> list[str]:
    """Lines of stderr that are not ours."""
    return [line for line in text.splitlines() if not line.startswith("phalanx: ")]


def path_of(place: Place, rank: int, name: str = "stdout.log") -> Path:
    (path,) = place.logs.glob(f"*/attempt_0/{rank}/{name}")
    return path


def whole(path: Path) -> bytes:
    """A log with all that rotation has set aside, oldest first."""
    aside = sorted(path.parent.glob(f"{path.name}.*"), key=lambda part: int(part.suffix[1:]))
    assert [int(part.suffix[1:]) for part in aside] == list(range(1, len(aside) + 1))
    return b"".join(part.read_bytes() for part in [*aside, path])


def fold_patiently(place: Place, more: str = "") -> None:
    """Lines wait for their equals until all have said them, or have ended: a busy machine may bring them late."""
    there = place.folder / "patient"
    there.mkdir()
    (there / "sitecustomize.py").write_text(PATIENT + more)
    place.env["PYTHONPATH"] = os.pathsep.join([str(there), *filter(None, [place.env.get("PYTHONPATH")])])


def group(
    logs: Path,
    console: ConsoleSpecs,
    entrypoint: Any,
    args: Mapping[int, tuple[Any, ...]],
    **options: Any,
) -> RunProcsResult:
    """The same through the library."""
    specs = options.pop("logs_specs", None) or DefaultLogsSpecs(str(logs), tee=Std.ALL)
    with start_processes("options", entrypoint, args, logs_specs=specs, console=console, **options) as running:
        return running.wait()
