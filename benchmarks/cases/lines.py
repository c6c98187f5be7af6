"""N programs write lines, which the launcher marks with who wrote them: MB/s, and lines that are lost or torn."""

from __future__ import annotations

import collections
import re
import sys
import time
from functools import partial

from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.jobs import Started
from benchmarks.launchers import LAUNCHERS

LINE = 100
TOTAL = 64_000_000
LIMIT = 100.0

_WRITER = f"""
import os, sys
folder, lines = sys.argv[1], int(sys.argv[2])
with open(folder + "/ready", "wb", 0) as ready:
    ready.write(b".")
open(folder + "/go").close()
own = "@%d:" % os.getpid()
for first in range(0, lines, 80):
    text = "".join((own + "%08d:" % n).ljust({LINE - 2}, "x") + "@\\n" for n in range(first, min(first + 80, lines)))
    sys.stdout.write(text)
    sys.stdout.flush()
"""
# The floor: nobody reads the lines. To a file of each: in one that they share they would wait for each other.
_ALONE = """
import os, sys
sys.stdout = open(sys.argv[1] + "/alone-%d" % os.getpid(), "w")
"""
_WHOLE = re.compile(rb"@(\d+):(\d{8}):x+@\r?$")
_PIECE = re.compile(rb"x{8}|@\d+:\d")


def judge(shown: bytes, copies: int, lines: int) -> tuple[int, int]:
    r"""Return how many lines of ``copies`` times ``lines`` are missing, and how many are torn or mixed.

    >>> judge(b"[0] @7:00000000:xx@\n[0] @7:00000001:xx@\nlauncher: bye\n", 1, 3)
    (1, 0)
    >>> judge(b"@7:0@8:00000000:xx@", 1, 1)
    (1, 1)
    """
    seen: dict[bytes, set[bytes]] = collections.defaultdict(set)
    torn = 0
    for line in shown.split(b"\n"):
        found = _WHOLE.search(line)
        if found and line.count(b"@") == 2:
            seen[found[1]].add(found[2])
        elif _PIECE.search(line):
            torn += 1
    return copies * lines - sum(map(len, seen.values())), torn


def _measure(name: str, copies: int) -> Sample:
    lines = TOTAL // LINE // copies // (20 if name == TORCH else 1)
    python = (sys.executable, "-S", "-E")
    script = _ALONE * (name == FLOOR) + _WRITER
    with Started(name, script, copies, interpreter=python, arguments=[str(lines)], teed=True) as job:
        job.wait_ready()
        began = time.monotonic()
        job.let_go()
        job.wait(LIMIT)
        took = time.monotonic() - began
        shown = b"".join([path.read_bytes() for path in [job.shown, *job.folder.glob("alone-*")]])
        missing, torn = judge(shown, copies, lines)
    speed = copies * lines * LINE / 1e6 / took
    return Sample({"speed": [speed], "missing": [missing], "torn": [torn]})


CASE = Case(
    name="lines",
    measures=f"N programs write {TOTAL // 1_000_000} MB of lines of {LINE} bytes together (torch's a twentieth), which "
    "the launcher shows with a mark, in a file: until its exit; lines that are missing, and that are torn or mixed. "
    "The floor's programs write to a file each, which nobody shows",
    units={"speed": "MB/s", "missing": "lines", "torn": "lines"},
    targets=(Target("missing", "<=", 0, worst=True), Target("torn", "<=", 0, worst=True)),
    contenders={name: partial(_measure, name) for name, of in LAUNCHERS.items() if of.tees or name == FLOOR},
    sizes=(1, 8, 64),
    rounds=3,
    peer_rounds=1,
    warm_up=False,
    interpreter=PHALANX,
)
