"""Finds tracebacks in a rank's lines, so that equal ones of several ranks are shown once.

Owns where a traceback begins and ends. Lines that a rank writes after a held traceback are shown after it. `dedup`
compares.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

from phalanx._base import clock
from phalanx._logs.dedup import Dedup, unmarked
from phalanx._logs.line_state import Source

HEAD = b"Traceback (most recent call last):"
_CHAIN = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_BESIDE_GROUPS = (b"|", b"+")  # how the lines of an exception group begin, after spaces
_GROUP_ENDS = b"+---"  # the end of the group, or the beginning of another of its exceptions

QUIET = 0.1
"""Seconds without a line after which a traceback counts as ended, though it has no end or may go on with another."""

_MOST = 64 * 1024  # bytes of a traceback
_FLOOD = 64  # tracebacks in one read, from which on they are not compared: the display has to keep up


class _Open:
    """A traceback that is being written."""

    __slots__ = ("changed", "end", "group", "lines", "size", "source", "time")

    def __init__(self, source: Source, time: float) -> None:
        self.source = source
        self.time = time  # when it began (seconds since the epoch)
        self.lines: list[bytes] = []
        self.end = 0  # the number of lines up to that of the exception; 0 as long as it has not come
        self.group = False  # whether it is that of an exception group, which ends differently
        self.size = 0
        self.changed = 0.0

    def take_plain(self, block: bytes, begin: int) -> int:
        """Take a plain, whole traceback at once, if one is at ``begin``. Returns where the rest of the block begins."""
        found = _plain().match(block, begin)
        if found is None or found.end() - begin > _MOST or block.find(HEAD, begin + len(HEAD), found.end()) >= 0:
            return begin
        self.lines = [found[0][:-1]]
        self.end = 1
        self.size = len(found[0])
        return found.end()

    def take(self, line: bytes) -> bool:
        """Take the next line if it belongs to the traceback, or may. Returns whether it does."""
        plain = unmarked(self.source, line)
        text = plain.strip()
        if plain.endswith(HEAD):
            self.end = 0
            self.group = text.startswith(_BESIDE_GROUPS)
        elif not text or plain in _CHAIN:  # a line of the exception's message, or between two of a chain
            if self.group and not self.end:
                self.end = len(self.lines)
        elif self.group:
            if not (plain[:1].isspace() and text.startswith(_BESIDE_GROUPS)):
                self.end = self.end or len(self.lines)
                return False
            if text.startswith(_GROUP_ENDS):
                self.end = len(self.lines) + 1
        elif self.end:
            return False
        elif not plain[:1].isspace():
            self.end = len(self.lines) + 1
        self.lines.append(line)
        self.size += len(line) + 1
        return True


class Tracebacks:
    """Takes whole lines of sources and holds their tracebacks, and the lines after those, for comparison.

    Args:
        dedup: Compares the tracebacks.
        show: Is called with a source and those of its whole lines that are not held.
    """

    def __init__(self, dedup: Dedup, show: Callable[[Source, bytes], None]) -> None:
        self._dedup = dedup
        self._show = show
        self._open: dict[int, _Open] = {}  # by rank; the one that has been open longest comes first

    @property
    def due(self) -> float:
        """When `tick` has something to do (seconds, monotonic)."""
        first = next(iter(self._open.values()), None)
        return min(self._dedup.due, math.inf if first is None else first.changed + QUIET)

    def expect(self, source: Source) -> None:
        """Count one more source, whose tracebacks may equal others'."""
        self._dedup.expect(source)

    def holds(self, source: Source) -> bool:
        """Whether held lines of the rank have to come before the next lines of this source."""
        it = self._open.get(source.rank)
        return self._dedup.holds(source) or (it is not None and (it.source is source or it.end > 0))

    def take(self, source: Source, block: bytes) -> None:
        """Take whole lines of a source."""
        if not self.holds(source) and (HEAD not in block or self._dedup.is_alone(source)):
            self._show(source, block)
            return
        if block.count(HEAD) > _FLOOD:
            self.release()
            self._show(source, block)
            return
        self.tick()
        self._read(source, block)
        it = self._open.get(source.rank)
        if it is not None and it.source is source:
            it.changed = clock.now()
            self._open[source.rank] = self._open.pop(source.rank)
        self._dedup.release()

    def tick(self) -> None:
        """Close the tracebacks that have had no line for `QUIET` seconds; emit what has been held for the window."""
        now = clock.now()
        while self._open and (first := next(iter(self._open.values()))).changed + QUIET <= now:
            self._close(first.source.rank)
        self._dedup.release()

    def release(self) -> None:
        """Emit everything that is held."""
        for rank in list(self._open):
            self._close(rank)
        self._dedup.release(everything=True)

    def _read(self, source: Source, block: bytes) -> None:
        """Cut a block into tracebacks and the lines around them."""
        offset = 0
        while offset < len(block):
            it = self._open.get(source.rank)
            if it is not None and it.source is source:
                end = block.index(b"\n", offset) + 1
                if not it.take(block[offset : end - 1]):
                    self._close(source.rank)
                    continue
                offset = end
                if it.size > _MOST:
                    self._close(source.rank)
                continue
            head = block.find(HEAD + b"\n", offset)
            begin = len(block) if head < 0 else max(offset, block.rfind(b"\n", offset, head) + 1)
            if begin > offset:
                self._pass(source, block[offset:begin])
            if head >= 0:
                if source.rank in self._open:  # a traceback in its other stream
                    self._close(source.rank)
                it = self._open[source.rank] = _Open(source, self._dedup.clock())
                begin = it.take_plain(block, begin)
            offset = begin

    def _pass(self, source: Source, block: bytes) -> None:
        """Take lines outside tracebacks: they follow the held lines of their rank."""
        if source.rank in self._open and self._open[source.rank].end:  # a traceback in its other stream
            self._close(source.rank)
        if self._dedup.holds(source):
            self._dedup.follow(source, block)
        else:
            self._show(source, block)

    def _close(self, rank: int) -> None:
        """Pass a traceback, which counts as whole, to `dedup`, and the lines after it."""
        it = self._open.pop(rank)
        end = it.end or len(it.lines)
        self._dedup.add(it.source, b"\n".join(it.lines[:end]), it.time)
        if end < len(it.lines):
            self._dedup.follow(it.source, b"\n".join([*it.lines[end:], b""]))


@functools.cache
def _plain() -> re.Pattern[bytes]:
    """Return a pattern for a traceback at the margin, without chain or group: fast, for thousands of them."""
    return re.compile(re.escape(HEAD) + rb"\n(?:[ \t][^\n]*+\n)*+\S[^\n]*+\n")
