"""The file of a run's events: ``events.jsonl``, one JSON object a line, of bounded size."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from phalanx._base import disk, files
from phalanx._events.kinds import Event, GroupStarting

EVENTS = "events.jsonl"
"""The name of the file, in a run's folder."""

EVENTS_SIZE = 16 << 20
"""The most bytes of each of the three files that take the events."""

MOST_HELD = 10_000
"""Lines that wait for a disk that is full."""


class EventFile:
    """Writes events to three files of at most `EVENTS_SIZE` bytes: the oldest events, the last but newest, the newest.

    A timer of 0.1 s that is only reported on expires ten times a second for as long as its rank hangs: of one rank that
    is 0.2 GB a day. How the trouble began and how it stands is kept; events in between are removed, and counted in
    an event ``events.removed``.

    Each line is one write(2) at the end of the file: whenever this process is killed, the lines are whole, and all that
    was written before is there. What a full disk does not take is kept, and written once it does; of more than
    `MOST_HELD` lines, the oldest are removed, and counted likewise.

    Args:
        path: The file of the newest events. Beside it, the oldest are in ``PATH.1``, the last but newest in ``PATH.2``.
        warn: Called with the first error.
    """

    def __init__(self, path: str, warn: Callable[[str], object] = lambda _text: None) -> None:
        self._path = path
        self._warn = warn
        self._has_failed = False
        self._held: deque[bytes] = deque()
        self._lost = 0  # of those, not written
        self._count = 0  # events in the newest file
        self._count_before = 0  # and in the one before it
        self._removed = 0
        self._rotations = sum(os.path.lexists(f"{path}.{number}") for number in (1, 2))  # by a launcher before this one

    def write(self, events: list[dict[str, Any]]) -> None:
        """Add events, after those that could not be written before."""
        self._held += [_line(event) for event in events]
        try:
            self._write_held(events)
        except OSError as error:
            while len(self._held) > MOST_HELD:
                self._held.popleft()
                self._lost += 1
            with suppress(OSError):  # the file has been made, and nothing fits into it
                if not os.path.getsize(self._path):
                    os.unlink(self._path)
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"{EVENTS} cannot be written: {disk.in_words(error, self._path)}")

    def _write_held(self, events: list[dict[str, Any]]) -> None:
        fd = self._open()
        try:
            size = _mend(fd)
            if self._lost:
                size += self._append(fd, _line(_removed(events[0], self._lost)))
                self._lost = 0
            while self._held:
                line = self._held[0]
                if size and size + len(line) > EVENTS_SIZE:
                    os.close(fd)
                    fd = -1
                    self._rotate()
                    fd = self._open()
                    size = self._append(fd, _line(_removed(events[0], self._removed))) if self._removed else 0
                size += self._append(fd, line)
                self._held.popleft()
                self._count += 1
        finally:
            if fd >= 0:
                os.close(fd)

    def _open(self) -> int:
        return files.opened(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def _append(self, fd: int, line: bytes) -> int:
        """Write a line, or nothing. Raises OSError."""
        written = os.write(fd, line)
        if written < len(line):  # the disk is full: half a line is none
            os.ftruncate(fd, os.fstat(fd).st_size - written)
            written = os.write(fd, line)  # raises ENOSPC, unless there is room again
            if written < len(line):
                os.ftruncate(fd, os.fstat(fd).st_size - written)
                raise OSError(28, os.strerror(28), self._path)
        return written

    def _rotate(self) -> None:
        """Rename the newest file: to ``PATH.1`` the first time, to ``PATH.2`` later."""
        self._rotations += 1
        if self._rotations > 1:
            self._removed, self._count_before = self._removed + self._count_before, self._count
        os.replace(self._path, f"{self._path}.{min(self._rotations, 2)}")
        self._count = 0


class EventLog:
    """Writes the events of a run to `EVENTS` in its folder. An observer of an `EventStream`.

    The folder is that of the first `GroupStarting` that has one; what came before is written then.

    Args:
        warn: Called with the first error, see `EventFile`.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._folder = ""
        self._file: EventFile | None = None
        self._early: list[dict[str, Any]] = []
        self._is_kept = True

    def __call__(self, events: list[Event]) -> None:
        """Write these."""
        for event in events:
            if isinstance(event, GroupStarting):
                self._follow(event.folder)
            if self._is_kept:
                self._early.append(event.to_object())
        if self._file is not None:
            self._file.write(self._early)
            self._early = []

    def _follow(self, folder: str) -> None:
        self._is_kept = bool(folder)
        if not folder and self._file is None:
            self._early = []
        if folder != self._folder:
            if self._file is not None:
                self._file.write(self._early)
            if self._folder:
                self._early = []
            self._folder = folder
            self._file = EventFile(os.path.join(folder, EVENTS), self._warn) if folder else None


def _line(event: dict[str, Any]) -> bytes:
    import json  # for which no start is to wait

    return json.dumps(event).encode() + b"\n"


def _removed(event: dict[str, Any], count: int) -> dict[str, Any]:
    when = {key: event[key] for key in ("timestamp", "monotonic_ns")}
    return {"name": "events.removed"} | when | {"count": count}


def _mend(fd: int) -> int:
    """End the last line, where a launcher before this one was killed within it. Returns the size of the file."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        size += os.write(fd, b"\n")
    return size
