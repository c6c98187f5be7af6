"""In a notebook: functions of cells run as workers, their output is in the cell, an interrupt stops the group.

A real kernel (ipykernel), driven by nbclient, in a process of its own: neither leaves its host as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.helpers import TIMEOUT, Gate, Ready, alive, descendants, wait_gone
from tests.support.workers import ROOT

pytestmark = pytest.mark.long

pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")

DRIVER = """
import asyncio, json, sys
import nbclient, nbformat

class Client(nbclient.NotebookClient):
    async def async_execute_cell(self, cell, index, **options):
        gate = cell.metadata.get("interrupt")
        if gate:
            asyncio.get_running_loop().create_task(interrupt_after(self.km, gate))
        return await super().async_execute_cell(cell, index, **options)

async def interrupt_after(kernel, gate):
    await asyncio.to_thread(lambda: open(gate, "rb", 0).read(1))
    await kernel.interrupt_kernel()

book = nbformat.v4.new_notebook()
for source, gate in json.load(sys.stdin):
    book.cells.append(nbformat.v4.new_code_cell(source, metadata={"interrupt": gate}))
Client(book, timeout=60, kernel_name="python3", allow_errors=True).execute()
print("\\n" + json.dumps([cell.outputs for cell in book.cells]))
"""


class Notebook:
    """Runs cells in a new kernel."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "driver.py"
        self._script.write_text(DRIVER)
        folders = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "TMPDIR")
        self._env = dict(os.environ)
        for name in folders:
            self._env[name] = str(folder / name)
            (folder / name).mkdir()
        self._env["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, sys.path)])
        # Unbuffered, each piece of a line would be written by itself, and lines mix; and under pytest, ipykernel does
        # not forward what is written to its descriptors.
        for name in ("PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST"):
            self._env.pop(name, None)

    @contextlib.contextmanager
    def start(self) -> Iterator[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        command = [sys.executable, str(self._script)]
        with subprocess.Popen(command, env=self._env, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as driver:
            try:
                yield driver
            finally:
                driver.kill()

    def run(self, *cells: str) -> list[Cell]:
        with self.start() as driver:
            return self.finish(driver, *((cell, "") for cell in cells))

    @staticmethod
    def finish(driver: subprocess.Popen[str], *cells: tuple[str, str]) -> list[Cell]:
        given = json.dumps([(dedent(source).strip(), gate) for source, gate in cells])
        out, err = driver.communicate(given, timeout=4 * TIMEOUT)
        assert driver.returncode == 0, err
        return read(out)


class Cell:
    """What was shown below a cell."""

    def __init__(self, outputs: list[dict[str, Any]]) -> None:
        self.out, self.err = (
            "".join(each["text"] for each in outputs if each["output_type"] == "stream" and each["name"] == name)
            for name in ("stdout", "stderr")
        )
        errors = [each for each in outputs if each["output_type"] == "error"]
        self.error = errors[0]["ename"] if errors else ""
        self.traceback = "\n".join(errors[0]["traceback"]) if errors else ""


def read(out: str) -> list[Cell]:
    """The cells, from the last line: what workers write to the kernel's descriptors comes out there as well."""
    return [Cell(outputs) for outputs in json.loads(out.splitlines()[-1])]


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    folder = tmp_path / "notebook"
    folder.mkdir()
    return Notebook(folder)


IMPORTS = """
import os, sys
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes, warm
import phalanx.spawn as mp

def run(function, args, **options):
    with start_processes("cell", function, args, **options) as group:
        return group.wait().return_values
"""


def test_what_cells_define_runs_in_workers(notebook: Notebook) -> None:
    _, by_value, classes, warmly, spawned, again, anew = notebook.run(
        IMPORTS,
        """
        base = 10
        def add(n):
            return n + base
        def make(more):
            return lambda n: add(n) + more
        for method in ("spawn", "forkserver", "fork"):
            print(run(lambda n: n * n, {0: (2,), 1: (3,)}, start_method=method),
                  run(add, {0: (2,), 1: (3,)}, start_method=method),
                  run(make(100), (1,), nprocs=1, start_method=method))
        """,
        """
        class Thing:
            made = 0
            def __init__(self, n): self.n = n
            def more(self): return Thing(self.n + 1)
        for method in ("spawn", "forkserver", "fork"):
            found = run(Thing.more, {0: (Thing(1),), 1: (Thing(2),)}, start_method=method)
            print([(type(thing) is Thing, thing.n) for thing in found.values()])
            found = run(Thing(5).more, (), nprocs=1, start_method=method)
            print(type(found[0]) is Thing, found[0].n)
        """,
        """
        with warm(preload=["colorsys"]):
            for base in (20, 30):
                print(run(lambda: (add(1), "colorsys" in sys.modules), (), nprocs=1, start_method="forkserver"))
        """,
        """
        def work(i, queue, scale):
            queue.put(i * scale * base)
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(work, args=(queue, 2), nprocs=2)
        print(sorted(queue.get() for _ in range(2)))
        def fail(i):
            raise ValueError(f"in rank {i}")
        mp.spawn(fail, nprocs=1)
        """,
        "def add(n): return -n\nprint(run(add, (1,), nprocs=1))",
        """
        old = Thing
        class Thing: pass
        def keep(thing): return thing, type(thing), Thing
        for method in ("spawn", "forkserver", "fork"):
            thing, kind, new = run(keep, (old(3),), nprocs=1, start_method=method)[0]
            print(type(thing) is kind is old, new is Thing, thing.n)
        """,
    )
    assert by_value.out == "{0: 4, 1: 9} {0: 12, 1: 13} {0: 111}\n" * 3, by_value.traceback
    assert classes.out == "[(True, 2), (True, 3)]\nTrue 6\n" * 3, classes.traceback
    assert warmly.out == "{0: (21, True)}\n{0: (31, True)}\n", warmly.traceback
    assert spawned.out == "[0, 60]\n"
    assert spawned.error == "ProcessRaisedException"
    assert "ValueError: in rank 0" in spawned.traceback
    assert again.out == "{0: -1}\n"  # as it is defined now
    assert anew.out == "True True 3\n" * 3, anew.traceback  # classes of one name, which are two


SAY = """
def say(rank):
    print(f"to stdout, from {rank}")
    print(f"to stderr, from {rank}", file=sys.stderr)
"""


# The kernel forwards its descriptors, which are pipes, when it comes to it.
FORWARDED = """
import array, fcntl, termios, time
left = array.array("i", [1])
for fd in (1, 2):
    left[0] = 1
    while left[0]:
        time.sleep(0.01)
        fcntl.ioctl(fd, termios.FIONREAD, left)
"""


def test_the_output_of_the_ranks_is_shown_in_the_cell(notebook: Notebook) -> None:
    cells = notebook.run(
        IMPORTS,
        SAY,
        "run(say, {0: (0,), 1: (1,)}, logs_specs=DefaultLogsSpecs(tee=Std.ALL))\nprint('the end')",
        "run(say, {0: (0,), 1: (1,)}, logs_specs=DefaultLogsSpecs(tee={0: Std.OUT}, redirects=Std.ALL))",
        "run('echo', {0: ('a binary',)}, logs_specs=DefaultLogsSpecs(tee=Std.ALL))",
        "run(say, {0: ('plain 0',), 1: ('plain 1',)})",
        f"{FORWARDED}run(pow, (2, 3), nprocs=1)",
    )
    _, _, teed, both, echo, *plain = cells
    for cell in (teed, both, echo):  # a kernel sets FORCE_COLOR, for cells show colours
        assert "\033[36m[0]" in cell.out
        cell.out, cell.err = (re.sub(r"\033\[\d+m", "", text) for text in (cell.out, cell.err))
    assert sorted(teed.out.splitlines()) == ["[0] to stdout, from 0", "[1] to stdout, from 1", "the end"]
    assert teed.out.splitlines()[-1] == "the end"
    assert sorted(teed.err.splitlines()) == ["[0] to stderr, from 0", "[1] to stderr, from 1"]
    assert both.out == "[0] to stdout, from 0\n"
    assert both.err == ""
    assert echo.out == "[0] a binary\n"
    for name in ("out", "err"):
        lines = "".join(getattr(cell, name) for cell in plain).splitlines()
        assert sorted(lines) == [f"to std{name}, from plain {rank}" for rank in range(2)]


@pytest.mark.parametrize("way", ["wait", "spawn", "warm", "preload"])
def test_an_interrupt_of_the_cell_stops_the_group(
    way: str, notebook: Notebook, ready: Ready, gate: Gate, tmp_path: Path
) -> None:
    stay = f"""
        def stay(*_):
            import os, signal, subprocess, sys
            code = "import signal; signal.pause()"
            child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
            {ready.python("f'{os.getpid()} {child.pid}'")}
            signal.pause()
        """
    module = tmp_path / "notebook" / "slow.py"
    module.write_text(dedent(stay) + "\nstay()")
    cells = {
        "wait": "run(stay, (), nprocs=2)",
        "spawn": "mp.spawn(stay, nprocs=2)",
        "warm": "with warm(preload=['json']): run(stay, (), nprocs=2, start_method='forkserver')",
        "preload": f"sys.path.insert(0, {str(module.parent)!r})\n"
                   "run(stay, (), nprocs=2, start_method='forkserver', preload=['slow'])",
    }  # fmt: skip
    with notebook.start() as driver:
        given = [(IMPORTS, ""), (stay, ""), (cells[way], gate.address), ("print(run(pow, (2, 3), nprocs=2))", "")]
        assert driver.stdin is not None
        driver.stdin.write(json.dumps([(dedent(source).strip(), where) for source, where in given]))
        driver.stdin.close()
        driver.stdin = None
        said = ready.wait(1 if way == "preload" else 2, timeout=3 * TIMEOUT)
        workers = [int(pid) for text in said for pid in text.split()]
        assert all(map(alive, workers))
        assert len(descendants(driver.pid)) > len(workers)
        gate.open()
        # The preload's own child leads a session of its own, where nobody looks for what is no worker's.
        assert wait_gone(workers[:1] if way == "preload" else workers) == set()
        for pid in filter(alive, workers):
            os.kill(pid, 9)
        out, err = driver.communicate(timeout=4 * TIMEOUT)
    assert driver.returncode == 0, err
    _, _, interrupted, after = read(out)
    assert interrupted.error in ("SignalException", "KeyboardInterrupt"), interrupted.traceback
    assert after.out == "{0: 8, 1: 8}\n", after.traceback


def test_a_failure_that_nobody_looks_at_is_below_the_cell(notebook: Notebook) -> None:
    fails = """
    def train(rank):
        if rank == 1:
            raise ValueError("loss is nan")
    run(train, {{0: (0,), 1: (1,)}}, start_method={method!r})
    """
    forwarded = f"{FORWARDED}run(pow, (2, 3), nprocs=1)"
    methods = ("spawn", "forkserver", "fork")
    head, *cells = notebook.run(IMPORTS, *(cell for name in methods for cell in (fails.format(method=name), forwarded)))
    assert not head.err
    for failed, after in zip(cells[::2], cells[1::2], strict=True):
        err = failed.err + after.err
        assert err.count("Traceback") == err.count("phalanx: rank 1 failed:") == 1
        assert failed.err.count("phalanx: the group 'cell' has failed: rank 1, ValueError: loss is nan; its files") == 1
