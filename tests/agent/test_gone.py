"""The end of a group as other loops wait for it: `wait_async`, `fileno`, `when_gone`; and groups that follow others."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from phalanx._base.threads import Latch
from phalanx.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext, start_processes
from tests.support import workers
from tests.support.helpers import TIMEOUT, alive, wait_gone

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.multiprocessing import PContext, RunProcsResult
    from tests.support.helpers import Gate

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder")]


def gated(gate: Gate, then: str = "exit 0") -> PContext:
    """A group of one that ends as soon as the gate opens."""
    return start_processes("gated", "/bin/sh", ("-c", f"head -c 1 {gate.address}; {then}"), nprocs=1)


def sleeping() -> PContext:
    return start_processes("sleeping", "sleep", ("600",), nprocs=1)


# --- asyncio


def test_several_tasks_wait_for_one_group(gate: Gate) -> None:
    async def main() -> list[RunProcsResult]:
        tasks = [asyncio.create_task(group.wait_async()) for _ in range(3)]
        await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(*tasks)

    with gated(gate, "exit 3") as group:
        first, *others = asyncio.run(main())
    assert first.failures[0].exitcode == 3
    assert all(other is first for other in others)


def test_a_group_that_has_ended_is_waited_for_at_once() -> None:
    with start_processes("g", "true", (), nprocs=1) as group:
        group.wait()
        assert asyncio.run(group.wait_async()).succeeded
    assert asyncio.run(group.wait_async()).succeeded


def test_the_loop_goes_on_meanwhile(gate: Gate) -> None:
    async def main() -> RunProcsResult:
        async def opens() -> None:
            gate.open()

        waiting = asyncio.create_task(group.wait_async())
        await asyncio.sleep(0)
        await opens()
        return await waiting

    with gated(gate) as group:
        assert asyncio.run(main()).succeeded


def test_a_cancelled_task_stops_waiting_and_leaves_nothing(gate: Gate) -> None:
    async def main() -> RunProcsResult:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(group.wait_async(), 0.001)
        assert len(group._started().ended._waiters) == before
        gate.open()
        return await group.wait_async()

    with gated(gate) as group:
        before = len(group._started().ended._waiters)
        assert asyncio.run(main()).succeeded


def test_the_loop_may_be_closed_before_the_end(gate: Gate) -> None:
    with gated(gate) as group:
        loop = asyncio.new_event_loop()
        task = loop.create_task(group.wait_async())
        loop.run_until_complete(asyncio.sleep(0))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        gate.open()
        assert group.wait(TIMEOUT) is not None


def test_what_wait_raises_it_raises() -> None:
    with sleeping() as group:
        os.kill(group._started()._keeper._guard, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="guard process was killed by signal 9"):
            asyncio.run(group.wait_async())
    group = SubprocessContext("g", "true", {0: ()}, {0: {}}, DefaultLogsSpecs())
    with pytest.raises(RuntimeError, match="the group 'g' has not been started"):
        asyncio.run(group.wait_async())


def interrupt_the_loop(thread: int) -> None:
    """Send SIGINT when the loop of that thread waits: one that comes just before is noticed with the next event only.

    And what is raised in a callback, the loop itself swallows.
    """
    seen, until = 0, time.monotonic() + TIMEOUT
    while seen < 3 and time.monotonic() < until:
        frame = sys._current_frames()[thread]
        seen = seen + 1 if frame.f_code.co_filename.endswith("selectors.py") else 0
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_sigint_ends_asyncio_run(where: str) -> None:
    """A SignalException leaves it, or what asyncio raises, if the group leaves signals to it; the group is closed."""
    groups: list[PContext] = []

    async def main() -> None:
        if where == "inside":
            group = SubprocessContext("g", "sleep", {0: ("600",)}, {0: {}}, DefaultLogsSpecs(), signals=False)
            group.start()
            groups.append(group)
        with groups[0]:
            killing.append(threading.Thread(target=interrupt_the_loop, args=(threading.get_ident(),)))
            killing[0].start()
            await groups[0].wait_async()

    killing: list[threading.Thread] = []
    if where == "before":
        groups.append(sleeping())
    with pytest.raises(SignalException if where == "before" else KeyboardInterrupt):
        asyncio.run(main())
    killing[0].join()
    groups[0].close()
    assert wait_gone(groups[0].pids().values()) == set()


# --- descriptors


def is_readable(fd: int, seconds: float = 0) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def test_the_descriptor_is_readable_at_the_end_and_stays_so(gate: Gate) -> None:
    with gated(gate) as group:
        fd = group.fileno()
        assert group.fileno() == fd
        assert not os.get_inheritable(fd)
        assert not is_readable(fd)
        gate.open()
        assert is_readable(fd, TIMEOUT)
        assert group.wait(0) is not None
        assert is_readable(group.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(RuntimeError, match="the group 'gated' has been closed"):
        group.fileno()


def test_select_takes_groups_themselves(gate: Gate) -> None:
    with gated(gate) as ends, sleeping() as stays:
        gate.open()
        assert select.select([stays, ends], [], [], TIMEOUT)[0] == [ends]


def test_the_first_question_may_come_after_the_end() -> None:
    with start_processes("g", "true", (), nprocs=1) as group:
        group.wait()
        assert group._started().done.wait(TIMEOUT)
        assert is_readable(group.fileno())
    with pytest.raises(RuntimeError, match="the group 'g' has been closed"):
        group.fileno()


def test_a_group_that_was_not_started_has_none() -> None:
    group = SubprocessContext("g", "true", {0: ()}, {0: {}}, DefaultLogsSpecs())
    with pytest.raises(RuntimeError, match="the group 'g' has not been started"):
        group.fileno()


def test_asyncio_watches_it(gate: Gate) -> None:
    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(group.fileno(), over.set)
        gate.open()
        await asyncio.wait_for(over.wait(), TIMEOUT)
        loop.remove_reader(group.fileno())

    with gated(gate) as group:
        asyncio.run(main())


def test_closed_before_the_end_it_is_closed_with_the_group() -> None:
    group = sleeping()
    fd = group.fileno()
    group.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.filterwarnings("ignore:.*was dropped, and is killed:ResourceWarning")
def test_a_group_that_is_dropped_closes_it() -> None:
    group = sleeping()
    fd, pids, done = group.fileno(), group.pids(), group._started().done
    del group
    gc.collect()
    assert done.wait(TIMEOUT)
    assert wait_gone(pids.values()) == set()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


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


def test_a_fork_hears_nothing_of_the_end() -> None:
    with start_processes("g", workers.nothing, nprocs=1, start_method="fork") as group:
        group.wait()
        assert group.wait_gone(0) is group.wait(0)
