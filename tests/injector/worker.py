"""The workers of a run: they write lines that each are unlike any other, start children, and end as planned.

This is a program for binaries, and a module with functions for the rest. Every worker imports it, so it imports little;
of Phalanx, only the timer of a worker that hangs. A worker first tells the injector that it runs. It notes in a file
how many bytes it has written: the kernel has taken these, so they have to be in the log file.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

ACKNOWLEDGED = 24
"""Bytes of the file with a worker's notes: the bytes written to stdout and to stderr, and the errno of a refusal."""

LONGEST = 30.0
"""A chain of processes that nobody ends, ends by itself after so many seconds."""

FIFO, EVENTS, LOGS = "leader", "events.jsonl", "logs"
"""Names in the folder of a run: the FIFO that tells the followers who leads, the launcher's events, the logs."""


def line(seed: int, rank: int, stream: int, number: int, width: int) -> bytes:
    """One line of what a worker writes, ``width`` bytes with its end."""
    head = b"%d %d %d %07d " % (seed, rank, stream, number)
    return head.ljust(width - 1, bytes((97 + number % 26,))) + b"\n"


def planted(seed: int, rank: int, size: int) -> bytes:
    """What a function worker returns."""
    text = b"%d-%d;" % (seed, rank)
    return (text * (size // len(text) + 1))[:size]


def start_of(pid: int) -> int:
    """When a process started, in the kernel's ticks: with its pid, this names it for ever. 0: it cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def tell(address: str, what: str, rank: int) -> None:
    """Tell the injector what has happened, to whom, and when."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            text = f"{what} {rank} {os.getpid()} {start_of(os.getpid())} {time.monotonic_ns()}"
            sock.sendto(text.encode(), f"\0{address}")
    except OSError:  # no descriptor is left for it, or nobody listens
        return


def work(rank: int, seed: int, folder: str, address: str, spec: dict[str, Any]) -> bytes | None:
    """Be worker ``rank``, as ``spec`` (a `plan.Work` as a dict, with the number of followers) says."""
    tell(address, "up", rank)
    _choose_end(spec["on_term"])
    for child in spec["children"]:
        _start(child, rank, address)
    writer = _Writer(rank, seed, folder, spec["width"])
    if spec["followers"]:
        _lead(folder, spec["followers"])
    due = time.monotonic() + spec["after"]
    for _ in range(spec["lines"]):
        writer.write()
        _wait(spec["pause"])
    if spec["end"] == "follow":
        _follow(folder, writer, spec)
    elif spec["end"] == "wait":
        while True:
            _chat(writer, spec["chatter"], time.monotonic() + 3600)
    else:
        _chat(writer, spec["chatter"], due)
    for _ in range(spec["burst"]):
        writer.write()
    tell(address, "acting", rank)
    if spec["end"] == "hang":
        _hang(spec["hang"])
    if spec["end"] != "succeed":
        _fail(spec["way"])
    return planted(seed, rank, spec["value"]) if spec["value"] else None


class _Writer:
    """Writes lines to stdout, and one of three to stderr as well."""

    def __init__(self, rank: int, seed: int, folder: str, width: int) -> None:
        self._rank = rank
        self._seed = seed
        self._width = width
        self._number = {1: 0, 2: 0}
        self._refused = False
        try:
            self._notes = os.open(f"{folder}/written-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # no descriptor is left: then nothing is claimed
            self._notes = -1

    def write(self) -> None:
        """Write the next line, unless one was refused."""
        for stream in (1, 2) if self._number[1] % 3 == 0 else (1,):
            if not self._refused:
                self._write(stream)

    def _write(self, stream: int) -> None:
        data = memoryview(line(self._seed, self._rank, stream, self._number[stream], self._width))
        written = self._number[stream] * self._width
        try:
            while data:
                count = os.write(stream, data)
                data, written = data[count:], written + count
                self._note(stream - 1, written)
        except OSError as error:  # the disk is full, the file too large, the reader gone
            self._refused = True
            self._note(2, error.errno or -1)
            return
        self._number[stream] += 1

    def _note(self, place: int, number: int) -> None:
        if self._notes >= 0:
            os.pwrite(self._notes, number.to_bytes(8, "little", signed=True), 8 * place)


def _wait(seconds: float) -> None:
    if seconds:
        select.poll().poll(seconds * 1000)


def _chat(writer: _Writer, chatter: float, until: float) -> None:
    """Wait, and write a line every now and then."""
    while (left := until - time.monotonic()) > 0:
        _wait(min(left, chatter or left))
        if chatter:
            writer.write()


def _choose_end(on_term: str) -> None:
    if on_term == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif on_term != "die":
        code = 7 if on_term == "fail" else 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))


# --- children


def _start(child: dict[str, Any], rank: int, address: str) -> None:
    try:
        pid = os.fork()
    except OSError:  # there may be no more processes
        return
    if pid:
        if child["way"] == "daemon":
            os.waitpid(pid, 0)
        return
    try:
        if child["way"] != "plain":
            os.setsid()
        if child["way"] != "daemon" or os.fork() == 0:
            _live(child, rank, address)
    finally:
        os._exit(0)


def _live(child: dict[str, Any], rank: int, address: str) -> None:
    tell(address, "child", rank)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if child["deaf"] else signal.SIG_DFL)
    if child["way"] == "chain":
        _hop(time.monotonic() + (child["seconds"] or LONGEST))
    elif child["seconds"]:
        _wait(child["seconds"])
    else:
        while True:
            signal.pause()


def _hop(until: float) -> None:
    """Fork and exit, again and again: a signal that is sent to the process that was seen, comes too late."""
    while time.monotonic() < until:
        try:
            if os.fork():
                return
        except OSError:  # there may be no more processes
            return


# --- ends


def _lead(folder: str, followers: int) -> None:
    """Tell the followers whose end they have to wait for. The FIFO stays open, or else its contents were lost."""
    try:
        fd = os.open(f"{folder}/{FIFO}", os.O_RDWR | os.O_CLOEXEC)
        os.write(fd, (b"%16d" % os.getpid()) * followers)
    except OSError:  # no descriptor is left: nobody follows
        return


def _follow(folder: str, writer: _Writer, spec: dict[str, Any]) -> None:
    """Wait until the leader has exited. A pidfd says so at the moment at which the kernel tells the parent."""
    try:
        with open(f"{folder}/{FIFO}", "rb", 0) as fifo:
            leader = fifo.read(16)
        if leader:
            fd = os.pidfd_open(int(leader))
            select.select((fd,), (), ())
            os.close(fd)
    except OSError:  # it has been reaped; or no descriptor is left
        pass
    _chat(writer, spec["chatter"], time.monotonic() + spec["after"])


def _hang(seconds: float) -> NoReturn:
    from phalanx.timer import expires

    with expires(seconds, "planted"):
        while True:
            signal.pause()


def _fail(way: str) -> NoReturn:
    if way == "exception":
        raise ValueError("planted")
    if way == "exit":
        sys.exit(3)
    if way == "_exit":
        os._exit(4)
    if way == "SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.Signals[way])
    while True:
        signal.pause()


if __name__ == "__main__":
    import ast

    _rank, _seed, _folder, _address, _spec = sys.argv[1:]
    work(int(_rank), int(_seed), _folder, _address, ast.literal_eval(_spec))
