"""Several groups on one thread: with asyncio, and with a selector."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from phalanx.multiprocessing import SignalException, start_processes
from tests.support.helpers import TIMEOUT, Gate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from phalanx.multiprocessing import PContext

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

MANY = 8


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[list[Gate]]:
    with contextlib.ExitStack() as held:
        yield [held.enter_context(Gate(tmp_path / f"gate{number}")) for number in range(MANY)]


def gated(gate: Gate, code: int) -> PContext:
    """A group of one that ends, as soon as the gate opens, with an exit code."""
    return start_processes("gated", "/bin/sh", ("-c", f"head -c 1 {gate.address} >&2; exit {code}"), nprocs=1)


# --- groups


class Relay:
    """Opens the next gate at each end of a group: whoever has to wait for one that ends later, waits for ever.

    The order is from the last group to the first; number 3 is stopped, and number 5 fails.
    """

    STOPPED, FAILS = 3, 5

    def __init__(self, gates: list[Gate], groups: list[PContext]) -> None:
        self.gates = gates
        self.groups = groups
        self.ended: list[int] = []

    def go_on(self) -> None:
        number = MANY - 1 - len(self.ended)
        if number == self.STOPPED:
            self.groups[number].order_close(signal.SIGTERM, 5)
        elif number >= 0:
            self.gates[number].open()

    def note(self, number: int) -> None:
        self.ended.append(number)
        self.go_on()

    def check(self) -> None:
        assert self.ended == list(reversed(range(MANY)))
        states = [group.wait(0) for group in self.groups]
        expected = {self.STOPPED: "stopped", self.FAILS: "failed"}
        assert [each and each.state for each in states] == [expected.get(n, "succeeded") for n in range(MANY)]


@contextlib.contextmanager
def relayed(gates: list[Gate]) -> Iterator[Relay]:
    with contextlib.ExitStack() as held:
        groups = [held.enter_context(gated(gate, int(number == Relay.FAILS))) for number, gate in enumerate(gates)]
        yield Relay(gates, groups)


def test_groups_side_by_side_with_asyncio(gates: list[Gate]) -> None:
    async def watch(relay: Relay, number: int) -> None:
        await relay.groups[number].wait_async()
        relay.note(number)

    async def main(relay: Relay) -> None:
        tasks = [asyncio.create_task(watch(relay, number)) for number in range(MANY)]
        await asyncio.sleep(0)
        relay.go_on()
        await asyncio.gather(*tasks)

    with relayed(gates) as relay:
        asyncio.run(main(relay))
        relay.check()


def test_groups_side_by_side_with_a_selector(gates: list[Gate]) -> None:
    with relayed(gates) as relay, selectors.DefaultSelector() as selector:
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


def test_a_signal_while_groups_are_waited_for_with_a_selector(gates: list[Gate]) -> None:
    """It is raised out of the wait, and once more by one of ours, see `PContext.fileno`; the groups go on."""
    with relayed(gates) as relay, selectors.DefaultSelector() as selector:
        for number, group in enumerate(relay.groups):
            selector.register(group, selectors.EVENT_READ, number)
        sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        sender.start()
        with pytest.raises(SignalException):
            selector.select(TIMEOUT)
        sender.join()
        assert all(group.is_open for group in relay.groups)
        for group in relay.groups:
            group.order_close(signal.SIGTERM, 5)
        with pytest.raises(SignalException):
            relay.groups[0].wait()
        assert [group.wait().state for group in relay.groups] == ["stopped"] * MANY
