"""`expires`, `beat` and `configure`, in the process that uses them: what is armed, what is given back, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest

from phalanx import timer
from phalanx._base import clock
from phalanx._timers import layout
from phalanx._timers.client import Seat
from phalanx._timers.hang import Timer
from phalanx._timers.layout import NEVER, SLOTS
from phalanx._timers.table import TimerTable
from phalanx.timer import (
    FileTimerClient,
    LocalTimerClient,
    NobodyWatchesError,
    TimerClient,
    _beats,
    _expires,
    configure,
    expires,
)
from tests.support.forks import code_of_fork
from tests.support.workers import run_script

pytestmark = pytest.mark.each_python

ALL = NEVER - 1
MS = 1_000_000


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has taken no timer yet, and is in no group."""
    monkeypatch.delenv(layout.TIMERS_ENV, raising=False)
    for name, value in (("seat", None), ("_nobody_watches", False)):
        monkeypatch.setattr(_beats, name, value)
    yield
    configure(None)
    assert not _expires._running
    assert not _beats._rests
    if _beats.seat is not None:
        _beats.seat.close()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[TimerTable]:
    """The table of the group that this process is in."""
    it = TimerTable(4, hang=1000)
    monkeypatch.setenv(layout.TIMERS_ENV, f"{it.address}:0")
    yield it
    it.close()


def due(table: TimerTable) -> list[Timer]:
    return [timer for timer in map(table.read, table.look(ALL)[0]) if timer is not None]


def armed(table: TimerTable) -> list[Timer]:
    return [timer for timer in due(table) if timer.slot]


def scopes(table: TimerTable) -> list[str]:
    return sorted(timer.scope for timer in armed(table))


class Client(TimerClient):
    """Knows scopes by their names."""

    def __init__(self) -> None:
        self.held: dict[str, float] = {}
        self.calls: list[tuple[str, float]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.calls.append((scope_id, expiration_time))
        self.held[scope_id] = expiration_time

    def release(self, scope_id: str) -> None:
        self.calls.append((scope_id, -1))
        self.held.pop(scope_id, None)


class TorchlikeClient:
    """One that was written for torch, and derives from nothing of ours."""

    acquire = Client.acquire
    release = Client.release
    __init__ = Client.__init__


# --- blocks


def test_a_block_is_armed_and_given_back(table: TimerTable) -> None:
    before = clock.now_ns()
    with expires(after=60, scope="load"):
        line = sys._getframe().f_lineno - 1
        (it,) = armed(table)
        assert it.scope == "load"
        assert it.location == f"{__file__}:{line}"
        assert it.span == 60 * clock.NS
        assert before <= it.deadline - it.span <= clock.now_ns()
        assert it.thread == threading.get_ident()
        assert table.holder(it.seat) == os.getpid()
    assert armed(table) == []


def test_blocks_nest_also_with_one_scope(table: TimerTable) -> None:
    with expires(60, "same"):
        (outer,) = armed(table)
        with expires(5, "same"), expires(70):
            assert scopes(table) == ["", "same", "same"]
        assert armed(table) == [outer]
    assert armed(table) == []


def test_one_object_may_be_entered_again_but_not_twice_at_a_time(table: TimerTable) -> None:
    block = expires(60, "again")
    for _ in range(2):
        with block:
            with pytest.raises(RuntimeError, match="this very block is entered already"):
                block.__enter__()
            assert scopes(table) == ["again"]
        assert armed(table) == []


def test_blocks_after_each_other_each_have_their_own_facts(table: TimerTable) -> None:
    """They have one slot, in which the one before has left its facts, of which some are the same."""
    facts: list[tuple[str, int, bool]] = []

    def enter(after: float, scope: str | None = None) -> None:
        with expires(after, scope):
            (it,) = armed(table)
            facts.append((it.scope, it.span, it.thread == threading.get_ident()))

    @expires(60, "decorated")
    def first() -> str:
        return armed(table)[0].location

    @expires(60, "decorated")
    def second() -> str:
        return armed(table)[0].location

    enter(60)
    enter(60)
    enter(61)
    enter(60.0, "load")
    enter(60, "step")
    thread = threading.Thread(target=enter, args=(60, "step"))
    thread.start()
    thread.join()
    seconds = [("", 60), ("", 60), ("", 61), ("load", 60), ("step", 60), ("step", 60)]
    assert facts == [(scope, span * clock.NS, True) for scope, span in seconds]
    lines = [inspect.unwrap(each).__code__.co_firstlineno for each in (first, second)]
    assert [first(), second(), first()] == [f"{__file__}:{line}" for line in (*lines, lines[0])]
    locations = []
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            stack.enter_context(expires(60))
            locations.append(armed(table)[0].location)
        with contextlib.ExitStack() as stack:
            stack.enter_context(expires(60))
            locations.append(armed(table)[0].location)
    assert locations[:2] == locations[2:]
    assert len({*locations}) == 2


def test_a_block_that_is_never_left_goes_with_its_object(table: TimerTable) -> None:
    block = expires(60)
    block.__enter__()
    assert len(armed(table)) == 1
    del block
    assert armed(table) == []


def test_the_default_scope_is_the_callers_line(table: TimerTable) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(expires(60))
        line = sys._getframe().f_lineno - 1
        assert [timer.location for timer in armed(table)] == [f"{__file__}:{line}"]
        client = Client()
        stack.enter_context(expires(60, client=client))
        assert list(client.held) == [f"{__file__}:{line + 4}"]
    assert armed(table) == []
    assert client.held == {}


@pytest.mark.parametrize("after", [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none(after: float, table: TimerTable) -> None:
    with pytest.raises(ValueError, match=r"after: expected more than 0 seconds, got "):
        expires(after)
    assert armed(table) == []


@pytest.mark.parametrize("after", [True, "5", b"5", None, [1], 1j])
def test_a_time_of_the_wrong_type(after: Any) -> None:
    with pytest.raises(TypeError, match=r"after: expected seconds, got "):
        expires(after)
    with pytest.raises(TypeError, match="scope: expected a string, got 5"):
        expires(1, scope=5)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("after", [1e-12, Fraction(1, 3), 1e10, 1e300, sys.maxsize])
def test_any_time_above_0_will_do(after: Any, table: TimerTable) -> None:
    for client in (None, Client()):
        with expires(after, client=client):
            assert len(armed(table)) == (client is None)
    assert _beats.seat is not None
    assert len(_beats.seat.free) == SLOTS


def test_more_timers_than_there_are_slots(table: TimerTable) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(SLOTS):
            stack.enter_context(expires(60))
        with pytest.raises(RuntimeError, match="1024 timers run in this process: that is the most"), expires(60):
            pass
        assert len(armed(table)) == SLOTS
    assert armed(table) == []


def test_a_thousand_scopes_leave_no_residue(table: TimerTable) -> None:
    client = Client()
    for number in range(1000):
        with expires(60, f"scope {number}"), expires(60, f"scope {number}", client):
            pass
    assert armed(table) == []
    assert client.held == {}
    assert _beats.seat is not None
    assert sorted(_beats.seat.free) == list(range(layout.FIRST, layout.FIRST + SLOTS))


# --- decorated functions


def test_a_decorated_function(table: TimerTable) -> None:
    @expires(after=60)
    def factorial(number: int) -> int:
        """Of a number."""
        seen.append(armed(table))
        return number * factorial(number - 1) if number else 1

    seen: list[list[Timer]] = []
    line = factorial.__wrapped__.__code__.co_firstlineno  # type: ignore[attr-defined]  # functools sets it
    assert factorial(3) == 6
    assert [len(found) for found in seen] == [1, 2, 3, 4]
    assert {timer.location for timer in seen[-1]} == {f"{__file__}:{line}"}
    assert factorial.__name__ == "factorial"
    assert factorial.__doc__ == "Of a number."
    assert armed(table) == []


def test_a_decorated_coroutine_function(table: TimerTable) -> None:
    @expires(after=60, scope="fetch")
    async def fetch(number: int) -> int:
        await asyncio.sleep(0)
        counts.append(len(armed(table)))
        return number

    async def both() -> list[int]:
        return list(await asyncio.gather(fetch(1), fetch(2)))

    counts: list[int] = []
    assert asyncio.run(both()) == [1, 2]
    assert counts[0] == 2
    assert armed(table) == []


def test_a_decorated_function_names_its_line_to_a_client() -> None:
    client = Client()

    @expires(60, client=client)
    def work() -> None:
        assert list(client.held) == [f"{__file__}:{line}"]

    line = work.__wrapped__.__code__.co_firstlineno  # type: ignore[attr-defined]  # functools sets it
    work()
    assert client.held == {}


def test_what_has_no_code_can_be_decorated(table: TimerTable) -> None:
    decorated = expires(60)(functools.partial(armed, table))
    (it,) = decorated()
    assert it.location.startswith("functools.partial(")


def test_generators_are_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def asynchronous() -> AsyncIterator[int]:
        yield 1

    for function in (generator, asynchronous):
        with pytest.raises(TypeError, match="is a generator: calling it runs nothing yet"):
            expires(60)(function)


# --- who is told


def test_nobody_to_be_told() -> None:
    with pytest.raises(NobodyWatchesError, match=r"nobody watches timers: call phalanx\.timer\.configure"), expires(60):
        pass
    assert issubclass(NobodyWatchesError, RuntimeError)


def test_to_configure_none_takes_the_client_back(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    configure(client)
    with expires(60, "told"):
        configure(None)
        assert list(client.held) == ["told"]
    assert client.held == {}
    with pytest.raises(NobodyWatchesError), expires(60):
        pytest.fail("entered")
    with contextlib.closing(TimerTable(1)) as table:  # and the group that this process is in watches again
        monkeypatch.setenv(layout.TIMERS_ENV, f"{table.address}:0")
        with expires(60, "the group's"):
            assert scopes(table) == ["the group's"]
    assert len(client.calls) == 2


@pytest.mark.parametrize("client", [object(), "client"])
def test_configure_with_what_is_no_client(client: Any) -> None:
    with pytest.raises(TypeError, match="timer_client: expected a TimerClient, got "):
        configure(client)


def test_a_group_whose_launcher_has_gone(table: TimerTable) -> None:
    table.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is the launcher there"), expires(60):
            pass


def test_a_group_whose_launcher_goes_meanwhile(table: TimerTable) -> None:
    with expires(60, "before"):
        table.close()
        with pytest.raises(RuntimeError, match="nobody watches timers any more"), expires(60, "after"):
            pytest.fail("entered")
        timer.beat()
    assert _beats.seat is not None
    assert len(_beats.seat.free) == SLOTS


@pytest.mark.parametrize("make", [Client, TorchlikeClient])
def test_a_client_of_names_has_a_name_for_each_timer(make: Any) -> None:
    client = make()
    configure(client)
    with expires(60, "a"), expires(60, "b"):
        with expires(60, "a"), expires(60, "a"):
            assert list(client.held) == ["a", "b", "a (2)", "a (3)"]
        with expires(60, "a"):
            assert list(client.held) == ["a", "b", "a (2)"]
        for expiration in client.held.values():
            assert 50 < expiration - clock.wall() <= 60.1
    assert client.held == {}
    assert len(client.calls) == 10


def test_a_configured_client_leaves_heartbeats_to_the_group(table: TimerTable) -> None:
    client, other = Client(), Client()
    timer.progress(step=4)
    with expires(60, "before"):
        configure(client)
        with expires(60, "a"), expires(60, "b", client=other):
            assert list(client.held) == ["a"]
            assert list(other.held) == ["b"]
            assert scopes(table) == ["before"]
            timer.progress(step=5)
    assert armed(table) == []
    assert [timer.step for timer in due(table)] == [5]


def test_a_client_that_fails_keeps_the_block_from_being_entered() -> None:
    class Failing(Client):
        def acquire(self, scope_id: str, expiration_time: float) -> None:
            super().acquire(scope_id, expiration_time)
            raise self.error

        error: Exception = BrokenPipeError("no server")

    client = Failing()
    with pytest.raises(BrokenPipeError, match="no server"), expires(60, "a", client):
        pytest.fail("entered")
    assert len(client.calls) == 1  # nobody is there to release it at, and to try would be another wait
    client.error = TimeoutError("a signal handler's, perhaps")
    with pytest.raises(TimeoutError, match="a signal handler's"), expires(60, "a", client):
        pytest.fail("entered")
    assert client.held == {}


def test_a_release_that_fails() -> None:
    class Failing(Client):
        def release(self, scope_id: str) -> None:
            super().release(scope_id)
            raise BrokenPipeError("the server has gone")

    client = Failing()
    with pytest.raises(BrokenPipeError, match="the server has gone"), expires(60, "a", client):
        pass
    assert [moment for _, moment in client.calls].count(-1) == 1


class Noting:
    """What a subclass of a client has beside, in a class that can be pickled."""

    said: ClassVar[list[tuple[str, str, float]]] = []

    def __init__(self, *args: Any, name: str) -> None:
        super().__init__(*args)
        self.name = name

    def acquire(self, scope: str, moment: float) -> None:
        self.said.append((self.name, scope, moment))


class NotingLocal(Noting, LocalTimerClient):
    pass


class NotingFile(Noting, FileTimerClient):
    pass


@pytest.mark.parametrize(
    "client",
    [NotingLocal(queue.SimpleQueue, name="mine"), NotingFile("pipe", name="mine")],
    ids=lambda client: type(client).__name__,
)
def test_an_overridden_method_is_called_in_a_pickled_client(client: Any) -> None:
    there = pickle.loads(pickle.dumps(client))
    there.release = lambda _scope: None
    with expires(60, "load", there):
        ((name, scope, _),) = Noting.said
    assert (name, scope) == ("mine", "load")
    Noting.said.clear()


def test_a_fork_while_another_thread_takes_a_timer_by_name() -> None:
    """The lock that it holds is held for ever in the fork, unless that makes a new one."""
    client = Client()
    with expires(60, "load", client), _beats.lock:

        def take() -> None:
            with expires(60, "a", client):
                pass

        def work() -> bool:
            signal.alarm(20)
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
            return client.calls[-1][0] == "a"

        assert code_of_fork(work) == 0


# --- heartbeats


def test_a_heartbeat_without_a_group_does_nothing() -> None:
    timer.beat()
    timer.progress(step=5)
    assert _beats.seat is None


def test_a_heartbeat_names_the_step(table: TimerTable) -> None:
    timer.progress(step=41)
    (it,) = due(table)
    assert (it.scope, it.step, it.slot) == ("heartbeat", 41, 0)
    timer.beat()
    assert due(table)[0].step == 41
    with pytest.raises((TypeError, ValueError)):
        timer.progress(step=1 << 64)


def test_the_end_of_a_block_beats_only_where_beats_were_sent(table: TimerTable) -> None:
    with expires(60):
        pass
    assert due(table) == []
    timer.progress(step=3)
    (first,) = due(table)
    with expires(60):
        pass
    (second,) = due(table)
    assert second.deadline > first.deadline
    assert second.step == 3


def test_a_heartbeat_without_a_seat_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(TimerTable(1, hang=1000)) as table, Seat(f"{table.address}:0"):
        monkeypatch.setenv(layout.TIMERS_ENV, f"{table.address}:0")
        timer.rest()
        for step in range(3):
            timer.beat()
            timer.progress(step)
        timer.rest()
        assert due(table) == []
        said = f"heartbeats of process {os.getpid()} are not watched: 1 processes of the group have timers already"
        assert capsys.readouterr().err == f"phalanx: {said}: that is the most\n"
        with pytest.raises(RuntimeError, match="that is the most"), expires(60):
            pytest.fail("entered, and nobody watches")


@pytest.mark.parametrize("address", ["nonsense", "1:2:3:4"])
def test_a_heartbeat_whose_table_cannot_be_opened(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(layout.TIMERS_ENV, address)
    for _ in range(2):
        timer.beat()
    assert capsys.readouterr().err.count("are not watched") == 1


# --- rest


class Player:
    """Plays scripts: `p3` reports step 3, `+5` lets 5 ms pass on a clock of its own; other words do what they say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000 * clock.NS
        monkeypatch.setattr(clock, "now_ns", lambda: self.now)
        self.waits: list[timer.waiting] = []
        self.rests: list[timer.rest] = []
        self.codes: list[int] = []
        self.does: dict[str, Callable[[], object]] = {
            "beat": timer.beat,
            "block": lambda: expires(60).__enter__().__exit__(),
            "wait": lambda: self.waits.append(timer.waiting().__enter__()),
            "left": lambda: self.waits.pop().__exit__(),
            "child": lambda: self.codes.append(code_of_fork(self.be_a_child)),
            "rests": timer.rest,
            "rest": lambda: self.rests.append(timer.rest().__enter__()),
            "again": lambda: self.rests.append(self.rests.pop().__enter__()),
            "leave": lambda: self.rests[-1].__exit__(None),
            "leave-first": lambda: self.rests.pop(0).__exit__(),
        }

    def be_a_child(self) -> None:
        """Leave all that the parent is in, and report long steps."""
        for block in self.waits:
            block.__exit__()
        for rest in self.rests:
            rest.__exit__()
        for step in range(7, 9):
            self.now += 5000 * MS
            timer.progress(step)

    def play(self, script: str) -> None:
        for word in script.split():
            if word[0] == "+":
                self.now += int(word[1:]) * MS
            elif word[1:].isdecimal():
                timer.progress(int(word[1:]))
            else:
                self.does[word]()
        assert not any(self.codes)


@pytest.fixture
def player(table: TimerTable, monkeypatch: pytest.MonkeyPatch) -> Player:  # noqa: ARG001 - of the group's process
    return Player(monkeypatch)


@pytest.mark.parametrize(
    "script, step",
    [
        ("p3 rests", None),
        ("p3 rests block", None),  # its end is a beat, and ends no rest
        ("p3 rests p4", 4),
        ("rest leave", None),  # there were no beats
        ("p3 rest", None),
        ("p3 rest leave", 3),
        ("p3 rest rest", None),
        ("p3 rest rest leave", None),
        ("p3 rest rest leave-first", None),
        ("p3 rest rest leave leave-first", 3),  # whichever is left last: two threads leave theirs when they like
        ("p3 rest rest leave-first leave", 3),
        ("p3 rest leave again", None),
        ("p3 rest leave again leave", 3),
        ("p3 rest child", None),
        ("p3 rest child leave", 3),
    ],
)
def test_a_rest_lasts_until_it_is_left(script: str, step: int | None, player: Player, table: TimerTable) -> None:
    """And the heartbeat is expected again then, with the last step, if there were any."""
    player.play(script)
    assert [it.step for it in due(table) if it.seat == 0] == ([] if step is None else [step])
    assert table.resting() == ({os.getpid()} if step is None else set())
    for each in player.rests:
        each.__exit__()


def test_a_rest_of_a_block_that_raises_ends(table: TimerTable) -> None:
    timer.progress(3)
    with pytest.raises(KeyError), timer.rest():
        raise KeyError
    assert len(due(table)) == 1


def test_outside_of_a_group_to_rest_or_wait_does_nothing() -> None:
    with timer.rest():
        timer.rest()
    block = timer.waiting()
    with block, block:
        pass
    block.__exit__()  # left once more than it was entered
    with pytest.raises(ZeroDivisionError), timer.waiting():
        raise ZeroDivisionError
    assert _beats.seat is None


# --- how long steps take


class Index:
    """A number that is no int, as that of an array library."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize(
    "script, expected",
    [
        ("p1 +100 p2", [100]),
        ("p10 +100 p14", [25, 25, 25, 25]),
        ("p1 beat +50 p1 block +50 p2", [100]),  # other beats, also of the same step, end no step
        ("p1 wait +100 left p2", [0]),
        ("p1 wait +50 wait +50 left +50 left +7 p2", [7]),
        ("p1 wait +100 p2 +100 left +7 p3", [0, 7]),  # the wait of another thread: each step has its part
        ("p1 rest +100 leave p2", [0]),
        ("p1 rest +50 wait +50 left leave +7 p2", [7]),
        ("p1 rests +100 p2", None),  # nobody knows when it began
        ("p9 +100 p1", None),
        ("wait +100 left p1000000", None),
        ("p1 +100 p2 +100 p3 +100 p4 " + " ".join(f"+1 p{step}" for step in range(5, 70)), [1] * 32),
        ("p1 +100 child p2", [100]),
        ("p1 wait +100 child p2 left", [0]),
        ("beat", None),
    ],
)
def test_a_step_takes_the_time_that_counts(
    script: str, expected: list[int] | None, player: Player, table: TimerTable
) -> None:
    """In milliseconds; a child, which leaves the wait of its parent and reports longer steps, counts no more."""
    player.play(script)
    steps = table.signs()[0].steps
    assert (None if steps is None or not steps.times else [time // MS for time in steps.times]) == expected
    assert steps is None or steps.count == (68 if "p69" in script else len(expected or ()))


def test_any_number_can_be_a_step(table: TimerTable) -> None:
    """At the ends of 64 bits, below 0, and of another type; a beat leaves the last one."""
    steps: list[Any] = [Index(3), Index(4), (1 << 63) - 1, -(1 << 63), -5, -4, (1 << 63) - 1, 0, 1]
    for step in steps:
        timer.progress(step)
        found = table.signs()[0].steps
        assert found is not None
        assert all(math.isfinite(figure) and figure >= 0 for figure in (found.summary() or {}).values())
    timer.progress(41)
    timer.beat()
    assert table.signs()[0].step == 41


# --- forks


def test_a_fork_within_a_block(table: TimerTable) -> None:
    timer.beat()
    client = Client()
    out, into = os.pipe()
    gate, latch = os.pipe()
    with expires(60, "ours"), expires(60, "named", client):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with expires(60, "the child's"), expires(60, "named", client):
                    os.write(into, str(list(client.held)).encode())
                    os.read(gate, 1)
                timer.beat()
                code = 0
            finally:
                os._exit(code)  # and so through no `__exit__` of the parent's blocks
        assert os.read(out, 100).decode() == "['named']"
        assert scopes(table) == ["ours", "the child's"]
        assert [it.seat for it in armed(table) if it.scope == "the child's"] == [1]
        os.write(latch, b".")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert scopes(table) == ["ours"]
        assert table.holder(0) == os.getpid()
    assert armed(table) == []
    for fd in (out, into, gate, latch):
        os.close(fd)


def test_a_fork_that_leaves_its_parents_block(table: TimerTable) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(expires(60, "ours"))
        assert code_of_fork(stack.close) == 0
        assert scopes(table) == ["ours"]
    assert armed(table) == []


def test_a_fork_of_a_process_that_was_in_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    timer.beat()
    with contextlib.closing(TimerTable(1, hang=1000)) as table:
        monkeypatch.setenv(layout.TIMERS_ENV, f"{table.address}:0")
        assert code_of_fork(lambda: timer.progress(step=9)) == 0
        assert [timer.step for timer in due(table)] == [9]
        assert table.holder(0) == 0


# --- signals

SIGNALS = """
import os, random, signal, sys
from phalanx._timers import layout
from phalanx._timers.table import TimerTable
from phalanx._base import clock
from phalanx.timer import TimerClient, configure, expires

class Client(TimerClient):
    def __init__(self):
        self.held = set()
    def acquire(self, scope_id, expiration_time):
        self.held.add(scope_id)
    def release(self, scope_id):
        self.held.discard(scope_id)

class Late(Exception): pass

def handler(*_):
    raise (Late, KeyboardInterrupt)[chance.getrandbits(1)]

signal.signal(signal.SIGALRM, handler)
chance = random.Random(7)
table = TimerTable(1)
os.environ[layout.TIMERS_ENV] = f"{table.address}:0"
client = Client() if sys.argv[1] == "named" else None
until = clock.now() + float(sys.argv[2])
struck = 0
with expires(60, client=client):
    pass

def once():
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 3e-5))
    with expires(60, client=client):
        with expires(50, "inner", client):
            pass
    for _ in range(3):
        pass

while clock.now() < until or struck <= 20:  # a busy machine may give us little of that time
    table.publish(chance.choice([0, layout.NEVER]))  # with a ring, and without
    try:
        try:
            once()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.sched_yield()  # one that is on its way already may come at the next system call only: not at the look's
    except (Late, KeyboardInterrupt):
        struck += 1
    left = table.look(layout.NEVER - 1)[0]
    assert not left and (client is None or not client.held), (left, client and client.held)
print(struck)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "named"])
def test_a_signal_handler_that_raises_leaves_no_timer(kind: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, SIGNALS, kind, "0.4")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "it hardly ever struck"


def test_to_import_it_costs_little() -> None:
    program = (
        "import sys, phalanx.timer as t; t.expires; print(*sorted(m for m in sys.modules if m.startswith('phalanx')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "phalanx", "phalanx._base", "phalanx._base.clock", "phalanx._base.linux",
        "phalanx._timers", "phalanx._timers.client", "phalanx._timers.layout",
        "phalanx.timer", "phalanx.timer._beats", "phalanx.timer._expires",
    ]  # fmt: skip
    assert signal.getsignal(signal.SIGALRM) is not None
