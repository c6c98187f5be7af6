"""`redirect` as C code, child processes and Python itself see it: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from phalanx.multiprocessing.redirects import redirect, redirect_stderr, redirect_stdout
from tests.support.command import read_until, terminal

HEAD = """
import ctypes, os, subprocess, sys
from phalanx.multiprocessing.redirects import redirect, redirect_stderr, redirect_stdout
libc = ctypes.CDLL(None)
def c(text):  # stays in the C library's buffer, because stdout is no terminal
    libc.printf(b"%s", text.encode())
def child(text, fd=1):
    subprocess.run(["sh", "-c", f"printf %s '{text}' >&{fd}"], check=True)
"""


WITHOUT_CTYPES = HEAD.replace("import ctypes, ", "import ").replace("libc = ctypes.CDLL(None)\n", "")
"""libffi 3.5 opens a file, and keeps it: it gets the number of a descriptor that is closed."""


class Done(NamedTuple):
    """What a program wrote to its own streams, and how it ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def buffering() -> dict[str, str]:
    """The environment without PYTHONUNBUFFERED, which would leave the C library nothing to flush."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def program(text: str, *, way: str = 'exec "$@"', head: str = HEAD) -> Done:
    argv = ["sh", "-c", way, "sh", sys.executable, "-c", head + dedent(text)]
    done = subprocess.run(argv, env=buffering(), capture_output=True, text=True, timeout=60, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("wrong", ["stdin", "", "STDOUT", "1"])
def test_a_stream_that_is_neither_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"'stdout' or 'stderr'"), redirect(wrong, "file"):
        pass
    assert os.listdir() == []


def test_python_c_and_children_go_to_the_file(folder: Path) -> None:
    (folder / "file").write_text("what was there before, and is longer than what comes")
    done = program("""
        print("before")
        c("c before\\n")
        descriptors = sorted(os.listdir("/proc/self/fd"))
        with redirect_stdout("file"):
            print("inside")
            libc.puts(b"c inside")
            child("child\\n")
            print("on stderr", file=sys.stderr)
            print("late")
            c("c late\\n")
        assert sorted(os.listdir("/proc/self/fd")) == descriptors
        print("after")
        c("c after\\n")
        """)
    assert done.status == 0
    # Across the edges nothing moves; what is held back by two buffers between them has no order.
    assert sorted(done.out.splitlines()) == ["after", "before", "c after", "c before"]
    assert done.out.index("before") < done.out.index("after")
    assert done.err == "on stderr\n"
    inside = (folder / "file").read_text()
    assert sorted(inside.splitlines()) == ["c inside", "c late", "child", "inside", "late"]


def test_whatever_happens_the_stream_is_back_afterwards(folder: Path) -> None:
    """A missing folder, nesting, an exception, a body that closes the descriptor, and a child that lives on."""
    done = program("""
        descriptors = sorted(os.listdir("/proc/self/fd"))
        try:
            with redirect_stdout("no/such/folder/file"):
                print("not reached")
        except FileNotFoundError as error:
            print("refused:", error.filename)
        try:
            with redirect_stdout("outer"), redirect_stderr("err"):
                print("outer 1", flush=True)
                with redirect_stdout("inner"):
                    print("inner")
                    child("child\\n")
                print("outer 2")
                c("c outer\\n")
                raise ValueError("boom")
        except ValueError as error:
            print("caught", error, flush=True)
        with redirect_stdout("closed"):
            os.write(1, b"inside")
            os.close(1)
        with redirect_stdout("late"):
            late = subprocess.Popen(["sh", "-c", "read line; echo $line"], stdin=subprocess.PIPE)
        late.communicate(b"late")
        child("after\\n")
        assert sorted(os.listdir("/proc/self/fd")) == descriptors
        """)
    assert done == (0, "refused: no/such/folder/file\ncaught boom\nafter\n", "")
    files = {path.name: sorted(path.read_text().splitlines()) for path in folder.iterdir()}
    assert files == {
        "outer": ["c outer", "outer 1", "outer 2"], "inner": ["child", "inner"], "err": [], "closed": ["inside"],
        "late": ["late"],
    }  # fmt: skip


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_descriptor_that_was_closed_is_closed_again(folder: Path, closed: str) -> None:
    text = """
        def are_open():
            paths = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
            return sorted(path for path in paths if "libffi" not in path and not path.startswith("/proc/"))
        before = are_open()
        with redirect_stdout("file"):
            child("inside")
        after = are_open()
        try:
            os.fstat(1)
        except OSError:
            open("verdict", "w").write(str(before == after))
        """
    assert program(text, way=f'exec "$@" {closed}', head=WITHOUT_CTYPES).status == 0
    assert [(folder / name).read_text() for name in ("file", "verdict")] == ["inside", "True"]


def test_a_child_gets_the_stream_and_no_other_descriptor(folder: Path) -> None:
    program("""
        os.closerange(3, 64)
        with redirect_stdout("file"):
            subprocess.run(["ls", "/proc/self/fd"], close_fds=False)
        """)
    assert (folder / "file").read_text().split() == ["0", "1", "2", "3"]  # the last is the listing's own


@pytest.mark.parametrize("value", ["None", "open(os.devnull, 'w')", "__import__('io').StringIO()"])
def test_whatever_sys_stdout_is_the_descriptor_is_redirected(folder: Path, value: str) -> None:
    done = program(f"""
        sys.stdout = {value}
        getattr(sys.stdout, "close", lambda: None)()
        with redirect_stdout("file"):
            child("inside")
        child("after")
        """)
    assert done == (0, "after", "")
    assert (folder / "file").read_text() == "inside"


def test_a_full_disk_is_said_after_the_stream_is_back() -> None:
    done = program("""
        try:
            with redirect_stdout("/dev/full"):
                print("lost")
        except OSError as error:
            sys.__stdout__ = None
            child(error.strerror)
            os._exit(0)
        """)
    assert done == (0, "No space left on device", "")


def test_a_thread_that_waits_for_input_holds_nobody_up(folder: Path) -> None:
    """On a terminal `input` reads with the C library, which has its stdin locked meanwhile."""
    code = HEAD + dedent("""
        import threading
        def answer(): print("answer:", input("ready? "))
        asking = threading.Thread(target=answer, daemon=True)
        asking.start()
        stdin = ctypes.c_void_p.in_dll(libc, "stdin")
        while libc.ftrylockfile(stdin) == 0:  # the reader has it, then
            libc.funlockfile(stdin)
            os.sched_yield()
        for number in range(2):
            with redirect_stdout(f"out{number}"), redirect_stderr(f"err{number}"):
                print("python"); c("c"); child("child")
        print("restored", flush=True)
        asking.join()
        """)
    with terminal() as (ours, theirs):
        argv = [sys.executable, "-c", code]
        with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=buffering()) as process:
            os.close(theirs)
            try:
                read_until(ours, "restored")
                os.write(ours, b"yes\n")
                assert "answer: yes" in read_until(ours, "what never comes")
            finally:
                process.kill()
    for number in range(2):
        assert (folder / f"out{number}").read_text().split() == ["python", "childc"]
        assert (folder / f"err{number}").read_text() == ""


def test_what_c_code_holds_back_of_stderr_lands_on_its_own_side(folder: Path) -> None:
    done = program("""
        stderr = ctypes.c_void_p.in_dll(libc, "stderr")
        libc.setvbuf(stderr, None, 0, 4096)  # of itself it holds nothing back
        libc.fputs(b"before ", stderr)
        with redirect_stderr("file"):
            libc.fputs(b"between", stderr)
        libc.fputs(b"after", stderr)
        """)
    assert done == (0, "", "before after")
    assert (folder / "file").read_text() == "between"


def test_each_way_to_use_it_leaves_its_file(folder: Path) -> None:
    done = program("""
        import pathlib
        print("before", file=sys.stderr)
        with redirect_stderr("errors"):
            print("inside", file=sys.stderr)
            child("child\\n", 2)
            print("out", flush=True)
        print("after", file=sys.stderr)
        with redirect_stdout("both"), redirect_stderr("both"):
            for number in range(3):
                print("out", number, flush=True)
                print("err", number, file=sys.stderr, flush=True)

        @redirect("stdout", "again")
        def speak(text):
            print(text)

        speak("one")
        speak("two")
        with redirect_stdout(pathlib.Path("path")): child("a")
        with redirect_stdout(to_file="name"): child("b")
        """)
    assert done == (0, "out\n", "before\nafter\n")
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert files.pop("both") == "".join(f"out {n}\nerr {n}\n" for n in range(3))
    assert files == {"errors": "inside\nchild\n", "again": "two\n", "path": "a", "name": "b"}
    assert redirect_stdout.func is redirect_stderr.func is redirect
