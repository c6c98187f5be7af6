"""Stacks of live processes: who shows them, who is asked and who never is, and what the answers say."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._core import evidence, stacks
from phalanx._core.loop import Loop
from phalanx.multiprocessing import start_processes
from phalanx.timer._stack_signal import move_stack_signal
from tests import stack_workers
from tests.helpers import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers import Gate, Ready

NUMBER = signal.SIGRTMIN + 18
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(stacks.__file__)))
PATIENCE = 10.0  # seconds that a dump may take on a loaded machine


class Worker:
    """A process of its own, which is asked like a worker. ``code`` runs in ``work()``; it says ``ready()`` itself."""

    def __init__(self, folder: Path, ready: Ready, code: str, *, rank: int = 0, offer: str = "assert offer()") -> None:
        self.error_file = str(folder / str(rank) / "error.json")
        self.sent: list[int] = []
        program = (
            "import os, signal, sys, threading, time\n"
            f"sys.path.insert(0, {os.path.dirname(ROOT)!r})\n"
            "from phalanx._core.evidence import offer_stacks as offer\n"
            "import functools, socket\n"
            "say = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto\n"
            f"ready = functools.partial(say, b'here', {ready.address!r})\n"  # which leaves no frame of Python
            f"def work():\n{indent(dedent(code), '    ')}\n"
            f"{offer}\nwork()\n"
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
        env[evidence.ERROR_FILE_ENV] = self.error_file
        self.process = subprocess.Popen([sys.executable, "-c", program], env=env)
        self.rank = rank
        try:
            ready.wait()
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
    def target(self) -> stacks.Target:
        return stacks.Target(self.rank, self.process.pid, self.error_file, self.send)

    def ask(self, patience: float = PATIENCE) -> str:
        with stacks.Collection([self.target]) as collection:
            collection.begin()
            collection.wait(patience)
            return collection.finish()[self.rank]

    def refuses(self, reason: str) -> None:
        """Not asked at all, and alive afterwards; the reason is given."""
        text = self.ask()
        assert text.startswith(f"# no Python stack: {reason}"), text
        assert self.sent == []
        assert self.process.poll() is None


def shown(text: str) -> list[list[str]]:
    """The functions of each thread that are the test's own, the innermost first."""
    return [[frame.function for frame in thread.frames if frame.path == "<string>"] for thread in stacks.parse(text)]


SLEEP = "ready(); time.sleep(1000)"


# --- processes that answer


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
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
        assert shown(text)[-1][-2:] == ["work", "<module>"]
        assert stacks.sum_up({0: text}).startswith("rank 0 is in ")
        assert text.endswith(" in <module>\n")
        assert "#" not in text
        assert worker.process.poll() is None
        assert len(stacks.parse(worker.ask())) == 1  # once more, and not the first dump again
    assert worker.sent == [NUMBER, NUMBER]


def test_all_threads_are_shown_and_the_main_thread_comes_last(tmp_path: Path, ready: Ready) -> None:
    code = """
        def idle(): threading.Event().wait()
        for _ in range(3): threading.Thread(target=idle, daemon=True).start()
        ready(); time.sleep(1000)
        """
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
    assert shown(text) == [["idle"], ["idle"], ["idle"], ["work", "<module>"]]
    *others, main = stacks.parse(text)
    assert main.current
    assert [thread.current for thread in others] == [False] * 3
    assert len({thread.ident for thread in (*others, main)}) == 4
    frame = stacks.top(stacks.parse(text), others[1].ident)
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
    assert len(stacks.parse(text)[-1].frames) == 100


def test_a_main_thread_that_waits_for_threads_at_its_end(tmp_path: Path, ready: Ready) -> None:
    """The frame at its bottom is not the module's any more."""
    code = "threading.Thread(target=lambda: (threading.main_thread().join(0), ready(), time.sleep(1000))).start()"
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
    assert "dump is not complete" not in text
    assert len(stacks.parse(text)) == 2


def test_another_thread_takes_the_signal_when_the_main_thread_blocks_it(tmp_path: Path, ready: Ready) -> None:
    code = f"""
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [{NUMBER}])
        ready(); time.sleep(1000)
        """
    with Worker(tmp_path, ready, code) as worker:
        text = worker.ask()
    assert [thread.current for thread in stacks.parse(text)] == [True, False]
    assert shown(text)[-1] == ["work", "<module>"]


def test_many_at_once_by_one_loop(tmp_path: Path, ready: Ready) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(tmp_path, ready, SLEEP, rank=rank)) for rank in range(4)]
        collection = stack.enter_context(stacks.Collection([worker.target for worker in workers]))
        loop = Loop()
        stack.callback(loop.close)
        collection.begin()
        done = collection.complete()
        loop.watch(collection.fileno(), lambda _events: loop.stop() if collection.complete() else None)
        if not done:
            loop.run()
        loop.forget(collection.fileno())
        texts = collection.finish()
        assert collection.finish() is texts
        with pytest.raises(ValueError, match="not open"):
            collection.fileno()
    assert stacks.sum_up(texts, 2) == "all 4 ranks are in work (<string>:8)"


def test_two_who_ask_at_once(tmp_path: Path, ready: Ready) -> None:
    with (
        Worker(tmp_path, ready, SLEEP) as worker,
        stacks.Collection([worker.target]) as one,
        stacks.Collection([worker.target]) as two,
    ):
        one.begin()
        two.begin()
        assert one.wait(PATIENCE)
        assert two.wait(PATIENCE)
        for collection in (one, two):
            assert shown(collection.finish()[0]) == [["work", "<module>"]]


@pytest.mark.usefixtures("own_temporary_folder")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_functions_show_theirs(ready: Ready, gate: Gate, method: str) -> None:
    args = {0: (ready.address, gate.address)}
    with start_processes("stacks", stack_workers.hang, args, start_method=method) as group:
        ready.wait()
        (pid,) = group.pids().values()
        target = stacks.Target(0, pid, group.logs.error_files[0], lambda number: os.kill(pid, number))
        for _ in range(2):
            threads = stacks.parse(stack_workers.ask(target))
            assert len(threads) == 2
            assert {frame.function for frame in threads[0].frames} >= {"idle"}
            own = [frame.function for frame in stacks.own(threads[-1].frames)]
            assert own == ["hang"]
            frame = stacks.top(threads)
            assert frame is not None
            assert str(frame).startswith("hang (stack_workers.py:")
        gate.open()
        assert not group.wait().is_failed()


def test_a_fork_shows_its_own_and_its_keepers_none(ready: Ready, gate: Gate, logs: Path) -> None:
    (logs / "outer").mkdir()
    args = {0: (ready.address, gate.address, str(logs / "inner"))}
    with start_processes("outer", stack_workers.nest, args, log_dir=str(logs / "outer")) as group:
        ready.wait()
        gate.open()
        result = group.wait()
    assert not result.is_failed(), result
    told = result.return_values[0]
    assert [frame.function for frame in stacks.own(stacks.parse(told["text"])[-1].frames)] == ["hang"]
    assert told["mine"].count("\n") == 2  # it has offered twice, and nobody has asked


# --- processes that do not


def test_a_stopped_process_is_not_asked(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        worker.process.send_signal(signal.SIGSTOP)
        os.waitpid(worker.process.pid, os.WUNTRACED)
        worker.refuses("it is stopped, by SIGSTOP or a debugger\nName: ")


def test_one_that_stops_meanwhile_is_waited_for_no_longer_than_agreed(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        pid = worker.process.pid

        def stop_first(number: int) -> None:
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
            os.kill(pid, number)

        before = time.monotonic()
        with stacks.Collection([worker.target.replace(send=stop_first)]) as collection:
            collection.begin()
            assert not collection.wait(0.05)
            text = collection.finish()[0]
        assert 0.05 <= time.monotonic() - before < TIMEOUT / 2
        assert text.startswith("# no Python stack: it is stopped")
        worker.process.send_signal(signal.SIGCONT)
        (thread,) = stacks.parse(worker.ask())  # both dumps come now; one is shown
        assert thread.frames[-1].function == "<module>"


def test_one_that_blocks_the_signal_in_all_threads(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, f"signal.pthread_sigmask(signal.SIG_BLOCK, [{NUMBER}]); {SLEEP}") as worker:
        text = worker.ask(0.05)
        assert text.startswith("# no Python stack: it has not answered in time\nName: python")
        assert worker.process.poll() is None


def test_one_that_exits_meanwhile(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        target = worker.target.replace(send=lambda _number: worker.process.kill())
        with stacks.Collection([target]) as collection:
            collection.begin()
            assert collection.wait(PATIENCE)
            assert collection.finish()[0].startswith("# no Python stack: it has exited\n")


def test_one_that_has_exited(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    target = stacks.Target(0, process.pid, str(tmp_path / "error.json"), process.send_signal)
    assert stack_workers.ask(target).startswith("# no Python stack: it has exited\n")
    process.wait()
    assert stack_workers.ask(target) == "# no Python stack: it has exited\n"


@pytest.mark.parametrize("header", [None, f"# stacks on signal {NUMBER:d}\n", "\0nonsense\n# stacks on signal 9" * 9])
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
        text = stack_workers.ask(stacks.Target(0, process.pid, str(error_file), sent.append))
        assert (sent, process.poll()) == ([], None)
        process.kill()
    why = "it does not handle signal" if header else "it offers none"
    assert text.startswith(f"# no Python stack: {why}")
    assert "\nName: cat\n" in text
    assert f"\nthread {process.pid} (cat): " in text


def test_a_worker_that_has_executed_something_else(tmp_path: Path, ready: Ready) -> None:
    code = """
        ready(); sys.stdin.close()
        os.execv(sys.executable, [sys.executable, "-S", "-c", AGAIN])
        """
    again = f"AGAIN = {f'import time; {ready.python()}; time.sleep(1000)'!r}; assert offer()"
    with Worker(tmp_path, ready, code, offer=again) as worker:
        ready.wait()
        worker.refuses("it offers none itself")


@pytest.mark.parametrize("user", ["signal.SIG_IGN", "signal.SIG_DFL"])
def test_who_ignores_the_signal_is_not_asked(tmp_path: Path, ready: Ready, user: str) -> None:
    with Worker(tmp_path, ready, f"signal.signal({NUMBER}, {user}); {SLEEP}") as worker:
        worker.refuses(f"it does not handle signal {NUMBER:d}")


def test_who_has_closed_every_descriptor_is_not_asked(tmp_path: Path, ready: Ready) -> None:
    """The dump would go to whatever has the number now."""
    code = f"os.closerange(3, 100); os.open('/dev/null', os.O_WRONLY); {ready.python()}; time.sleep(1000)"
    with Worker(tmp_path, ready, code) as worker:
        worker.refuses("it offers none itself")


# --- the offer


@pytest.mark.parametrize("theirs", ["lambda *_: None", "signal.SIG_IGN"])
def test_a_signal_that_somebody_uses_is_not_taken(tmp_path: Path, ready: Ready, theirs: str) -> None:
    offer = f"signal.signal({NUMBER}, {theirs}); assert not offer()"
    with Worker(tmp_path, ready, SLEEP, offer=offer) as worker:
        worker.refuses("it offers none")
    assert not os.path.exists(evidence.stacks_path(worker.error_file))
    with Worker(tmp_path, ready, SLEEP, offer=f"{offer}; assert offer(number={NUMBER})") as worker:
        assert shown(worker.ask()) == [["work", "<module>"]]  # asked for by number


@pytest.mark.parametrize(
    "setting, number",
    [("12", 12), ("0", 0), ("", NUMBER), ("nonsense", NUMBER), ("-3", NUMBER), ("9", NUMBER), ("11", NUMBER),
     ("33", NUMBER), ("4711", NUMBER), ("٣", NUMBER)],
)  # fmt: skip
def test_the_environment_moves_the_signal(tmp_path: Path, ready: Ready, setting: str, number: int) -> None:
    offer = f"os.environ['PHALANX_STACK_SIGNAL'] = {setting!r}; assert offer() is {number != 0}"
    with Worker(tmp_path, ready, SLEEP, offer=offer) as worker:
        if number:
            assert shown(worker.ask()) == [["work", "<module>"]]
            assert worker.sent == [number]
        else:
            worker.refuses("it offers none")


def test_user_code_moves_the_signal(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    code = f"""
        from phalanx.timer._stack_signal import move_stack_signal
        move_stack_signal(signal.SIGUSR2)
        assert signal.getsignal({NUMBER}) == signal.SIG_DFL
        signal.signal({NUMBER}, lambda *_: None)
        ready(); {gate.python()}
        move_stack_signal({NUMBER + 1})
        ready(); time.sleep(1000)
        """
    with Worker(tmp_path, ready, code) as worker:
        assert shown(worker.ask()) == [["work", "<module>"]]
        gate.open()
        ready.wait()
        assert shown(worker.ask()) == [["work", "<module>"]]
        assert worker.sent == [signal.SIGUSR2, NUMBER + 1]
        path = evidence.stacks_path(worker.error_file)
        fd = os.readlink(f"/proc/{worker.process.pid}/fd/{evidence.offered(_read(path))[1]}")
        assert fd == path
        assert _read(path).count(b"# stacks on signal") == 3


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def test_user_code_shows_none(tmp_path: Path, ready: Ready) -> None:
    code = "from phalanx.timer._stack_signal import move_stack_signal; move_stack_signal(0); " + SLEEP
    with Worker(tmp_path, ready, code) as worker:
        worker.refuses("it offers none")
        assert not stack_workers.catches(worker.process.pid)
    evidence.remove_empty(worker.error_file)
    assert not os.path.exists(evidence.stacks_path(worker.error_file))


def test_a_number_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(evidence.ERROR_FILE_ENV, "/nowhere/error.json")
    for number in (-1, 9, 19, 11, 32, 65, 1 << 70):
        with pytest.raises(ValueError, match="cannot be caught"):
            move_stack_signal(number)
    monkeypatch.setenv(evidence.ERROR_FILE_ENV, "/proc/nowhere/error.json")
    with pytest.raises(RuntimeError, match="cannot be written"):
        move_stack_signal(NUMBER)
    monkeypatch.delenv(evidence.ERROR_FILE_ENV)
    with pytest.raises(RuntimeError, match="is no worker"):
        move_stack_signal(NUMBER)


def test_the_file_goes_unless_somebody_has_asked(tmp_path: Path, ready: Ready) -> None:
    path = evidence.stacks_path(str(tmp_path / "0" / "error.json"))
    with Worker(tmp_path, ready, SLEEP, offer="offer(); offer()") as worker:
        pass
    assert _read(path).count(b"\n") == 2
    evidence.remove_empty(worker.error_file)
    assert not os.path.exists(path)
    with Worker(tmp_path, ready, SLEEP) as worker:
        worker.ask()
    evidence.remove_empty(worker.error_file)
    assert os.path.exists(path)


def test_an_offer_adds_no_module(tmp_path: Path) -> None:
    code = (
        f"import os, sys; sys.path.insert(0, {ROOT + '/_core'!r}); import evidence; before = set(sys.modules)\n"
        "assert evidence.offer_stacks(); print(sorted(set(sys.modules) - before))"
    )
    env = {evidence.ERROR_FILE_ENV: str(tmp_path / "error.json")}
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "['faulthandler']\n"


# --- native frames


def test_native_frames_come_from_py_spy(tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text('#!/bin/sh\necho "$@"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(spy.parent), prepend=":")
    with Worker(tmp_path, ready, SLEEP) as worker:
        pid = worker.process.pid
        text = stack_workers.ask(worker.target.replace(native=True))
        assert text.endswith(f" in <module>\n\nnative frames (py-spy):\ndump --native --pid {pid}\n")
        assert "native" not in worker.ask()
        assert len(stacks.parse(text)) == 1
        spy.write_text("#!/bin/sh\nexit 1\n")
        assert stack_workers.ask(worker.target.replace(native=True)).endswith(" in <module>\n")
        os.mkfifo(tmp_path / "never")
        spy.write_text(f"#!/bin/sh\nexec cat {tmp_path}/never\n")  # it takes too long
        with stacks.Collection([worker.target.replace(native=True)]) as collection:
            collection.begin()
            assert not collection.wait(0.05)
            assert collection.finish()[0].endswith(" in <module>\n")


def test_native_frames_of_a_real_process(tmp_path: Path, ready: Ready) -> None:
    with Worker(tmp_path, ready, SLEEP) as worker:
        pid = str(worker.process.pid)
        spy = shutil.which("py-spy", path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}")
        if spy is None or subprocess.run([spy, "dump", "--pid", pid], capture_output=True, check=False).returncode:
            pytest.skip("py-spy is not installed, or may not look at other processes here")
        with stacks.Collection([worker.target.replace(native=True)]) as collection:
            collection.begin()
            assert collection.wait(TIMEOUT)
            text = collection.finish()[0]
    assert "\nnative frames (py-spy):\n" in text
    assert re.search(r"sleep|select", text.partition("native frames")[2])


# --- what a dump says


LINES = st.sampled_from(
    ["Thread 0x00007f01 (most recent call first):", "Current thread 0x00000001 (most recent call first):", "", "  ...",
     '  File "/a/b.py", line 12 in f', '  File "x, line 1 in y", line 3 in <module>', "  File ???, line ??? in ???",
     "  <no Python frame>", "  Garbage-collecting", "# stacks on signal 52, descriptor 5",
     "Thread 0x", '  File "', "é\0"]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(st.one_of(LINES, st.text(max_size=5)), max_size=30).map("\n".join)))
def test_parsing_never_fails(text: str) -> None:
    threads = stacks.parse(text)
    assert all(frame.line >= 0 for thread in threads for frame in thread.frames)
    stacks.top(threads)
    assert stacks.sum_up({0: text, 1: "", 7: text}, 7)


PATHS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)
FRAMES = st.builds(stacks.Frame, PATHS, st.integers(0, 99999), st.from_regex(r"[a-z_<>]+", fullmatch=True))
THREADS = st.builds(stacks.Thread, st.integers(0, 2**64 - 1), st.booleans(), st.lists(FRAMES, max_size=5).map(tuple))


@given(st.lists(THREADS, max_size=5))
def test_parsing_finds_what_was_written(threads: list[stacks.Thread]) -> None:
    text = "\n".join(
        f"{'Current thread' if thread.current else 'Thread'} 0x{thread.ident:016x} (most recent call first):\n"
        + "".join(f'  File "{frame.path}", line {frame.line} in {frame.function}\n' for frame in thread.frames)
        for thread in threads
    )
    assert stacks.parse(text) == threads


def at(*places: tuple[str, int, str]) -> str:
    frames = "".join(f'  File "{path}", line {line} in {function}\n' for path, line, function in places)
    return f"Current thread 0x0001 (most recent call first):\n{frames}"


REDUCE, READ = at(("/u/train.py", 41, "all_reduce")), at(("/u/data.py", 17, "read_batch"))


def test_the_top_is_the_users() -> None:
    library = "/usr/lib/python3.12/threading.py", 355, "wait"
    package = "/venv/lib/python3.12/site-packages/torch/x.py", 1, "backward"
    ours = os.path.join(ROOT, "_core", "worker.py"), 1, "_work"
    user = "/u/train.py", 41, "step"
    for above in ((), (library,), (library, package), (ours,)):
        frame = stacks.top(stacks.parse(at(*above, user, ours, ("<string>", 1, "<module>"))))
        assert str(frame) == "step (train.py:41)"
    assert str(stacks.top(stacks.parse(at(library, ("<frozen runpy>", 88, "_run_code"))))) == "wait (threading.py:355)"
    assert stacks.top([]) is stacks.top(stacks.parse(at())) is None


def test_summing_up() -> None:
    texts = dict.fromkeys((0, 1, 2, 4, 5, 6, 7), REDUCE) | {3: READ}
    assert stacks.sum_up(texts, 3) == (
        "7 of 8 ranks wait in all_reduce (train.py:41); rank 3 is in read_batch (data.py:17)"
    )
    assert stacks.sum_up(texts).startswith("7 of 8 ranks are in all_reduce (train.py:41); rank 3 is in")
    assert stacks.sum_up(dict.fromkeys(range(8), REDUCE)) == "all 8 ranks are in all_reduce (train.py:41)"
    assert stacks.sum_up(texts | dict.fromkeys((1, 2), READ)) == (
        "5 of 8 ranks are in all_reduce (train.py:41); ranks 1-3 are in read_batch (data.py:17)"
    )
    texts[5] = "# no Python stack: it has exited\n"
    texts[6] = texts[7] = "# no Python stack: it offers none\nName: sleep\n"
    assert stacks.sum_up(texts, 3) == (
        "4 of 8 ranks wait in all_reduce (train.py:41); ranks 6-7 show no Python stack (it offers none); "
        "rank 5 shows no Python stack (it has exited); rank 3 is in read_batch (data.py:17)"
    )
    assert stacks.sum_up({}) == ""


def test_summing_up_many_places_names_the_hung_rank() -> None:
    texts = {rank: at(("/u/train.py", rank + 1, "<module>")) for rank in range(20)}
    assert stacks.sum_up(texts, 19) == (
        "rank 0 is in train.py:1; rank 1 is in train.py:2; rank 2 is in train.py:3; rank 3 is in train.py:4; "
        "rank 19 is in train.py:20; ranks 4-18 are elsewhere"
    )


def test_files_of_stacks_are_numbered_and_kept(tmp_path: Path) -> None:
    assert stacks.write(str(tmp_path), "one\n") == str(tmp_path / "stacks-1.txt")
    assert stacks.write(str(tmp_path), "two \udc80\n") == str(tmp_path / "stacks-2.txt")
    (tmp_path / "stacks-3.txt").symlink_to("/nowhere")
    assert stacks.write(str(tmp_path), "") == str(tmp_path / "stacks-4.txt")
    assert [(tmp_path / f"stacks-{n}.txt").read_text() for n in (1, 2)] == ["one\n", "two \\udc80\n"]


def test_facts_of_a_process() -> None:
    text = stacks.facts(os.getpid())
    assert f"thread {os.getpid()} " in text
    assert "State: R (running)" in text
    assert stacks.facts(2**22 + 1) == ""


def test_a_collection_that_cannot_begin_or_is_dropped_leaves_nothing(tmp_path: Path, ready: Ready) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Worker(tmp_path, ready, SLEEP) as worker:
        collection = stacks.Collection([worker.target])
        collection.begin()
        assert select.select([collection.fileno()], [], [], PATIENCE)[0]
        collection.finish()
        del collection
    assert set(os.listdir("/proc/self/fd")) == before
