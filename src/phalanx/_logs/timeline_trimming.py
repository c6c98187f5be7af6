"""Removes the records of removed log files from a timeline. Owns when, and doing it a piece at a time.

The pump's thread writes the timeline, and must not be busy with it for long: so the file is copied without those
records, a piece with each write, to a new file that replaces it at the end (rename(2)). A reader gets the old one or
the new one.
"""

from __future__ import annotations

import os
from contextlib import suppress

from phalanx._base import clock, files
from phalanx._logs.rotated import numbers
from phalanx._logs.timeline_format import CLOCK, CUT, HEAD, KINDS, ROTATED, pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO

LEAST = 1 << 20
"""Bytes below which a timeline is not trimmed; and then, not until it is twice as long as after the last time."""

_PIECE = 32 * 1024  # takes some 10 ms
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND


class Trimming:
    """Trims one timeline, of the path ``path``, while it is written. ``logs``: the paths by stream number."""

    def __init__(self, path: str, logs: Mapping[int, str]) -> None:
        self._path = path
        self._logs = dict(logs)
        # By stream, the file of each part of its records: its number; `NEWEST` for a part that was cut, and is in none.
        self._ends: dict[int, list[int]] = {stream: [] for stream in logs}
        self._next = LEAST
        self._size = 0
        self._work: Iterator[None] | None = None
        self._file: FileIO | None = None

    def ended(self, stream: int, number: int) -> None:
        """Note that the records of ``stream`` up to here belong to the file ``number``; if `NEWEST`, to none."""
        if stream in self._ends:
            self._ends[stream].append(number)

    def go_on(self, size: int) -> tuple[FileIO, int] | None:
        """Trim a piece of the timeline of ``size`` bytes. Returns the new file and its size once it is in place."""
        self._size = size
        if self._work is None:
            if size < self._next:
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
        except OSError:  # a full disk: the old timeline stays
            self._next = 2 * size
            self.close()
        return None

    def close(self) -> None:
        """Remove the unfinished copy. Idempotent."""
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
        """Copy the records that stay, a piece between two yields. Raises OSError."""
        there = {stream: {0, *numbers(path)} for stream, path in self._logs.items()}
        gone = {stream: [end not in there[stream] for end in ends] for stream, ends in self._ends.items()}
        source = files.opened(self._path)
        try:
            self._file = open(files.opened(self._new, _NEW), "ab", buffering=0)  # noqa: SIM115 - it becomes the timeline's
            head = os.pread(source, HEAD.size, 0)
            self._write(head)
            sieve = _Sieve(gone, HEAD.unpack(head)[1])
            offset = HEAD.size
            while offset < self._size:
                triples, used, _whole = unpack(os.pread(source, min(_PIECE, self._size - offset), offset))
                if not used:
                    raise OSError(0, "it is damaged", self._path)
                offset += used
                self._write(sieve.kept(triples))
                if offset < self._size:  # without a pause at the end: what is written meanwhile has to be copied, too
                    yield
            self._write(sieve.rest())
        finally:
            os.close(source)
        os.replace(self._new, self._path)
        for stream, ends in self._ends.items():
            these = gone.get(stream, [])  # else it was added meanwhile
            self._ends[stream] = [end for at, end in enumerate(ends) if at >= len(these) or not these[at]]

    def _write(self, data: bytes | bytearray) -> None:
        assert self._file is not None
        if self._file.write(data) != len(data):
            raise OSError(0, "it was not written whole", self._new)


class _Sieve:
    """Drops the records of removed files, and keeps the times of the others.

    Args:
        gone: By stream, for each of its parts, whether its file was removed.
        started: When the first record's time begins (nanoseconds since the epoch).
    """

    def __init__(self, gone: Mapping[int, list[bool]], started: int) -> None:
        self._gone = gone
        self._parts = dict.fromkeys(gone, 0)
        self._time = started
        self._pause = 0  # milliseconds since the last record that was kept
        self._clocked = False  # whether the wall clock was noted since then

    def kept(self, triples: list[tuple[int, int, int]]) -> bytearray:
        kept = bytearray()
        for before, key, value in triples:
            kind, stream = key % KINDS, key // KINDS
            self._pause += before
            if kind == CLOCK:
                self._time, self._clocked = value, True
                continue
            self._time += before * (clock.NS // 1000)
            if self._is_gone(stream, ends=kind in (CUT, ROTATED)):
                continue
            if self._clocked:
                kept += self.rest()
            kept += pack(self._pause, key, value)
            self._pause = 0
        return kept

    def rest(self) -> bytes:
        """Return a record of the time after the dropped records; nothing if none were dropped."""
        if not self._pause and not self._clocked:
            return b""
        self._pause, self._clocked = 0, False
        return pack(0, CLOCK, self._time)

    def _is_gone(self, stream: int, *, ends: bool) -> bool:
        gone, part = self._gone.get(stream, ()), self._parts.get(stream, 0)
        if ends and stream in self._parts:
            self._parts[stream] += 1
        return part < len(gone) and gone[part]
