"""What a timeline says of files that rotation has removed goes, too. Owns when, and doing it a little at a time.

The pump's thread writes the timeline, and has other things to do: so the file is copied without those records, a piece
with each write, to one beside it that takes its place in the end. Whoever reads has the old one or the new one.
"""

from __future__ import annotations

import os
from contextlib import suppress

from phalanx._base import clock, files
from phalanx._logs.rotated import numbers

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
        from phalanx._logs.write_index import HEAD, unpacked

        there = {stream: {0, *numbers(path)} for stream, path in self._logs.items()}
        gone = {stream: [end not in there[stream] for end in ends] for stream, ends in self._ends.items()}
        source = files.opened(self._path)
        try:
            self._file = open(files.opened(self._new, _NEW), "ab", buffering=0)  # noqa: SIM115 - the timeline's, in the end
            head = os.pread(source, HEAD.size, 0)
            self._write(head)
            sieve = _Sieve(gone, HEAD.unpack(head)[1])
            place = HEAD.size
            while place < self._size:
                triples, used, _whole = unpacked(os.pread(source, min(_PIECE, self._size - place), place))
                if not used:
                    raise OSError(0, "it is damaged", self._path)
                place += used
                self._write(sieve.kept(triples))
                if place < self._size:  # else it would never come up with what is written meanwhile
                    yield
            self._write(sieve.rest())
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


class _Sieve:
    """Lets those records pass that are to stay, at the times that they have.

    Args:
        gone: Of each stream, whether the file of each of its parts is.
        started: When the first record's time begins (nanoseconds since the epoch).
    """

    def __init__(self, gone: Mapping[int, list[bool]], started: int) -> None:
        self._gone = gone
        self._parts = dict.fromkeys(gone, 0)
        self._time = started
        self._pause = 0  # milliseconds since the last one that has passed
        self._clocked = False  # whether the wall clock was noted since then

    def kept(self, triples: list[tuple[int, int, int]]) -> bytearray:
        from phalanx._logs.write_index import ASIDE, CLOCK, CUT, KINDS, packed

        kept = bytearray()
        for before, key, value in triples:
            kind, stream = key % KINDS, key // KINDS
            self._pause += before
            if kind == CLOCK:
                self._time, self._clocked = value, True
                continue
            self._time += before * (clock.NS // 1000)
            if self._is_gone(stream, ends=kind in (CUT, ASIDE)):
                continue
            if self._clocked:
                kept += self.rest()
            kept += packed(self._pause, key, value)
            self._pause = 0
        return kept

    def rest(self) -> bytes:
        """What time it is after all that was left out; nothing if that is known."""
        from phalanx._logs.write_index import CLOCK, packed

        if not self._pause and not self._clocked:
            return b""
        self._pause, self._clocked = 0, False
        return packed(0, CLOCK, self._time)

    def _is_gone(self, stream: int, *, ends: bool) -> bool:
        gone, part = self._gone.get(stream, ()), self._parts.get(stream, 0)
        if ends and stream in self._parts:
            self._parts[stream] += 1
        return part < len(gone) and gone[part]
