"""The table of deadlines: both of its ends, in one and in several processes, and when the watcher is woken."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from phalanx._base import clock, loop, procfs
from phalanx._timers import client, layout
from phalanx._timers import table as table_module
from phalanx._timers.client import Seat
from phalanx._timers.escalation import AT_ONCE, Escalation, TimerScheduler
from phalanx._timers.hang import Hang, Timer
from phalanx._timers.layout import FIRST, NEVER, SLOTS, TEXT_LIMIT, TEXT_SIZE, decode, encode
from phalanx._timers.table import TimerTable
from tests.support import hammer
from tests.support.helpers import TIMEOUT
from tests.support.workers import run_script

ALL = NEVER - 1
"""A moment at which every deadline is over."""

TEXT = encode("load", "train.py:7")


@pytest.fixture
def table() -> Iterator[TimerTable]:
    it = TimerTable(8)
    yield it
    it.close()


def seat_at(table: TimerTable, rank: int = 0) -> Seat:
    return Seat(f"{table.address}:{rank}")


def due(table: TimerTable, now: int = ALL) -> list[Timer]:
    return [timer for timer in map(table.read, table.look(now)[0]) if timer is not None]


def news(table: TimerTable) -> list[tuple[int, int, int]]:
    table.look(0)
    return table.newly_armed()


def armed(table: TimerTable) -> list[tuple[str, int]]:
    return [(timer.scope, timer.deadline) for timer in due(table)]


def rung(table: TimerTable) -> bool:
    """Whether somebody has rung; it is quiet afterwards."""
    poll = select.poll()
    poll.register(table.fileno(), select.POLLIN)
    found = bool(poll.poll(0))
    table.clear_bell()
    return found


class Child:
    """A fork that holds a seat: it says so, and obeys until the end of the test."""

    def __init__(self, work: Callable[[Child], None]) -> None:
        self._in, self._out = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(work)
        os.close(self._in[0])
        os.close(self._out[1])
        self._left = False

    def _be(self, work: Callable[[Child], None]) -> NoReturn:
        try:
            os.close(self._in[1])
            work(self)
        finally:
            os._exit(0)

    def say(self) -> None:
        os.write(self._out[1], b".")

    def wait(self) -> None:
        """In the child: until it is told to go on, or the test is over."""
        os.read(self._in[0], 1)

    def stay(self) -> None:
        """In the child: do nothing else."""
        self.say()
        self.wait()

    def go_on(self) -> None:
        os.write(self._in[1], b".")

    def end(self, number: int = signal.SIGKILL) -> None:
        if not self._left:
            self._left = True
            os.kill(self.pid, number)
            os.waitpid(self.pid, 0)
            os.close(self._in[1])
            os.close(self._out[0])

    def __enter__(self) -> Self:
        assert select.select([self._out[0]], [], [], TIMEOUT)[0]
        assert os.read(self._out[0], 1)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def holder_of(table: TimerTable, scope: str, deadline: int = 5, rank: int = 0) -> Child:
    """A process that has one timer."""

    def work(child: Child) -> None:
        seat_at(table, rank).arm(deadline, 3, encode(scope, "x.py:1"))
        child.say()
        child.wait()

    return Child(work)


# --- seats


def test_what_is_stored_is_seen(table: TimerTable) -> None:
    with seat_at(table, 3) as seat:
        slot = seat.arm(50, 20, TEXT, thread=77)
        assert table.look(49) == ([], 50)
        assert table.look(50) == table.look(60) == ([(3, slot, 50)], NEVER)
        (timer,) = due(table)
        assert timer == Timer(3, slot, 50, 20, 77, "load", "train.py:7")
        assert table.is_still_set(timer)
        assert table.holder(3) == os.getpid()
        assert table.rank(3) == 3
        seat.disarm(slot)
        assert not table.is_still_set(timer)
        assert table.read((3, slot, 50)) is None
        assert table.look(ALL) == ([], NEVER)
    assert table.holder(2) == 0


def test_a_slot_is_used_again_with_another_text(table: TimerTable) -> None:
    with seat_at(table) as seat:
        slot = 0
        for number in range(50):
            slot = seat.arm(number, 1, encode("s" * number, f"f.py:{number}"))
            assert armed(table) == [("s" * number, number)]
            seat.disarm(slot)
        assert slot == FIRST


def test_processes_of_one_rank_have_seats_of_their_own(table: TimerTable) -> None:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(holder_of(table, f"{number}", rank=1)) for number in range(3)]
        timers = due(table)
        assert sorted(timer.scope for timer in timers) == ["0", "1", "2"]
        assert {table.holder(timer.seat) for timer in timers} == {child.pid for child in children}
        assert [table.rank(timer.seat) for timer in timers] == [1, 1, 1]
        assert {timer.seat for timer in timers} == {1, 2, 3}


def test_when_all_seats_are_taken_the_next_one_is_told_so() -> None:
    table = TimerTable(2)
    with contextlib.closing(table), holder_of(table, "a"), holder_of(table, "b") as second:
        with pytest.raises(OSError, match="2 processes of the group have timers already: that is the most") as caught:
            seat_at(table)
        assert caught.value.errno == errno.ENOSPC
        second.end()
        with seat_at(table) as seat:
            seat.arm(9, 1, TEXT)
            assert ("load", 9) in armed(table)


def test_the_most_timers(table: TimerTable) -> None:
    with seat_at(table) as seat:
        slots = [seat.arm(number, 1, TEXT) for number in range(1, SLOTS + 1)]
        assert len(set(slots)) == SLOTS
        with pytest.raises(RuntimeError, match="1024 timers run in this process: that is the most"):
            seat.arm(5, 1, TEXT)
        over, then = table.look(500)
        assert len(over) == 500
        assert then == 501
        seat.disarm(slots[0])
        assert seat.arm(5, 1, TEXT) == slots[0]
        for slot in slots:
            seat.disarm(slot)
        assert table.look(ALL) == ([], NEVER)


def test_what_is_given_after_the_end_goes_nowhere(table: TimerTable) -> None:
    seat = seat_at(table)
    slot = seat.arm(5, 1, TEXT)
    seat.close()
    seat.close()
    seat.disarm(slot)
    seat.disarm(seat.arm(1, 1, encode("other", "")))
    seat.beat(1)
    with pytest.raises(RuntimeError, match=GONE):
        seat.arm(clock.now_ns() + clock.NS, clock.NS, TEXT)
    with seat_at(table):
        assert armed(table) == []


@pytest.mark.parametrize("address", ["", "1:2:3", "1:2:3:x", "1:2:3:4:5"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="PHALANX_TIMERS: expected PID:MEMORY:BELL:RANK, got '"):
        Seat(address)


def test_a_table_that_is_not_there(table: TimerTable, tmp_path: Path) -> None:
    address = f"{table.address}:0"
    pid, memory, bell = table.address.split(":")
    (tmp_path / "file").write_bytes(bytes(100))
    with open(tmp_path / "file", "r+b") as file, pytest.raises(OSError, match="that is no table of timers"):
        Seat(f"{pid}:{file.fileno()}:{bell}:0")
    with open(tmp_path / "empty", "w+b") as file, pytest.raises(OSError, match="cannot be opened"):
        Seat(f"{pid}:{file.fileno()}:{bell}:0")
    table.close()
    with pytest.raises(OSError, match=rf"cannot be opened \(/proc/{pid}/fd/{memory}: .*\); is the launcher there\?"):
        Seat(address)


def test_nobody_can_cut_the_memory_short(table: TimerTable) -> None:
    with seat_at(table) as seat, pytest.raises(PermissionError):
        os.ftruncate(seat._fds[0], 8)


def test_closed_descriptors_get_no_byte_into_other_files(table: TimerTable, tmp_path: Path) -> None:
    seat = seat_at(table)
    fds = list(seat._fds)
    path = tmp_path / "precious"
    path.touch()
    for fd in fds:
        os.close(fd)
    slot = seat.arm(1, 1, TEXT)
    assert rung(table)
    seat.disarm(slot)
    with open(path, "wb") as file:
        for fd in set(fds) - {file.fileno()}:
            os.dup2(file.fileno(), fd)
        seat.arm(1, 1, TEXT)
        assert rung(table)
        assert path.read_bytes() == b""
        seat.close()
        for fd in set(fds) - {file.fileno()}:
            os.close(fd)  # it was left alone


def test_a_program_that_closes_all_keeps_its_seat(table: TimerTable) -> None:
    """Its lock is gone; nobody else may take the seat, for its timers would be theirs."""

    def close_all(child: Child) -> None:
        seat = seat_at(table)
        for fd in seat._fds:
            os.close(fd)
        seat.arm(5, 3, encode("without a lock", ""))
        child.say()
        child.wait()
        os.execv("/bin/sleep", ["sleep", "1000"])

    def wait_for_exec(pid: int) -> None:
        while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
            os.sched_yield()

    with Child(close_all) as child:
        assert table.holder(0) == child.pid
        with holder_of(table, "the next one") as other:
            assert [table.holder(timer.seat) for timer in due(table)] == [child.pid, other.pid]
        child.go_on()
        wait_for_exec(child.pid)
        assert table.holder(0) == 0  # another program, which has no timers
        with seat_at(table):
            assert table.holder(0) == os.getpid()


def test_timers_of_a_seat_are_not_its_next_holders(table: TimerTable, monkeypatch: pytest.MonkeyPatch) -> None:
    with holder_of(table, "a") as child:
        child.end()
    (left,) = due(table)

    def work(child: Child) -> None:
        def told(*_args: object, **_options: object) -> NoReturn:
            child.say()
            child.wait()
            os._exit(0)

        monkeypatch.setattr(Seat, "_is_used_without_lock", told)  # it has the lock, and has not come to clear the seat
        seat_at(table)

    with Child(work):
        assert left.seat == 0
        assert table.is_still_set(left)
        assert table.holder(0) == 0


# --- the watcher's process forks, and ends

GONE = "nobody watches timers any more: their server has stopped"


def test_a_fork_of_the_tables_maker_holds_none_of_it(table: TimerTable) -> None:
    fds = [*table._fds]
    address = table.address

    def work(child: Child) -> None:
        assert not [fd for fd in fds if client.file_identity(fd) != (0, 0)]
        assert table.address == address
        seat_at(table).arm(5, 3, encode("the child's", ""))
        table.close()  # the parent's is open
        child.say()
        child.wait()

    with Child(work):
        assert armed(table) == [("the child's", 5)]
        with seat_at(table) as seat:
            seat.wake_watcher()
        assert rung(table)


@pytest.mark.parametrize("copied", [True, False])
def test_a_client_that_rings_in_vain_is_told_and_lives(copied: bool, table: TimerTable) -> None:
    """The watcher was killed; or it has stopped, and a fork that C code has made, or another process, has its bell.

    A keeper that ends leaves the workers their time of grace.
    """
    other = TimerTable.from_descriptors((os.dup(table._fds[0]), os.dup(table._fds[1])), *table.size)
    handled: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _frame: handled.append(number))
    try:
        with seat_at(table) as seat:
            if copied:
                table.close()
            else:
                other.close()
                seat.wake_watcher()
                table.let_go()  # as the kernel does
            for disposition in (signal.getsignal(signal.SIGPIPE), signal.SIG_DFL):
                signal.signal(signal.SIGPIPE, disposition)
                with pytest.raises(RuntimeError, match=GONE):
                    seat.arm(5, 1, TEXT)
            assert len(seat.free) == SLOTS
    finally:
        signal.signal(signal.SIGPIPE, before)
        other.close()
    assert not handled
    assert not signal.sigpending()


# --- clients die


@pytest.mark.long
def test_a_table_that_is_hammered_kills_and_misses_nobody() -> None:
    """Forks, kills at any instruction, stops, and programs that are executed, beside some that hang."""
    assert set(hammer.hammer(40_000, 4, 1000)) == set(hammer.NAMES)


# --- the bell


def test_only_an_earlier_deadline_rings(table: TimerTable) -> None:
    with seat_at(table) as seat:
        table.publish(100)
        for deadline in (101, 100):
            seat.arm(deadline, 1, TEXT)
            assert not rung(table)
        seat.arm(99, 1, TEXT)
        assert rung(table)
        table.publish(NEVER)
        seat.arm(ALL, 1, TEXT)
        assert rung(table)
        table.publish(-5)
        seat.arm(1, 1, TEXT)
        assert not rung(table)


@pytest.mark.slow
def test_a_bell_that_is_full_keeps_nobody_waiting(table: TimerTable) -> None:
    with seat_at(table) as seat:
        for _ in range(70_000):
            seat.wake_watcher()
        assert rung(table)
        assert not rung(table)


def test_a_watcher_that_is_late_is_rung(table: TimerTable) -> None:
    with seat_at(table) as seat:
        now = 5 * layout.LATE
        for published, late in ((now - layout.LATE, False), (now - layout.LATE - 1, True)):
            table.publish(published)
            seat.disarm(seat.arm(now + 10, 10, TEXT))
            assert rung(table) == late


@pytest.mark.parametrize("way", ["beat", "rest", "arm"])
def test_a_heartbeat_is_missing_until_its_rank_is_heard_of(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look before a kill asks that, once more; another process of the rank will do, but for its rest."""
    moment = 1000
    monkeypatch.setattr(clock, "now_ns", lambda: moment)
    monkeypatch.setattr("fcntl.lockf", lambda *_args: None)  # the kernel knows locks by process, and this is one
    with contextlib.closing(TimerTable(2, hang=1e-6)) as table, seat_at(table) as seat:
        seat.beat(1)
        (late,) = due(table, 2000)
        assert table.is_still_set(late)
        moment = 2500
        with contextlib.nullcontext(seat) if way == "rest" else seat_at(table) as other:
            ways: dict[str, Callable[[], object]] = {
                "beat": lambda: other.beat(1),
                "rest": other.rest,
                "arm": lambda: other.arm(9000, 6500, TEXT),
            }
            ways[way]()
            assert not table.is_still_set(late)


@pytest.mark.parametrize("hang", [1e10, float(sys.maxsize), 1e308])
def test_a_heartbeat_that_nobody_will_live_to_miss(hang: float) -> None:
    table = TimerTable(1, hang)
    with contextlib.closing(table), seat_at(table) as seat:
        seat.beat(1)
        over, then = table.look(clock.now_ns())
        assert over == []
        assert then <= NEVER


# --- how far the table is in use


class Opcodes:
    """Calls something before instruction number ``at`` of a function, as a signal handler or another thread would."""

    def __init__(self, function: Any, at: int, what: Callable[[], object]) -> None:
        self.code = function.__code__
        self.left = at
        self.what = what

    def __call__(self, frame: Any, event: str, _arg: object) -> Any:
        if frame.f_code is not self.code:
            return None
        frame.f_trace_opcodes = True
        if event == "call" and sys.version_info[:2] == (3, 12):
            sys.settrace(self)  # it heeds the above from then on
        elif event == "opcode":
            self.left -= 1
            if self.left == 0:
                self.what()
        return self

    def __enter__(self) -> Self:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


def test_a_timer_set_in_the_midst_of_a_write_hides_none() -> None:
    """Nested as by a signal handler in the same thread; another thread may go on at the same places."""
    for at in range(1, 1000):
        table = TimerTable(1)
        with contextlib.closing(table), seat_at(table) as seat:
            for _ in range(3):
                seat.arm(1000, 1, TEXT)
            inner: list[int] = []
            with Opcodes(Seat.describe, at, lambda: inner.extend(seat.arm(2, 1, TEXT) for _ in range(70))) as opcodes:  # noqa: B023 - called at once
                outer = seat.arm(1, 1, TEXT)
            assert {slot for _, slot, _ in table.look(10)[0]} == {outer, *inner}, at
        if opcodes.left > 0:
            assert at > 10, "no instruction was ever seen"
            return
    pytest.fail("it has no end")


@pytest.mark.parametrize("seats", [1, 16, 17, 16384, 20000])
def test_every_seat_is_looked_at(seats: int) -> None:
    table = TimerTable(seats)
    with contextlib.closing(table):
        for rank in sorted({0, seats // 2, seats - 1}):
            with seat_at(table, rank) as seat:
                slots = [seat.arm(5, 1, TEXT) for _ in range(SLOTS)]
                assert table.look(5)[0] == [(rank, slot, 5) for slot in slots]
        assert os.fstat(table.descriptors[0]).st_blocks * 512 < 4 << 20, "what nobody sits in takes no memory"


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from phalanx._timers.client import Seat
from phalanx._timers.table import TimerTable
try:
    table = TimerTable(16384)
except OSError as error:
    print(error)
else:
    with Seat(f"{table.address}:5000") as seat:
        seat.arm(5, 1, b"load")
        print(table.seats, len(table.look(5)[0]))
"""


@pytest.mark.parametrize(
    "limit, said", [(64 << 20, r"\d\d\d 1\n"), (1 << 10, r"\[Errno 27\] RLIMIT_FSIZE is too low .*\n")]
)
def test_a_limit_on_files_makes_the_table_smaller(limit: int, said: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, LIMITED, str(limit))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(said, done.stdout)


# --- texts


@pytest.mark.slow
@given(st.text(), st.text())
def test_a_text_fits_and_names_what_it_is_of(scope: str, place: str) -> None:
    text = encode(scope, place)
    assert len(text) <= TEXT_SIZE
    first, second = (part.encode("utf-8", "replace").decode() for part in (scope, place))
    if "\x1f" not in first and len((first + second).encode()) < TEXT_LIMIT:
        assert decode(text) == (first, second)


@pytest.mark.slow
@given(st.integers(0, 600), st.integers(0, 600), st.sampled_from("aä€😀"))
def test_of_a_long_text_the_ends_are_kept(many: int, more: int, letter: str) -> None:
    text = encode("<" + letter * many + ">", letter * more + "/train.py:41")
    assert len(text) <= TEXT_SIZE
    scope, place = decode(text)
    assert scope.startswith("<")
    assert scope.endswith(">")
    assert place.endswith("/train.py:41")


@given(st.binary())
def test_any_bytes_can_be_read(data: bytes) -> None:
    assert all(isinstance(part, str) for part in decode(data))


# --- the scheduler, against a model


class FakeLoop:
    """A loop that moves when it is told, on a clock of whole milliseconds."""

    def __init__(self) -> None:
        self.watched: dict[int, Callable[[int], None]] = {}
        self.calls: list[Callable[[], None]] = []
        self.deadlines: list[tuple[int, Entry]] = []
        self.waited_from, self.waited_until = float("inf"), -float("inf")
        self.pauses = loop.Pauses()

    def wait(self, began: int, until: int, now: int) -> None:
        """A wait that was to end at ``until``, and has ended now."""
        self.waited_from, self.waited_until = began / clock.NS, now / clock.NS
        self.pauses.note(self.waited_from, until / clock.NS, self.waited_until)

    def watch_for_pauses(self, moment: float) -> None:
        """Tests say when a wait ends."""

    def watch(self, fd: int, callback: Callable[[int], None]) -> None:
        self.watched[fd] = callback

    def forget(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def call(self, action: Callable[[], None]) -> None:
        self.calls.append(action)

    def at(self, moment: float, action: Callable[[], None]) -> Entry:
        entry = Entry(action)
        self.deadlines.append((round(moment * 1000) * 1_000_000, entry))
        return entry

    def after(self, seconds: float, action: Callable[[], None]) -> Entry:
        return self.at(clock.now() + seconds, action)

    def next(self) -> int | None:
        self.deadlines = [each for each in self.deadlines if each[1].action is not None]
        return min((at for at, _ in self.deadlines), default=None)

    def serve(self, now: int) -> None:
        """Everything that is to be done at a moment."""
        while True:
            ready = select.select(list(self.watched), [], [], 0)[0]
            for fd in ready:
                self.watched[fd](1)
            calls, self.calls = self.calls, []
            for action in calls:
                action()
            due = [entry for at, entry in self.deadlines if at <= now and entry.action is not None]
            for entry in due:
                if entry.action is not None:  # else an earlier one has called it off
                    entry.action()
                    entry.action = None
            if not (ready or calls or due):
                return


class Entry:
    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


MS = 1_000_000
HANG = 40


class Watching(RuleBasedStateMachine):
    """Two clients, a scheduler, and what should be seen: each expiry once, and at its very moment."""

    ranks = 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.now = 1000 * MS
        self.patch.setattr(clock, "now_ns", lambda: self.now)
        self.table = TimerTable(2, HANG / 1000)
        self.seats = [seat_at(self.table, self.ranks[0])]
        # The kernel knows locks by process, and this is one: so the second client has its seat by hand.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fcntl.lockf", lambda *_args: None)
            self.seats.append(seat_at(self.table, self.ranks[1]))
        self.loop = FakeLoop()
        self.seen: list[tuple[int, int, int, int]] = []
        self.expected: list[tuple[int, int, int, int]] = []
        self.running: dict[tuple[int, int], int] = {}
        self.beats: dict[int, int] = {}
        self.resting: set[int] = set()
        self.left: dict[int, int] = {}
        self.told: dict[tuple[int, int, int], int] = {}
        self.rearming: dict[tuple[int, int], int] = {}
        self.scheduler = TimerScheduler(self.table, self.loop, self.on_expired)  # type: ignore[arg-type]  # a loop for this test

    @initialize()
    def open(self) -> None:
        self.scheduler.open()
        self.settle()

    def on_expired(self, timers: list[Timer]) -> None:
        self.seen += [(timer.seat, timer.slot, timer.deadline, self.now) for timer in timers]

    # the model

    def due(self) -> Iterator[tuple[int, int, int]]:
        for (seat, slot), deadline in self.running.items():
            if deadline <= self.now:
                yield seat, slot, deadline
        for seat in self.beats:
            if seat in self.resting:
                continue
            of_rank = [other for other in (0, 1) if self.ranks[other] == self.ranks[seat]]
            own = [deadline for (other, _), deadline in self.running.items() if other in of_rank]
            times = [moments.get(other, 0) for moments in (self.beats, self.left) for other in of_rank]
            limit = max(times) + HANG * MS
            limit = max([limit, *own]) if limit <= self.now else limit
            if limit <= self.now:
                yield seat, 0, limit

    def settle(self) -> None:
        self.loop.serve(self.now)
        due = set(self.due())
        self.told = {key: moment for key, moment in self.told.items() if key in due}
        for key in due:
            if self.told.get(key, 0) <= self.now:
                self.told[key] = NEVER
                self.expected.append((*key, self.now))

    def later(self, moment: int) -> None:
        """Let time pass, moment by moment of either side."""
        while True:
            wakes = [*self.running.values(), *(beat + HANG * MS for beat in self.beats.values()), *self.told.values()]
            inside = [wake for wake in (*wakes, self.loop.next() or 0) if self.now < wake <= moment]
            if not inside:
                break
            self.now = min(inside)
            self.settle()
        self.now = moment
        self.settle()

    # what happens

    def store(self) -> None:
        self.later(self.now + MS)  # no two deadlines are equal in slot and moment

    @rule(seat=st.integers(0, 1), span=st.integers(0, 200))
    def take(self, seat: int, span: int) -> None:
        self.store()
        slot = self.seats[seat].arm(self.now + span * MS, span * MS, TEXT)
        self.running[seat, slot] = self.now + span * MS
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give(self, data: Any) -> None:
        self.store()
        seat, slot = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[seat, slot]
        self.seats[seat].disarm(slot)
        self.left[seat] = self.now
        if seat in self.beats:
            self.beats[seat] = self.now
        self.settle()

    @rule(seat=st.integers(0, 1))
    def beat(self, seat: int) -> None:
        self.seats[seat].beat(1)
        self.beats[seat] = self.now
        self.resting.discard(seat)
        self.settle()

    @rule(seat=st.integers(0, 1))
    def rest(self, seat: int) -> None:
        assert self.seats[seat].rest() == (seat in self.beats and seat not in self.resting)
        self.resting.add(seat)
        self.settle()

    @precondition(lambda self: self.told)
    @rule(data=st.data(), span=st.integers(0, 60))
    def rearm(self, data: Any, span: int) -> None:
        seat, slot, deadline = key = data.draw(st.sampled_from(sorted(self.told)))
        self.scheduler.rearm(Timer(seat, slot, deadline, 0, 0, "", ""), self.now + span * MS)
        self.told[key] = self.now + span * MS
        self.settle()

    @rule(span=st.integers(0, 150))
    def wait(self, span: int) -> None:
        self.later(self.now + span * MS)

    @invariant()
    def all_is_seen_once_and_at_once(self) -> None:
        assert sorted(self.seen) == sorted(self.expected)

    @invariant()
    def the_next_look_is_not_too_late(self) -> None:
        future = [deadline for deadline in self.running.values() if deadline > self.now]
        assert self.table._words[layout.HEAD_WAKE] <= min(future, default=NEVER)

    def teardown(self) -> None:
        self.scheduler.close()
        for seat in self.seats:
            seat.close()
        self.table.close()
        self.patch.undo()


class WatchingOneRank(Watching):
    """Both are of one rank, whose heartbeats are its own."""

    ranks = 0, 0


@pytest.mark.long
@pytest.mark.parametrize("kind", [Watching, WatchingOneRank])
def test_the_scheduler_sees_each_expiry_once_and_at_once(kind: type[Watching]) -> None:
    run_state_machine_as_test(kind, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))


def test_a_timer_set_while_the_scheduler_plans_is_seen(table: TimerTable) -> None:
    """The client still reads the old moment, which is earlier, and so does not ring."""
    loop = FakeLoop()
    now = clock.now_ns()
    due = now + 3600 * clock.NS
    scheduler = TimerScheduler(table, loop, pytest.fail)  # type: ignore[arg-type]  # as above
    publish = table.publish
    with seat_at(table) as seat, pytest.MonkeyPatch.context() as patch:

        def publish_late(moment: int) -> None:
            if not armed(table):
                seat.arm(due, due - now, TEXT)
            publish(moment)

        publish(now)
        patch.setattr(table, "publish", publish_late)
        scheduler.open()
        assert not rung(table)
        assert loop.next() == pytest.approx(due, abs=MS)
        assert table._words[layout.HEAD_WAKE] == due
        scheduler.close()


class Watched:
    """A scheduler on a clock of its own, and what it has seen."""

    def __init__(self, table: TimerTable, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000 * clock.NS
        monkeypatch.setattr(clock, "now_ns", lambda: self.now)
        self.loop = FakeLoop()
        self.seen: list[int] = []
        self.keys: list[tuple[int, int]] = []
        self.scheduler = TimerScheduler(
            table,
            self.loop,  # type: ignore[arg-type]  # as above
            self.on_expired,
            standing=lambda keys: [key[:2] for key in keys],
        )
        self.scheduler.open()
        self.loop.serve(self.now)

    def on_expired(self, timers: list[Timer]) -> None:
        self.seen += [timer.slot for timer in timers]
        self.keys += [(timer.seat, timer.slot) for timer in timers]

    def pass_until(self, second: float) -> None:
        """Time passes, with waits that end in time, until so many seconds after the beginning."""
        self.loop.serve(self.now)
        while self.now < (until := 1000 * clock.NS + round(second * clock.NS)):
            wake = min(self.loop.next() or NEVER, until)
            self.pass_by(max(0, wake - self.now) / clock.NS, max(0, wake - self.now) / clock.NS)

    def take(self, seat: Seat, seconds: float) -> int:
        span = int(seconds * clock.NS)
        return seat.arm(self.now + span, span, TEXT)

    def pass_by(self, seconds: float, planned: float | None) -> None:
        """Time passes in a wait that was to take so long, or, where it ended at once, in a callback of ours."""
        began, self.now = self.now, self.now + round(seconds * clock.NS)
        if planned is None:
            self.loop.wait(began, NEVER, began)
        else:
            self.loop.wait(began, began + round(planned * clock.NS), self.now)
        self.loop.serve(self.now)


@pytest.fixture
def watched(table: TimerTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    it = Watched(table, monkeypatch)
    yield it
    it.scheduler.close()


@pytest.mark.parametrize(
    "span, passes",
    [
        # However often it is stopped with the scheduler, a worker has its time once more.
        (50, [(3600, 50, False), (3600, 50, False), (3600, 50, False), (50, 50, True)]),
        # A short pause, within a part of a wait, puts a deadline off by as much.
        (50, [(6.3, 6, False), (43.7, 43.7, False), (0.3, 0.3, True)]),
        # One that ends just before a deadline is no hang.
        (4, [(3.9, 0.5, False), (0.1, 0.1, False), (3.9, 3.9, True)]),
        # What callbacks of ours have taken is nobody's pause.
        (50, [(52.5, None, True)]),
        (50, [(50.5, None, True)]),
    ],
)
def test_a_pause_puts_deadlines_off(
    span: float, passes: list[tuple[float, float | None, bool]], table: TimerTable, watched: Watched
) -> None:
    """Of each wait: what it took, what it was to take (None: it ended at once), and whether the timer is over then."""
    with seat_at(table) as seat:
        slot = watched.take(seat, span)
        seat.disarm(watched.take(seat, span + 10))
        watched.pass_by(0, 0)
        for number, (took, planned, over) in enumerate(passes):
            watched.pass_by(took, planned)
            assert watched.seen == ([slot] if over else [])
            if not over:
                rest = sum(passed for passed, *_ in passes[number + 1 :])
                assert (watched.loop.next() or NEVER) <= watched.now + rest * clock.NS + MS


@pytest.mark.parametrize("delay, spared", [(0.04, False), (0.5, True), (30, True)])
def test_a_timer_set_just_before_a_pause_has_its_time(
    delay: float, spared: bool, table: TimerTable, watched: Watched
) -> None:
    """No deadline was known then, so the wait was to last, and ends by the bell: it has not overrun."""
    began = watched.now
    with seat_at(table) as seat:
        watched.now += clock.NS
        slot = watched.take(seat, 0.01)
        watched.now += int(delay * clock.NS)
        watched.loop.wait(began, NEVER, watched.now)
        watched.loop.serve(watched.now)
        assert watched.seen == ([] if spared else [slot])
        watched.pass_by(0.01, 0.01)
        assert watched.seen == [slot]


@pytest.mark.parametrize("paused", [True, False])
def test_a_pause_in_a_block_puts_its_heartbeat_off(paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TimerTable(2, hang=10)
    watched = Watched(table, monkeypatch)
    with seat_at(table) as seat:
        seat.beat(1)
        watched.take(seat, 1000)
        watched.pass_by(0, 0)
        watched.pass_by(10, 10)
        watched.now += 590 * clock.NS
        watched.loop.wait(watched.now - 590 * clock.NS, watched.now - 490 * clock.NS if paused else NEVER, watched.now)
        watched.pass_by(400, 400)
        assert sorted(watched.seen) == ([] if paused else [0, FIRST])
        if paused:
            watched.pass_by(590, 590)
            assert sorted(watched.seen) == [0, FIRST]
    watched.scheduler.close()
    table.close()


# --- what is held

Script = list[tuple[float, str, float]]


@pytest.mark.parametrize(
    "script, expiries",
    [
        # A pause, which is said twice; a timer may be set within it.
        (
            [(0, "take", 10), (3, "pause", 1), (3, "pause", 1), (8, "take", 10), (53, "pause", 0), (53, "pause", 0)],
            [(60, "take"), (63, "take")],
        ),
        # While a process stands at a breakpoint, that alone expires.
        ([(0, "take", 10), (3, "stand", 20), (30, "go on", 0)], [(23, "stand"), (37, "take")]),
        ([(0, "beat", 0), (0, "stand", 3600), (3000, "go on", 0)], [(3010, "beat")]),
        # In a pause, that does not either, nor while somebody is attached.
        ([(0, "stand", 10), (5, "pause", 1), (50, "pause", 0)], [(55, "stand")]),
        ([(0, "stand", 10), (5, "attach", 0), (5000, "detach", 10)], [(5010, "stand")]),
        # What is held twice is put off once.
        *(
            ([(0, "take", 10), (a, "pause", 1), (b, "pause", 0), (c, "stand", 3600), (d, "go on", 0)], [(27, "take")])
            for a, b, c, d in ((5, 15, 3, 20), (3, 20, 5, 15), (3, 12, 8, 20), (8, 20, 3, 12))
        ),
    ],
)
def test_what_is_held_expires_later(
    script: Script, expiries: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At which second what happens, and for how long; and which timers expire when. Of two ranks, one stands."""
    with contextlib.closing(TimerTable(2, hang=10)) as table, seat_at(table) as seat:
        monkeypatch.setattr("fcntl.lockf", lambda *_args: None)  # the kernel knows locks by process, and this is one
        with seat_at(table, 1) as other:
            watched, expected = Watched(table, monkeypatch), list[str]()
            does: dict[str, Callable[[float], object]] = {
                "take": lambda seconds: watched.take(seat, seconds),
                "pause": lambda is_paused: watched.scheduler.pause(bool(is_paused)),
                "beat": lambda _: seat.beat(1),
                "stand": lambda seconds: other.stand("train.py:7", seconds),
                "attach": lambda _: other.attach(FIRST),
                "detach": lambda seconds: other.attach(FIRST, attached=False, seconds=seconds),
                "go on": lambda _: other.go_on(FIRST),
                "expires": lambda _: None,
            }
            names = {(0, 0): "beat", (1, FIRST): "stand"}
            steps = [(second, what, what, seconds) for second, what, seconds in script]
            for second, which, what, seconds in sorted(
                [*steps, *((second, which, "expires", 0.0) for second, which in expiries)], key=lambda step: step[0]
            ):
                watched.pass_until(second - 0.1)
                assert [names.get(key, "take") for key in watched.keys] == expected
                watched.pass_until(second)
                does[what](seconds)
                expected += [which] if what == "expires" else []
                assert [names.get(key, "take") for key in watched.keys] == expected
            watched.scheduler.close()


def test_a_breakpoint_is_read_though_it_was_set_anew(table: TimerTable, watched: Watched) -> None:
    with seat_at(table) as seat:
        slot = seat.stand("train.py:7", 20)
        watched.pass_until(1)
        (key,) = table.standing()
        seat.attach(slot)
        assert table.read(key) is None
        timer = table.read_now(*key[:2])
        assert timer is not None
        assert timer.location == "train.py:7"
        seat.go_on(slot)
        assert table.read_now(*key[:2]) is None


def test_the_innermost_of_two_breakpoints_counts(table: TimerTable, watched: Watched) -> None:
    """Of two threads that stand, one may go on first."""
    with seat_at(table) as seat:
        first, second = (seat.stand(f"train.py:{line}", 3600) for line in (1, 2))
        seat.go_on(first)
        watched.pass_until(1)
        assert watched.scheduler.stands
        assert [sign.breakpoint for sign in table.signs().values()] == ["train.py:2"]
        seat.go_on(second)
        watched.pass_until(2)
        assert not watched.scheduler.stands


def test_what_waits_for_a_release_is_called_then(table: TimerTable, watched: Watched) -> None:
    called: list[float] = []
    with seat_at(table) as seat:
        stands = seat.stand("train.py:7", 3600)
        watched.pass_until(1)
        watched.scheduler.when_released(lambda: called.append(watched.now / clock.NS - 1000))
        watched.pass_until(7)
        assert called == []
        seat.go_on(stands)
        watched.pass_until(8)
        assert called == [7]


def test_new_slots_are_told_once(table: TimerTable) -> None:
    for _ in range(2):  # what a later holder of a seat sets is new again
        with holder_of(table, "a") as child:
            assert [table.holder(seat) for seat, _slot, _deadline in news(table)] == [child.pid]
            assert news(table) == []
    with seat_at(table) as seat:
        assert news(table) == []
        slot = seat.arm(5, 1, TEXT)
        assert news(table) == [(0, slot, 5)]
        seat.disarm(slot)
        seat.disarm(seat.arm(6, 1, TEXT))
        assert news(table) == []
        seat.arm(5, 1, TEXT)
        seat.disarm(seat.arm(5, 1, TEXT))
        assert news(table) == []  # it has gone already


def noted(function: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    """The function, noting that it is called."""

    def note(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    return note


def test_many_expired_timers_are_passed_on_a_few_a_turn(table: TimerTable, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop()
    lots: list[list[Timer]] = []
    asked: list[str] = []
    for name in ("look", "read"):
        monkeypatch.setattr(table, name, noted(getattr(table, name), name, asked))
    scheduler = TimerScheduler(table, loop, lots.append)  # type: ignore[arg-type]  # as above
    now = clock.now_ns()
    with seat_at(table) as seat:
        for number in range(SLOTS):
            seat.arm(now - number, 1, TEXT)
        scheduler.open()
        assert len(lots) == 1, "others have their turn"
        loop.serve(clock.now_ns())
        assert {len(lot) for lot in lots} == {AT_ONCE}
        timers = [timer for lot in lots for timer in lot]
        assert [timer.deadline for timer in timers] == list(range(now - SLOTS + 1, now + 1)), "the oldest first"
        assert asked.count("read") == 2 * SLOTS, "as new, and as expired"
        looks = asked.count("look")
        for timer in timers:
            scheduler.rearm(timer, clock.now_ns() + 3600 * clock.NS)
        loop.serve(clock.now_ns())
        assert asked.count("look") == looks
        assert loop.next() == pytest.approx(clock.now_ns() + 3600 * clock.NS, abs=TIMEOUT * clock.NS)
    scheduler.close()


def test_a_process_outside_the_group_is_not_signalled(table: TimerTable) -> None:
    """A process that hung below the worker has ended, its number is another's, and the worker has written that down."""
    struck: list[tuple[int, int]] = []

    def work(child: Child) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with seat_at(table, 5) as seat:
            seat.arm(1, 1, TEXT)
            child.say()
            child.wait()

    with Child(Child.stay) as worker, Child(work) as outsider:
        pids = {0: worker.pid}
        it = Escalation(table, [], FakeLoop(), lambda: pids, lambda *what: struck.append(what), lambda *_: None)  # type: ignore[arg-type]  # as above
        (timer,) = due(table)
        it._signal([Hang(0, outsider.pid, False, timer)], signal.SIGTERM)
        assert struck == [(worker.pid, signal.SIGTERM)]
        assert not procfs.signal_set(procfs.status(outsider.pid), "ShdPnd") & 1 << signal.SIGTERM - 1


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("first", ["report", "terminate"])
def test_a_step_is_put_off_for_who_was_stopped_with_us(
    first: str, stopped: bool, table: TimerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a report, and after a signal that it has survived, too."""
    now = 1000 * clock.NS
    monkeypatch.setattr(clock, "now_ns", lambda: now)
    monkeypatch.setattr(clock, "now", lambda: now / clock.NS)
    told: list[str] = []
    loop = FakeLoop()
    with seat_at(table) as seat:
        seat.arm(now, 1, TEXT)
        steps = [(first, 0.0), ("kill", 60.0)]
        pids = {0: os.getpid()}
        it = Escalation(table, steps, loop, lambda: pids, lambda *_: None, lambda what, *_: told.append(what))  # type: ignore[arg-type]  # as above
        it.open()
        it.evidence_taken(1)
        assert told == ["armed", "expired", "hang", *(["struck"] if first == "terminate" else [])]
        assert (loop.next() or NEVER) <= now + 10 * clock.NS, "it waits in parts, so that a pause is seen"
        began, now = now, now + 3600 * clock.NS
        loop.wait(began, (began + clock.NS) if stopped else NEVER, now)
        loop.serve(now)
        assert told.count("hang") == (1 if stopped else 2)
        began, now = now, now + 60 * clock.NS
        loop.wait(began, now, now)
        loop.serve(now)
        assert told.count("hang") == 2
    it.close()


def test_a_large_table_takes_next_to_no_address_space() -> None:
    """The file has 4.6 GB of holes, of which the watcher maps the head, and a worker its own seat."""
    code = (
        "import resource\n"
        "from phalanx._base import clock; from phalanx._timers.client import Seat\n"
        "from phalanx._timers.layout import encode\n"
        "from phalanx._timers.table import TimerTable\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (16 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "table = TimerTable(16384, 60.0)\n"
        "with Seat(table.address + ':1023') as seat:\n"
        "    slot = seat.arm(clock.now_ns() + 1, 1, encode('s', 'p'))\n"
        "    assert len(table.look(clock.now_ns())[0]) == 1\n"
        "table.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_worker_that_fills_the_table_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_AT_A_TIME", 256)
    with contextlib.closing(TimerTable(64)) as table, Seat(f"{table.address}:63") as honest:
        honest.arm(5, 1, encode("honest", "p"))
        fd = table.descriptors[0]
        os.pwrite(fd, b"\1" * 8, layout.HEAD_USED * 8)
        for seat in range(63):
            os.pwrite(fd, b"\1" * 8, (layout.HEAD_MARKS + seat) * 8)
            os.pwrite(fd, (1).to_bytes(8, sys.byteorder) * (FIRST + SLOTS), table._head_size + seat * layout.SEAT_SIZE)
        due, then = table.look(10)
        assert len(due) == 63 * 4 + 1
        assert [key[2] for key in due if key[0] == 63] == [5]
        assert then <= 10 + clock.NS
        assert len(table.newly_armed()) == 63 * 4 + 1
        for seat in range(63):  # those that were told of are cleared: then there are the others
            os.pwrite(fd, NEVER.to_bytes(8, sys.byteorder) * (FIRST + 4), table._head_size + seat * layout.SEAT_SIZE)
        assert not set(due) - {due[-1]} & set(table.look(10)[0])
