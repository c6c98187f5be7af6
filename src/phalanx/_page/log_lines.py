"""The last lines of a run's logs, merged in the order of time: as much of them as a page is to hold.

Owns how a line gets into a page: what a terminal would obey is left out or replaced by escapes (`tty.plain`), and a
long line is cut. Escaping for HTML is the business of `page`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from phalanx._base.text import format_size, how_many
from phalanx._base.tty import plain
from phalanx._logs.follower import Follower
from phalanx._logs.merge import merge
from phalanx._logs.timeline import NAME

STREAMS = ("stdout", "stderr")

MOST_BYTES = 2 << 20
"""Bytes of the logs that are read."""

MOST_LINES = 20_000
"""Lines of a page: a browser lays out so many in less than a second."""

MOST_LINE = 2000
"""Characters of one line."""


_MOST_MERGED = 4
"""So many times the bytes that are wanted may come: more do if a file is not what its size, or the timeline, says."""


class Line(NamedTuple):
    """A line of a worker: when its end was written (Unix time), by whom, and without what a terminal would obey."""

    time: float
    attempt: int
    rank: int
    stream: str
    text: str


def read_last(
    attempts: dict[int, str], rank_of: Callable[[int, int], int], most: int = MOST_BYTES
) -> tuple[list[Line], str]:
    """Read the last lines of a run.

    Args:
        attempts: The folder of each attempt.
        rank_of: Returns the global rank of an attempt's local one.
        most: Bytes that are read, about.

    Returns:
        The lines, the first one first; and what was left out, a sentence, or "".
    """
    left, lost, size, problem = most, 0, 0, ""
    parts: list[list[Line]] = []
    for attempt, folder in sorted(attempts.items(), reverse=True):
        followers = {
            2 * local + index: Follower(os.path.join(folder, str(local), f"{name}.log"), rotates=True)
            for local in _ranks(folder)
            for index, name in enumerate(STREAMS)
        }
        sizes = dict.fromkeys(followers, 0)
        for stream, follower in followers.items():
            with suppress(OSError):
                sizes[stream] = follower.left()
            follower.close()
        size += (own := sum(sizes.values()))
        if left <= 0:
            lost += own
            continue
        try:
            lines, read = _read(followers, sizes, os.path.join(folder, NAME), attempt, rank_of, left)
        except OSError as error:
            problem = f" Of attempt {attempt} they are unreadable: {error.strerror or error}."
            continue
        finally:
            for follower in followers.values():
                follower.close()
        parts.append(lines)
        lost += max(0, own - read)
        left -= read
    found = [line for part in reversed(parts) for line in part]
    if len(found) > MOST_LINES:
        return found[-MOST_LINES:], f"These are the last {MOST_LINES:,} lines; the log files have all of them.{problem}"
    if lost:
        what = f"These are the last {format_size(max(0, size - lost))} of {format_size(size)} of logs"
        return found, f"{what}; the log files have all of them.{problem}"
    return found, problem.strip()


def _ranks(folder: str) -> list[int]:
    """Return the local ranks that have a folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii() and name == str(int(name)))


def _read(
    followers: dict[int, Follower],
    sizes: dict[int, int],
    timeline: str,
    attempt: int,
    rank_of: Callable[[int, int], int],
    most: int,
) -> tuple[list[Line], int]:
    """Return the last lines of an attempt, and how many bytes were read for them. Raises OSError."""
    kept: deque[tuple[Line, int]] = deque()
    held: dict[int, _Partial] = {}
    size = 0
    total = 0
    for time, stream, data in merge(followers, timeline, most):
        if (total := total + len(data)) > _MOST_MERGED * most:
            break
        partial = held.setdefault(stream, _Partial())
        for text, length in partial.take(data):
            kept.append((Line(time, attempt, rank_of(attempt, stream // 2), STREAMS[stream % 2], text), length))
            size += length
            partial.first = partial.first or kept[-1][0]
            while size > most or len(kept) > MOST_LINES + 1:
                size -= kept.popleft()[1]
        partial.time = time
    rest = [
        (Line(one.time, attempt, rank_of(attempt, stream // 2), STREAMS[stream % 2], text), length)
        for stream, one in held.items()
        for text, length in one.finish()
    ]
    kept.extend(sorted(rest, key=lambda part: part[0].time))
    torn = {id(one.first) for stream, one in held.items() if one.read < sizes[stream]}  # their beginnings were not read
    return [line for line, _ in kept if id(line) not in torn], min(most, sum(one.read for one in held.values()))


class _Partial:
    """A stream's line without its end so far: of a long one, its beginning and its length."""

    def __init__(self) -> None:
        self.time = 0.0
        self.read = 0
        """Bytes of the stream so far;"""
        self.first: Line | None = None
        """and its first line."""
        self._head = b""
        self._length = 0

    def take(self, data: bytes) -> Iterator[tuple[str, int]]:
        """Yield the lines that ``data`` ends, each with its length in bytes."""
        self.read += len(data)
        *lines, last = data.split(b"\n")
        for line in lines:
            self._add(line)
            yield from self._end()
        self._add(last)

    def finish(self) -> Iterator[tuple[str, int]]:
        """Yield the line that has no end, if there is one."""
        if self._length:
            yield from self._end()

    def _add(self, data: bytes) -> None:
        room = 4 * MOST_LINE - len(self._head)
        self._head += data[: max(0, room)]
        self._length += len(data)

    def _end(self) -> Iterator[tuple[str, int]]:
        head, length = self._head, self._length
        self._head, self._length = b"", 0
        yield shown(head, length), length + 1


def shown(head: bytes, length: int) -> str:
    r"""Return a line as a page has it, by its beginning and its length in bytes.

    >>> shown(b"\033[31mred\033[0m \xe2\x80\xae\xff\0", 16)
    'red \\u202e\\xff\\x00'
    """
    text = plain(head.decode("utf-8", "backslashreplace"))
    over = max(0, len(text) - MOST_LINE) + length - len(head)
    return text if over <= 0 else f"{text[:MOST_LINE]} … {how_many(over, 'more character')}"
