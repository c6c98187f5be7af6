"""Reads the stacks of a process from outside with py-spy: the process runs no code of ours for it.

py-spy pauses the process (ptrace(2), PTRACE_SEIZE and PTRACE_INTERRUPT: the kernel resumes it should py-spy be
killed), reads its memory for some milliseconds, and resumes it. Owns where py-spy is found, one py-spy at work, the
parsing of what it writes; and the order in which many processes are read, a few at a time, and again those whose memory
changed while they were read. What is done about a process that cannot be read is the caller's business.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from functools import partial

from phalanx._base import clock, procfs
from phalanx._base.process import Process, reap_later
from phalanx._stacks.dump import GONE
from phalanx._stacks.request import MOST_THREADS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections import deque
    from collections.abc import Callable
    from typing import Any

    from phalanx._base.loop import Loop
    from phalanx._stacks.request import StackRequest
else:
    from _collections import deque

_LIMIT = 16 << 20  # bytes of its text
_AT_ONCE = 16  # py-spies that run at a time: each takes some 10 ms of a CPU
_TRIES = 12  # times that a process is read whose memory changes so fast that py-spy cannot make sense of it,
_TRIES_AT_ONCE = 4  # the first of them follow each other at once, and the wait before each later one doubles;
_TRIES_OF_STRANGERS = 2  # and times that a process is read which has not offered its stacks: it may be no Python
_PAUSE = 0.002  # seconds of the first such wait


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

    With ``native``, it writes frames of C code as text for people; else what `parse_json` takes. Without ``pause``, the
    process is not paused while it is read: one of which a thread waits for a disk cannot be. ``doomed``: the process is
    killed once it has been read.

    Attributes:
        process: The py-spy, held; None: it could not be started, or is closed.
        done: Whether it has ended, or could not be started.
        why: Why there is no text, once it has ended; "" if there is.
    """

    def __init__(self, pid: int, *, native: bool = False, pause: bool = True, doomed: bool = False) -> None:
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
            if doomed or not native:  # frames of C code take long, and of processes that go on, they have the time
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


class PySpyQueue:
    """The processes that are to be read, and the py-spies at work.

    Args:
        loop: What waits for their ends.
        no_more: The moment (seconds, monotonic) from which on no py-spy is started, but for native frames.
        read: Called with each request that has been read.
        unreadable: Called with each request that cannot be read. Its `unread` is why.
    """

    def __init__(
        self,
        loop: Loop,
        no_more: float,
        read: Callable[[StackRequest], None],
        unreadable: Callable[[StackRequest], None],
    ) -> None:
        self.running: dict[PySpy, StackRequest] = {}
        """The py-spies at work."""
        self._loop = loop
        self._no_more = no_more
        self._read = read
        self._unreadable = unreadable
        self._waiting: deque[tuple[StackRequest, int]] = deque()  # with how often each has been tried
        self._paused: set[StackRequest] = set()  # to be read again, after a while
        self._native: deque[StackRequest] = deque()  # of which frames of C code are wanted: after all that
        self._start_planned = False

    def __bool__(self) -> bool:
        """Whether a process is being read, or is still to be."""
        return bool(self._waiting or self._paused or self.running or self._native)

    def add(self, request: StackRequest) -> None:
        """Have a process read, after those before it. It is started by `start_more`."""
        self._waiting.append((request, 0))

    def add_native(self, request: StackRequest) -> None:
        """Have frames of C code read, after all other reads."""
        self._native.append(request)
        self.start_more()

    def start_more(self) -> None:
        """Start one py-spy, if there is one to start, and the next one in the loop's next turn.

        Each start takes a while on a machine that is busy, and what is due meanwhile has its turn.
        """
        if not self._start_planned and (self._waiting or self._native):
            self._start_planned = True
            self._loop.after(0, self._start)

    def kill_pausing(self) -> None:
        """Kill those that wait for a thread in uninterruptible sleep to pause. A read that does not pause follows."""
        for spy, request in self.running.items():
            if spy.pauses and any(state == "D" for state, _ in procfs.threads(request.target.pid, MOST_THREADS)):
                spy.kill()

    def give_up(self) -> None:
        """Kill those at work, and start no others but for native frames, which have all of the time."""
        late, self._waiting = self._waiting, deque()
        self._paused.clear()
        for spy in self.running:
            if not spy.native:
                spy.kill()
        for request, _tried in late:
            self._unreadable(request)
        self.start_more()

    def close(self, seconds: float) -> None:
        """Kill and close all. Those that have not ended after ``seconds`` are reaped on a thread."""
        held = [(spy, spy.process) for spy in self.running if spy.process is not None]
        for spy, _process in held:
            spy.kill()
        until = clock.now() + seconds
        for spy, process in held:
            spy.close(at_once=process.wait(max(0.0, until - clock.now())))
        self.running.clear()
        self._waiting.clear()
        self._paused.clear()
        self._native.clear()

    def _start(self) -> None:
        self._start_planned = False
        if len(self.running) < _AT_ONCE and (self._start_reading() or self._start_native()):
            self.start_more()

    def _start_reading(self) -> bool:
        """Take one from the queue. Returns whether there was one that could be taken."""
        if not self._waiting or clock.now() >= self._no_more:
            return False
        request, tried = self._waiting.popleft()
        if request.why == GONE or (request.is_seen and not request.alone):
            return True
        # Every second time without a pause: a process that waits for a disk, or is traced already, cannot be paused.
        # One that is stopped needs no pause.
        state = request.state()
        spy = PySpy(request.target.pid, pause=tried % 2 == 0 and not state)
        if spy.done and self.running:  # no descriptor is left, perhaps: then once another has ended
            self._waiting.appendleft((request, tried))
            return False
        if spy.done:
            request.unread = spy.why
            self._unreadable(request)
        else:
            self._watch(spy, request, partial(self._on_read, request, tried, state))
        return True

    def _start_native(self) -> bool:
        if not self._native or self._waiting:
            return False
        request = self._native.popleft()
        spy = PySpy(request.target.pid, native=True, doomed=request.target.doomed)
        if not spy.done:
            self._watch(spy, request, partial(_keep_native_frames, request))
        return True

    def _watch(self, spy: PySpy, request: StackRequest, then: Callable[[PySpy], None]) -> None:
        process = spy.process
        assert process is not None

        def ended(_events: int) -> None:
            self._loop.forget(process.pidfd)
            del self.running[spy]
            spy.end()
            then(spy)
            spy.close()
            self.start_more()

        self.running[spy] = request
        self._loop.watch(process.pidfd, ended)

    def _on_read(self, request: StackRequest, tried: int, state: str, spy: PySpy) -> None:
        text = parse_json(spy.text())
        if text:
            request.text = f"# {state}\n{text}" if state else text  # in place of any dump
            request.alone = request.waits = False
            self._read(request)
            return
        request.unread = spy.why or "py-spy has found no stack"
        most = _TRIES if request.signals[0] else _TRIES_OF_STRANGERS
        again = tried + 1 < most and not request.unread.endswith("(ptrace)")
        if again and clock.now() < self._no_more:
            self._read_again(request, tried + 1)
        else:
            self._unreadable(request)

    def _read_again(self, request: StackRequest, tried: int) -> None:
        def add() -> None:
            if request in self._paused:  # else the time for it is over
                self._paused.discard(request)
                self._waiting.append((request, tried))
                self.start_more()

        self._paused.add(request)
        if tried < _TRIES_AT_ONCE:
            add()
        else:
            self._loop.after(_PAUSE * 2 ** (tried - _TRIES_AT_ONCE), add)


def _keep_native_frames(request: StackRequest, spy: PySpy) -> None:
    request.native_frames = spy.text()
