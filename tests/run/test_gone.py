"""The end of a group as other loops wait for it: `wait_async`, `fileno`, `when_gone`; several groups on one thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import selectors
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from phalanx._base.threads import Latch
from phalanx.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext, start_processes
from tests.support.helpers import TIMEOUT, Gate, alive, wait_gone
from tests.support.waits import when_we_select

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from phalanx.multiprocessing import PContext, RunProcsResult

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder")]


def gated(gate: Gate, code: int = 0) -> PContext:
    """A group of one that ends with an exit code as soon as the gate opens."""
    return start_processes("gated", "/bin/sh", ("-c", f"head -c 1 {gate.address} >&2; exit {code}"), nprocs=1)


def sleeping() -> PContext:
    return start_processes("sleeping", "sleep", ("600",), nprocs=1)


def not_started() -> SubprocessContext:
    return SubprocessContext("g", "true", {0: ()}, {0: {}}, DefaultLogsSpecs())


def is_closed(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return False
    return True


# --- asyncio


def test_several_tasks_wait_for_one_group(gate: Gate) -> None:
    async def main() -> list[RunProcsResult]:
        tasks = [asyncio.create_task(group.wait_async()) for _ in range(3)]
        await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(*tasks)

    with gated(gate, 3) as group:
        first, *others = asyncio.run(main())
        assert asyncio.run(group.wait_async()) is first  # at once: it has ended
    assert first.failures[0].exitcode == 3
    assert all(other is first for other in others)


def test_a_cancelled_task_stops_waiting_and_leaves_nothing(gate: Gate) -> None:
    async def main() -> RunProcsResult:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(group.wait_async(), 0.001)
        assert len(group._started().ended._actions) == before
        gate.open()
        return await group.wait_async()

    with gated(gate) as group:
        before = len(group._started().ended._actions)
        assert asyncio.run(main()).succeeded


def test_what_wait_raises_it_raises() -> None:
    with sleeping() as group:
        os.kill(group._started()._keeper._guard, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="guard process was killed by signal 9"):
            asyncio.run(group.wait_async())
    with pytest.raises(RuntimeError, match="the group 'g' has not been started"):
        asyncio.run(not_started().wait_async())


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_sigint_ends_asyncio_run(where: str) -> None:
    """A SignalException leaves it, or what asyncio raises, if the group leaves signals to it; the group is closed."""
    groups = [sleeping()] if where == "before" else []

    async def main() -> None:
        if where == "inside":
            groups.append(SubprocessContext("g", "sleep", {0: ("600",)}, {0: {}}, DefaultLogsSpecs(), signals=False))
            groups[0].start()
        with groups[0]:
            killing.append(when_we_select(os.kill, os.getpid(), signal.SIGINT))
            await groups[0].wait_async()

    killing: list[threading.Thread] = []
    with pytest.raises(SignalException if where == "before" else KeyboardInterrupt):
        asyncio.run(main())
    killing[0].join()
    groups[0].close()
    assert wait_gone(groups[0].pids().values()) == set()


# --- descriptors


def test_the_descriptor_is_readable_at_the_end_and_stays_so(gate: Gate) -> None:
    with gated(gate) as group:
        fd = group.fileno()
        assert group.fileno() == fd
        assert not os.get_inheritable(fd)
        assert not select.select([fd], [], [], 0)[0]
        gate.open()
        assert select.select([fd], [], [], TIMEOUT)[0]
        assert group.wait(0) is not None
        assert select.select([group], [], [], 0)[0]
    assert is_closed(fd)
    with pytest.raises(RuntimeError, match="the group 'gated' has been closed"):
        group.fileno()


def test_the_first_question_may_come_after_the_end() -> None:
    with pytest.raises(RuntimeError, match="the group 'g' has not been started"):
        not_started().fileno()
    with start_processes("g", "true", (), nprocs=1) as group:
        group.wait()
        assert select.select([group.fileno()], [], [], 0)[0]
    with pytest.raises(RuntimeError, match="the group 'g' has been closed"):
        group.fileno()


@pytest.mark.filterwarnings("ignore:.*was dropped, and is killed:ResourceWarning")
def test_a_group_that_is_closed_or_dropped_closes_it() -> None:
    group = sleeping()
    fd = group.fileno()
    group.close()
    assert is_closed(fd)
    group = sleeping()
    fd, pids, done = group.fileno(), group.pids(), group._started().done
    del group
    gc.collect()
    assert done.wait(TIMEOUT)
    assert wait_gone(pids.values()) == set()
    gc.collect()
    assert is_closed(fd)


# --- other ends


def test_actions_at_the_end(gate: Gate) -> None:
    seen: list[str] = []
    shown = Latch()
    with gated(gate) as group:
        group.when_gone(lambda: seen.append(f"gone {any(map(alive, group.pids().values()))}"))
        group.when_shown(lambda: seen.append("shown"))
        group.when_shown(shown.open)
        assert seen == []
        gate.open()
        assert shown.wait(TIMEOUT)
        assert seen == ["gone False", "shown"]
        group.when_gone(lambda: seen.append("at once"))
        assert seen[2:] == ["at once"]
        assert group.last_step is None


def test_an_order_to_close_returns_at_once() -> None:
    with sleeping() as group:
        group.order_close(signal.SIGTERM, TIMEOUT)
        result = group.wait(TIMEOUT)
        assert result is not None
        assert result.outcomes[0].signal_sent == signal.SIGTERM
        group.order_close()
    group.order_close()
    with pytest.raises(ValueError, match=r"expected a signal, like signal\.SIGTERM or 15, got 999"):
        group.order_close(999)


def test_a_group_follows_the_last_one_that_was_started(tmp_path: Path) -> None:
    def make(name: str, binary: str, follows: PContext | None) -> SubprocessContext:
        return SubprocessContext(
            name, binary, {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path / name)), follows=follows
        )

    with make("a", "true", None) as first:
        first.start()
        second = make("b", "/no/such/program", first)
        with pytest.raises(FileNotFoundError):
            second.start()
        third = make("c", "true", second)
        assert third._after is first._started().lines.shown
        first.wait()


# --- several groups on one thread


class Relay:
    """Opens the next gate at each end of a group: whoever has to wait for one that ends later, waits for ever.

    The order is from the last group to the first; number 1 is stopped, and number 2 fails.
    """

    COUNT, STOPPED, FAILS = 4, 1, 2

    def __init__(self, gates: list[Gate], groups: list[PContext]) -> None:
        self.gates, self.groups = gates, groups
        self.ended: list[int] = []

    def go_on(self) -> None:
        number = self.COUNT - 1 - len(self.ended)
        if number == self.STOPPED:
            self.groups[number].order_close(signal.SIGTERM, 5)
        elif number >= 0:
            self.gates[number].open()

    def note(self, number: int) -> None:
        self.ended.append(number)
        self.go_on()

    def check(self) -> None:
        assert self.ended == list(reversed(range(self.COUNT)))
        assert [group.wait().state for group in self.groups] == ["succeeded", "stopped", "failed", "succeeded"]


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    with contextlib.ExitStack() as held:
        gates = [held.enter_context(Gate(tmp_path / f"gate{number}")) for number in range(Relay.COUNT)]
        groups = [held.enter_context(gated(gate, int(number == Relay.FAILS))) for number, gate in enumerate(gates)]
        yield Relay(gates, groups)


def test_groups_side_by_side_with_asyncio(relay: Relay) -> None:
    async def watch(number: int) -> None:
        await relay.groups[number].wait_async()
        relay.note(number)

    async def main() -> None:
        tasks = [asyncio.create_task(watch(number)) for number in range(Relay.COUNT)]
        await asyncio.sleep(0)
        relay.go_on()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    relay.check()


def test_groups_side_by_side_with_a_selector(relay: Relay) -> None:
    with selectors.DefaultSelector() as selector:
        for number, group in enumerate(relay.groups):
            selector.register(group, selectors.EVENT_READ, number)
        relay.go_on()
        while selector.get_map():
            ready = selector.select(TIMEOUT)
            assert ready
            for key, _events in ready:
                selector.unregister(key.fileobj)
                relay.note(key.data)
    relay.check()


def test_a_signal_amid_a_selectors_wait_leaves_the_groups(relay: Relay) -> None:
    """It is raised out of the wait, and once more by one of ours, see `PContext.fileno`; the groups go on."""
    with selectors.DefaultSelector() as selector:
        for group in relay.groups:
            selector.register(group, selectors.EVENT_READ)
        sender = when_we_select(os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(SignalException):
            selector.select(TIMEOUT)
        sender.join()
    assert all(group.is_open for group in relay.groups)
    for group in relay.groups:
        group.order_close(signal.SIGTERM, 5)
    with pytest.raises(SignalException):
        relay.groups[0].wait()
    assert [group.wait().state for group in relay.groups] == ["stopped"] * Relay.COUNT
