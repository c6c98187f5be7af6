"""A job under one of `launchers`: started, awaited, told to end, killed; and what is left of it, by a mark.

A copy says that it is up by its pid in a FIFO, and may wait at another one, ``go``, which lets all go at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks import procfs
from benchmarks.launchers import LAUNCHERS, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

MARK = "PHALANX_BENCHMARK_JOB"

# $1 is the folder of the job. The copy that is the first to make a folder there fails, once it may go.
SLEEPS = 'echo $$ >"$1/ready"; exec sleep 600'
FAILS = f"""
if mkdir "$1/first" 2>/dev/null; then
    echo $$ >"$1/ready"
    read -r _ <"$1/go"
    echo "$EPOCHREALTIME" >"$1/moment"
    exit 1
fi
{SLEEPS}
"""
IGNORES = 'trap "" TERM; sleep 600 & echo $$ >"$1/ready"; wait'
"""A copy that ignores SIGTERM, as its child does."""

PATIENCE = 1.0
"""Seconds after which a copy that carries no mark is one without."""


class Started:
    """A job that has been started. A context: at its end nothing is left of it.

    Each copy is ``interpreter`` on a file with ``script``, and is given the job's folder and ``arguments``. The
    launcher's output goes to a file in that folder.
    """

    def __init__(
        self,
        name: str,
        script: str,
        copies: int,
        *,
        interpreter: Sequence[str] = ("/bin/bash",),
        arguments: Sequence[str] = (),
        teed: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        for fifo in ("ready", "go"):
            os.mkfifo(self.folder / fifo)
        self._ready = os.open(self.folder / "ready", os.O_RDWR | os.O_NONBLOCK)
        self._go = -1
        self._copies = copies
        self._mark = uuid.uuid4().hex
        self.shown = self.folder / "shown"
        program = self.folder / "program"
        program.write_text(script)
        argv = [*interpreter, str(program), str(self.folder), *arguments]
        command = LAUNCHERS[name].command(Job(argv, copies, self.folder, teed=teed))
        with self.shown.open("wb") as out:
            self.began = time.monotonic()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder,
                env=os.environ | {MARK: self._mark}, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for pid in self.left() | {self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while found := self.left():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for fifo in (self._ready, self._go):
            if fifo >= 0:
                os.close(fifo)
        self._folder.cleanup()

    def wait_ready(self) -> float:
        """Wait until all copies are up. Returns the milliseconds it took.

        Raises RuntimeError: they never are, or `left` would not see one of them.
        """
        heard, rest = list[bytes](), b""
        while len(heard) < self._copies:
            if select.select([self._ready], [], [], 0.2)[0]:
                *more, rest = (rest + os.read(self._ready, 1 << 16)).split(b"\n")
                heard += more
            elif self.process.poll() is not None and not select.select([self._ready], [], [], 0)[0]:
                raise RuntimeError(f"{len(heard)} of {self._copies} copies were up: {self.last_line()}")
        up = time.monotonic()
        while unseen := set(map(int, heard)) - self.left():  # one that is in execve(2) has no environment for a moment
            if time.monotonic() - up > PATIENCE:
                raise RuntimeError(f"{len(unseen)} of {self._copies} copies do not carry the job's mark")
        return (up - self.began) * 1e3

    def last_line(self) -> str:
        """Return the last line that the launcher has shown."""
        return (self.shown.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]

    def let_go(self) -> None:
        """Open the way to all that wait at ``go``, or will come there."""
        self._go = os.open(self.folder / "go", os.O_RDWR)  # a copy that only opens it may have gone before the write
        os.write(self._go, b"\n")

    def left(self) -> set[int]:
        """Return what lives of the job: the launcher, what it started for itself, the copies and what is below them."""
        mark = f"{MARK}={self._mark}".encode()
        found = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                        found.add(int(entry))
        return found

    def beside(self) -> set[int]:
        """Return what lives of the job that is no copy: what the launcher costs. For copies that sleep."""
        return {pid for pid in self.left() if not procfs.command(pid).startswith("sleep ")}

    def wait(self, limit: float) -> int:
        """Wait until the launcher has ended, and return its exit code. Raises RuntimeError: it has not."""
        handle = os.pidfd_open(self.process.pid)
        try:
            if not select.select([handle], [], [], limit)[0]:  # `Popen.wait` with a limit looks every 50 ms
                raise RuntimeError(f"the launcher has not ended within {limit:g} s: {self.last_line()}")
        finally:
            os.close(handle)
        return self.process.wait()

    def end(self, limit: float) -> tuple[float, int]:
        """Wait until nothing is left, at most so many seconds. Returns the milliseconds it took, and what is left."""
        began = time.monotonic()
        handles = set()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                handles.add(os.pidfd_open(pid))
        while handles and time.monotonic() - began < limit:
            poll = select.poll()
            for handle in handles:
                poll.register(handle, select.POLLIN)
            for handle, _event in poll.poll(max(0, began + limit - time.monotonic()) * 1e3):
                if handle in handles:
                    handles.remove(handle)
                    os.close(handle)
            self.process.poll()
        took = (time.monotonic() - began) * 1e3
        for handle in handles:
            os.close(handle)
        return took, len(self.left())
