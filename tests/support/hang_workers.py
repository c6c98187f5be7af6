"""Workers that hang, in a module that their processes import."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from functools import partial
from typing import Any, NoReturn

from phalanx import timer
from phalanx._timers import layout
from phalanx.errors import record
from tests.support.forks import start_fork
from tests.support.helpers import pass_gate, rest, tell


def stuck() -> NoReturn:
    """Wait for a lock that nobody gives back."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    raise AssertionError("nobody gives it back")


def hang(after: float = 0.1, scope: str | None = "load") -> None:
    with timer.expires(after=after, scope=scope):
        stuck()


def hang_or_wait(after: float, gate: str) -> None:
    """Rank 0 hangs; the others wait for the gate."""
    if os.environ["RANK"] == "0":
        hang(after)
    pass_gate(gate)


def hang_in_spite_of_sigterm(after: float) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    with timer.expires(after=after, scope="deaf"):
        for _ in range(1000):
            with contextlib.suppress(RuntimeError):
                stuck()


def stop_within_a_block() -> None:
    with timer.expires(0.1, "stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
        stuck()


def close_all_and_hang() -> None:
    with timer.expires(60):
        pass
    os.closerange(3, 1000)
    hang()


def survive(after: float = 0.1) -> None:
    """Be got out of a block by SIGTERM."""

    def on_sigterm(*_: object) -> NoReturn:
        raise InterruptedError

    before = signal.signal(signal.SIGTERM, on_sigterm)
    with contextlib.suppress(InterruptedError), timer.expires(after, "deaf"):
        stuck()
    signal.signal(signal.SIGTERM, before)


def survive_and_raise() -> NoReturn:
    """Be got out of a block by SIGTERM, and fail of something else."""
    survive()
    raise ValueError("later")


def survive_and_exit(gate: str) -> None:
    """Be got out of a block by SIGTERM, and take a while to end, saying nothing."""
    survive()
    pass_gate(gate)
    os._exit(3)


def survive_or_fail(gate: str, address: str = "") -> None:
    """Rank 0 is got out of a block by SIGTERM, says so, and goes on; rank 1 fails when the gate opens."""
    if os.environ["RANK"] == "0":
        survive()
        if address:
            tell(address, "SIGTERM is deadly again")
        while True:
            signal.pause()
    pass_gate(gate)
    raise ValueError("loss is nan")


def hold_many_or_fail(count: int, gate: str) -> None:
    """Rank 0 is in many blocks, and leaves none; rank 1 fails when the gate opens."""
    if os.environ["RANK"] == "1":
        pass_gate(gate)
        os._exit(3)
    with contextlib.ExitStack() as stack:
        for number in range(count):
            stack.enter_context(timer.expires(0.02, f"step {number}"))
        stuck()


def pass_late(after: float, gate: str, second: str, address: str = "") -> str:
    """Leave a block when the gate opens, say so, and end when the second gate opens."""
    with timer.expires(after=after, scope="slow"):
        pass_gate(gate)
    if address:
        tell(address, "left")
    pass_gate(second)
    return "done"


def beat_once(step: int, gate: str) -> None:
    timer.progress(step=step)
    pass_gate(gate)


def beat_with_a_silent_child() -> int:
    """A child beats once, and lives on in silence; we go on. Returns its pid."""
    reader, writer = os.pipe()
    said, saying = os.pipe()

    def beat_once() -> None:
        os.close(writer)
        timer.beat()
        os.write(saying, b".")
        os.read(reader, 1)

    pid = start_fork(beat_once)
    os.read(said, 1)
    for step in range(30):
        timer.progress(step)
        threading.Event().wait(0.02)
    os.close(writer)
    os.wait()
    return pid


def beat_and_take_long(address: str, gate: str, second: str) -> None:
    """A block that may take long, one beat at its beginning, and then silence."""
    with timer.expires(after=100, scope="checkpoint"):
        timer.progress(step=7)  # not before: it is long until the next line on a machine that is busy
        tell(address, "in")
        pass_gate(gate)
    pass_gate(second)


def never_beat(gate: str) -> str:
    pass_gate(gate)
    return "fine"


def hang_below(method: str, address: str) -> None:
    """Two processes below us are stuck, each in a place of its own, one of them within a block; we wait for them."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    idle = context.Process(target=idle_there, args=(address, there))
    idle.start()
    here.recv()  # it has said who it is: all end when the other one hangs
    context.Process(target=hang_there, args=(address,)).start()
    idle.join()


def idle_there(address: str, ready: Any) -> NoReturn:
    timer.beat()
    tell(address, str(os.getpid()))
    ready.send("")
    stuck()


def hang_there(address: str) -> None:
    tell(address, str(os.getpid()))
    hang(0.3, "there")


@record
def fail() -> None:
    raise ValueError("bad sample")


def handle_and_hang() -> None:
    with contextlib.suppress(ValueError):
        fail()
    hang()


def fail_and_hang() -> None:
    """An exception is on its way, and what it meets there hangs."""
    try:
        fail()
    finally:
        hang()


def fork_a_child_that_hangs(address: str, way: str) -> None:
    """A child of ours hangs, or a grandchild that nobody is the parent of; we would wait for ever."""

    def work() -> None:
        if way == "orphan":
            os.setsid()
            if os.fork() != 0:
                return
        tell(address, str(os.getpid()))
        hang(0.1, "below")

    pid = start_fork(work)
    if way == "orphan":
        os.waitpid(pid, 0)
    stuck()


def fork_a_child_that_dies(address: str) -> None:
    """A child takes a timer, and is killed within it."""
    pid = start_fork(lambda: hang(0.05, "below"))
    tell(address, str(pid))
    os.waitpid(pid, 0)
    stuck()


def say_where_the_table_is(address: str, gate: str) -> None:
    tell(address, os.environ[layout.TIMERS_ENV])
    pass_gate(gate)


def hang_when_stopped(address: str) -> None:
    """Take so long to leave that a timer expires."""

    def on_sigterm(*_: object) -> None:
        hang(0.05)

    signal.signal(signal.SIGTERM, on_sigterm)
    tell(address, "")
    rest()


def run_on() -> None:
    """Hang, and never sleep."""
    with timer.expires(0.1, scope="load"):
        while True:
            pass


def end_well(after: float = 0.1) -> None:
    """Hang, and take a SIGTERM for a reason to exit with code 0."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    hang(after)


def one_ends_well(gate: str, second: str) -> str:
    """Rank 0 hangs, and ends well by SIGTERM; rank 1 waits for a gate."""
    if os.environ["RANK"] == "0":
        end_well()
    pass_gate(gate)
    return second


def survive_and_return(gate: str) -> str:
    """Be got out of a block by SIGTERM, work on, and return."""
    survive()
    pass_gate(gate)
    return "done"


def end_well_below() -> None:
    """A child hangs; it and its parent both exit with code 0 by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    start_fork(lambda: hang(0.1, "below"))
    rest()


def share_a_scope(address: str, gate: str) -> str:
    """A child beats once; its parent is in a block that may take long. Then both are in time."""
    said, saying = os.pipe()

    def work() -> None:
        os.read(said, 1)  # the parent is in its block
        timer.progress(3)
        tell(address, "beaten")
        pass_gate(gate)

    pid = start_fork(work)
    with timer.expires(60, "long"):
        os.write(saying, b".")
        os.waitpid(pid, 0)
    return "done"


def leave_a_scope_behind() -> None:
    """A child dies in a block that may take long; we have beaten, and do no more."""
    timer.progress(3)
    pid = os.fork()
    if pid == 0:
        with timer.expires(3600, "long"):
            os._exit(0)
    os.waitpid(pid, 0)
    stuck()


def beat_with_many_below(address: str, gate: str, count: int) -> str:
    """Have children, each with a heartbeat and a block of its own, that live at once."""
    reader, writer = os.pipe()

    def work(number: int) -> None:
        os.close(writer)
        timer.progress(number)
        with timer.expires(3600, "loader"):
            tell(address, "up")
            os.read(reader, 1)

    children = [start_fork(partial(work, number)) for number in range(count)]
    os.close(reader)
    timer.beat()
    tell(address, "up")
    pass_gate(gate)
    os.close(writer)
    codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}
    return f"{codes}"


def beat_and_rest(address: str, gate: str, way: str) -> str:
    """Beat, rest, and wait for the gate; in a block of it, or not; with a child that has beaten, or not."""
    pid = ours = 0
    if way == "child":
        said, saying = os.pipe()
        kept, ours = os.pipe()

        def work() -> None:
            os.close(ours)
            timer.beat()
            os.write(saying, b".")
            os.read(kept, 1)

        pid = start_fork(work)
        os.read(said, 1)
    else:
        timer.progress(4)
    if way == "block":
        with timer.rest():
            tell(address, "rests")
            pass_gate(gate)
        tell(address, "left")
        stuck()
    timer.rest()
    tell(address, "rests")
    pass_gate(gate)
    if way == "beat":
        timer.progress(5)
        stuck()
    if pid:
        os.close(ours)
        os.waitpid(pid, 0)
    return "done"


def rest_below(address: str, gate: str) -> None:
    """A child rests, and is not the one that hangs."""
    said, saying = os.pipe()

    def work() -> None:
        timer.beat()
        timer.rest()
        tell(address, "rests")
        os.write(saying, b".")
        pass_gate(gate)

    start_fork(work)
    os.read(said, 1)
    timer.progress(6)
    stuck()


def end_slowly(address: str, gate: str, way: str) -> str:
    """Beat, and end; an exit handler, or a thread, takes until the gate opens."""
    import atexit

    def take_long() -> None:
        tell(address, "ends")
        pass_gate(gate)

    timer.progress(9)
    if "thread" in way:
        threading.Thread(target=take_long).start()
    else:
        atexit.register(take_long)
    if "fails" in way:
        raise ValueError("loss is nan")
    if "exits" in way:
        sys.exit(3 if "badly" in way else 0)
    return "done"


def beat_and_announce(step: int, address: str, gate: str) -> None:
    """Send a heartbeat if there is a step, and wait; say when a signal comes."""
    signal.signal(signal.SIGUSR1, lambda *_: tell(address, f"{step} signalled"))
    if step:
        timer.progress(step)
    tell(address, f"{step} up")
    pass_gate(gate)
