"""``python -m benchmarks.scale``: groups of up to 2,000 workers, in one table.

Each row has an interpreter to itself (two, where the launcher is ``phalanx run``). ``up`` is from the call until every
worker has said that it runs; ``closed`` from the call of ``close`` (SIGTERM to ``phalanx run``) until nothing is left.
Memory is PSS in MB (10^6 bytes), which counts a page that processes share in proportion; descriptors are all that a
process has open. ``keeper`` is the worker's parent, or, where that is the launcher, the helper that has most memory.

``--src`` measures another checkout's ``src``, so that two versions can be put side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import procfs
from benchmarks.stay import fail_here, wait_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = (64, 256, 1024, 2000)
METHODS = ("fork", "forkserver", "spawn")
LIMIT = 1200.0
"""Seconds that a row may take."""

_ROOT = Path(__file__).resolve().parent.parent
_SEQUENCE = 2000
_AT_ONCE = 100
_MANY = 1000
_SETTLED = 100
"""Groups of the sequence before the first look at what the launcher holds."""

Row = dict[str, float]


class _Ready:
    """A named pipe that each worker writes one byte to."""

    def __init__(self) -> None:
        self.path = os.path.join(tempfile.mkdtemp(), "ready")
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR)

    def wait(self, count: int) -> None:
        while count:
            count -= len(os.read(self._fd, count))


def _start(entrypoint: Callable[..., object] | str, args: list[tuple[object, ...]], **options: Any) -> Any:
    from phalanx.multiprocessing import DefaultLogsSpecs, start_processes

    ranks = dict(enumerate(args))
    logs = DefaultLogsSpecs(log_dir=tempfile.mkdtemp())
    return start_processes("scale", entrypoint, ranks, logs_specs=logs, **options)


def _saying(fifo: str) -> tuple[str, str]:
    """The arguments of a shell that says that it runs, and stays."""
    return "-c", f"printf . > {fifo}; exec sleep 1000"


def _weight(launcher: int, workers: set[int]) -> Row:
    helpers = {pid: procfs.pss_kb(pid) * 1024 / 1e6 for pid in procfs.helpers(launcher, workers)}
    keeper = max(helpers, key=lambda pid: helpers[pid])
    return {
        "launcher MB": procfs.pss_kb(launcher) * 1024 / 1e6,
        "launcher fds": procfs.fds(launcher),
        "keeper MB": helpers[keeper],
        "keeper fds": procfs.fds(keeper),
    }


def command_line(workers: int) -> Row:
    """``phalanx run --no-python``."""
    ready = _Ready()
    argv = [sys.executable, "-m", "phalanx", "run", "--no-python", "--nproc-per-node", str(workers)]
    argv += ["--log-dir", tempfile.mkdtemp(), "sh", *_saying(ready.path)]
    began = time.perf_counter()
    launcher = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready.wait(workers)
    up = time.perf_counter() - began
    weight = _weight(launcher.pid, set(_marked() - {launcher.pid}) & _sleepers())
    began = time.perf_counter()
    launcher.terminate()
    launcher.wait()
    return {"up s": up, "closed s": time.perf_counter() - began, **weight}


def _marked() -> set[int]:
    return procfs.marked(os.environ[procfs.MARK])


def _sleepers() -> set[int]:
    return {pid for pid in _marked() if procfs.command(pid).startswith(("sleep", "sh -c"))}


def commands(workers: int) -> Row:
    """`start_processes` with a command."""
    ready = _Ready()
    return _group("/bin/sh", [_saying(ready.path)] * workers, ready)


def functions(workers: int, method: str) -> Row:
    """`start_processes` with a function, by reference."""
    ready = _Ready()
    return _group(wait_here, [(ready.path,)] * workers, ready, start_method=method)


def by_value(workers: int, method: str) -> Row:
    """`start_processes` with a lambda."""
    ready = _Ready()
    return _group(lambda fifo: wait_here(fifo), [(ready.path,)] * workers, ready, start_method=method)  # noqa: PLW0108 - it is to go by value


def _group(entrypoint: Any, args: list[tuple[object, ...]], ready: _Ready, **options: Any) -> Row:
    import phalanx.multiprocessing  # noqa: F401 - so that its import is in no figure

    began = time.perf_counter()
    group = _start(entrypoint, args, **options)
    ready.wait(len(args))
    up = time.perf_counter() - began
    weight = _weight(os.getpid(), set(group.pids().values()))
    began = time.perf_counter()
    group.close()
    return {"up s": up, "closed s": time.perf_counter() - began, **weight}


def one_fails() -> Row:
    """One of 1,000 commands fails: from its exit until `wait` has returned, and nothing is left."""
    ready, let_go = _Ready(), _Ready()
    failing = "-c", f"printf . > {ready.path}; read word < {let_go.path}; exit 3"
    args: list[tuple[object, ...]] = [_saying(ready.path)] * _MANY
    args[_MANY // 2] = failing
    group = _start("/bin/sh", args)
    ready.wait(_MANY)
    began = time.perf_counter()
    with open(let_go.path, "w") as pipe:
        pipe.write("go\n")
    result = group.wait()
    gone = time.perf_counter() - began
    group.close()
    assert list(result.failures) == [_MANY // 2]
    return {"gone s": gone, "left": len(_marked())}


def tracebacks(size: int) -> Row:
    """1,000 functions raise 1,000 different texts: until the whole report is there, as text."""
    from phalanx.errors import ChildFailedError

    ready = _Ready()
    group = _start(fail_here, [(ready.path, rank, size) for rank in range(_MANY)], start_method="fork", settle=60)
    ready.wait(_MANY)
    began = time.perf_counter()
    result = group.wait()
    waited = time.perf_counter() - began
    text = str(ChildFailedError("scale", result.failures))
    took = time.perf_counter() - began
    group.close()
    peak = procfs.peak_mb(os.getpid())
    return {
        "waited s": waited,
        "report s": took,
        "launcher peak MB": peak,
        "failures": len(result.failures),
        "report kB": len(text) / 1e3,
    }


def at_once() -> Row:
    """100 groups of 4 commands, all there at once."""
    ready = _Ready()
    with ExitStack() as stack:
        began = time.perf_counter()
        groups = [stack.enter_context(_start("/bin/sh", [_saying(ready.path)] * 4)) for _ in range(_AT_ONCE)]
        ready.wait(4 * len(groups))
        up = time.perf_counter() - began
        fds, memory, threads = procfs.fds(os.getpid()), procfs.pss_kb(os.getpid()), procfs.threads(os.getpid())
        began = time.perf_counter()
        for group in groups:
            group.close()
        closed = time.perf_counter() - began
    return {
        "up s": up, "closed s": closed, "launcher MB": memory * 1024 / 1e6, "launcher fds": fds,
        "launcher threads": threads, "left": len(_marked()),
    }  # fmt: skip


def in_sequence() -> Row:
    """2,000 groups of 2 times /bin/true, one after the other: by what the launcher grows from the 100th to the last."""
    before: tuple[float, int] | None = None
    began = time.perf_counter()
    for number in range(_SEQUENCE):
        with _start("/bin/true", [(), ()]) as group:
            group.wait()
        if number == _SETTLED:
            before = procfs.anonymous_kb(os.getpid()), procfs.fds(os.getpid())
    took = time.perf_counter() - began
    assert before is not None
    grown = (procfs.anonymous_kb(os.getpid()) - before[0]) * 1024 / 1e6
    return {
        "ms a group": took * 1e3 / _SEQUENCE,
        "grown MB": grown,
        "grown fds": procfs.fds(os.getpid()) - before[1],
        "left": len(_marked()),
    }


def _rows() -> Iterator[tuple[str, Callable[..., Row], tuple[Any, ...]]]:
    for workers in SIZES:
        yield f"run --no-python, {workers:,}", command_line, (workers,)
    for workers in SIZES:
        yield f"commands, {workers:,}", commands, (workers,)
    for method in METHODS:
        for workers in SIZES:
            yield f"functions, {method}, {workers:,}", functions, (workers, method)
    yield "functions by value, forkserver, 256", by_value, (256, "forkserver")
    yield "1 of 1,000 fails", one_fails, ()
    yield "1,000 tracebacks of 10 kB", tracebacks, (10_000,)
    yield "1,000 tracebacks of 1 MB", tracebacks, (1_000_000,)
    yield "100 groups at once", at_once, ()
    yield "2,000 groups in sequence", in_sequence, ()


def _measure(row: str, src: Path) -> Row:
    """Run a row in an interpreter of its own. Raises RuntimeError: it failed, or something was left."""
    mark = f"scale-{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {procfs.MARK: mark, "PYTHONPATH": f"{src}{os.pathsep}{_ROOT}", "TMPDIR": folder}
        code = f"from benchmarks.scale import show; show({row!r})"  # a main module that no worker runs again
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        finally:
            left = procfs.sweep(mark)
    if done.returncode or left:
        raise RuntimeError(f"{left} left over; {done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def show(row: str) -> None:
    """Measure a row, and print its figures as the last line."""
    measure, args = {name: (measure, args) for name, measure, args in _rows()}[row]
    print("\n" + json.dumps(measure(*args)))


def main() -> int:
    """Print the table; the exit code is 1 when a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--src", type=Path, default=_ROOT / "src", help="the src folder that is measured")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has TEXT in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, too")
    options = parser.parse_args()
    figures: dict[str, Row] = {}
    code = 0
    for name, *_ in _rows():
        if options.only not in name:
            continue
        try:
            figures[name] = _measure(name, options.src)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            code = 1
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures[name].items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
