"""N programs write lines, which the launcher marks with who wrote them: MB/s, and lines that are lost or torn."""

from __future__ import annotations

import collections
import re
import sys
import time
from functools import partial

from benchmarks.case import PHALANX, Case, Sample, Target
from benchmarks.jobs import Started
from benchmarks.launchers import LAUNCHERS

LINE = 100
TOTAL = 64_000_000
LIMIT = 100.0
COUNTS = ("missing", "torn", "wrong")

_WRITER = f"""
import os, sys
folder, lines, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open(folder + "/ready", "wb", 0) as ready:
    ready.write(b"%d\\n" % os.getpid())
open(folder + "/go").close()
own = "@%s:" % os.environ.get(name, os.getpid())
for first in range(0, lines, 80):
    text = "".join((own + "%08d:" % n).ljust({LINE - 2}, "x") + "@\\n" for n in range(first, min(first + 80, lines)))
    sys.stdout.write(text)
    sys.stdout.flush()
"""
_WHOLE = re.compile(rb"@([\w.]+):(\d{8}):x+@")
_PIECE = re.compile(rb"x{8}|@[\w.]+:\d")


def judge(shown: bytes, mark: bytes, copies: int, lines: int) -> dict[str, int]:
    r"""Return how many of ``copies`` times ``lines`` are missing even where all that a copy wrote is put together.

    And how many are torn or mixed; and wrong: without the copy's ``mark``, with another's, twice there, out of order.

    >>> line = b"@%d:%08d:" + b"x" * 86 + b"@\n"
    >>> judge(b"[7] " + line % (7, 0) + b"[7] " + line % (7, 2) + b"launcher: bye\n", rb"\[(\d)\] ", 1, 3)
    {'missing': 1, 'torn': 0, 'wrong': 0}
    >>> split = b"[7] @7:" + b"\n[7] " + (line % (7, 0))[3:]
    >>> judge(split + b"[7] " + line % (8, 0), rb"\[(\d)\] ", 2, 1)
    {'missing': 0, 'torn': 1, 'wrong': 1}
    """
    seen: dict[bytes, set[bytes]] = collections.defaultdict(set)
    last: dict[bytes, bytes] = {}
    torn = wrong = 0
    marked = re.compile(mark + rb"@\1:\d{8}:x+@\r?")
    for line in shown.split(b"\n"):
        found = _WHOLE.search(line)
        if found and line.count(b"@") == 2 and len(found[0]) == LINE - 1:
            copy, number = found.groups()
            wrong += number <= last.get(copy, b"") or not marked.fullmatch(line)
            seen[copy].add(number)
            last[copy] = number
        elif _PIECE.search(line):
            torn += 1
    if torn:
        wrote: dict[bytes, list[bytes]] = collections.defaultdict(list)
        _, *parts = re.split(mark, shown)
        for copy, text in zip(parts[::2], parts[1::2], strict=True):
            wrote[copy].append(text.translate(None, b"\r\n"))
        for text in map(b"".join, wrote.values()):
            for found in _WHOLE.finditer(text):
                if len(found[0]) == LINE - 1:
                    seen[found[1]].add(found[2])
    there = sorted(map(len, seen.values()), reverse=True)
    return {"missing": copies * lines - sum(there[:copies]), "torn": torn, "wrong": wrong + sum(there[copies:])}


def measure(name: str, copies: int) -> Sample:
    """Measure a launcher with so many copies."""
    lines = TOTAL // LINE // copies
    launcher = LAUNCHERS[name]
    python, arguments = (sys.executable, "-S", "-E"), (str(lines), launcher.names)
    with Started(name, _WRITER, copies, interpreter=python, arguments=arguments, teed=True) as job:
        job.wait_ready()
        began = time.monotonic()
        job.let_go()
        code = job.wait(LIMIT)
        took = time.monotonic() - began
        found = judge(job.shown.read_bytes(), launcher.tees, copies, lines)
    figures = {"speed": copies * lines * LINE / 1e6 / took, **found, "told as failure": int(code != 0)}
    return Sample({figure: [value] for figure, value in figures.items()})


CASE = Case(
    name="lines",
    measures=f"N programs write {TOTAL // 1_000_000} MB of lines of {LINE} bytes together, which the launcher "
    "shows with a mark, in a file: until its exit; lines that are missing (of which a part is), torn or mixed, and "
    "wrong: without the mark of their program, twice there or out of order",
    units={"speed": "MB/s", **dict.fromkeys(COUNTS, "lines"), "told as failure": "runs"},
    targets=tuple(Target(count, "<=", 0, worst=True) for count in (*COUNTS, "told as failure")),
    contenders={name: partial(measure, name) for name, launcher in LAUNCHERS.items() if launcher.tees},
    sizes=(1, 8, 64),
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    interpreter=PHALANX,
)
