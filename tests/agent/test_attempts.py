"""Attempts whose every attempt is a group of real processes: failures, starts, stops, signals, restarts, leaks."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import re
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx._base.stderr import mention
from phalanx._base.threads import Latch
from phalanx._engine import host_signals
from phalanx._logs import pump
from phalanx.agent import RestartPolicy
from phalanx.multiprocessing import DefaultLogsSpecs, MultiprocessContext, SignalException, Std, SubprocessContext
from phalanx.timer import TimerSpecs, progress
from tests.support.attempt_groups import Ending, GroupTeam, LocalRunner, Told, shells
from tests.support.helpers import PYTHON, TIMEOUT, alive, let_a_request_pass, wait_gone
from tests.support.streams import observed_by
from tests.support.waits import when_we_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
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


def test_it_gives_up_when_the_restarts_are_used_up() -> None:
    team = shells("exit 3")
    with attempted(team, 2) as attempts:
        ending = attempts.run()
        assert (ending.state, ending.why, len(ending.ends)) == ("failed", "2 of 2 restarts used", 3)
        assert team.result is not None
        assert team.result.failures[0].exitcode == 3
    said = team.said
    assert [line.partition(" after ")[0] for line in said] == [f"phalanx: attempt {n} failed" for n in (0, 1, 2)]
    assert said[2].endswith(": rank 0, exited with code 3; no error was recorded; giving up: 2 of 2 restarts used")


def missing_at(*attempts: int) -> GroupTeam:
    def make(attempt: int, before: PContext | None) -> PContext:
        binary = "/no/such/program" if attempt in attempts else "/bin/false"
        return SubprocessContext("g", binary, {0: ()}, {0: {}}, DefaultLogsSpecs(), follows=before)

    return Told(make)


def test_the_first_start_fails() -> None:
    with attempted(missing_at(0), 5) as attempts:
        with pytest.raises(FileNotFoundError):
            attempts.run()
        assert attempts.run() == Ending("failed", ())


def test_a_start_that_fails_in_a_later_attempt() -> None:
    with attempted(missing_at(1, 2), 3) as attempts:
        ending = attempts.run()
    assert [end.state for end in ending.ends] == ["failed", "not started", "not started", "failed"]
    assert "/no/such/program" in ending.ends[1].error


def test_a_lost_keeper_is_a_failure(ready: Ready) -> None:
    team = shells(lambda attempt: tells(ready, SLEEPS) if attempt == 0 else "exit 0")
    with attempted(team, 1) as attempts:

        def kill() -> None:
            ready.wait()
            assert team.group is not None
            os.kill(team.group._started()._keeper._guard, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        ending = attempts.run()
        thread.join()
    assert [end.state for end in ending.ends] == ["failed", "succeeded"]
    assert "guard process was killed by signal 9" in ending.ends[0].error


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


def in_state(state: str, action: Callable[[], object]) -> Callable[[str, dict[str, Any]], None]:
    """Return an observer that calls ``action`` once, on a thread of its own, when the agent is in ``state``."""
    done = [False]

    def observe(name: str, facts: dict[str, Any]) -> None:
        if name == "agent.state" and facts["state"] == state and not done[0]:
            done[0] = True
            action()

    return observe


@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "WAITING", "RESTARTING", "STOPPING"])
def test_a_stop_that_another_thread_asks_for(state: str) -> None:
    """Whenever it comes, nothing is started afterwards."""
    team = shells(lambda attempt: "exit 1" if attempt == 0 and state == "WAITING" else "trap '' TERM; sleep 600 & wait")
    asked = Latch()

    def ask() -> None:
        attempts.ask_stop(signal.SIGKILL if state == "STOPPING" else signal.SIGTERM, 0.05)
        asked.open()

    with attempted(team, 3, backoff=600, backoff_cap=600, jitter=0, observe=in_state(state, ask)) as attempts:
        if state == "RESTARTING":
            when_we_wait(lambda: attempts.ask_restart(signal.SIGTERM, 600, "asked for"))
        if state == "STOPPING":
            when_we_wait(lambda: attempts.ask_stop(signal.SIGTERM, 600))
        ending = attempts.run()
        assert asked
        assert ending.state == "stopped"
        assert [end.number for end in ending.ends] == [0] or (state, ending.ends) == ("STARTING", ())
        if ending.ends:
            assert team.group is not None
            assert wait_gone(team.group.pids().values()) == set()


def stopped_by_signals(attempts: LocalRunner, *orders: tuple[int, float]) -> Ending:
    """Run until a signal comes, and stop; with the next order at the next signal."""
    left = list(orders)
    while True:
        try:
            return attempts.run()
        except SignalException:
            attempts.ask_stop(*left.pop(0))


@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "WAITING", "RESTARTING"])
def test_a_signal_to_this_process(state: str) -> None:
    team = shells(lambda attempt: "exit 1" if attempt == 0 and state == "WAITING" else "trap '' TERM; sleep 600 & wait")
    options = {"backoff": 600, "backoff_cap": 600, "jitter": 0}
    observe = in_state(state, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with attempted(team, 3, observe=observe, **options) as attempts:
        if state == "RESTARTING":
            when_we_wait(lambda: attempts.ask_restart(signal.SIGTERM, 600, "asked for"))
        ending = stopped_by_signals(attempts, (signal.SIGTERM, 0.05))
        assert ending.state == "stopped"
        assert len(ending.ends) <= 1
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def signals_when(ready: Ready) -> None:
    ready.wait()
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_signal_kills(ready: Ready) -> None:
    team = shells(f"trap '' TERM; {tells(ready, SLEEPS)}")

    def again() -> None:
        let_a_request_pass()
        os.kill(os.getpid(), signal.SIGINT)

    with attempted(team, 3, observe=in_state("STOPPING", again)) as attempts:
        killing = threading.Thread(target=signals_when, args=(ready,))
        killing.start()
        ending = stopped_by_signals(attempts, (signal.SIGTERM, 600), (signal.SIGKILL, 0))
        assert ending.state == "stopped"
        assert [end.state for end in ending.ends] == ["stopped"]
        killing.join()


class Interrupter:
    """Sends SIGTERM to this process when the ``moment``-th line of agent and group is about to run.

    Lines of ``with`` are passed over: they are run again before ``__exit__`` is called, where no real signal raises.
    """

    def __init__(self, moment: int) -> None:
        self.left = moment
        self.fired = ""

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.endswith(
            (
                "_run/attempts.py",
                "_run/runner.py",
                "_run/group_team.py",
                "_group/context.py",
                "_group/restart_policy.py",
            )
        ):
            return None
        if frame.f_code.co_name == "__del__":  # what is raised there is lost
            return None
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.fired = f"{os.path.basename(name)}:{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGTERM)
        return self.trace


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*was dropped, and is killed:ResourceWarning")
def test_a_signal_between_two_lines_of_start_run_and_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the line: it ends stopped, no worker is left, and no attempt is noted twice."""
    monkeypatch.setattr(host_signals, "_APART", 0.0)
    step = int(os.environ.get("PHALANX_STEP", "9"))
    pids: set[int] = set()
    seen, moment = set(), 1
    while True:
        team = shells(lambda attempt: "exit 1" if attempt == 0 else SLEEPS)
        interrupter = Interrupter(moment)
        with attempted(team, 3) as attempts:
            host_signals.acquire(interrupter)
            stopper = None
            try:
                sys.settrace(interrupter.trace)
                stopper = when_we_wait_in("RUNNING", attempts)
                ending = stopped_by_signals(attempts, *[(signal.SIGTERM, 5.0)] * 2)
            finally:
                sys.settrace(None)
                host_signals.release(interrupter)
                if stopper is not None:
                    stopper.join()
            if team.group is not None and team.group._supervisor is not None:
                pids |= set(team.group.pids().values())
        assert ending.state == "stopped", interrupter.fired
        numbers = [end.number for end in ending.ends]
        assert numbers == list(range(len(numbers))), interrupter.fired
        assert len(numbers) <= 2, interrupter.fired
        if not interrupter.fired:
            break
        seen.add(interrupter.fired.split(":")[1])
        moment += step
    assert not any(map(alive, pids))
    assert seen >= {"_start", "_turn"}


def when_we_wait_in(state: str, attempts: LocalRunner) -> threading.Thread:
    """Ask for a stop when the second attempt runs and this thread waits for it."""

    def ask() -> None:
        while attempts.state not in ("STOPPED", "FAILED", "SUCCEEDED"):
            if (attempts.state, attempts.number) == (state, 1):
                attempts.ask_stop(signal.SIGTERM, 5)
                return
            threading.Event().wait(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


# --- restarts


def test_restarts_that_are_asked_for(ready: Ready, gate: Gate) -> None:
    """They count for nothing: none is allowed here."""
    team = shells(tells(ready, f"test $ATTEMPT = 2 || {SLEEPS}; head -c 1 {gate.address}"))
    pids: list[int] = []

    def ask() -> None:
        for _ in range(2):
            pids.append(*ready.pids())
            attempts.ask_restart(signal.SIGTERM, 30, "a new machine is there")
        pids.append(*ready.pids())
        gate.open()

    with attempted(team) as attempts:
        thread = threading.Thread(target=ask)
        thread.start()
        ending = attempts.run()
        thread.join()
    assert [end.state for end in ending.ends] == ["stopped", "stopped", "succeeded"]
    assert ending.state == "succeeded"
    assert len(set(pids)) == 3
    said = team.said
    assert said == [f"phalanx: ending attempt {number}: a new machine is there" for number in (0, 1)]


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


def test_gone_is_before_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pump, "STUCK", TIMEOUT)
    team = shells(f"{MANY}; exit 4", folder=str(tmp_path / "logs"), specs={"redirects": Std.NONE, "tee": Std.OUT})
    texts: list[str] = []
    with capfd.disabled(), console() as out, contextlib.closing(team):
        team.begin(0)
        team.start(0, lambda: None)
        group = team.group
        assert group is not None
        result = group.wait_gone(TIMEOUT)
        assert result is not None
        assert result.failures[0].exitcode == 4
        assert group.wait(0) is None
        assert group.is_open
        assert not any(map(alive, group.pids().values()))
        reader = threading.Thread(target=lambda: texts.append(read_all(out)))
        reader.start()
        assert group.wait(TIMEOUT) == result == group.wait_gone(0)
    reader.join()
    assert len(texts[0].splitlines()) == 3000


# --- leaks


def facts() -> tuple[int, int]:
    """How many descriptors and threads this process has."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def false_until(last: int, seen: list[tuple[int, int]]) -> Callable[[int], str]:
    def script(attempt: int) -> str:
        seen.append(facts())
        return "exit 0" if attempt == last else "echo failed; exit 1"

    return script


def most(seen: list[tuple[int, int]]) -> tuple[int, int]:
    return max(fds for fds, _ in seen), max(threads for _, threads in seen)


@pytest.mark.long
def test_many_attempts_leave_nothing() -> None:
    """Neither descriptors nor threads grow in number, nor memory, while they go on."""
    seen: list[tuple[int, int]] = []
    memory: list[int] = []
    script = false_until(200, seen)

    def measured(attempt: int) -> str:
        if attempt in (50, 200):
            gc.collect()
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        return script(attempt)

    team = shells(measured)
    with attempted(team, 1000) as attempts:
        ending = attempts.run()
        assert (ending.state, len(ending.ends)) == ("succeeded", 201)
        assert len(team._before) <= 4
    before, after = most(seen[5:60]), most(seen[60:])
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 2
    print(f"150 attempts: {(memory[1] - memory[0]) / 1024:.0f} KiB more; descriptors, threads: {before}, {after}")  # noqa: T201 - shown with -rP
    assert memory[1] - memory[0] < 4 << 20


@pytest.mark.slow
def test_nothing_grows_while_nobody_reads_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four groups wait for it at most; beyond that, a restart waits until the oldest has given up.

    How many of the four wait in an attempt depends on how long the attempts before took: on the machine.
    """
    monkeypatch.setattr(pump, "STUCK", 0.2)
    seen: list[tuple[int, int]] = []
    waiting: list[int] = []
    script = false_until(18, seen)

    def counted(attempt: int) -> str:
        waiting.append(len(team._before))
        return f"{MANY}; {script(attempt)}"

    logs: dict[str, Any] = {"folder": str(tmp_path / "logs"), "specs": {"redirects": Std.NONE, "tee": Std.OUT}}
    team = shells(counted, **logs)
    with capfd.disabled(), console() as out, attempted(team, 100) as attempts:
        ending = attempts.run()
        assert (ending.state, len(ending.ends)) == ("succeeded", 19)
        os.close(out)
    assert max(waiting) <= 4
    # Each that waits has eight descriptors and two threads; so much is shared by all. The rest is what is being closed.
    (fds, threads), later = seen[0], list(zip(seen[1:], waiting[1:], strict=True))
    assert not [each for each in later if each[0][0] > fds + 6 + 8 * each[1] + 4]
    assert not [each for each in later if each[0][1] > threads + 1 + 2 * each[1] + 2]
