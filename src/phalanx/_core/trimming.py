"""What a timeline says of files that rotation has removed goes, too. Owns when, and doing it a little at a time.

The pump's thread writes the timeline, and has other things to do: so the file is copied without those records, a piece
with each write, to one beside it that takes its place in the end. Whoever reads has the old one or the new one.
"""

from __future__ import annotations

import os
from contextlib import suppress

from phalanx._core import clock, files
from phalanx._core.set_aside import numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO

LEAST = 1 << 20
"""Bytes below which a timeline is left as it is; and then, until it is twice as long as it was after the last time."""

_PIECE = 32 * 1024  # takes some 10 ms
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND


class Trimming:
    """Trims one timeline, as long as it is written.

    Args:
        path: The timeline.
        logs: The paths of the streams that are rotated, by number.
    """

    def __init__(self, path: str, logs: Mapping[int, str]) -> None:
        self._path = path
        self._logs = logs
        # Of each stream, in which file each part of its records is: its number, or `NEWEST` of what has been cut.
        self._ends: dict[int, list[int]] = {stream: [] for stream in logs}
        self._next = LEAST
        self._size = 0
        self._work: Iterator[None] | None = None
        self._file: FileIO | None = None

    def ended(self, stream: int, number: int) -> None:
        """The records of ``stream`` up to here are of the file of a number; of none any more: `NEWEST`."""
        if stream in self._ends:
            self._ends[stream].append(number)

    def go_on(self, size: int) -> tuple[FileIO, int] | None:
        """The timeline has ``size`` bytes, all written. Returns the file that takes its place, and its size, if any."""
        self._size = size
        if self._work is None:
            if size < self._next or not self._logs:
                return None
            self._work = self._copy()
        try:
            next(self._work)
        except StopIteration:
            file, self._file, self._work = self._file, None, None
            assert file is not None
            size = os.fstat(file.fileno()).st_size
            self._next = max(LEAST, 2 * size)
            return file, size
        except OSError:  # a full disk: it is as good as it was
            self._next = 2 * size
            self.close()
        return None

    def close(self) -> None:
        """There is nothing more to be written. Idempotent."""
        self._work = None
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):  # the folder is gone
                os.unlink(self._new)

    @property
    def _new(self) -> str:
        return f"{self._path}.new"

    def _copy(self) -> Iterator[None]:
        """Copy what is to stay, a piece at a time. Raises OSError."""
        from phalanx._core.timeline import ASIDE, CLOCK, CUT, HEAD, packed, unpacked

        there = {stream: {0, *numbers(path)} for stream, path in self._logs.items()}
        gone = {stream: [end not in there[stream] for end in ends] for stream, ends in self._ends.items()}
        parts = dict.fromkeys(gone, 0)
        pause, clocked, time = 0, False, 0
        source = files.opened(self._path)
        try:
            self._file = open(files.opened(self._new, _NEW), "ab", buffering=0)  # noqa: SIM115 - the timeline's, in the end
            head = os.pread(source, HEAD.size, 0)
            time = HEAD.unpack(head)[1]
            self._write(head)
            place = HEAD.size
            while place < self._size:
                data = os.pread(source, min(_PIECE, self._size - place), place)
                triples, used, _whole = unpacked(data)
                if not used:
                    raise OSError(0, "it is damaged", self._path)
                place += used
                kept = bytearray()
                for before, key, value in triples:
                    kind, stream = key & 3, key >> 2
                    time = value if kind == CLOCK else time + before * (clock.NS // 1000)
                    pause += before
                    part = parts.get(stream, 0)
                    if kind in (CUT, ASIDE) and stream in parts:
                        parts[stream] += 1
                    if kind == CLOCK:
                        clocked = True
                    elif not (stream in gone and part < len(gone[stream]) and gone[stream][part]):
                        if clocked:
                            kept += packed(0, CLOCK, time)
                            pause, clocked = 0, False
                        kept += packed(pause, key, value)
                        pause = 0
                self._write(kept)
                if place < self._size:  # else it would never come up with what is written meanwhile
                    yield
            if pause or clocked:
                self._write(packed(0, CLOCK, time))
        finally:
            os.close(source)
        os.replace(self._new, self._path)
        for stream, ends in self._ends.items():
            these = gone[stream]
            self._ends[stream] = [end for at, end in enumerate(ends) if at >= len(these) or not these[at]]

    def _write(self, data: bytes | bytearray) -> None:
        assert self._file is not None
        if self._file.write(data) != len(data):
            raise OSError(0, "it was not written whole", self._new)
