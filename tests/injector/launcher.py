"""The launcher under test: a program that starts one group as planned, and writes down what it is told.

Each event is a line of JSON in a file, and its name is sent to the injector at once. Before and after, the launcher
lists its own descriptors, threads, children and signal handlers, to see what the group has left.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import phalanx
from phalanx.multiprocessing import (
    ConsoleSpecs,
    DefaultLogsSpecs,
    KeeperLostError,
    LogsDest,
    PContext,
    RunProcsResult,
    SignalException,
    Std,
    start_processes,
)
from phalanx.timer import TimerSpecs
from tests.injector import worker
from tests.injector.plan import HANG, PATIENCE, Plan, make
from tests.support.workers import open_descriptors

LEAVING = 2.0
"""A thread or a child that is about to end has so many seconds before it counts as left."""


class Late(DefaultLogsSpecs):
    """A log folder on a slow disk."""

    def __init__(self, seconds: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds = seconds

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        select.poll().poll(self._seconds * 1000)
        return super().reify(envs)


class Teller:
    """Writes events into the file, and tells the injector their names."""

    def __init__(self, folder: str, address: str) -> None:
        self._file = os.open(f"{folder}/{worker.EVENTS}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._address = f"\0{address}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def say(self, event: str, **facts: Any) -> None:
        now = time.monotonic_ns()
        os.write(self._file, json.dumps({"event": event, "ns": now, **facts}).encode() + b"\n")
        try:
            self._sock.sendto(f"{event} -1 {os.getpid()} 0 {now}".encode(), self._address)
        except OSError:  # the injector has gone, and will have us killed
            return


def main() -> None:
    """``python -c '...' SEED FOLDER ADDRESS``; a line on stdin begins it, and a second one ends it."""
    seed, folder, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    plan = make(seed)
    teller = Teller(folder, address)
    before = of_ours()
    teller.say("ready", phalanx=phalanx.__file__)
    os.read(0, 1)
    teller.say("booting")
    group, facts = attend(plan, folder, address, teller)
    insist(lambda: teller.say("ended", **facts))
    if group is not None:
        close(group, plan.grace)
    teller.say("closed")
    del group
    os.read(0, 1)  # by now descriptors and processes are to be had again
    teller.say("left", what=left(before))


def attend(plan: Plan, folder: str, address: str, teller: Teller) -> tuple[PContext | None, dict[str, Any]]:
    """Start the group and wait for its end. Returns what became of it."""
    group: PContext | None = None
    facts: dict[str, Any] = {}
    try:
        group = start(plan, folder, address)
        teller.say("started", pids=group.pids(), log_writer=group._started().link.log_writer)
        result = group.wait(plan.close_after or PATIENCE)
        if result is None:
            teller.say("closing")
            group.close(timeout=plan.grace)
            result = group.wait(0)
        assert result is not None
        return group, {"result": described(result, plan)}
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what a caller is told
        facts = {"error": type(error).__name__, "message": str(error)}
        if not isinstance(error, SignalException):
            return group, facts
    if group is not None:
        close(group, plan.grace)
        try:
            facts["result"] = described(group.wait(), plan)
        except KeeperLostError as error:
            facts["lost"] = str(error)
        except SignalException:  # a second one
            pass
    return group, facts


def start(plan: Plan, folder: str, address: str) -> PContext:
    """Start the group."""
    followers = sum(work.end == "follow" for work in plan.works)
    args: dict[int, tuple[Any, ...]] = {}
    for rank, work in enumerate(plan.works):
        spec = {**asdict(work), "hang": HANG, "followers": followers if rank == plan.leader else 0}
        args[rank] = (rank, plan.seed, folder, address, spec)
    streams: dict[str, Any] = {}
    if plan.logs == "redirect":
        streams = {"redirects": Std.ALL}
    elif plan.logs == "tee":
        streams = {"tee": Std.OUT, "redirects": Std.ERR}
    specs = Late(plan.late_logs, f"{folder}/{worker.LOGS}", max_size=plan.max_size or None, **streams)
    options: dict[str, Any] = {
        "logs_specs": specs,
        "settle": plan.settle,
        "grace": plan.grace,
        "linger": plan.linger,
        "console": ConsoleSpecs(drain=plan.drain, color="never"),
    }
    if plan.on_expiry:
        options["timers"] = TimerSpecs(plan.on_expiry)
    if plan.kind == "binary":
        command = {rank: ("-S", "-E", worker.__file__, *map(str, values)) for rank, values in args.items()}
        return start_processes("binary", sys.executable, command, **options)
    if plan.preload:
        options["preload"] = ["colorsys"]
    return start_processes(plan.kind, worker.work, args, start_method=plan.kind, **options)


def insist(action: Callable[[], None]) -> None:
    """Do something, again if a SIGTERM interrupts it."""
    while True:
        try:
            action()
        except SignalException:
            continue
        return


def close(group: PContext, grace: float) -> None:
    insist(lambda: group.close(timeout=grace))


def described(result: RunProcsResult, plan: Plan) -> dict[str, Any]:
    """A result for JSON. Of a return value, it says whether that is the planted one."""
    return {
        "state": result.state,
        "root": None if result.root_cause is None else result.root_cause.local_rank,
        "outcomes": {
            rank: (outcome.state, outcome.exitcode, outcome.signal_sent, outcome.pid)
            for rank, outcome in result.outcomes.items()
        },
        "failures": {
            rank: (failure.exitcode, failure.message[:300], failure.observed_ns, failure.evidence_ns, failure.dated_ns)
            for rank, failure in result.failures.items()
        },
        "values": {rank: named(value, plan, rank) for rank, value in result.return_values.items()},
        "leftovers": [(left.pid, left.local_rank, left.exitcode) for left in result.leftovers],
    }


def named(value: object, plan: Plan, rank: int) -> str:
    if value == worker.planted(plan.seed, rank, plan.works[rank].value):
        return "planted"
    return "None" if value is None else f"{type(value).__name__}: {value!r:.60}"


# --- what a group leaves in its host


def of_ours() -> tuple[dict[int, str], set[threading.Thread], set[int], dict[int, Any]]:
    """Descriptors, threads, children and signal handlers of this process."""
    children: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", "rb") as file:
            children.update(map(int, file.read().split()))
    handlers: dict[int, Any] = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return open_descriptors(), set(threading.enumerate()), children, handlers


def left(before: tuple[dict[int, str], set[threading.Thread], set[int], dict[int, Any]]) -> list[str]:
    """What is there now that was not there before. What is about to end is given a while."""
    deadline = time.monotonic() + LEAVING
    gc.collect()  # what the cycles of an exception hold is on its way out, too
    for thread in set(threading.enumerate()) - before[1]:
        thread.join(max(0.0, deadline - time.monotonic()))
    poll = select.poll()
    for pid in of_ours()[2] - before[2]:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has just been reaped
            continue
        poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        poll.unregister(fd)
        os.close(fd)
    descriptors, threads, children, handlers = of_ours()
    return [
        *(f"descriptor {fd}: {what}" for fd, what in descriptors.items() if fd > 2 and before[0].get(fd) != what),
        *(f"thread {thread.name}" for thread in threads - before[1]),
        *(f"child {pid}" for pid in children - before[2]),
        *(f"handler of signal {number}" for number, one in handlers.items() if before[3].get(number) != one),
    ]
