"""Workers with every kind of child, and hosts that launch them: the population of the survivors' tests.

It owns programs and functions that run in other processes, and says nothing of what must become of them. It imports
little, because every worker that runs one of its functions imports it. As a program, ``python -m
tests.support.families HOST KIND READY GATE``, it is a host (a launcher) for the tests that must kill or cripple one.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from phalanx.multiprocessing import PContext
from tests.support.helpers import pass_gate, tell

KINDS = ("binary", "spawn", "forkserver", "fork")
"""Binaries, and functions under each start method."""

SIZE = 4
"""Members of one family: the worker, a plain child, one in a session of its own, and a daemon (forked twice)."""

WORKERS = 2
"""Families in a group."""

_PYTHON = shlex.join([sys.executable, "-I", "-S", "-c"])


def child(address: str) -> NoReturn:
    """Say who we are, and live for ever."""
    try:
        tell(address, str(os.getpid()))
        while True:
            signal.pause()
    finally:
        os._exit(70)


def fork_plain(address: str) -> None:
    """A child that stays what it is."""
    if os.fork() == 0:
        child(address)


def fork_session(address: str) -> None:
    """A child in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        child(address)


def fork_daemon(address: str) -> None:
    """A grandchild in a session of its own, and an orphan: nobody's child when this returns."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            child(address)
        os._exit(0)
    os.waitpid(middle, 0)


def leaves(address: str, way: Callable[[str], None], gate: str) -> None:
    """Leave somebody behind."""
    way(address)
    pass_gate(gate)


def family(address: str, gate: str) -> NoReturn:
    """Start one child of each kind, say who we are, and fail when the gate opens."""
    fork_plain(address)
    fork_session(address)
    fork_daemon(address)
    tell(address, str(os.getpid()))
    pass_gate(gate)
    sys.exit(3)


def daemonize(address: str, gate: str) -> int:
    """Leave a daemon that holds all that we have inherited, and succeed when the gate opens."""
    fork_daemon(address)
    pass_gate(gate)
    return 42


def source(function: Callable[..., Any], *args: object) -> str:
    """A program for ``python -c`` that calls a function of this module."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    call = f"families.{function.__name__}({', '.join(map(repr, args))})"
    return f"import sys; sys.path[:0] = {[root, *sys.path]!r}; from tests.support import families; sys.exit({call})"


def _family_in_shell(address: str, gate: str) -> str:
    """`family` as a script of the shell. Every member is a program of its own."""
    live = (
        "import os, signal, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
        f"s.sendto(str(os.getpid()).encode(), {address!r}); signal.pause()"
    )
    tell_shell = (
        "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
        f"s.sendto(str(os.getppid()).encode(), {address!r})"
    )
    one = f"{_PYTHON} {shlex.quote(live)}"
    return f"""
        {one} &
        setsid {one} &
        (setsid {one} &)
        {_PYTHON} {shlex.quote(tell_shell)}
        head -c 1 {shlex.quote(gate)} >/dev/null
        exit 3
    """


def start(kind: str, address: str, gate: str, **options: Any) -> PContext:
    """A started group of families. Of binaries, rank 0 is a shell script and rank 1 a Python one."""
    from phalanx.multiprocessing import start_processes  # a worker needs none of it

    if kind == "binary":
        python = f"exec {_PYTHON} {shlex.quote(source(family, address, gate))}"
        args = {0: ("-c", _family_in_shell(address, gate)), 1: ("-c", python)}
        return start_processes("families", "/bin/sh", args, **options)
    method = "forkserver" if kind == "warm" else kind
    return start_processes("families", family, (address, gate), nprocs=WORKERS, start_method=method, **options)


def held_warm(kind: str) -> contextlib.AbstractContextManager[object]:
    """What a group of the kind "warm" needs around it, which is one of "forkserver" then."""
    from phalanx.multiprocessing import warm  # a worker needs none of it

    return warm(preload=["json"]) if kind == "warm" else contextlib.nullcontext()


def start_daemons(kind: str, address: str, gate: str) -> PContext:
    """A started group of workers that leave daemons and succeed."""
    from phalanx.multiprocessing import start_processes  # a worker needs none of it

    if kind == "binary":
        script = source(daemonize, address, gate).replace("sys.exit(", "(")  # the value is no exit code
        return start_processes("daemons", sys.executable, ("-c", script), nprocs=WORKERS)
    return start_processes("daemons", daemonize, (address, gate), nprocs=WORKERS, start_method=kind)


# --- hosts


def host_plain(kind: str, address: str, gate: str) -> None:
    """Launch, and wait for what comes."""
    with held_warm(kind):
        start(kind, address, gate).wait()


def host_with_child(kind: str, address: str, gate: str) -> None:
    """Launch, then fork a child of our own, which inherits our end of every socket, and outlives us."""
    group = start(kind, address, gate)
    fork_session(address)
    group.wait()


def host_deaf_to_children(kind: str, address: str, gate: str) -> None:
    """Launch as a host whose kernel reaps its children unseen."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _launch_and_report(kind, address, gate)


def host_that_reaps_all(kind: str, address: str, gate: str) -> None:
    """Launch as a host with a thread that waits for every child, whosesoever it is."""
    read, write = os.pipe()
    if os.fork() == 0:  # with one child that stays, waitpid(-1) always has something to wait for
        os.close(write)
        os.read(read, 1)
        os._exit(0)

    def reap() -> None:
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return

    if kind == "fork":  # or the fork warns of threads
        group = start(kind, address, gate)
        threading.Thread(target=reap, daemon=True).start()
        _report(group, address)
    else:
        threading.Thread(target=reap, daemon=True).start()
        _launch_and_report(kind, address, gate)
    os.close(write)


def host_as_init(kind: str, address: str, gate: str) -> None:
    """Launch as PID 1 of a namespace: fail, close, succeed; then nobody else is in it, not even a zombie."""
    assert os.getpid() == 1
    _launch_and_report(kind, address, gate)
    with start(kind, address, gate):
        pass_gate(f"{gate}-host")
    with start_daemons(kind, address, gate) as group:
        result = group.wait(60)
        assert result is not None
        assert not result.is_failed()
    tell(address, "left: " + " ".join(sorted(name for name in os.listdir("/proc") if name.isdecimal())))


def _launch_and_report(kind: str, address: str, gate: str) -> None:
    with start(kind, address, gate) as group:
        _report(group, address)


def _report(group: PContext, address: str) -> None:
    result = group.wait(60)
    assert result is not None
    tell(address, f"exit codes {sorted(failure.exitcode for failure in result.failures.values())}")


if __name__ == "__main__":
    globals()[f"host_{sys.argv[1]}"](*sys.argv[2:])
