"""Attempts whose every attempt is a group of real processes: failures, starts, stops, signals, restarts, leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx._base.stderr import mention
from phalanx._logs import pump
from phalanx.agent import RestartPolicy
from phalanx.multiprocessing import DefaultLogsSpecs, MultiprocessContext, SignalException, Std
from phalanx.timer import TimerSpecs, progress
from tests.support.attempt_groups import (
    Ending,
    GroupTeam,
    Interrupter,
    LocalRunner,
    Told,
    interrupted_at_each_line,
    shells,
)
from tests.support.helpers import PYTHON, TIMEOUT, alive, let_a_request_pass, wait_gone
from tests.support.streams import observed_by
from tests.support.waits import when_we_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from phalanx.multiprocessing import PContext
    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

SLEEPS = "exec sleep 600"


@contextlib.contextmanager
def attempted(team: GroupTeam, restarts: int = 0, **options: Any) -> Iterator[LocalRunner]:
    """Attempts, closed at the end, and their groups."""
    observe = options.pop("observe", None)
    policy = RestartPolicy(restarts, **options)
    try:
        with observed_by(observe) as events, LocalRunner(team, policy, events=events) as attempts:
            yield attempts
    finally:
        team.close()


def tells(ready: Ready, then: str) -> str:
    """A script that says its pid, and goes on."""
    return f'{PYTHON} -S -c "{ready.python("__import__(chr(111)+chr(115)).getppid()")}"; {then}'


# --- failures


def test_a_group_that_fails_twice_and_succeeds() -> None:
    team = shells('test "$ATTEMPT" = 2 || exit 3', 2)
    with attempted(team, 5) as attempts:
        ending = attempts.run()
        assert (ending.state, ending.why) == ("succeeded", "")
        assert [(end.number, end.state, end.exitcode) for end in ending.ends] == [
            (0, "failed", 3),
            (1, "failed", 3),
            (2, "succeeded", None),
        ]
        assert [end.rank in (0, 1) for end in ending.ends] == [True, True, False]
        assert all(end.began <= end.ended for end in ending.ends)
        assert team.result is not None
        assert team.result.succeeded
        assert team.lost is None


def advance() -> None:
    if os.environ["ATTEMPT"] == "0":
        progress(7)
        os._exit(1)
    progress(3)


def test_the_step_that_was_reached() -> None:
    def make(attempt: int, before: PContext | None) -> PContext:
        envs = {0: {"ATTEMPT": str(attempt)}}
        return MultiprocessContext(
            "g", advance, {0: ()}, envs, "fork", DefaultLogsSpecs(), timers=TimerSpecs(), follows=before
        )

    team = Told(make)
    with attempted(team, 1) as attempts:
        ending = attempts.run()
        assert team.group is not None
        assert team.group.last_step == 3
    assert [(end.state, end.step) for end in ending.ends] == [("failed", 7), ("succeeded", 3)]


# --- stops


def in_state(state: str, action: Callable[[], object], attempt: int = 0) -> Callable[[str, dict[str, Any]], None]:
    """Return an observer that calls ``action`` once, on a thread of its own, in a state of the agent."""
    done = [False]

    def observe(name: str, facts: dict[str, Any]) -> None:
        is_it = name == "agent.state" and facts["state"] == state and facts["attempt"] >= attempt
        if is_it and not done[0]:
            done[0] = True
            action()

    return observe


def stopped_by_signals(attempts: LocalRunner, *orders: tuple[int, float]) -> Ending:
    """Run until a signal comes, and stop; with the next order at the next signal."""
    left = list(orders)
    while True:
        try:
            return attempts.run()
        except SignalException:
            attempts.ask_stop(*left.pop(0))


def pids_of(team: GroupTeam) -> list[int]:
    with contextlib.suppress(RuntimeError):  # it was not started
        return [] if team.group is None else [*team.group.pids().values()]
    return []


@pytest.mark.parametrize("how", ["thread", "signal"])
@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "WAITING", "RESTARTING"])
def test_nothing_starts_after_a_stop(state: str, how: str) -> None:
    team = shells(lambda attempt: "exit 1" if attempt == 0 and state == "WAITING" else "trap '' TERM; sleep 600 & wait")

    def stop() -> None:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            attempts.ask_stop(signal.SIGTERM, 0.05)

    with attempted(team, 3, backoff=600, backoff_cap=600, jitter=0, observe=in_state(state, stop)) as attempts:
        if state == "RESTARTING":
            when_we_wait(lambda: attempts.ask_restart(signal.SIGTERM, 600, "asked for"))
        ending = stopped_by_signals(attempts, (signal.SIGTERM, 0.05))
        assert ending.state == "stopped"
        assert [end.number for end in ending.ends] == [0] or (state, ending.ends) == ("STARTING", ())
        assert wait_gone(pids_of(team)) == set()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_kills(ready: Ready) -> None:
    team = shells(f"trap '' TERM; {tells(ready, SLEEPS)}")

    def again() -> None:
        let_a_request_pass()
        os.kill(os.getpid(), signal.SIGINT)

    def first() -> None:
        ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    with attempted(team, 3, observe=in_state("STOPPING", again)) as attempts:
        killing = threading.Thread(target=first)
        killing.start()
        ending = stopped_by_signals(attempts, (signal.SIGTERM, 600), (signal.SIGKILL, 0))
        assert ending.state == "stopped"
        assert [end.state for end in ending.ends] == ["stopped"]
        killing.join()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*was dropped, and is killed:ResourceWarning")
def test_a_signal_between_two_lines_of_start_run_and_restart() -> None:
    """Whatever the line: it ends stopped, no worker is left, and no attempt is noted twice."""
    pids: set[int] = set()

    def run(interrupter: Interrupter) -> str:
        team = shells(lambda attempt: "exit 1" if attempt == 0 else SLEEPS)
        observe = in_state("RUNNING", lambda: attempts.ask_stop(signal.SIGTERM, 5), attempt=1)
        with attempted(team, 3, observe=observe) as attempts:
            with interrupter:
                ending = stopped_by_signals(attempts, *[(signal.SIGTERM, 5.0)] * 2)
            pids.update(pids_of(team))
        assert ending.state == "stopped", interrupter.fired
        numbers = [end.number for end in ending.ends]
        assert numbers == list(range(len(numbers))), interrupter.fired
        assert len(numbers) <= 2, interrupter.fired
        return interrupter.fired

    step = int(os.environ.get("PHALANX_STEP", "9"))
    seen = interrupted_at_each_line(run, ("_group/context.py", "_group/restart_policy.py"), step=step)
    assert not any(map(alive, pids))
    assert {"_start", "_turn"} <= seen


# --- the console


def read_all(fd: int) -> str:
    data = b""
    while part := os.read(fd, 65536):
        data += part
    os.close(fd)
    return data.decode()


@contextlib.contextmanager
def console() -> Iterator[int]:
    """Our own stdout and stderr are a pipe meanwhile, of which this is the end to read."""
    out, into = os.pipe()
    saved = [os.dup(1), os.dup(2)]
    os.dup2(into, 1)
    os.dup2(into, 2)
    os.close(into)
    try:
        yield out
    finally:
        for fd, former in enumerate(saved, 1):
            os.dup2(former, fd)
            os.close(former)


MANY = "i=0; while [ $i -lt 3000 ]; do echo $ATTEMPT line $i of the attempt, of some length; i=$((i+1)); done"


@pytest.mark.slow
def test_a_restart_does_not_wait_for_a_slow_console(
    ready: Ready, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The new attempt runs before the old lines are taken; and these come first, all of them."""
    monkeypatch.setattr(pump, "STUCK", TIMEOUT)
    team = shells(
        lambda attempt: (
            f"{MANY}; " + ("exit 1" if attempt < 2 else tells(ready, f"head -c 1 {gate.address} >/dev/null"))
        ),
        folder=str(tmp_path / "logs"),
        specs={"redirects": Std.NONE, "tee": Std.OUT},
    )
    monkeypatch.setattr(team, "_speak", mention)
    texts: list[str] = []
    with capfd.disabled(), console() as out:
        reader = threading.Thread(target=lambda: texts.append(read_all(out)))

        def look() -> None:
            ready.wait()
            states.append(attempts.state)
            shown.extend(group.is_open for group in team._before)
            reader.start()
            gate.open()

        states: list[str] = []
        shown: list[bool] = []
        with attempted(team, 5) as attempts:
            thread = threading.Thread(target=look)
            thread.start()
            ending = attempts.run()
            thread.join()
        assert ending.state == "succeeded"
    reader.join()
    assert shown == [True, True], "the console had taken what two attempts wrote"
    expected = []
    for n in range(3):
        expected += [f"[0] {n} line {i} of the attempt, of some length" for i in range(3000)]
        expected += [f"phalanx: attempt {n} failed after"] * (n < 2)
    assert [re.sub(" after .*", " after", line) for line in texts[0].splitlines()] == expected


# --- leaks


def counted(last: int, then: Callable[[int], object]) -> tuple[Callable[[int], str], list[tuple[int, int]]]:
    """Return scripts that fail until the ``last`` attempt, and how many descriptors and threads there are at each."""
    seen: list[tuple[int, int]] = []

    def script(attempt: int) -> str:
        then(attempt)
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        return "exit 0" if attempt == last else "echo failed; exit 1"

    return script, seen


@pytest.mark.long
def test_many_attempts_leave_nothing() -> None:
    """Neither descriptors nor threads grow in number, nor memory, while they go on."""
    memory: list[int] = []

    def measure(attempt: int) -> None:
        if attempt in (25, 100):
            gc.collect()
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())

    script, seen = counted(100, measure)
    team = shells(script)
    with attempted(team, 1000) as attempts:
        ending = attempts.run()
        assert (ending.state, len(ending.ends)) == ("succeeded", 101)
        assert len(team._before) <= 4
    before, after = ([max(counts) for counts in zip(*part, strict=True)] for part in (seen[5:30], seen[30:]))
    assert after[0] <= before[0] + 4, "descriptors"
    assert after[1] <= before[1] + 2, "threads"
    assert memory[1] - memory[0] < 2 << 20


@pytest.mark.slow
def test_nothing_grows_while_nobody_reads_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four groups wait for it at most; beyond that, a restart waits until the oldest has given up.

    How many of the four wait in an attempt depends on how long the attempts before took: on the machine.
    """
    monkeypatch.setattr(pump, "STUCK", 0.2)
    waiting: list[int] = []
    script, seen = counted(9, lambda _attempt: waiting.append(len(team._before)))
    logs: dict[str, Any] = {"folder": str(tmp_path / "logs"), "specs": {"redirects": Std.NONE, "tee": Std.OUT}}
    team = shells(lambda attempt: f"{MANY}; {script(attempt)}", **logs)
    with capfd.disabled(), console() as out, attempted(team, 100) as attempts:
        ending = attempts.run()
        assert (ending.state, len(ending.ends)) == ("succeeded", 10)
        os.close(out)
    assert max(waiting) <= 4
    # Each that waits has eight descriptors and two threads; so much is shared by all. The rest is what is being closed.
    (fds, threads), later = seen[0], list(zip(seen[1:], waiting[1:], strict=True))
    assert not [each for each in later if each[0][0] > fds + 6 + 8 * each[1] + 4]
    assert not [each for each in later if each[0][1] > threads + 1 + 2 * each[1] + 2]
