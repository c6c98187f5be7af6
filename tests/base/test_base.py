"""The engine's small parts, each by itself: time, waiting, messages, exits, and what the kernel tells."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._base import channels, clock, linux, procfs
from phalanx._base.host_names import await_name, look_up
from phalanx._base.loop import READ, WRITE, Deadline, Deadlines, Loop, Pauses
from phalanx._base.process import Exit, Process, descends_from, lineage, reap_later, wait_all
from phalanx._base.threads import Latch
from tests.support.fake_clock import FakeClock
from tests.support.helpers import TIMEOUT, Ready, wait_gone
from tests.support.workers import run_script

# --- clock and deadlines


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["add", "cancel", "run"])), max_size=30))
def test_deadlines_come_due_in_order_and_equal_ones_as_they_came(steps: list[tuple[int, str]]) -> None:
    due, seen, live, now = Deadlines(), list[int](), dict[int, tuple[int, Deadline]](), 0
    for number, (value, step) in enumerate(steps):
        if step == "add":
            live[number] = now + value, due.add(now + value, lambda number=number: seen.append(number))  # type: ignore[misc]  # bound at once
        elif step == "cancel":
            for _at, deadline in [live.pop(each) for each in sorted(live)[value : value + 1]]:
                deadline.cancel()
                deadline.cancel()
        else:
            now += value
            expected = sorted(
                (number for number in live if live[number][0] <= now), key=lambda each: (live[each][0], each)
            )
            seen.clear()
            due.run(now)
            assert seen == expected
            for each in expected:
                live.pop(each)[1].cancel()
        assert due.next() == min((at for at, _deadline in live.values()), default=None)


def test_an_action_may_add_and_cancel_deadlines() -> None:
    seen: list[str] = []
    due = Deadlines()
    victim = due.add(2.0, lambda: seen.append("victim"))

    def act() -> None:
        victim.cancel()
        due.add(1.5, lambda: seen.append("added"))

    due.add(1.0, act)
    due.run(3.0)
    assert seen == ["added"]


# --- the loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    it = Loop()
    yield it
    it.close()
    it.close()


def test_a_latch_lets_all_waiters_through() -> None:
    latch = Latch()
    assert not latch
    assert not latch.wait(0)
    assert not latch.wait(0.001)
    through: list[bool] = []
    threads = [threading.Thread(target=lambda: through.append(latch.wait())) for _ in range(20)]
    for thread in threads:
        thread.start()
    latch.open()
    latch.open()
    for thread in threads:
        thread.join(TIMEOUT)
    assert through == [True] * 20
    assert latch
    assert latch.wait(1e300)


def test_a_latch_calls_actions_in_their_order() -> None:
    """One that is given while another thread calls the first of them, too; and one by an action itself."""
    latch, called = Latch(), list[str]()
    began, go_on = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        go_on.wait(TIMEOUT)
        latch.then(lambda: called.append("fourth"))
        called.append("first")

    latch.then(first)
    latch.then(lambda: called.append("second"))
    thread = threading.Thread(target=latch.open)
    thread.start()
    assert began.wait(TIMEOUT)
    latch.then(lambda: called.append("third"))
    assert not called
    go_on.set()
    thread.join(TIMEOUT)
    assert called == ["first", "second", "third", "fourth"]
    latch.then(lambda: called.append("at once"))
    assert called[-1] == "at once"


@pytest.mark.long
def test_a_signal_at_any_moment_of_a_wait_is_raised() -> None:
    """Neither what the handler raises (lost in `__del__`), nor descriptors, nor the wakeup descriptor of a host."""

    class Struck(Exception):  # noqa: N818 - not an error
        pass

    armed = False

    def strike(*_: object) -> None:
        if armed:
            raise Struck

    moments = random.Random(5)  # noqa: S311 - no secret
    before = signal.signal(signal.SIGALRM, strike)
    host, other = socket.socketpair()
    host.setblocking(False)
    other.setblocking(False)
    signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
    Latch().wait(0.001)  # what it imports
    descriptors = set(os.listdir("/proc/self/fd"))
    struck = 0
    try:
        for _ in range(3000):
            latch = Latch()
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(2e-6, 8e-5))
                latch.wait(1e-5)
                armed = False
            except Struck:
                armed = False
                struck += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False) == other.fileno()
            with contextlib.suppress(BlockingIOError):  # a full one would be warned of: who restores it cannot ask
                host.recv(4096)
            assert set(os.listdir("/proc/self/fd")) == descriptors
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, before)
        host.close()
        other.close()
    assert struck > 100


@pytest.mark.slow
def test_no_signal_is_too_late_to_end_a_wait() -> None:
    """The signal is sent when the main thread lets go of the interpreter: just before it blocks."""

    class StopWaitingError(Exception):
        pass

    def raise_(_number: int, _frame: object) -> None:
        raise StopWaitingError

    waiting = False
    rounds = 300

    def disturb() -> None:
        nonlocal waiting
        for _ in range(rounds):
            while not waiting:
                pass
            waiting = False
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(rounds):
            latch = Latch()
            with pytest.raises(StopWaitingError):  # noqa: PT012 - the flag must be set as late as can be
                waiting = True
                latch.wait(TIMEOUT)
    finally:
        sys.setswitchinterval(interval)
        thread.join(TIMEOUT)
        signal.signal(signal.SIGUSR1, before)


def test_a_wait_passes_signals_to_a_hosts_wakeup_descriptor() -> None:
    """An event loop of asyncio, say, whose callback waits for a group."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.signal(signal.SIGUSR1, lambda *_: latch.open())
    signal.set_wakeup_fd(writer)
    try:
        latch = Latch()
        threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        assert latch.wait(TIMEOUT)
        assert os.read(reader, 100) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(-1) == writer
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
        os.close(reader)
        os.close(writer)


def test_calls_from_other_threads_arrive_in_order(loop: Loop) -> None:
    seen: list[tuple[int, int]] = []

    def talk(me: int) -> None:
        for number in range(500):
            loop.call(lambda number=number: seen.append((me, number)))  # type: ignore[misc]  # bound at once

    threads = [threading.Thread(target=talk, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    deadline = clock.now() + TIMEOUT
    while len(seen) < 2000 and clock.now() < deadline:
        loop.after(1.0, lambda: None)
        loop.once()
    for thread in threads:
        thread.join()
    for me in range(4):
        assert [number for who, number in seen if who == me] == list(range(500))


def test_a_call_to_a_closed_loop_is_dropped(loop: Loop) -> None:
    loop.close()
    loop.call(lambda: pytest.fail("nobody is there to call"))


def test_a_loop_stops_after_the_round(loop: Loop) -> None:
    seen: list[str] = []
    loop.call(loop.stop)
    loop.call(lambda: seen.append("the same round"))
    loop.run()
    assert seen == ["the same round"]


def test_descriptors_are_served_in_the_order_of_their_events(loop: Loop) -> None:
    seen: list[int] = []
    pipes = [os.pipe() for _ in range(10)]
    try:
        for place, (read, _write) in enumerate(pipes):
            loop.watch(read, lambda _events, place=place: seen.append(place))  # type: ignore[misc]  # bound at once
        order = [7, 2, 9, 0, 4]
        for place in order:
            os.write(pipes[place][1], b"x")
        loop.once()
        assert seen == order
    finally:
        for read, write in pipes:
            loop.forget(read)
            os.close(read)
            os.close(write)


def test_a_descriptor_forgotten_in_the_same_round_is_not_served(loop: Loop) -> None:
    seen: list[str] = []
    (first, to_first), (second, to_second) = os.pipe(), os.pipe()
    try:

        def serve(_events: int) -> None:
            seen.append("first")
            loop.forget(second)
            loop.forget(second)

        loop.watch(first, serve)
        loop.watch(second, lambda _events: seen.append("second"))
        os.write(to_first, b"x")
        os.write(to_second, b"x")
        loop.once()
        assert seen == ["first"]
    finally:
        loop.forget(first)
        for fd in (first, to_first, second, to_second):
            os.close(fd)


def test_what_is_watched_for_can_change(loop: Loop) -> None:
    seen: list[int] = []
    read, write = os.pipe()
    try:
        loop.watch(write, seen.append, 0)
        loop.after(0.0, lambda: None)
        loop.once()
        assert seen == []
        loop.change(write, WRITE)
        loop.once()
        assert seen == [WRITE]
        assert READ != WRITE
    finally:
        loop.forget(write)
        os.close(read)
        os.close(write)


def test_a_deadline_ends_the_wait(loop: Loop) -> None:
    seen: list[str] = []
    loop.after(0.01, lambda: seen.append("later"))
    loop.at(clock.now() - 5, lambda: seen.append("long due")).cancel()
    loop.at(clock.now() - 1, lambda: seen.append("due"))
    loop.once()
    assert seen in (["due"], ["due", "later"])  # on a machine that is busy, both are due by now
    if len(seen) == 1:
        loop.once()
    assert seen == ["due", "later"]


@pytest.mark.slow
def test_a_stop_is_a_pause_after_which_nothing_is_waited_for() -> None:
    """What was due meanwhile is done at once, whatever was left of the wait. What callbacks take is no pause."""
    reader, writer = os.pipe()
    seconds, busy, stopped = 1.0, 0.4, 0.5
    pid = os.fork()
    if pid == 0:
        try:
            it, fake = Loop(), FakeClock(clock.now())
            assert not it.pauses
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(clock, "now", fake)  # a machine that is busy makes no pause by this one
                it.call(lambda: fake.advance(busy))
                it.after(busy / 2, lambda: None)
                it.once()
            assert not it.pauses
            assert it.waited_until - it.waited_from < busy
            it.after(seconds, it.stop)
            os.write(writer, b".")
            it.run()
            os.write(writer, str(it.pauses.lost(0)).encode())
        finally:
            os._exit(0)
    try:
        os.close(writer)
        assert os.read(reader, 1) == b"."
        due = clock.now() + seconds
        while procfs.Stat(pid).state != "S":  # it waits
            assert clock.now() < due
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        threading.Event().wait(due + stopped + 0.2 - clock.now())
        os.kill(pid, signal.SIGCONT)
        while wait_gone([pid], seconds * 0.7):
            assert procfs.Stat(pid).state != "S"  # it may wait for a processor, and for nothing else
        assert float(os.read(reader, 100)) >= stopped
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
def test_a_long_pause_is_not_forgotten_for_many_short_ones() -> None:
    pauses = Pauses()
    pauses.note(100.0, 101.0, 700.0)
    moment = 700.0
    for _ in range(3000):
        pauses.note(moment, moment + 0.94, moment + 1)
        moment += 1
    assert len(pauses._all) <= 256
    assert pauses.lost(0.0) == pytest.approx(600 + 3000 * 0.06)
    assert pauses.lost(moment - 1000) == pytest.approx(1000 * 0.06, rel=0.1)
    assert pauses.lost(moment - 10) == pytest.approx(10 * 0.06, rel=0.1)


def test_who_was_not_heard_is_owed_the_time_since() -> None:
    pauses = Pauses()
    assert pauses.owed(5.0, 1.0, 9.0) == 4.0
    assert pauses.owed(8.96, 1.0, 9.0) == 0.0
    assert pauses.owed(0.5, 1.0, 9.0) == 0.0
    pauses.note(1.0, 2.0, 9.0)
    assert pauses.owed(0.5, 1.0, 9.0) == 8.0
    assert pauses.owed(5.0, 1.0, 9.0) == 4.0


def test_who_attends_to_a_moment_waits_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a pause before it is seen; and after it, nothing is attended to."""
    fake, waits = FakeClock(100.0), list[float]()

    def wait(_epoll: object, seconds: float, _most: int) -> list[tuple[int, int]]:
        waits.append(seconds)
        fake.advance(seconds)
        return []

    monkeypatch.setattr(clock, "now", fake)
    monkeypatch.setattr("phalanx._base.loop.wait_promptly", wait)
    it = Loop()
    try:
        it.after(0.5, it.stop)
        it.watch_for_pauses(100.4375)
        it.run()
    finally:
        it.close()
    assert waits == [0.0546875] * 8 + [0.0625]  # an eighth at a time, and the rest at once


def test_who_waits_between_the_two_clocks_makes_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock began at 1000 s of the other, and a second passes with each look at one of them."""
    seconds = itertools.count(100.0)
    monkeypatch.setattr(clock, "now", lambda: next(seconds))
    monkeypatch.setattr(clock, "wall", lambda: 1000 + next(seconds))
    assert clock.from_wall(1150.0) == 151.0
    assert clock.to_wall(150.0) == 1151.0


# --- messages


@pytest.fixture
def ends() -> Iterator[tuple[channels.Channel, channels.Channel]]:
    ours, theirs = (channels.Channel(sock) for sock in channels.pair())
    yield ours, theirs
    ours.close()
    theirs.close()


def receive(channel: channels.Channel) -> tuple[channels.Message, list[int]]:
    received = channel.receive()
    assert received is not None
    return received


def test_messages_keep_their_boundaries_and_their_order(ends: tuple[channels.Channel, channels.Channel]) -> None:
    ours, theirs = ends
    messages: list[channels.Message] = [("one", 1, 2.5, b"\0\xff", None, [("a", {"b": True})]), (), ("two", "ü" * 1000)]
    for message in messages:
        assert ours.send(message)
    assert [receive(theirs)[0] for _ in messages] == messages
    assert theirs.receive() is None


@pytest.mark.parametrize("size", [32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 1 << 20, 50 << 20])
def test_a_message_of_any_size_arrives(size: int, ends: tuple[channels.Channel, channels.Channel]) -> None:
    ours, theirs = ends
    message = ("big", b"x" * size)
    assert ours.send(message)
    assert receive(theirs) == (message, [])


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Let this process have 4,096 descriptors, which is more than most users' soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096:
        pytest.skip(f"only {hard} descriptors can be had")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("count", [1, 249, 250, 251, 500, 501, 1000])
@pytest.mark.parametrize("size", [0, 100_000])
def test_any_number_of_descriptors_arrives(
    count: int, size: int, ends: tuple[channels.Channel, channels.Channel]
) -> None:
    ours, theirs = ends
    message = ("fds", "x" * size)
    with contextlib.ExitStack() as stack:
        read, write = os.pipe()
        stack.callback(os.close, read)
        stack.callback(os.close, write)
        sent = []
        for number in range(count):  # each has an end of its own, told apart by its size
            fd = os.memfd_create("test")
            stack.callback(os.close, fd)
            os.truncate(fd, number)
            sent.append(fd)
        assert ours.send(message, sent)
        got, fds = receive(theirs)
        for fd in fds:
            stack.callback(os.close, fd)
        assert got == message
        assert [os.fstat(fd).st_size for fd in fds] == list(range(count))
        assert not any(map(os.get_inheritable, fds))
        assert theirs.receive() is None


def test_what_does_not_fit_is_kept_and_flushed(ends: tuple[channels.Channel, channels.Channel]) -> None:
    ours, theirs = ends
    sent = 0
    while ours.send(("number", sent, b"x" * 10_000)):
        sent += 1
    sent += 1  # the last was kept
    assert not ours.send(("number", sent, b"big" * 100_000))
    sent += 1
    assert not ours.flush()
    numbers: list[object] = []
    while len(numbers) < sent:
        while (received := theirs.receive()) is not None:
            numbers.append(received[0][1])
        ours.flush()
    assert numbers == list(range(sent))
    assert ours.flush()


def test_the_other_end_is_gone(ends: tuple[channels.Channel, channels.Channel]) -> None:
    ours, theirs = ends
    assert ours.send(("last words",))
    ours.close()
    assert receive(theirs) == (("last words",), [])
    for _ in range(2):
        with pytest.raises(channels.Closed):
            theirs.receive()
    with pytest.raises(channels.Closed):
        theirs.send(("anybody?", b"x" * 100_000))


def test_a_channel_that_is_closed_lets_go_of_all(ends: tuple[channels.Channel, channels.Channel]) -> None:
    # What was kept, and descriptors of a message of which the rest has not come: the leak check counts them.
    ours, theirs = ends
    while ours.send(("full", b"x" * 30_000)):
        pass
    ours.send(("big", b"x" * 100_000))
    ours.close()
    while True:
        try:
            assert theirs.receive() is not None
        except channels.Closed:
            break


def test_a_message_is_waited_for_until_a_moment(ends: tuple[channels.Channel, channels.Channel]) -> None:
    ours, theirs = ends
    reader, writer = os.pipe()
    try:
        with pytest.raises(TimeoutError):
            theirs.receive_by(clock.now(), [reader, -1])
        os.write(writer, b"x")
        assert theirs.receive_by(None, [reader]) is None
        assert ours.send(("it comes first",))
        assert theirs.receive_by(None, [reader]) == (("it comes first",), [])
        later = threading.Timer(0.01, ours.send, [("later",)])
        later.start()
        assert theirs.receive_by(clock.now() + TIMEOUT) == (("later",), [])
        later.join()
        ours.close()
        with pytest.raises(channels.Closed):
            theirs.receive_by(None, [reader])
    finally:
        os.close(reader)
        os.close(writer)


# --- exits


@pytest.mark.parametrize(
    "status, returncode, ok, number",
    [
        (0, 0, True, None),
        (3 << 8, 3, False, None),
        (255 << 8, 255, False, None),
        (9, -9, False, 9),
        (11 | 0x80, -11, False, 11),
    ],
)
def test_a_wait_status_is_read(status: int, returncode: int, ok: bool, number: int | None) -> None:
    it = Exit.of_status(status)
    assert (it.returncode, it.ok, it.signal) == (returncode, ok, number)
    assert it == Exit(returncode)
    assert hash(it) == hash(Exit(returncode))
    assert it != Exit(returncode + 1)
    assert it != returncode
    assert repr(it) == f"Exit({returncode})"


# --- the kernel


def test_the_stat_of_a_process_with_a_wicked_name(ready: Ready) -> None:
    name = "a) R (b"
    code = f"import ctypes, signal; ctypes.CDLL(None).prctl(15, {name.encode()!r}); {ready.python()}; signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        ready.wait()
        stat = procfs.Stat(process.pid)
        assert (stat.pid, stat.comm, stat.parent) == (process.pid, name, os.getpid())
        assert (stat.group, stat.session) == (process.pid, process.pid)
        assert stat.state in "SR"
        assert stat.start >= procfs.Stat(os.getpid()).start
        assert process.pid in procfs.children(os.getpid())
        assert process.pid in {other.pid for other in procfs.processes()}
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert procfs.Stat(process.pid).state == "Z"
        assert process.pid in procfs.children(os.getpid())
    with pytest.raises(ProcessLookupError):
        procfs.Stat(process.pid)
    assert process.pid not in procfs.children(os.getpid())


def test_a_process_is_held_only_if_it_is_the_one_that_is_meant() -> None:
    me = procfs.Stat(os.getpid())
    with Process(me.pid, start=me.start, parent=me.parent) as process:
        assert process.fileno() == process.pidfd >= 0
        assert not process.has_exited()
    assert process.fileno() == -1
    process.close()
    before = sorted(os.listdir("/proc/self/fd"))
    for wrong in ({"start": me.start + 1}, {"parent": me.pid}):
        with pytest.raises(ProcessLookupError, match="another process"):
            Process(me.pid, **wrong)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_signal_reaches_the_process_that_is_held_or_nobody(ready: Ready) -> None:
    code = f"{ready.python()}; import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code]) as child, Process(child.pid) as process:
        ready.wait()
        assert not wait_all([process], 0)
        process.signal(signal.SIGTERM)
        assert process.wait(TIMEOUT)
        assert process.has_exited()  # and is a zombie: its pid is still its own
        process.signal(signal.SIGKILL)
        child.wait()
        assert process.has_exited()
        with pytest.raises(ProcessLookupError):
            process.signal(signal.SIGKILL)


def test_who_cannot_load_what_reaps_later_goes_on(tmp_path: Path) -> None:
    """No file can be opened to import from when no descriptor is left."""
    text = """
import sys
import phalanx._base
from phalanx._base import process

sys.path.clear()
phalanx._base.__path__.clear()
assert "phalanx._base.interrupts" not in sys.modules
process.reap_later(lambda: None)
"""
    done = run_script(tmp_path, text)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_hosts_handler_raises_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TimeoutError, say, which is an OSError."""

    def ring(_number: int, _frame: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(threading.Thread, "start", lambda _thread: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(TimeoutError):
            reap_later(lambda: None)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_processes_above_one_are_found() -> None:
    above = [stat.pid for stat in lineage(os.getpid())]
    assert above[:2] == [os.getpid(), os.getppid()]
    assert descends_from(os.getpid(), os.getppid())
    assert not descends_from(os.getppid(), os.getpid())
    assert list(lineage(0)) == []
    assert list(lineage(1 << 22)) == []  # beyond every pid


def test_children_of_every_thread_are_found(ready: Ready) -> None:
    started: list[subprocess.Popen[bytes]] = []
    stay = threading.Event()

    def launch() -> None:
        started.append(subprocess.Popen([sys.executable, "-c", f"{ready.python()}; import signal; signal.pause()"]))
        stay.wait(TIMEOUT)

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        [pid] = ready.pids()
        assert pid in procfs.children(os.getpid())
    finally:
        stay.set()
        thread.join()
        for process in started:
            process.kill()
            process.wait()


def test_a_process_that_is_not_there_has_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert procfs.children(process.pid) == []
    assert procfs.environ(process.pid) == []


def test_the_environment_of_another_process(ready: Ready) -> None:
    code = f"{ready.python()}; import signal; signal.pause()"
    env = {"PATH": os.environ["PATH"], "ODD": "a=b\nc", "EMPTY": ""}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as process:
        ready.wait()
        assert {b"ODD=a=b\nc", b"EMPTY="} <= set(procfs.environ(process.pid))
        process.kill()


def in_a_fork(check: Callable[[], bool]) -> int:
    """The exit code of a fork that says 0 for yes."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_mapped_name_is_seen_in_forks_and_not_beyond_an_exec() -> None:
    name = "phalanx-test-page"

    def check() -> bool:
        before = sorted(os.listdir("/proc/self/fd"))
        linux.map_name(name)
        kept = sorted(os.listdir("/proc/self/fd")) == before
        forked = in_a_fork(lambda: name.encode() in procfs.read("/proc/self/maps")) == 0
        child = subprocess.run(["cat", "/proc/self/maps"], stdout=subprocess.PIPE, check=True)
        return kept and forked and name.encode() not in child.stdout

    assert in_a_fork(check) == 0
    assert name.encode() not in procfs.read("/proc/self/maps")


def test_a_prctl_that_there_is_not() -> None:
    with pytest.raises(OSError, match=r"prctl\(123456789, 0\)"):
        linux.prctl(123456789, 0)


def test_who_has_lost_its_parent_already_dies_at_once() -> None:
    def check() -> bool:
        linux.die_with_parent(1 << 22)  # beyond every pid
        return True

    assert in_a_fork(check) == -signal.SIGKILL


# --- Names that are not known yet, and a DNS that does not answer


ADDRESS = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)


def test_a_look_up_takes_no_longer_than_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, returned = threading.Event(), threading.Event()

    def dead(*_: Any, flags: int = 0, **__: Any) -> Any:
        if flags:
            raise socket.gaierror
        answers.wait(30)
        returned.set()
        return ADDRESS

    monkeypatch.setattr(socket, "getaddrinfo", dead)
    with pytest.raises(TimeoutError, match=r"its name was not resolved within 0\.01 s"):
        look_up("slow.invalid", 1, seconds=0.01)
    answers.set()
    assert returned.wait(30)


def test_a_name_that_is_published_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    said: list[str] = []

    def later(host: str, *_: Any, flags: int = 0, **__: Any) -> Any:
        asked.append(host)
        if flags or len(asked) < 4:  # a look-up of a name asks twice: whether it is an address, first
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ADDRESS

    monkeypatch.setattr(socket, "getaddrinfo", later)
    await_name("pod-0.train", 30.0, Latch(), lambda: said.append("waits"))
    assert (len(asked), said) == (4, ["waits"])


def test_the_wait_for_a_name_is_bounded_and_can_be_ended() -> None:
    over = Latch()
    with pytest.raises(socket.gaierror):
        await_name("no name", 30.0, over, over.open)
    with pytest.raises(socket.gaierror):
        await_name("no name", 0.1, Latch(), lambda: pytest.fail("it waits"))
