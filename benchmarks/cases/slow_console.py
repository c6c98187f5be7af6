"""A console that reads 10 kB/s while the workers write 60 MB: who is held up, and what is said of the rest."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median
from time import monotonic_ns
from typing import TYPE_CHECKING

from benchmarks import chatter, procfs
from benchmarks.case import FLOOR, PHALANX, Case, Sample, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WORKERS = 4
LINES = 150_000
"""60 MB in all: of more than 64 MiB, the launcher says that there is more, and does not count it."""

BLOCK = 8192
"""Bytes per write: what Python's print comes to in a file. With ``-u`` it is a line."""

RATE = 10_000
"""Bytes a second that the console reads."""

TICK = 0.1
"""Seconds between two reads."""

PATIENCE = 60.0
"""Seconds after the workers' end at which a launcher that is still there is killed."""

_WHOLE = re.compile(rb"^\s*\[(\d+)\] \d \d{9} \.{%d}$" % (chatter.LINE - len("0 000000000 \n")), re.MULTILINE)
_MORE = re.compile(r"([\d,]+) more lines in .*?([^/\s]+)/stdout\.log")


class _Reader(threading.Thread):
    """The slow console; looks at the launcher, too, and takes the rest at once when that has ended."""

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        super().__init__()
        assert launcher.stdout is not None
        self._pipe = launcher.stdout.fileno()
        self._pid = launcher.pid
        self._launcher = os.pidfd_open(launcher.pid)
        self.shown: list[bytes] = []
        self.peak = 0.0
        self.cpu: list[tuple[int, float]] = []
        self.ended = 0

    def run(self) -> None:
        os.set_blocking(self._pipe, False)
        while not select.select([self._launcher], [], [], TICK)[0]:
            self.peak = max(self.peak, procfs.peak_mb(self._pid))
            self.cpu.append((monotonic_ns(), procfs.cpu_seconds(self._pid)))
            with contextlib.suppress(BlockingIOError):
                self.shown.append(os.read(self._pipe, int(RATE * TICK)))
        self.ended = monotonic_ns()
        os.close(self._launcher)
        os.set_blocking(self._pipe, True)
        while data := os.read(self._pipe, 65536):
            self.shown.append(data)

    def percent(self, since: int) -> float:
        """Return the CPU that the launcher used after the moment ``since``, in % of a core."""
        seen = [(moment, used) for moment, used in self.cpu if moment >= since]
        if not seen:
            return 0.0
        began, before = seen[0]
        ended, after = max(seen, key=lambda at: at[1])  # not the last: a thread that ends takes its time with it
        return 100 * (after - before) / ((ended - began) / 1e9) if ended > began else 0.0


def _run(meeting: chatter.Meeting, folder: str, block: int, *options: str) -> list[str]:
    phalanx = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(WORKERS), "--no-python"]
    # The argument for the rank is not heeded where there is LOCAL_RANK.
    worker = [sys.executable, *chatter.writer(meeting, LINES, block), "0"]
    return [*phalanx, "--log-dir", folder, *options, *worker]


def _writing_ms(meeting: chatter.Meeting) -> tuple[float, int]:
    """Let the workers go; return the milliseconds until the last one has written all, and the moment when it had."""
    chatter.claim_memory(WORKERS * LINES * chatter.LINE)
    began = meeting.release()
    ended = max(meeting.hear())
    return (ended - began) / 1e6, ended


@contextlib.contextmanager
def _launched(meeting: chatter.Meeting, folder: Path, block: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run writers under ``phalanx run``, logs below and stderr in ``folder``; whatever happens, it is ended after."""
    command = _run(meeting, str(folder / "runs"), block, *options)
    with (folder / "stderr").open("wb") as stderr:
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    with launcher:
        try:
            yield launcher
        finally:
            launcher.kill()  # nothing, where it has been waited for


def _files_only(block: int) -> float:
    folder = Path(tempfile.mkdtemp())
    with chatter.Meeting(WORKERS) as meeting, _launched(meeting, folder, block, "--redirects", "3") as launcher:
        meeting.hear()
        took, _ = _writing_ms(meeting)
        if launcher.wait(PATIENCE):
            raise RuntimeError(f"phalanx run ended with {launcher.returncode}")
    return took


def _by_the_line() -> float:
    """Return the milliseconds that workers take who write line by line; the launcher is not waited for."""
    folder = Path(tempfile.mkdtemp())
    with chatter.Meeting(WORKERS) as meeting, _launched(meeting, folder, chatter.LINE, "--tee", "3") as launcher:
        meeting.hear()
        reader = _Reader(launcher)
        reader.start()
        took, _ = _writing_ms(meeting)
        launcher.kill()
        reader.join()
    return took


def _measure() -> Sample:
    alone = median(_files_only(BLOCK) for _ in range(5))
    by_the_line = _by_the_line() / _files_only(chatter.LINE)
    folder = Path(tempfile.mkdtemp())
    notes = []
    with chatter.Meeting(WORKERS) as meeting, _launched(meeting, folder, BLOCK, "--tee", "3") as launcher:
        meeting.hear()
        reader = _Reader(launcher)
        reader.start()
        took, ended = _writing_ms(meeting)
        try:
            launcher.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            notes.append(f"still showing {PATIENCE:g} s after the workers' end, and killed")
            launcher.kill()
        reader.join()
    files = {path.parent.name: chatter.in_file(str(path)) for path in (folder / "runs").rglob("stdout.log")}
    spoken = said((folder / "stderr").read_text())
    whole = [rank for rank, text in files.items() if text.lines == LINES and text.size == LINES * chatter.LINE]
    figures = {
        "writing": took,
        "writing, files only": alone,
        "held up": took / alone,
        "held up, by the line": by_the_line,
        "launcher": reader.peak,
        "launcher, cpu": reader.percent(ended),
        "end": (reader.ended - ended) / 1e9,
        "files not whole": WORKERS - len(whole),
        "files spoken of": len(spoken),
        "lines unaccounted for": _unaccounted(b"".join(reader.shown), spoken),
    }
    return Sample({name: [value] for name, value in figures.items()}, tuple(notes))


def said(stderr: str) -> dict[str, int]:
    """Return how many lines the launcher said were not shown, by rank."""
    return {rank: int(lines.replace(",", "")) for lines, rank in _MORE.findall(stderr)}


def _unaccounted(shown: bytes, spoken: Mapping[str, int]) -> int:
    """Return how many lines were neither shown whole nor said not to be, or both, over all ranks."""
    whole = _WHOLE.findall(shown)
    return sum(abs(LINES - whole.count(b"%d" % rank) - spoken.get(str(rank), 0)) for rank in range(WORKERS))


def _floor() -> Sample:
    with chatter.Meeting(WORKERS) as meeting:
        workers, _ = chatter.bare([(*chatter.writer(meeting, LINES, BLOCK), str(rank)) for rank in range(WORKERS)])
        meeting.hear()
        took, _ = _writing_ms(meeting)
        for worker in workers:
            worker.wait()
    return Sample({"writing": [took]})


CASE = Case(
    name="slow_console",
    measures=f"{WORKERS} workers write {LINES} lines of 99 bytes and a newline each, teed to one that reads {RATE} B/s",
    units={
        "writing": "ms",
        "writing, files only": "ms",
        "held up": "x",
        "held up, by the line": "x",
        "launcher": "MB",
        "launcher, cpu": "%",
        "end": "s",
        "files not whole": "files",
        "files spoken of": "files",
        "lines unaccounted for": "lines",
    },
    targets=(
        Target("held up", "<=", 1.25),
        Target("held up, by the line", "<=", 1.25),
        Target("launcher", "<", 60, worst=True),
        Target("end", "<=", 12, worst=True),
        Target("files not whole", "<=", 0, worst=True),
        Target("files spoken of", ">=", WORKERS, worst=True),
        Target("lines unaccounted for", "<=", 0, worst=True),
    ),
    contenders={PHALANX: _measure, FLOOR: _floor},
    rounds=3,
    warm_up=False,
    limit=180.0,
)
