"""When the bytes of an attempt's log files were written: an index beside them. Owns its format, and both its ends.

A log file holds what the worker wrote and nothing else. To merge the files of many ranks in the order of time, long
after, takes to know when each grew: so the pump, which sees every growth as it happens, notes it.

The file begins with `MAGIC` and the wall clock's time (64 bits, little-endian, nanoseconds since the epoch). Records
follow, each of three numbers in groups of 7 bits (LEB128, 63 bits at most): milliseconds since the record before; four
times the stream (which is twice the local rank, plus one for stderr) plus the kind; and a value:

- `GREW`: bytes by which the file grew (uncompressed).
- `CUT`: the file was cut short. What was noted of it is not in it any more; what it has grown by since, follows.
- `ASIDE`: what was noted of the file since the last such record is in the file that was set aside under this number. It
  comes once with 0 for a log that is rotated, before anything is noted of it; others have no such files.
- the clock: what time it is by the wall clock, in nanoseconds. Milliseconds are counted on CLOCK_MONOTONIC, which
  suspends with the machine and does not follow when the clock is set: so the wall clock is noted anew when they have
  come apart by `APART`. Times can go back, as the wall clock does; records are in order.

So a time is that of the pump's look, to 0.02 s: what growths that are close together share, and how far the clocks may
be apart. A cut is seen by the size: one after which the file grows, before the next look, beyond what it was, is not.

How long it gets is bounded, whatever a worker writes. A stream has a record for each growth as long as there is no more
than one in `SPACING` seconds; `BURST` of them may come at once, which are saved up while it is quiet: so a traceback
after hours of silence has its times. What a stream writes beyond is noted once in that time, with all others that do
so, by the end of it: that is how late, and how far out of order across streams, it may be. And the time doubles with
each `DOUBLING` bytes of the file. What it says of files that rotation has removed goes, too: see `trimming`.

The versions before, `phalanx1` and `phalanx2`, had records of 8 bytes for each growth; the first had nothing but
growths, and they are those of all the log's files, one after the other.
"""

from __future__ import annotations

import math
import os
import struct

from phalanx._base import clock, files
from phalanx._logs.index_trimming import Trimming
from phalanx._logs.rotated import MOST_NUMBER, NEWEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO

    Record = tuple[float, int, int, int]

MAGIC = b"phalanx3"
SECOND = b"phalanx2"
FIRST = b"phalanx1"
NAME = "timeline"
HEAD = struct.Struct("<8sQ")
RECORD = struct.Struct("<HHI")  # of the versions before: milliseconds, stream, bytes
NUMBER = struct.Struct("<Q")

GREW, CUT, ASIDE, CLOCK = range(4)
KINDS = 4
"""How many there are: a record has four times the stream, plus the kind."""
_KIND = 0xFFFF  # the stream, in the versions before, of what is no growth

APART = 0.01
"""Seconds by which a time may be wrong, because wall clock and monotonic clock have come apart."""

SPACING = 0.1
"""Seconds between two records of one stream, once it has had more than `BURST` that were closer;"""
BURST = 1000
DOUBLING = 16 << 20
"""and bytes of the file after each of which they double."""

_TOGETHER = 10  # milliseconds in which growths of one stream, with none of another in between, are one
MOST_PARTS = 1 << 18
"""Cuts and files that were set aside, all of which a reader keeps in mind. What comes after is as if not noted."""

_MOST_SIZE = 1 << 44  # bytes of a file that are noted: 16 TiB; ftruncate(2) makes larger ones of holes
_BUFFER = 4096
_BLOCK = 64 * 1024
_MOST_DIGITS = 9  # groups of 7 bits
_LATEST = float(1 << 37)  # seconds since the epoch, which a calendar still has
_BITS, _MORE = 7, 0x80


class Timeline:
    """Writes one. What cannot be written is given up: the log files are complete without it.

    Args:
        path: The file.
        logs: The paths of the streams that are rotated, by number. None: of files that are removed, nothing is.
    """

    def __init__(self, path: str, logs: Mapping[int, str] | None = None) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._sizes: dict[int, int] = {}
        self._records = bytearray()
        self._last = self._wall = 0.0  # the moment of the last record (monotonic), and what a reader takes it for
        self.since = 0.0
        """When the first of what is not written yet was noted, or can be (seconds, monotonic)."""
        self._latest = (-1, 0, 0, 0)  # the last record, if it is a growth: its stream, place, milliseconds and bytes
        self._next: dict[int, float] = {}  # when a stream may have its next record, if it has saved up none
        self._held: dict[int, tuple[bool, int]] = {}  # what waits for that: whether it was cut, and its growth since
        self._frame = math.inf  # when that is noted
        self._size = 0
        self._trimming = Trimming(path, logs or {})
        self._given_up = False

    @property
    def unwritten(self) -> bool:
        """Whether there is something to `flush`."""
        return bool(self._records or self._held)

    def note(self, stream: int, size: int, number: int = NEWEST) -> None:
        """The newest file of ``stream`` has ``size`` bytes now; or was set aside with so many, as ``number``."""
        size = min(size, _MOST_SIZE)
        grown = size - self._sizes.get(stream, 0)
        self._sizes[stream] = size if number == NEWEST else 0
        if self._given_up or (not grown and number == NEWEST):
            return
        now = clock.now()
        if now >= self._frame:
            self._release(self._frame)
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
            self._put(self._pause(now), ASIDE, stream, number)
            self._trimming.ended(stream, number)
        if len(self._records) > _BUFFER:
            self.flush()

    def _may(self, stream: int, now: float) -> bool:
        """Whether a stream may have a record now; then it has had it."""
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
            self._frame = now + self._spacing()
            if not self._records:
                self.since = self._frame
        self._held[stream] = (True, size) if grown < 0 else (cut, held + grown)

    def _release(self, at: float) -> None:
        """Note what is held, as of ``at``, which is not before the last record and not after now."""
        held, self._held, self._frame = self._held, {}, math.inf
        spacing = self._spacing()
        if held and not self._records:
            self.since = at
        for stream, (cut, grown) in held.items():
            self._next[stream] = max(self._next.get(stream, 0.0), at - BURST * spacing) + spacing
            self._write(stream, at, cut, grown)

    def _write(self, stream: int, at: float, cut: bool, grown: int) -> None:  # noqa: FBT001 - two facts of one growth
        if cut:
            self._put(self._pause(at), CUT, stream, 0)
            self._trimming.ended(stream, NEWEST)
        if grown:
            self._grow(self._pause(at), stream, grown)

    def _pause(self, at: float) -> int:
        """Milliseconds since the last record. Notes the wall clock, if they do not tell what it shows."""
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
        latest, place, before, bytes_ = self._latest
        if stream == latest and pause < _TOGETHER:
            del self._records[place:]
            pause, grown = before, bytes_ + grown
            self._last -= pause / 1000
            self._wall -= pause / 1000
        place = len(self._records)
        self._put(pause, GREW, stream, grown)
        self._latest = (stream, place, pause, grown)

    def _put(self, pause: int, kind: int, stream: int, value: int) -> None:
        self._last += pause / 1000
        self._wall += pause / 1000
        self._records += packed(pause, stream * KINDS + kind, value)
        self._latest = (-1, 0, 0, 0)

    def flush(self) -> None:
        """Write what has been noted."""
        if clock.now() >= self._frame:
            self._release(self._frame)
        records, self._records = self._records, bytearray()
        self._latest = (-1, 0, 0, 0)
        self.since = self._frame
        if not records or self._given_up:
            return
        try:
            if self._file is None:
                fd = files.opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                self._file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open until `close`
            wrote = self._file.write(records)
            self._given_up = wrote != len(records)  # what came after half a record would be no record
        except OSError:
            self._given_up = True
            return
        self._size += len(records)
        trimmed = self._trimming.go_on(self._size)
        if trimmed is not None:
            self._file.close()
            self._file, self._size = trimmed

    def close(self) -> None:
        """Write what is left, and give the descriptor back. Idempotent."""
        if not self._given_up:
            self._release(max(clock.now(), self._last))
        self.flush()
        self._given_up = True
        self._trimming.close()
        if self._file is not None:
            self._file.close()
            self._file = None


def packed(*numbers: int) -> bytes:
    r"""Numbers (>= 0) in groups of 7 bits, the lowest first; all but the last have the eighth bit.

    >>> packed(1, 300)
    b'\x01\xac\x02'
    """
    groups = bytearray()
    for number in numbers:
        left = number
        while left >= _MORE:
            groups.append(left & ~_MORE & 0xFF | _MORE)
            left >>= _BITS
        groups.append(left)
    return bytes(groups)


class Content:
    """What one holds as it is now, to be read more than once: it may grow, or be replaced, meanwhile.

    A file that is missing, or none, holds nothing. Of a damaged one, what can be read of it. It is read in pieces: no
    size of it takes memory.
    """

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._size = 0
        self.version = b""
        self._started = 0.0
        try:
            self._fd = files.opened(path)
            self._size = os.fstat(self._fd).st_size
            head = os.pread(self._fd, HEAD.size, 0)
        except OSError:
            return
        if len(head) == HEAD.size and head[:8] in (MAGIC, SECOND, FIRST):
            self.version, started = HEAD.unpack(head)
            self._started = started / clock.NS

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def records(self) -> Iterator[Record]:
        """Its records: time (seconds since the epoch), kind, stream, and the bytes or the number."""
        if not self.version:
            return
        time, parts = self._started, 0
        for pause, key, value in self._triples():
            kind, stream = key % KINDS, key // KINDS
            time = value / clock.NS if kind == CLOCK else time + pause / 1000
            parts += kind in (CUT, ASIDE)
            if time > _LATEST or (kind == ASIDE and value > MOST_NUMBER) or parts > MOST_PARTS:  # nobody writes that
                return
            if kind != CLOCK and (value or kind != GREW):
                yield time, kind, stream, value

    def _triples(self) -> Iterator[tuple[int, int, int]]:
        unpack = unpacked if self.version == MAGIC else _unpacked_8
        place, left = HEAD.size, b""
        while place < self._size:
            try:
                block = os.pread(self._fd, min(_BLOCK, self._size - place), place)
            except OSError:
                return
            place += len(block)
            triples, used, whole = unpack(left + block)
            yield from triples
            if not whole or not block:
                return
            left = (left + block)[used:]


def unpacked(data: bytes) -> tuple[list[tuple[int, int, int]], int, bool]:
    """The records that are whole, the bytes that they take, and whether nothing is wrong with them.

    A hole in a file is zeros, which are no record.
    """
    found: list[tuple[int, int, int]] = []
    place = used = 0
    numbers = [0, 0, 0]
    try:
        while True:
            for index in (0, 1, 2):
                byte = data[place]
                place += 1
                if byte < _MORE:
                    numbers[index] = byte
                    continue
                number, shift = byte & ~_MORE, _BITS
                while byte >= _MORE:
                    byte = data[place]
                    place += 1
                    number |= (byte & ~_MORE) << shift
                    shift += _BITS
                    if shift > _BITS * _MOST_DIGITS:
                        return found, used, False
                numbers[index] = number
            if not numbers[2] and not numbers[1]:
                return found, used, False
            found.append((numbers[0], numbers[1], numbers[2]))
            used = place
    except IndexError:
        return found, used, True


def _unpacked_8(data: bytes) -> tuple[list[tuple[int, int, int]], int, bool]:
    """The same of the versions before, as the records of this one."""
    found: list[tuple[int, int, int]] = []
    used = 0
    each = RECORD.iter_unpack(memoryview(data)[: len(data) // RECORD.size * RECORD.size])
    for pause, stream, grown in each:
        if stream != _KIND:
            if not (pause or stream or grown):
                return found, used, False
            found.append((pause, stream * KINDS + GREW, grown))
        else:
            number = next(each, None)
            if number is None:
                break
            low, middle, high = number
            key = (grown & 0xFFFF) * KINDS + (grown >> 16) % KINDS
            found.append((pause, key, low | middle << 16 | high << 32))
            used += RECORD.size
        used += RECORD.size
    return found, used, True


def read(path: str) -> Iterator[Record]:
    """The `Content.records` of one."""
    content = Content(path)
    try:
        yield from content.records()
    finally:
        content.close()
