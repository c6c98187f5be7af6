"""Stacks read from outside, by py-spy: the process that is looked at runs nothing for it.

py-spy pauses the process (ptrace(2), PTRACE_SEIZE and PTRACE_INTERRUPT: the kernel lets it go on should py-spy be
killed), reads its memory for some milliseconds, and lets it go on. Owns where py-spy is, one py-spy at work, and the
reading of what it writes. Knows not why anyone is asked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

from phalanx._base import clock, pidfds

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable
    from typing import Any

NO_PYTHON = "py-spy: Failed to find python version"
"""How `Spy.why` begins of a process that is no Python."""

_LIMIT = 16 << 20  # bytes of its text


@functools.cache
def find() -> str:
    """Where py-spy is: beside this interpreter, or where the package says; ``""`` if it is not installed.

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


def get_ready() -> None:
    """Import what a look takes, and find py-spy: once processes are held, no descriptor may be left for that."""
    import json
    import subprocess

    find()
    del json, subprocess


class Spy:
    """py-spy at work on one process.

    Args:
        pid: The process.
        native: Whether frames of C code are wanted. They are text for people; else it is what `read` takes.
        pause: Whether the process is paused while it is read. One of which a thread waits for a disk cannot be.

    Attributes:
        native, pauses: As above.
        pidfd: Readable once it has ended; -1: it could not be started.
        why: Why there is nothing to be had, once it has ended.
    """

    def __init__(self, pid: int, *, native: bool = False, pause: bool = True) -> None:
        self.pidfd = self._out = self._err = -1
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
            self.pidfd = os.pidfd_open(self._popen.pid)
            if not native:  # that takes long, and nobody needs to be quick
                _hurry(self._popen.pid)
        except OSError as error:
            self.why = f"py-spy could not be started: {error.strerror}"
            self.close()

    def end(self) -> None:
        """It has exited."""
        assert self._popen is not None
        self._popen.wait()
        self.done = True
        if self._popen.returncode and not self.why:
            said = os.pread(self._err, 4096, 0).decode("utf-8", "replace").strip().partition("\n")[0]
            denied = "ermission" in said
            self.why = "py-spy may not read it (ptrace)" if denied else f"py-spy: {said.removeprefix('Error: ')}"

    def kill(self) -> None:
        """End it, wherever it is: the kernel lets go of whom it traces. It is still to be reaped."""
        if self._popen is not None and self._popen.returncode is None:
            self.why = self.why or "py-spy has not ended in time"
            self._popen.kill()

    def text(self) -> str:
        """What it has written, if it has ended well."""
        if self._popen is None or self._out < 0 or not self.done or self._popen.returncode:
            return ""
        return os.pread(self._out, _LIMIT, 0).decode("utf-8", "replace")

    def close(self, *, at_once: bool = True) -> None:
        """Kill it, reap it, and give the descriptors back. Idempotent.

        Args:
            at_once: Whether it is reaped here and now, which waits for its end. Else a thread does.
        """
        self.kill()
        if self._popen is not None and self._popen.returncode is None:
            if at_once:
                self._popen.wait()
            else:
                pidfds.reap_later(self._popen.wait)
        for fd in (self.pidfd, self._out, self._err):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self._out = self._err = -1
        self.done = True


def _hurry(pid: int) -> None:
    """Have a process run before all others (SCHED_RR), where we may: whom it has paused waits for as long as it does.

    On half of the processors: with a process of a thousand threads it takes seconds, and who is to end it has to run.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
            os.sched_setaffinity(pid, cpus[-(len(cpus) // 2) :])


def end(spies: Iterable[Spy], seconds: float) -> None:
    """Close them all. Those of which the end takes more than ``seconds`` altogether are reaped aside."""
    spies = [spy for spy in spies if spy.pidfd >= 0]
    for spy in spies:
        spy.kill()
    until = clock.now() + seconds
    for spy in spies:
        spy.close(at_once=pidfds.wait([spy.pidfd], max(0.0, until - clock.now())))


def read(text: str) -> str:
    """What ``py-spy dump --json`` has written, in the words of `faulthandler`: the main thread last. ``""``: it is not.

    >>> print(read('[{"pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "owns_gil": true,'
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
        place = f'"{_plain(frame["filename"])}", line {frame["line"] or "???"}'
        # The bare name, as faulthandler has it: ranks that were asked in different ways are compared.
        lines.append(f"  File {place} in {_plain(frame['name']).rpartition('.')[2]}\n")
    return "".join(lines if len(lines) > 1 else [*lines, "  <no Python frame>\n"])


def _plain(text: str) -> str:
    """Text that stays on its line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
