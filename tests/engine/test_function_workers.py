"""A function worker is a child as `multiprocessing` makes it: what it finds of the main module, and what comes back."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

import phalanx.spawn as mp
from phalanx._base import channels
from phalanx._engine.mp_parent import ChildIdentities
from phalanx._engine.worker import mp_child
from phalanx.multiprocessing import start_processes
from tests.support import workers
from tests.support.helpers import TIMEOUT, wait_gone
from tests.support.insides import supervisor_of
from tests.support.workers import ROOT, run_script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.helpers import Ready

METHODS = ("spawn", "forkserver", "fork")
KINDS = {"spawn": "SpawnProcess", "forkserver": "ForkServerProcess", "fork": "ForkProcess"}
"""The names of the children of `multiprocessing` that are started so."""
SENT = ("spawn", "forkserver")
"""Methods whose workers run the main module again."""

NO_WORK = "Can't get attribute 'work'|no attribute 'work'"
"""What pickle says of a function that is not there: until Python 3.13, and since."""

each_method = pytest.mark.parametrize("method", METHODS)
each_sent = pytest.mark.parametrize("method", SENT)

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder"), pytest.mark.slow]

HEAD = """
import sys
import phalanx.spawn as mp
from phalanx.multiprocessing import start_processes

METHOD = sys.argv[1]
KIND = {"spawn": "SpawnProcess", "forkserver": "ForkServerProcess", "fork": "ForkProcess"}[METHOD]

def run(function, *args, nprocs=2, **options):
    with start_processes("workers", function, args, nprocs=nprocs, start_method=METHOD, **options) as group:
        result = group.wait()
    assert result.succeeded, result.root_cause.traceback
    return [result.return_values[rank] for rank in range(nprocs)]
"""


def run_main(folder: Path, text: str, method: str, *arguments: str, failures: int = 0, **options: Any) -> str:
    """What a script prints that begins with `HEAD`; it must succeed, and write to stderr of groups' failures alone."""
    done = try_main(folder, text, method, *arguments, **options)
    assert (done.returncode, done.stderr.count("phalanx: the group ")) == (0, failures), done.stderr
    assert failures or not done.stderr
    return done.stdout


def try_main(folder: Path, text: str, method: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script that begins with `HEAD`, with a temporary folder of its own: evidence of failures stays there."""
    env = {"TMPDIR": str(folder)} | options.pop("env", {})
    return run_script(folder, HEAD + dedent(text), method, *arguments, env=env, **options)


def launch(folder: Path, words: list[str], method: str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, in a folder."""
    path = os.pathsep.join([ROOT, str(folder), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}
    options = {"stdin": subprocess.DEVNULL} | options if "input" not in options else options
    command = [sys.executable, *words, method, *more]
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False, **options
    )


# --- what holds under each start method: programs that begin with `HEAD`, and print "done" when all is as it should be

PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "a worker is a child as multiprocessing makes one": (METHODS, """
    def who():
        import multiprocessing
        me = multiprocessing.current_process()
        parent = multiprocessing.parent_process()
        return (me.name, me._identity, me.daemon, bytes(me.authkey), type(me).__name__, parent.name, parent.pid,
                parent.is_alive(), multiprocessing.get_start_method(), __name__)
    def tell(queue):
        queue.put(who())
    if __name__ == "__main__":
        ours = run(who)  # before anybody has named `multiprocessing`
        import multiprocessing, os
        context = multiprocessing.get_context(METHOD)
        queue = context.SimpleQueue()
        process = context.Process(target=tell, args=(queue,))
        process.start()
        theirs = queue.get()
        process.join()
        queue.close()
        assert all(theirs[place] == ours[0][place] for place in (2, 4, 5, 6, 7, 8, 9)) and ours[0][3] == ours[1][3]
        assert [each[:2] for each in ours] == [(f"{KIND}-1", (1,)), (f"{KIND}-2", (2,))] and theirs[0] == f"{KIND}-3"
        again = run(who)
        assert ours[0][3] == again[0][3] == bytes(multiprocessing.current_process().authkey)
        assert again[0][6] == os.getpid() and [each[1] for each in again] == [(4,), (5,)]
    """),
    "workers of workers are counted by family, also where none has used multiprocessing": (METHODS, """
    def inner():
        import multiprocessing, logging
        from multiprocessing.shared_memory import SharedMemory
        segment = SharedMemory(create=True, size=8)
        segment.close()
        me = multiprocessing.current_process()
        record = logging.makeLogRecord({})
        return me.name, multiprocessing.parent_process().name, record.processName, bytes(me.authkey), segment.name
    def outer():
        told = [run(inner, nprocs=1)[0] for _ in range(2)]
        import multiprocessing
        return told, bytes(multiprocessing.current_process().authkey), multiprocessing.Process().name
    if __name__ == "__main__":
        told, key, name = run(outer, nprocs=1)[0]
        from multiprocessing.shared_memory import SharedMemory
        for number, (*names, inner, segment) in enumerate(told, 1):
            assert names == [f"{KIND}-1:{number}", f"{KIND}-1", f"{KIND}-1:{number}"] and inner == key
            segment = SharedMemory(segment)
            segment.close()
            segment.unlink()
        assert name == "Process-1:3"
    """),
    "a worker has the library's modules, whatever the program's folders hold": (SENT, """
    import os
    folder = os.path.join(os.environ["TMPDIR"], "mine")
    def work(): return sys.path[0] == folder
    if __name__ == "__main__":
        import runpy, subprocess
        os.mkdir(folder)
        for name in ("runpy", "subprocess"):
            with open(os.path.join(folder, f"{name}.py"), "w") as file:
                file.write("raise SystemExit('not the library')")
        sys.path.insert(0, folder)
        assert run(work) == [True, True]
    """),
    "log records name the process, and no resource tracker is started but for what needs one": (("spawn", "fork"), """
    import io
    def outer(): return run(lambda: 7, nprocs=1)[0]
    def work():
        import logging
        stream = io.StringIO()
        logging.basicConfig(stream=stream, format="%(processName)s %(message)s", force=True)
        logging.error("one")
        import multiprocessing
        multiprocessing.current_process().name = "mine"
        logging.error("two")
        return stream.getvalue().split()
    if __name__ == "__main__":
        assert run(work) == [[f"{KIND}-{number}", "one", "mine", "two"] for number in (1, 2)]
        import logging
        assert logging.makeLogRecord({}).processName == "MainProcess"
        if METHOD == "fork":
            assert [lines[0] for lines in run(work)] == [f"{KIND}-3", f"{KIND}-4"]
        assert run(outer, nprocs=1) == [7]
        from multiprocessing import resource_tracker
        assert resource_tracker._resource_tracker._fd is None
    """),
    "what stands at the top of the script holds in workers, but over a rank's variables": (("forkserver", "fork"), """
    import decimal, logging, os
    decimal.getcontext().prec = 5
    REGISTRY = {}
    def register(function):
        REGISTRY[function.__name__] = function
        return function
    @register
    def one(): return 1
    @register
    def two(): return 2
    os.environ["DEVICE"] = os.environ["OTHER"] = "0,1"
    logging.basicConfig(level=logging.ERROR)
    def look():
        values = [os.environ[name] for name in ("DEVICE", "OTHER")]
        return sorted(REGISTRY), str(decimal.Decimal(1) / 3), REGISTRY["two"](), logging.root.level, values
    if __name__ == "__main__":
        found = run(look, envs={0: {"DEVICE": "0"}, 1: {"DEVICE": "1"}})
        assert found == [(["one", "two"], "0.33333", 2, 40, [str(rank), "0,1"]) for rank in range(2)], found
    """),
    "globals are each worker's own": (("forkserver", "fork"), """
    import numpy as np
    small, large = np.zeros(3), np.zeros(1 << 20)
    counter = 0
    def add():
        global counter
        counter += 1
        small[0] += 1
        large[0] += 1
        return counter, int(small[0]), int(large[0]), large.flags.writeable
    if __name__ == "__main__":
        assert run(add) == [(1, 1, 1, True)] * 2 and (counter, small[0], large[0]) == (0, 0, 0)
        if METHOD != "fork":
            assert run(add, main="value") == run(lambda: add()) == [(1, 1, 1, True)] * 2
            assert (counter, small[0], large[0]) == (0, 0, 0)
            assert run(lambda: (int(large[0]), large.flags.writeable)) == [(0, True)] * 2
    """),
    "what breaks by value is found by reference": (("spawn", "fork"), """
    import dataclasses, enum, functools, pickle, typing
    @functools.lru_cache(maxsize=7)
    def cached(n): return n + 1
    @functools.singledispatch
    def kind(value): return "any"
    @kind.register
    def _(value: int): return "int"
    UserId = typing.NewType("UserId", int)
    P = typing.ParamSpec("P")
    class Missing:
        def __reduce__(self): return "MISSING"
    MISSING = Missing()
    class Color(enum.Enum):
        RED = 1
    @dataclasses.dataclass
    class Config:
        rate: float
        color: Color = Color.RED
        names: list = dataclasses.field(default_factory=list)
        class Nested:
            pass
    class Trainer:
        def __init__(self): self.steps = 0
        def __work(self, n):
            self.steps += n
            return self
        def start(self): return run(self.__work, 3, nprocs=1)[0]
        @functools.cached_property
        def total(self): return self.steps * 2
    def look(config, user, missing, color, nested):
        assert missing is MISSING and color is Color.RED and user is UserId and type(nested) is Config.Nested
        again = pickle.loads(pickle.dumps(config))
        assert type(again) is type(config) is Config and again == config, "as a queue would send it"
        assert [field.name for field in dataclasses.fields(config)] == ["rate", "color", "names"]
        assert dataclasses.fields(config)[0].default is dataclasses.MISSING
        assert (cached(1), cached.cache_parameters()["maxsize"], kind(3), kind("a")) == (2, 7, "int", "any")
        return config, nested
    if __name__ == "__main__":
        import multiprocessing.reduction  # it knows how to send a method, but no private one
        config, nested = run(look, Config(0.5), UserId, MISSING, Color.RED, Config.Nested(), nprocs=1)[0]
        assert config == Config(0.5) and type(config) is Config and type(nested) is Config.Nested
        assert run(cached, 4) == [5, 5] and run(kind, 4) == ["int"] * 2 and run(Color, 1) == [Color.RED] * 2
        trainer = Trainer().start()
        assert (type(trainer), trainer.steps, trainer.total) == (Trainer, 3, 6)
        assert run(functools.partial(cached, 1)) == [2, 2] and run(Trainer, nprocs=1)[0].total == 0
    """),
    "what comes back leaves the launcher's classes alone": (("forkserver", "fork"), """
    import copyreg, dataclasses
    base = 1
    class Model:
        made = []
        def value(self): return base
    @dataclasses.dataclass
    class Config:
        rate: float = dataclasses.MISSING
    def make(model):
        global base
        base = 100
        Model.made.append("in the worker")
        Model.more = lambda self: 5
        return Model(), model, Model, Model.value, Config(3.0)
    if __name__ == "__main__":
        copyreg._slotnames(Model)  # whatever pickles an instance notes these in the class
        before, value = dict(vars(Model)), Model.value
        for main in ("import", "value"):
            made, same, kind, function, config = run(make, Model(), nprocs=1, main=main)[0]
            assert type(made) is type(same) is kind is Model and function is value is Model.value
            assert type(config) is Config and dict(vars(Model)) == before and Model.made == []
            assert Model().value() == 1 and not hasattr(Model, "more")
            assert [field.default is dataclasses.MISSING for field in dataclasses.fields(Config)] == [True]
    """),
    "a child of multiprocessing, whose main module has another name, has workers": (METHODS, """
    import multiprocessing
    class Thing:
        pass
    def work(thing): return type(thing) is Thing, Thing()
    def nested(queue):
        told, thing = run(work, Thing(), nprocs=1)[0]
        queue.put((work.__module__, told, type(thing) is Thing))
    if __name__ == "__main__":
        context = multiprocessing.get_context(METHOD)
        queue = context.SimpleQueue()
        process = context.Process(target=nested, args=(queue,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert queue.get() == ("__main__" if METHOD == "fork" else "__mp_main__", True, True)
        queue.close()
    """),
    "queues carry objects of the main module": (("spawn", "fork"), """
    import multiprocessing
    class Item:
        def __init__(self, n): self.n = n
    def work(i, queue, answers):
        queue.put(Item(i))
        item = answers.get()
        assert type(item) is Item
        queue.put(Item(item.n + 10))
    if __name__ == "__main__":
        context = multiprocessing.get_context(METHOD)
        queue, answers = context.Queue(), context.Queue()
        group = mp.spawn(work, (queue, answers), 2, join=False, start_method=METHOD)
        items = [queue.get(timeout=30) for _ in range(2)]
        for item in items:
            answers.put(item)
        items += [queue.get(timeout=30) for _ in range(2)]
        group.join()
        assert sorted(item.n for item in items) == [0, 1, 10, 11] and {type(item) for item in items} == {Item}
        for each in (queue, answers):
            each.close()
            each.join_thread()
    """),
    "start method and name are a worker's own, and forks are told when all has been loaded": (METHODS, """
    import multiprocessing, os
    from multiprocessing import util
    multiprocessing.set_start_method("forkserver" if sys.argv[1] == "spawn" else "spawn", force=True)
    multiprocessing.current_process().name = "Launcher"
    ROOT = os.path.abspath(sys.argv[0])
    class Counter: told = 0
    util.register_after_fork(Counter, lambda kind: setattr(kind, "told", kind.told + 1))
    def look():
        return multiprocessing.get_start_method(), multiprocessing.current_process().name.split("-")[0], Counter.told
    if __name__ == "__main__":
        os.chdir("/")
        assert run(look, nprocs=1) == [(METHOD, KIND, int(METHOD != "spawn"))]
        assert run(lambda: ROOT == os.path.abspath(__file__), nprocs=1) == [True]
    """),
    "a fork collects garbage as the launcher, and warns apart from other children of each fork": (("fork",), """
    import gc, os, subprocess, threading
    here, children = os.getpid(), []
    begun = gc.get_freeze_count()  # some, in Python 3.12
    def look(): return gc.isenabled(), gc.get_freeze_count() > begun
    def starts():
        if os.getpid() == here:
            children.append(subprocess.Popen(["sh", "-c", "exit 7"]))
    def work(): return 1
    if __name__ == "__main__":
        assert run(look, nprocs=1) == [(True, False)]
        gc.disable()
        gc.freeze()
        assert run(look, nprocs=1) == [(False, True)]
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        os.register_at_fork(after_in_parent=starts)
        assert run(work) == [1, 1] and [child.wait() for child in children] == [7]
        done.set()
        thread.join()
    """),
    "shared memory that a worker makes stays until the launcher ends, with a tracker or without": (METHODS, """
    def make(index):
        from multiprocessing.shared_memory import SharedMemory
        segment = SharedMemory(create=True, size=8)
        segment.buf[0] = 65 + index
        segment.close()
        return segment.name
    if __name__ == "__main__":
        for _ in range(2):
            assert "multiprocessing.resource_tracker" not in sys.modules or _
            with start_processes("m", make, {0: (0,), 1: (1,)}, start_method=METHOD) as group:
                names = group.wait().return_values
            from multiprocessing.shared_memory import SharedMemory
            for rank, name in names.items():
                segment = SharedMemory(name)
                assert segment.buf[0] == 65 + rank
                segment.close()
                segment.unlink()
    """),
    "warm: shared memory outlives a worker, the main module runs once, managers count objects": (("forkserver",), """
    import multiprocessing, os
    from multiprocessing.shared_memory import SharedMemory
    from phalanx.multiprocessing import warm
    made = os.getpid()
    class Thing:
        pass
    def work(thing): return made, os.getpid(), type(thing) is Thing, sys.argv
    def count(proxy, ready, gone):
        ready.put(1)
        gone.get()
        return len(proxy)
    with open(os.path.join(os.path.dirname(__file__), "early.py"), "w") as file:
        file.write("from multiprocessing import get_context\\nlock = get_context('spawn').Lock()\\n")
    def make():
        shared = SharedMemory(create=True, size=8)
        shared.close()
        return shared.name
    if __name__ == "__main__":
        [name] = run(make, nprocs=1, preload=["early"])  # which has started a tracker
        shared = SharedMemory(name=name)
        assert shared.size >= 8
        shared.close()
        shared.unlink()
        with warm(preload=["__main__"]):
            found = run(work, Thing(), nprocs=3) + run(work, Thing(), nprocs=3)
        importers, pids, alike, argvs = zip(*found)
        assert len({*importers}) == 1 and len({*pids}) == 6 and importers[0] != made
        assert all(alike) and all(argv == sys.argv for argv in argvs)
        with multiprocessing.get_context("spawn").Manager() as manager:
            ready, gone = manager.Queue(), manager.Queue()
            group = start_processes("g", count, (manager.list([1, 2]), ready, gone), nprocs=1, start_method=METHOD)
            ready.get()
            group.args, group.entrypoint = {}, None  # what the launcher has of them
            gone.put(1)
            with group:
                assert group.wait().return_values == {0: 2}
    """),
    "a fork does not wait for the tracker's lock, which a thread of the launcher's holds": (("fork",), """
    import multiprocessing.resource_tracker, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, a fork warns of threads
    def work():
        multiprocessing.resource_tracker.ensure_running()
        return multiprocessing.resource_tracker._resource_tracker._pid
    if __name__ == "__main__":
        import threading
        held, over = threading.Event(), threading.Event()
        def hold():
            with multiprocessing.resource_tracker._resource_tracker._lock:
                held.set()
                over.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        with start_processes("workers", work, nprocs=1, start_method=METHOD) as group:
            threading.Timer(0.5, over.set).start()
            assert group.wait(20).return_values == {0: None}
        thread.join()
    """),
}  # fmt: skip


@pytest.mark.parametrize("name, method", [(name, each) for name, (methods, _) in PROGRAMS.items() for each in methods])
def test_a_program_finds_its_workers_as_it_should(name: str, method: str, tmp_path: Path) -> None:
    text = PROGRAMS[name][1].rstrip() + '\n        print("done")\n'
    assert run_main(tmp_path, text, method) == "done\n"


# --- the main module, run again


@each_method
def test_the_logger_of_multiprocessing_says_everything_once(method: str, tmp_path: Path) -> None:
    text = """
    import multiprocessing
    def work():
        multiprocessing.get_logger().info("hello")
    if __name__ == "__main__":
        multiprocessing.log_to_stderr(20)
        run(work, nprocs=1)
    """
    done = try_main(tmp_path, text, method)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if "ForkServer" in line or KINDS[method] in line] == [
        f"[INFO/{KINDS[method]}-1] hello",
        f"[INFO/{KINDS[method]}-1] process shutting down",
    ]


@pytest.mark.parametrize("name", ["process", "resource_tracker"])
def test_a_group_starts_while_multiprocessing_is_loaded(name: str, tmp_path: Path) -> None:
    text = """
    import importlib, importlib.machinery, threading, time
    NAME = "multiprocessing." + sys.argv[2]
    begun = threading.Event()
    class Slow(importlib.machinery.SourceFileLoader):
        def exec_module(self, module):
            begun.set()
            time.sleep(0.5)  # the module is there, and empty
            super().exec_module(module)
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == NAME:
                spec = importlib.machinery.PathFinder.find_spec(name, path)
                spec.loader = Slow(name, spec.origin)
                return spec
    def work():
        import multiprocessing
        from multiprocessing.shared_memory import SharedMemory
        segment = SharedMemory(create=True, size=8)
        segment.close()
        segment.unlink()
        return multiprocessing.current_process()._identity
    if __name__ == "__main__":
        sys.meta_path.insert(0, Finder())
        thread = threading.Thread(target=importlib.import_module, args=(NAME,))
        thread.start()
        begun.wait()
        print(run(work))
        thread.join()
    """
    for method in ("fork", "spawn"):
        done = try_main(tmp_path, text, method, name)
        assert done.stdout == "[(1,), (2,)]\n", done.stderr


def test_a_daemon_may_have_no_children(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(mp.ProcessRaisedException, match="daemonic processes are not allowed to have children"):
        mp.spawn(workers.start_a_process, nprocs=1, join=False, daemon=True).join()
    assert "daemonic" not in capfd.readouterr().out


@each_method
@pytest.mark.parametrize("what", ["os.geteuid() or os.chroot(sys.argv[2]); sys.path.clear()", "use_up()"])
def test_what_the_end_needs_is_there_before_the_function(method: str, what: str, tmp_path: Path) -> None:
    text = f"""
    import atexit, os
    KEPT = []
    def use_up():
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True: KEPT.append(os.dup(1))
        except OSError:
            pass
    def work(_rank=0):
        atexit.register(os.write, 1, b"exit handler;")
        {what}
        return 42
    if __name__ == "__main__":
        if "use_up" in {what!r}:
            mp.start_processes(work, nprocs=1, start_method=METHOD)
        else:
            assert run(work, nprocs=1) == [42]
    """
    assert run_main(tmp_path, text, method, str(tmp_path)) == "exit handler;"


@each_method
def test_who_leaves_while_the_value_is_pickled_has_left(method: str, tmp_path: Path) -> None:
    text = """
    class Leaves:
        def __init__(self, error): self.error = error
        def __reduce__(self): raise self.error
    def work(error): return Leaves(error)
    if __name__ == "__main__":
        for error in (SystemExit(5), SystemExit(0), KeyboardInterrupt()):
            with start_processes("workers", work, (error,), nprocs=1, start_method=METHOD) as group:
                result = group.wait()
            print(result.outcomes[0].exitcode, result.outcomes[0].state, result.return_values)
    """
    seen = run_main(tmp_path, text, method, failures=2).splitlines()
    assert seen == ["5 failed {}", "0 succeeded {0: None}", "-2 failed {}"]


@each_method
def test_an_interrupt_ends_the_groups_of_a_worker_at_once(method: str, ready: Ready, tmp_path: Path) -> None:
    """As it does those of the program: they have not been joined."""
    text = f"""
    import os, signal, time
    def inner(_rank):
        {ready.python()}
        signal.pause()
    def outer():
        mp.spawn(inner, nprocs=1, join=False, start_method=METHOD)
        while True:
            time.sleep(0.1)
    if __name__ == "__main__":
        with start_processes("workers", outer, (), nprocs=1, start_method=METHOD) as group:
            with open(sys.argv[2]) as fifo:
                fifo.read()
            os.kill(group.pids()[0], signal.SIGINT)
            print(group.wait().outcomes[0].exitcode)
    """
    os.mkfifo(tmp_path / "go")
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(run_main, tmp_path, text, method, str(tmp_path / "go"), failures=1)
        [pid] = ready.pids()
        (tmp_path / "go").write_text("go")
        assert told.result(TIMEOUT) == "-2\n"
        assert wait_gone([pid]) == set()


# --- without the guard


@pytest.mark.parametrize("way, method", [("start_processes", "spawn"), ("spawn", "forkserver"), ("warm", "forkserver")])
def test_a_script_without_the_guard_is_told_the_two_lines(method: str, way: str, tmp_path: Path) -> None:
    line = {
        "start_processes": "result = run(work)",
        "spawn": "mp.spawn(work, nprocs=2, start_method=METHOD)",
        "warm": "run(work, preload=['__main__'])",
    }[way]
    text = f"print('top')\ndef work(*_):\n    print('called')\n{line}\n"
    done = try_main(tmp_path, text, method)
    assert done.returncode == 1
    number = (HEAD + text).splitlines().index(line) + 1
    assert f"script.py, line {number}, starts processes whenever the file is run" in done.stderr
    guard = f'    if __name__ == "__main__":\n        {line}\n'
    assert guard in done.stderr
    assert done.stdout.count("top") <= 3  # the program, and each worker once
    assert "called" not in done.stdout


@each_method
def test_a_frame_without_a_loader_has_its_lines(method: str, tmp_path: Path) -> None:
    """Also where warnings are errors: Python 3.15 warns of such a frame."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text('raise ValueError("in the plugin")\n')
    (tmp_path / "preloaded.py").write_text(f"import runpy\nrunpy.run_path({str(plugin)!r})\n")
    text = f"""
    import runpy
    def work(): runpy.run_path({str(plugin)!r})
    if __name__ == "__main__":
        more = {{"preload": ["preloaded"]}} if METHOD == "forkserver" else {{}}
        for options in ({{}}, more):
            try:
                run(work, **options)
            except Exception as error:
                print(error)
    """
    done = try_main(tmp_path, text, method)
    assert done.stdout.count('    raise ValueError("in the plugin")\n') == 2, done


@pytest.mark.parametrize("way, warm", [("process", False), ("process", True), ("pool", True), ("executor", False)])
def test_children_of_multiprocessing_need_the_guard(way: str, warm: bool, tmp_path: Path) -> None:
    """Also in the process that preloads it: a pool there would start children that fail for ever."""
    line = {
        "process": "context.Process(target=work).start()",
        "pool": "context.Pool(1)",
        "executor": "concurrent.futures.ProcessPoolExecutor(1, mp_context=context).submit(work)",
    }[way]
    text = f"""
    import concurrent.futures, multiprocessing
    context = multiprocessing.get_context("spawn")
    def work(): return 1
    if __name__ == "__mp_main__":
        {line}
    if __name__ == "__main__":
        try:
            run(work, **({{"preload": ["__main__"]}} if "warm" in sys.argv else {{}}))
        except Exception as error:
            print(error)
    """
    done = try_main(tmp_path, text, "forkserver", *["warm"] * warm)
    assert "UnguardedMainError" in done.stdout
    assert "starts processes whenever the file is run" in done.stdout
    assert line in done.stdout
    assert "freeze_support" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "name, head",
    [
        ("a folder of \u00fcmlauts/train.py", b""),
        ("raw\udcff/train.py", b"\xef\xbb\xbf"),
        ("train", b"# -*- coding: latin-1 -*-\r\nWORD = '\xe9'\r\n"),
        ("train.pyc", b""),
        ("link.py", b"\r\n"),
    ],
)
def test_a_script_of_any_name_and_encoding_is_run_again(name: str, head: bytes, tmp_path: Path) -> None:
    import py_compile

    text = HEAD + dedent(
        """
        def work(): return __name__, ascii(__file__), sys.argv[1:], sys.path[0], ascii(globals().get("WORD"))
        if __name__ == "__main__":
            for options in ({}, {"preload": ["__main__"]})[: 1 + (METHOD == "forkserver")]:
                told = run(work, nprocs=1, **options)[0]
                print(told[:1], told[1] == ascii(__file__), told[2], told[3] == sys.path[0], told[4])
        """
    )
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(head + text.encode())
    if path.suffix == ".pyc":
        source = path.rename(tmp_path / "source.py")
        py_compile.compile(str(source), str(path))
    elif path.name == "link.py":
        path.symlink_to(path.rename(tmp_path / "source.py"))
    done = launch(tmp_path, [name], "forkserver", "more")
    word = ascii("\u00e9" if b"latin" in head else None)
    line = f"('__mp_main__',) True ['forkserver', 'more'] True {word}\n"
    assert (done.stdout, done.stderr) == (line * 2, "")


@pytest.mark.parametrize(
    "host", ["pdb -c c -c q", "cProfile -o /dev/null", "trace --count -C . --ignore-dir=/", "runpy"]
)
def test_a_script_in_a_host(host: str, tmp_path: Path) -> None:
    """Some have it for main module, and some run it beside their own: what it defines goes by value then."""
    text = """
    class Thing: pass
    def work(thing): return type(thing) is Thing, Thing()
    if __name__ == "__main__":
        told, thing = run(work, Thing(), nprocs=1)[0]
        print("told", told, type(thing) is Thing)
    """
    (tmp_path / "script.py").write_text(HEAD + dedent(text))
    words = ["-m", *host.split(), "script.py"]
    if host == "runpy":
        words = ["-c", "import runpy; runpy.run_path('script.py', run_name='__main__')"]
    done = launch(tmp_path, words, "spawn" if host == "runpy" else "forkserver")
    assert "told True True" in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize("method, how", [("spawn", "-c"), ("forkserver", "stdin"), ("spawn", "a pipe")])
def test_a_program_that_is_no_file_goes_by_value(method: str, how: str, tmp_path: Path) -> None:
    text = HEAD + "def work(n): return n + 1, __name__\nprint(run(work, 1, nprocs=1))\n"
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    words = {"-c": ["-c", text], "stdin": ["-"], "a pipe": [f"/dev/fd/{reader}"]}[how]
    try:
        done = launch(tmp_path, words, method, input=text if how == "stdin" else "", pass_fds=[reader])
    finally:
        os.close(reader)
    assert (done.stdout, done.stderr) == ("[(2, '__main__')]\n", "")


@each_sent
def test_a_module_that_is_run_by_its_name(method: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("VALUE = 7\n")
    text = HEAD + "from .data import VALUE\ndef work(): return VALUE, __name__, __package__, __spec__.name\n"
    text += 'if __name__ == "__main__": print(run(work, nprocs=1))\n'
    (package / "train.py").write_text(text)
    (package / "__main__.py").write_text(text.replace("__spec__.name", "0"))
    for name, told in (
        ("package.train", "[(7, '__mp_main__', 'package', 'package.train')]\n"),
        ("package", "[(7, '__main__', 'package', 0)]\n"),  # which is a program without a guard: by value
    ):
        done = launch(tmp_path, ["-m", name], method)
        assert (done.stdout, done.stderr) == (told, "")


@each_sent
def test_a_modules_folder_is_known_after_a_chdir(method: str, tmp_path: Path) -> None:
    """Of ``-c`` and a prompt: the first entry of `sys.path` is the working directory, whichever that is."""
    folder = tmp_path / "in"
    (folder / "out").mkdir(parents=True)
    (folder / "mine.py").write_text("def work(): return 7")
    text = "import os, sys\nos.chdir('in')\n" + HEAD + "import mine\nos.chdir('out')\nprint(run(mine.work, nprocs=1))"
    done = launch(tmp_path, ["-c", text], method)
    assert (done.stdout, done.stderr) == ("[7]\n", "")


EXPLAINED: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "it exits when it is run again": (
        """
        def work(): return 1
        def main():
            print(run(work))
            return 0
        if __name__ != "__main__":
            sys.exit(0)
        sys.exit(main())
        """,
        (r"exits \(SystemExit\(0\)\) whenever the file is run", "UnguardedMainError"),
        (r"^\[1",),
    ),
    "the function is defined below the guard": (
        """
        if __name__ == "__main__":
            def work(): return 1
            print(run(work, main="value"))
            run(work)
        """,
        (r"^\[1, 1\]$", NO_WORK, 'not below `if __name__ == "__main__":`', 'main="value"'),
        (),
    ),
    "it raises at its top": (
        """
        if __name__ == "__mp_main__":
            raise ValueError("no data here")
        def work(): return 1
        if __name__ == "__main__":
            for options in ({}, {"preload": ["__main__"]})[: 1 + (METHOD == "forkserver")]:
                try:
                    run(work, **options)
                except Exception as error:
                    print(error)
                else:
                    print("no error")
        """,
        (r'raise ValueError\("no data here"\)', r"A worker runs \S+/script.py again, as __mp_main__\."),
        ("_engine", "unpickled", "no error"),
    ),
    "it is another file than the one that was started": (
        """
        def work(i): return 1
        if __name__ == "__main__":
            with open(__file__, encoding="utf-8") as file:
                source = file.read()
            for changed in ("def (", source.replace("def work", "def other")):
                with open(__file__, "w", encoding="utf-8") as file:
                    file.write(changed)
                try:
                    mp.spawn(work, nprocs=3, start_method=METHOD)
                except mp.ProcessRaisedException as error:
                    print(error, *getattr(error, "__notes__", ()))
        """,
        ("SyntaxError: invalid syntax", NO_WORK),
        ("_engine",),
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_why_a_script_cannot_be_run_again_is_explained(name: str, tmp_path: Path) -> None:
    text, told, untold = EXPLAINED[name]
    method = "forkserver" if "raises" in name else "spawn"
    done = try_main(tmp_path, text, method)
    output = done.stdout if "_engine" in untold else done.stdout + done.stderr
    assert (done.returncode == 1) == (not done.stdout or "below" in name)
    times = 2 if method == "forkserver" else 1
    for pattern in told:
        assert len(re.findall(pattern, output, re.MULTILINE)) >= times, output
    for pattern in untold:
        assert not re.search(pattern, output, re.MULTILINE), output


# --- warm


def test_a_main_module_without_a_file_is_not_preloaded() -> None:
    code = (
        "from phalanx.multiprocessing import warm\n"
        "try: warm(preload=['__main__'])\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("preload: __main__ cannot be run again")


# --- what comes back, and what goes there


@each_method
def test_connections_and_sockets_come_back(method: str) -> None:
    with start_processes("c", workers.make_connections, (), nprocs=2, start_method=method) as group:
        result = group.wait()
    assert result.succeeded, result.root_cause
    for rank, (end, sock) in result.return_values.items():
        assert end.recv() == ("a connection", os.getpid() != group.pids()[rank])
        assert sock.recv(100) == b"a socket"
        end.close()
        sock.close()


@each_method
def test_descriptors_that_nobody_asks_for_are_closed(method: str) -> None:
    with start_processes("c", workers.make_connections, (), nprocs=2, start_method=method) as group:
        for worker in supervisor_of(group).mirror.workers.values():
            worker.ended.wait(TIMEOUT)


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    text = """
    import threading
    lock = threading.Lock()
    class Good:
        def method(self):
            return lock
    def work(*values):
        return {"good": Good(), "method": Good().method, "bad": lock}
    if __name__ == "__main__":
        try:
            run(work, Good(), {"good": Good(), "bad": lock})
        except TypeError as error:
            print(error)
        with start_processes("workers", work, (), nprocs=1, start_method=METHOD) as group:
            print(group.wait().root_cause.message)
    """
    sent, returned = run_main(tmp_path, text, "spawn", failures=1).splitlines()
    assert sent.startswith("item 'bad' of argument 1 of rank 0 (_thread.lock) cannot be sent to a worker")
    assert "item 'bad' of the return value (_thread.lock) cannot be pickled" in returned


class Asking:
    """Starts a group, and waits for it, where it is unpickled."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __setstate__(self, state: dict[str, int]) -> None:
        self.pid = state["pid"]
        if os.getpid() == self.pid:
            with start_processes("inner", workers.make_connections, (), nprocs=1) as group:
                result = group.wait()
            self.found = result.return_values[0]


def ask_and_connect(pid: int) -> list[Any]:
    return [Asking(pid), *workers.make_connections()]


def test_a_value_may_wait_for_a_group_when_unpickled() -> None:
    with start_processes("outer", ask_and_connect, (os.getpid(),), nprocs=1) as group:
        result = group.wait()
    assert result.succeeded, result.root_cause
    asking, *outer = result.return_values[0]
    for end, sock in (asking.found, outer):
        assert sock.recv(100) == b"a socket"
        end.close()
        sock.close()


def test_descriptors_of_a_failed_worker_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with start_processes("f", connections_and_fail, (), nprocs=2, start_method="spawn") as group:
        result = group.wait()
        assert result.is_failed()
    assert len(os.listdir("/proc/self/fd")) < before + 20


def connections_and_fail() -> list[Any]:
    import atexit
    from multiprocessing import Pipe

    atexit.register(os._exit, 3)
    return [end for _ in range(50) for end in Pipe()]


@each_sent
def test_locks_and_queues_do_not_come_back(method: str) -> None:
    """They are the launcher's only as long as who has made them lives; `multiprocessing` refuses them as well."""
    with start_processes("c", workers.make_a_queue, (), nprocs=1, start_method=method) as group:
        result = group.wait()
    assert result.root_cause is not None
    assert "only be shared between processes through inheritance" in result.root_cause.message


def test_too_many_descriptors_are_refused() -> None:
    with start_processes("c", workers.make_pipes, (101,), nprocs=1) as group:
        result = group.wait()
    assert result.root_cause is not None
    assert "it holds 202 descriptors; at most 200" in result.root_cause.message


@each_method
def test_a_launcher_that_ends_gives_its_resource_tracker(method: str, tmp_path: Path) -> None:
    """From Python 3.12 on, it can have no thread by then."""
    text = """
    from multiprocessing.shared_memory import SharedMemory
    def work(rank, path, kept):
        if rank == 0:
            shared = SharedMemory(create=True, size=8)
            shared.buf[0] = 7
            shared.close()
            kept.put(shared.name)
        else:
            name = kept.get()
            with open(path) as fifo:  # rank 0 has ended
                fifo.read()
            shared = SharedMemory(name=name)
            print("sees", shared.buf[0], flush=True)
            shared.close()
            shared.unlink()
    if __name__ == "__main__":
        import atexit, os
        from multiprocessing import get_context
        os.mkfifo(sys.argv[2])
        queue = get_context("spawn" if METHOD != "fork" else "fork").SimpleQueue()
        context = mp.spawn(work, (sys.argv[2], queue), nprocs=2, join=False, start_method=METHOD)
        def go():
            with open(sys.argv[2], "w"):
                context.processes[0].join(20)
        import threading
        thread = threading.Thread(target=go)
        thread.start()
    """
    assert run_main(tmp_path, text, method, str(tmp_path / "fifo")) == "sees 7\n"


def test_a_worker_that_asks_for_the_resource_tracker_and_is_gone(tmp_path: Path) -> None:
    """The launcher listens to the others still, and lives on where a broken pipe is fatal."""
    text = """
    import os, signal, time
    def work(index):
        gone = sys.argv[2] + "/gone"
        if index == 0:
            from phalanx._engine import worker_messages
            from phalanx._engine.worker import mp_child
            worker_messages.send = lambda *arguments, send=worker_messages.send: (send(*arguments), os._exit(0))
            open(gone, "w").close()
            mp_child._this_child.ask()
        while not os.path.exists(gone):
            time.sleep(0.01)
        time.sleep(0.5)  # in which the launcher answers
        return b"x" * 15_000
    if __name__ == "__main__":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with start_processes("m", work, {rank: (rank,) for rank in range(8)}, start_method=METHOD) as group:
            result = group.wait(40)
        print({rank: len(value or b"") for rank, value in result.return_values.items()})
    """
    told = {0: 0} | dict.fromkeys(range(1, 8), 15_000)
    assert run_main(tmp_path, text, "fork", str(tmp_path)) == f"{told}\n"


def test_a_worker_whose_socket_has_been_closed_asks_nobody() -> None:
    """Its number may be that of a socket of the user's by now."""
    theirs, ours = channels.pair()
    asker = mp_child.Child(ChildIdentities("spawn", [0]).state(0), 0, ours.fileno(), forked=False)
    user, other = socket.socketpair()
    with user, other:
        os.dup2(user.fileno(), ours.fileno())
        before = os.listdir("/proc/self/fd")
        assert asker.ask() is None
        assert os.listdir("/proc/self/fd") == before
        assert user.getblocking()
        assert os.get_blocking(user.fileno())
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
    theirs.close()
    ours.close()


@each_method
def test_a_fork_server_of_a_worker_is_not_left_behind(method: str) -> None:
    with start_processes("s", workers.use_a_fork_server, (), nprocs=2, start_method=method) as group:
        result = group.wait()
    assert result.succeeded, result.root_cause
    assert result.leftovers == ()
