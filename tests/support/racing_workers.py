"""Workers that fail one after another, or leave slowly: for the tests of which failure came first.

They stand here, apart from the tests, because a worker that is a fresh interpreter imports the module of its
function: this one costs it little.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from phalanx._base import procfs
from phalanx.errors import record
from tests.support.helpers import pass_gate, rest, tell


def falls(ready: str, gate: str, tells: str) -> None:
    """Say that we are up, wait, fail, and let another know on the way out: our failure is on record by then."""
    tell(ready, "up")
    pass_gate(gate)
    if tells:
        atexit.register(tell, tells, "now")
    raise ValueError("the cause")


def follows(ready: str, hears: str, seconds: float) -> None:
    """Fail ``seconds`` after another has let us know."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(hears)
        tell(ready, "up")
        sock.recv(10)
    time.sleep(seconds)
    raise RuntimeError("a consequence")


def waits(ready: str) -> None:
    tell(ready, "up")
    while True:
        signal.pause()


def part(rank: int, ready: str, gate: str, hears: str) -> None:
    """Rank 3 falls, rank 0 follows 20 ms later, ranks 1 and 2 wait until they are stopped."""
    if rank == 3:
        falls(ready, gate, hears)
    elif rank == 0:
        follows(ready, hears, 0.02)
    else:
        waits(ready)


def slow_to_leave(ready: str, gate: str, tells: str, *, in_peace: bool) -> None:
    atexit.register(outlive, f"{tells}.pid", in_peace=in_peace)  # the last one that is called
    falls(ready, gate, tells)


def outlive(path: str, *, in_peace: bool) -> None:
    """Stay until the keeper has reaped the process whose number is in a file; or until we are stopped."""
    with open(path) as file:
        pid = int(file.read())
    while not in_peace or os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)


def exits(ready: str, hears: str, seconds: float) -> None:
    """Exit at once, without evidence, ``seconds`` after another has let us know. Our number is in a file."""
    with open(f"{hears}.pid", "w") as file:
        file.write(str(os.getpid()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(hears)
        tell(ready, "up")
        sock.recv(10)
    time.sleep(seconds)
    os._exit(5)


def slow_part(rank: int, ready: str, gate: str, hears: str, *, rank_0_waits: bool) -> None:
    if rank == 1:
        slow_to_leave(ready, gate, hears, in_peace=not rank_0_waits)
    elif rank == 2:
        exits(ready, hears, 0.1)
    elif rank_0_waits:
        waits(ready)
    else:
        tell(ready, "up")


def loses_its_peer(rank: int, ends: tuple[Any, Any], gate: str) -> None:
    mine, other = ends if rank == 0 else ends[::-1]
    other.close()
    if rank == 0:
        pass_gate(gate)
        os.kill(os.getpid(), signal.SIGKILL)
    mine.recv()  # EOFError, as soon as the kernel has closed the peer's end


def outlives(rank: int, gate: str, error: Exception) -> None:
    if rank == 1:
        pass_gate(gate)
        raise error


def raises(rank: int, gate: str) -> None:
    pass_gate(gate)
    raise ValueError(f"rank {rank} fell")


def crashes() -> None:
    def inner() -> None:
        ctypes.string_at(0)

    inner()


SLOW_EXIT = """
import atexit, os, socket, sys, time
rank, path, teardown = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if rank == 0:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    open(path + ".ready", "w").close()
    peer, _ = server.accept()
    peer.recv(1)
    def release():
        peer.close()             # the peer sees it now,
        time.sleep(teardown)     # and there is more to be torn down
    atexit.register(release)
    sys.exit(3)
while not os.path.exists(path + ".ready"):
    pass
peer = socket.socket(socket.AF_UNIX)
peer.connect(path)
peer.send(b"x")
if not peer.recv(1):
    raise ConnectionResetError("the peer has gone")
"""


def serve_and_leave(path: str, rank: int, teardown: float) -> None:
    """`SLOW_EXIT` as a function."""
    sys.argv[1:] = [str(rank), path, str(teardown)]
    exec(SLOW_EXIT, {"__name__": "slow"})  # noqa: S102 - the program above


STAYS = """
import atexit, concurrent.futures, os, sys, threading, time
how, done = sys.argv[1:3]
if how in ("thread", "returns"):
    threading.Thread(target=time.sleep, args=(3600,)).start()
elif how == "pool":
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 3600)
elif how == "saves":
    def save():
        time.sleep(0.5)
        open(done, "w").close()
    atexit.register(save)
elif how == "exits well":
    atexit.register(os._exit, 0)
else:
    atexit.register(time.sleep, 3600)
if how == "sys.exit":
    sys.exit(3)
if how != "returns":
    raise ValueError("loss is nan")
"""


def fail_and_stay(rank: int, how: str, done: str = "") -> None:
    """`STAYS` as a function, in rank 1. Rank 0 goes on until it is stopped."""
    if rank == 0:
        rest()
    sys.argv[1:] = [how, done]
    exec(STAYS, {"__name__": "stays"})  # noqa: S102 - the program above


def return_and_stay(gate: str) -> None:
    """Return once this gate, if any, is open, and stay, as a thread does."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    if gate:
        pass_gate(gate)


def fail_below() -> str:
    """Have a fork fail as the worker would, which goes on and succeeds."""
    pid = os.fork()
    if pid == 0:
        raise ValueError("of a fork")
    os.waitpid(pid, 0)
    return "went on"


def leave_slowly(folder: str, rank: int, way: str, ready: str, gate: str) -> None:
    """Rank 0 leaves without a word, and one of its threads cannot: it waits for a disk. Rank 1 sees it leave."""
    from tests.support.disks import sleeping_on_disks, until

    path = os.path.join(folder, "socket")
    if rank == 1:
        pass_gate(gate)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            pid = int(peer.recv(100))
            while peer.recv(1) or not procfs.is_exiting(pid):
                pass
        raise ConnectionResetError("the peer has gone")
    with socket.socket(socket.AF_UNIX) as server, open(os.path.join(folder, "disk", "file"), "wb", 0) as file:
        server.bind(path)
        server.listen()
        tell(ready, str(os.getpid()))
        pass_gate(gate)
        threading.Thread(target=file.write, args=(b"x",), daemon=True).start()
        peer, _ = server.accept()
        until(lambda: sleeping_on_disks(os.getpid()) == 1)
        peer.send(str(os.getpid()).encode())
        peer.close()
        if way == "abort":
            faulthandler.disable()  # the dump of a stack would tell when that was
            os.abort()
        os._exit(3)


def handled_before(way: str, ready: str) -> None:
    """Record an exception in a nested function, handle it, and go on."""

    @record
    def step() -> None:
        raise ValueError("handled")

    try:
        step()
    except ValueError:
        if way == "exit in the handler":
            sys.exit(3)
    if way == "waits":
        waits(ready)
    if way == "raise":
        raise KeyError("the cause")
    if way == "exit":
        sys.exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def one_has_handled(rank: int, ready: str, gate: str) -> None:
    if rank == 1:
        falls(ready, gate, "")
    handled_before("waits", ready)


def ends_at_once(way: str, ready: str) -> None:
    if way == "exit":
        sys.exit(3)
    if way == "_exit":
        os._exit(3)
    if way == "waits":
        waits(ready)
    os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGABRT)


def exits_while_handling(way: str) -> None:
    try:
        raise ValueError("loss is nan")  # noqa: TRY301 - as programs do
    except ValueError as error:
        if way == "exit":
            sys.exit(3)
        if way == "from":
            raise SystemExit(3) from error
        if way == "hidden":
            raise SystemExit(3) from None
        if way == "again":
            try:
                sys.exit(5)
            except SystemExit:
                sys.exit(3)
        if way == "0":
            sys.exit(0)
    sys.exit(3)


def kills_itself_for_its_peer(rank: int, path: str) -> None:
    """Rank 0 fails, and closes its connections early; rank 1 fails of that, and rank 2 kills itself long after it."""
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{path}.new")
            server.listen()
            os.rename(f"{path}.new", path)
            peers = [server.accept()[0] for _ in range(2)]
        try:
            raise ValueError("the cause")
        finally:
            for peer in peers:
                peer.close()
            time.sleep(0.4)  # a teardown
    with socket.socket(socket.AF_UNIX) as client:
        while True:
            try:
                client.connect(path)
                break
            except OSError:
                time.sleep(0.01)
        client.recv(1)
    if rank == 2:
        time.sleep(0.8)
        os.kill(os.getpid(), signal.SIGKILL)
    raise ConnectionResetError("peer")
