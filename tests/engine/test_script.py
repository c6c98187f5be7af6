"""A script that `phalanx run` starts cannot tell itself from one that python starts; what it leaves when it fails.

Each script runs twice, as `python -u SCRIPT` and as a worker, and must print the same bytes and end the same way. The
one difference that is meant: `sys.orig_argv` names the file that leaves the evidence.
"""

from __future__ import annotations

import functools
import json
import os
import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from phalanx._engine.worker import script as script_module
from tests.support.helpers import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


pytestmark = pytest.mark.each_python

LIMIT = 60.0
OURS = os.path.dirname(script_module.__file__)


class Ended(NamedTuple):
    """What a program printed, and how it ended; of a worker, the error file as well."""

    status: int
    out: str
    err: str
    error: dict[str, Any] | None = None
    report: str = ""

    @property
    def message(self) -> str:
        assert self.error is not None, self
        return str(self.error["message"]["message"])

    @property
    def stack(self) -> str:
        assert self.error is not None, self
        return str(self.error["message"]["extraInfo"]["py_callstack"])


class House:
    """A folder with scripts, and the two ways to run them."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder = folder
        self._logs = logs
        self.env: dict[str, str] = dict(os.environ)
        self.cwd = folder
        self.python = sys.executable

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    def plainly(self, *argv: object) -> Ended:
        """Run `python -u ARGV`."""
        done = self._run(self.python, "-u", *argv)
        status = 128 - done.returncode if done.returncode < 0 else done.returncode
        return Ended(status, _text(done.stdout), _text(done.stderr))

    def as_worker(self, *argv: object, launcher: tuple[str, ...] = ()) -> Ended:
        """Run `phalanx run ARGV`."""
        logs = self._logs / str(len(list(self._logs.iterdir())))
        done = self._run(sys.executable, *launcher, "-m", "phalanx", "run", "-r", 3, "--log-dir", logs, *argv)
        assert done.stdout == b""
        ranks = [*logs.glob("*/attempt_0/0")]
        assert len(ranks) == 1, done
        rank = ranks[0]
        error = rank / "error.json"
        found = json.loads(error.read_bytes()) if error.exists() else None
        # No stacks: nobody has asked for them.
        assert {path.name for path in rank.iterdir()} <= {"stdout.log", "stderr.log", "error.json", "error.json.fatal"}
        out, err = (_text((rank / name).read_bytes()) for name in ("stdout.log", "stderr.log"))
        return Ended(done.returncode, out, err, found, _text(done.stderr))

    def alike(self, *argv: object) -> Ended:
        """Run both ways, demand the same, and return what the worker did."""
        plain, worker = self.plainly(*argv), self.as_worker(*argv)
        assert worker.status == plain.status
        assert _same(worker.out) == _same(plain.out)
        assert _same(worker.err) == _same(plain.err)
        return worker

    def _run(self, *argv: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(arg) for arg in argv],
            cwd=self.cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT,
            check=False,
        )


def _same(text: str) -> str:
    """Without what differs from run to run, and without how deep a recursion goes: two frames of ours lie below."""
    return re.sub(r"repeated \d+ more", "repeated … more", re.sub(r"\b0x[0-9a-f]{6,}", "0x…", text))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


class WarmHouse(House):
    """Runs its workers as forks of a process that has a module more."""

    preload = "json"

    def as_worker(self, *argv: object, launcher: tuple[str, ...] = ()) -> Ended:
        """Run `phalanx run --preload MODULE ARGV`."""
        return super().as_worker("--preload", self.preload, *argv, launcher=launcher)


@pytest.fixture
def house(request: pytest.FixtureRequest, tmp_path: Path, logs: Path) -> House:
    folder = tmp_path / "work"
    folder.mkdir()
    return getattr(request, "param", House)(folder, logs)


DIFFERENT = {
    "modules of its own that are called like ours",  # ours are loaded, and are part of a package all the same
    "warnings with their places",  # the one above the top names a frame of the keeper's
}
"""What the frames below a fork, and the modules that it has, make of a script that looks for them."""

SLOW = {
    *("an exception of the asyncio loop", "a long text", "exit with an object", "exit by number beyond a byte"),
    *("exit by negative number", "a group of exceptions", "an exception with notes", "an indentation", "SIGFPE"),
    *("an exception in code without a file", "output that is no text", "SIGBUS", "SIGILL"),
}
"""Cases that differ from their neighbours in nothing that the start of a worker has to do with."""


def cold_and_warm(name: str, values: Iterable[Any], **options: Any) -> pytest.MarkDecorator:
    """Run a test with each value in both kinds of houses."""
    pairs: list[Any] = [(House, value) for value in values]
    pairs += [
        pytest.param(WarmHouse, value, marks=pytest.mark.long)
        for value in values
        if callable(value) or str(value) not in DIFFERENT | SLOW
    ]
    return pytest.mark.parametrize(f"house, {name}", pairs, indirect=["house"], **options)


# --- what a program finds

FACTS = '''\
"""The docstring."""
import sys
main = sys.modules["__main__"]
number: int = 1
names = "__name__ __file__ __doc__ __package__ __cached__ __annotations__".split()
if sys.version_info >= (3, 14):
    names.remove("__annotations__")  # a function from then on
for name in names:
    print(name, repr(getattr(main, name, "absent")))
print(sorted(set(vars(main))))
print(main.__dict__ is globals(), type(__builtins__), __builtins__ is sys.modules["builtins"])
print(__loader__ if isinstance(__loader__, type) else type(__loader__), getattr(__loader__, "path", None))
print(__loader__.get_source("__main__" if __spec__ is None else __spec__.name) if ".pyc" not in __file__ else "")
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached, __spec__.loader is __loader__))
print(sys.argv, sys.path, sys.flags, sys.warnoptions, sys._xoptions)
print(sys.executable, sys.prefix, sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.encoding, sys.stderr.errors)
print(__import__("os").getcwd(), __import__("linecache").getlines(__file__, globals())[:1])
print(sys.exc_info(), sys.gettrace(), sys.getprofile())
if __name__ == "__main__":
    print("guarded")
'''


def in_the_folder(house: House) -> list[object]:
    return [house.write("script.py", FACTS).name]


def by_absolute_path(house: House) -> list[object]:
    return [house.write("elsewhere/script.py", FACTS)]


def by_relative_path(house: House) -> list[object]:
    house.write("elsewhere/script.py", FACTS)
    house.cwd = house.folder / "here"
    house.cwd.mkdir()
    return ["../elsewhere/./script.py"]


def by_symlink(house: House) -> list[object]:
    (house.folder / "link.py").symlink_to(house.write("elsewhere/script.py", FACTS))
    return ["link.py"]


def without_suffix(house: House) -> list[object]:
    return [house.write("elsewhere/script", FACTS)]


def as_folder(house: House) -> list[object]:
    house.write("program/__main__.py", FACTS)
    return ["program"]


def as_zip(house: House) -> list[object]:
    with zipfile.ZipFile(house.folder / "program.zip", "w") as file:
        file.writestr("__main__.py", FACTS)
    return ["program.zip"]


def as_zipapp(house: House) -> list[object]:
    path = as_zip(house)[0]
    target = house.folder / "program.pyz"
    target.write_bytes(b"#!/usr/bin/env python3\n" + (house.folder / str(path)).read_bytes())
    return ["program.pyz"]


def compiled(house: House) -> list[object]:
    py_compile.compile(str(house.write("script.py", FACTS)), cfile=str(house.folder / "compiled.pyc"))
    return ["compiled.pyc"]


def as_module(house: House) -> list[object]:
    house.write("package/__init__.py", "import sys; print('package', sys.argv, sys.path[0])")
    house.write("package/module.py", FACTS)
    return ["-m", "package.module"]


def as_lone_module(house: House) -> list[object]:
    house.write("alone.py", FACTS)
    return ["-m", "alone"]


def as_package(house: House) -> list[object]:
    house.write("package/__init__.py", "")
    house.write("package/__main__.py", FACTS)
    return ["-m", "package"]


@pytest.mark.slow
@cold_and_warm(
    "given",
    [in_the_folder, by_absolute_path, by_relative_path, by_symlink, without_suffix, as_folder, as_zip, as_zipapp,
     compiled, as_module, as_lone_module, as_package],
    ids=lambda given: given.__name__,
)  # fmt: skip
def test_a_script_finds_what_python_gives_it(house: House, given: Callable[[House], list[object]]) -> None:
    worker = house.alike(*given(house), "--lr", "0.1", "", "-m", "two words", "--nproc-per-node=7")
    assert worker.status == 0, worker.err
    assert "guarded" in worker.out
    assert worker.error is None


@pytest.mark.long
@pytest.mark.parametrize("house", [House, WarmHouse], indirect=True)
def test_the_scripts_folder_is_off_the_path_if_unwanted(house: House) -> None:
    house.env["PYTHONSAFEPATH"] = "1"
    house.write("neighbour.py", "print('must not be found')")
    for argv in (["script.py"], ["-m", "script"]):
        house.write("script.py", FACTS + "import neighbour\n")
        house.env["PYTHONPATH"] = str(house.folder) if argv[0] == "-m" else ""
        house.alike(*argv)


# --- what a program does

PLAIN = {
    "modules of its own that are called like ours": """
        import describe, recording, linux, errors, worker, files, sys
        print(describe.mine, recording.mine, linux.mine, errors.mine, worker.mine, files.mine)
        assert not [name for name in sys.modules if name.startswith("phalanx")]
        """,
    "warnings with their places": """
        import warnings, sys
        def f(): warnings.warn("deprecated thing", DeprecationWarning, stacklevel=2)
        f()
        warnings.warn("here")
        warnings.warn("above the top", stacklevel=9)
        print(b"" is 1 if False else "")
        """,
    "annotations, stack, descriptors, signals, pickles, globals and recursion": """
        def f(x: int) -> list[str]: ...
        print(f.__annotations__, f.__code__.co_flags, eval("lambda: 0").__code__.co_flags)
        import sys, traceback
        def f(): return [frame.name for frame in traceback.extract_stack()][-2:]
        print(f())
        import os; print('first', end=''); os.write(1, b'second'); print('third')
        import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd') if int(fd) < 3))
        import signal
        print([(number, signal.getsignal(number)) for number in sorted(signal.valid_signals())])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        import pickle, sys
        class Thing:
            def __reduce__(self): return (make, ())
        def make(): return "made again"
        class Plain: pass
        print(pickle.loads(pickle.dumps(Thing())), type(pickle.loads(pickle.dumps(Plain()))) is Plain, Plain.__module__)
        import other
        print(other.main_is(globals()))
        def f(n): return n and 1 + f(n - 1)
        print(f(900))
        """,
    "annotations from the future, typing and dataclasses that look themselves up": """
        from __future__ import annotations
        def f(x: Unknown) -> "Whatever": ...
        total: Nonsense = 1
        print(f.__annotations__, f.__code__.co_flags)
        import dataclasses, typing
        @dataclasses.dataclass
        class A: x: typing.ClassVar[int] = 1; y: A | None = None
        print(A(), typing.get_type_hints(A))
        """,
    "exit by number": "import sys; sys.exit(3)",
    "exit by number beyond a byte": "import sys; sys.exit(300)",
    "exit by negative number": "import sys; sys.exit(-1)",
    "exit with a text": "import sys; sys.exit('the text')",
    "exit with an object": "import sys; sys.exit([1, 2])",
    "exit with nothing": "import sys; print('a'); sys.exit()",
    "exit at once": "import os; print('a', end='', flush=True); os._exit(5)",
    "exit by abort": "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    "killed by itself": "import os; os.kill(os.getpid(), 9)",
    "exit handlers and threads": """
        import atexit, threading
        go = threading.Event()
        atexit.register(lambda: print("at exit", __name__, threading.active_count()))
        threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
        threading._register_atexit(go.set)
        print("end of main")
        """,
    "exit handlers and threads after an exception": """
        import atexit, sys, threading
        go = threading.Event()
        atexit.register(lambda: print("at exit", sys.last_type, sys.last_value))
        threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
        threading._register_atexit(go.set)
        raise ValueError("after which the rest still runs")
        """,
    "exception in a thread": """
        import threading
        def f(): raise ValueError("in the thread")
        thread = threading.Thread(target=f, name="T"); thread.start(); thread.join()
        print("main goes on")
        """,
    "exception in an exit handler": "import atexit; atexit.register(lambda: 1 / 0)",
    "output that is no text": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "closed streams": "import os; os.close(1); os.close(2)",
    "interrupted": "raise KeyboardInterrupt",
    "interrupted by a signal": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "interrupted and handled": """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT); signal.pause()
        except KeyboardInterrupt:
            print("saved"); raise SystemExit(9)
        """,
}
WANTED = {"exit by number", "exit with a text", "exit with nothing", "exit at once", "exception in a thread",
          "interrupted and handled"}  # fmt: skip
"""Ends that the script wants, which leave no evidence."""

NEIGHBOURS = {
    **{f"{name}.py": "mine = __name__" for name in ("describe", "recording", "linux", "errors", "worker", "files")},
    "other.py": "import __main__\ndef main_is(names): return __main__.__dict__ is names, bool(__main__.__file__)\n",
    "broken.py": "def f():\n    raise LookupError('in the module')\nf()\n",
    "misspelt.py": "def f(:\n",
}


def with_neighbours(house: House) -> None:
    for name, text in NEIGHBOURS.items():
        house.write(name, text)


@pytest.mark.slow
@cold_and_warm("name", PLAIN)
def test_a_script_does_what_it_does_under_python(house: House, name: str) -> None:
    with_neighbours(house)
    house.write("script.py", PLAIN[name])
    worker = house.alike("script.py")
    assert worker.error is None or name not in WANTED


FAILING = {
    "an exception": ("ValueError: no", "def f(): raise ValueError('no')\nf()"),
    "chained exceptions": ("KeyError: 'second'", """
        try:
            try: 1 / 0
            except ZeroDivisionError as error: raise ValueError("first") from error
        except ValueError: raise KeyError("second")
        """),
    "a mistake in the syntax": ("SyntaxError: ", "x = 1\ndef f(:\n    pass\n"),
    "an indentation": ("IndentationError: ", "if 1:\npass\n"),
    "a mistake in the syntax of a module": ("SyntaxError: ", "import misspelt"),
    "an exception in a module": ("LookupError: in the module", "import broken"),
    "a module that is missing": ("ModuleNotFoundError: No module named 'absent'", "import absent"),
    "a group of exceptions": ("ExceptionGroup: all (2 sub-exceptions)", """
        def f(): raise ValueError("one")
        errors = []
        for _ in range(2):
            try: f()
            except ValueError as error: errors.append(error)
        raise ExceptionGroup("all", errors)
        """),
    "an exception with notes": ("ValueError: no", """
        error = ValueError("no"); error.add_note("a note"); raise error
        """),
    "an exception that cannot be printed": ("Bad: <__str__ raised ZeroDivisionError>", """
        class Bad(Exception):
            def __str__(self): return 1 / 0
        raise Bad
        """),
    "an exception that is no Exception": ("Bad: no", "class Bad(BaseException): pass\nraise Bad('no')"),
    "endless recursion": ("RecursionError: ", "def f(): f()\nf()"),
    "an exception of the asyncio loop": ("ValueError: in a task", """
        import asyncio
        async def main(): raise ValueError("in a task")
        asyncio.run(main())
        """),
    "an exception in code without a file": ("ZeroDivisionError: ", "exec(compile('1 / 0', '<text>', 'exec'))"),
    "an exception under a hook": ("ValueError: no", """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hooked", kind, error, trace.tb_frame.f_code.co_name,
            trace.tb_next, sys.exc_info(), sys.last_type, sys.last_value, getattr(sys, "last_exc", 0))
        raise ValueError("no")
        """),
    "an exception under a hook that raises": ("ValueError: no", """
        import sys
        def hook(*details): raise KeyError("in the hook")
        sys.excepthook = hook
        raise ValueError("no")
        """),
    "an exception under a hook that exits": ("ValueError: no", """
        import sys
        sys.excepthook = lambda *details: sys.exit(7)
        raise ValueError("no")
        """),
    "an exception without a hook": ("ValueError: no", "import sys\ndel sys.excepthook\nraise ValueError('no')"),
    "a long text": ("ValueError: xxxx", "raise ValueError('x' * 3_000_000)"),
    "a lone surrogate": ("ValueError: \\ud800", "raise ValueError('\\ud800')"),
}  # fmt: skip


@pytest.mark.slow
@cold_and_warm("name", FAILING)
def test_a_script_fails_as_under_python_and_leaves_evidence(house: House, name: str) -> None:
    with_neighbours(house)
    message, text = FAILING[name]
    path = house.write("script.py", text)
    worker = house.alike("script.py")
    assert worker.status == (7 if "exits" in name else 1)
    assert worker.message.startswith(message)
    assert OURS not in worker.err
    assert OURS not in worker.stack
    if "syntax" not in name and "cannot be printed" not in name and "recursion" not in name:
        assert str(path) in worker.stack
    if not re.search("hook|long|recursion|asyncio|surrogate|cannot be printed|indentation", name):
        assert worker.stack == worker.err
    assert worker.message.split("\n")[0][:60] in worker.report
    assert worker.error is not None
    info = worker.error["message"]["extraInfo"]
    assert info["timestamp"].isdecimal()
    assert type(info["monotonic_ns"]) is int
    assert type(info["pid"]) is int


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["-m", "package.module"], ["program"], ["program.zip"]], ids=lambda argv: argv[-1])
def test_a_module_or_program_fails_as_under_python(house: House, argv: list[str]) -> None:
    text = "def f():\n    raise ValueError('no')\nf()\n"
    house.write("package/__init__.py", "")
    house.write("package/module.py", text)
    house.write("program/__main__.py", text)
    with zipfile.ZipFile(house.folder / "program.zip", "w") as file:
        file.writestr("__main__.py", text)
    plain, worker = house.plainly(*argv), house.as_worker(*argv)
    # Python itself shows two frames of runpy there, which help nobody.
    without = re.sub(r'  File "<frozen runpy>".*\n', "", plain.err)
    assert (worker.status, worker.out, worker.err) == (plain.status, plain.out, without)
    if argv != ["program.zip"]:  # whose source lines are in the error file, though only Python 3.13 prints them
        assert worker.stack == worker.err


@pytest.mark.slow
def test_a_script_that_clears_its_environment_leaves_evidence(house: House) -> None:
    house.write("script.py", "import os\nos.environ.clear()\nraise ValueError('after that')\n")
    assert house.alike("script.py").message == "ValueError: after that"


@pytest.mark.slow
@cold_and_warm(
    "argv",
    [["-m", "absent"], ["-m", "package.absent"], ["-m", "package"], ["-m", "absent.module"], ["-m", "broken"],
     ["-m", "misspelt"], ["-m", "package.parent"], ["-m", "..up"], ["empty.zip"]],
    ids=lambda value: value.__name__ if isinstance(value, type) else " ".join(value),
)  # fmt: skip
def test_a_module_that_cannot_be_run_is_told_as_python_tells_it(house: House, argv: list[str]) -> None:
    with_neighbours(house)
    house.write("package/__init__.py", "")
    house.write("package/parent/__init__.py", "import absent_too")
    with zipfile.ZipFile(house.folder / "empty.zip", "w") as file:
        file.writestr("other.py", "")
    plain, worker = house.plainly(*argv), house.as_worker(*argv)
    # Python shows its frames of runpy, and of the import system before the user's code.
    pattern = r'  File "<frozen (runpy|importlib\._bootstrap(_external)?)>".*\n'
    assert worker.status == plain.status == 1
    assert re.sub(pattern, "", worker.err) == re.sub(pattern, "", plain.err)
    assert OURS not in worker.err


@pytest.mark.long
def test_a_source_in_another_encoding(house: House) -> None:
    text = "# -*- coding: latin-1 -*-\nprint(len('äöü'), ascii('äöü'))\nraise ValueError('ü')\n"
    (house.folder / "script.py").write_bytes(text.encode("latin-1"))
    assert house.alike("script.py").message == "ValueError: ü"
    (house.folder / "script.py").write_bytes("print('ä')".encode("latin-1"))
    assert house.as_worker("script.py").message.startswith("SyntaxError: ")
    (house.folder / "script.py").write_bytes(b"x = 1\0")
    assert "null bytes" in house.as_worker("script.py").message
    (house.folder / "script.py").write_bytes(b"\xef\xbb\xbfprint('a mark in front')\r\nprint(2)\r\n")
    assert house.alike("script.py").out == "a mark in front\n2\n"


@pytest.mark.slow
def test_a_file_whose_name_is_no_text(house: House) -> None:
    name = os.fsdecode(b"script-\xff.py")
    (house.folder / name).write_text("import sys; print(ascii(sys.argv), ascii(__file__)); raise ValueError(__file__)")
    assert "\\udcff" in house.alike(name, os.fsdecode(b"\xfe")).message


def test_nothing_but_pythons_files_lies_beside_the_script(house: House) -> None:
    house.env.pop("PYTHONDONTWRITEBYTECODE", None)
    house.env.pop("PYTHONPYCACHEPREFIX", None)
    with_neighbours(house)
    house.write("script.py", "import other, describe")

    def files() -> list[Path]:
        return sorted(path for path in house.folder.rglob("*") if path.is_file())

    before = files()
    house.as_worker("script.py")
    new = set(files()) - set(before)
    tag = sys.implementation.cache_tag
    assert {path.name for path in new} == {f"other.{tag}.pyc", f"describe.{tag}.pyc"}


# --- the interpreter's options, and other interpreters


@pytest.mark.long
def test_workers_have_the_environment_and_not_pythons_options(house: House) -> None:
    house.write("script.py", "import sys; print(sys.flags.optimize, sys.warnoptions, sys._xoptions)")
    worker = house.as_worker("script.py", launcher=("-O", "-W", "error", "-X", "importtime=0", "-X", "dev"))
    assert worker.out == "0 [] {}\n"
    assert "Warning" not in worker.report
    house.env |= {"PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"}
    assert house.alike("script.py").out == "2 ['error'] {}\n"
    house.write("script.py", "import warnings; warnings.warn('an error now')")
    assert house.alike("script.py").message == "UserWarning: an error now"


@functools.cache
@pytest.mark.long
@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_another_interpreter_by_environment(house: House, version: str) -> None:
    path = interpreter(version)
    if path is None:
        pytest.skip(f"this machine has no Python {version}")
    house.python = house.env["PYTHON_EXEC"] = path
    house.write("script.py", FACTS)
    house.write("package/__init__.py", "")
    house.write("package/module.py", FACTS)
    house.alike("script.py", "a")
    house.alike("-m", "package.module", "a")
    house.write("script.py", "def f():\n    raise ValueError('no')\nf()\n")
    worker = house.alike("script.py")
    assert worker.message == "ValueError: no"
    assert worker.stack == worker.err


def test_an_interpreter_that_is_not_there(house: House) -> None:
    house.env["PYTHON_EXEC"] = "/nowhere/python"
    house.write("script.py", "")
    done = house._run(sys.executable, "-m", "phalanx", "run", "--log-dir", house.folder / "l", "script.py")
    assert done.returncode in (1, 2)
    assert b"/nowhere/python" in done.stderr
    assert b"Traceback" not in done.stderr


# --- processes of the script's own

WORKERS = """
    import multiprocessing, os, sys
    from concurrent.futures import ProcessPoolExecutor

    def fail(x):
        raise ValueError(x)

    def square(x):
        return x * x, __name__, sys.argv

    class Thing:
        def __init__(self, x): self.x = x
        def __call__(self, queue): queue.put((self.x, type(self).__module__))

    def say(*words):  # in one write: several processes speak at the same time
        sys.stdout.write(" ".join(map(str, words)) + "\\n")

    if __name__ == "__main__":
        say("main")
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(2) as pool:
            say(pool.map(square, range(3)))
            pool.close(); pool.join()
        queue = context.SimpleQueue()
        process = context.Process(target=Thing(7), args=(queue,))
        process.start()
        say(queue.get())
        process.join()
        say(process.exitcode)
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            say(list(executor.map(square, range(2))), repr(executor.submit(fail, 1).exception()))
    else:
        say("import as", __name__)
    """


@pytest.mark.long
@pytest.mark.parametrize("house", [House, WarmHouse], indirect=True)
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("argv", [["script.py"], ["-m", "package.script"]], ids=["script", "module"])
def test_multiprocessing_in_a_script(house: House, method: str, argv: list[str]) -> None:
    if isinstance(house, WarmHouse):
        house.preload = "numpy,multiprocessing.pool,concurrent.futures.process"
    house.write("script.py", WORKERS)
    house.write("package/__init__.py", "")
    house.write("package/script.py", WORKERS)
    worker = house.as_worker(*argv, method)
    assert worker.status == 0, worker.err
    plain = house.plainly(*argv, method)
    assert sorted(worker.out.splitlines()) == sorted(plain.out.splitlines())
    assert worker.err == plain.err
    assert "(7, '__m" in worker.out


@pytest.mark.long
def test_the_failure_of_a_child_is_not_the_scripts(house: House) -> None:
    house.write(
        "script.py",
        """
        import multiprocessing
        def bad(): raise ValueError("in the child")
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                process = multiprocessing.get_context(method).Process(target=bad)
                process.start(); process.join()
                print(process.exitcode)
        """,
    )
    worker = house.as_worker("script.py")
    assert worker.status == 0
    assert worker.out == "1\n1\n"
    assert worker.error is None


# --- evidence


FATAL = {
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "SIGABRT": "import os; os.abort()",
    "SIGFPE": "import os, signal; os.kill(os.getpid(), signal.SIGFPE)",
}


@pytest.mark.slow
@cold_and_warm("name", FATAL)
def test_a_fatal_signal_leaves_the_stack(house: House, name: str) -> None:
    no_core = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    path = house.write("script.py", f"{no_core}\ndef deep():\n    {FATAL[name]}\ndeep()\n")
    worker = house.alike("script.py")
    number = signal.Signals[name]
    assert worker.status == 128 + number
    assert re.fullmatch(rf"Signal {number} \({name}\) received by PID \d+", worker.message)
    assert f'File "{path}", line 3 in deep' in worker.stack
    if type(house) is House:
        assert f'File "{path}", line 4 in <module>' in worker.report
        assert OURS not in worker.stack


@pytest.mark.long
def test_a_scripts_own_faulthandler_writes_where_it_wants(house: House) -> None:
    house.write("script.py", "import faulthandler, os; faulthandler.enable(); os.abort()")
    worker = house.as_worker("script.py")
    assert worker.status == 128 + signal.SIGABRT
    assert "Fatal Python error: Aborted" in worker.err
    house.env["PYTHONFAULTHANDLER"] = "1"
    house.write("script.py", "import os; os.abort()")
    assert "Fatal Python error: Aborted" in house.as_worker("script.py").err


@pytest.mark.slow
def test_a_killed_script_leaves_no_error_file_and_is_reported(house: House) -> None:
    house.write("script.py", "import os; print('last words', file=__import__('sys').stderr); os.kill(os.getpid(), 9)")
    worker = house.as_worker("script.py")
    assert worker.status == 128 + signal.SIGKILL
    assert worker.error is None
    assert "last words" in worker.report
    assert "SIGKILL, not sent by us" in worker.report
