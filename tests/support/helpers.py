"""What tests use to see processes and to meet them, without ever sleeping.

It owns looking at processes from outside (`alive`, `wait_gone`, `descendants`) and meeting with them (`Ready`: a worker
tells the test; `Gate`: the test lets workers go on). It knows nothing of Phalanx, so it can judge it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, Self

PYTHON = shlex.quote(sys.executable)
"""This interpreter, as a word for a shell."""

TIMEOUT = 20.0
"""Seconds after which a wait in a test has failed: far beyond what a loaded machine needs."""


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # The name in parentheses may itself hold spaces and parentheses: the fields begin after the last one.
            fields = stream.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[1])


def alive(pid: int) -> bool:
    """Whether the process exists and has not exited: a zombie, which only waits to be reaped, is not alive."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """The children of a process, their children, and so on, zombies included.

    Who was orphaned belongs to another parent and is not among them: take their pids before that happens.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (stat := _stat(int(entry))) is not None:
            children.setdefault(stat[1], []).append(int(entry))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def wait_gone(pids: Iterable[int], timeout: float = TIMEOUT) -> set[int]:
    """Wait until none of the processes is alive; return those that still are after `timeout` seconds.

    A pidfd becomes readable when its process exits, whoever the parent is, so this wakes up at that moment.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        waiting: dict[int, int] = {}
        poll = select.poll()
        for pid in set(pids):
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                stack.callback(os.close, fd)
                waiting[fd] = pid
                poll.register(fd, select.POLLIN)
        while waiting:
            remaining = max(0.0, deadline - time.monotonic())
            ready = poll.poll(remaining * 1000)
            for fd, _ in ready:
                poll.unregister(fd)
                del waiting[fd]
            if not ready and remaining == 0.0:
                break
        return {pid for pid in waiting.values() if alive(pid)}


def tell(address: str, text: str) -> None:
    """Say something to the test that waits at `Ready.address`. For workers that are functions."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        fd = sock.detach()  # a signal may come as soon as that is said: a socket left open by it would be warned of
    os.write(fd, text.encode())
    os.close(fd)


def rest() -> NoReturn:
    """Live for ever, and handle each signal: `signal.pause` misses one that comes just before it."""
    while True:
        time.sleep(0.1)


@contextlib.contextmanager
def meanwhile(function: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Callable[[], object]]:
    """Call a function on a thread of its own. The block ends when it has returned, and raises what it has raised.

    What it has raised is returned by what the block is given, if that is called: then the block does not raise it. A
    block that fails itself does not wait for the thread, which may be held up by that.
    """
    future: Future[Any] = Future()
    is_asked = False

    def call() -> None:
        try:
            future.set_result(function(*arguments, **options))
        except BaseException as raised:  # noqa: BLE001 - it is raised by the block
            future.set_exception(raised)

    def error() -> BaseException | None:
        nonlocal is_asked
        is_asked = True
        return future.exception(TIMEOUT)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield error
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    if not is_asked:
        future.result()


def until(condition: Callable[[], object]) -> None:
    """Look again and again: for what no descriptor tells."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        select.select((), (), (), 0.001)


def let_a_request_pass() -> None:
    """Wait until a further signal is a further request, and not the one before (0.3 s) once more."""
    time.sleep(0.35)


class Ready:
    """Where workers tell the test that they have come so far.

    A datagram socket: each message arrives whole, from any number of processes, and no one has to connect, so that
    a worker needs one line in whatever language it is.
    """

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._sock.bind(self.address)
        except BaseException:
            self._sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.address)

    def python(self, expression: str = "__import__('os').getpid()") -> str:
        """A line of Python that says `str(expression)` here: for `python -c` and scripts. The pid, unless told."""
        return (  # a signal may come as soon as that is said: a socket that it has left open would be warned of
            f"s = __import__('socket'); s = s.socket(s.AF_UNIX, s.SOCK_DGRAM); s.connect({self.address!r}); "
            f"s = s.detach(), __import__('os'); s[1].write(s[0], str({expression}).encode()); s[1].close(s[0])"
        )

    def wait(self, count: int = 1, timeout: float = TIMEOUT) -> list[str]:
        """The next `count` messages, in the order of arrival; AssertionError if they are not here in `timeout` s."""
        deadline = time.monotonic() + timeout
        messages: list[str] = []
        while len(messages) < count:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                messages.append(self._sock.recv(65536).decode())
            except TimeoutError:
                message = f"{len(messages)} of {count} messages within {timeout} s: {messages}"
                raise AssertionError(message) from None
        return messages

    def pids(self, count: int = 1, timeout: float = TIMEOUT) -> list[int]:
        """The next `count` messages, which are pids."""
        return [int(message) for message in self.wait(count, timeout)]


class Gate:
    """Where workers wait until the test lets them go on.

    A FIFO of which the test holds both ends: opening never blocks, passes lie there for workers that come later, and
    if the test process dies every waiting worker sees the end of file and goes on.
    """

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        os.mkfifo(self.address)
        self._fd = os.open(self.address, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)
        os.unlink(self.address)

    def python(self) -> str:
        """An expression of Python that waits here: for `python -c` and scripts."""
        return f"open({self.address!r}, 'rb', 0).read(1)"

    def open(self, count: int = 1) -> None:
        """Let `count` workers through."""
        os.write(self._fd, b"." * count)


def pass_gate(address: str) -> None:
    """Wait at `Gate.address` until the test opens. For workers that are functions."""
    fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC)  # of a file that a signal has left open it would be warned
    try:
        os.read(fd, 1)
    finally:
        os.close(fd)


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine: on PATH, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))]
    for path in filter(None, candidates):
        done = subprocess.run([path, "-c", "print(1)"], capture_output=True, timeout=TIMEOUT, check=False)
        if done.stdout == b"1\n":  # a shim of pyenv's is there whether or not what it stands for is
            return path
    return None


def refusal_of_another_user(call: Callable[[], object]) -> str:
    """Call something in a fork that has become another user, and return what it raises, as text; "": nothing.

    A fork has loaded what it needs: another user need not be able to read the interpreter's files.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is returned
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said
