"""A launcher that hears late of a keeper that is silent, or lost: what was said before counts."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from phalanx._base import clock, linux, procfs
from phalanx._engine.keeper_client import KeeperClient
from phalanx._logs import display
from phalanx.multiprocessing import DefaultLogsSpecs, KeeperLostError, Std, start_processes
from tests.engine.test_lost_helpers import running, until
from tests.support.helpers import TIMEOUT, alive, pass_gate, tell, wait_gone
from tests.support.insides import helpers_of, stop
from tests.support.waits import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx._engine.supervisor import Supervisor
    from phalanx._logs.pump import Pump
    from phalanx.multiprocessing import PContext
    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
LARGE = 1 << 20


def supervisor_of(group: PContext) -> Supervisor:
    assert group._supervisor is not None
    return group._supervisor


@contextlib.contextmanager
def busy(group: PContext, then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """The group's thread gets no turn; afterwards, and before it listens, ``then`` is called in it."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(TIMEOUT)
        then()

    supervisor_of(group)._loop.call(hold)
    assert held.wait(TIMEOUT)
    yield
    go_on.set()


def failing_at(gate: Gate, ready: Ready, *, stays: bool = False) -> PContext:
    """A group whose rank 1 fails once the gate is open; rank 0 heeds no SIGTERM, if it ``stays``."""
    ignore = "signal.signal(15, signal.SIG_IGN); " if stays else ""
    args = {
        0: ("-S", "-c", f"import signal; {ignore}{ready.python()}; signal.pause()"),
        1: ("-S", "-c", f"{ready.python()}; {gate.python()}; raise SystemExit(3)"),
    }
    return start_processes("g", sys.executable, args)


@pytest.mark.slow
def test_a_lost_keepers_last_words_are_read(ready: Ready, gate: Gate) -> None:
    with failing_at(gate, ready) as group:
        ready.wait(2)
        guard, keeper = helpers_of(group)
        stop(keeper)
        channel = supervisor_of(group)._keeper.channel
        while not channel._outbox:
            supervisor_of(group).send(0, signal.SIGWINCH)
        with busy(group):
            gate.open()
            os.kill(keeper, signal.SIGCONT)
            assert wait_gone([keeper, guard]) == set()
        result = group.wait()
    assert result.root_cause is not None
    assert result.root_cause.exitcode == 3


@pytest.mark.slow
def test_an_order_to_stop_that_meets_the_end_is_not_heeded(
    ready: Ready, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both are ready in one round of the keeper's loop: first the end of the last worker, then the order."""
    with start_processes("g", sys.executable, ("-S", "-c", f"{ready.python()}; {gate.python()}"), nprocs=1) as group:
        [pid] = ready.pids(1)
        guard, keeper = helpers_of(group)
        stop(keeper)
        gate.open()
        until(lambda: procfs.Stat(pid).state == "Z")
        group.close()  # which wakes the keeper
        assert wait_gone([keeper, guard]) == set()
        result = group.wait()
    assert result.state == "succeeded"
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "overdue",
    [lambda it: it.link.watchdog.over(clock.now()), lambda it: it.link.watchdog.replace()],
    ids=["at first", "at last"],
)
def test_unread_messages_of_a_keeper_are_no_silence(
    ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch, overdue: Callable[[Supervisor], None]
) -> None:
    done: list[str] = []
    with failing_at(gate, ready) as group:
        pids = ready.pids(2)
        supervisor = supervisor_of(group)

        def its_deadline_is_over() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(KeeperClient, "wake", lambda _keeper: done.append("woken"))
                patch.setattr(KeeperClient, "kill_keeper", lambda _keeper: done.append("killed"))
                overdue(supervisor)

        with busy(group, its_deadline_is_over):
            gate.open()
            assert wait_gone(pids) == set()
        result = group.wait()
    assert result.state == "failed"
    assert not done


def test_a_silent_keeper_is_woken_before_it_is_killed(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, ANSWER_WAIT=3 * TIMEOUT)  # so long it has to say something, or to be asked
    with running("binary", ready) as group:
        ready.wait(2)
        supervisor = supervisor_of(group)
        keeper = helpers_of(group)[1]
        stop(keeper)
        supervisor._loop.call(lambda: supervisor.link.watchdog.over(clock.now()))
        until(lambda: procfs.Stat(keeper).state in "RS")
        group.close()
        result = group.wait(0)
    assert result is not None
    assert result.state == "stopped"
    assert not supervisor.link.watchdog.killed


@pytest.mark.slow
def test_a_keeper_that_we_killed_is_said_to_have_been_silent(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, ANSWER_WAIT=0.3, KILL_WAIT=0.3)
    wake = KeeperClient.wake
    monkeypatch.setattr(KeeperClient, "wake", lambda _keeper: None)  # it is stopped once more
    with running("binary", ready) as group:
        pids = ready.pids(2)
        stop(helpers_of(group)[1])
        supervisor_of(group).stop(signal.SIGTERM, 0.1)
        with pytest.raises(KeeperLostError, match="did not answer by its own deadline, and was killed by us; every"):
            group.wait(TIMEOUT)
        assert [pid for pid in pids if alive(pid)] == []
        monkeypatch.setattr(KeeperClient, "wake", wake)


@pytest.mark.slow
def test_a_keeper_that_is_lost_after_a_failure_does_not_hide_it(ready: Ready, gate: Gate) -> None:
    """What became of the others since is not known."""
    with failing_at(gate, ready, stays=True) as group:
        ready.wait(2)
        gate.open()
        until(lambda: supervisor_of(group).mirror.state == "STOPPING")
        os.kill(helpers_of(group)[1], signal.SIGKILL)
        with pytest.raises(KeeperLostError, match="before that, rank 1 had failed: exited with code 3") as caught:
            group.wait(TIMEOUT)
    assert {rank: failure.exitcode for rank, failure in caught.value.failures.items()} == {1: 3}


def test_a_helper_lost_after_success_changes_no_result(ready: Ready, caplog: pytest.LogCaptureFixture) -> None:
    left = f"import os, signal; os.fork() and os._exit(0); {ready.python()}; signal.pause()"
    with start_processes("g", sys.executable, ("-S", "-c", left), nprocs=1, linger=TIMEOUT) as group:
        pids = ready.pids()
        until(lambda: supervisor_of(group).mirror.state == "LINGERING")
        os.kill(helpers_of(group)[1], signal.SIGKILL)
        result = group.wait()
        assert [pid for pid in pids if alive(pid)] == []
    assert result.succeeded
    assert "the workers had ended before, but the group's keeper process was killed by signal 9" in caplog.text


def returns_much(rank: int, address: str, gate: str) -> bytes:
    tell(address, str(os.getpid()))
    if rank:
        pass_gate(gate)
    return bytes(LARGE)


@pytest.mark.slow
def test_a_large_result_holds_up_no_stop(ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = linux.read_sealed

    def slowly(fd: int, limit: int) -> bytes:
        reading.set()
        go_on.wait(TIMEOUT)
        return read(fd, limit)

    monkeypatch.setattr(linux, "read_sealed", slowly)
    args = {rank: (rank, ready.address, gate.address) for rank in range(2)}
    with start_processes("g", returns_much, args, start_method="fork") as group:
        pids = ready.pids(2)
        assert reading.wait(TIMEOUT)
        assert supervisor_of(group).mirror.workers[0].ended.wait(TIMEOUT)  # it has sent its value, and ends
        supervisor_of(group).stop(signal.SIGTERM, TIMEOUT)
        assert wait_gone(pids) == set()
        go_on.set()
        result = group.wait()
    assert {rank: len(value) for rank, value in result.return_values.items()} == {0: LARGE}


# --- the host's own code, in our threads and in its handlers


class LateError(Exception):
    """What a signal handler of the host's raises."""


@pytest.mark.parametrize("begun", [True, False], ids=["it runs", "it does not run yet"])
def test_a_handler_may_raise_while_the_groups_thread_starts(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """Either that thread lets go of everything, or who starts does; never both, never neither."""
    closed: list[object] = []
    close, start, go_on = KeeperClient.close, threading.Thread.start, threading.Event()

    def counted(self: KeeperClient, *arguments: float) -> int:
        closed.append(self)
        return close(self, *arguments)  # type: ignore[arg-type]  # the second is a pid

    def interrupted(self: threading.Thread) -> None:
        if self.name == "phalanx":
            monkeypatch.setattr(threading.Thread, "start", start)
            if not begun:
                run = self.run
                self.run = lambda: (go_on.wait(TIMEOUT), run())  # type: ignore[assignment, method-assign]  # it starts late
            start(self)
            raise LateError
        start(self)

    monkeypatch.setattr(KeeperClient, "close", counted)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(LateError):
        start_processes("g", "sleep", ("600",), nprocs=1)
    go_on.set()
    until(lambda: not any(thread.name == "phalanx" for thread in threading.enumerate()))
    assert len(set(closed)) == len(closed) == 1


def test_a_close_in_the_groups_thread_waits_not_for_itself(ready: Ready) -> None:
    """As by a `__del__` that the collector runs there."""
    group = running("binary", ready)
    pids = ready.pids(2)
    supervisor_of(group)._loop.call(lambda: group.close(timeout=0.1))
    assert supervisor_of(group).done.wait(TIMEOUT)
    assert [pid for pid in pids if alive(pid)] == []
    group.close()


@pytest.mark.slow
def test_a_handler_may_close_a_group_amid_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that holds what the end of the first one needs."""
    monkeypatch.setattr(display, "REACTION", 0.3)
    shown = DefaultLogsSpecs(tee=Std.ALL)
    first = start_processes("first", "sleep", ("600",), nprocs=1, logs_specs=shown)
    join = display._DisplayThread.join

    def handled(self: display._DisplayThread, pump: Pump) -> display.GroupDisplay:
        monkeypatch.setattr(display._DisplayThread, "join", join)
        first.close(timeout=0.1)
        return join(self, pump)

    monkeypatch.setattr(display._DisplayThread, "join", handled)
    with start_processes("second", "true", (), nprocs=1, logs_specs=DefaultLogsSpecs(tee=Std.ALL)) as second:
        assert second.wait(TIMEOUT)
    assert not first.is_open
