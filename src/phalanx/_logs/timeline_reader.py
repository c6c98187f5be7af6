"""Reads a timeline, which may be damaged, or somebody else's."""

from __future__ import annotations

import os
from collections.abc import Iterator

from phalanx._base import clock, files
from phalanx._logs.rotated import MOST_NUMBER
from phalanx._logs.timeline_format import CLOCK, CUT, GREW, HEAD, KINDS, MAGIC, ROTATED, Record, unpack

MOST_PARTS = 1 << 18
"""Cuts and rotations, all of which a reader keeps in memory. Records after so many are ignored."""

_ANY = b"phalanx"  # what the magic number of every format begins with
_BLOCK = 64 * 1024
_LATEST = float(1 << 37)  # seconds since the epoch: a later time has no date in a calendar


class TimelineReader:
    """A timeline as it is now. It can be read more than once; what is written to it or replaces it later is not read.

    A missing file, or one that is no timeline of this format, has no records. A damaged one has those before the
    damage. It is read in pieces: a long one takes no more memory.
    """

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._size = 0
        self._started: float | None = None  # seconds since the epoch; None: it has no records
        try:
            self._fd = files.opened(path)
            self._size = os.fstat(self._fd).st_size
            head = os.pread(self._fd, HEAD.size, 0)
        except OSError:
            return
        if len(head) == HEAD.size and head.startswith(MAGIC):
            self._started = HEAD.unpack(head)[1] / clock.NS

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def records(self) -> Iterator[Record]:
        """Yield its records: see `Record`."""
        if self._started is None:
            return
        time, parts = self._started, 0
        for pause, key, value in self._triples():
            kind, stream = key % KINDS, key // KINDS
            time = value / clock.NS if kind == CLOCK else time + pause / 1000
            parts += kind in (CUT, ROTATED)
            if time > _LATEST or (kind == ROTATED and value > MOST_NUMBER) or parts > MOST_PARTS:  # damaged
                return
            if kind != CLOCK and (value or kind != GREW):
                yield time, kind, stream, value

    def _triples(self) -> Iterator[tuple[int, int, int]]:
        offset, left = HEAD.size, b""
        while offset < self._size:
            try:
                block = os.pread(self._fd, min(_BLOCK, self._size - offset), offset)
            except OSError:
                return
            offset += len(block)
            triples, used, whole = unpack(left + block)
            yield from triples
            if not whole or not block:
                return
            left = (left + block)[used:]


def read(path: str) -> Iterator[Record]:
    """Yield the records of the timeline in ``path``."""
    timeline = TimelineReader(path)
    try:
        yield from timeline.records()
    finally:
        timeline.close()


def is_foreign(path: str) -> bool:
    """Whether another version of Phalanx has written the timeline in ``path``, in a format that is not read."""
    try:
        fd = files.opened(path)
        try:
            head = os.pread(fd, len(MAGIC), 0)
        finally:
            os.close(fd)
    except OSError:
        return False
    return head.startswith(_ANY) and not MAGIC.startswith(head)
