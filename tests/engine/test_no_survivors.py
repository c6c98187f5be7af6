"""Whatever ends a group, nothing that any of its workers ever started is alive afterwards.

Every member of every family says its own pid, and is looked for by it. ``PHALANX_ROUNDS`` repeats each cell.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from phalanx._base import linux, procfs
from phalanx._engine.keeper import keeper
from phalanx._engine.keeper.sweep import PID_LIMIT, ChildScan
from phalanx.multiprocessing import KeeperLostError, start_processes
from tests.support import families
from tests.support.families import KINDS, SIZE, WORKERS
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, descendants, meanwhile, tell, wait_gone
from tests.support.insides import helpers_of, stop
from tests.support.workers import run_script, started_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from phalanx.multiprocessing import PContext

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_tmpdir")]

ROUNDS = int(os.environ.get("PHALANX_ROUNDS", "1"))
EVERYBODY = WORKERS * SIZE
FREEZER = "/sys/fs/cgroup/freezer"


# --- the matrix


def fails(group: PContext, gate: Gate) -> None:
    gate.open()
    result = group.wait()
    [failure] = result.failures.values()
    assert failure.exitcode == 3
    assert sorted(outcome.state for outcome in result.outcomes.values()) == ["failed", "stopped"]


def is_closed(group: PContext, _gate: Gate) -> None:
    group.close()


def loses_its_keeper(group: PContext, _gate: Gate) -> None:
    os.kill(helpers_of(group)[1], signal.SIGKILL)
    with pytest.raises(KeeperLostError, match="the group's keeper process was killed by signal 9"):
        group.wait(TIMEOUT)


def loses_its_guard(group: PContext, _gate: Gate) -> None:
    os.kill(helpers_of(group)[0], signal.SIGKILL)
    with pytest.raises(KeeperLostError, match="the group's guard process was killed by signal 9"):
        group.wait(TIMEOUT)


def loses_both(group: PContext, _gate: Gate) -> None:
    guard, kept = helpers_of(group)
    assert os.getpgid(kept) == guard
    os.killpg(guard, signal.SIGKILL)  # in one step: neither sees the other's end
    with pytest.raises(KeeperLostError, match="keeper and its guard were killed"):
        group.wait(TIMEOUT)


@pytest.mark.each_python
@pytest.mark.parametrize("kind", [*KINDS, "warm"])
@pytest.mark.parametrize("end", [fails, is_closed, loses_its_keeper, loses_its_guard, loses_both])
def test_nobody_is_left_when_the_group(
    end: Callable[[PContext, Gate], None], kind: str, ready: Ready, gate: Gate
) -> None:
    for _ in range(ROUNDS):
        with families.held_warm(kind), families.start(kind, ready.address, gate.address, grace=TIMEOUT) as group:
            members = ready.pids(EVERYBODY)
            helpers = helpers_of(group)
            assert set(group.pids().values()) <= set(members)
            assert all(map(alive, members))
            began = time.monotonic()
            end(group, gate)
            assert set(filter(alive, members)) == set()
            print(f"{end.__name__}, {kind}: {1000 * (time.monotonic() - began):.0f} ms")  # noqa: T201 - shown with -rP
        assert wait_gone(helpers, 5) == set()


@contextlib.contextmanager
def host(which: str, kind: str, ready: Ready, gate: Gate, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process of its own."""
    command = [*before, sys.executable, "-m", "tests.support.families", which, kind, ready.address, gate.address]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join([root, *filter(None, sys.path)])
    with subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", [*KINDS, "warm"])
def test_nobody_is_left_soon_after_the_launcher_was_killed(kind: str, ready: Ready, gate: Gate) -> None:
    """Within a tenth of a second, where there are processors to be had: that is shown, and not judged here."""
    slowest = 0.0
    for _ in range(ROUNDS):
        with host("plain", kind, ready, gate) as launcher:
            members = set(ready.pids(EVERYBODY))
            everybody = members | descendants(launcher.pid)
            assert len(everybody) >= EVERYBODY + 2 + (kind == "warm")  # guard and keeper, and the fork server
            launcher.kill()
            began = time.monotonic()
            assert wait_gone(everybody, 5) == set()
            slowest = max(slowest, time.monotonic() - began)
    print(f"launcher killed, {kind}: all gone within {1000 * slowest:.0f} ms")  # noqa: T201 - shown with -rP


@pytest.mark.parametrize("kind", ["binary", "fork"])
def test_a_stopped_keeper_is_woken_when_the_launcher_was_killed(kind: str, ready: Ready, gate: Gate) -> None:
    with host("plain", kind, ready, gate) as launcher:
        everybody = set(ready.pids(EVERYBODY)) | descendants(launcher.pid)
        [guard] = procfs.children(launcher.pid)
        [kept] = procfs.children(guard)
        os.kill(kept, signal.SIGSTOP)
        launcher.kill()
        assert wait_gone(everybody, 5) == set()


# --- hosts of every kind


@pytest.mark.parametrize("kind", ["binary", "fork"])
def test_a_child_of_the_host_is_spared_and_delays_no_group(kind: str, ready: Ready, gate: Gate) -> None:
    with host("with_child", kind, ready, gate) as launcher:
        *members, own = ready.pids(EVERYBODY + 1)
        if own not in procfs.children(launcher.pid):  # its message came before a worker's
            [own] = {pid for pid in members if pid in procfs.children(launcher.pid)}
        everybody = {*members, *descendants(launcher.pid)} - {own}
        launcher.kill()
        assert wait_gone(everybody, 5) == set()
        assert alive(own)
        os.kill(own, signal.SIGKILL)
        assert wait_gone([own]) == set()


@pytest.mark.parametrize("kind", ["binary", "fork"])
@pytest.mark.parametrize("which", ["deaf_to_children", "that_reaps_all"])
def test_a_host_that_leaves_no_child_to_be_reaped(which: str, kind: str, ready: Ready, gate: Gate) -> None:
    with host(which, kind, ready, gate) as launcher:
        members = ready.pids(EVERYBODY)
        gate.open()
        assert ready.wait() == ["exit codes [3]"]
        assert launcher.wait(TIMEOUT) == 0
        assert set(filter(alive, members)) == set()


@pytest.mark.parametrize("kind", ["binary", "fork"])
def test_a_host_that_ignores_its_children_misses_a_keeper(kind: str, ready: Ready, gate: Gate) -> None:
    with host("deaf_to_children", kind, ready, gate) as launcher:
        members = ready.pids(EVERYBODY)
        parents = {procfs.Stat(pid).parent for pid in members} - set(members)
        [kept] = [pid for pid in parents if procfs.Stat(procfs.Stat(pid).parent).parent == launcher.pid]
        os.kill(kept, signal.SIGKILL)
        assert wait_gone(members, 5) == set()
        assert launcher.wait(TIMEOUT) == 1  # KeeperLostError


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace takes root")
@pytest.mark.parametrize("kind", ["binary", "fork"])
def test_a_launcher_that_is_pid_1(kind: str, ready: Ready, gate: Gate, tmp_path: Path) -> None:
    with (
        Gate(tmp_path / "gate-host") as of_host,
        host("as_init", kind, ready, gate, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child") as launcher,
    ):
        ready.pids(EVERYBODY)
        gate.open()
        assert ready.wait() == ["exit codes [3]"]
        ready.pids(EVERYBODY)
        of_host.open()
        ready.pids(WORKERS)
        gate.open(WORKERS)
        assert ready.wait() == ["left: 1"]
        assert launcher.wait(TIMEOUT) == 0


# --- workers that make it hard


def stubborn(address: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(address, str(os.getpid()))
    while True:
        signal.pause()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_ignores_sigterm_dies_after_the_grace(kind: str, ready: Ready) -> None:
    if kind == "binary":
        code = f"import signal; signal.signal(15, signal.SIG_IGN); {ready.python()}; signal.pause()"
        group = start_processes("stubborn", sys.executable, ("-c", code), nprocs=1)
    else:
        group = start_processes("stubborn", stubborn, (ready.address,), nprocs=1, start_method=kind)
    with group:
        [pid] = ready.pids()
        if kind == "binary":
            stop(pid)
        began = time.monotonic()
        group.close(timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 5
        assert not alive(pid)
        result = group.wait(0)
    assert result is not None
    outcome = result.outcomes[0]
    assert (outcome.state, outcome.exitcode, outcome.signal_sent) == ("stopped", -9, 9)
    assert result.state == "stopped"


def test_the_grace_is_the_same_after_a_failure(ready: Ready, gate: Gate) -> None:
    stays = f"import signal; signal.signal(15, signal.SIG_IGN); {ready.python()}; signal.pause()"
    goes = f"{ready.python()}; {gate.python()}; raise SystemExit(3)"
    args = {0: ("-c", stays), 1: ("-c", goes)}
    with start_processes("grace", sys.executable, args, grace=0.3, settle=0.01) as group:
        pids = ready.pids(2)
        gate.open()
        began = time.monotonic()
        result = group.wait()
        assert 0.3 <= time.monotonic() - began < 5
    assert list(result.failures) == [1]
    assert (result.outcomes[0].state, result.outcomes[0].exitcode) == ("stopped", -9)
    assert set(filter(alive, pids)) == set()


def test_a_stopped_worker_is_woken_for_a_graceful_end(ready: Ready, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    code = (
        "import signal, sys, time\n"
        f"signal.signal(15, lambda *_: (open({str(saved)!r}, 'w').close(), sys.exit(0)))\n"
        f"{ready.python()}\n"
        "while True: time.sleep(0.1)"
    )
    with start_processes("stopped", sys.executable, ("-c", code), nprocs=1) as group:
        [pid] = ready.pids()
        stop(pid)
        began = time.monotonic()
        group.close(timeout=TIMEOUT)
        assert time.monotonic() - began < 5
    assert saved.exists()


def test_stopped_children_die_too(ready: Ready, gate: Gate) -> None:
    with families.start("fork", ready.address, gate.address) as group:
        members = ready.pids(EVERYBODY)
        for pid in members:
            stop(pid)
        began = time.monotonic()
        group.close(timeout=TIMEOUT)
        assert time.monotonic() - began < 5
        assert set(filter(alive, members)) == set()


def marked(name: str) -> set[int]:
    """Who carries an entry in its environment. One look can miss who forks meanwhile."""
    return {stat.pid for stat in procfs.processes() if name.encode() in b"\0".join(procfs.environ(stat.pid))}


@pytest.mark.parametrize("end", ["closed", "killed", "keeper killed"])
def test_a_chain_that_keeps_forking_is_cut(end: str, ready: Ready) -> None:
    # Two chains, of which only the last link lives; each ends by itself after so many generations.
    mark = f"CHAIN={time.monotonic_ns()}"
    code = f"""
import os, signal
signal.signal(15, signal.SIG_IGN)
os.fork()
for generation in range(20000):
    if generation == 100:
        {ready.python()}
    if os.fork():
        os._exit(0)
    if generation % 2:
        os.setsid()
"""
    name, _, value = mark.partition("=")
    stays = "import signal; signal.pause()"
    args = {0: ("-S", "-c", code), 1: ("-S", "-c", stays)}
    with start_processes("chain", sys.executable, args, {0: {name: value}, 1: {}}) as group:
        ready.wait(2)
        while not marked(mark):
            pass
        began = time.monotonic()
        if end == "keeper killed":
            os.kill(helpers_of(group)[1], signal.SIGKILL)
            with pytest.raises(KeeperLostError):
                group.wait(TIMEOUT)
        else:
            group.close(signal.SIGKILL if end == "killed" else signal.SIGTERM, timeout=0.2)
        print(f"a chain, {end}: cut after {1000 * (time.monotonic() - began):.0f} ms")  # noqa: T201 - shown with -rP
        assert not any(marked(mark) for _ in range(20))
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_that_holds_what_it_inherited_delays_nothing(kind: str, ready: Ready, gate: Gate) -> None:
    with families.start_daemons(kind, ready.address, gate.address) as group:
        daemons = ready.pids(WORKERS)
        assert all(map(alive, daemons))
        gate.open(WORKERS)
        began = time.monotonic()
        result = group.wait()
        took = time.monotonic() - began
        print(f"daemons left, {kind}: wait() returned after {1000 * took:.0f} ms")  # noqa: T201 - shown with -rP
        assert took < 5
    assert not result.is_failed()
    assert result.return_values == dict.fromkeys(range(WORKERS), None if kind == "binary" else 42)
    assert set(filter(alive, daemons)) == set()


def test_the_process_below_a_shell_has_the_grace_too(ready: Ready, tmp_path: Path) -> None:
    # The shell dies of the SIGTERM at once; the program that it runs, in the same session, saves its work for a while.
    saved = tmp_path / "saved"
    script = tmp_path / "child.py"
    script.write_text(f"""
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    open({str(saved)!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
{ready.python()}
while True:
    time.sleep(0.1)
""")
    command = f"{shlex.join([sys.executable, str(script)])}; echo not reached"
    with start_processes("below a shell", "/bin/sh", ("-c", command), nprocs=1) as group:
        [pid] = ready.pids()
        assert pid not in group.pids().values()
        began = time.monotonic()
        group.close(timeout=TIMEOUT)
        assert time.monotonic() - began < 5
        assert not alive(pid)
    assert saved.exists()


def pause(address: str) -> None:
    tell(address, str(os.getpid()))
    while True:
        signal.pause()


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Freezes a process: it takes no signal, SIGKILL included, until it is thawed. Like an uninterruptible sleep."""
    folder = os.path.join(FREEZER, f"phalanx-{os.getpid()}-{tmp_path.name}")
    try:
        os.mkdir(folder)
    except OSError as error:
        pytest.skip(f"no freezer of cgroup v1 to be had: {error}")

    def write(name: str, text: str) -> None:
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)

    def freeze(pid: int) -> None:
        write("cgroup.procs", str(pid))
        write("freezer.state", "FROZEN")
        deadline = time.monotonic() + TIMEOUT
        while True:
            with open(os.path.join(folder, "freezer.state")) as file:
                if file.read() == "FROZEN\n":
                    return
            assert time.monotonic() < deadline

    try:
        yield freeze
    finally:
        write("freezer.state", "THAWED")
        with open(os.path.join(folder, "cgroup.procs")) as file:
            pids = [int(line) for line in file]
        assert wait_gone(pids) == set()
        deadline = time.monotonic() + TIMEOUT
        while os.path.exists(folder):
            with contextlib.suppress(OSError):  # busy until init has reaped it
                os.rmdir(folder)
            assert time.monotonic() < deadline


def patience_with(others: list[int], path: Path) -> contextlib.AbstractContextManager[object]:
    """Let an `impatient` keeper give up who outlives SIGKILL once ``others``, who do not, are gone."""

    def wait() -> None:
        if not wait_gone(others):
            path.touch()

    return meanwhile(wait)


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keepers wait half a second for who outlives SIGKILL, and until this file is there: others may need longer."""
    path, see = tmp_path / "others-gone", keeper.Keeper._see

    def see_later(self: keeper.Keeper, event: str) -> None:
        if event == "KILL_OVER" and not path.exists():
            self._waits.arm(event, time.monotonic() + 0.005)
        else:
            see(self, event)

    monkeypatch.setattr(keeper, "KILL_WAIT", 0.5)  # under fork, the keeper has what we have
    monkeypatch.setattr(keeper.Keeper, "_see", see_later)
    return path


def test_a_worker_that_outlives_sigkill_is_reported_and_left(
    ready: Ready, frozen: Callable[[int], None], impatient: Path
) -> None:
    with start_processes("frozen", pause, (ready.address,), nprocs=2, start_method="fork") as group:
        ready.wait(2)
        pids = group.pids()
        frozen(pids[1])
        began = time.monotonic()
        with patience_with([pids[0]], impatient):
            group.close(timeout=0.2)
        assert 0.7 <= time.monotonic() - began < 5
        result = group.wait(0)
    assert result is not None
    assert result.outcomes[0].state == "stopped"
    outcome = result.outcomes[1]
    assert (outcome.state, outcome.exitcode, outcome.signal_sent) == ("abandoned", None, 9)
    assert result.state == "abandoned"
    assert not alive(pids[0])
    assert alive(pids[1])


def pause_above_another(address: str) -> None:
    if os.fork() == 0:
        os.setsid()
        tell(address, f"below {os.getpid()}")
    tell(address, str(os.getpid()))
    while True:
        signal.pause()


def test_what_is_below_a_process_that_outlives_sigkill_is_killed(
    ready: Ready, frozen: Callable[[int], None], impatient: Path
) -> None:
    """It cannot become the keeper's child; and it is told of, for it has been ended."""
    with start_processes("frozen", pause_above_another, (ready.address,), nprocs=1, start_method="fork") as group:
        [below] = [int(word.split()[1]) for word in ready.wait(3) if word.startswith("below")]
        frozen(group.pids()[0])
        with patience_with([below], impatient):
            group.close(timeout=0.2)
        result = group.wait(0)
    assert not alive(below)
    assert result is not None
    assert result.outcomes[0].state == "abandoned"
    assert [(one.pid, one.local_rank, one.exitcode) for one in result.leftovers] == [(below, 0, -9)]


UNKILLABLE = """
import os, signal, sys
from phalanx._engine.keeper import guard, keeper
from phalanx._base import procfs
from phalanx.multiprocessing import start_processes
from tests.support.helpers import tell
from tests.engine.test_no_survivors import pause

keeper.KILL_WAIT = guard.KILL_WAIT = 0.2  # in both, which are forks of this process
group = start_processes("g", pause, (sys.argv[1],), nprocs=2, start_method="fork")
above = group._started()._keeper._guard
tell(sys.argv[1], f"helpers {above} {procfs.children(above)[0]}")
signal.pause()
"""


def test_a_keeper_that_nothing_ends_keeps_no_worker_alive(
    ready: Ready, frozen: Callable[[int], None], tmp_path: Path
) -> None:
    """Its guard kills what is below it, and leaves it."""
    with started_script(tmp_path, UNKILLABLE, ready.address) as launcher:
        said = ready.wait(3)
        [helpers] = [word for word in said if word.startswith("helpers")]
        workers = [int(word) for word in said if word != helpers]
        above, kept = map(int, helpers.split()[1:])
        frozen(kept)
        launcher.kill()
    assert wait_gone([*workers, above]) == set()
    assert alive(kept)


# --- Where /proc is empty, or another namespace's, nothing that a worker started is left behind either


EMPTY = "mount -t tmpfs none /proc"

# One in a session of its own, one twice forked, and one that heeds no SIGTERM. All are so before the worker goes on.
UNSEEN_FAMILY = """
import os, signal
heard, settled = os.pipe()
for kind in range(3):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if kind and os.fork():
            os._exit(0)
        if kind == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        {ready}
        os.close(settled)
        signal.pause()
    if kind:
        os.waitpid(pid, 0)
os.close(settled)
assert os.read(heard, 1) == b""
{ready}
{last}
"""

UNSEEN = """
import os, sys
from phalanx._base import procfs
from phalanx.multiprocessing import start_processes
assert not procfs.is_shown()
def work(code):
    exec(code)
if __name__ == "__main__":
    how, method, code = sys.argv[1:]
    group = start_processes("unseen", work, {{0: (code,)}}, {{0: {{}}}}, start_method=method)
    if how == "ends":
        result = group.wait()
        assert result.succeeded, result
        assert len(result.leftovers) == 3, result
    else:
        {gate}
        if how == "closed":
            group.close(timeout=0.2)
"""


@pytest.fixture
def unshare() -> str:
    if os.geteuid() != 0:
        pytest.skip("needs root: only that mounts over /proc")
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "sh", "-c", EMPTY], check=False).returncode
    ):
        pytest.skip("needs CAP_SYS_ADMIN: only that mounts over /proc")
    return "unshare"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, method",
    [("ends", "spawn"), ("ends", "fork"), ("ends", "forkserver"), ("closed", "fork"), ("killed", "spawn")],
)
def test_without_proc_nobody_is_left(
    unshare: str, method: str, how: str, ready: Ready, gate: Gate, tmp_path: Path
) -> None:
    text = textwrap.dedent(UNSEEN).format(gate=gate.python())
    code = UNSEEN_FAMILY.format(ready=ready.python(), last="" if how == "ends" else "signal.pause()")
    prefix = (unshare, "--mount", "sh", "-c", f'{EMPTY} && exec "$@"', "sh")
    with started_script(tmp_path, text, how, method, code, prefix=prefix, stderr=subprocess.PIPE) as launcher:
        pids = ready.pids(4)
        if how == "killed":
            launcher.kill()
        else:
            gate.open()
        _out, err = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == (-signal.SIGKILL if how == "killed" else 0), err
    assert not wait_gone(pids, 10)


@pytest.mark.slow
def test_another_namespaces_proc_is_not_believed(unshare: str, tmp_path: Path) -> None:
    code = UNSEEN_FAMILY.format(ready="", last="")
    text = textwrap.dedent(UNSEEN).format(gate="pass")
    done = run_script(tmp_path, text, "ends", "spawn", code, prefix=(unshare, "--pid", "--fork"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ended what was left behind: pid ") == 3


def test_a_number_is_told_to_be_a_childs_only_where_it_is() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        assert linux.children_among([1, os.getppid(), os.getpid(), pid, PID_LIMIT - 1]) == [pid]
        scan = ChildScan()
        while pid not in scan.found:
            assert not scan.step(pid)
        assert scan.found <= set(procfs.children(os.getpid()))  # of other tests, too: a resource tracker
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert linux.children_among([pid]) == [pid]  # not reaped yet
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert linux.children_among([pid]) == []


def test_we_are_shown_by_our_own_proc() -> None:
    assert procfs.is_shown()
