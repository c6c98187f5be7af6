"""A group is paused and continued: all of its processes; and whatever ends it meanwhile, nobody is left stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.multiprocessing import KeeperLostError, start_processes
from phalanx.timer import TimerSpecs, expires
from tests.engine.test_orphan_grace import LONG, everybody, launched
from tests.support.helpers import TIMEOUT, alive, descendants, pass_gate, rest, tell, wait_gone
from tests.support.insides import helpers_of, wait_until_stopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from phalanx.multiprocessing import PContext
    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")  # groups that failed leave their evidence


def with_others(address: str) -> None:
    """Live with a child in the session, one in a session of its own, and an orphan that is the keeper's child."""

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    for way in ("child", "session", "orphan"):
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if way != "child":
                os.setsid()
            if way == "orphan" and os.fork():
                os.execv("/bin/true", ["true"])
            tell(address, str(os.getpid()))
            rest()
    tell(address, str(os.getpid()))
    try:
        rest()
    except SystemExit:
        tell(address, "SIGTERM")


@contextmanager
def paused(ready: Ready, *expected: bool, most: int = 1) -> Iterator[tuple[PContext, list[int]]]:
    """A group that is paused, and all of its processes. Its events are the expected ones, up to ``most`` times over."""
    pauses: list[bool] = []
    is_reported = threading.Event()

    def listen(event: dict[str, Any]) -> None:
        if event["name"] == "group.paused":
            pauses.append(event["paused"])
            is_reported.set()

    with start_processes("p", with_others, (ready.address,), nprocs=2, start_method="fork", on_event=listen) as group:
        pids = ready.pids(8)
        group.pause()
        wait_until_stopped(pids)
        assert is_reported.wait(TIMEOUT)
        yield group, pids
    times = len(pauses) // (1 + len(expected))
    assert 1 <= times <= most
    assert pauses == [True, *expected] * times


@pytest.mark.slow
def test_all_processes_stop_and_go_on(ready: Ready) -> None:
    with paused(ready, False, most=20) as (group, pids):
        group.pause()  # which changes nothing
        assert group.is_paused
        assert group.wait(0.2) is None
        assert [one.state for one in group.status().values()] == ["running", "running"]
        for _ in range(20):  # the last order holds, however fast they come: of those that come at once, it alone
            group.pause()
            group.resume()
        wait_until_stopped(pids, stopped=False)
        assert group.wait(0) is None
        group.signal(signal.SIGTERM)
        assert ready.wait(2) == ["SIGTERM", "SIGTERM"]
        assert group.wait().succeeded
    assert wait_gone(pids) == set()


@pytest.mark.slow
def test_a_paused_group_that_is_closed_handles_sigterm(ready: Ready) -> None:
    with paused(ready, False) as (group, pids):
        group.close(timeout=TIMEOUT)
        assert ready.wait(2) == ["SIGTERM", "SIGTERM"]
        assert not group.is_paused
        assert [one.state for one in group.status().values()] == ["stopped", "stopped"]
    assert wait_gone(pids) == set()


@pytest.mark.slow
def test_a_paused_group_that_is_killed_leaves_nobody(ready: Ready) -> None:
    with paused(ready, False) as (group, pids):
        group.close(signal.SIGKILL)
        assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.slow
def test_a_failure_in_a_paused_group_stops_the_others(ready: Ready) -> None:
    with paused(ready, False) as (group, pids):
        os.kill(group.pids()[1], signal.SIGKILL)
        assert ready.wait() == ["SIGTERM"]
        result = group.wait()
    assert result.root_cause is not None
    assert (result.root_cause.local_rank, result.root_cause.exitcode) == (1, -signal.SIGKILL)
    assert wait_gone(pids) == set()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["guard", "keeper"])
def test_a_helper_of_a_paused_group_is_killed(who: str, ready: Ready) -> None:
    with paused(ready, *[False] * (who == "guard")) as (group, pids):
        guard, keeper = helpers_of(group)
        os.kill({"guard": guard, "keeper": keeper}[who], signal.SIGKILL)
        assert wait_gone([*pids, guard, keeper], 5) == set()
        with pytest.raises(KeeperLostError):
            group.wait(TIMEOUT)
        assert not group.is_paused


@pytest.mark.slow
@pytest.mark.parametrize("grace", [0, LONG])
def test_the_launcher_of_a_paused_group_is_killed(grace: float, ready: Ready, gate: Gate, tmp_path: Path) -> None:
    with launched("fork", ready, gate, tmp_path, grace) as launcher:
        found, guard, keeper = everybody(launcher, ready)
        launcher.send_signal(signal.SIGUSR1)
        wait_until_stopped(found - {guard, keeper})
        launcher.kill()
        launcher.wait()
        if grace:
            assert ready.wait(2) == ["SIGTERM", "SIGTERM"]
            gate.open(2)
        assert wait_gone(found | descendants(launcher.pid)) == set()


def hangs_unless_paused(address: str, gate: str) -> None:
    with expires(1.0, scope="step"):
        tell(address, str(os.getpid()))
        pass_gate(gate)


def with_a_timer(ready: Ready, gate: Gate) -> PContext:
    args, timers = (ready.address, gate.address), TimerSpecs(on_expiry="kill")
    return start_processes("p", hangs_unless_paused, args, nprocs=1, start_method="fork", timers=timers)


@pytest.mark.slow
def test_no_timer_expires_in_a_pause(ready: Ready, gate: Gate) -> None:
    with with_a_timer(ready, gate) as group:
        pids = ready.pids()
        group.pause()
        wait_until_stopped(pids)
        assert group.wait(1.5) is None
        gate.open()
        group.resume()
        assert group.wait().succeeded


@pytest.mark.slow
def test_a_group_that_has_ended_is_not_paused(ready: Ready, gate: Gate) -> None:
    with with_a_timer(ready, gate) as group:
        gate.open()
        group.wait()
        group.pause()
        assert not group.is_paused
    group.resume()
    assert not group.is_paused
