"""The check that runs after every test: is this process, and the machine, as it was before?

Whoever calls Phalanx is its host. When a group is closed nothing of it may be left: no child, no orphan, no descriptor,
no thread, no handler, no flag, no file. It knows nothing of Phalanx beyond that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.support.helpers import alive
from tests.support.workers import open_descriptors

PATIENCE = 20.0
"""Seconds that what is on its way out may take. Spent only by a test that leaks."""

MARK = "LEAK_CHECK_MARK"
"""Environment variable by which processes that descend from this one are found, whoever their parent is by now."""

_GET_CHILD_SUBREAPER = 37  # prctl(2)


def _children() -> set[int]:
    """Pids of the children, zombies included, the standard library's resource tracker excepted.

    The tracker (one per process, started by the first `multiprocessing` lock, queue or shared memory) is made to live
    as long as its process: stopping it after a test would break the objects of every later one.
    """
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children", "rb") as stream:
            found.update(map(int, stream.read().split()))
    return found - {getattr(resource_tracker._resource_tracker, "_pid", None) or 0}


kept: set[str] = set()
"""Descriptors that a library keeps of what was closed, as /proc names them. Who adds some says why, and bounds them."""


def _descriptors() -> dict[int, str]:
    """Open descriptors and what they are, the resource tracker's pipe excepted."""
    found = open_descriptors()
    found.pop(getattr(resource_tracker._resource_tracker, "_fd", None) or -1, None)
    return {number: what for number, what in found.items() if what not in kept}


_older: set[tuple[str, int]] = set()
"""The processes that were there before the first test, and are none of ours: their pids, and the inodes of their
folders in /proc, which no later process with the same pid has."""


def _processes() -> Iterator[tuple[str, int]]:
    """All processes, this one and its resource tracker excepted, as pid and inode."""
    spared = {str(os.getpid()), str(getattr(resource_tracker._resource_tracker, "_pid", None))}
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and entry.name not in spared:
                yield entry.name, entry.inode()


def _marked(mark: str) -> set[int]:
    """Pids of live processes that carry our mark in the environment that they were started with."""
    needle = f"{MARK}={mark}".encode()
    found = set()
    for process in _processes():
        if process in _older:
            continue
        # Other users' processes cannot be read, and are none of ours.
        with contextlib.suppress(OSError), open(f"/proc/{process[0]}/environ", "rb", 0) as stream:
            if needle in stream.read().split(b"\0"):
                found.add(int(process[0]))
    return found


def _handlers() -> dict[str, object]:
    # SIGALRM is pytest-timeout's, which takes its handler back as soon as a test fails.
    return {signum.name: signal.getsignal(signum) for signum in set(signal.Signals) - {signal.SIGALRM}}


def _wakeup_fd() -> int:
    if threading.current_thread() is not threading.main_thread():
        return -1
    fd = signal.set_wakeup_fd(-1)  # the only way to ask
    signal.set_wakeup_fd(fd)
    return fd


def _subreaper() -> int:
    flag = ctypes.c_int(-1)
    ctypes.CDLL(None, use_errno=True).prctl(_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
    return flag.value


def _umask() -> str:
    with open("/proc/self/status", encoding="ascii") as stream:
        return next(line for line in stream if line.startswith("Umask:")).strip()


def _environment() -> dict[str, str]:
    # pytest itself keeps the name of the phase in this one.
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _temporary_files() -> set[str]:
    # multiprocessing makes one pymp- folder per process and removes it at exit.
    return {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("pymp-")}


def _walk(name: str) -> Iterator[str]:
    """A temporary file or folder, and what is in it: at most ten names, with their sizes."""
    root = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):  # it may be on its way out
        for path in itertools.islice(itertools.chain([root / name], (root / name).rglob("*")), 10):
            yield f"{path.relative_to(root)} ({path.lstat().st_size} bytes)"


def _difference(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield f"{name} is new: {after[name]}"
        elif name not in after:
            yield f"{name} is gone: {before[name]}"
        elif before[name] != after[name]:
            yield f"{name} was {before[name]}, is {after[name]}"


@dataclass(frozen=True)
class Snapshot:
    """What of this process must be the same before and after a test."""

    children: set[int]
    marked: set[int]
    descriptors: dict[int, str]
    threads: set[threading.Thread]
    handlers: dict[str, object]
    facts: dict[str, object]
    environment: dict[str, str]
    temporary_files: set[str]

    @classmethod
    def take(cls, mark: str) -> Snapshot:
        return cls(
            children=_children(),
            marked=_marked(mark),
            descriptors=_descriptors(),
            threads=set(threading.enumerate()),
            handlers=_handlers(),
            facts={
                "wakeup fd": _wakeup_fd(),
                "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
                "child subreaper": _subreaper(),
                "working directory": os.getcwd(),
                "umask": _umask(),
            },
            environment=_environment(),
            temporary_files=_temporary_files(),
        )

    def changes(self, after: Snapshot) -> list[str]:
        """What differs, one line each; none if all is well."""
        # A test may close what an earlier fixture opened, so only what is new counts, except for settings.
        return [
            *(f"child {pid} is left: {_describe(pid)}" for pid in sorted(after.children - self.children)),
            *(
                f"survivor {pid} is left: {_describe(pid)}"
                for pid in sorted(after.marked - self.marked - after.children)
            ),
            *(
                f"descriptor {fd} is left open: {target}"
                for fd, target in sorted(after.descriptors.items())
                if self.descriptors.get(fd) != target
            ),
            *(f"thread {thread.name!r} is left running" for thread in after.threads - self.threads),
            *(f"signal handler: {line}" for line in _difference(self.handlers, after.handlers)),
            *_difference(self.facts, after.facts),
            *(f"os.environ: {line}" for line in _difference(self.environment, after.environment)),
            *(
                f"temporary file is left: {', '.join(_walk(name)) or name}"
                for name in sorted(after.temporary_files - self.temporary_files)
            ),
        ]


def _describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            words = stream.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone by now)"
    return words[:200] if alive(pid) else "(a zombie)"


def _settle(before: Snapshot, mark: str, deadline: float) -> None:
    """Give what is on its way out until the deadline: join threads, wait for processes to exit."""
    while (threads := set(threading.enumerate()) - before.threads) and time.monotonic() < deadline:
        for thread in threads:  # which may start others
            thread._started.wait(max(0.0, deadline - time.monotonic()))  # type: ignore[attr-defined]  # it may be starting
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        waiting = 0
        for pid in (_children() - before.children) | (_marked(mark) - before.marked):
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                stack.callback(os.close, fd)
                poll.register(fd, select.POLLIN)
                waiting += 1
        while waiting and (ready := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
            for fd, _ in ready:
                poll.unregister(fd)
            waiting -= len(ready)


def _remove(pids: set[int], mark: str) -> None:
    """Kill what a failed test left, so that the next one starts clean."""
    with contextlib.ExitStack() as stack:
        held: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
                stack.callback(os.close, held[pid])
        # Looked at again with the pidfds in hand: a pid that another process has got since is not ours to signal.
        for pid in held.keys() & (_children() | _marked(mark)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held[pid], signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@contextlib.contextmanager
def unchanged(mark: str, fail: Callable[[str], None]) -> Iterator[None]:
    """Call `fail` with what the body of the `with` statement has left behind, if anything."""
    before = Snapshot.take(mark)
    yield
    after = Snapshot.take(mark)
    if before.changes(after):
        _settle(before, mark, time.monotonic() + PATIENCE)
        gc.collect()  # what the test's own cycles hold is not a leak of the product's
        after = Snapshot.take(mark)
        if changes := before.changes(after):
            _remove((after.children - before.children) | (after.marked - before.marked), mark)
            fail("the test left something behind:\n  " + "\n  ".join(changes))


@pytest.fixture(scope="session", autouse=True)
def leak_mark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mark everything that is started from here, and use a temporary folder that no other run shares."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    children = _children()
    _older.update(process for process in _processes() if int(process[0]) not in children)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t", numbered=False)))
        patch.setattr(tempfile, "tempdir", None)
        yield mark


@pytest.fixture(autouse=True)
def no_leaks(leak_mark: str) -> Iterator[None]:
    """After the test, and after the end of every other fixture of it, nothing is left behind."""
    # pytest.fail raises; a plain assertion would show this file's source instead of the lines that matter.
    with unchanged(leak_mark, lambda text: pytest.fail(text, pytrace=False)):
        yield
