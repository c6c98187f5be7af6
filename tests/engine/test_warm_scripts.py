"""Scripts that start warm: what they rely on beyond the programs of `test_script`, and what is preloaded for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.engine.test_script import LIMIT, WarmHouse

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.long, pytest.mark.each_python]


@pytest.fixture
def house(tmp_path: Path, logs: Path) -> WarmHouse:
    folder = tmp_path / "work"
    folder.mkdir()
    return WarmHouse(folder, logs)


MORE = {
    "streams, limits, multiprocessing, logging, a child, and a thread that is a daemon": """
        import atexit, gc, logging, multiprocessing, os, subprocess, sys, threading
        print(sys.getrecursionlimit(), sys.getswitchinterval(), threading.stack_size())
        print(gc.isenabled(), gc.get_threshold())
        me = multiprocessing.current_process()
        print(me.name, me.daemon, multiprocessing.parent_process(), multiprocessing.active_children())
        print(me.pid == os.getpid(), multiprocessing.get_start_method(allow_none=True), type(me).__name__)
        os.environ["OF_MINE"] = "1"
        code = "import os; print(os.environ['OF_MINE'], os.environ['RANK'] if 'RANK' in os.environ else 0)"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        logging.basicConfig(stream=sys.stdout, level="INFO")
        atexit.register(logging.info, "at exit")
        logging.info("now")
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print(threading.active_count(), threading.main_thread() is threading.current_thread())
        for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__):
            print(stream, stream.name, stream.mode, stream.line_buffering, stream.write_through, stream.newlines,
                  stream.encoding, stream.errors, stream.buffer, stream.fileno(), stream.isatty())
        print(sys.stdout is sys.__stdout__, sys.stdin is sys.__stdin__)
        """,
    "a file that is not closed": """
        import os, sys
        file = open("left.txt", "w")
        file.write("all of it")
        class Last:
            def __del__(self, write=os.write): write(1, b"the last\\n")
        last = Last()
        """,
    "output of the C library": """
        import ctypes, sys
        libc = ctypes.CDLL(None)
        libc.printf(b"in C, without an end of line")
        sys.exit(4)
        """,
    "interrupted, with exit handlers, threads and files": """
        import atexit, os, signal, threading
        file = open("left.txt", "w")
        file.write("all of it")
        go = threading.Event()
        atexit.register(lambda: print("at exit", signal.getsignal(signal.SIGINT)))
        threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
        threading._register_atexit(go.set)
        raise KeyboardInterrupt
        """,
    "an exit that is a text, with exit handlers": """
        import atexit, sys
        atexit.register(print, "at exit")
        sys.exit("the text")
        """,
    "an exit handler that exits": "import atexit, sys; atexit.register(lambda: sys.exit(3))",
    "a fork of its own": """
        import os, sys
        if os.fork() == 0:
            print("child"); sys.exit(5)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    "the last exception of the interpreter": """
        import atexit, sys
        atexit.register(lambda: print(sys.last_value, hasattr(sys, "last_exc")))
        {}["missing"]
        """,
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_what_else_a_script_may_rely_on(house: WarmHouse, name: str) -> None:
    house.write("script.py", MORE[name])
    left = house.folder / "left.txt"
    house.alike("script.py")
    if "file" in name:
        assert left.read_text() == "all of it"
        left.unlink()
        house.as_worker("script.py")
        assert left.read_text() == "all of it"


def test_faulthandler_by_the_environment(house: WarmHouse) -> None:
    house.env["PYTHONFAULTHANDLER"] = "1"
    house.write("script.py", "import os; os.abort()")
    assert "Fatal Python error: Aborted" in house.as_worker("script.py").err


# --- what is preloaded


def test_a_module_beside_the_script_can_be_preloaded(house: WarmHouse) -> None:
    house.preload = "beside"
    house.write("elsewhere/beside.py", "import os; mine = os.getpid()")
    house.write("elsewhere/script.py", "import os, sys; print('beside' in sys.modules); import beside; "
                                       "print(beside.mine != os.getpid(), sys.path[0])")  # fmt: skip
    worker = house.as_worker("elsewhere/script.py")
    assert worker.out == f"True\nTrue {house.folder / 'elsewhere'}\n"
    house.write("beside.py", "import os; mine = os.getpid()")
    house.write("package/__init__.py", "")
    house.write("package/__main__.py", "import sys; print('beside' in sys.modules, sys.path[0])")
    assert house.as_worker("-m", "package").out == f"True {house.folder}\n"


@pytest.mark.parametrize("way", ["option", "environment"])
def test_every_worker_is_a_fork_of_one_import(house: WarmHouse, way: str) -> None:
    house.write("beside.py", "import os; open('imports', 'a').write('.')")
    house.write("script.py", "import beside, os; os.write(1, os.environ['RANK'].encode())")
    if way == "environment":
        house.env["PHALANX_PRELOAD"] = "json,beside"
    options = ["--preload", "json,beside"] if way == "option" else []
    done = run(house, "--nproc-per-node", 3, "-r", 0, *options, "script.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout) == ["0", "1", "2"]
    assert (house.folder / "imports").read_text() == "."


def run(house: WarmHouse, *argv: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "run", "--log-dir", str(house.folder / "l"), *map(str, argv)]
    return subprocess.run(command, cwd=house.folder, env={**house.env, **env}, stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, timeout=LIMIT, check=False)  # fmt: skip


def test_a_preload_that_fails_is_told_before_any_worker_starts(house: WarmHouse) -> None:
    house.write("script.py", "open('started', 'w')")
    path = house.write("broken.py", "def f():\n    raise ValueError('no')\nf()")
    done = run(house, "--preload", "json,broken", "script.py")
    assert done.returncode == 1
    shown = re.sub(r"\n +[~^]+(?=\n)", "", done.stderr.partition("Error: ")[2])  # Python 3.13 points at what failed
    assert shown == dedent(f"""\
        preload: 'broken' could not be imported

        Traceback (most recent call last):
          File "{path}", line 3, in <module>
            f()
          File "{path}", line 2, in f
            raise ValueError('no')
        ValueError: no
        """)
    assert not (house.folder / "started").exists()


def test_standard_descriptors_that_the_launcher_has_not(house: WarmHouse) -> None:
    house.write("script.py", "import os; open('found', 'a').write(os.readlink('/proc/self/fd/0') + '\\n')")
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        text = f'"{sys.executable}" -m phalanx run -r 3 --log-dir l --preload json script.py {closed}'
        done = subprocess.run(["/bin/sh", "-c", text], cwd=house.folder, env=house.env, timeout=LIMIT, check=False)
        assert done.returncode == 0, closed
    assert (house.folder / "found").read_text() == f"{os.devnull}\n" * 4
