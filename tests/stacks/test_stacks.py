"""Stacks of live processes: who shows them, who is asked and who never is, and what the answers say."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent, indent
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._base import clock, procfs
from phalanx._evidence.cleanup import remove_empty, remove_old
from phalanx._evidence.error_file import ERROR_FILE_ENV
from phalanx._evidence.stack_signals import last_offer, stacks_path
from phalanx._stacks import collect, dump, py_spy, request, snapshot
from phalanx.multiprocessing import start_processes
from phalanx.timer import move_stack_signal
from tests.support import stack_workers
from tests.support.disks import Disk, sleeping_on_disks, until
from tests.support.helpers import TIMEOUT, Gate, Ready, descendants
from tests.support.timer_workers import wait_asleep

ONE, ALL = signal.SIGRTMIN + 18, signal.SIGRTMIN + 19
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(collect.__file__)))
PATIENCE = 10.0  # seconds that a dump may take on a loaded machine


class Worker:
    """A process of its own, which is asked like a worker. ``code`` runs in ``work()``; it says ``ready()`` itself."""

    def __init__(
        self, folder: Path, ready: Ready, code: str, *, rank: int = 0, offer: str = "assert offer()", runs: bool = False
    ) -> None:
        self.error_file = str(folder / str(rank) / "error.json")
        self.sent: list[int] = []
        program = (
            "import os, signal, sys, threading, time\n"
            f"sys.path.insert(0, {os.path.dirname(ROOT)!r})\n"
            "from phalanx._evidence.stack_signals import offer_stacks as offer\n"
            "import functools, socket\n"
            "say = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto\n"
            f"ready = functools.partial(say, b'here', {ready.address!r})\n"  # which leaves no frame of Python
            f"def work():\n{indent(dedent(code), '    ')}\n"
            f"{offer}\nwork()\n"
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
        env[ERROR_FILE_ENV] = self.error_file
        self.process = subprocess.Popen([sys.executable, "-c", program], env=env)
        self.rank = rank
        try:
            ready.wait()
            if not runs:
                wait_asleep(self.process.pid)  # who runs is not asked by signal
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self.process.kill()
        self.process.wait()

    def send(self, number: int) -> None:
        self.sent.append(number)
        self.process.send_signal(number)

    @property
    def target(self) -> request.Target:
        """It is about to be killed, or so one says: then it is asked by signal."""
        return request.Target(self.rank, self.process.pid, self.error_file, doomed=True, send=self.send)

    def ask(self, patience: float = PATIENCE, *, doomed: bool = True) -> str:
        collection = collect.Collection([self.target.replace(doomed=doomed)], patience)
        collection.begin()
        collection.wait()
        return collection.finish()[self.rank]  # which leaves nothing open

    def look(self, patience: float = PATIENCE) -> str:
        """Its stacks as of a process that is to go on."""
        return self.ask(patience, doomed=False)

    def refuses(self, reason: str) -> None:
        """Not asked at all, and alive afterwards; the reason is given."""
        for ask in (self.ask, self.look):
            text = ask()
            assert text.startswith(f"# no Python stack: {reason}"), text
        assert self.sent == []
        assert self.process.poll() is None


def sum_up(texts: Mapping[int, str], hung: int | None = None) -> str:
    return dump.sum_up_locations({rank: dump.location(text) for rank, text in texts.items()}, hung)


def shown(text: str) -> list[list[str]]:
    """The functions of each thread that are the test's own, the innermost first."""
    return [[frame.function for frame in thread.frames if frame.path == "<string>"] for thread in dump.parse(text)]


SLEEP = "ready(); time.sleep(1000)"
IDLE = """
    here = threading.Semaphore(0)
    def idle(): here.release(); threading.Event().wait()
    for _ in range(3): threading.Thread(target=idle, daemon=True).start()
    for _ in range(3): here.acquire()
    ready(); time.sleep(1000)
    """


def wait_for_state(pid: int, state: str) -> None:
    while not request.facts(pid).partition("State: ")[2].startswith(state):
        time.sleep(0.001)


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be read from outside."""
    monkeypatch.setattr(py_spy, "find", lambda: "")


without_py_spy = pytest.mark.usefixtures("no_py_spy")


# --- processes that answer


@without_py_spy  # else those that run are read from outside
@pytest.mark.parametrize(
    "code",
    [
        SLEEP,
        "lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()",
        "import hashlib; data = bytes(1 << 22); ready()\nwhile True: hashlib.sha256(data)",  # without the GIL
        "ready(); sum(range(10 ** 15))",  # with the GIL: no line of Python runs any more
        "ready()\nwhile True: pass",
    ],
    ids=["sleep", "lock", "hash", "gil", "python"],
)
def test_where_a_process_is(tmp_path: Path, ready: Ready, code: str) -> None:
    with Worker(tmp_path, ready, code, runs=True) as worker:
        text = worker.ask()
        assert shown(text)[-1][-2:] == ["work", "<module>"]
        assert sum_up({0: text}).startswith("rank 0 is in ")
        assert text.endswith(" in <module>\n")
        assert "#" not in text
        assert worker.process.poll() is None
        assert len(dump.parse(worker.ask())) == 1  # once more, and not the first dump again
    assert worker.sent == [ALL, ALL]


def test_all_threads_are_shown_and_the_main_thread_comes_last(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, IDLE) as worker:
        text = worker.ask()
    assert shown(text) == [["idle"], ["idle"], ["idle"], ["work", "<module>"]]
    *others, main = dump.parse(text)
    assert main.current
    assert [thread.current for thread in others] == [False] * 3
    assert len({thread.ident for thread in (*others, main)}) == 4
    frame = dump.top(dump.parse(text), others[1].ident)
    assert frame is not None
    assert frame.function == "idle"


def test_a_deep_stack_is_cut_by_faulthandler(tmp_path: Path, ready: Ready) -> None:
    code = """
        def deep(n):
            if n: return deep(n - 1)
            ready(); time.sleep(1000)
        deep(150)
        """
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
    assert text.endswith(" in deep\n" if sys.version_info >= (3, 13) else "\n  ...\n")  # which 3.13 does not say
    assert len(dump.parse(text)[-1].frames) == 100


def test_a_main_thread_that_waits_for_threads_at_its_end(tmp_path: Path, ready: Ready) -> None:
    """The frame at its bottom is not the module's any more."""
    code = "threading.Thread(target=lambda: (threading.main_thread().join(0), ready(), time.sleep(1000))).start()"
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
    assert "dump is not complete" not in text
    assert len(dump.parse(text)) == 2


@pytest.mark.slow
def test_another_thread_takes_a_signal_that_main_blocks(
    tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then only a time in which nothing comes tells of the dump's end: who writes it may wait for a processor."""
    monkeypatch.setattr(request, "_QUIET", 0.2)
    code = f"""
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [{ALL}])
        ready(); time.sleep(1000)
        """
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
    assert [thread.current for thread in dump.parse(text)] == [True, False]
    assert shown(text)[-1] == ["work", "<module>"]


@pytest.mark.slow
@pytest.mark.parametrize("doomed", [True, False])
def test_many_at_once(tmp_path: Path, ready: Ready, doomed: bool) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(tmp_path, ready, SLEEP, rank=rank)) for rank in range(4)]
        targets = [worker.target.replace(doomed=doomed) for worker in workers]
        collection = stack.enter_context(collect.Collection(targets, PATIENCE))
        collection.begin()
        assert collection.wait()
        texts = collection.finish()
        assert collection.finish() is texts
        assert collection.wait()
        assert any(worker.sent for worker in workers) == doomed
    assert sum_up(texts, 2) == "all 4 ranks are in work (<string>:8)"


def test_two_who_ask_at_once(tmp_path: Path, ready: Ready) -> None:
    with (
        Worker(tmp_path, ready, SLEEP) as worker,
        collect.Collection([worker.target], PATIENCE) as one,
        collect.Collection([worker.target], PATIENCE) as two,
    ):
        one.begin()
        two.begin()
        assert one.wait()
        assert two.wait()
        for collection in (one, two):
            assert shown(collection.finish()[0]) == [["work", "<module>"]]
        with collect.Collection([worker.target]) as left:  # which leaving it closes
            left.begin()


@pytest.mark.slow
@pytest.mark.usefixtures("own_temporary_folder")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_functions_show_theirs(ready: Ready, gate: Gate, method: str) -> None:
    args = {0: (ready.address, gate.address)}
    with start_processes("stacks", stack_workers.hang, args, start_method=method) as group:
        ready.wait()
        (pid,) = group.pids().values()
        target = request.Target(0, pid, group.logs.error_files[0], send=lambda number: os.kill(pid, number))
        for doomed in (True, False, True):
            target = target.replace(doomed=doomed)
            threads = dump.parse(stack_workers.ask(target))
            assert len(threads) == 2
            assert {frame.function for frame in threads[0].frames} >= {"idle"}
            own = [frame.function for frame in dump.program_frames(threads[-1].frames)]
            assert own == ["hang"]
            frame = dump.top(threads)
            assert frame is not None
            assert str(frame).startswith("hang (stack_workers.py:")
        gate.open()
        assert not group.wait().is_failed()


@pytest.mark.slow
def test_a_fork_shows_its_own_and_its_keepers_none(ready: Ready, gate: Gate, logs: Path) -> None:
    (logs / "outer").mkdir()
    args = {0: (ready.address, gate.address, str(logs / "inner"))}
    with start_processes("outer", stack_workers.nest, args, log_dir=str(logs / "outer")) as group:
        ready.wait()
        gate.open()
        result = group.wait()
    assert not result.is_failed(), result
    told = result.return_values[0]
    assert [frame.function for frame in dump.program_frames(dump.parse(told["text"])[-1].frames)] == ["hang"]
    assert told["mine"].count("\n") == 2  # it has offered twice, and nobody has asked


# --- processes that do not


def test_a_stopped_process_is_read_and_stays_stopped(
    tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        worker.process.send_signal(signal.SIGSTOP)
        os.waitpid(worker.process.pid, os.WUNTRACED)
        with monkeypatch.context() as patch:
            patch.setattr(py_spy, "find", lambda: "")
            worker.refuses("it is stopped, by SIGSTOP or a debugger; py-spy is not installed\nName: ")
        for ask in (worker.ask, worker.look):
            text = ask()
            assert text.startswith("# it is stopped, by SIGSTOP or a debugger\nThread 0x")
            assert shown(text) == [["work", "<module>"]]
            assert sum_up({0: text}) == "rank 0 is in work (<string>:8), stopped, by SIGSTOP or a debugger"
            wait_for_state(worker.process.pid, "T")  # py-spy has let go of it, and it stops again
        assert worker.sent == []


@without_py_spy
def test_one_that_stops_is_waited_for_no_longer_than_agreed(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        pid = worker.process.pid

        def stop_first(number: int) -> None:
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
            os.kill(pid, number)

        before = time.monotonic()
        with collect.Collection([worker.target.replace(send=stop_first)], 0.05) as collection:
            collection.begin()
            assert not collection.wait()
            text = collection.finish()[0]
        assert 0.05 <= time.monotonic() - before < TIMEOUT / 2
        assert text.startswith("# no Python stack: it is stopped")
        worker.process.send_signal(signal.SIGCONT)
        (thread,) = dump.parse(worker.ask())  # both dumps come now; one is shown
        assert thread.frames[-1].function == "<module>"


@pytest.mark.slow
@pytest.mark.parametrize("spied", [True, False])
def test_one_that_blocks_the_signal_in_all_threads(
    tmp_path: Path, ready: Ready, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, spied: bool
) -> None:
    if not spied:
        request.getfixturevalue("no_py_spy")
    # Of much time, of which a busy machine may take the most.
    monkeypatch.setattr(collect, "_OTHERWISE", 0.04 if spied else 0.02)
    with Worker(tmp_path, ready, f"signal.pthread_sigmask(signal.SIG_BLOCK, [{ONE}, {ALL}]); {SLEEP}") as worker:
        text = worker.ask(PATIENCE if spied else 1.0)
        said = "# no Python stack: it has not answered in time; py-spy is not installed\nName: python"
        assert (shown(text) == [["work", "<module>"]]) if spied else text.startswith(said)
        assert worker.sent == [ALL]
        assert worker.process.poll() is None


def test_one_that_exits_meanwhile_or_has_before(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        target = worker.target.replace(send=lambda _number: worker.process.kill())
        assert stack_workers.ask(target).startswith("# no Python stack: it has exited\n")
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert stack_workers.ask(target).startswith("# no Python stack: it has exited\n")
        worker.process.wait()
        assert stack_workers.ask(target) == "# no Python stack: it has exited\n"


HEADER = f"# stacks on signals {ONE:d} and {ALL:d}, descriptor 0, process "


@pytest.mark.parametrize(
    "header",
    [None, f"{HEADER}1\n", "\0nonsense\n# stacks on signals 9" * 9, HEADER.replace(f"{ONE:d}", "9" * 5000) + "1\n"],
    ids=["none", "one", "damaged", "huge"],
)
def test_a_binary_is_never_signalled(tmp_path: Path, header: str | None) -> None:
    """The header may be of a Python worker that has called exec since."""
    error_file = tmp_path / "error.json"
    if header:
        (tmp_path / "error.json.stacks").write_text(header)
    sent: list[int] = []
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b".")
        process.stdout.read(1)  # it has been executed
        text = stack_workers.ask(request.Target(0, process.pid, str(error_file), doomed=True, send=sent.append))
        assert (sent, process.poll()) == ([], None)
        process.kill()
    why = "it offers none itself" if header == f"{HEADER}1\n" else "it offers none"
    why = f"{why}; py-spy: Failed to find python version" if "itself" in why else "it is no Python program"
    assert text.startswith(f"# no Python stack: {why}")
    assert "\nName: cat\n" in text
    assert f"\nthread {process.pid} (cat): " in text


REFUSED = {
    "it ignores the signal": (
        f"for n in ({ONE}, {ALL}): signal.signal(n, signal.SIG_IGN)\n{SLEEP}",
        "it does not handle signal ",
    ),
    "it would die of the signal": (
        f"for n in ({ONE}, {ALL}): signal.signal(n, signal.SIG_DFL)\n{SLEEP}",
        "it does not handle signal ",
    ),
    "it has closed every descriptor": (  # the dump would go to whatever has the number now
        "os.closerange(3, 100); os.open('/dev/null', os.O_WRONLY); READY; time.sleep(1000)",
        "it offers none itself",
    ),
    "it has executed something else": (
        "sys.stdin.close(); os.execv(sys.executable, [sys.executable, '-S', '-c', AGAIN])",
        "it offers none itself",
    ),
    "its code shows none": (
        f"from phalanx.timer import move_stack_signal; move_stack_signal(0); {SLEEP}",
        "it offers none",
    ),
}


@without_py_spy
@pytest.mark.parametrize("name", REFUSED)
def test_a_process_that_offers_no_stack_is_not_signalled(tmp_path: Path, ready: Ready, name: str) -> None:
    code, reason = REFUSED[name]
    again = f"AGAIN = {f'import time; {ready.python()}; time.sleep(1000)'!r}; assert offer()"
    with Worker(tmp_path, ready, code.replace("READY", ready.python()), offer=again) as worker:
        worker.refuses(reason)
        if "move_stack_signal" in code:
            assert not stack_workers.catches(worker.process.pid)
    if "move_stack_signal" in code:
        remove_empty(worker.error_file)
        assert not os.path.exists(stacks_path(worker.error_file))


# --- the offer


@without_py_spy
@pytest.mark.parametrize("theirs", ["lambda *_: None", "signal.SIG_IGN"])
def test_a_signal_that_somebody_uses_is_not_taken(tmp_path: Path, ready: Ready, theirs: str) -> None:
    offer = f"signal.signal({ONE}, {theirs}); assert not offer()"
    with Worker(tmp_path, ready, SLEEP, offer=offer) as worker:
        worker.refuses("it offers none")
    assert not os.path.exists(stacks_path(worker.error_file))
    with Worker(tmp_path, ready, SLEEP, offer=f"{offer}; assert offer(number={ONE})") as worker:
        assert shown(worker.look()) == [["work", "<module>"]]  # asked for by number
        assert worker.sent == [ONE]


@without_py_spy
def test_a_used_signal_for_all_threads_is_not_taken(tmp_path: Path, ready: Ready) -> None:
    offer = f"signal.signal({ALL}, lambda *_: os._exit(9)); assert offer()"
    with Worker(tmp_path, ready, SLEEP, offer=offer) as worker:
        assert shown(worker.ask()) == [["work", "<module>"]]
        assert worker.sent == [ONE]


@pytest.mark.parametrize(
    "setting, number",
    [("12", 12), ("0", 0), ("", ONE), ("nonsense", ONE), ("-3", ONE), ("9", ONE), ("11", ONE), ("33", ONE),
     ("4711", ONE), ("٣", ONE), (str(int(ALL)), ALL)],
)  # fmt: skip
@without_py_spy
def test_the_environment_moves_the_signal(tmp_path: Path, ready: Ready, setting: str, number: int) -> None:
    offer = f"os.environ['PHALANX_STACK_SIGNAL'] = {setting!r}; assert offer() is {number != 0}"
    with Worker(tmp_path, ready, SLEEP, offer=offer) as worker:
        if number:
            assert shown(worker.look()) == shown(worker.ask()) == [["work", "<module>"]]
            assert worker.sent == [number, ONE if number == ALL else ALL]
        else:
            worker.refuses("it offers none")


@without_py_spy
def test_user_code_moves_the_signal(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    code = f"""
        from phalanx.timer import move_stack_signal
        move_stack_signal(signal.SIGUSR2)
        assert signal.getsignal({ONE}) == signal.SIG_DFL
        signal.signal({ONE}, lambda *_: None)
        ready(); {gate.python()}
        move_stack_signal({ALL})
        ready(); time.sleep(1000)
        """
    with Worker(tmp_path, ready, code) as worker:
        assert shown(worker.look()) == shown(worker.ask()) == [["work", "<module>"]]
        gate.open()
        ready.wait()
        assert shown(worker.look()) == [["work", "<module>"]]
        assert worker.sent == [signal.SIGUSR2, ALL, ALL]
        path = stacks_path(worker.error_file)
        first, second, fd, pid = last_offer(_read(path))
        assert (first, second, pid) == (ALL, 0, worker.process.pid)  # the other one is the user's
        assert os.readlink(f"/proc/{pid}/fd/{fd}") == path
        assert _read(path).count(b"# stacks on signal") == 3


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def test_a_number_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE_ENV, "/nowhere/error.json")
    for number in (-1, 9, 19, 11, 32, 65, 1 << 70):
        with pytest.raises(ValueError, match="cannot be caught"):
            move_stack_signal(number)
    monkeypatch.setenv(ERROR_FILE_ENV, "/proc/nowhere/error.json")
    with pytest.raises(RuntimeError, match="cannot be written"):
        move_stack_signal(ONE)
    monkeypatch.delenv(ERROR_FILE_ENV)
    with pytest.raises(RuntimeError, match="is no worker"):
        move_stack_signal(ONE)


def test_the_file_goes_unless_somebody_has_asked(tmp_path: Path, ready: Ready) -> None:
    path = stacks_path(str(tmp_path / "0" / "error.json"))
    with Worker(tmp_path, ready, SLEEP, offer="offer(); offer()") as worker:
        pass
    assert _read(path).count(b"\n") == 2
    remove_empty(worker.error_file)
    assert not os.path.exists(path)
    with Worker(tmp_path, ready, SLEEP) as worker:
        worker.ask()
    remove_empty(worker.error_file)
    assert os.path.exists(path)


@pytest.mark.parametrize("suffix", ["", ".fatal", ".exit", ".stacks"])
def test_a_pipe_in_the_place_of_a_file_holds_up_nobody(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / "error.json")
    os.mkfifo(path + suffix)
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(ROOT)!r})\n"
        "from phalanx._evidence import recording, stack_signals\n"
        "stack_signals.catch_fatal_signals(), stack_signals.offer_stacks(), recording.note_exit(SystemExit(3))\n"
        "recording.record(ValueError())"
    )
    argv = [sys.executable, "-S", "-c", code]
    subprocess.run(argv, env={ERROR_FILE_ENV: path}, check=True, timeout=TIMEOUT)


@without_py_spy
@pytest.mark.parametrize("make", ["text", "nothing", "link", "folder"])
def test_what_is_not_ours_is_not_written_to(tmp_path: Path, ready: Ready, make: str) -> None:
    theirs, plain = tmp_path / "theirs", tmp_path / "0" / "error.json.stacks"
    plain.parent.mkdir()
    if make == "folder":
        plain.mkdir()
    else:
        theirs.write_text("" if make == "nothing" else "# stacks of layers\n")
        plain.symlink_to(theirs) if make == "link" else theirs.rename(plain)
    with Worker(tmp_path, ready, SLEEP) as worker:
        assert shown(worker.ask()) == [["work", "<module>"]]
        assert os.path.exists(stacks_path(worker.error_file, worker.process.pid))
    if make != "folder":
        assert plain.read_text() == ("" if make == "nothing" else "# stacks of layers\n")


def test_files_that_are_called_nearly_as_ours_stay(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    ours, theirs = {".stacks", ".stacks.4242"}, {".stacks.md", ".stacks-notes", ".stackspace"}
    for remove in (remove_empty, lambda path: remove_old([path])):
        for suffix in ours | theirs:
            (tmp_path / f"error.json{suffix}").write_bytes(b"# stacks on signals 52 and 53\n")
        remove(path)
        assert set(os.listdir(tmp_path)) == {f"error.json{suffix}" for suffix in theirs}


def test_a_stack_below_many_offers_stays(tmp_path: Path) -> None:
    path = tmp_path / "error.json.stacks"
    path.write_text(f"{HEADER}1\n" * 1000 + "Thread 0x01 (most recent call first):\n")
    remove_empty(str(tmp_path / "error.json"))
    assert path.exists()


def test_an_offer_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    code = (
        f"import os, resource, sys; sys.path.insert(0, {os.path.dirname(ROOT)!r})\n"
        "from phalanx._evidence.stack_signals import offer_stacks\n"
        "before, modules = os.listdir('/proc/self/fd'), set(sys.modules)\n"
        "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))\n"  # as when the disk is full
        "assert not offer_stacks() and os.listdir('/proc/self/fd') == before\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, limits)\n"
        "assert offer_stacks() and set(sys.modules) - modules == {'faulthandler'}"
    )
    env = {ERROR_FILE_ENV: str(tmp_path / "error.json")}
    subprocess.run([sys.executable, "-I", "-S", "-c", code], env=env, check=True, timeout=TIMEOUT)


@pytest.mark.slow
@without_py_spy
@pytest.mark.parametrize("doomed", [False, True])
def test_a_fork_without_an_offer_writes_into_no_others_file(tmp_path: Path, ready: Ready, doomed: bool) -> None:
    code = """
        def below(depth):
            if depth: below(depth - 1)
            ready(); time.sleep(1000)
        def above(depth):
            if depth: above(depth - 1)
            os.wait()
        above(60) if os.fork() else below(60)
        """
    with Worker(tmp_path, ready, code) as worker:
        (fork,) = descendants(worker.process.pid)
        try:
            for _ in range(10):
                targets = [worker.target.replace(doomed=doomed), request.Target(1, fork, worker.error_file)]
                with collect.Collection(targets, PATIENCE) as collection:
                    collection.begin()
                    assert collection.wait()
                    texts = collection.finish()
                assert shown(texts[0]) == [["above"] * 61 + ["work", "<module>"]]
                assert texts[1].startswith("# no Python stack: it would write into the file of the process that has ")
        finally:
            os.kill(fork, signal.SIGKILL)


@without_py_spy
def test_a_fork_of_a_ranks_second_process_shows_its_own(tmp_path: Path, ready: Ready) -> None:
    code = """
        if os.fork() == 0:
            def below(): ready(); time.sleep(1000)
            assert offer()
            below()
        os.wait()
        """
    error_file = str(tmp_path / "0" / "error.json")
    with Worker(tmp_path, ready, SLEEP) as first, Worker(tmp_path, ready, code) as second:
        (fork,) = descendants(second.process.pid)
        try:
            target = request.Target(0, fork, error_file, doomed=True)
            assert shown(stack_workers.ask(target)) == [["below", "work", "<module>"]]
            assert os.path.exists(stacks_path(error_file, fork))
            assert shown(second.ask()) == [["work", "<module>"]]
            assert shown(first.ask()) == [["work", "<module>"]]
        finally:
            os.kill(fork, signal.SIGKILL)


# --- native frames


def test_native_frames_are_py_spys(tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    stack_workers.fake_py_spy(tmp_path, monkeypatch, 'echo "$@"')
    with Worker(tmp_path, ready, SLEEP) as worker:
        pid = worker.process.pid
        text = stack_workers.ask(worker.target.replace(native=True))
        assert text.endswith(f" in <module>\n\nnative frames (py-spy):\ndump --full-filenames --native --pid {pid}\n")
        assert "native" not in worker.ask()
        assert len(dump.parse(text)) == 1
        stack_workers.fake_py_spy(tmp_path, monkeypatch, "exit 1")
        assert stack_workers.ask(worker.target.replace(native=True)).endswith(" in <module>\n")
        os.mkfifo(tmp_path / "never")
        stack_workers.fake_py_spy(tmp_path, monkeypatch, f"exec cat {tmp_path}/never")  # it takes too long
        with collect.Collection([worker.target.replace(native=True)], PATIENCE) as collection:
            collection.begin()
            while not (collection._py_spies and collection._py_spies.running):  # it has shown its own
                assert collection._loop is not None
                collection._loop.once()
            collection._until = clock.now()
            assert not collection.wait()
            assert collection.finish()[0].endswith(" in <module>\n")


@pytest.mark.slow
def test_native_frames_of_a_real_process(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        text = stack_workers.ask(worker.target.replace(native=True, doomed=False))
    assert "\nnative frames (py-spy):\n" in text
    assert re.search(r"sleep|select", text.partition("native frames")[2])


# --- from outside


def test_who_is_to_go_on_is_read_from_outside(tmp_path: Path, ready: Ready) -> None:
    """Nothing runs in it: not even a handler of a signal."""
    with Worker(tmp_path, ready, IDLE) as worker:
        text = worker.look()
        assert shown(text) == [["idle"], ["idle"], ["idle"], ["work", "<module>"]]
        assert " [MainThread] (most recent call first):\n" in text
        assert worker.sent == []
        path = stacks_path(worker.error_file)
        assert _read(path).count(b"\n") == 1  # what it has offered


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, why",
    [
        ("exit 1", "py-spy: "),
        ("echo '[{}]'", "py-spy has found no stack"),
        ("echo Permission Denied: try again >&2; exit 1", "py-spy may not read it (ptrace)"),
        ("exec sleep 1000", "py-spy has not ended in time"),
    ],
    ids=["fails", "nonsense", "denied", "hangs"],
)
def test_who_cannot_be_read_is_asked_for_one_thread(
    tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    stack_workers.fake_py_spy(tmp_path, monkeypatch, script)
    if why.endswith("in time"):  # of much time, of which the others and the answer may take more on a busy machine
        monkeypatch.setattr(collect, "_NO_MORE", 0.11)
        monkeypatch.setattr(collect, "_GIVEN_UP", 0.12)
    code = "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); ready(); time.sleep(1000)"
    with Worker(tmp_path, ready, code) as worker:
        before = procfs.children(os.getpid())
        text = worker.look()
        assert worker.sent == [ONE]
        assert worker.process.poll() is None
        assert procfs.children(os.getpid()) == before
    assert text.startswith(f"# one thread alone, the main thread as a rule ({why}")
    assert shown(text) == [["work", "<module>"]]
    assert sum_up({0: text}) == "rank 0 is in work (<string>:8)"
    (thread,) = dump.parse(text)
    assert thread.current


def test_py_spy_that_fails_once_is_tried_again(tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a process that goes on may change while it is read."""
    real = py_spy.find()
    once = f'[ -e {tmp_path}/tried ] && exec {shlex.quote(real)} "$@"; echo >{tmp_path}/tried; exit 1'
    stack_workers.fake_py_spy(tmp_path, monkeypatch, once)
    with Worker(tmp_path, ready, SLEEP) as worker:
        assert shown(worker.look()) == [["work", "<module>"]]
        assert worker.sent == []


@pytest.mark.slow
@without_py_spy
@pytest.mark.parametrize("line", ["pass", "time.sleep(0.001)"])
def test_who_runs_is_not_asked_before_it_sleeps(line: str, tmp_path: Path, ready: Ready) -> None:
    """In the midst of a line of Python the handler may find frames that make no sense, and end the process.

    Nor is one that naps: it may wake up before the signal arrives.
    """
    code = f"""
        signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))
        ready()
        while True: {line}
        """
    with Worker(tmp_path, ready, code, runs=True) as worker:
        text = worker.look(0.1)
        said = "# no Python stack: it is running, and is only asked while it sleeps; py-spy is not installed\n"
        assert text.startswith(said)
        assert worker.sent == []
        with collect.Collection([worker.target.replace(doomed=False)], PATIENCE) as collection:
            collection.begin()
            worker.process.send_signal(signal.SIGUSR1)
            assert collection.wait()
            assert shown(collection.finish()[0]) == [["<lambda>", "work", "<module>"]]
        assert worker.sent == [ONE]


def test_who_reads_waits_for_no_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that it has paused would wait with it, and so would a kill.

    Native frames take long: of a process that goes on, it is one among others for them.
    """
    cpus = os.sched_getaffinity(0)
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            pytest.skip("that takes CAP_SYS_NICE")
        finally:
            process.kill()
    if len(cpus) == 1:
        pytest.skip("the only processor is left to others")
    stack_workers.fake_py_spy(tmp_path, monkeypatch, "exec sleep 1000")
    for native, doomed, policy in (
        (False, False, os.SCHED_RR),
        (True, False, os.SCHED_OTHER),
        (True, True, os.SCHED_RR),
    ):
        before = set(procfs.children(os.getpid()))
        reader = py_spy.PySpy(os.getpid(), native=native, doomed=doomed)
        (pid,) = before.symmetric_difference(procfs.children(os.getpid()))
        assert os.sched_getscheduler(pid) == policy
        assert len(os.sched_getaffinity(pid)) == (len(cpus) // 2 if policy == os.SCHED_RR else len(cpus))
        reader.close()


@pytest.mark.slow
def test_a_thread_that_waits_for_a_disk_holds_up_no_look(
    tmp_path: Path, ready: Ready, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be paused. The process is read without, and nothing runs in it for that."""
    monkeypatch.setattr(collect, "_UNPAUSED", 0.2)  # of much time, of which py-spy may need more on a busy machine
    code = f"""
        def write():
            with open({str(disk.folder / "file")!r}, "w") as file: file.write("x")
        threading.Thread(target=write).start()
        ready(); time.sleep(1000)
        """
    disk.freeze()
    with Worker(tmp_path, ready, code, runs=True) as worker:
        try:
            until(lambda: sleeping_on_disks(worker.process.pid) == 1)
            text = worker.look()
        finally:
            disk.thaw()  # before that not even SIGKILL ends it
    assert sorted(shown(text)) == [["work", "<module>"], ["write"]]
    assert "one thread alone" not in text


def test_py_spy_is_found_without_a_look_at_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = py_spy.find.__wrapped__()
    assert os.access(found, os.X_OK)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert os.path.samefile(py_spy.find.__wrapped__(), found)  # as the package says


@pytest.mark.slow
@pytest.mark.parametrize("spied", [True, False])
def test_more_threads_than_a_dump_has(
    tmp_path: Path, ready: Ready, request: pytest.FixtureRequest, spied: bool
) -> None:
    """faulthandler shows 100, the newest first: not the one that matters."""
    if not spied:
        request.getfixturevalue("no_py_spy")
    code = """
        def idle(): threading.Event().wait()
        for _ in range(130): threading.Thread(target=idle, daemon=True).start()
        ready(); time.sleep(1000)
        """
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
        assert worker.sent == ([] if spied else [ALL, ONE])
    assert len(dump.parse(text)) == (131 if spied else 101)
    assert sum_up({0: text}) == "rank 0 is in work (<string>:11)"


# --- what a dump says


LINES = st.sampled_from(
    ["Thread 0x00007f01 (most recent call first):", "Current thread 0x00000001 (most recent call first):", "", "  ...",
     '  File "/a/b.py", line 12 in f', '  File "x, line 1 in y", line 3 in <module>', "  File ???, line ??? in ???",
     "  <no Python frame>", "  Garbage-collecting", "# stacks on signal 52, descriptor 5",
     "Thread 0x", '  File "', "é\0"]
)  # fmt: skip


@pytest.mark.slow
@given(st.one_of(st.text(), st.lists(st.one_of(LINES, st.text(max_size=5)), max_size=30).map("\n".join)))
def test_parsing_never_fails(text: str) -> None:
    threads = dump.parse(text)
    assert all(frame.line >= 0 for thread in threads for frame in thread.frames)
    dump.top(threads)
    assert sum_up({0: text, 1: "", 7: text}, 7)


PATHS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)
FRAMES = st.builds(dump.Frame, PATHS, st.integers(0, 99999), st.from_regex(r"[a-z_<>]+", fullmatch=True))
THREADS = st.builds(dump.Thread, st.integers(0, 2**64 - 1), st.booleans(), st.lists(FRAMES, max_size=5).map(tuple))


@pytest.mark.long
@given(st.lists(THREADS, max_size=5))
def test_parsing_finds_what_was_written(threads: list[dump.Thread]) -> None:
    text = "\n".join(
        f"{'Current thread' if thread.current else 'Thread'} 0x{thread.ident:016x} (most recent call first):\n"
        + "".join(f'  File "{frame.path}", line {frame.line} in {frame.function}\n' for frame in thread.frames)
        for thread in threads
    )
    assert dump.parse(text) == threads


def at(*places: tuple[str, int, str]) -> str:
    frames = "".join(f'  File "{path}", line {line} in {function}\n' for path, line, function in places)
    return f"Current thread 0x0001 (most recent call first):\n{frames}"


REDUCE, READ = at(("/u/train.py", 41, "all_reduce")), at(("/u/data.py", 17, "read_batch"))


def test_the_top_is_the_users() -> None:
    library = "/usr/lib/python3.12/threading.py", 355, "wait"
    package = "/venv/lib/python3.12/site-packages/torch/x.py", 1, "backward"
    ours = os.path.join(ROOT, "_engine", "worker", "function.py"), 1, "_call"
    user = "/u/train.py", 41, "step"
    for above in ((), (library,), (library, package), (ours,)):
        frame = dump.top(dump.parse(at(*above, user, ours, ("<string>", 1, "<module>"))))
        assert str(frame) == "step (train.py:41)"
    assert str(dump.top(dump.parse(at(library, ("<frozen runpy>", 88, "_run_code"))))) == "wait (threading.py:355)"
    assert dump.top([]) is dump.top(dump.parse(at())) is None


@pytest.mark.parametrize(
    "called",
    ["supervisor.py", "pickling/pack.py", "keeper_client.py", "worker/mp_child.py", "keeper/guard.py"],
)
def test_a_program_that_calls_the_engine_keeps_its_frames(called: str) -> None:
    """Also where it imports what starts a worker: its group may be of start method fork, and a disk may not answer."""
    above = ("<frozen importlib._bootstrap_external>", 1073, "wait_promptly")
    engine = os.path.join(ROOT, "_engine", called), 7, "<module>" if "guard" in called else "call"
    face = os.path.join(ROOT, "multiprocessing", "_start.py"), 180, "start_processes"
    starter = os.path.join(ROOT, "_engine", "worker", "function.py"), 1, "_call"
    if "guard" not in called:
        above = os.path.join(ROOT, "_base", "loop.py"), 47, "wait_promptly"
    threads = dump.parse(at(above, engine, face, ("/u/train.py", 41, "step"), starter, ("<string>", 1, "<module>")))
    shown = [frame.function for frame in dump.program_frames(threads[0].frames)]
    assert shown == ["wait_promptly", engine[2], "start_processes", "step"]
    assert str(dump.top(threads)) == "step (train.py:41)"
    for name in ("keeper/fork_server.py", "keeper/start_process.py", "worker/forked.py", "worker/script.py"):
        frames = at(("/u/train.py", 41, "step"), (os.path.join(ROOT, "_engine", name), 1, "_call"))
        assert [frame.function for frame in dump.program_frames(dump.parse(frames)[0].frames)] == ["step"]


def test_summing_up() -> None:
    texts = dict.fromkeys((0, 1, 2, 4, 5, 6, 7), REDUCE) | {3: READ}
    assert sum_up(texts, 3) == ("7 of 8 ranks wait in all_reduce (train.py:41); rank 3 is in read_batch (data.py:17)")
    assert sum_up(texts).startswith("7 of 8 ranks are in all_reduce (train.py:41); rank 3 is in")
    assert sum_up(dict.fromkeys(range(8), REDUCE)) == "all 8 ranks are in all_reduce (train.py:41)"
    assert sum_up(texts | dict.fromkeys((1, 2), READ)) == (
        "5 of 8 ranks are in all_reduce (train.py:41); ranks 1-3 are in read_batch (data.py:17)"
    )
    texts[5] = "# no Python stack: it has exited\n"
    texts[6] = texts[7] = "# no Python stack: it offers none\nName: sleep\n"
    assert sum_up(texts, 3) == (
        "4 of 8 ranks wait in all_reduce (train.py:41); ranks 6-7 show no Python stack (it offers none); "
        "rank 5 has ended; rank 3 is in read_batch (data.py:17)"
    )
    assert sum_up({}) == ""


def test_summing_up_many_places_names_the_hung_rank() -> None:
    texts = {rank: at(("/u/train.py", rank + 1, "<module>")) for rank in range(20)}
    assert sum_up(texts, 19) == (
        "rank 0 is in train.py:1; rank 1 is in train.py:2; rank 2 is in train.py:3; rank 3 is in train.py:4; "
        "rank 19 is in train.py:20; ranks 4-18 are elsewhere"
    )


def test_files_of_stacks_are_numbered_and_kept(tmp_path: Path) -> None:
    assert snapshot.write_stacks(str(tmp_path), "one\n") == str(tmp_path / "stacks-1.txt")
    assert snapshot.write_stacks(str(tmp_path), "two \udc80\n") == str(tmp_path / "stacks-2.txt")
    (tmp_path / "stacks-3.txt").symlink_to("/nowhere")
    assert snapshot.write_stacks(str(tmp_path), "") == str(tmp_path / "stacks-4.txt")
    assert [(tmp_path / f"stacks-{n}.txt").read_text() for n in (1, 2)] == ["one\n", "two \\udc80\n"]


def test_facts_of_a_process() -> None:
    text = request.facts(os.getpid())
    assert f"thread {os.getpid()} " in text
    assert "State: R (running)" in text
    assert request.facts(2**22 + 1) == ""
