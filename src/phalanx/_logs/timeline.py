"""The timeline of an attempt: when the bytes of its log files were written. Its format, its reader and its writer.

A log file holds what the worker wrote and nothing else. To merge the files of many ranks in the order of time later,
their times of writing must be known: so the pump, which sees every growth as it happens, notes it in the timeline.

The file begins with `MAGIC` and the wall clock's time (64 bits, little-endian, nanoseconds since the epoch). Records
follow, each of three numbers in groups of 7 bits (LEB128, 63 bits at most): milliseconds since the record before; four
times the stream (which is twice the local rank, plus one for stderr) plus the kind; and a value:

- `GREW`: bytes by which the file grew (uncompressed).
- `CUT`: the file was cut short. What was noted of it before is no longer in it; its growth since follows.
- `ROTATED`: what was noted of the file since the last such record is in the rotated file of this number. It comes once
  with 0 for a log that is rotated, before anything is noted of it; others have no rotated files.
- `CLOCK`: the wall clock's time in nanoseconds. Milliseconds are counted on CLOCK_MONOTONIC, which stops while the
  machine is suspended and does not follow when the wall clock is set: so the wall clock is noted anew when the two have
  come apart by `APART`. Times can go back, as the wall clock does; records are in the order of writing.

So a time is that of the pump's look at the file, within 0.02 s: that much is shared by growths that are close together,
and as much may the clocks be apart. A cut is seen by the file's size: one after which the file has grown beyond its
former size before the next look is not seen.

The writer owns how often there are records, and so how long the file gets. Each growth has one, until there are
`DOUBLING` bytes. From then on, growth that comes within `SPACING` of the records before is held, and noted at the end
of that time: so late may a time be, and so far out of order across streams. `SPACING` doubles
with each further `DOUBLING` bytes.

The formats `phalanx1` and `phalanx2`, which no release has written, are not read any more.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from io import FileIO

from phalanx._base import clock, files
from phalanx._logs.rotated import MODULO, MOST_NUMBER, NEWEST, content_size, identity, numbers, open_numbered

Record = tuple[float, int, int, int]
"""Seconds since the epoch; the kind; the stream; and the bytes or the number."""

NAME = "timeline"
"""The name of the file in an attempt's folder."""

MAGIC = b"phalanx3"
HEAD = struct.Struct("<8sQ")

GREW, CUT, ROTATED, CLOCK = range(4)
KINDS = 4
"""How many there are: a record has four times the stream, plus the kind."""

APART = 0.01
"""Seconds by which a time may be wrong, because wall clock and monotonic clock have come apart."""

_MOST_DIGITS = 9  # groups of 7 bits
_BITS, _MORE = 7, 0x80


def pack(*numbers: int) -> bytes:
    r"""Pack numbers (>= 0) in groups of 7 bits, the lowest first; all but a number's last group have the eighth bit.

    >>> pack(1, 300)
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


def unpack(data: bytes) -> tuple[list[tuple[int, int, int]], int, bool]:
    """Unpack whole records. Returns them, the bytes that they take, and whether none of them is damaged.

    A hole in a file reads as zeros, which are no record.
    """
    found: list[tuple[int, int, int]] = []
    offset = used = 0
    numbers = [0, 0, 0]
    try:
        while True:
            for index in (0, 1, 2):
                byte = data[offset]
                offset += 1
                if byte < _MORE:
                    numbers[index] = byte
                    continue
                number, shift = byte & ~_MORE, _BITS
                while byte >= _MORE:
                    byte = data[offset]
                    offset += 1
                    number |= (byte & ~_MORE) << shift
                    shift += _BITS
                    if shift > _BITS * _MOST_DIGITS:
                        return found, used, False
                numbers[index] = number
            if not numbers[2] and not numbers[1]:
                return found, used, False
            found.append((numbers[0], numbers[1], numbers[2]))
            used = offset
    except IndexError:
        return found, used, True


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
    with contextlib.closing(TimelineReader(path)) as timeline:
        yield from timeline.records()


def is_foreign(path: str) -> bool:
    """Whether another version of Phalanx has written the timeline in ``path``, in a format that is not read."""
    try:
        head = files.read(path, len(MAGIC))
    except OSError:
        return False
    return head.startswith(_ANY) and not MAGIC.startswith(head)


class Growth:
    """Remembers a log's files from one look to the next.

    Args:
        path: The file.
        rotates: Whether the log is rotated.
    """

    __slots__ = ("_changed", "_file", "_next", "_size", "path", "rotates")

    def __init__(self, path: str, *, rotates: bool = False) -> None:
        self.path = path
        self.rotates = rotates
        self._file: tuple[int, int] | None = None  # the newest file, at the last look
        self._changed = 0  # the mtime of its folder, at the last look
        self._size = 0  # its size, at the last look
        self._next = 1  # the lowest number that it can get when it is rotated

    def look(self) -> list[tuple[int, int]]:
        """Return number and size of each file that was rotated since the last look, and of the newest (`NEWEST`).

        The first look at a log that is rotated returns a file of 0 bytes with the number 0, too. Raises OSError.
        """
        newest = os.stat(self.path)
        if not self.rotates:
            return [(NEWEST, newest.st_size)]
        sizes = []
        file = identity(newest)
        changed = os.stat(os.path.dirname(self.path) or os.curdir).st_mtime_ns
        if self._file is None:
            sizes.append((0, 0))
        # Inodes are reused: after two rotations and a removal, the newest file may have the inode of the old one.
        if file != self._file or changed != self._changed or newest.st_size < self._size:
            sizes += self._rotated_since(file)
        self._file, self._changed, self._size = file, changed, newest.st_size
        return [*sizes, (NEWEST, newest.st_size)]

    def _rotated_since(self, newest: tuple[int, int]) -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = []
        known = self._file  # None once it is found under its number
        before = None
        for number in numbers(self.path):
            if number < self._next:
                continue
            try:
                file, size, compressed = self._one(number)
            except OSError:  # removed just now
                continue
            if file == newest:  # it has both names, for a moment; or was rotated since we looked at it
                break
            if known is not None and file != known and not (compressed and number == self._next):
                sizes.append((self._next, self._size))  # the known file was removed
                self._size = 0
            known = None
            self._next = number + 1
            if file == before:  # a second link to it: a rotation that was repeated
                continue
            before = file
            if compressed and self._size >= MODULO:
                size += (self._size - size + MODULO - 1) // MODULO * MODULO
            sizes.append((number, size))
            self._size = 0
        if known not in (None, newest):
            sizes.append((self._next, self._size))
            self._next += 1
        return sizes

    def _one(self, number: int) -> tuple[tuple[int, int], int, bool]:
        fd, compressed = open_numbered(self.path, number)
        try:
            return identity(os.fstat(fd)), content_size(fd, compressed=compressed), compressed
        finally:
            os.close(fd)


SPACING = 0.01
"""Seconds between records and the next ones, once the timeline is long;"""

DOUBLING = 8 << 20
"""and bytes of it after each of which these seconds double."""

_MOST_SIZE = 1 << 44  # bytes of a file that are noted: 16 TiB; ftruncate(2) makes larger ones of holes
_BUFFER = 4096


class TimelineWriter:
    """Writes the timeline ``path``. An error in writing ends it: the log files are complete without it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._sizes: dict[int, int] = {}
        self._held: dict[int, tuple[bool, int]] = {}  # by stream, what has no record yet: whether cut, and the growth
        self._due = 0.0  # when there may be records again (seconds, monotonic)
        self._records = bytearray()
        self._last = self._wall = 0.0  # the moment of the last record: monotonic, and as a reader computes it
        self.since = 0.0
        """When the oldest growth that is not written yet was noted (seconds, monotonic); or will be, if it is held."""
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
        if now >= self._due:
            self._record_held(self._due)
        if not self.unwritten:
            self.since = now
        cut, held = self._held.get(stream, (False, 0))
        self._held[stream] = (True, size) if grown < 0 else (cut, held + grown)
        if number != NEWEST or now >= self._due:
            self._record_held(now)
        if number != NEWEST:
            self._put(now, ROTATED, stream, number)
            self._due = now  # what the new file has already is as old
        if len(self._records) > _BUFFER:
            self.flush()

    def _record_held(self, at: float) -> None:
        """Make records of what is held, as of ``at``: not before the last record, and not after now."""
        held, self._held = self._held, {}
        for stream, (cut, grown) in held.items():
            if cut:
                self._put(at, CUT, stream, 0)
            if grown:
                self._put(at, GREW, stream, grown)
        if held:
            self._due = at + SPACING * ((1 << min(32, self._size // DOUBLING)) - 1)

    def _put(self, at: float, kind: int, stream: int, value: int) -> None:
        """Add a record. Notes the wall clock first if it has gone on differently."""
        since, wall = at - self._last, clock.wall() - (clock.now() - at)
        pause = 0
        if not self._wall:
            self._records += HEAD.pack(MAGIC, int(wall * clock.NS))
            self._last, self._wall = at, wall
        elif abs(wall - self._wall - since) > APART:
            self._records += pack(0, CLOCK, int(wall * clock.NS))
            self._last, self._wall = at, wall
        else:
            pause = max(0, round(since * 1000))
            self._last += pause / 1000
            self._wall += pause / 1000
        self._records += pack(pause, stream * KINDS + kind, value)

    def flush(self) -> None:
        """Write the records to the file."""
        if clock.now() >= self._due:
            self._record_held(self._due)
        records, self._records = self._records, bytearray()
        self.since = self._due
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
            self._record_held(max(clock.now(), self._last))
        self.flush()
        self._given_up = True
        if self._file is not None:
            self._file.close()
            self._file = None
