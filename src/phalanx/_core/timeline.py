"""When the bytes of an attempt's log files were written: an index beside them. Owns its format, and both its ends.

A log file holds what the worker wrote and nothing else. To merge the files of many ranks in the order of time, long
after, takes to know when each grew: so the pump, which sees every growth as it happens, notes it.

The file begins with `MAGIC` and the wall clock's time (64 bits, nanoseconds since the epoch). Records of 8 bytes
follow, little-endian: milliseconds since the record before (16 bits), stream (16 bits: twice the local rank, plus one
for stderr), bytes by which it grew (32 bits; uncompressed). A record of the stream 0xFFFF has its kind in the upper and
the stream that it is of in the lower half of the last field, and a number of 64 bits after it:

- `CUT`: the file was cut short. What was noted of it is not in it any more; what it has grown by since, follows.
- `ASIDE`: what was noted of the file since the last such record is in the file that was set aside under this number. It
  comes once with 0 for a log that is rotated, before anything is noted of it; others have no such files.
- the clock: what time it is by the wall clock. Milliseconds are counted on CLOCK_MONOTONIC, which suspends with the
  machine and does not follow when the clock is set: so the wall clock is noted anew when they have come apart by
  `APART`, and after a pause that 16 bits do not hold. Times can go back, as the wall clock does; records are in order.

So a time is that of the pump's look, to 0.02 s: what growths that are close together share, and how far the clocks may
be apart. A cut is seen by the size: one after which the file grows, before the next look, beyond what it was, is not.
The first version, `phalanx1`, had no such records: its growths are those of all the log's files, one after the other.
"""

from __future__ import annotations

import os
import struct

from phalanx._core import clock, files
from phalanx._core.set_aside import NEWEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO

MAGIC = b"phalanx2"
FIRST = b"phalanx1"
NAME = "timeline"
HEAD = struct.Struct("<8sQ")
RECORD = struct.Struct("<HHI")
NUMBER = struct.Struct("<Q")
MOST = 128 << 20
"""Bytes of one that are read: 16 million growths. What comes after is as if it had not been noted."""

GREW, CUT, ASIDE = 0, 1, 2
_CLOCK = 3
_KIND = 0xFFFF

APART = 0.01
"""Seconds by which a time may be wrong, because wall clock and monotonic clock have come apart."""

_TOGETHER = 10  # milliseconds in which growths of one stream, with none of another in between, are one
_PAUSE = 0xFFFF
_GROWTH = 0xFFFFFFFF
_MOST_SIZE = (
    1 << 44
)  # bytes of a file that are noted: 16 TiB, in 4,096 records; ftruncate(2) makes larger ones of holes
_BUFFER = 4096


class Timeline:
    """Writes one. What cannot be written is given up: the log files are complete without it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._sizes: dict[int, int] = {}
        self._records = bytearray()
        self._last = self._wall = 0.0  # the moment of the last record (monotonic), and what a reader takes it for
        self.since = 0.0
        """When the first of what is not written yet was noted (seconds, monotonic)."""
        self._stream = -1
        self._given_up = False

    @property
    def unwritten(self) -> bool:
        """Whether there is something to `flush`."""
        return bool(self._records)

    def note(self, stream: int, size: int, number: int = NEWEST) -> None:
        """The newest file of ``stream`` has ``size`` bytes now; or was set aside with so many, as ``number``."""
        size = min(size, _MOST_SIZE)
        grown = size - self._sizes.get(stream, 0)
        self._sizes[stream] = size if number == NEWEST else 0
        if self._given_up or (not grown and number == NEWEST):
            return
        if not self._records:
            self.since = clock.now()
        pause = self._pause()
        if grown < 0:
            self._special(pause, CUT, stream, 0)
            grown, pause = size, 0
        if grown:
            self._grow(pause, stream, grown)
            pause = 0
        if number != NEWEST:
            self._special(pause, ASIDE, stream, number)
        if len(self._records) > _BUFFER:
            self.flush()

    def _pause(self) -> int:
        """Milliseconds since the last record. Notes the wall clock, if they do not tell what it shows."""
        now, wall = clock.now(), clock.wall()
        since = now - self._last
        if not self._wall:
            self._records += HEAD.pack(MAGIC, int(wall * clock.NS))
        elif abs(wall - self._wall - since) > APART or since * 1000 > _PAUSE:
            self._special(0, _CLOCK, 0, int(wall * clock.NS))
        else:
            return int(since * 1000)
        self._last, self._wall = now, wall
        return 0

    def _grow(self, pause: int, stream: int, grown: int) -> None:
        if stream == self._stream and pause < _TOGETHER:
            place = len(self._records) - RECORD.size
            before, _stream, bytes_ = RECORD.unpack_from(self._records, place)
            if bytes_ + grown <= _GROWTH:
                RECORD.pack_into(self._records, place, before, stream, bytes_ + grown)
                return
        self._pass(pause)
        while grown > _GROWTH:
            self._records += RECORD.pack(pause, stream, _GROWTH)
            grown, pause = grown - _GROWTH, 0
        self._records += RECORD.pack(pause, stream, grown)
        self._stream = stream

    def _special(self, pause: int, kind: int, stream: int, number: int) -> None:
        self._pass(pause)
        self._records += RECORD.pack(pause, _KIND, kind << 16 | stream) + NUMBER.pack(number)
        self._stream = -1

    def _pass(self, pause: int) -> None:
        self._last += pause / 1000
        self._wall += pause / 1000

    def flush(self) -> None:
        """Write what has been noted."""
        records, self._records = self._records, bytearray()
        self._stream = -1
        if not records or self._given_up:
            return
        try:
            if self._file is None:
                fd = files.opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                self._file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open until `close`
            self._given_up = self._file.write(records) != len(
                records
            )  # what came after half a record would be no record
        except OSError:
            self._given_up = True

    def close(self) -> None:
        """Write what is left, and give the descriptor back. Idempotent."""
        self.flush()
        self._given_up = True
        if self._file is not None:
            self._file.close()
            self._file = None


def load(path: str) -> bytes:
    """The content of one as it is now, `MOST` bytes of it; nothing if it is missing, or none."""
    try:
        data = files.contents(path, MOST)
    except OSError:
        return b""
    return data if len(data) >= HEAD.size and data.startswith((MAGIC, FIRST)) else b""


def records(data: bytes) -> Iterator[tuple[float, int, int, int]]:
    """Read what was loaded: time (seconds since the epoch), kind, stream, and the bytes or the number.

    Of a damaged one, what can be read of it.
    """
    if not data:
        return
    time = HEAD.unpack_from(data)[1] / clock.NS
    whole = len(data) - (len(data) - HEAD.size) % RECORD.size
    each = RECORD.iter_unpack(memoryview(data)[HEAD.size : whole])
    for pause, stream, grown in each:
        time += pause / 1000
        if stream != _KIND:
            if grown:
                yield time, GREW, stream, grown
            continue
        low, middle, high = next(each, (0, 0, 0))
        number = low | middle << 16 | high << 32
        if grown >> 16 == _CLOCK:
            time = number / clock.NS
        else:
            yield time, grown >> 16, grown & 0xFFFF, number


def read(path: str) -> Iterator[tuple[float, int, int, int]]:
    """The `records` of one."""
    return records(load(path))
