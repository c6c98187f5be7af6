"""Hammers a table of timers: many processes that nest blocks, fork, exec, are killed and stopped; and some that hang.

`hammer` raises if a process was killed that did not hang, one that did was not killed, or anything is left behind.

Each process enters and leaves its share of blocks, nested to a random depth, and at random: forks a child that does the
same for a while; forks one that is killed within a block, by its parent; forks one that hangs in a block, and waits for
it to be killed by the server; loads the module of `expires` anew; replaces itself by execve(2), and goes on.
"""

from __future__ import annotations

import importlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from phalanx import timer
from phalanx._base import clock
from phalanx._base.loop import Loop
from phalanx._timers.escalation import TimerScheduler
from phalanx._timers.hang import Timer
from phalanx._timers.layout import TIMERS_ENV
from phalanx._timers.table import TimerTable
from tests.support.forks import start_fork

LONG, HANG = 30.0, 0.3  # seconds: of blocks that are left in time, and of those that are not
WATCHED = 60.0  # seconds in which one that hangs has to be killed, on however busy a machine
NAMES = ("forked", "killed", "hung", "reloaded", "executed", "stopped")


class Failed(Exception):  # noqa: N818 - a word of its own for each would tell no more
    """What must not happen has happened."""


def nest(blocks: int, chance: random.Random) -> None:
    """Enter and leave so many blocks."""
    while blocks > 0:
        depth = min(blocks, chance.randint(1, 6))
        with ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(timer.expires(LONG))
        blocks -= depth


def expect(pid: int, code: int) -> None:
    found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if found != code:
        raise Failed(f"a process that was to end with {code} has ended with {found}")


def child_that_leaves(chance: random.Random) -> None:
    expect(start_fork(lambda: nest(chance.randint(1, 200), chance)), 0)


def child_that_is_killed(chance: random.Random) -> None:
    """At any instruction: its seat is as it was at that moment, and the next one finds it clean."""
    reader, writer = os.pipe()

    def work() -> None:
        with timer.expires(LONG):
            os.write(writer, b".")
            while True:
                timer.beat()
                nest(10, random.Random(0))  # noqa: S311 - as above

    pid = start_fork(work)
    os.close(writer)
    os.read(reader, 1)
    time.sleep(chance.uniform(0, 0.003))
    os.kill(pid, signal.SIGKILL)
    expect(pid, -signal.SIGKILL)
    os.close(reader)
    nest(chance.randint(1, 50), chance)


def child_that_hangs(_chance: random.Random) -> None:
    def work() -> None:
        with timer.expires(LONG), timer.expires(HANG):
            time.sleep(1000)

    pid = start_fork(work)
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], WATCHED)[0]:
        os.kill(pid, signal.SIGKILL)
        raise Failed(f"a process that hangs was not killed within {WATCHED:g} s")
    os.close(pidfd)
    expect(pid, -signal.SIGKILL)


def child_that_is_stopped(chance: random.Random) -> None:
    """For less than its blocks may take."""
    pid = start_fork(lambda: nest(2000, chance))
    for _ in range(5):
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
    expect(pid, 0)


def work(address: str, left: int, seed: int, done: dict[str, int], one_in: int) -> None:
    """A process of the hammer. Prints what it has done as its last line."""
    chance = random.Random(seed)  # noqa: S311 - what is done next, and no secret
    os.environ[TIMERS_ENV] = f"{address}:0"
    while left > 0:
        share = min(left, chance.randint(1, 2 * one_in))
        nest(share, chance)
        left -= share
        what = chance.choice(NAMES)
        done[what] = done.get(what, 0) + 1
        if what == "forked":
            child_that_leaves(chance)
        elif what == "killed":
            child_that_is_killed(chance)
        elif what == "hung":
            child_that_hangs(chance)
        elif what == "stopped":
            child_that_is_stopped(chance)
        elif what == "reloaded":
            for name in ("_beats", "_expires"):
                importlib.reload(sys.modules[f"phalanx.timer.{name}"])
            vars(timer).pop("expires", None)  # what the package has kept of it
        else:
            words = [f"{name}={count}" for name, count in done.items()]
            argv = [
                sys.executable,
                "-m",
                "tests.support.hammer",
                address,
                str(left),
                str(seed + 1),
                str(one_in),
                *words,
            ]
            with timer.expires(LONG):  # an exec gives it back, as a death does
                os.execv(sys.executable, argv)
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in done.items()) + "\n")


@contextmanager
def watched_table(seats: int) -> Iterator[TimerTable]:
    """A table whose timers are watched, in a thread: a process that does not leave a block in time is killed."""
    table, loop = TimerTable(seats), Loop()

    def kill(timers: list[Timer]) -> None:
        for each in timers:
            holder = table.holder(each.seat)
            if holder and table.is_still_set(each):
                with suppress(ProcessLookupError):
                    os.kill(holder, signal.SIGKILL)

    scheduler = TimerScheduler(table, loop, kill)
    scheduler.open()
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield table
    finally:
        loop.call(loop.stop)
        thread.join()
        scheduler.close()
        loop.close()
        table.close()


def hammer(blocks: int, processes: int, one_in: int) -> dict[str, int]:
    """Run it all: ``one_in`` blocks are between two other things, on average. Returns how often each thing was done."""
    total: dict[str, int] = {}
    with watched_table(4 * processes) as table:
        argv = [sys.executable, "-m", "tests.support.hammer", table.address, str(blocks // processes)]
        workers = [
            subprocess.Popen([*argv, str(1000 * number), str(one_in)], stdout=subprocess.PIPE, text=True)
            for number in range(processes)
        ]
        ends = [(worker.communicate()[0], worker.returncode) for worker in workers]
        for text, code in ends:
            if code:
                raise Failed(f"a worker has ended with {code}: {text}")
            for word in text.split():
                name, _, count = word.partition("=")
                total[name] = total.get(name, 0) + int(count)
        live = [seat for seat in range(table.seats) if table.holder(seat)]
        due = [key for key in table.look(clock.now_ns() + int(1e15))[0] if table.holder(key[0])]
        if live or due:
            raise Failed(f"left in the table: {len(live)} seats that are taken, {len(due)} timers")
    return total


if __name__ == "__main__":
    address, left, seed, one_in, *words = sys.argv[1:]
    done = {name: int(count) for name, _, count in (word.partition("=") for word in words)}
    work(address, int(left), int(seed), done, int(one_in))
