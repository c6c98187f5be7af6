"""The notice of a planned stop: a signal for those that handle it, a flag for all, and time before SIGTERM."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import phalanx
from phalanx._engine.protocol import STOP_PAGE_ENV
from phalanx.multiprocessing import KeeperLostError, ScriptContext, SubprocessContext, start_processes
from tests.support.helpers import (
    TIMEOUT,
    Gate,
    Ready,
    alive,
    descendants,
    meanwhile,
    pass_gate,
    rest,
    tell,
    until,
    wait_gone,
)
from tests.support.insides import helpers_of, state_of, stop, supervisor_of
from tests.support.workers import ROOT, started_script

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.multiprocessing import PContext, RunProcsResult

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

LONG = 20 * TIMEOUT
"""Seconds that no test waits for."""

USR1 = signal.SIGUSR1

HEAD = f"import os, signal, sys, time; sys.path[:0] = {[ROOT, *sys.path]!r}; import phalanx; "


def spins(address: str) -> int:
    """A loop as users write it, but that it tells when it ends."""
    tell(address, str(os.getpid()))
    while not phalanx.should_stop():
        time.sleep(0.001)
    tell(address, "saves")
    return 7


def commands(*codes: str, notice: tuple[int, float] | None = (USR1, LONG), **options: Any) -> PContext:
    """A started group of Python programs, one for each of ``codes``."""
    args = {rank: ("-c", HEAD + code) for rank, code in enumerate(codes)}
    return start_processes("g", sys.executable, args, notice=notice, **options)


def loop(ready: Ready, end: str = "sys.exit(0)") -> str:
    """A program that tells its pid, waits for the flag, and ends."""
    return f"{ready.python()}\nwhile not phalanx.should_stop(): signal.sigtimedwait([], 0.001)\n{end}"


def ended(group: PContext) -> tuple[RunProcsResult, list[str]]:
    result = group.wait(0)
    assert result is not None
    return result, [outcome.describe() for outcome in result.outcomes.values()]


# --- what a worker sees


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_functions_see_it(method: str, ready: Ready) -> None:
    assert not phalanx.should_stop()  # asked here first: a fork has to ask again
    with start_processes("g", spins, (ready.address,), nprocs=2, start_method=method, notice=(USR1, LONG)) as group:
        ready.wait(2)
        group.close()
        assert ready.wait(2) == ["saves", "saves"]
        result, _lines = ended(group)
    assert result.return_values == {0: 7, 1: 7}
    assert not phalanx.should_stop()


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("preload", [(), ("json",)])
@pytest.mark.parametrize("module", [False, True])
def test_scripts_and_modules_see_it(
    module: bool, preload: tuple[str, ...], ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looping.py").write_text(HEAD.replace("; ", "\n") + loop(ready))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    script = "looping" if module else str(tmp_path / "looping.py")
    envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
    context = ScriptContext(
        "g", script, {0: (), 1: ()}, envs, logs_specs(tmp_path), module=module, preload=preload, notice=(USR1, LONG)
    )
    context.start()
    with context as group:
        ready.wait(2)
        group.close()
        assert ended(group)[1] == 2 * ["stopped by us (notice SIGUSR1), exited with code 0"]


def logs_specs(folder: Path) -> Any:
    from phalanx.multiprocessing import DefaultLogsSpecs

    return DefaultLogsSpecs(str(folder / "logs"))


@pytest.mark.slow
def test_threads_forks_and_programs_below_a_worker_see_it(ready: Ready) -> None:
    """Though it has closed all descriptors that it did not open."""
    wait = "\nwhile not phalanx.should_stop(): signal.sigtimedwait([], 0.001)\n"
    code = f"""
import subprocess, threading
phalanx.should_stop(); os.closerange(3, 1000)
def wait(name):
    while not phalanx.should_stop(): threading.Event().wait(0.001)
    names.append(name)
names = []
early = os.fork()
if early:
    assert not phalanx.should_stop()
    late = os.fork()
if not early or not late:
    wait("")
    os._exit(3)
child = subprocess.Popen([sys.executable, "-c", {HEAD + wait + "sys.exit(4)"!r}])
threads = [threading.Thread(target=wait, args=(name,)) for name in "ab"]
[thread.start() for thread in threads]
{ready.python()}
[thread.join() for thread in threads]
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (early, late)]
assert (ends, child.wait(), sorted(names)) == ([3, 3], 4, ["a", "b"])
"""
    with commands(code) as group:
        ready.wait()
        group.close()
        assert ended(group)[1] == ["stopped by us (notice SIGUSR1), exited with code 0"]


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the number of exit(2) differs")
def test_it_makes_no_system_call_after_the_first_call() -> None:
    leave = {"x86_64": 60, "aarch64": 93}[os.uname().machine]  # exit(2) of the one thread; exit_group(2) is not allowed
    code = f"""
import ctypes
libc = ctypes.CDLL(None)
phalanx.should_stop()
libc.prctl(22, 1, 0, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_STRICT: all but read, write and exit is deadly
for _ in range(1000):
    phalanx.should_stop()
libc.syscall({leave}, 5)
"""
    with start_processes("g", sys.executable, ("-c", HEAD + code), nprocs=1, notice=(USR1, LONG)) as group:
        result = group.wait()
    assert result.outcomes[0].exitcode == 5


def test_outside_a_group_it_is_false() -> None:
    assert phalanx.should_stop() is False
    code = "import phalanx; print(phalanx.should_stop(), phalanx.should_stop())"
    for address in ("", "x", f"{os.getpid()}:0", "1:999"):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), STOP_PAGE_ENV: address}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "False False\n"
        assert done.stderr.count("\n") == bool(address)
        assert not address or f"{STOP_PAGE_ENV}={address}: " in done.stderr


def test_without_notice_there_is_no_page(ready: Ready) -> None:
    code = ready.python(f"(os.environ.get({STOP_PAGE_ENV!r}), phalanx.should_stop())")
    with commands(code, notice=None) as group:
        assert ready.wait() == ["(None, False)"]
        group.wait(TIMEOUT)


# --- the signal


@pytest.mark.slow
def test_the_signal_goes_to_those_that_handle_it(ready: Ready) -> None:
    """Rank 0 catches it, rank 1 blocks it and waits for it in a thread, and rank 2 would die of it."""
    codes = (
        f"""
def end(*_):
    {ready.python("0")}
    sys.exit(0)
signal.signal({USR1}, end)
{ready.python()}
while True: time.sleep(0.1)
""",
        f"""
import threading
signal.pthread_sigmask(0, [{USR1}])
waiting = threading.Thread(target=signal.sigwait, args=([{USR1}],))
waiting.start()
{ready.python()}
waiting.join()
{ready.python("1")}
""",
        f"{ready.python()}; signal.pause()",
    )
    with commands(*codes) as group:
        pids = ready.pids(3)
        with meanwhile(group.close):
            assert sorted(ready.wait(2)) == ["0", "1"]
            assert wait_gone(pids, 0.2) == {group.pids()[2]}  # the others have ended, and it has time
            group.close()
        result, lines = ended(group)
    assert lines[:2] == 2 * ["stopped by us (notice SIGUSR1), exited with code 0"]
    assert lines[2] == "stopped by us (notice SIGUSR1, SIGTERM)"
    assert result.state == "stopped"
    assert not result.failures


def test_a_death_by_the_signal_is_our_stop(ready: Ready) -> None:
    code = f"""
def end(*_):
    signal.signal({USR1}, 0)
    os.kill(os.getpid(), {USR1})
signal.signal({USR1}, end)
{ready.python()}
while True: time.sleep(0.1)
"""
    with commands(code) as group:
        ready.wait()
        group.close()
        result, lines = ended(group)
    assert lines == ["stopped by us (notice SIGUSR1)"]
    assert not result.failures


# --- ends


def test_a_failure_after_the_notice_leaves_the_others_their_time(ready: Ready, gate: Gate) -> None:
    stays = loop(ready, f"{ready.python('1')}; {gate.python()}")
    with commands(loop(ready, "raise OSError('disk full')"), stays, grace=LONG) as group:
        failing, staying = (group.pids()[rank] for rank in (0, 1))
        ready.wait(2)
        with meanwhile(group.close):
            assert ready.wait() == ["1"]
            assert wait_gone([failing]) == set()
            assert alive(staying)
            gate.open()
        result, lines = ended(group)
    assert lines == ["failed: exited with code 1", "stopped by us (notice SIGUSR1), exited with code 0"]
    assert result.state == "failed"
    assert list(result.failures) == [0]


def test_who_ended_before_it_has_succeeded(ready: Ready) -> None:
    with commands("pass", loop(ready)) as group:
        ready.wait()
        assert wait_gone([group.pids()[0]]) == set()
        until(lambda: 0 not in supervisor_of(group).mirror.alive)
        group.close()
        assert ended(group)[1] == ["succeeded", "stopped by us (notice SIGUSR1), exited with code 0"]


def test_a_failure_before_it_leaves_no_time(ready: Ready, gate: Gate) -> None:
    code = f"{ready.python()}; signal.pause()"
    with commands(f"{ready.python()}; {gate.python()}; sys.exit(3)", code, settle=LONG) as group:
        ready.wait(2)
        gate.open()
        assert wait_gone([group.pids()[0]]) == set()
        until(lambda: state_of(group) == "SETTLING")
        group.close()
        assert ended(group)[1] == ["failed: exited with code 3", "stopped by us (SIGTERM)"]


@pytest.mark.slow
@pytest.mark.parametrize("grace", [0, 0.2, TIMEOUT])
def test_the_deadline_is_followed_by_the_grace_and_sigkill(grace: float, ready: Ready) -> None:
    deaf = f"signal.signal(15, signal.SIG_IGN); {ready.python()}; signal.pause()"
    soft = f"{ready.python()}; signal.pause()"
    codes = [soft] if grace == TIMEOUT else [deaf]
    with commands(*codes, notice=(USR1, 0.5)) as group:
        ready.wait()
        began = time.monotonic()
        group.close(timeout=grace)
        assert time.monotonic() - began >= (0.5 if grace == TIMEOUT else 0.5 + grace)
        last = "SIGTERM" if grace == TIMEOUT else "SIGKILL"
        assert ended(group)[1] == [f"stopped by us (notice SIGUSR1, {last})"]


def test_sigkill_gives_none(ready: Ready) -> None:
    with commands(f"{ready.python()}; signal.pause()") as group:
        ready.wait()
        group.close(signal.SIGKILL)
        assert ended(group)[1] == ["stopped by us (SIGKILL)"]


def test_a_second_stop_ends_the_notice_and_a_kill_does_so_too(ready: Ready) -> None:
    for death, line in ((signal.SIGINT, "notice SIGUSR1, SIGINT"), (signal.SIGKILL, "notice SIGUSR1, SIGKILL")):
        with commands(f"signal.signal(2, signal.SIG_DFL); {ready.python()}; signal.pause()") as group:
            ready.wait()
            with meanwhile(group.close):
                until(lambda: state_of(group) == "NOTICED")
                group.close(death)
            assert ended(group)[1] == [f"stopped by us ({line})"]


def test_a_stopped_worker_is_woken_by_it(ready: Ready) -> None:
    with commands(loop(ready)) as group:
        [pid] = ready.pids()
        stop(pid)
        group.close()
        assert ended(group)[1] == ["stopped by us (notice SIGUSR1), exited with code 0"]


@pytest.mark.slow
def test_a_worker_that_is_stopped_during_it_is_killed_in_the_end(ready: Ready) -> None:
    code = f"""
def end(*_):
    {ready.python("'noticed'")}
    while True: signal.pause()
signal.signal({USR1}, end); signal.signal(15, signal.SIG_IGN)
{ready.python()}
while True: time.sleep(0.1)
"""
    with commands(code, notice=(USR1, 1.0)) as group:
        [pid] = ready.pids()
        with meanwhile(group.close, timeout=0.1):
            assert ready.wait() == ["noticed"]
            os.kill(pid, signal.SIGSTOP)
        assert ended(group)[1] == ["stopped by us (notice SIGUSR1, SIGKILL)"]


def test_what_is_left_behind_has_the_grace(ready: Ready, gate: Gate, tmp_path: Path) -> None:
    """An upload that a worker leaves behind as it ends: SIGTERM, and the grace."""
    done = tmp_path / "done"
    child = f"""
if not os.fork():
    def end(*_):
        {ready.python("'SIGTERM'")}
        {gate.python()}
        open({str(done)!r}, "w").close()
        os._exit(0)
    signal.signal(15, end)
    {ready.python()}
    while True: time.sleep(0.1)
"""
    with commands(f"{child}\n{loop(ready)}") as group:
        ready.wait(2)
        with meanwhile(group.close):
            assert ready.wait() == ["SIGTERM"]
            gate.open()
    assert done.exists()


# --- those that are killed meanwhile


@pytest.mark.parametrize("who", ["guard", "keeper"])
def test_a_helper_that_is_killed_during_it(who: str, ready: Ready) -> None:
    with commands(f"{ready.python()}; signal.pause()") as group:
        pids = ready.pids()
        guard, keeper = helpers_of(group)
        with meanwhile(group.close):
            until(lambda: state_of(group) == "NOTICED")
            os.kill({"guard": guard, "keeper": keeper}[who], signal.SIGKILL)
            assert wait_gone([*pids, guard, keeper]) == set()
        if who == "keeper":
            with pytest.raises(KeeperLostError):
                group.wait(0)
        else:
            assert ended(group)[1] == ["stopped by us (notice SIGUSR1, SIGKILL)"]


LAUNCHER = """
import sys
from phalanx.multiprocessing import start_processes
from tests.engine.test_notice import waits

if __name__ == "__main__":
    address, gate, orphan_grace = sys.argv[1:]
    group = start_processes(
        "g", waits, (address, gate), nprocs=2, notice=(10, 1000), orphan_grace=float(orphan_grace)
    )
    sys.stdin.readline()
    group.close()
"""


def give_notice(launcher: subprocess.Popen[str], ready: Ready) -> None:
    """Let it stop its group, once both workers are up."""
    assert ready.wait(2) == ["up", "up"]
    assert launcher.stdin is not None
    launcher.stdin.close()


def waits(address: str, gate: str) -> None:
    """Tell that it is up, and what comes: the notice, SIGTERM; then pass the gate."""

    def term(*_: object) -> None:
        tell(address, f"SIGTERM {phalanx.should_stop()}")
        pass_gate(gate)
        os._exit(0)

    signal.signal(signal.SIGTERM, term)
    tell(address, "up")
    while not phalanx.should_stop():
        time.sleep(0.001)
    tell(address, "noticed")
    rest()


@pytest.mark.slow
@pytest.mark.parametrize("orphan_grace", [0, LONG])
def test_a_launcher_that_is_killed_during_it(orphan_grace: float, ready: Ready, gate: Gate, tmp_path: Path) -> None:
    words = (ready.address, gate.address, orphan_grace)
    with started_script(tmp_path, LAUNCHER, *words, stdin=subprocess.PIPE) as launcher:
        give_notice(launcher, ready)
        assert ready.wait(2) == ["noticed", "noticed"]
        everybody = descendants(launcher.pid)
        launcher.kill()
        if orphan_grace:
            assert ready.wait(2) == 2 * ["SIGTERM True"]
            gate.open(2)
        assert wait_gone(everybody) == set()


@pytest.mark.slow
def test_a_launcher_that_is_stopped_during_it_holds_up_nothing(ready: Ready, gate: Gate, tmp_path: Path) -> None:
    text = LAUNCHER.replace("1000", "1.0")
    with started_script(tmp_path, text, ready.address, gate.address, 0, stdin=subprocess.PIPE) as launcher:
        give_notice(launcher, ready)
        said = ready.wait(2)  # both have noticed; or one, whose SIGTERM has come before the other had a turn
        launcher.send_signal(signal.SIGSTOP)
        assert sorted(said + ready.wait(2)) == ["SIGTERM True", "SIGTERM True", "noticed", "noticed"]
        gate.open(2)
        launcher.send_signal(signal.SIGCONT)
        assert launcher.wait(TIMEOUT) == 0


# --- arguments


@pytest.mark.parametrize(
    "notice, error",
    [
        (60, TypeError),
        ((signal.SIGUSR1,), TypeError),
        (("USR1", 60), TypeError),
        ((True, 60), TypeError),
        ((signal.SIGUSR1, "60"), TypeError),
        ((signal.SIGUSR1, 0), ValueError),
        ((signal.SIGUSR1, float("inf")), ValueError),
        ((signal.SIGKILL, 60), ValueError),
        ((signal.SIGSTOP, 60), ValueError),
        ((0, 60), ValueError),
        ((65, 60), ValueError),
    ],
)
def test_what_is_no_notice_is_refused(notice: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match=r"^notice: expected "):
        start_processes("g", "true", (), nprocs=1, notice=notice)
    with pytest.raises(error, match=r"^notice: expected "):
        SubprocessContext("g", "true", {0: ()}, {0: {}}, logs_specs(tmp_path), notice=notice)


def test_a_start_without_a_descriptor_for_the_page_fails_as_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        with pytest.raises(OSError, match=r"the notice of a stop cannot be prepared: File too large"):
            start_processes("g", "true", (), nprocs=1, notice=(USR1, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
