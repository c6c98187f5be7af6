"""Workers that write, and consoles that listen: what the cases about logs share.

Owns the writers' script, the two FIFOs by which they are held and let go together, and the comparison of what a
console was given with the files. Knows nothing of who stands between the two.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

LINE = 100
"""Bytes per line of a writer: 99, and the newline."""

PATIENCE = 60.0
"""Seconds that the next worker's word is waited for."""

_MOMENT = struct.Struct("q")

# A writer has all that it will write before it says that it is ready. Every line is unique, so that a checksum finds a
# line that is missing, twice there or out of order.
_WRITER = f"""
import os, struct, sys, time
lines, block, ready, gate, rank = sys.argv[1:]
rank = int(os.environ.get("LOCAL_RANK") or rank)
fill = b"." * {LINE}
text = memoryview(b"".join([(b"%d %09d " % (rank, line) + fill)[:{LINE - 1}] + b"\\n" for line in range(int(lines))]))
said = os.open(ready, os.O_RDWR)
held = os.open(gate, os.O_RDWR)
os.write(said, struct.pack("q", time.monotonic_ns()))
os.read(held, 1)
for at in range(0, len(text), int(block)):
    piece = text[at : at + int(block)]
    while piece:
        piece = piece[os.write(1, piece) :]
os.write(said, struct.pack("q", time.monotonic_ns()))
"""


def claim_memory(size: int) -> None:
    """Write ``size`` bytes to a file and remove it, so that the page cache has room for as many.

    A virtual machine may hand memory that is free back to its host, and then waits for every page that is written for
    the first time: half a second for 200 MB, which is more than what is measured.
    """
    block = bytes(1 << 20)
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(0, size, len(block)):
            file.write(block)


class Meeting:
    """Where workers say how far they have come, and are held until all are let go together.

    Both ways are FIFOs with both ends open everywhere: nobody blocks in opening one, and none ends with its first user.
    """

    def __init__(self, workers: int) -> None:
        folder = Path(tempfile.mkdtemp())
        self._workers = workers
        self.paths = (str(folder / "ready"), str(folder / "gate"))
        for path in self.paths:
            os.mkfifo(path)
        self._ready, self._gate = (os.open(path, os.O_RDWR) for path in self.paths)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        """Give the descriptors back."""
        os.close(self._ready)
        os.close(self._gate)

    def hear(self) -> list[int]:
        """Wait for the next word of every worker, and return the moments at which they spoke (CLOCK_MONOTONIC, ns).

        Raises RuntimeError when for ``PATIENCE`` seconds nobody says a word.
        """
        heard = b""
        while len(heard) < self._workers * _MOMENT.size:
            if not select.select([self._ready], [], [], PATIENCE)[0]:
                raise RuntimeError(f"{len(heard) // _MOMENT.size} of {self._workers} workers spoke, and then nobody")
            heard += os.read(self._ready, self._workers * _MOMENT.size - len(heard))
        return [moment for (moment,) in _MOMENT.iter_unpack(heard)]

    def release(self) -> int:
        """Let every worker go on, and return the moment (CLOCK_MONOTONIC, ns)."""
        moment = monotonic_ns()
        os.write(self._gate, b"." * self._workers)
        return moment


def writer(meeting: Meeting, lines: int, block: int) -> tuple[str, ...]:
    """Return the arguments for Python of a worker that writes ``lines`` lines, ``block`` bytes at a time.

    It says in ``meeting`` that it is ready, waits, writes, and says that it is done. Its rank is ``LOCAL_RANK`` of its
    environment, else one more argument.
    """
    return ("-S", "-E", "-c", _WRITER, str(lines), str(block), *meeting.paths)


def bare(args: list[tuple[str, ...]]) -> tuple[list[subprocess.Popen[bytes]], dict[int, str]]:
    """Start Python with each of ``args``, its output to a file; return the processes and, by rank, the files."""
    folder = Path(tempfile.mkdtemp())
    files = {rank: str(folder / f"{rank}.log") for rank in range(len(args))}
    workers = []
    for arg, path in zip(args, files.values(), strict=True):
        with open(path, "wb") as stdout:
            workers.append(subprocess.Popen([sys.executable, *arg], stdout=stdout))
    return workers, files


@contextlib.contextmanager
def shown_on(console: int, *, line_buffered: bool = True) -> Iterator[None]:
    """Let ``sys.stdout`` be a text stream on (a duplicate of) the descriptor ``console``; flushed and closed after.

    By lines, as on a terminal or under ``PYTHONUNBUFFERED``: the peer writes to ``sys.stdout``, from a thread for each
    file. With blocks it holds lines back for want of others, and its threads write into each other's lines.
    """
    stream = os.fdopen(os.dup(console), "w", buffering=1 if line_buffered else -1, encoding="utf-8")
    with stream, contextlib.redirect_stdout(stream):
        yield


class Text(NamedTuple):
    """What a stream came to: its bytes, its lines, and a checksum."""

    size: int
    lines: int
    digest: str


def in_file(path: str) -> Text:
    """Return what is in a worker's file."""
    digest, size, lines = hashlib.sha256(), 0, 0
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
            size += len(data)
            lines += data.count(b"\n")
    return Text(size, lines, digest.hexdigest())


def on_console(path: str, ranks: int) -> tuple[dict[int, Text], int]:
    """Return what a console was given, by rank and without prefixes, and the lines that carried no rank's prefix."""
    prefixes = {b"[%d]" % rank: rank for rank in range(ranks)}
    digests = [hashlib.sha256() for _ in range(ranks)]
    sizes, lines = [0] * ranks, [0] * ranks
    foreign = 0
    with open(path, "rb") as file:
        for line in file:
            prefix, _, text = line.partition(b" ")
            rank = prefixes.get(prefix)
            if rank is None:
                foreign += 1
                continue
            digests[rank].update(text)
            sizes[rank] += len(text)
            lines[rank] += text.endswith(b"\n")
    return {rank: Text(sizes[rank], lines[rank], digests[rank].hexdigest()) for rank in range(ranks)}, foreign


def differing(console: str, files: Mapping[int, str], lines: int) -> list[str]:
    """Compare what a console was given, which is in a file, with the workers' files; return what is wrong, in words."""
    found, foreign = on_console(console, len(files))
    wrong = [f"{foreign} lines without a rank's prefix"] if foreign else []
    for rank, path in sorted(files.items()):
        file = in_file(path)
        if file.lines != lines:
            wrong.append(f"rank {rank}: {file.lines} of {lines} lines are in the file")
        if found[rank] != file:
            kind = "bytes" if found[rank].lines == file.lines else "lines"
            wrong.append(f"rank {rank}: other {kind} than in the file: {found[rank].lines} lines of {file.lines}")
    return wrong
