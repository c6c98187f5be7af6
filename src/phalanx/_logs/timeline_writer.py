"""Writes the timeline of an attempt: when its log files grew. Owns how often, and so how long it gets.

A stream has a record for each growth as long as there is no more than one in `SPACING` seconds. `BURST` records may
come at once: they are saved up while the stream is quiet, so that a traceback after hours of silence has its times.
Beyond these, a stream's growth is noted once in `SPACING`, with that of all others that are held, at the end of that
time: so late may a time be, and so far out of order across streams. `SPACING` doubles with each `DOUBLING` bytes of the
timeline.
"""

from __future__ import annotations

import math
import os

from phalanx._base import clock, files
from phalanx._logs.rotated import NEWEST
from phalanx._logs.timeline_format import APART, CLOCK, CUT, GREW, HEAD, KINDS, MAGIC, ROTATED, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import FileIO

SPACING = 0.1
"""Seconds between two records of one stream, once it has had more than `BURST` that were closer;"""
BURST = 1000
DOUBLING = 16 << 20
"""and bytes of the timeline after each of which these seconds double."""

_TOGETHER = 10  # milliseconds in which growths of one stream, with none of another in between, are one
_MOST_SIZE = 1 << 44  # bytes of a file that are noted: 16 TiB; ftruncate(2) makes larger ones of holes
_BUFFER = 4096


class TimelineWriter:
    """Writes the timeline ``path``. An error in writing ends it: the log files are complete without it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._sizes: dict[int, int] = {}
        self._records = bytearray()
        self._last = self._wall = 0.0  # the moment of the last record: monotonic, and as a reader computes it
        self.since = 0.0
        """When the oldest record that is not written yet was noted (seconds, monotonic); or will be, if it is held."""
        self._latest = (-1, 0, 0, 0)  # the last record, if it is a growth: its stream, offset, milliseconds and bytes
        self._next: dict[int, float] = {}  # when a stream may have its next record, if it has saved up none
        self._held: dict[int, tuple[bool, int]] = {}  # streams that wait for that: whether cut, and the growth since
        self._release_at = math.inf  # when records are made of these
        self._size = 0
        self._given_up = False

    @property
    def unwritten(self) -> bool:
        """Whether there is something to `flush`."""
        return bool(self._records or self._held)

    def note(self, stream: int, size: int, number: int = NEWEST) -> None:
        """Note that the newest file of ``stream`` has ``size`` bytes; or had so many when rotated to ``number``."""
        size = min(size, _MOST_SIZE)
        grown = size - self._sizes.get(stream, 0)
        self._sizes[stream] = size if number == NEWEST else 0
        if self._given_up or (not grown and number == NEWEST):
            return
        now = clock.now()
        if now >= self._release_at:
            self._release(self._release_at)
        if number == NEWEST and (stream in self._held or not self._may(stream, now)):
            self._hold(stream, size, grown, now)
            return
        if not self._records:
            self.since = now
        cut, held = self._held.pop(stream, (False, 0))
        if grown < 0:
            cut, held, grown = True, 0, size
        self._write(stream, now, cut, held + grown)
        if number != NEWEST:
            self._put(self._pause(now), ROTATED, stream, number)
        if len(self._records) > _BUFFER:
            self.flush()

    def _may(self, stream: int, now: float) -> bool:
        """Whether a stream may have a record now. If so, it is counted."""
        if stream == self._latest[0] and (now - self._last) * 1000 < _TOGETHER:
            return True  # it becomes part of the last one
        spacing = self._spacing()
        due = max(self._next.get(stream, 0.0), now - BURST * spacing)
        if due > now:
            return False
        self._next[stream] = due + spacing
        return True

    def _spacing(self) -> float:
        return SPACING * float(1 << min(32, self._size // DOUBLING))

    def _hold(self, stream: int, size: int, grown: int, now: float) -> None:
        cut, held = self._held.get(stream, (False, 0))
        if not self._held:
            self._release_at = now + self._spacing()
            if not self._records:
                self.since = self._release_at
        self._held[stream] = (True, size) if grown < 0 else (cut, held + grown)

    def _release(self, at: float) -> None:
        """Make records of what is held, as of ``at``: not before the last record, and not after now."""
        held, self._held, self._release_at = self._held, {}, math.inf
        spacing = self._spacing()
        if held and not self._records:
            self.since = at
        for stream, (cut, grown) in held.items():
            self._next[stream] = max(self._next.get(stream, 0.0), at - BURST * spacing) + spacing
            self._write(stream, at, cut, grown)

    def _write(self, stream: int, at: float, cut: bool, grown: int) -> None:  # noqa: FBT001 - two facts of one growth
        if cut:
            self._put(self._pause(at), CUT, stream, 0)
        if grown:
            self._grow(self._pause(at), stream, grown)

    def _pause(self, at: float) -> int:
        """Return the milliseconds since the last record. Notes the wall clock first if it has gone on differently."""
        since, wall = at - self._last, clock.wall() - (clock.now() - at)
        if not self._wall:
            self._records += HEAD.pack(MAGIC, int(wall * clock.NS))
        elif abs(wall - self._wall - since) > APART:
            self._put(0, CLOCK, 0, int(wall * clock.NS))
        else:
            return int(since * 1000)
        self._last, self._wall = at, wall
        return 0

    def _grow(self, pause: int, stream: int, grown: int) -> None:
        latest, offset, before, bytes_ = self._latest
        if stream == latest and pause < _TOGETHER:
            del self._records[offset:]
            pause, grown = before, bytes_ + grown
            self._last -= pause / 1000
            self._wall -= pause / 1000
        offset = len(self._records)
        self._put(pause, GREW, stream, grown)
        self._latest = (stream, offset, pause, grown)

    def _put(self, pause: int, kind: int, stream: int, value: int) -> None:
        self._last += pause / 1000
        self._wall += pause / 1000
        self._records += pack(pause, stream * KINDS + kind, value)
        self._latest = (-1, 0, 0, 0)

    def flush(self) -> None:
        """Write the records to the file."""
        if clock.now() >= self._release_at:
            self._release(self._release_at)
        records, self._records = self._records, bytearray()
        self._latest = (-1, 0, 0, 0)
        self.since = self._release_at
        if not records or self._given_up:
            return
        try:
            if self._file is None:
                fd = files.opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                self._file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open until `close`
            wrote = self._file.write(records)
            self._given_up = wrote != len(records)  # records after half a record could not be read
        except OSError:
            self._given_up = True
            return
        self._size += len(records)

    def close(self) -> None:
        """Write the records that are left, and close the file. Idempotent."""
        if not self._given_up:
            self._release(max(clock.now(), self._last))
        self.flush()
        self._given_up = True
        if self._file is not None:
            self._file.close()
            self._file = None
