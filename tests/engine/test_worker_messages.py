"""What workers send to their launcher beside the rules: it is dropped, and harms nobody but who has sent it."""

from __future__ import annotations

import array
import errno
import os
import random
import resource
import socket
import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from phalanx._base import channels, linux
from phalanx._engine import worker_messages
from phalanx._engine.mirror import Mirror
from phalanx._engine.pickling.payload import ReceivedFds
from phalanx._engine.worker import mp_child
from phalanx._evidence.sent import pack
from phalanx.multiprocessing import start_processes
from tests.support.helpers import TIMEOUT, Gate, Ready, pass_gate, tell
from tests.support.insides import supervisor_of
from tests.support.workers import run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from phalanx._engine.mirror import WorkerRecord

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder")]

METHODS = ("spawn", "forkserver", "fork")


# --- attacks: what a worker sends, and the descriptors with it


def memory(content: bytes = b"", size: int = -1, seals: int = -1) -> int:
    """A file in memory, sealed as a value is, or by ``seals``."""
    fd = linux.memory_file("phalanx-attack")
    os.write(fd, content)
    if size >= 0:
        os.truncate(fd, size)
    if seals < 0:
        linux.seal(fd)
    return fd


def of_path(path: str, flags: int = os.O_RDONLY) -> list[int]:
    return [os.open(path, flags)]


def of_fifo() -> list[int]:
    reader, writer = os.pipe()
    os.close(writer)
    return [reader]


VALUE = b"\x80\x05K\x07."  # the pickle of 7

ATTACKS: dict[str, Callable[[], tuple[bytes, list[int]]]] = {
    "nothing": lambda: (b"", []),
    "a tuple in marshal": lambda: (
        b")\x05\xda\x06result\xe9\x00\x00\x00\x00\xe9\x01\x00\x00\x00s\x00\x00\x00\x00N",
        [],
    ),
    "bad bytes": lambda: (b"\xff" * 100, []),
    "a large packet": lambda: (b"R" + b"x" * 100_000, []),
    "a pipe for a value": lambda: (b"L", of_fifo()),
    "an endless device for a value": lambda: (b"L", of_path("/dev/zero")),
    "a folder for a value": lambda: (b"L", of_path("/")),
    "a file of /proc for a value": lambda: (b"L", of_path("/proc/self/environ")),
    "a file on a disk for a value": lambda: (b"L", of_path(__file__)),
    "a socket for a value": lambda: (b"L", [socket.socket(socket.AF_UNIX).detach()]),
    "a file without read permission": lambda: (b"L", of_path("/dev/null", os.O_PATH)),
    "a file in memory that is not sealed": lambda: (b"L", [memory(VALUE, seals=0)]),
    "a file in memory with a hole of a tebibyte": lambda: (b"L", [memory(VALUE, 1 << 40)]),
    "a large value without a file": lambda: (b"L", []),
    "a large value and a content": lambda: (b"Lx", [memory(VALUE)]),
    "evidence that ends early": lambda: (b"E" + bytes(12) + b"\xff\xff\xff\xff" + b"text", []),
    "evidence of a later age": lambda: (b"E" + b"\xff" * 8 + bytes(8), []),
    "evidence with descriptors": lambda: (b"E" + bytes(16), of_path("/dev/null")),
    "a question without a socket": lambda: (b"T", of_path("/dev/null")),
    "a question with nothing": lambda: (b"T", []),
    "many descriptors": lambda: (b"?", of_path("/dev/null") * 250),
}


def send_to(sock: int, body: bytes, fds: Sequence[int]) -> None:
    with socket.socket(fileno=os.dup(sock)) as own:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        own.sendmsg([body], rights)


def attack(sock: int, name: str) -> None:
    body, fds = ATTACKS[name]()
    send_to(sock, body, fds)
    for fd in set(fds):
        os.close(fd)


# --- the judgement alone


class End:
    """A launcher's end of the socket, with two workers: 0 is this very process, and 1 is not there."""

    def __init__(self) -> None:
        ours, theirs = channels.pair()
        self.theirs = theirs
        self.dropped = 0
        self.inbox = worker_messages.Inbox(ours, self._drop)
        self.mirror = Mirror()
        self.mirror.started([(0, os.getpid()), (1, 1)])
        self.mirror.running(0)

    def _drop(self, fds: list[int]) -> None:
        self.dropped += len(fds)
        ReceivedFds(fds).close()

    def take(self) -> None:
        """Take all that there is."""
        while (job := self.mirror.take(self.inbox, os.close)) is not None:
            job()

    def ended(self) -> list[WorkerRecord]:
        """The workers, that have exited."""
        assert list(self.mirror.exits([(rank, 0, 1, 0, 0.0, "", 0, False, 0) for rank in (0, 1)]))
        self.mirror.settle_results()
        return list(self.mirror.workers.values())


@pytest.fixture
def end() -> Iterator[End]:
    found = End()
    with closing(found.inbox), closing(found.theirs), unchanged_descriptors():
        yield found
        ReceivedFds().close()


@contextmanager
def unchanged_descriptors() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_what_makes_no_sense_is_dropped_and_said_of_its_sender(end: End, name: str) -> None:
    attack(end.theirs.fileno(), name)
    end.take()
    sender, other = end.ended()
    assert str(sender.result).startswith("rank 0 sent what is no result: ")
    assert (sender.sent_evidence, other.result, other.sent_evidence) == (None, None, None)


def told(worker: WorkerRecord) -> tuple[str, str, int, int]:
    evidence = worker.sent_evidence
    assert evidence is not None
    return evidence.message, evidence.stack, evidence.moment, evidence.number


def test_a_good_value_counts_whatever_came_before_it(end: End) -> None:
    for name in ATTACKS:
        attack(end.theirs.fileno(), name)
        end.take()
    worker_messages.send(end.theirs.fileno(), pack(b"text", "stäck".encode(), 5, 28))
    worker_messages.send(end.theirs.fileno(), b"R" + VALUE)
    end.take()
    sender, _other = end.ended()
    assert (sender.result, told(sender)) == (VALUE, ("text", "stäck", 5, 28))


def test_the_first_value_and_the_first_evidence_count(end: End) -> None:
    fd = end.theirs.fileno()
    large = memory(VALUE)
    reader, writer = os.pipe()
    worker_messages.send(fd, b"L", [reader, large])
    worker_messages.send(fd, b"R" + VALUE * 2, [reader])
    worker_messages.send(fd, b"L", [large])
    for number in (1, 2):
        worker_messages.send(fd, pack(b"text %d" % number, b"", number))
    for each in (large, reader):
        os.close(each)
    end.take()
    sender, _other = end.ended()
    assert (sender.result, told(sender), end.dropped) == (VALUE, ("text 1", "", 1, 0), 2)
    sender.received_fds.close()
    with pytest.raises(BrokenPipeError):  # nobody holds the reading end
        os.write(writer, b"x")
    os.close(writer)


def test_no_default_timeout_is_waited_for() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        end = End()
    finally:
        socket.setdefaulttimeout(before)
    with closing(end.inbox), closing(end.theirs):
        end.take()
        worker_messages.send(end.theirs.fileno(), b"R" + VALUE)
        end.take()
        assert end.ended()[0].result == VALUE


def test_nobody_speaks_for_another(end: End) -> None:
    """Whose a packet is the kernel says; one of a process that is no worker is nobody's."""
    pid = os.fork()
    if pid == 0:
        try:
            worker_messages.send(end.theirs.fileno(), b"R" + VALUE)
            attack(end.theirs.fileno(), "an endless device for a value")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    end.take()
    assert [worker.result for worker in end.ended()] == [None, None]


def test_an_endless_sender_delays_others_by_a_turn(end: End) -> None:
    sent = 0
    end.theirs.setblocking(False)
    while sent < 2000:
        try:
            end.theirs.send(b"?")
            sent += 1
        except BlockingIOError:
            break
    turns = 0
    while end.inbox.receive() is not None:
        assert end.mirror.take(end.inbox, lambda _fd: None, 10) is None
        turns += 1
    assert turns >= sent // 11


@pytest.mark.long
def test_packets_of_chance(end: End) -> None:
    """Nothing that is sent raises, grows, or stays open. Now and then a good value comes, and is still taken."""
    chance = random.Random(5)  # noqa: S311 - what is sent is no secret
    files = [*of_path("/dev/zero"), *of_path("/"), memory(VALUE), memory(VALUE, seals=0), memory(b"", 1 << 40)]
    fd = end.theirs.fileno()
    for number in range(20_000):
        body = chance.choice((b"R", b"L", b"E", b"T", b"", bytes([chance.randrange(256)])))
        if chance.random() < 0.5:
            body += chance.randbytes(chance.choice((1, 4, 12, 13, 40)))
        send_to(fd, body, chance.choices(files, k=chance.choice((0, 0, 0, 1, 2))))
        end.take()
        if number % 1000 == 0:
            assert len(end.mirror._said) <= 1
            end.mirror._said.clear()
            worker_messages.send(fd, b"R" + VALUE)
            end.take()
            assert end.mirror._said[os.getpid()].result == VALUE
    for each in files:
        os.close(each)
    end.mirror._said.clear()


def test_nothing_is_received_while_descriptors_lie_unclosed() -> None:
    ours, theirs = channels.pair()
    dropped: list[int] = []
    waited: list[bool] = []

    def drop(fds: list[int]) -> Callable[[], None]:
        dropped.extend(fds)
        return lambda: waited.append(True)

    with closing(theirs), closing(worker_messages.Inbox(ours, drop)) as inbox:
        for _ in range(3):
            attack(theirs.fileno(), "many descriptors")
        mirror = Mirror()
        jobs = 0
        while (job := mirror.take(inbox, os.close)) is not None:
            jobs += 1
            assert len(dropped) == jobs * 250
            job()
    ReceivedFds(dropped).close()
    assert len(waited) == jobs == 3


# --- groups


def report() -> int:
    me = mp_child._this_child
    assert me is not None
    assert me.report is not None
    return me.report


def attacks_and_returns(rank: int, names: Sequence[str]) -> int:
    for name in names if rank == 1 else ():
        attack(report(), name)
    return 7 + rank


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_the_others_get_their_values_through(method: str) -> None:
    arguments = {rank: (rank, sorted(ATTACKS)) for rank in range(3)}
    with start_processes("attack", attacks_and_returns, arguments, start_method=method) as group:
        result = group.wait()
    assert result.return_values == {0: 7, 1: 8, 2: 9}


def attacks_and_leaves(rank: int, name: str) -> int:
    if rank == 1:
        attack(report(), name)
        os._exit(0)
    return 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bad bytes", "an endless device for a value"])
def test_a_rank_that_sent_no_result_has_failed(name: str) -> None:
    arguments = {rank: (rank, name) for rank in range(2)}
    with start_processes("attack", attacks_and_leaves, arguments, start_method="fork") as group:
        result = group.wait()
    assert result.return_values == {0: 7}
    assert result.failures[1].message.startswith("ValueError: rank 1 sent what is no result: ")


def floods(rank: int, ready: str, gate: str) -> int:
    if rank == 1:
        tell(ready, "floods")
        with socket.socket(fileno=report()) as own:
            own.settimeout(TIMEOUT)  # who sends a value makes the socket of all ranks non-blocking
            while True:
                own.send(b"?" * 1000)
    pass_gate(gate)
    return 7


@pytest.mark.slow
def test_a_flood_holds_up_neither_values_nor_the_end(ready: Ready, gate: Gate) -> None:
    arguments = {rank: (rank, ready.address, gate.address) for rank in range(2)}
    with start_processes("flood", floods, arguments, start_method="fork") as group:
        ready.wait()
        gate.open()
        assert supervisor_of(group).mirror.workers[0].ended.wait(TIMEOUT)
        group.close(timeout=1)
        result = group.wait()
    assert result.return_values == {0: 7}
    assert result.outcomes[1].state == "stopped"


def floods_with_descriptors(_rank: int) -> bytes:
    null = of_path("/dev/null")
    for _ in range(400):
        try:
            send_to(report(), b"?", null * 250)
        except OSError as error:  # only root has more of them under way than it may have open
            assert error.errno == errno.ETOOMANYREFS  # noqa: PT017 - of one that may not be raised at all
    return b"x" * 20_000


@pytest.mark.slow
def test_a_flood_of_descriptors_leaves_the_launcher_some() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
    try:
        with start_processes("flood", floods_with_descriptors, {0: (0,)}, start_method="fork") as group:
            result = group.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert result.return_values == {0: b"x" * 20_000}


def shuts_down(rank: int, ready: str, gate: str) -> int:
    if rank == 1:
        with socket.socket(fileno=os.dup(report())) as own:
            own.shutdown(socket.SHUT_RDWR)
        tell(ready, "shut")
    pass_gate(gate)
    return 7


@pytest.mark.slow
def test_a_value_that_cannot_be_sent_is_not_taken_for_none(ready: Ready, gate: Gate) -> None:
    arguments = {rank: (rank, ready.address, gate.address) for rank in range(2)}
    with start_processes("shut", shuts_down, arguments, start_method="fork", settle=TIMEOUT) as group:
        ready.wait()
        gate.open(2)
        result = group.wait()
    shut = "the socket on which the launcher hears its workers has been shut down"
    said = f"BrokenPipeError: [Errno 32] the value cannot be returned: {shut}"
    assert {failure.message for failure in result.failures.values()} == {said}


@pytest.mark.slow
def test_a_launcher_is_waited_for_without_a_library(tmp_path: Path) -> None:
    """The function may leave nothing to import from: no file, or no right to read it."""
    text = """
import os, socket, sys, time
from phalanx._base import channels
from phalanx._engine import mp_parent, worker_messages
from phalanx._engine.worker.mp_child import Child

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
me = Child(mp_parent.ChildIdentities("spawn", [0]).state(0), 0, ours.fileno(), forked=False)
sys.path.clear()
del sys.modules["select"]
while worker_messages.send(ours.fileno(), b"x" * 1000, patience=0.001):
    pass
if os.fork() == 0:
    ours.close()
    time.sleep(0.2)
    body = b"x"
    while body and body != worker_messages.TRACKER:
        body, fds, _flags, _address = socket.recv_fds(theirs, 1 << 16, 1)
    time.sleep(0.2)
    with socket.socket(fileno=fds[0]) as asker:
        socket.send_fds(asker, [b"1"], [0])
    os._exit(0)
socket.setdefaulttimeout(0.1)
fd = me.ask()  # the socket is full: it is one for all workers, and the launcher may be busy
assert os.path.samestat(os.fstat(fd), os.fstat(0))
ours.close()
theirs.close()
"""
    done = run_script(tmp_path, text)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_launcher_that_reads_nothing_is_sent_what_fits() -> None:
    body = pack(b"x" * 28_000, b"", 5)
    ours, theirs = channels.pair()
    with closing(ours), closing(theirs):
        sent = 0
        while worker_messages.send(theirs.fileno(), body, patience=0.001):
            sent += 1
        assert sent > 2
        assert not send_at_once(theirs.fileno(), body)


def send_at_once(fd: int, body: bytes) -> bool:
    with socket.socket(fileno=os.dup(fd)) as own:
        try:
            return bool(own.send(body, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False


@pytest.mark.parametrize("where", ["setblocking", "settimeout", "sendmsg"])
def test_a_signal_that_meets_who_sends_leaves_the_socket_open(where: str) -> None:
    """A handler that raises may run after each call."""

    def interrupt(_frame: object, event: str, called: object) -> None:
        if event in ("c_return", "c_exception") and getattr(called, "__name__", "") == where:
            sys.setprofile(None)
            raise KeyboardInterrupt

    ours, theirs = channels.pair()
    with closing(ours), closing(theirs):
        while send_at_once(theirs.fileno(), b"x" * 1000):
            pass
        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                worker_messages.send(theirs.fileno(), b"x", patience=0.001)
        finally:
            sys.setprofile(None)
        assert theirs.getpeername() is not None


def nothing_to_return(_rank: int) -> NoReturn:
    attack(report(), "bad bytes")
    send_to(report(), b"R" + VALUE, [])
    os._exit(0)


def test_a_value_that_nobody_wants_is_not_looked_at() -> None:
    options: dict[str, Any] = {"nprocs": 1, "start_method": "fork"}
    from phalanx.spawn import start_processes as spawn

    context = spawn(nothing_to_return, **options)
    assert context is None
