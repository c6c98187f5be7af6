"""The files of one attempt, merged in the order of time. Owns that order; shows nothing."""

from __future__ import annotations

import errno
import os
from collections import deque
from itertools import islice

from phalanx._logs import write_index
from phalanx._logs.rotated import MODULO, NEWEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from phalanx._logs.follower import Follower

_CHUNK = 256 * 1024
_MOST_OPEN = 128  # descriptors, or a quarter of what may be open; further files are opened anew
_MOST_PARTS = 1 << 18  # of all streams; each takes some 130 bytes
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_VOID = -1  # the number of what is in no file any more


def merge(followers: Mapping[int, Follower], path: str) -> Iterator[tuple[float, int, bytes]]:
    """Read each file to its end, as the timeline in ``path`` says that they grew.

    Args:
        followers: By the timeline's numbers of streams. Those that it knows not to be rotated do not look for files
            that were set aside any more.
        path: The timeline. Without one, or beyond its end, file follows file, by the times of their last change.

    Yields:
        The time (seconds since the epoch), the stream, and what it grew by then. In the order of writing: times go back
        where the wall clock did.

    Raises OSError: there is no descriptor left. What is not there, or no file, is passed over.
    """
    content = write_index.Content(path)
    try:
        yield from _merge(followers, content)
    finally:
        content.close()


def _merge(followers: Mapping[int, Follower], content: write_index.Content) -> Iterator[tuple[float, int, bytes]]:
    courses, known = _courses(content, followers)
    buffer = bytearray(_CHUNK)
    used: dict[Follower, None] = {}  # the latest last
    most_open = min(_MOST_OPEN, os.sysconf("SC_OPEN_MAX") // 4)
    for time, kind, stream, value in islice(content.records(), known):
        course = courses.get(stream)
        if course is None:
            continue
        for count in course.follow(kind, value, buffer):
            yield time, stream, bytes(memoryview(buffer)[:count])
        used.pop(course.follower, None)
        used[course.follower] = None
        if len(used) > most_open:
            oldest = next(iter(used))
            del used[oldest]
            oldest.close()
    rest = [(_changed(follower.path), stream) for stream, follower in followers.items()]
    for _changed_at, stream in sorted(rest):
        follower = followers[stream]
        while count := _read(follower, buffer):
            yield os.fstat(follower.fd).st_mtime, stream, bytes(memoryview(buffer)[:count])
        follower.close()


def _courses(content: write_index.Content, followers: Mapping[int, Follower]) -> tuple[dict[int, _Course], int]:
    """What the timeline says of each stream that is followed: where in the end is what it notes.

    And how many of its records can be followed: one with very many parts is damaged, or somebody's who wishes us ill.
    """
    courses: dict[int, _Course] = {}
    known = parts = 0
    for _time, kind, stream, value in content.records():
        parts += kind != write_index.GREW
        if parts > _MOST_PARTS:
            break
        known += 1
        if stream not in courses:
            if stream not in followers:
                continue
            courses[stream] = _Course(followers[stream])
        courses[stream].learn(kind, value)
    if content.version == write_index.FIRST:
        for course in courses.values():
            course.crosses = True
    else:
        for course in courses.values():
            course.follower.rotates &= course.rotated
    return courses, known


class _Course:
    """The course of one stream: the parts that the timeline notes of it, and where the reader is in them.

    A part ends when the file is cut short, or set aside.
    """

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.crosses = False
        """Whether parts do not end with files."""
        self.rotated = False
        self._parts: deque[tuple[int, int]] = deque()  # of those that have ended, in which file each is, and its bytes
        self._bytes = 0  # of the part that has not ended
        self._in: int | None = None  # the file that is read; None as long as nothing is known of the part

    def learn(self, kind: int, value: int) -> None:
        """Take note of a record, all of them before the first is to be followed."""
        if kind == write_index.GREW:
            self._bytes += value
            return
        self.rotated |= kind == write_index.ASIDE
        self._parts.append((value if kind == write_index.ASIDE else _VOID, self._bytes))
        self._bytes = 0

    def follow(self, kind: int, value: int, buffer: bytearray) -> Iterator[int]:
        """Do as a record says: read into ``buffer`` what was written by then. Yields how much, each time."""
        if kind == write_index.GREW:
            if self._in is None:
                yield from self._begin(buffer)
            while value and (count := self._read_of_part(memoryview(buffer)[:value])):
                value -= count
                yield count
            return
        if kind == write_index.ASIDE:
            yield from self._to_end(buffer, value)
        self._parts.popleft()
        self._in = None

    def _begin(self, buffer: bytearray) -> Iterator[int]:
        """Find the file of a part, which begins."""
        number, noted = self._parts[0] if self._parts else (NEWEST, self._bytes)
        if number not in (_VOID, NEWEST):
            yield from self._to_end(buffer, number - 1)
        self._in = number
        if not self.crosses and number != _VOID and self._is_shorter(noted):  # cut since, and that is not noted
            self._in = _VOID

    def _is_shorter(self, noted: int) -> bool:
        try:
            self.follower.open()
            return self.follower.held() < noted < MODULO
        except OSError as error:
            _pass_over(error)
            return False

    def _read_of_part(self, buffer: memoryview) -> int:
        follower = self.follower
        try:
            if self.crosses:
                return follower.read(buffer)
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
        """Read all that is left in files up to a number."""
        while count := _read(self.follower, buffer, number):
            yield count


def _read(follower: Follower, buffer: bytearray, last: int = NEWEST) -> int:
    try:
        return follower.read(buffer, last)
    except OSError as error:
        _pass_over(error)
        return 0


def _pass_over(error: OSError) -> None:
    """A file is not there, mostly; but no line is left out because we have no descriptor for it. Raises ``error``."""
    if error.errno in _NONE_LEFT:
        raise error


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
