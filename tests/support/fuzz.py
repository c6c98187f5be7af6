"""Everything that a worker, or another user, can write: one target for each, which takes any bytes.

A target does with the bytes what Phalanx does, and checks what must hold whatever they are: nothing is raised but what
is documented, what is kept is bounded, and nobody is named as a process to signal but who may be.

``tests/project/test_fuzz.py`` runs them with hypothesis; ``PHALANX_TEST_INPUTS=1000000`` gives them more inputs.
"""

from __future__ import annotations

import marshal
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Self

from phalanx._base import clock, linux
from phalanx._base.channels import _PACKET as PACKET
from phalanx._base.loop import Loop
from phalanx._base.process import Exit
from phalanx._engine import worker_messages
from phalanx._engine.mirror import Mirror
from phalanx._evidence.describe import TEXT_LIMIT
from phalanx._evidence.error_file import handled_at, read_error_file, recorded_at, written_at
from phalanx._evidence.recording import read_exit
from phalanx._logs import timeline
from phalanx._runs import record
from phalanx._runs.catalog import look
from phalanx._stacks import dump
from phalanx._stacks.request import StackRequest, Target
from phalanx._timers.client import Seat
from phalanx._timers.escalation import Escalation
from phalanx._timers.layout import encode
from phalanx._timers.table import TimerTable
from phalanx.errors import ChildFailedError, ProcessFailure
from phalanx.timer import FileTimerRequest, FileTimerServer
from phalanx.timer._readers import FifoRequestQueue

TARGETS = (
    "error_file", "exit_file", "stacks_file", "report_socket", "run_record", "timeline", "timer_table", "timer_pipe",
)  # fmt: skip
"""What can be tried."""

_LINE = 2000
"""Characters that suffice for any message about what is wrong with a file."""

_REACH = 1 << 14
"""Bytes of the table of timers that inputs store into: its head, and what is in the first seat."""

_STATES = ("running", "succeeded", "failed", "stopped", "lost")
_STACK_SIGNALS = signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
_APART = b"|||"
_TAKEN = 8
_LARGE = 5000
_PACKETS = [
    b"\x00Rpickle", b"\x10L" + _APART + b"\x00Rlater", b"\x01L" + _APART + b"\x08L" + _APART + b"\x3fL", b"\x20T",
    b"\x00E" + struct.pack("<QI", 5, 3) + b"badTraceback", b"\x00" + bytes(worker_messages.PACKET), b"\x04", b"",
]  # fmt: skip
_WORDS = (
    b"0", b"-1", b"1e999", b"9" * 5000, b"null", b"true", b"{}", b"[[", b'"', b"\n", b"\0", b"\xff\xfe",
    b"\xed\xa0\x80", b"\\ud800", b"\x1b]0;x\x07", b"18446744073709551616", b"NaN",
    b'{"message":', b"signals ", b"../", b"attempt_0",
)  # fmt: skip
"""What is put into an input, besides noise."""

_ERROR_FILES = [
    (
        b'{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback (most recent call last):'
        b'\\n  File \\"a.py\\", line 3, in f\\nValueError: bad\\n", "timestamp": "1795184205", "monotonic_ns": 5,'
        b' "recorded_ns": 7, "handled_ns": null, "left": true, "pid": 4242, "before": {"message": "a"}}}}'
    ),
    b'{"message": "text", "extraInfo": {"timestamp": 3}}',
    b'{"message": {"message": "late", "extraInfo": {"observer": "timer", "detail": "it is in f", "pid": 4242}}}',
]
_STACKS = [
    b"# stacks on signals 52 and 53, descriptor 5, process 4242\n",
    (
        b"# stacks on signals 15 and 9, descriptor -1, process 1\nCurrent thread 0x00007f (most recent call first):\n"
        b'  File "a.py", line 3 in f\n  File "b.py", line 4 in <module>\n\nThread 0x00007e (most recent call first):\n'
        b'  File "c.py", line 99999999999999999999 in g\n'
    ),
]
_RECORDS = [
    (
        b'{"version":1,"run_id":"night","name":"t.py","command":["t.py","-x"],"cwd":"/","host":"h","pid":4242,'
        b'"pid_started":5,"pid_namespace":"pid:[4026531836]","boot_id":"b","state":"failed","started":1795184205.0,'
        b'"ended":1795184206.5,"exit_code":1,"nprocs":1,"cause":"rank 0","attempts":[{"number":0,"started":1.5,'
        b'"ended":null,"ranks":[{"rank":0,"local_rank":0,"pid":4243,"pid_started":6,"state":"failed","exitcode":1,'
        b'"signal_sent":null}],"leftovers":[]}]}'
    ),
]
_STORES = [
    struct.pack("<H8s", 4, b"\x01" + bytes(7)) + struct.pack("<Hq", 512, 5) + struct.pack("<Hq", 514, -1),
    b"".join(struct.pack("<Hq", at, value) for at, value in ((8, 1 << 40), (517, 3), (520, 1), (521, -(1 << 63)))),
]


class Kind:
    """One kind of what others write: examples, and what is done with the bytes."""

    def __init__(self, seeds: list[bytes], check: Callable[[bytes], None]) -> None:
        self.seeds, self.check = seeds, check


class Fuzz:
    """The targets, with the folder, the table and the processes that they need. A context: it leaves nothing."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self._path = os.path.join(self._folder.name, "error.json")
        self._stranger = _stranger()
        self._stacks = os.open(self._path + ".stacks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._child = subprocess.Popen(["sleep", "1000"], pass_fds=[self._stacks])
        self._table = TimerTable(4, 30.0)
        self._seat = Seat(f"{self._table.address}:0")
        self._seat.arm(deadline=5, span=3, text=encode("load", "train.py:7"))
        self._seat.beat(7)
        self._loop = Loop()
        self._files = list(self._descriptors())
        self._told: list[tuple[Any, ...]] = []
        self._struck: list[int] = []
        seeds = {
            "error_file": _ERROR_FILES,
            "exit_file": [b"4242 1 5000\n", b"1 2 3\n4242 5 6\n"],
            "stacks_file": [*_STACKS, self._offer(52), self._offer(15)],
            "report_socket": _PACKETS,
            "run_record": _RECORDS,
            "timeline": [_timeline(self._folder.name)],
            "timer_table": _STORES,
            "timer_pipe": self._requests(),
        }
        self.targets = {name: Kind(seeds[name], getattr(self, f"_{name}")) for name in TARGETS}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._seat.close()
        self._table.close()
        self._loop.close()
        for fd in (*self._files, self._stacks):
            os.close(fd)
        self._child.kill()
        self._child.wait()
        os.kill(self._stranger, signal.SIGKILL)  # ProcessLookupError: a process that is not ours was killed
        self._folder.cleanup()

    def _error_file(self, data: bytes) -> None:
        self._write(data)
        found, problem = read_error_file(self._path)
        assert found is None or isinstance(found, dict)
        assert len(problem) < _LINE, problem
        for moment in (written_at(found), recorded_at(found), handled_at(found)):
            assert moment is None or 0 <= moment < 1 << 63
        failure = ProcessFailure(0, 4242, 1, self._path)
        assert len(failure.message) <= 2 * TEXT_LIMIT
        str(ChildFailedError("fuzz", {0: failure})).encode()

    def _exit_file(self, data: bytes) -> None:
        with open(self._path + ".exit", "wb") as file:
            file.write(data)
        found = read_exit(self._path, 4242)
        assert found is None or (0 < found[0] < 256 and 0 <= found[1] < 1 << 63)

    def _stacks_file(self, data: bytes) -> None:
        """The child has the file open, as what it writes its stacks to."""
        os.truncate(self._stacks, 0)
        os.pwrite(self._stacks, data, 0)
        ask = StackRequest(Target(0, self._child.pid, self._path))
        try:
            ask.open()
            assert {0, *_STACK_SIGNALS} >= set(ask.signals), ask.signals
        finally:
            ask.close()
        text = data.decode("utf-8", "backslashreplace")
        threads = dump.parse(text)
        assert len(threads) <= len(data)
        dump.sum_up_locations({0: dump.location(text), 1: ""}).encode()

    def _report_socket(self, data: bytes) -> None:
        """Packets, apart by `_APART`; each one's first byte says which descriptors come with it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        dropped: list[int] = []
        mirror = Mirror()
        with ours, theirs:
            inbox = worker_messages.Inbox(ours, dropped.extend)
            mirror.started([(0, os.getpid())])
            mirror.running(0)
            packets = data.split(_APART)[:_TAKEN]
            for packet in packets:
                fds = [fd for bit, fd in enumerate(self._files) if packet and packet[0] >> bit & 1]
                socket.send_fds(theirs, [packet[1 : 1 << 17]], fds)
                while job := mirror.take(inbox, self._answer):
                    job()
            for worker in mirror.workers.values():
                worker.exit = Exit(1)
            mirror.settle_results()
        worker = mirror.workers[0]
        sent = worker.sent_evidence
        assert sent is None or len(sent.message) + len(sent.stack) <= worker_messages.PACKET
        assert not isinstance(worker.result, bytes) or len(worker.result) <= max(worker_messages.PACKET, _LARGE)
        worker.received_fds.close()
        for fd in dropped:
            os.close(fd)

    def _answer(self, fd: int) -> None:
        os.close(fd)

    def _descriptors(self) -> Iterator[int]:
        """What may come with a packet: a device, a pipe, a folder, a file in memory, the same sealed, a socket."""
        yield os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        out, into = os.pipe()
        os.close(into)
        yield out
        yield os.open("/", os.O_RDONLY | os.O_CLOEXEC)
        for bound in (False, True):
            file = linux.memory_file("fuzz")
            os.write(file, bytes(_LARGE))
            if bound:
                linux.seal(file)
            yield file
        ours, theirs = socket.socketpair()
        theirs.close()
        yield ours.detach()

    def _run_record(self, data: bytes) -> None:
        with open(os.path.join(self._folder.name, record.FILE), "wb") as file:
            file.write(data)
        found = look(self._folder.name)
        assert found.run is None or found.state in _STATES
        assert len(found.problem) < _LINE, found.problem
        found.to_json()

    def _timeline(self, data: bytes) -> None:
        path = os.path.join(self._folder.name, "timeline")
        with open(path, "wb") as file:
            file.write(data)
        count = sum(1 for _ in timeline.read(path))
        assert count <= len(data)

    def _timer_table(self, data: bytes) -> None:
        """Each ten bytes are a store: where, and a word. Then one watcher of a group looks, as the keeper does."""
        memory = self._table.descriptors[0]
        before = os.pread(memory, _REACH, 0)
        for at, word in struct.iter_unpack("<H8s", data[: len(data) // 10 * 10]):
            os.pwrite(memory, word, at * 8 % _REACH)
        workers = {0: os.getpid()}
        escalation = Escalation(
            self._table, [("report", 0.0), ("terminate", 0.0), ("kill", 0.0)], self._loop,
            lambda: workers, lambda pid, _number: self._struck.append(pid), lambda *what: self._told.append(what),
        )  # fmt: skip
        scheduler = escalation._scheduler
        try:
            scheduler.open()
            for _ in range(3):
                self._loop.call(lambda: None)
                self._loop.once()
            for signs in self._table.signs().values():
                assert signs.steps is None or 0 < signs.steps.at <= clock.now_ns()
                figures = (signs.steps and signs.steps.summary()) or {}
                assert all(0 <= figure < 1 << 62 for figure in figures.values())
        finally:
            scheduler.close()
            self._loop._deadlines = type(self._loop._deadlines)()
            os.pwrite(memory, before, 0)
        assert set(self._struck) <= set(workers.values())
        assert len(self._told) < _LINE
        for what in self._told:
            assert len(marshal.dumps(what)) < PACKET
        self._told.clear()
        self._struck.clear()

    def _timer_pipe(self, data: bytes) -> None:
        server = FileTimerServer(self._path + ".fifo", max_interval=1)
        try:
            server.register_timers(FifoRequestQueue("").parse(data))
            assert not {0, 1, -1, os.getpid(), os.getppid()} & set(server._victims)
            allowed = {self._child.pid}
            if os.geteuid() == 0:  # else who runs as the same user may be named
                assert set(server._victims) <= allowed, server._victims
            assert sum(map(len, server.get_expired_timers(math.inf).values())) <= len(data)
        finally:
            for victim in server._victims.values():
                victim.close()

    def _offer(self, number: int) -> bytes:
        return b"# stacks on signals %d and 53, descriptor %d, process %d\n" % (number, self._stacks, self._child.pid)

    def _requests(self) -> list[bytes]:
        pids = self._child.pid, self._stranger, os.getpid(), os.getppid(), 1, -1, 1 << 70
        return [FileTimerRequest(pid, "scope", 1.0, signal.SIGKILL).to_json().encode() + b"\n" for pid in pids]

    def _write(self, data: bytes) -> None:
        with open(self._path, "wb") as file:
            file.write(data)


def changed(seeds: list[bytes], chance: random.Random) -> bytes:
    """Make an input of examples: joined, cut, with other bytes and words in it."""
    data = bytearray(chance.choice(seeds) if chance.random() < 0.9 else chance.randbytes(chance.randrange(400)))
    for _ in range(chance.choice((0, 1, 1, 2, 4, 16))):
        at, size = chance.randrange(len(data) + 1), chance.choice((0, 1, 2, 8, 40))
        kind = chance.randrange(5)
        if kind == 0:
            data[at : at + size] = chance.choice(_WORDS)
        elif kind == 1:
            data[at : at + size] = chance.randbytes(size)
        elif kind == 2:
            other = chance.choice(seeds)
            data[at : at + size] = other[chance.randrange(len(other) + 1) :][:1000]
        elif kind == 3:
            data[at : at + size] = data[at : at + size] * chance.choice((2, 3, 50))
        elif data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
    return bytes(data)


def _stranger() -> int:
    """A process that does not descend from this one, and must not be signalled. It has been executed."""
    start = "import subprocess as it; print(it.Popen(['sleep', '1000'], stdout=it.DEVNULL, stderr=it.DEVNULL).pid)"
    return int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True).stdout)


def _timeline(folder: str) -> bytes:
    """What a timeline of two streams holds."""
    times = timeline.TimelineWriter(os.path.join(folder, "example"))
    for size in range(10, 200, 10):
        times.note(size % 20 // 10, size)
    times.note(0, 3)
    times.close()
    with open(times.path, "rb") as file:
        return file.read()
