"""How long a line takes from the worker that writes it to whoever reads the console."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import chatter
from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import start

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 4
RATE = 27
"""Lines a second of each worker."""

SECONDS = 8.0
LINES = math.ceil(RATE * SECONDS)
"""Lines of each worker."""

# The moment (CLOCK_MONOTONIC is the same for all processes) is the second word of the line. The workers are out of
# step with each other, by a share of the period that is no even one.
_WORKER = """
import os, struct, sys, time
rate, count, ready, gate, rank = sys.argv[1:]
said = os.open(ready, os.O_RDWR)
held = os.open(gate, os.O_RDWR)
os.write(said, struct.pack("q", time.monotonic_ns()))
os.read(held, 1)
began = time.monotonic() + int(rank) * 0.23 / int(rate)
for line in range(int(count)):
    time.sleep(max(0.0, began + line / int(rate) - time.monotonic()))
    os.write(1, b"step %d and what else a training says of it in about eighty bytes\\n" % time.monotonic_ns())
"""

# The reader is a process of its own: in the launcher it would compete with what it measures for the interpreter.
_READER = """
import json, os, re, sys, time
heard = []
while data := os.read(0, 65536):
    heard.append((time.monotonic_ns(), data))
delays, line = [], b""
for moment, data in heard:
    *lines, line = (line + data).split(b"\\n")
    delays += [(moment - int(written)) / 1e6 for text in lines for written in re.findall(rb"step (\\d+) ", text)]
json.dump(delays, sys.stdout)
"""

# The least code that keeps each line in a file, as Phalanx does, and shows it when it comes. Each line is one write.
_FOLLOWER = """
import ctypes, os, struct, sys
lines, *paths = sys.argv[1:]
library, left = ctypes.CDLL(None), int(lines)
events = library.inotify_init1(os.O_CLOEXEC)
files = {library.inotify_add_watch(events, path.encode(), 2): os.open(path, os.O_RDONLY) for path in paths}
os.write(2, b".")
while left:
    for watch, _mask, _cookie, _length in struct.iter_unpack("iIII", os.read(events, 65536)):
        found = os.read(files[watch], 65536).splitlines(True)
        if found:
            left -= len(found)
            os.write(1, b"".join([b"[%d] " % watch + line for line in found]))
"""


def _measure(run: Callable[[int, chatter.Meeting, list[tuple[object, ...]]], None]) -> Sample:
    out, console = os.pipe()
    reader = subprocess.Popen([sys.executable, "-S", "-E", "-c", _READER], stdin=out, stdout=subprocess.PIPE)
    os.close(out)
    with chatter.Meeting(WORKERS) as meeting:
        command = ("-S", "-E", "-c", _WORKER, str(RATE), str(LINES), *meeting.paths)
        run(console, meeting, [(*command, str(rank)) for rank in range(WORKERS)])
    os.close(console)
    delays = sorted(json.loads(reader.communicate()[0]))
    figures = {
        "median": median(delays),
        "median, file": median(delays),
        "p99": delays[math.ceil(0.99 * len(delays)) - 1],
        "most": delays[-1],
        "missing": WORKERS * LINES - len(delays),
    }
    return Sample({name: [value] for name, value in figures.items()})


def _group(contender: str, console: int, meeting: chatter.Meeting, args: list[tuple[object, ...]]) -> None:
    with chatter.shown_on(console):
        context = start(contender, sys.executable, args, tee=True)
        meeting.hear()
        meeting.release()
        context.wait()
        context.close()


def _bare(console: int, meeting: chatter.Meeting, args: list[tuple[object, ...]]) -> None:
    workers = [subprocess.Popen([sys.executable, *map(str, arg)], stdout=console) for arg in args]
    meeting.hear()
    meeting.release()
    for worker in workers:
        worker.wait()


def _by_file(console: int, meeting: chatter.Meeting, args: list[tuple[object, ...]]) -> None:
    workers, files = chatter.bare([tuple(map(str, arg)) for arg in args])
    command = [sys.executable, "-S", "-E", "-c", _FOLLOWER, str(WORKERS * LINES), *files.values()]
    with subprocess.Popen(command, stdout=console, stderr=subprocess.PIPE) as follower:
        assert follower.stderr is not None
        follower.stderr.read(1)
        meeting.hear()
        meeting.release()
        for worker in workers:
            worker.wait()


def _floor() -> Sample:
    """Measure both: nobody in between, and for "median, file" somebody who reads files."""
    bare, by_file = _measure(_bare), _measure(_by_file)
    return Sample({**bare.figures, "median, file": by_file.figures["median"]})


CASE = Case(
    name="log_delay",
    measures=f"{WORKERS} workers write {RATE} lines a second each, teed to a pipe: from the write to the reader",
    units={"median": "ms", "median, file": "ms", "p99": "ms", "most": "ms", "missing": "lines"},
    targets=(
        Target("median", "<", 2),
        Target("median, file", "<=", 2, of=FLOOR),
        Target("p99", "<", 10),
        Target("missing", "<=", 0, worst=True),
    ),
    contenders={
        PHALANX: partial(_measure, partial(_group, PHALANX)),
        TORCH: partial(_measure, partial(_group, TORCH)),
        FLOOR: _floor,
    },
    rounds=3,
    peer_rounds=1,
    warm_up=False,
)
