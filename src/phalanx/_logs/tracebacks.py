"""Tracebacks that are equal across ranks are shown once. Owns where one begins and ends in a rank's lines.

What comes of a rank after a traceback that is held comes after it, with it. The comparison is the business of `fold`.
"""

from __future__ import annotations

import functools
import math

from phalanx._base import clock
from phalanx._logs.dedup import unmarked

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from phalanx._logs.dedup import Fold
    from phalanx._logs.render import Lane

HEAD = b"Traceback (most recent call last):"
_CHAIN = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_BESIDE_GROUPS = (b"|", b"+")  # how the lines of an exception group begin, after spaces
_GROUP_ENDS = b"+---"  # or another of its exceptions begins

QUIET = 0.1
"""Seconds after which a traceback is not waited for any longer that has no end, or may go on with another."""

_MOST = 64 * 1024  # bytes of a traceback
_FLOOD = 64  # heads in one read: whoever writes so many is to be kept up with


class _Open:
    """A traceback that is being written."""

    __slots__ = ("changed", "end", "group", "lane", "lines", "size", "time")

    def __init__(self, lane: Lane, time: float) -> None:
        self.lane = lane
        self.time = time  # when it began, by the lines' time
        self.lines: list[bytes] = []
        self.end = 0  # how many lines there were with that of the exception; 0: it has not come
        self.group = False  # whether it is of an exception group, which ends otherwise
        self.size = 0
        self.changed = 0.0

    def take_plain(self, block: bytes, begin: int) -> int:
        """Take all of it at once, if it is a plain one and whole. Returns where the rest of the block begins."""
        found = _plain().match(block, begin)
        if found is None or found.end() - begin > _MOST or block.find(HEAD, begin + len(HEAD), found.end()) >= 0:
            return begin
        self.lines = [found[0][:-1]]
        self.end = 1
        self.size = len(found[0])
        return found.end()

    def take(self, line: bytes) -> bool:
        """Take the next line, if it is one of the traceback, or may be. Returns whether it is."""
        plain = unmarked(self.lane, line)
        text = plain.strip()
        if plain.endswith(HEAD):
            self.end = 0
            self.group = text.startswith(_BESIDE_GROUPS)
        elif not text or plain in _CHAIN:  # of the exception's message, or between two of a chain
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
    """Takes whole lines of lanes; holds tracebacks, and what comes after them, for their equals. Loses nothing.

    ``show`` is called with a lane and whole lines of it that are not held.
    """

    def __init__(self, fold: Fold, show: Callable[[Lane, bytes], None]) -> None:
        self._fold = fold
        self._show = show
        self._open: dict[int, _Open] = {}  # by rank; the one that has waited longest comes first

    @property
    def due(self) -> float:
        """When `tick` has something to do (seconds, monotonic)."""
        first = next(iter(self._open.values()), None)
        return min(self._fold.due, math.inf if first is None else first.changed + QUIET)

    def expect(self, lane: Lane) -> None:
        """There is one more lane, whose tracebacks may be those of others."""
        self._fold.expect(lane)

    def holds(self, lane: Lane) -> bool:
        """Whether something of a rank is held, which comes before what is shown of this lane next."""
        it = self._open.get(lane.rank)
        return self._fold.holds(lane) or (it is not None and (it.lane is lane or it.end > 0))

    def take(self, lane: Lane, block: bytes) -> None:
        """Take whole lines of a lane."""
        if not self.holds(lane) and (HEAD not in block or self._fold.is_alone(lane)):
            self._show(lane, block)
            return
        if block.count(HEAD) > _FLOOD:
            self.release()
            self._show(lane, block)
            return
        self.tick()
        self._read(lane, block)
        it = self._open.get(lane.rank)
        if it is not None and it.lane is lane:
            it.changed = clock.now()
            self._open[lane.rank] = self._open.pop(lane.rank)
        self._fold.release()

    def tick(self) -> None:
        """Let go of what has waited long enough."""
        now = clock.now()
        while self._open and (first := next(iter(self._open.values()))).changed + QUIET <= now:
            self._close(first.lane.rank)
        self._fold.release()

    def release(self) -> None:
        """Hold nothing back any longer."""
        for rank in list(self._open):
            self._close(rank)
        self._fold.release(everything=True)

    def _read(self, lane: Lane, block: bytes) -> None:
        """Tell tracebacks from what is around them."""
        place = 0
        while place < len(block):
            it = self._open.get(lane.rank)
            if it is not None and it.lane is lane:
                end = block.index(b"\n", place) + 1
                if not it.take(block[place : end - 1]):
                    self._close(lane.rank)
                    continue
                place = end
                if it.size > _MOST:
                    self._close(lane.rank)
                continue
            head = block.find(HEAD + b"\n", place)
            begin = len(block) if head < 0 else max(place, block.rfind(b"\n", place, head) + 1)
            if begin > place:
                self._pass(lane, block[place:begin])
            if head >= 0:
                if lane.rank in self._open:  # of its other stream
                    self._close(lane.rank)
                it = self._open[lane.rank] = _Open(lane, self._fold.clock())
                begin = it.take_plain(block, begin)
            place = begin

    def _pass(self, lane: Lane, block: bytes) -> None:
        """Lines that are of no traceback: they come after what is held of their rank."""
        if lane.rank in self._open and self._open[lane.rank].end:  # of its other stream
            self._close(lane.rank)
        if self._fold.holds(lane):
            self._fold.follow(lane, block)
        else:
            self._show(lane, block)

    def _close(self, rank: int) -> None:
        """A traceback is whole, as far as can be told: it waits for its equals."""
        it = self._open.pop(rank)
        end = it.end or len(it.lines)
        self._fold.add(it.lane, b"\n".join(it.lines[:end]), it.time)
        if end < len(it.lines):
            self._fold.follow(it.lane, b"\n".join([*it.lines[end:], b""]))


@functools.cache
def _plain() -> re.Pattern[bytes]:
    """A traceback that stands alone at the margin: tracebacks may come by the thousand."""
    import re

    return re.compile(re.escape(HEAD) + rb"\n(?:[ \t][^\n]*+\n)*+\S[^\n]*+\n")
