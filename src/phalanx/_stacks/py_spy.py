"""Reads the stacks of a process from outside with py-spy: the process runs no code of ours for it.

py-spy pauses the process (ptrace(2), PTRACE_SEIZE and PTRACE_INTERRUPT: the kernel resumes it should py-spy be
killed), reads its memory for some milliseconds, and resumes it. Owns where py-spy is found, one py-spy at work, and the
parsing of what it writes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

from phalanx._base import clock
from phalanx._base.process import Process, reap_later

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable
    from typing import Any

NO_PYTHON = "py-spy: Failed to find python version"
"""How `PySpy.why` begins when the process is no Python."""

_LIMIT = 16 << 20  # bytes of its text


@functools.cache
def find() -> str:
    """Find py-spy: beside this interpreter, or where its package has put it; "" if it is not installed.

    PATH is not searched: a folder of it may be on a mount that does not answer.
    """
    beside = os.path.join(os.path.dirname(sys.executable or ""), "py-spy")
    if os.access(beside, os.X_OK):
        return beside
    from importlib import metadata

    try:
        files = metadata.files("py-spy") or []
    except metadata.PackageNotFoundError:
        return ""
    return next((str(file.locate()) for file in files if file.name == "py-spy"), "")


def preload() -> None:
    """Import what a read takes, and find py-spy: once processes are held, no descriptor may be left for that."""
    import json
    import subprocess

    find()
    del json, subprocess


class PySpy:
    """py-spy at work on one process.

    Args:
        pid: The process.
        native: Whether frames of C code are wanted. They are text for people; else it is what `parse_json` takes.
        pause: Whether the process is paused while it is read. One of which a thread waits for a disk cannot be.

    Attributes:
        native, pauses: As above.
        process: The py-spy, held; None: it could not be started, or is closed.
        done: Whether it has ended, or could not be started.
        why: Why there is no text, once it has ended; "" if there is.
    """

    def __init__(self, pid: int, *, native: bool = False, pause: bool = True) -> None:
        self.process: Process | None = None
        self._out = self._err = -1
        self.native, self.pauses = native, native or pause
        self.done = False
        self.why = ""
        self._popen: subprocess.Popen[bytes] | None = None
        path = find()
        if not path:
            self.why = "py-spy is not installed"
            self.close()
            return
        import subprocess

        options = ["--native"] if native else ["--json", *([] if pause else ["--nonblocking"])]
        try:
            self._out, self._err = os.memfd_create("py-spy"), os.memfd_create("py-spy-errors")
            self._popen = subprocess.Popen(
                [path, "dump", "--full-filenames", *options, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
            )
            self.process = Process(self._popen.pid)
            if not native:  # those take long, and have the time
                _prioritise(self._popen.pid)
        except OSError as error:
            self.why = f"py-spy could not be started: {error.strerror}"
            self.close()

    def end(self) -> None:
        """Reap it, after it has exited, and read why it has failed, if it has."""
        assert self._popen is not None
        self._popen.wait()
        self.done = True
        if self._popen.returncode and not self.why:
            error = os.pread(self._err, 4096, 0).decode("utf-8", "replace").strip().partition("\n")[0]
            denied = "ermission" in error
            self.why = "py-spy may not read it (ptrace)" if denied else f"py-spy: {error.removeprefix('Error: ')}"

    def kill(self) -> None:
        """SIGKILL it: the kernel resumes the process that it traces. It is still to be reaped."""
        if self._popen is not None and self._popen.returncode is None:
            self.why = self.why or "py-spy has not ended in time"
            self._popen.kill()

    def text(self) -> str:
        """What it has written; "" unless it has ended with exit code 0."""
        if self._popen is None or self._out < 0 or not self.done or self._popen.returncode:
            return ""
        return os.pread(self._out, _LIMIT, 0).decode("utf-8", "replace")

    def close(self, *, at_once: bool = True) -> None:
        """Kill it, reap it, and close the descriptors. Idempotent.

        Args:
            at_once: Whether it is reaped in this call, which waits for its end. Else on a thread.
        """
        self.kill()
        if self._popen is not None and self._popen.returncode is None:
            if at_once:
                self._popen.wait()
            else:
                reap_later(self._popen.wait)
        if self.process is not None:
            self.process.close()
        for fd in (self._out, self._err):
            if fd >= 0:
                os.close(fd)
        self.process, self._out, self._err = None, -1, -1
        self.done = True


def _prioritise(pid: int) -> None:
    """Let py-spy run before all other processes (SCHED_RR), where we may: the process that it has paused waits for it.

    On half of the CPUs: with a process of a thousand threads it takes seconds, and we have to run to kill it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
            os.sched_setaffinity(pid, cpus[-(len(cpus) // 2) :])


def close_all(spies: Iterable[PySpy], seconds: float) -> None:
    """Kill and close all. Those that have not ended after ``seconds`` altogether are reaped on a thread."""
    held = [(spy, spy.process) for spy in spies if spy.process is not None]
    for spy, _process in held:
        spy.kill()
    until = clock.now() + seconds
    for spy, process in held:
        spy.close(at_once=process.wait(max(0.0, until - clock.now())))


def parse_json(text: str) -> str:
    """Turn the output of ``py-spy dump --json`` into a dump as `faulthandler` writes it; "" if it is none.

    The main thread comes last.


    >>> print(parse_json('[{"pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "owns_gil": true,'
    ...            ' "frames": [{"name": "Loader.next", "filename": "/t.py", "line": 4}]}]'), end="")
    Thread 0x0000000000000001 [MainThread, has the GIL] (most recent call first):
      File "/t.py", line 4 in next
    """
    import json

    try:
        threads = json.loads(text)
        threads.sort(key=lambda thread: thread["os_thread_id"] == thread["pid"])
        return "\n".join(map(_thread, threads))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""


def _thread(thread: dict[str, Any]) -> str:
    known = [_plain(thread.get("thread_name") or ""), "has the GIL" if thread["owns_gil"] else ""]
    beside = ", ".join(filter(None, known))
    lines = [f"Thread 0x{thread['thread_id']:016x}{f' [{beside}]' if beside else ''} (most recent call first):\n"]
    for frame in thread["frames"]:
        location = f'"{_plain(frame["filename"])}", line {frame["line"] or "???"}'
        # The bare name, as faulthandler has it: ranks that were asked in different ways are compared.
        lines.append(f"  File {location} in {_plain(frame['name']).rpartition('.')[2]}\n")
    return "".join(lines if len(lines) > 1 else [*lines, "  <no Python frame>\n"])


def _plain(text: str) -> str:
    """Replace what would not stay on its line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
