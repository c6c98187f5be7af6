"""Guard, keeper and launcher are stopped and killed at awkward moments: nobody is left, and what is said is true."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx._base import channels, clock, interpreter, linux, procfs
from phalanx._engine import keeper_client as client_module
from phalanx._engine import protocol
from phalanx._engine.keeper import keeper as keeper_module
from phalanx._engine.keeper_client import KeeperClient
from phalanx._engine.keeper_link import KeeperLink
from phalanx._engine.marked_processes import MarkedProcesses
from phalanx._logs import display
from phalanx.multiprocessing import DefaultLogsSpecs, KeeperLostError, PContext, Std, SubprocessContext, start_processes
from tests.support.helpers import PYTHON, TIMEOUT, alive, meanwhile, pass_gate, tell, until, wait_gone
from tests.support.insides import helpers_of, state_of, stop, supervisor_of, wait_until_stopped
from tests.support.waits import shorten
from tests.support.workers import run_script, started_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from phalanx._engine.supervisor import Supervisor
    from phalanx._logs.pump import Pump
    from phalanx.multiprocessing import LogsDest, PContext
    from tests.support.disks import Disk
    from tests.support.helpers import Gate, Ready

pytestmark = [pytest.mark.usefixtures("own_temporary_folder"), pytest.mark.slow]


# --- while the keeper boots

BOOTING = """
import sys
from phalanx.multiprocessing import KeeperLostError, start_processes
from tests.engine.test_lost_helpers import StopTheKeeper

address, survivor = sys.argv[1:]
specs = StopTheKeeper(address)
try:
    start_processes("g", "/bin/sh", ("-c", survivor), nprocs=2, logs_specs=specs).wait()
except KeeperLostError as error:
    print("lost:", error)
"""


class StopTheKeeper(DefaultLogsSpecs):
    """Between the boot of the keeper and the order to start: stops the keeper, and says who is who."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`."""
        from tests.support.helpers import tell

        deadline = time.monotonic() + TIMEOUT
        while True:
            assert time.monotonic() < deadline
            for guard in procfs.children(os.getpid()):
                for keeper in procfs.children(guard):
                    os.kill(keeper, signal.SIGSTOP)
                    tell(self._address, f"{guard} {keeper}")
                    return super().reify(envs)


@pytest.mark.parametrize("who", ["keeper", "guard", "launcher"])
def test_an_order_to_start_that_lies_unread(ready: Ready, tmp_path: Path, who: str) -> None:
    """The keeper is stopped as it boots. The order is sent, and somebody is killed: nothing must be started by it."""
    survivor = f'exec {PYTHON} -S -c "import signal; {ready.python()}; signal.pause()"'
    with started_script(tmp_path, BOOTING, ready.address, survivor, stdout=subprocess.PIPE) as launcher:
        guard, keeper = map(int, ready.wait()[0].split())
        wait_until_stopped([keeper])
        until(lambda: has_sent(launcher.pid))
        os.kill({"keeper": keeper, "guard": guard, "launcher": launcher.pid}[who], signal.SIGKILL)
        assert wait_gone([guard, keeper, launcher.pid]) == set()
        out, _ = launcher.communicate(timeout=TIMEOUT)
    poll = select.poll()
    poll.register(ready._sock, select.POLLIN)
    survivors = ready.pids() if poll.poll(300) else []
    assert [pid for pid in survivors if alive(pid)] == []
    if who != "launcher":
        assert out.startswith("lost: ")
        assert f"the group's {who} process was killed by signal 9" in out


def has_sent(launcher: int) -> bool:
    """Whether the order has been sent: the launcher waits then, with two threads, both asleep."""
    tasks = list(Path(f"/proc/{launcher}/task").iterdir())
    return len(tasks) > 1 and all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in tasks)


STOPS_BEFORE_IT_IS_UP = """
import os
from phalanx._engine.keeper import keeper

def keep(self, *arguments, keep=keeper.Keeper.keep):
    os.kill(os.getpid(), 19)
    keep(self, *arguments)

keeper.Keeper.keep = keep
"""


def test_a_keeper_that_gets_up_as_its_guard_dies_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The death of its guard wakes it. Its first word comes then, and the launcher may have read no other yet."""
    command, helpers_gone, receive = interpreter.command, KeeperClient.helpers_gone, channels.Channel.receive
    heard: list[object] = ["nothing yet"]

    def found_dead(client: KeeperClient) -> bool:
        gone = helpers_gone(client)
        if heard == ["nothing yet"]:
            heard.clear()
            select.select([client.channel], (), (), TIMEOUT)
        return gone

    def one_word_at_first(channel: channels.Channel) -> object:
        if heard == ["nothing yet"]:
            return None
        if heard == ["up"]:
            heard.append("nothing more")
            return None
        received = receive(channel)
        if received is not None:
            heard.append(received[0][0])
        return received

    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "command", lambda flags, code: command(flags, STOPS_BEFORE_IT_IS_UP + code))
        patch.setattr(KeeperClient, "helpers_gone", found_dead)
        patch.setattr(channels.Channel, "receive", one_word_at_first)
        with meanwhile(start_processes, "g", "/bin/sleep", ("600",), nprocs=2) as error:
            until(lambda: stopped_helpers() != [])
            [(guard, keeper)] = stopped_helpers()
            os.kill(guard, signal.SIGKILL)
            assert str(error()).startswith("the group's guard process was killed by signal 9")
    assert wait_gone([guard, keeper]) == set()
    assert heard[:2] == ["up", "nothing more"]


def stopped_helpers() -> list[tuple[int, int]]:
    """Guards that we have started, with their keepers, which are stopped."""
    pairs = [(guard, keeper) for guard in procfs.children(os.getpid()) for keeper in procfs.children(guard)]
    return [(guard, keeper) for guard, keeper in pairs if procfs.Stat(keeper).state == "T"]


# --- while the group runs


@pytest.mark.each_python
@pytest.mark.parametrize("kind", ["binary", "forkserver", "fork"])
def test_a_stopped_keeper_whose_guard_is_killed_is_woken(kind: str, ready: Ready) -> None:
    """By the kernel: nobody needs to ask."""
    with running(kind, ready) as group:
        pids = ready.pids(2)
        guard, keeper = helpers_of(group)
        stop(keeper)
        os.kill(guard, signal.SIGKILL)
        assert wait_gone([*pids, keeper], 5) == set()
        with pytest.raises(KeeperLostError, match="guard process was killed by signal 9; every process of the group"):
            group.wait(TIMEOUT)


def pause(address: str) -> None:
    tell(address, str(os.getpid()))
    while True:
        signal.pause()


def running(kind: str, ready: Ready) -> PContext:
    if kind == "binary":
        code = f"import signal; {ready.python()}; signal.pause()"
        return start_processes("g", sys.executable, ("-S", "-c", code), nprocs=2)
    return start_processes("g", pause, (ready.address,), nprocs=2, start_method=kind)


def test_a_keeper_that_is_stopped_repeatedly_is_replaced(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then its guard is killed: the last resort is not called off by what has been said of the loss before."""
    shorten(monkeypatch, ANSWER_WAIT=0.3, KILL_WAIT=0.3, DRAIN_WAIT=0.1)
    monkeypatch.setattr(KeeperClient, "wake", lambda _keeper: None)  # somebody stops it faster than it can be woken
    resort = MarkedProcesses.kill  # which is not what is shortened: it looks at every process of the machine
    monkeypatch.setattr(MarkedProcesses, "kill", lambda self, _wait, spared=0: resort(self, TIMEOUT, spared))
    with running("binary", ready) as group:
        pids = ready.pids(2)
        guard, keeper = helpers_of(group)
        for pid in (keeper, guard):
            stop(pid)
        group.close(timeout=0.1)
        assert [pid for pid in (*pids, guard, keeper) if alive(pid)] == []
        with pytest.raises(KeeperLostError, match=r"answered no more.*every process of the group was killed with it"):
            group.wait(0)


def test_a_stopped_keeper_is_woken_by_a_close(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, ANSWER_WAIT=0.2)
    with running("binary", ready) as group:
        ready.pids(2)
        stop(helpers_of(group)[1])
        group.close(timeout=TIMEOUT)
        result = group.wait(0)
    assert result is not None
    assert result.state == "stopped"
    assert {outcome.exitcode for outcome in result.outcomes.values()} == {-signal.SIGTERM}


@contextlib.contextmanager
def forks_with_every_descriptor() -> Iterator[list[int]]:
    """Forks of this process, which have all that is open here, and live until the end of the context."""
    out, into = os.pipe()
    pids: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os.close(into)
            os.read(out, 1)
            os._exit(0)
        pids.append(pid)

    pair = channels.pair

    def pair_and_fork() -> object:
        both = pair()
        fork()
        return both

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "pair", pair_and_fork)
        yield pids
    os.close(into)
    os.close(out)
    for pid in pids:
        os.waitpid(pid, 0)


def test_helpers_are_missed_though_a_fork_holds_their_socket(ready: Ready) -> None:
    """It would tell of their end never."""
    with forks_with_every_descriptor() as forks:
        group = running("binary", ready)
        assert forks
        pids = ready.pids(2)
        lose_both(group)
        with pytest.raises(KeeperLostError, match="keeper and its guard were killed; every process"):
            group.wait(TIMEOUT)
        assert [pid for pid in pids if alive(pid)] == []
        group.close()


@pytest.mark.parametrize(
    "free, said",
    [
        (2, "every process of the group was killed with it"),
        (0, "no descriptor is left, or no /proc, to look for its processes: some may live on"),
    ],
)
def test_the_last_resort_takes_two_descriptors(
    free: int, said: str, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("binary", ready) as group:
        pids = ready.pids(2)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resort = MarkedProcesses.kill

        def with_few(self: MarkedProcesses, wait: float, spared: int = 0) -> tuple[list[int], list[int]] | None:
            held = [os.open(os.devnull, os.O_RDONLY)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(free):
                os.close(held.pop())
            try:
                return resort(self, wait, spared)
            finally:
                for fd in held:
                    os.close(fd)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        monkeypatch.setattr(MarkedProcesses, "kill", with_few)
        lose_both(group)
        with pytest.raises(KeeperLostError, match=said):
            group.wait(TIMEOUT)
        assert [pid for pid in pids if alive(pid)] == ([] if free else pids)
        monkeypatch.undo()
    for pid in pids if not free else ():
        os.kill(pid, signal.SIGKILL)
    assert wait_gone(pids) == set()


def test_the_last_resort_finds_one_whose_first_thread_ended(ready: Ready, tmp_path: Path) -> None:
    """Its state is that of a zombie, and its own environment is empty: those of its threads are not."""
    script = tmp_path / "leaderless.py"
    script.write_text(
        "import ctypes, os, threading\n"
        "def stay():\n"
        f"    {ready.python()}\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=stay).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with start_processes("g", sys.executable, ("-S", str(script)), nprocs=1) as group:
        [pid] = ready.pids()
        until(lambda: procfs.Stat(pid).state == "Z")
        lose_both(group)
        with pytest.raises(KeeperLostError, match="every process of the group was killed with it"):
            group.wait(TIMEOUT)
        with contextlib.suppress(FileNotFoundError):  # whoever has inherited it may reap it at any time
            assert len(os.listdir(f"/proc/{pid}/task")) == 1


def test_the_last_resort_waits_for_no_silent_process(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that sits in a page fault of a disk that does not answer."""
    never = threading.Event()
    look = MarkedProcesses.start_of
    with running("binary", ready) as group, subprocess.Popen(["sleep", "1000"]) as other:
        pids = ready.pids(2)

        def start_of(self: MarkedProcesses, pid: int) -> int:
            if pid == other.pid:
                never.wait()
            return look(self, pid)

        monkeypatch.setattr(MarkedProcesses, "start_of", start_of)
        lose_both(group)
        with pytest.raises(KeeperLostError, match=rf"killed with it; but for processes {other.pid} it cannot be said"):
            group.wait(TIMEOUT)
        assert [pid for pid in pids if alive(pid)] == []
        never.set()
        assert alive(other.pid)
        other.kill()


def test_stopped_helpers_are_woken_when_the_launcher_lets_go() -> None:
    client = KeeperClient()
    client.exec(("-I", "-S"))
    try:
        select.select([client.channel], (), ())  # the keeper is up
        stop(procfs.children(client._guard)[0])
        stop(client._guard)
    finally:
        assert client.close(TIMEOUT) == 0


def test_a_guard_that_outlives_its_kill_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the kill does not reach it."""
    monkeypatch.setattr(client_module, "GUARD_WAIT", 0.1)
    monkeypatch.setattr(KeeperClient, "kill_helpers", lambda _self: None)
    monkeypatch.setattr(KeeperClient, "wake", lambda _self: None)
    monkeypatch.setattr(MarkedProcesses, "kill", lambda _self, _wait, _spared: ([], []))
    client = KeeperClient()
    client.exec(("-I", "-S"))
    guard = client._guard
    stop(guard)
    with meanwhile(client.close, 0.1):
        pass
    os.kill(guard, signal.SIGKILL)
    assert wait_gone([guard]) == set()


def lose_both(group: PContext) -> None:
    guard, kept = helpers_of(group)
    assert os.getpgid(kept) == guard
    os.killpg(guard, signal.SIGKILL)  # in one step: neither sees the other's end


# --- closing while it starts


@pytest.mark.parametrize("is_booting", [False, True], ids=["before the keeper", "while the keeper boots"])
def test_a_close_while_another_thread_starts(ready: Ready, is_booting: bool) -> None:
    """It is no silent no-op: nothing runs when both have returned."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(DefaultLogsSpecs):
        def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
            begun.set()
            go_on.wait(TIMEOUT)
            return super().reify(envs)

    code = f"import signal; {ready.python()}; signal.pause()"
    group = SubprocessContext("g", sys.executable, {0: ("-S", "-c", code)}, {0: {}}, Slow())
    if is_booting:
        go_on.set()
    with meanwhile(group.start) as error:
        if is_booting:
            until(lambda: group._supervisor is not None)
        else:
            begun.wait(TIMEOUT)
        group.close()
        go_on.set()
        said = str(error())
    assert not group.is_open
    assert is_booting or said == "the group 'g' was closed while it was starting"


SIGNALLED = """
import sys, time
from phalanx.multiprocessing import SignalException, start_processes
from tests.engine.test_lost_helpers import StopTheKeeper

began = time.monotonic()
try:
    start_processes("g", "sleep", ("600",), nprocs=1, logs_specs=StopTheKeeper(sys.argv[1]), grace=0.5)
except SignalException as error:
    print(error.sigval.name, time.monotonic() - began < 10)
"""


def test_a_signal_is_not_held_while_the_keeper_does_not_get_up(ready: Ready, tmp_path: Path) -> None:
    """The wait for the start ends with it, and the group can be closed."""
    with started_script(tmp_path, SIGNALLED, ready.address, stdout=subprocess.PIPE) as launcher:
        ready.wait()
        until(lambda: has_sent(launcher.pid))
        launcher.send_signal(signal.SIGTERM)
        assert launcher.communicate(timeout=TIMEOUT)[0] == "SIGTERM True\n"


# --- what is decided when a helper goes


@pytest.mark.each_python
@pytest.mark.parametrize("guard_goes", [False, True])
def test_a_keeper_that_ends_by_a_mistake_leaves_nobody(
    guard_goes: bool, ready: Ready, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its guard does its work, or, without one, the keeper itself; and the mistake is told, at the end."""
    code = f"{ready.python()}; import signal; signal.pause()"
    script = f"{PYTHON} -S -c {shlex.quote(code)} & wait"
    with start_processes("g", "/bin/sh", ("-c", script), nprocs=2) as group:
        pids = [*ready.pids(2), *group.pids().values()]
        guard, kept = helpers_of(group)
        stop(kept)
        supervisor = supervisor_of(group)
        with busy(group, lambda: supervisor.link.send(("no such word",))):
            pass
        if guard_goes:
            os.kill(guard, signal.SIGKILL)  # wakes the keeper
        else:
            os.kill(kept, signal.SIGCONT)
        with pytest.raises(KeeperLostError, match="keeper process ended with exit code 70; every process"):
            group.wait(TIMEOUT)
        assert [pid for pid in pids if alive(pid)] == []
    assert wait_gone([guard, kept]) == set()
    err = capfd.readouterr().err
    assert "phalanx: a helper process of a group has failed: KeyError: 'no such word'\n" in err
    assert f'File "{keeper_module.__file__}", line ' in err


@pytest.mark.parametrize("ended", ["failed", "stopped", "succeeded"])
def test_a_guard_killed_late_does_not_change_the_end(
    ended: str, ready: Ready, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Who had failed has failed. What is left is killed at once, for nobody looks after the keeper."""
    args = {rank: (ended, rank, ready.address, gate.address) for rank in range(2)}
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(start_processes("g", deaf_unless_done, args, grace=TIMEOUT, linger=TIMEOUT))
        pids = ready.pids(2 + (ended == "succeeded"))
        guard, kept = helpers_of(group)
        if ended == "stopped":
            stack.enter_context(meanwhile(group.close))
        gate.open(2)
        until(lambda: state_of(group) in ("STOPPING", "LINGERING"))
        os.kill(guard, signal.SIGKILL)
        result = group.wait()
        assert result.state == ended
        if ended == "failed":
            assert result.root_cause is not None
            assert (result.root_cause.local_rank, result.root_cause.exitcode) == (1, 3)
            assert (result.outcomes[0].state, result.outcomes[0].signal_sent) == ("stopped", 9)
        assert wait_gone([*pids, kept]) == set()
    assert (
        "the group's guard process was killed by signal 9; what was left of the group was killed with it" in caplog.text
    )


def deaf_unless_done(ended: str, rank: int, address: str, gate: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if ended == "succeeded" and rank == 0 and os.fork() == 0:
        rank, ended = 0, "left behind"
        os.setsid()
    tell(address, str(os.getpid()))
    if ended == "left behind":
        while True:
            signal.pause()
    pass_gate(gate)
    if ended == "failed" and rank == 1:
        os._exit(3)
    while ended != "succeeded":
        signal.pause()


def test_a_stop_in_the_midst_of_a_start(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper hears it after some workers: they are killed, and nothing else is started."""
    disk.freeze()

    class Slow(DefaultLogsSpecs):
        """Rank 70 has a file that can be made when the test wants it."""

        def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
            logs = super().reify(envs)
            logs.stdouts[70] = str(disk.folder / "stdout.log")
            return logs

    ranks = range(200)
    args = dict.fromkeys(ranks, ("600",))
    envs: dict[int, dict[str, str]] = {rank: {} for rank in ranks}
    group = SubprocessContext("g", "/bin/sleep", args, envs, Slow())
    send, has_said = KeeperLink.send, threading.Event()

    def note(link: KeeperLink, message: tuple[object, ...]) -> None:
        send(link, message)
        has_said.set()

    with meanwhile(group.start) as error:
        until(lambda: group._supervisor is not None and bool(procfs.children(group._supervisor._keeper._guard)))
        supervisor, (_guard, kept) = supervisor_of(group), helpers_of(group)
        until(lambda: len(procfs.children(kept)) >= 64)
        monkeypatch.setattr(KeeperLink, "send", note)
        with meanwhile(group.close):
            assert has_said.wait(TIMEOUT)
            disk.thaw()
        assert str(error()) == "the group was closed while it was starting"
    assert not alive(kept)
    assert supervisor.link.keeper_error is None


def test_a_guard_that_takes_over_late_waits_for_no_ended_worker(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """Function workers die with their keeper. Of zombies that it inherits, no SIGCHLD tells."""
    with start_processes("g", pause, (ready.address,), nprocs=2, start_method="spawn") as group:
        pids = ready.pids(2)
        guard, kept = helpers_of(group)
        monkeypatch.setattr(supervisor_of(group)._keeper, "wake", lambda: None)
        stop(guard)
        os.kill(kept, signal.SIGKILL)
        until(lambda: all(procfs.Stat(pid).state == "Z" for pid in pids))
        monkeypatch.undo()
        began = time.monotonic()
        os.kill(guard, signal.SIGCONT)
        with pytest.raises(KeeperLostError):
            group.wait(TIMEOUT)
    assert time.monotonic() - began < protocol.KILL_WAIT / 2


def test_a_guard_needs_no_descriptor_to_take_over(tmp_path: Path) -> None:
    script = "from tests.engine.test_lost_helpers import sleep_in_a_group; sleep_in_a_group()"
    with started_script(tmp_path, script, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        guard, kept, worker = map(int, launcher.stdout.readline().split())
        until(lambda: holds_pidfd_of(guard, kept))  # the last that it opens; it may get to that after the group is up
        count = len(os.listdir(f"/proc/{guard}/fd"))
        resource.prlimit(guard, resource.RLIMIT_NOFILE, (count + 2, count + 2))  # 2 for a look at /proc
        launcher.kill()
        with contextlib.suppress(ProcessLookupError):  # it has ended because of that, and everything with it
            os.kill(kept, signal.SIGKILL)
        assert wait_gone([worker, guard]) == set()


GUARD = """
import os, signal, sys
from phalanx._base import channels, linux
from phalanx._engine.keeper import guard
from phalanx._engine.keeper.keeper import Keeper

ours, theirs = channels.pair()
serving = Keeper(theirs)
linux.become_subreaper()
guard.ignore_signals()
"""

TAKE_OVER = """
heard, told = os.pipe()
log_writer = os.fork()
if log_writer == 0:
    os.close(told)
    os.read(heard, 1)
    os._exit(0)
if os.fork() == 0:  # a worker
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        signal.pause()
guard.load_end()
sys.meta_path.clear()  # in place of a disk that does not answer
os.close(told)  # the log writer ends after the worker
serving.take_over(os.getpid(), signal.SIGKILL, log_writer, os.pidfd_open(os.getppid()))
channel = channels.Channel(ours)
while (received := channel.receive()) is not None:
    (verb, *fields), _fds = received
print(verb, *fields)
"""


def test_a_guard_needs_no_disk_to_take_over(tmp_path: Path) -> None:
    """Also where log files are rotated: the guard has started nothing that fills them."""
    done = run_script(tmp_path, GUARD + TAKE_OVER)
    assert (done.returncode, done.stdout.strip()) == (0, f"ended_by_loss keeper {-signal.SIGKILL}"), done.stderr


IN_THEIR_INTERPRETER = """
import sys
sys.path[:0] = sys.argv[1:]
from phalanx._engine.keeper import guard, keeper, start_group
guard.load_end()
print(*sorted({"collections", "enum", "functools", "re", "typing"} & sys.modules.keys()))
"""


def test_what_guards_and_keepers_load_for_the_end_is_little() -> None:
    """Each group does it, and what takes 3 ms takes 17 with the parts of the library that these modules bring along."""
    source = str(Path(linux.__file__).parents[2])
    command = [sys.executable, "-I", "-S", "-c", IN_THEIR_INTERPRETER, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


TOO_LATE = """
log_writer = os.fork()
if log_writer == 0:
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        signal.pause()
ours.close()
run = serving.loop.run

def run_late():
    os.kill(log_writer, signal.SIGKILL)
    os.waitid(os.P_PID, log_writer, os.WEXITED | os.WNOWAIT)
    run()

serving.loop.run = run_late
serving.take_over(os.getpid(), signal.SIGKILL, log_writer, os.pidfd_open(os.getppid()))
print(serving._state)
"""


def test_a_log_writer_that_is_lost_after_the_end_is_no_error(tmp_path: Path) -> None:
    """The launcher's death and the log writer's are seen in one round of the loop, in this order."""
    done = run_script(tmp_path, GUARD + TOO_LATE)
    assert (done.returncode, done.stdout.strip()) == (0, "GONE"), done.stderr


def test_an_order_that_cannot_be_sent_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(KeeperLink, "open", fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no") as caught:
        start_processes("g", "/bin/true", nprocs=1)
    assert set(os.listdir("/proc/self/fd")) == before, caught  # whose traceback holds what was local


def holds_pidfd_of(holder: int, pid: int) -> bool:
    """Whether a process has a pidfd of ``pid`` (proc_pid_fdinfo(5): its line ``Pid:``)."""
    for descriptor in Path(f"/proc/{holder}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed: the holder goes on meanwhile
            if f"Pid:\t{pid}\n" in descriptor.read_text():
                return True
    return False


def sleep_in_a_group() -> None:
    with start_processes("g", "/bin/sleep", {0: ("600",)}) as group:
        print(*helpers_of(group), group.pids()[0], flush=True)  # noqa: T201 - for the test
        group.wait()


# --- A launcher that hears late of a keeper that is silent, or lost: what was said before counts


LARGE = 1 << 20


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


def test_a_keeper_that_is_lost_after_a_failure_does_not_hide_it(ready: Ready, gate: Gate) -> None:
    """What became of the others since is not known."""
    with failing_at(gate, ready, stays=True) as group:
        ready.wait(2)
        gate.open()
        until(lambda: state_of(group) == "STOPPING")
        os.kill(helpers_of(group)[1], signal.SIGKILL)
        with pytest.raises(KeeperLostError, match="before that, rank 1 had failed: exited with code 3") as caught:
            group.wait(TIMEOUT)
    assert {rank: failure.exitcode for rank, failure in caught.value.failures.items()} == {1: 3}


def test_a_helper_lost_after_success_changes_no_result(ready: Ready, caplog: pytest.LogCaptureFixture) -> None:
    left = f"import os, signal; os.fork() and os._exit(0); {ready.python()}; signal.pause()"
    with start_processes("g", sys.executable, ("-S", "-c", left), nprocs=1, linger=TIMEOUT) as group:
        pids = ready.pids()
        until(lambda: state_of(group) == "LINGERING")
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
