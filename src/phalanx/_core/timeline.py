"""When the bytes of an attempt's log files were written: an index beside them. Owns its format, and both its ends.

A log file holds what the worker wrote and nothing else. To merge the files of many ranks in the order of time, long
after, takes to know when each grew: so the pump, which sees every growth as it happens, notes it.

The file begins with `MAGIC` and the time of its start (64 bits, nanoseconds since the epoch). Records of 8 bytes
follow, little-endian: milliseconds since the record before (16 bits), stream (16 bits: twice the local rank, plus one
for stderr), bytes by which it grew (32 bits). A pause too long for 16 bits is passed in records of 0 bytes.
"""

from __future__ import annotations

import struct

from phalanx._core import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO

MAGIC = b"phalanx1"
NAME = "timeline"
HEAD = struct.Struct("<8sQ")
RECORD = struct.Struct("<HHI")

_TOGETHER = 10  # milliseconds in which growths of one stream, with none of another in between, are one
_PAUSE = 0xFFFF
_GROWTH = 0xFFFFFFFF
_BUFFER = 4096


class Timeline:
    """Writes one. What cannot be written is given up: the log files are complete without it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._sizes: dict[int, int] = {}
        self._records = bytearray()
        self._start = self._last = 0.0
        self.since = 0.0
        """When the first of what is not written yet was noted (seconds, monotonic)."""
        self._stream = -1
        self._given_up = False

    @property
    def unwritten(self) -> bool:
        """Whether there is something to `flush`."""
        return bool(self._records)

    def note(self, stream: int, size: int) -> None:
        """``stream`` has ``size`` bytes now."""
        if not self._records:
            self.since = clock.now()
        grown = size - self._sizes.get(stream, 0)
        self._sizes[stream] = size
        if grown <= 0 or self._given_up:
            return
        now = clock.now()
        if not self._start:
            self._start = self._last = now
            self._records += HEAD.pack(MAGIC, int(clock.wall() * clock.NS))
        pause = int((now - self._last) * 1000)
        if stream == self._stream and pause < _TOGETHER and len(self._records) >= RECORD.size:
            before, _stream, bytes_ = RECORD.unpack_from(self._records, len(self._records) - RECORD.size)
            if bytes_ + grown <= _GROWTH:
                RECORD.pack_into(self._records, len(self._records) - RECORD.size, before, stream, bytes_ + grown)
                return
        self._last += pause / 1000
        while pause > _PAUSE:
            self._records += RECORD.pack(_PAUSE, stream, 0)
            pause -= _PAUSE
        while grown > _GROWTH:
            self._records += RECORD.pack(pause, stream, _GROWTH)
            grown, pause = grown - _GROWTH, 0
        self._records += RECORD.pack(pause, stream, grown)
        self._stream = stream
        if len(self._records) > _BUFFER:
            self.flush()

    def flush(self) -> None:
        """Write what has been noted."""
        records, self._records = self._records, bytearray()
        self._stream = -1
        if not records or self._given_up:
            return
        try:
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open until `close`
            self._file.write(records)
        except OSError:
            self._given_up = True

    def close(self) -> None:
        """Write what is left, and give the descriptor back. Idempotent."""
        self.flush()
        self._given_up = True
        if self._file is not None:
            self._file.close()
            self._file = None


def read(path: str) -> Iterator[tuple[float, int, int]]:
    """Read one: for each growth its time (seconds since the epoch), its stream, and the bytes.

    A missing or damaged file yields what can be read of it.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        return
    time = HEAD.unpack_from(data)[1] / clock.NS
    whole = len(data) - (len(data) - HEAD.size) % RECORD.size
    for pause, stream, grown in RECORD.iter_unpack(data[HEAD.size : whole]):
        time += pause / 1000
        if grown:
            yield time, stream, grown
