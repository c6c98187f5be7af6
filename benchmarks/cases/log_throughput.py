"""How fast the workers' output comes to the console, and whether all of it does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING

from benchmarks import chatter
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import start

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKERS = 4
LINES = 500_000
BLOCK = 1 << 20
CHUNK = 256 * 1024
"""Bytes that the floor reads at a time."""

DEVNULL, PIPE, WRITTEN = SPEEDS = ("devnull", "pipe", "pipe, written")


class _DevNull:
    """A console that takes everything."""

    def __init__(self) -> None:
        self.fd = os.open(os.devnull, os.O_WRONLY)

    def listen(self) -> None:
        pass

    def finish(self) -> None:
        os.close(self.fd)


class _Cat:
    """A console that is a pipe; ``cat`` takes everything, into ``sink``, once it is told to listen."""

    def __init__(self, sink: str = os.devnull) -> None:
        self._sink = sink
        self._out, self.fd = os.pipe()
        self._cat: subprocess.Popen[bytes] | None = None

    def listen(self) -> None:
        with open(self._sink, "wb") as sink:
            self._cat = subprocess.Popen(["cat"], stdin=self._out, stdout=sink)
        os.close(self._out)

    def finish(self) -> None:
        os.close(self.fd)
        if self._cat is None or self._cat.wait():
            raise RuntimeError("cat did not read to the end")


def _mb_per_s(began: int) -> float:
    return WORKERS * LINES * chatter.LINE / 1e6 / ((monotonic_ns() - began) / 1e9)


def _group(
    contender: str, console: _DevNull | _Cat, *, written: bool = False, line_buffered: bool = True
) -> tuple[float, dict[int, str]]:
    """Run writers teed to ``console``, which with ``written`` listens only once all is written.

    Returns MB/s, from the release of the writers (or the start of the listening) until all is shown, and the files.
    """
    with chatter.Meeting(WORKERS) as meeting, chatter.shown_on(console.fd, line_buffered=line_buffered):
        args: list[tuple[object, ...]] = [(*chatter.writer(meeting, LINES, BLOCK), rank) for rank in range(WORKERS)]
        context = start(contender, sys.executable, args, tee=True)
        meeting.hear()
        chatter.claim_memory(WORKERS * LINES * chatter.LINE)
        if written:
            meeting.release()
            meeting.hear()
            began = monotonic_ns()
            console.listen()
        else:
            console.listen()
            began = meeting.release()
        result = context.wait(period=0.01)  # the peer asks once in a period, and a second would be in its figures
        context.close()
    console.finish()
    speed = _mb_per_s(began)
    if result.is_failed():
        raise RuntimeError(f"a writer failed: {result.failures}")
    return speed, result.stdouts


def _measure(contender: str) -> Sample:
    figures = {}
    for name, console in ((DEVNULL, _DevNull()), (PIPE, _Cat()), (WRITTEN, _Cat())):
        speed, files = _group(contender, console, written=name == WRITTEN)
        figures[name] = [speed]
        _remove(files)
    _, wrong = _compared(contender)
    return Sample({**figures, "wrong": [len(wrong)]}, tuple(wrong))


def _peer() -> Sample:
    sample = _measure(TORCH)
    speed, wrong = _compared(TORCH, line_buffered=False)
    note = f"into a pipe by blocks, not by lines: {speed:.0f} MB/s; {'; '.join(wrong) or 'nothing wrong'}"
    return sample._replace(notes=(*sample.notes, note))


def _compared(contender: str, *, line_buffered: bool = True) -> tuple[float, list[str]]:
    """Keep what comes through the pipe; return MB/s, which is less for it, and what differs from the files."""
    shown = os.path.join(tempfile.mkdtemp(), "shown")
    speed, files = _group(contender, _Cat(shown), line_buffered=line_buffered)
    wrong = chatter.differing(shown, files, LINES)
    _remove({**files, WORKERS: shown})
    return speed, wrong


def _remove(files: Mapping[int, str]) -> None:
    for path in files.values():
        Path(path).unlink()


def _floor() -> Sample:
    with chatter.Meeting(WORKERS) as meeting:
        workers, files = chatter.bare([(*chatter.writer(meeting, LINES, BLOCK), str(rank)) for rank in range(WORKERS)])
        meeting.hear()
        meeting.release()
        for worker in workers:
            worker.wait()
    return Sample({name: [_plain(files, _DevNull() if name == DEVNULL else _Cat())] for name in SPEEDS})


def _plain(files: Mapping[int, str], console: _DevNull | _Cat) -> float:
    """Read, prefix, write, one file after the other; at the end of each stands one prefix too many."""
    began = monotonic_ns()
    console.listen()
    for rank, path in files.items():
        prefix = b"[%d] " % rank
        with open(path, "rb", buffering=0) as file:
            _write(console.fd, prefix)
            while data := file.read(CHUNK):
                _write(console.fd, data.replace(b"\n", b"\n" + prefix))
    console.finish()
    return _mb_per_s(began)


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


CASE = Case(
    name="log_throughput",
    measures=f"{WORKERS} workers write {LINES} lines of 99 bytes and a newline each, teed: until all is shown",
    units={DEVNULL: "MB/s", PIPE: "MB/s", WRITTEN: "MB/s", "wrong": "findings"},
    targets=(
        *(Target(speed, ">=", 20, of=TORCH) for speed in SPEEDS),
        *(Target(speed, ">=", 0.5, of=FLOOR) for speed in SPEEDS),
        Target("wrong", "<=", 0, worst=True),
    ),
    contenders={PHALANX: partial(_measure, PHALANX), TORCH: _peer, FLOOR: _floor},
    peer_rounds=1,
    warm_up=False,
    limit=300.0,
)
