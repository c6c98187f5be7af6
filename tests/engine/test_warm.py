"""Warm starts: what is preloaded is imported once, a failure is told before any worker starts, and nothing is left."""

from __future__ import annotations

import contextvars
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any

import pytest

from phalanx import spawn
from phalanx._base import procfs
from phalanx._engine import forkserver as fork_server_module
from phalanx.multiprocessing import PreloadError, SignalException, start_processes, warm
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, descendants, meanwhile, wait_gone
from tests.support.insides import guard_of
from tests.support.warm_workers import (
    chances,
    draw_of_torch,
    folder_is_there,
    has,
    leave_finalizer,
    multiply,
    place,
    signals_with,
    touch,
)
from tests.support.workers import add, announce, run_script, started_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phalanx.multiprocessing import PContext

pytestmark = [pytest.mark.each_python, pytest.mark.slow, pytest.mark.usefixtures("own_tmpdir")]


class Modules:
    """A folder on the search path, of modules that note who has imported them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "imports.log"

    def write(self, name: str, text: str = "") -> str:
        note = f"import os; open({str(self._log)!r}, 'a').write(f'{name} {{os.getpid()}}\\n')\n"
        (self.folder / f"{name}.py").write_text(note + dedent(text))
        return name

    def importers(self, name: str) -> list[int]:
        """The pids of the processes that have imported a module."""
        if not self._log.exists():
            return []
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [int(pid) for which, pid in lines if which == name]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Modules:
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return Modules(folder)


def start(function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 2, **options: Any) -> PContext:
    return start_processes("warm", function, args, nprocs=nprocs, start_method="forkserver", **options)


def run(function: Callable[..., Any], *args: Any, **options: Any) -> dict[int, Any]:
    """What each rank returned, all of which must succeed."""
    with start(function, args, **options) as group:
        result = group.wait()
    assert not result.is_failed(), result.failures
    return dict(result.return_values)


def fork_server_of(it: warm) -> int:
    assert it._fork_server is not None
    assert it._fork_server._popen is not None
    return it._fork_server._popen.pid


# --- preload


def test_a_preload_is_imported_once_for_all_workers(modules: Modules) -> None:
    first, second = modules.write("first"), modules.write("second")
    found = run(has, first, second, "colorsys", nprocs=3, preload=[first, second])
    assert [which for _pid, which in found.values()] == [[True, True, False]] * 3
    [importer] = modules.importers(first)
    assert modules.importers(second) == [importer]
    assert importer not in {os.getpid(), *(pid for pid, _which in found.values())}


def test_a_submodule_is_preloaded() -> None:
    assert run(has, "xml.etree.ElementTree", preload=["xml.etree.ElementTree"], nprocs=1)[0][1] == [True]


def test_what_a_preload_prints_is_printed_once(modules: Modules, capfd: pytest.CaptureFixture[str]) -> None:
    modules.write("talks", "import ctypes; print('in python'); ctypes.CDLL(None).printf(b'in C\\n')")
    run(add, 1, 2, preload=["talks"])
    assert sorted(capfd.readouterr().out.splitlines()) == ["in C", "in python"]


HANDLERS = """
import faulthandler, signal
reached = []

def note(number, _frame):
    reached.append(number)
    with open({log!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")

for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGCONT, signal.SIGRTMIN + 3):
    signal.signal(number, note)
for number in (signal.SIGHUP, signal.SIGTSTP):
    signal.signal(number, signal.SIG_IGN)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
stacks = open({stacks!r}, "a")
faulthandler.register(signal.SIGUSR2, stacks)
"""


def test_workers_have_the_signal_handlers_of_what_is_preloaded(modules: Modules, tmp_path: Path) -> None:
    stacks, log = tmp_path / "stacks", tmp_path / "signals"
    module = modules.write("handles", HANDLERS.format(stacks=str(stacks), log=str(log)))
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGRTMIN + 3]
    with start_processes("cold", signals_with, {0: (module, *numbers)}) as group:
        cold = group.wait().return_values[0]
    assert cold[2] == [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGRTMIN + 3]
    once = stacks.read_text().count("signals_with")
    assert run(signals_with, module, *numbers, preload=[module]) == {0: cold, 1: cold}
    assert stacks.read_text().count("signals_with") == 3 * once > 0


def test_a_host_without_heed_for_signals_hands_none_of_it_down(modules: Modules, tmp_path: Path) -> None:
    """Those that it ignores or blocks are a worker's as ever, and a module finds them so."""
    module = modules.write("looks", "import signal; found = signal.getsignal(signal.SIGHUP); reached = [int(found)]")
    text = """
import signal, sys
from phalanx.multiprocessing import start_processes
from tests.support.warm_workers import signals_with

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    for options in ({}, {"start_method": "forkserver", "preload": [sys.argv[1]]}):
        with start_processes("n", signals_with, {0: (sys.argv[1],)}, **options) as group:
            handlers, blocked, found = group.wait().return_values[0]
        print(handlers[signal.SIGHUP], handlers[signal.SIGINT].split()[:3], blocked, found)
"""
    done = run_script(tmp_path, text, module, str(modules.folder))
    assert done.returncode == 0, done.stderr
    cold, preloaded = done.stdout.splitlines()
    assert preloaded == cold == "0 ['<built-in', 'function', 'default_int_handler>'] set() [0]"


def test_helpers_run_no_signal_handler_of_what_is_preloaded(
    modules: Modules, tmp_path: Path, ready: Ready, gate: Gate
) -> None:
    log = tmp_path / "signals"
    module = modules.write("handles", HANDLERS.format(stacks=str(tmp_path / "stacks"), log=str(log)))
    with warm([module]) as it:
        with start(announce, (ready.address, gate.address), nprocs=1) as group:
            [worker] = ready.pids()
            guard = guard_of(group)
            helpers = {fork_server_of(it), guard, *(descendants(guard) - {worker})}
            assert len(helpers) == 3
            for pid in helpers:
                for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM):
                    os.kill(pid, number)
            os.kill(worker, signal.SIGUSR1)
            gate.open()
            assert group.wait().succeeded
        run(add, 1, 2)
    assert set(log.read_text().split()) == {str(worker)}


FAILING = {
    "a name that is missing": ("ImportError: cannot import name 'absent'", "from os import absent"),
    "an exception": ("ValueError: in the module", "def f():\n    raise ValueError('in the module')\nf()"),
    "a mistake in the syntax": ("SyntaxError: ", "def f(:\n"),
    "an exit": ("SystemExit: 3", "raise SystemExit(3)"),
    "an interrupt": ("KeyboardInterrupt", "raise KeyboardInterrupt"),
    "a cause": ("KeyError: 'second'", """
        try: 1 / 0
        except ZeroDivisionError as error: raise KeyError("second") from error
        """),
    "a text of megabytes": ("ValueError: xxxx", "raise ValueError('x' * 3_000_000)"),
}  # fmt: skip


def test_a_preload_that_is_not_there_leaves_no_folder_for_logs() -> None:
    with pytest.raises(PreloadError) as caught:
        start(add, (1, 2), preload=["absent_from_here"])
    assert caught.value.traceback == "ModuleNotFoundError: No module named 'absent_from_here'\n"
    assert os.listdir(tempfile.gettempdir()) == []


@pytest.mark.parametrize("name", FAILING)
def test_a_preload_that_fails_is_told_with_its_traceback(name: str, modules: Modules, tmp_path: Path) -> None:
    message, text = FAILING[name]
    good, broken = modules.write("good"), modules.write("broken", text)
    started = tmp_path / "started"
    with pytest.raises(PreloadError, match=r"^preload: 'broken' could not be imported") as caught:
        start(touch, (str(started),), preload=[good, broken])
    assert caught.value.module == "broken"
    assert message in caught.value.traceback
    assert message in str(caught.value)
    assert str(modules.folder / "broken.py") in caught.value.traceback
    assert "importlib" not in caught.value.traceback
    assert "phalanx/_" not in caught.value.traceback
    assert not started.exists()
    if name == "a cause":
        assert "ZeroDivisionError: division by zero" in caught.value.traceback


@pytest.mark.parametrize(
    "text, how",
    [("os._exit(3)", "ended with exit code 3"), ("os.kill(os.getpid(), 9)", "was killed by signal 9")],
    ids=["exits", "is killed"],
)
def test_a_process_that_dies_while_it_imports(text: str, how: str, modules: Modules) -> None:
    good, deadly = modules.write("good"), modules.write("deadly", text)
    with pytest.raises(PreloadError, match=f"^preload: 'deadly' could not be imported: the process .* {how}$") as found:
        start(add, (1, 2), preload=[good, deadly])
    assert found.value.module == "deadly"


def test_a_process_that_dies_before_it_imports(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    it = warm(preload=[modules.write("marked"), "json"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PreloadError, match=r"'marked, json' could not be imported: .* ended with exit code 1"):
        it.__enter__()


def test_a_thread_may_close_a_warm_that_imports(ready: Ready, modules: Modules) -> None:
    slow_module(modules.folder, ready)
    it = warm(preload=["slow"])
    with meanwhile(it.__enter__) as error:
        pids = list(map(int, ready.wait()[0].split()))
        it.close()
        said = "preload: 'slow' could not be imported: the process that does so was killed by signal 9"
        assert str(error()) == said
    assert wait_gone(pids) == set()


def test_a_late_import_is_killed_with_what_it_started(ready: Ready, modules: Modules) -> None:
    slow_module(modules.folder, ready)
    it = warm(preload=["slow"])
    it.begin()
    try:
        pids = list(map(int, ready.wait()[0].split()))
        assert not it.is_ready
        for _ in range(2):  # and so it is found from then on
            with pytest.raises(PreloadError, match=r"^preload: 'slow' is not imported after 0\.1s$"):
                it.wait(0.1)
        assert wait_gone(pids) == set()
    finally:
        it.close()


THREADS = {
    "threads": (
        """
        import threading
        for name in ("one", "two"):
            threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
        """,
        r"'it' has started 2 threads \(one, two\), which a fork",
    ),
    "a thread of which Python knows nothing": (
        "import _thread, time; _thread.start_new_thread(time.sleep, (600,))",
        r"'it' has started 1 thread, which a fork would not have",
    ),
    "a thread that has ended": ("import threading; it = threading.Thread(target=int); it.start(); it.join()", ""),
    "a thread that is about to leave": (  # none of Python's any more, and yet in /proc/self/task
        """
        import _thread, time
        from phalanx._engine.keeper import fork_server as main
        main._LEAVING = 60
        _thread.start_new_thread(time.sleep, (0.1,))
        """,
        "",
    ),
}


@pytest.mark.parametrize("name", THREADS)
def test_threads_are_refused_unless_they_end(name: str, modules: Modules) -> None:
    text, refused = THREADS[name]
    modules.write("it", text)
    if not refused:
        assert run(add, 1, 2, preload=["json", "it"]) == {0: 3, 1: 3}
        return
    with pytest.raises(PreloadError, match=refused) as caught:
        start(add, (1, 2), preload=["json", "it"])
    assert (caught.value.module, caught.value.traceback) == ("it", "")


def test_numpy_whose_threads_know_about_forks_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # else there is one thread in tests, see conftest
    assert run(multiply, 600, preload=["numpy"]) == dict.fromkeys(range(2), 600.0**3)


def test_a_worker_runs_its_own_finalizers_alone(modules: Modules, tmp_path: Path) -> None:
    module = modules.write("holds", "import tempfile\nFOLDER = tempfile.TemporaryDirectory()")
    with warm(preload=[module]):
        for serial in range(2):
            note = tmp_path / f"ended{serial}"
            assert run(folder_is_there, module, str(note)) == {0: True, 1: True}
            assert note.exists()


def test_a_fork_of_a_launcher_with_finalizers_runs_its_own(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn.start_processes(leave_finalizer, (str(tmp_path / "note"),), start_method="fork")
        assert (tmp_path / "note").exists()
        assert os.path.isdir(folder)


def test_no_two_workers_draw_alike(modules: Modules) -> None:
    text = """
    import uuid
    class Generator:
        drawn = uuid.uuid4().int
        def seed(self): self.drawn = uuid.uuid4().int
        def initial_seed(self): return self.drawn
    default_generator = Generator()
    """
    with warm(preload=["numpy.random", "uuid", modules.write("torch", text)]):
        drawn = run(chances, nprocs=3)
        for name in ("numpy", "random", "uuid"):
            assert len({found[name] for found in drawn.values()}) == 3, name
        assert len(set(run(draw_of_torch, nprocs=3).values())) == 3


@pytest.mark.parametrize("cuda", ["True", "False", None])
def test_cuda_is_refused_once_it_is_initialised(cuda: str | None, modules: Modules) -> None:
    body = "pass" if cuda is None else f"is_initialized = staticmethod(lambda: {cuda})"
    modules.write("torch", f"class cuda: {body}")
    modules.write("uses", "import torch")
    if cuda == "True":
        with pytest.raises(PreloadError, match="'uses' has initialised CUDA") as caught:
            start(add, (1, 2), preload=["json", "uses"])
        assert caught.value.module == "uses"
    else:
        assert run(add, 1, 2, preload=["uses"]) == {0: 3, 1: 3}


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"preload": "numpy"}, TypeError, r"expected a list of modules' names, got 'numpy'; like \['numpy'\]"),
        ({"preload": [3]}, TypeError, "it holds 3"),
        ({"preload": ["not a module"]}, ValueError, "'not a module' is not the name of a module"),
        ({"preload": [""]}, ValueError, "'' is not the name of a module"),
        ({"preload": ["a..b"]}, ValueError, "'a..b' is not the name of a module"),
        ({"preload": ["json"], "start_method": "spawn"}, ValueError, "start_method is 'spawn'"),
        ({"preload": ["json"], "start_method": "fork"}, ValueError, "start_method is 'fork'"),
        ({"preload": ["json"], "entrypoint": "true"}, ValueError, "a binary imports nothing"),
        ({"warm": "json"}, TypeError, "expected an entered warm, got 'json'"),
        ({"warm": warm(preload=["json"])}, ValueError, "it is not open"),
    ],
    ids=str,
)
def test_bad_input_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {"entrypoint": add, "args": (1, 2), "nprocs": 2, "start_method": "forkserver"} | options
    with pytest.raises(error, match=text):
        start_processes("bad", **given)


def test_warm_refuses_the_same() -> None:
    with pytest.raises(TypeError, match="expected a list of modules' names"):
        warm("json")
    with pytest.raises(ValueError, match="is not the name of a module"):
        warm(["js-on"])
    with warm(["json"]) as it:
        with pytest.raises(RuntimeError, match="entered already"):
            it.__enter__()
        with pytest.raises(ValueError, match="preload: colorsys is not among what warm has: json"):
            start(add, (1, 2), preload=["json", "colorsys"], warm=it)


# --- keeping warm


def test_a_second_group_costs_forks_only(modules: Modules) -> None:
    marked = modules.write("marked")
    guards = set()
    with warm(preload=[marked]) as it:
        for _ in range(3):
            with start(has, (marked,)) as group:
                guards.add(guard_of(group))
                result = group.wait()
            assert [which for _pid, which in result.return_values.values()] == [[True]] * 2
        assert modules.importers(marked) == [fork_server_of(it)]
        assert repr(it) == "<Warm, marked preloaded, open>"
    assert len(guards) == 3
    assert repr(it) == "<Warm, marked preloaded, closed>"


def test_each_group_has_a_keeper_of_its_own(ready: Ready, gate: Gate) -> None:
    with warm(preload=["json"]) as it:
        with (
            start(announce, (ready.address, gate.address)) as one,
            start(announce, (ready.address, gate.address)) as two,
        ):
            ready.wait(4)
            assert guard_of(one) != guard_of(two)
            assert {procfs.Stat(guard_of(group)).parent for group in (one, two)} == {fork_server_of(it)}
            one.close()
            assert two.is_open
            gate.open(2)
            result = two.wait()
        assert not result.is_failed()


def test_workers_find_the_launcher_as_it_is_at_their_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    before, umask = os.dup(1), os.umask(0)
    os.umask(umask)
    try:
        with warm(preload=["json"]):
            for name, mask in (("one", 0o027), ("two", 0o077)):
                out = os.open(tmp_path / f"{name}.out", os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.close(out)
                os.umask(mask)
                monkeypatch.chdir(tmp_path / name)
                monkeypatch.setenv("OF_THE_LAUNCHER", name)
                found = run(place, "OF_THE_LAUNCHER", nprocs=1)
                assert found == {0: {"cwd": str(tmp_path / name), "umask": mask, "env": name}}
                assert (tmp_path / f"{name}.out").read_text() == "here\n"
            monkeypatch.delenv("OF_THE_LAUNCHER")
            assert run(place, "OF_THE_LAUNCHER", nprocs=1)[0]["env"] is None
    finally:
        os.umask(umask)
        os.dup2(before, 1)
        os.close(before)


def test_the_innermost_warm_that_has_the_modules_is_used(modules: Modules) -> None:
    """Unless one is given; one that was closed by hand is used no more."""
    outer, inner = modules.write("outer"), modules.write("inner")

    def found(**options: Any) -> list[bool]:
        return list(run(has, outer, inner, nprocs=1, **options)[0][1])

    with warm(preload=[outer]) as first:
        with warm(preload=[outer, inner]) as second:
            assert found() == [True, True]
            assert found(warm=first) == [True, False]
            second.close()
            assert found() == [False, False]
        assert found(preload=[outer]) == [True, False]
        assert len(modules.importers(outer)) == 2
        assert found(preload=[inner]) == [False, True]  # one of the group's own
    assert len(modules.importers(inner)) == 2


def test_a_warm_may_be_left_in_another_context(modules: Modules) -> None:
    marked = modules.write("marked")
    it = warm(preload=[marked])
    contextvars.copy_context().run(it.__enter__)
    assert run(has, marked, nprocs=1)[0][1] == [False]
    assert run(has, marked, nprocs=1, warm=it)[0][1] == [True]
    contextvars.copy_context().run(it.__exit__)
    assert not it.is_open


def test_a_preload_that_fails_leaves_no_warm_behind(modules: Modules) -> None:
    broken = modules.write("broken", "raise ValueError('no')")
    with pytest.raises(PreloadError, match="'broken' could not be imported"), warm(preload=[broken]):
        pytest.fail("it was entered")
    assert run(has, "colorsys", nprocs=1)[0][1] == [False]


def test_a_fork_server_that_was_killed_is_replaced(modules: Modules) -> None:
    marked = modules.write("marked")
    with warm(preload=[marked]) as it:
        first = fork_server_of(it)
        os.kill(first, signal.SIGKILL)
        assert wait_gone([first]) == set()
        assert run(has, marked, nprocs=1)[0][1] == [True]
        assert modules.importers(marked) == [first, fork_server_of(it)]
        modules.write("marked", "raise ValueError('by now')")
        for _ in range(2):
            os.kill(fork_server_of(it), signal.SIGKILL)
            assert wait_gone([fork_server_of(it)]) == set()
            with pytest.raises(PreloadError, match="by now"):
                start(add, (1, 2))
            with pytest.raises(PreloadError, match="by now"):
                start(add, (1, 2))
        modules.write("marked")
        assert run(add, 1, 2) == {0: 3, 1: 3}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_group_outlives_the_warm_that_it_was_started_from(is_killed: bool, ready: Ready, gate: Gate) -> None:
    with warm(preload=["json"]) as it:
        forkserver = fork_server_of(it)
        group = start(announce, (ready.address, gate.address))
        if is_killed:
            os.kill(forkserver, signal.SIGKILL)
    with group:
        assert wait_gone([forkserver]) == set()
        pids = set(ready.pids(2))
        assert all(map(alive, pids))
        gate.open(2)
        result = group.wait()
    assert set(result.return_values.values()) == pids


def test_threads_start_groups_from_one_warm_at_once(modules: Modules) -> None:
    marked = modules.write("marked")
    found: list[dict[int, Any]] = []
    with warm(preload=[marked]) as it:
        os.kill(fork_server_of(it), signal.SIGKILL)  # so that they want to replace it at once, too
        assert wait_gone([fork_server_of(it)]) == set()
        threads = [threading.Thread(target=lambda: found.append(run(has, marked, warm=it))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
    assert [which for each in found for _pid, which in each.values()] == [[True]] * 8
    assert len(modules.importers(marked)) == 2


# --- nothing is left


SLOW = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
{say}
signal.pause()
"""


def slow_module(folder: Path, ready: Ready) -> None:
    """Write a module that starts a child, tells both pids, and is never imported."""
    (folder / "slow.py").write_text(SLOW.format(say=ready.python("f'{os.getpid()} {child.pid}'")))


ENTERING = """
from phalanx.multiprocessing import start_processes, warm
def main(): pass
{0}
"""

STARTS = {
    "warm": "warm(preload=['slow']).__enter__()",
    "start_processes": "start_processes('x', main, nprocs=2, start_method='forkserver', preload=['slow'])",
    "run": "import sys; from phalanx.cli import main; sys.argv[:1] = ['phalanx', 'run', '--preload', 'slow']; main()",
}  # fmt: skip


@pytest.mark.parametrize(
    "way, number",
    [(way, number) for way in STARTS for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
     if (way, number) != ("warm", signal.SIGTERM)],  # which no handler is there for: the same as SIGKILL
    ids=str,
)  # fmt: skip
def test_an_import_that_takes_too_long_can_be_interrupted(
    way: str, number: signal.Signals, ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    slow_module(tmp_path, ready)
    script = tmp_path / "other.py"
    script.write_text("print('not reached')")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started_script(tmp_path, ENTERING.format(STARTS[way]), script, **pipes) as launcher:
        forkserver, child = map(int, ready.wait()[0].split())
        began = time.monotonic()
        launcher.send_signal(number)
        assert wait_gone([forkserver], 10) == set()
        if number == signal.SIGKILL:  # nobody is left who knows of what a module starts by itself
            os.kill(child, signal.SIGKILL)
        out, err = launcher.communicate(timeout=TIMEOUT)
        assert time.monotonic() - began < TIMEOUT / 2
        assert wait_gone([child], 5) == set()
    assert "not reached" not in out
    if way == "run":
        assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number), err
        assert "Traceback" not in err
    elif number != signal.SIGKILL:
        name = "KeyboardInterrupt" if way == "warm" else "phalanx.multiprocessing.SignalException"
        assert err.splitlines()[-1].startswith(name)


def test_an_interrupt_amid_an_import_is_a_signal_exception(ready: Ready, modules: Modules) -> None:
    slow_module(modules.folder, ready)

    def interrupt() -> None:
        ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(interrupt), pytest.raises(SignalException, match="SIGTERM"):
        start(add, (1, 2), preload=["slow"])


# --- hosts of every kind


HOSTS = {
    "a subreaper, which is left without zombies": (
        """
        from phalanx._base import linux, procfs
        linux.become_subreaper()
        """,
        "assert not procfs.children(os.getpid())",
    ),
    "one without standard descriptors": ("for fd in (0, 1, 2): os.close(fd)", ""),
    "one that ignores its children": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", ""),
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_of_any_kind_keeps_warm(name: str, tmp_path: Path) -> None:
    begin, after = HOSTS[name]
    found = tmp_path / "found"
    run_script(tmp_path, f"""
import os, signal, traceback
if __name__ == "__main__":
    try:
        {indent(dedent(begin), " " * 8).strip()}
        from phalanx.multiprocessing import start_processes, warm
        text = ""
        for early in (True, False):  # whether the group outlives the warm
            with warm(preload=["json"]):
                group = start_processes("x", pow, (2, 3), nprocs=2, start_method="forkserver")
                if not early:
                    text += str(group.wait().return_values)
                    group.close()
            text += str(group.wait().return_values)
            group.close()
            {after or "pass"}
    except BaseException:
        text = traceback.format_exc()
    open({str(found)!r}, "w").write(text)
""")  # fmt: skip
    assert found.read_text() == "{0: 8, 1: 8}" * 3


def test_a_host_that_ignores_its_children_refuses_threads(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()")
    done = run_script(tmp_path, """
import signal
from phalanx.multiprocessing import PreloadError, warm
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
try:
    warm(preload=["threaded"]).__enter__()
except PreloadError as error:
    print(error)
""")  # fmt: skip
    assert "'threaded' has started 1 thread" in done.stdout, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the fork, if a test before has left a thread of its own
def test_a_fork_of_the_host_has_a_warm_process_of_its_own(modules: Modules) -> None:
    marked = modules.write("marked")
    with warm(preload=[marked]) as it:
        forkserver = fork_server_of(it)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if run(has, marked, nprocs=1)[0][1] == [True] else 2
            finally:
                it.close()
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert run(has, marked, nprocs=1)[0][1] == [True]
        assert fork_server_of(it) == forkserver
        assert len(modules.importers(marked)) == 2


def test_a_fork_server_that_is_stopped_is_killed_and_replaced(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm(preload=[modules.write("marked")]) as it:
        forkserver = fork_server_of(it)
        os.kill(forkserver, signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr("phalanx._engine.forkserver.FORK_WAIT", 0.2)
            with pytest.raises(PreloadError, match="was killed by signal 9"):
                start(add, (1, 2))
        assert not alive(forkserver)
        assert run(add, 1, 2) == {0: 3, 1: 3}


class LateError(Exception):
    """What a handler of the host's raises: its own timeout."""


def test_an_unread_answer_is_for_no_later_group(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    modules.write("fine")

    def late(*_: object) -> None:
        raise LateError

    with warm(preload=["fine"]) as warmed:
        forkserver = warmed._fork_server
        assert forkserver is not None
        receive = forkserver._receive

        def interrupted(timeout: float | None = None) -> object:
            assert timeout is not None
            signal.raise_signal(signal.SIGUSR2)
            return receive(timeout)

        before = signal.signal(signal.SIGUSR2, late)
        with monkeypatch.context() as patch:
            patch.setattr(forkserver, "_receive", interrupted)
            with pytest.raises(LateError):
                start_processes("g", add, (1, 2), nprocs=1, start_method="forkserver")
        signal.signal(signal.SIGUSR2, before)
        for _ in range(2):
            with start_processes("g", add, (1, 2), nprocs=1, start_method="forkserver") as group:
                assert group.wait().return_values == {0: 3}
        assert warmed._fork_server is forkserver


def test_a_child_of_an_import_delays_no_end_of_the_fork_server(modules: Modules, ready: Ready, gate: Gate) -> None:
    """It has the socket, which does not tell of the fork server's end then."""
    child = f"if os.fork() == 0:\n    {ready.python()}\n    signal.pause()\n    os._exit(0)\n"
    modules.write("forking", f"import os, signal\n{child}{gate.python()}\nos._exit(3)")
    with meanwhile(warm(preload=["forking"]).__enter__) as error:
        [child_pid] = ready.pids()
        gate.open()
        assert "ended with exit code 3" in str(error())
    os.kill(child_pid, signal.SIGKILL)


def test_a_fork_server_of_a_dead_launcher_leaves_at_once() -> None:
    """It has been handed to somebody else, and a fork of the launcher may hold its socket."""
    code = """
import os, sys
from phalanx._base import channels, interpreter
launcher = os.getpid()
ours, theirs = channels.pair()
if os.fork() == 0:
    while os.getppid() == launcher:
        pass
    os.set_inheritable(ours.fileno(), True)
    os.set_inheritable(theirs.fileno(), True)
    code = f"from phalanx._engine.keeper.fork_server import main;main({theirs.fileno()}, [])"
    command = interpreter.command([], code)
    os.execv(command[0], command)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLHUP)  # nobody has it any more
        assert poll.poll(TIMEOUT * 1000)


def test_nobody_waits_for_a_fork_server_that_cannot_be_killed(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules.write("fine")
    monkeypatch.setattr(fork_server_module, "_CLOSING", 0.1)
    monkeypatch.setattr(fork_server_module, "_KILLED", 0.1)
    warmed = warm(preload=["fine"])
    with warmed:
        forkserver = warmed._fork_server
        assert forkserver is not None
        assert forkserver._popen is not None
        pid = forkserver._popen.pid
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(forkserver._popen, "kill", lambda: None)  # it does not reach it
    os.kill(pid, signal.SIGKILL)
    assert wait_gone([pid]) == set()


# --- what is loaded before a fork, though nobody has asked for it


def loaded_before(name: str) -> bool | None:
    """Whether this worker's keeper had loaded a module; None if it is not loaded.

    What was there before the fork has been frozen: no collection looks at it (gc.freeze).
    """
    import gc

    module = sys.modules.get(name)
    return None if module is None else all(each is not module for each in gc.get_objects())


@pytest.mark.parametrize("preload", [None, ["json"]])
def test_the_pickler_is_loaded_once_for_all_workers_that_need_it(preload: list[str] | None) -> None:
    said = []
    for function in (loaded_before, lambda name, seen=loaded_before: seen(name)):  # by reference, and by value
        options: dict[str, Any] = {"nprocs": 2, "start_method": "forkserver", "preload": preload}
        with start_processes("pickler", function, ("cloudpickle.cloudpickle",), **options) as group:
            result = group.wait()
        assert not result.is_failed(), result.failures
        said.append(result.return_values)
    assert said == [{0: None, 1: None}, {0: True, 1: True}]
