"""Several groups, and several `Attempts`, on one thread: with asyncio, with a selector, and with `SideBySide`."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import os
import re
import selectors
import signal
import sys
import threading
from typing import TYPE_CHECKING, Self

import pytest

from phalanx._agent.attempt_end import AttemptEnd, Ending
from phalanx._agent.attempts import Attempts, Team
from phalanx._agent.side_by_side import SideBySide
from phalanx._agent.worker_team import WorkerTeam
from phalanx._engine import host_signals
from phalanx._events.listener import Listener
from phalanx._events.stream import EventStream
from phalanx.agent import RestartPolicy
from phalanx.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext, start_processes
from tests.support.helpers import PYTHON, TIMEOUT, Gate, Ready, alive, let_a_request_pass, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType
    from typing import Any

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


# --- attempts


def shell_team(script: str | Callable[[int], str], said: list[str] | None = None) -> WorkerTeam:
    """A team of one shell, with ``$ATTEMPT``."""

    def make(attempt: int, before: PContext | None) -> PContext:
        text = script if isinstance(script, str) else script(attempt)
        env = {"ATTEMPT": str(attempt), "RANK": "0"}
        return SubprocessContext("sh", "/bin/sh", {0: ("-c", text)}, {0: env}, DefaultLogsSpecs(), follows=before)

    return WorkerTeam(make, speak=(said if said is not None else []).append)


@contextlib.contextmanager
def carried(teams: list[WorkerTeam], restarts: int = 0, **policy: Any) -> Iterator[SideBySide]:
    try:
        attempts = [
            Attempts(team, RestartPolicy(restarts, **policy), signals=False, worker=rank, events=EventStream())
            for rank, team in enumerate(teams)
        ]
        with SideBySide(attempts) as side_by_side:
            yield side_by_side
    finally:
        for team in teams:
            team.close()
        for each in attempts:
            close_events(each)


def close_events(attempts: Attempts) -> None:
    """End the threads that observe these attempts."""
    assert attempts._events is not None
    assert attempts._events.close(TIMEOUT) == []


def observe(attempts: Attempts, observer: Callable[[str, dict[str, Any]], object]) -> None:
    """Have ``observer`` called with the name of each event of these attempts and its facts, on a thread of its own."""
    assert attempts._events is not None
    attempts._events.subscribe("observer", Listener(lambda event: observer(event["name"], event), "tests"))


def states(endings: list[Ending]) -> list[str]:
    return [ending.state for ending in endings]


def test_attempts_of_different_lengths_end_for_themselves(gates: list[Gate]) -> None:
    """Each lets the next end: none waits for another. One is stopped, one fails in each attempt, one in its first."""

    def script(number: int, code: str = "0") -> str:
        after = f"; printf . > {gates[number - 1].address}" if number else ""
        return f"head -c 1 {gates[number].address} > /dev/null{after}; exit {code}"

    teams = [shell_team(script(number)) for number in range(MANY)]
    teams[5] = shell_team(f"test $ATTEMPT = 0 && exit 3; {script(5)}")
    teams.append(shell_team("exit 7"))
    teams.append(shell_team("exec sleep 600"))
    with carried(teams, 2) as carrying:

        def watch(name: str, facts: dict[str, Any]) -> None:
            if name == "agent.state" and facts["state"] == "SUCCEEDED":
                carrying.attempts[-1].ask_stop(signal.SIGTERM, 5)

        observe(carrying.attempts[0], watch)
        gates[-1].open()
        endings = carrying.run()
    assert states(endings) == ["succeeded"] * MANY + ["failed", "stopped"]
    assert [len(ending.ends) for ending in endings] == [1] * 5 + [2] + [1] * 2 + [3, 1]
    assert endings[5].ends[0].exitcode == 3
    assert endings[MANY].why == "2 restarts, and no more"


def test_one_after_another_on_the_same_thread() -> None:
    for code, state in (("0", "succeeded"), ("3", "failed")):
        with carried([shell_team(f"exit {code}") for _ in range(2)]) as carrying:
            assert states(carrying.run()) == [state] * 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_delay_of_one_delays_no_other(gate: Gate) -> None:
    said: list[str] = []
    teams = [shell_team("exit 3", said), shell_team(f"test $ATTEMPT = 1 || exit 4; head -c 1 {gate.address}", said)]
    policies = RestartPolicy(1, backoff=600, backoff_cap=600, jitter=0), RestartPolicy(1)
    attempts = [
        Attempts(team, policy, signals=False, worker=n, events=EventStream())
        for n, (team, policy) in enumerate(zip(teams, policies, strict=True))
    ]
    with SideBySide(attempts) as carrying:

        def stop(name: str, facts: dict[str, Any]) -> None:
            if name == "agent.state" and facts["state"] == "SUCCEEDED":
                attempts[0].ask_stop(signal.SIGTERM, 5)

        def go_on(name: str, facts: dict[str, Any]) -> None:
            if name == "agent.state" and facts["state"] == "WAITING":
                gate.open()

        observe(attempts[0], go_on)
        observe(attempts[1], stop)
        assert states(carrying.run()) == ["stopped", "succeeded"]
    for each in attempts:
        close_events(each)
    for team in teams:
        team.close()
    assert sorted(line.partition(" after ")[0] for line in said) == [
        "phalanx: rank 0: attempt 0 failed",
        "phalanx: rank 1: attempt 0 failed",
    ]
    follows = r"attempt 1 follows in (10m00s|9m5\ds) \(restart 1 of at most 1\)"
    assert any(re.search(f": exited with code 3; no error was recorded; {follows}$", line) for line in said)


def test_a_first_start_that_fails_is_raised_and_the_others_can_be_stopped() -> None:
    def missing(_attempt: int, before: PContext | None) -> PContext:
        return SubprocessContext("g", "/no/such/program", {0: ()}, {0: {}}, DefaultLogsSpecs(), follows=before)

    with carried([shell_team("exec sleep 600"), WorkerTeam(missing), shell_team("exec sleep 600")]) as carrying:
        with pytest.raises(FileNotFoundError):
            carrying.run()
        carrying.ask_stop(signal.SIGKILL, 0)
        assert states(carrying.run()) == ["stopped", "failed", "stopped"]


def test_a_worker_that_the_kernel_cannot_start_is_raised_likewise(tmp_path: Path) -> None:
    """The keeper finds out, when the launch has returned."""
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)

    def make(_attempt: int, before: PContext | None) -> PContext:
        return SubprocessContext("g", str(broken), {0: ()}, {0: {}}, DefaultLogsSpecs(), follows=before)

    with carried([WorkerTeam(make), shell_team("exec sleep 600")], 3) as carrying:
        with pytest.raises(OSError, match="Exec format error"):
            carrying.run()
        carrying.ask_stop(signal.SIGTERM, 5)
        assert states(carrying.run()) == ["failed", "stopped"]


def test_a_fork_cannot_carry_them() -> None:
    with carried([shell_team("exit 0")]) as carrying:
        pid = os.fork()
        if pid == 0:
            try:
                carrying.run()
            except RuntimeError:
                os._exit(42)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        assert states(carrying.run()) == ["succeeded"]


# --- signals


def stopped_by_signals(carrying: SideBySide, *orders: tuple[int, float]) -> list[Ending]:
    """Run until a signal comes, and stop; with the next order at the next signal."""
    left = list(orders)
    while True:
        try:
            return carrying.run()
        except SignalException:
            carrying.ask_stop(*left.pop(0))


def tells(ready: Ready, then: str) -> str:
    return f'{PYTHON} -S -c "{ready.python("__import__(chr(111)+chr(115)).getppid()")}"; {then}'


def test_a_signal_stops_all_within_one_grace_and_a_second_kills(ready: Ready) -> None:
    teams = [shell_team(f"trap '' TERM; {tells(ready, 'sleep 600 & wait')}") for _ in range(3)]
    pids: list[int] = []
    sent: list[object] = []

    def send() -> None:
        pids.extend(ready.pids(3))
        os.kill(os.getpid(), signal.SIGTERM)

    with carried(teams, 3) as carrying:

        def again(name: str, facts: dict[str, Any]) -> None:
            if name == "agent.state" and facts["state"] == "STOPPING" and not sent:
                sent.append(facts)
                let_a_request_pass()
                os.kill(os.getpid(), signal.SIGINT)

        observe(carrying.attempts[-1], again)
        thread = threading.Thread(target=send)
        thread.start()
        endings = stopped_by_signals(carrying, (signal.SIGTERM, 600), (signal.SIGKILL, 0))
        thread.join()
    assert states(endings) == ["stopped"] * 3
    assert wait_gone(pids) == set()


class Interrupter:
    """Sends SIGTERM to this process when the ``moment``-th line of the agent's own source is about to run.

    Lines of ``with`` are passed over: they are run again before ``__exit__`` is called, where no real signal raises.
    """

    def __init__(self, moment: int, *names: str) -> None:
        self.left = moment
        self.names = names
        self.fired = ""

    def __enter__(self) -> Self:
        host_signals.acquire(self)  # `run` has not done so yet in its first lines
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)
        host_signals.release(self)

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.endswith(self.names) or frame.f_code.co_name == "__del__":  # what is raised there is lost
            return None
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.fired = f"{os.path.basename(name)}:{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGTERM)
        return self.trace


class Simulated(Team):
    """Fails in each attempt but the last. Its start returns before its workers run."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.up: int | None = None
        self.started: list[int] = []
        self.stopped = False

    def begin(self, attempt: int) -> None:
        assert self.up is None, "an attempt begins while one runs"
        assert attempt not in self.started
        self.stopped = False

    def start(self, attempt: int, wake: Callable[[], None]) -> None:
        self.up = attempt
        self.started.append(attempt)
        wake()

    def is_up(self) -> bool:
        return self.up is not None

    def ended(self) -> AttemptEnd | None:
        number, self.up = self.up, None
        if number is None or self.stopped:
            return AttemptEnd("stopped")
        return AttemptEnd("succeeded") if number == self.last else AttemptEnd("failed", 0, 1, "exited with code 1")

    def stop(self, death_signal: int, grace: float) -> None:  # noqa: ARG002 - as `Team` has it
        self.stopped = True

    def say(self, text: str) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("then_stop", [True, False])
def test_a_signal_between_any_two_lines(monkeypatch: pytest.MonkeyPatch, then_stop: bool) -> None:
    """Whatever the line: each attempt is noted once, and none is forgotten."""
    monkeypatch.setattr(host_signals, "_APART", 0.0)
    seen = set()
    moment = 0
    while True:
        moment += 1
        teams = [Simulated(last) for last in (0, 2, 1)]
        attempts = [Attempts(team, RestartPolicy(2), signals=False) for team in teams]
        with SideBySide(attempts) as carrying:
            with Interrupter(moment, "_agent/attempts.py", "_agent/side_by_side.py") as interrupter:
                try:
                    endings = carrying.run()
                except SignalException:
                    sys.settrace(None)
                    if then_stop:
                        carrying.ask_stop(signal.SIGTERM, 1)
                    endings = carrying.run()
            where = interrupter.fired
        if not where:
            break
        seen.add(where.partition(":")[2].partition(":")[0])
        assert len(endings) == 3, where
        for team, ending in zip(teams, endings, strict=True):
            numbers = [end.number for end in ending.ends]
            assert numbers == list(range(len(numbers))), where
            assert set(team.started) <= set(numbers), where
            assert ending.state in ("succeeded", "stopped"), where
            assert ending.state == "stopped" or len(numbers) == team.last + 1, where
    assert moment > 150
    assert {"run", "_turn", "advance", "_step", "_start_group", "_see_up", "_note_end", "_follow", "_see"} <= seen


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*was dropped, and is killed:ResourceWarning")
def test_a_signal_between_two_lines_of_groups_that_start_and_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the line: all end, and no worker is left."""
    monkeypatch.setattr(host_signals, "_APART", 0.0)
    step = int(os.environ.get("PHALANX_STEP", "17"))
    pids: set[int] = set()
    seen, moment = set(), 1
    while True:
        teams = [shell_team(lambda attempt: "exit 1" if attempt == 0 else "exec sleep 600"), shell_team("exit 0")]
        with carried(teams, 3) as carrying:

            def stop_second(name: str, facts: dict[str, Any], carrying: SideBySide = carrying) -> None:
                if name == "agent.state" and (facts["state"], facts["attempt"]) == ("RUNNING", 1):
                    carrying.attempts[0].ask_stop(signal.SIGTERM, 5)

            observe(carrying.attempts[0], stop_second)
            names = [f"_agent/{name}.py" for name in ("worker_team", "group_team", "attempts", "side_by_side")]
            names += ["_group/start.py", "_group/context.py"]
            with Interrupter(moment, *names) as interrupter:
                endings = stopped_by_signals(carrying, *[(signal.SIGTERM, 5.0)] * 2)
            for team in teams:
                if team.group is not None and team.group._supervisor is not None:
                    pids |= set(team.group.pids().values())
        where = interrupter.fired
        assert set(states(endings)) <= {"stopped", "succeeded"}, where
        for ending in endings:
            numbers = [end.number for end in ending.ends]
            assert numbers == list(range(len(numbers))), where
            assert len(numbers) <= 2, where
        if not where:
            break
        seen.add(where.split(":")[1])
        moment += step
    assert not any(map(alive, pids))
    assert seen >= {"_start", "_turn"}
