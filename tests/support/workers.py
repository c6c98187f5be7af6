"""Functions that tests run as workers, and what tests need to run scripts.

They stand here, apart from the tests, because a worker that is a fresh interpreter imports the module of its
function: this one costs it nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FAILED = {"spawn": {1, 120}, "forkserver": {1}, "fork": {1}}
"""What a worker that raises, and cannot write what it has printed, exits with, as a child of multiprocessing does: an
interpreter that ends makes 120 of 1 then (`sys.exit`), unless PYTHONUNBUFFERED has it write at once."""


def run_script(folder: Path, text: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python script, warnings being errors, that can import the package and the tests; capture its output."""
    command, environment = script_command(folder, text, *arguments, prefix=options.pop("prefix", ()))
    env = environment | options.pop("env", {})
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "stdin": subprocess.DEVNULL,
        "timeout": 60,
    } | options
    return subprocess.run(command, env=env, text=True, errors="replace", check=False, **options)


@contextlib.contextmanager
def started_script(folder: Path, text: str, *arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start such a script, whose temporary files are in the folder. It is killed at the end of the block."""
    command, environment = script_command(folder, text, *arguments, prefix=options.pop("prefix", ()))
    env = environment | {"TMPDIR": str(folder)} | options.pop("env", {})
    with subprocess.Popen(command, env=env, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def script_command(
    folder: Path, text: str, *arguments: object, prefix: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """Write a script. Returns the command that runs it, and the environment in which it finds package and tests."""
    import phalanx

    assert phalanx.__file__
    source = os.path.dirname(os.path.dirname(phalanx.__file__))
    path = folder / "script.py"
    path.write_text(text)
    command = [*prefix, sys.executable, "-W", "error", str(path), *map(str, arguments)]
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join((source, ROOT))}


def add(a: int, b: int) -> int:
    return a + b


def echo(*values: object) -> tuple[object, ...]:
    return values


def nothing() -> None:
    pass


def megabytes(count: int) -> bytes:
    return b"x" * (count << 20)


def get_env(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def environment() -> dict[str, str]:
    return dict(os.environ)


def fail(text: str) -> None:
    raise ValueError(text)


def leave(code: Any) -> None:
    sys.exit(code)


def leave_at_once(code: int) -> None:
    os._exit(code)


def return_nested_lock() -> Any:
    return {"model": {"lock": threading.Lock()}}


class NeverLoads:
    """Pickles well, and fails to unpickle."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("not a number",)


def return_never_loads() -> NeverLoads:
    return NeverLoads()


class ExitsWhenLoaded:
    """Exits where it is unpickled: in the launcher, whose pid it has."""

    def __init__(self, launcher: int) -> None:
        self.launcher = launcher

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return _exit_in, (self.launcher,)


def _exit_in(launcher: int) -> None:
    if os.getpid() == launcher:
        sys.exit(5)


def return_exits_when_loaded(launcher: int) -> ExitsWhenLoaded:
    return ExitsWhenLoaded(launcher)


class Restored:
    """Notes whenever one of it is unpickled."""

    restored: ClassVar[list[int]] = []

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.restored.append(self.rank)
        self.on_restore()

    def on_restore(self) -> None:
        """For the test to put something in its place."""


class Callable:
    def __init__(self, base: int) -> None:
        self.base = base

    def __call__(self, more: int) -> int:
        return self.base + more

    def method(self, more: int) -> int:
        return self.base * more


def announce(address: str, gate: str) -> int:
    """Say that we are here, wait for the gate, return our pid."""
    from tests.support.helpers import pass_gate, tell

    tell(address, str(os.getpid()))
    pass_gate(gate)
    return os.getpid()


def fail_after(address: str, gate: str) -> None:
    announce(address, gate)
    raise ValueError("after the gate")


def open_descriptors() -> dict[int, str]:
    """The descriptors of this process and what they are, but for the file that libffi 3.5 opens, and keeps."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return {number: what for number, what in found.items() if "/libffi.so." not in what}


def facts() -> dict[str, Any]:
    """What a worker finds around itself."""
    umask = os.umask(0)
    os.umask(umask)
    with open("/proc/self/status", encoding="ascii") as stream:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in stream)
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "cwd": os.getcwd(),
        "umask": umask,
        "fds": open_descriptors(),
        "ignored": signals_of(status["SigIgn"]),
        "blocked": signals_of(status["SigBlk"]),
        "caught": signals_of(status["SigCgt"]),
        "stdin": sys.stdin.read(),
        "int_handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "threads": threading.active_count(),
        "argv": list(sys.argv),
    }


def signals_of(mask: str) -> set[int]:
    """The signals in a mask of /proc/PID/status, but for the two that the C library keeps for itself (signal(7))."""
    bits = int(mask, 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1} - {32, 33}


def links_of(listing: str) -> dict[str, str]:
    """Descriptors and what they are, from the output of ``ls -l /proc/PID/fd``."""
    pairs = [line.partition(" -> ") for line in listing.splitlines() if " -> " in line]
    return {name.split()[-1]: target for name, _arrow, target in pairs}


def fds_of_a_child() -> str:
    """What a program sees that a worker starts by the shell, with nothing closed on purpose."""
    done = subprocess.run(["ls", "-l", "/proc/self/fd"], stdout=subprocess.PIPE, text=True, check=True, close_fds=False)
    return done.stdout


def use_queue(queue: Any, rank: int) -> None:
    queue.put((rank, os.getpid()))


def use_all(lock: Any, event: Any, semaphore: Any, value: Any, array: Any) -> int:
    """Meet at every kind of object that `multiprocessing` shares."""
    semaphore.release()
    assert event.wait(20)
    for _ in range(100):
        with lock:
            value.value += 1
    array[0] = 2.5
    return int(value.value > 0)


def use_connection(connection: Any) -> str:
    text = str(connection.recv())
    connection.send(text.upper())
    connection.close()
    return text


def use_segment(segment: Any) -> bytes:
    data = bytes(segment.buf[:4])
    segment.buf[0] = ord("w")
    segment.close()
    return data


def use_segment_by_name(name: str) -> bytes:
    from multiprocessing.shared_memory import SharedMemory

    return use_segment(SharedMemory(name))


def use_proxies(shared: Any, rank: int) -> None:
    shared[rank] = rank * rank


def prints(*texts: str) -> None:
    for text in texts:
        sys.stdout.write(text + "\n")
        sys.stderr.write(text + "\n")


class BadTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class TwoArgumentsError(Exception):
    """Pickles well, and cannot be unpickled: the classic."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def raise_bad_text() -> None:
    raise BadTextError


def raise_two_arguments() -> None:
    raise TwoArgumentsError(3, "the text of it")


def write_error_file(data: bytes) -> None:
    """Leave an error file of one's own, as any worker may, and fail."""
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "wb") as stream:
        stream.write(data)
    os._exit(9)


def write_huge_error_file() -> None:
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "wb") as stream:
        stream.truncate(200 << 20)
    os._exit(9)


def close_everything(address: str, gate: str) -> None:
    """Close all descriptors, go on, and fail."""
    os.closerange(0, 4096)
    announce(address, gate)
    raise ValueError("without a descriptor")


def print_after(address: str, gate: str, text: str) -> None:
    announce(address, gate)
    os.write(1, text.encode())


def fill(address: str, gate: str) -> None:
    """Write until the disk is full, then fail as a program would."""
    from tests.support.helpers import pass_gate, tell

    tell(address, str(os.getpid()))
    pass_gate(gate)
    while True:
        os.write(1, b"x" * 65536)


def start_a_process(_index: int) -> None:
    import multiprocessing

    multiprocessing.get_context("fork").Process(target=nothing).start()


def make_connections() -> tuple[Any, Any]:
    """A connection and a socket, from which there is something to be read."""
    import multiprocessing
    import socket

    reader, writer = multiprocessing.Pipe(duplex=False)
    writer.send(("a connection", True))
    ours, theirs = socket.socketpair()
    theirs.sendall(b"a socket")
    return reader, ours


def make_pipes(count: int) -> list[Any]:
    import multiprocessing

    return [multiprocessing.Pipe() for _ in range(count)]


def make_a_queue() -> Any:
    import multiprocessing

    return multiprocessing.get_context("spawn").SimpleQueue()


def use_a_fork_server() -> None:
    import multiprocessing
    import tempfile

    tempfile.tempdir = None  # a fork has the test's, which may be too long for the path of a socket
    process = multiprocessing.get_context("forkserver").Process(target=nothing)
    process.start()
    process.join()


def look_around() -> list[Any]:
    """The CPUs that this process may run on, its nice value, and two of its limits."""
    limits = [resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)]
    return [sorted(os.sched_getaffinity(0)), os.nice(0), limits]


def limits(*names: str) -> tuple[tuple[int, int], ...]:
    return tuple(resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names)


def lead(address: str) -> None:
    """Start a child and a daemon, say all pids, and wait for ever."""
    from tests.support.helpers import tell

    for apart in (False, True):
        if os.fork() == 0:
            if apart:
                os.setsid()
            tell(address, str(os.getpid()))
            signal.pause()
    tell(address, str(os.getpid()))
    signal.pause()


def hold_the_gil(address: str, seconds: float) -> None:
    """What a C call does that does not let go of it; a signal that has a handler ends this one (nanosleep(2))."""
    import ctypes

    from tests.support.helpers import tell

    signal.signal(signal.SIGUSR1, lambda *_: None)
    tell(address, "busy")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def one_fails(address: str, gate: str, rank: int) -> None:
    """Rank 0 fails when the gate opens, rank 1 lives for ever, rank 2 ignores SIGTERM as well."""
    from tests.support.helpers import pass_gate, tell

    if rank == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(address, str(os.getpid()))
    if rank == 0:
        pass_gate(gate)
        os._exit(3)
    while True:
        signal.pause()


def one_hangs(address: str, gate: str, rank: int) -> None:
    """Rank 0 enters a block when the gate opens, and does not leave it."""
    from phalanx.timer import expires
    from tests.support.helpers import pass_gate, tell

    tell(address, str(os.getpid()))
    if rank == 0:
        with expires(after=60, scope="ready"):  # the table is open
            tell(address, str(os.getpid()))
        pass_gate(gate)
        with expires(after=0.3, scope="load"):
            signal.pause()
    while True:
        signal.pause()
