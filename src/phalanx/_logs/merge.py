"""Merges the log files of an attempt in the order of time. Shows nothing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping

from phalanx._logs.follower import Follower
from phalanx._logs.rotated import MODULO, NEWEST
from phalanx._logs.timeline import GREW, ROTATED, Record, TimelineReader

_CHUNK = 256 * 1024
_MOST_OPEN = 128  # descriptors, or a quarter of what may be open; further files are opened anew
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_LEAST = 16 * 1024  # bytes of each file that are read of what no timeline knows
_VOID = -1  # the number of bytes that are in no file any more


def merge(followers: Mapping[int, Follower], path: str, most: int | None = None) -> Iterator[tuple[float, int, bytes]]:
    """Read each file to its end, in the order in which the timeline says that they grew.

    Args:
        followers: One for each file, by its number in the timeline. If that says that a log is not rotated, its
            follower stops to look for rotated files.
        path: The timeline. Without one, and after its end, file follows file, by the times of their last change.
        most: Only about so many bytes, the latest that the timeline knows of; and of what it does not know, the last
            so many of all files together. Those before are not read. None: all.

    Yields:
        The time (seconds since the epoch), the stream, and the bytes that it grew by, in the order of writing. Times go
        back where the wall clock did.

    Raises OSError: there is no descriptor left. Files that are missing, or no regular ones, are skipped.
    """
    buffer = bytearray(_CHUNK)
    used: dict[Follower, None] = {}  # the latest last
    most_open = min(_MOST_OPEN, os.sysconf("SC_OPEN_MAX") // 4)
    with contextlib.closing(TimelineReader(path)) as timeline:
        replays, size = _replays(timeline, followers)
        for time, kind, stream, value in _wanted(timeline, replays, 0 if most is None else size - most):
            replay = replays[stream]
            for count in replay.follow(kind, value, buffer):
                yield time, stream, bytes(memoryview(buffer)[:count])
            used.pop(replay.follower, None)
            used[replay.follower] = None
            if len(used) > most_open:
                oldest = next(iter(used))
                del used[oldest]
                oldest.close()
    for replay in replays.values():
        replay.catch_up()
    rest = [(_changed(follower.path), stream) for stream, follower in followers.items()]
    for _changed_at, stream in sorted(rest):
        follower = followers[stream]
        if most is not None:
            _skip_to_last(follower, max(_LEAST, most // len(rest)))
        while count := _read(follower, buffer):
            yield os.fstat(follower.fd).st_mtime, stream, bytes(memoryview(buffer)[:count])
        follower.close()


def _replays(timeline: TimelineReader, followers: Mapping[int, Follower]) -> tuple[dict[int, _Replay], int]:
    """Read the timeline once: find out in which file each part of each followed stream is in the end, and the bytes."""
    replays: dict[int, _Replay] = {}
    size = 0
    for _time, kind, stream, value in timeline.records():
        if stream in followers:
            size += value if kind == GREW else 0
            if stream not in replays:
                replays[stream] = _Replay(followers[stream])
            replays[stream].learn(kind, value)
    for replay in replays.values():
        replay.follower.rotates &= replay.rotated
    return replays, size


def _wanted(timeline: TimelineReader, replays: Mapping[int, _Replay], unwanted: int) -> Iterator[Record]:
    """Yield the records of the followed streams; those of the first ``unwanted`` bytes are passed over."""
    for time, kind, stream, value in timeline.records():
        if (replay := replays.get(stream)) is None:
            continue
        passed = 0
        if unwanted > 0:
            passed = replay.pass_over(kind, min(value, unwanted) if kind == GREW else value)
            unwanted -= passed
            if kind != GREW or passed == value:
                continue
        yield time, kind, stream, value - passed


class _Replay:
    """Replays the growth of one stream: knows the parts that the timeline notes, and the one that is being read.

    A part ends when the file is cut short, or rotated.
    """

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.rotated = False
        self._parts: deque[tuple[int, int]] = deque()  # the file and the bytes of each part that has ended
        self._bytes = 0  # those of the part that has not ended
        self._in: int | None = None  # the number of the part's file; None until its first record is replayed
        self._passed = 0  # bytes of the part that were passed over, and not skipped yet

    def learn(self, kind: int, value: int) -> None:
        """Take in a record. All are taken in before the first is replayed."""
        if kind == GREW:
            self._bytes += value
            return
        self.rotated |= kind == ROTATED
        self._parts.append((value if kind == ROTATED else _VOID, self._bytes))
        self._bytes = 0

    def follow(self, kind: int, value: int, buffer: bytearray) -> Iterator[int]:
        """Replay a record: read into ``buffer`` the bytes that were written by then. Yields their number, each time."""
        if kind == GREW:
            if self._in is None:
                yield from self._begin(buffer)
            while value and (count := self._read_of_part(memoryview(buffer)[:value])):
                value -= count
                yield count
            return
        if kind == ROTATED:
            yield from self._to_end(buffer, value)
        self._parts.popleft()
        self._in = None

    def pass_over(self, kind: int, value: int) -> int:
        """Replay a record of what is not to be read, before any that is. Returns the bytes that are passed over."""
        if kind == GREW:
            self._passed += value
            return value
        if kind == ROTATED:
            self.follower.go_to(value + 1)
        self._parts.popleft()
        self._passed = 0
        return 0

    def catch_up(self) -> None:
        """Skip what was passed over, if nothing was replayed since."""
        passed, self._passed = self._passed, 0
        if passed:
            try:
                self.follower.skip(passed)
            except OSError as error:
                _pass_over(error)

    def _begin(self, buffer: bytearray) -> Iterator[int]:
        """Find the file of a part that begins."""
        number, noted = self._parts[0] if self._parts else (NEWEST, self._bytes)
        if number not in (_VOID, NEWEST):
            yield from self._to_end(buffer, number - 1)
        self._in = number
        if number != _VOID and self._is_shorter(noted):  # cut since, which is not noted
            self._in = _VOID
        if self._in != _VOID:
            self.catch_up()
        self._passed = 0

    def _is_shorter(self, noted: int) -> bool:
        try:
            self.follower.open()
            return self.follower.content_size() < noted < MODULO
        except OSError as error:
            _pass_over(error)
            return False

    def _read_of_part(self, buffer: memoryview) -> int:
        follower = self.follower
        try:
            if self._in == _VOID:
                return 0
            follower.open()
            if self._in not in (NEWEST, follower.number):  # that file was removed
                return 0
            return follower.read_here(buffer)
        except OSError as error:
            _pass_over(error)
            return 0

    def _to_end(self, buffer: bytearray, number: int) -> Iterator[int]:
        """Read the rest of the files up to a number."""
        while count := _read(self.follower, buffer, number):
            yield count


def _read(follower: Follower, buffer: bytearray, last: int = NEWEST) -> int:
    try:
        return follower.read(buffer, last)
    except OSError as error:
        _pass_over(error)
        return 0


def _skip_to_last(follower: Follower, most: int) -> None:
    """Leave at most so many bytes to be read; of a log that is rotated, those of its newest file."""
    try:
        if follower.left() > most:
            follower.go_to(NEWEST)
            follower.open()
            follower.skip(follower.content_size() - most)
    except OSError as error:
        _pass_over(error)


def _pass_over(error: OSError) -> None:
    """Ignore an error, mostly of a missing file. Raises it if no descriptor was left: lines would be left out."""
    if error.errno in _NONE_LEFT:
        raise error


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
