"""The injector as a program: it runs seeds and says which were bad. Several run at a time, because they mostly wait."""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.injector import faults
from tests.injector.check import NS, Record, check
from tests.injector.plan import Plan, make
from tests.injector.planted import PLANTED, plant
from tests.injector.run import ROOT, carry_out

_ALARM = 180
"""A run that takes so many seconds is given up. No run that works takes as long."""

_DIGITS = 12  # of a seed


def seeds_of(text: str) -> list[int]:
    """The seeds of ``"3,10-12"``.

    >>> seeds_of("3,10-12")
    [3, 10, 11, 12]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        seeds += range(int(first), int(last if dash else first) + 1)
    return seeds


def timeline(plan: Plan, record: Record) -> str:
    """Returns what happened in a run, in the order of time."""
    lines = [(word.ns, f"{word.what}{f' (rank {word.rank})' * (word.rank >= 0)}, {word.pid}") for word in record.words]
    for shot in record.shots:
        lines.append((shot.began, f"FAULT {shot.fault}: {f'hits {shot.pid}' if shot.hit else 'nobody there'}"))
        if shot.ended:
            lines.append((shot.ended, f"over: {shot.fault}"))
    lines += [(event["ns"], f"launcher: {str(event)[:2000]}") for event in record.events]
    if record.gone:
        lines.append((record.gone, f"nobody is left; the launcher has ended with {record.status}"))
    texts = [f"  {(moment - record.began) / NS:8.4f} {text}" for moment, text in sorted(lines)]
    left_out = [f"  this machine does not allow: {what}" for what in record.left_out]
    stderr = record.stderr.decode("utf-8", "replace")[-6000:]
    return "\n".join([plan.described(), *texts, *left_out, f"  stderr: {stderr}"])


def attempt(seed: int, source: Path, keep: Path | None, *, verbose: bool) -> tuple[list[str], str]:
    """Run a seed. Returns what was broken, and the course of the run, if it is to be shown."""
    plan = make(seed)
    signal.alarm(_ALARM)
    try:
        record = carry_out(plan, source, keep)
        broken = check(plan, record)
        about = timeline(plan, record) if verbose or broken else ""
    except Exception:  # noqa: BLE001 - a mistake of the injector must not end the other runs
        return ["the injector failed"], traceback.format_exc()
    finally:
        signal.alarm(0)
    return broken, about


# --- several at a time


def _job(todo: int, done: int, options: argparse.Namespace) -> NoReturn:
    """Run seeds from the file ``todo``, which all jobs share, and write the result of each into the pipe ``done``."""

    def leave(number: int, _frame: object) -> NoReturn:
        for once in (signal.SIGTERM, signal.SIGINT):  # the removal of what was started is not to be interrupted
            signal.signal(once, signal.SIG_IGN)
        raise SystemExit(128 + number)

    def give_up(_number: int, _frame: object) -> NoReturn:
        raise TimeoutError("the run has lost its way")

    code = 1
    try:
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        signal.signal(signal.SIGALRM, give_up)
        faults.prepare()
        while text := os.read(todo, _DIGITS):  # one offset for all: each seed is read once
            began = time.monotonic()
            keep = options.keep / f"seed-{int(text)}" if options.keep else None
            broken, about = attempt(int(text), options.src, keep, verbose=options.verbose)
            said = {"seed": int(text), "broken": broken, "about": about, "seconds": time.monotonic() - began}
            with open(done, "wb", closefd=False) as file:
                file.write(json.dumps(said).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def run_all(options: argparse.Namespace, seeds: Sequence[int]) -> Generator[dict[str, Any]]:
    """Run all seeds, and yield the result of each."""
    with tempfile.TemporaryFile(buffering=0) as todo:  # of a memfd, the kernel would not lock the offset
        todo.write(b"".join(b"%*d" % (_DIGITS, seed) for seed in seeds))
        todo.seek(0)
        yield from _share(options, todo.fileno(), min(options.jobs, len(seeds)))


def _share(options: argparse.Namespace, todo: int, count: int) -> Generator[dict[str, Any]]:
    """Start ``count`` jobs, which run the seeds in the file ``todo``, and yield the results."""
    jobs: dict[int, tuple[int, bytearray]] = {}  # by the pipe: pid, and what has been heard
    poll = select.poll()
    try:
        for _ in range(count):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
            if pid == 0:
                for fd in (reader, *jobs):
                    os.close(fd)
                _job(todo, writer, options)
            os.close(writer)
            jobs[reader] = pid, bytearray()
            poll.register(reader, select.POLLIN)
        while jobs:
            for fd, _events in poll.poll():
                pid, heard = jobs[fd]
                data = os.read(fd, 1 << 16)
                heard += data
                *lines, rest = heard.split(b"\n")
                heard[:] = rest
                yield from map(json.loads, lines)
                if not data:
                    poll.unregister(fd)
                    os.close(fd)
                    del jobs[fd]
                    status = os.waitpid(pid, 0)[1]
                    if status:
                        yield {"seed": -1, "broken": [f"a job ended: {status}"], "about": "", "seconds": 0}
    finally:
        for fd, (pid, _heard) in jobs.items():
            os.kill(pid, signal.SIGTERM)  # it removes what it has started
            os.waitpid(pid, 0)
            os.close(fd)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.injector", description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=[], help="which, such as 0-39 or 3,17 (default: 0-39)")
    parser.add_argument("--seed", type=int, action="append", default=[], help="one; the same as --seeds N")
    parser.add_argument("--jobs", type=int, default=3, help="how many at a time (default: 3)")
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="the folder with the package under test")
    parser.add_argument("--plant", choices=PLANTED, metavar="FAULT", help=f"with an old fault: {', '.join(PLANTED)}")
    parser.add_argument("--keep", type=Path, help="a folder that takes what the runs leave on the disk")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell the course of every run")
    options = parser.parse_args()
    options.src = options.src.resolve()
    options.keep = options.keep and options.keep.resolve()
    return options


def main() -> int:
    """Run, and return the exit code."""
    options = _options()
    seeds = (options.seed + options.seeds) or seeds_of("0-39")
    began = time.monotonic()
    bad: list[int] = []
    slowest = (0.0, -1)
    with contextlib.ExitStack() as stack:
        if options.plant:
            options.src = plant(options.plant, options.src, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        # A run that may write no large file would leave half of a module's bytecode, for ever.
        compileall.compile_dir(options.src / "phalanx", quiet=2)
        for said in stack.enter_context(contextlib.closing(run_all(options, seeds))):
            seed, broken = said["seed"], said["broken"]
            slowest = max(slowest, (said["seconds"], seed))
            text = said["about"] and said["about"] + "\n"
            if broken:
                bad.append(seed)
                again = "" if options.src == ROOT / "src" else f" --src {options.src}"
                again = f" --plant '{options.plant}'" if options.plant else again
                head = f"seed {seed}: BAD; again with: python -m tests.injector --seed {seed} -v{again}"
                text = "\n".join([head, *(f"  {line}" for line in broken), text])
            sys.stdout.write(text)
            sys.stdout.flush()
    took = f"{time.monotonic() - began:.1f} s; the slowest was {slowest[1]} with {slowest[0]:.1f} s"
    sys.stdout.write(f"{len(seeds)} seeds, {len(bad)} bad{f': {sorted(bad)}' if bad else ''}, {took}\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
