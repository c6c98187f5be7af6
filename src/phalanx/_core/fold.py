"""Equal texts of several ranks (lines, tracebacks) become one. Owns the comparison, and the order of what is held.

Torch puts ``[rank3]: `` before each line of an exception that ends a rank. Texts that differ in that alone are equal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from operator import attrgetter

from phalanx._core import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._core.view import Lane

WINDOW = 0.2
"""Seconds in which a text waits for its equals."""

_MOST = 4096  # texts that are held
_MOST_BYTES = 1 << 20
_number = attrgetter("number")


def unmarked(lane: Lane, text: bytes) -> bytes:
    """A text without the rank of its lane at the beginning of lines, as torch writes it there."""
    mark = b"[rank%d]: " % lane.rank
    return (b"\n" + text).replace(b"\n" + mark, b"\n")[1:] if mark in text else text


class _Entry:
    __slots__ = ("lanes", "number", "since", "text", "time", "written")

    def __init__(self, number: int, lane: Lane, text: bytes, written: bytes, time: float) -> None:
        self.number = number
        self.text = text
        self.written = written  # as its first lane has it
        self.lanes = [lane]
        self.since = clock.now()
        self.time = time


class Fold:
    """Holds each text for a window; those of other ranks that are equal join it. Each rank's texts keep their order.

    Args:
        emit: Is called with the lanes that said a text, and the text with its end.
        lanes: How many there are, of each stream: a text that all have said waits no longer.
        window: Seconds.
        time: What time it is for the lines (seconds since the epoch).
    """

    def __init__(
        self,
        emit: Callable[[list[Lane], bytes], None],
        lanes: dict[str, int],
        window: float = WINDOW,
        time: Callable[[], float] = clock.wall,
    ) -> None:
        self._emit = emit
        self._lanes = lanes
        self._window = window
        self._clock = time
        self.time = 0.0
        """When the text that is given out came, by the lines' time."""
        self._queue: deque[_Entry] = deque()
        self._equals: dict[tuple[str, bytes], list[_Entry]] = {}  # in the order of the queue
        self._last: dict[Lane, int] = {}
        self._count = 0
        self._bytes = 0

    @property
    def due(self) -> float:
        """When `release` has something to do (seconds, monotonic)."""
        if not self._queue:
            return math.inf
        first = self._queue[0]
        return first.since if self._complete(first) else first.since + self._window

    def holds(self, lane: Lane) -> bool:
        """Whether a text of a lane is held."""
        return bool(self._queue) and self._last.get(lane, -1) >= self._queue[0].number

    def add_lines(self, lane: Lane, block: bytes) -> None:
        """Take whole lines of a lane."""
        self.release()
        for line in block.split(b"\n")[:-1]:
            self.add(lane, line)

    def add(self, lane: Lane, text: bytes) -> None:
        """Take a text of a lane, without its end."""
        written, text = text, unmarked(lane, text)
        equals = self._equals.setdefault((lane.stream, text), [])
        # The first that came after the lane's last text: else its texts would change places.
        place = bisect_right(equals, self._last.get(lane, -1), key=_number)
        if place < len(equals):
            entry = equals[place]
            entry.lanes.append(lane)
        else:
            entry = _Entry(self._count, lane, text, written, self._clock())
            self._count += 1
            self._bytes += len(text)
            equals.append(entry)
            self._queue.append(entry)
        self._last[lane] = entry.number
        while len(self._queue) > _MOST or self._bytes > _MOST_BYTES:
            self._let_go()

    def release(self, *, everything: bool = False) -> None:
        """Give out what has waited long enough, in order."""
        while self._queue and (everything or self.due <= clock.now()):
            self._let_go()

    def pass_time(self) -> None:
        """The lines' time has gone on, which need not be ours: give out what has waited long enough by theirs."""
        now = self._clock()
        while self._queue and (self._complete(self._queue[0]) or self._queue[0].time + self._window <= now):
            self._let_go()

    def _let_go(self) -> None:
        entry = self._queue.popleft()
        self.time = entry.time
        self._bytes -= len(entry.text)
        key = (entry.lanes[0].stream, entry.text)
        equals = self._equals[key]
        del equals[0]
        if not equals:
            del self._equals[key]
        self._emit(entry.lanes, (entry.text if len(entry.lanes) > 1 else entry.written) + b"\n")

    def _complete(self, entry: _Entry) -> bool:
        return len(entry.lanes) >= self._lanes.get(entry.lanes[0].stream, 0)
