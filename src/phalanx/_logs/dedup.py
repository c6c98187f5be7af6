"""Equal texts of several ranks (lines, tracebacks) become one. Owns the comparison, and the order of what is held.

Torch puts ``[rank3]: `` before each line of an exception that ends a rank. Texts that differ in that alone are equal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from itertools import groupby
from operator import attrgetter, itemgetter

from phalanx._base import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from phalanx._logs.render import Lane

    Part = tuple[Lane, float, bytes]  # whole lines, and when they came

WINDOW = 0.2
"""Seconds in which a text waits for its equals."""

_MOST = 4096  # texts that are held
_MOST_BYTES = 1 << 20
_PART = 200  # what each part of what follows takes beside its bytes
_COMPARED = 256  # lines of what follows that are compared one by one
_number = attrgetter("number")


def unmarked(lane: Lane, text: bytes) -> bytes:
    """A text without the rank of its lane at the beginning of lines, as torch writes it there."""
    mark = b"[rank%d]: " % lane.rank
    return (b"\n" + text).replace(b"\n" + mark, b"\n")[1:] if mark in text else text


class _Entry:
    __slots__ = ("after", "lanes", "number", "since", "text", "time", "written")

    def __init__(self, number: int, lane: Lane, text: bytes, written: bytes, time: float) -> None:
        self.number = number
        self.text = text
        self.written = written  # as its first lane has it
        self.lanes = [lane]
        self.since = clock.now()
        self.time = time
        self.after: dict[int, list[Part]] = {}  # what each rank has said since


class Fold:
    """Holds each text for a window; those of other ranks that are equal join it. Each rank's texts keep their order.

    Args:
        emit: Is called with the lanes that said a text, and the text with its end.
        lanes: How many there are, of each stream: a text that all have said waits no longer.
        window: Seconds.
        time: What time it is for the lines (seconds since the epoch).
        by_rank: Whether the streams of a rank keep one order. Else, each has its own.
    """

    def __init__(
        self,
        emit: Callable[[list[Lane], bytes], None],
        lanes: dict[str, int],
        window: float = WINDOW,
        time: Callable[[], float] = clock.wall,
        *,
        by_rank: bool = False,
    ) -> None:
        self._emit = emit
        self._lanes = lanes
        self._window = window
        self._who: Callable[[Lane], object] = attrgetter("rank") if by_rank else _itself
        self.clock = time
        """What time it is for the lines."""
        self.time = 0.0
        """When the text that is given out came, by the lines' time."""
        self._queue: deque[_Entry] = deque()
        self._equals: dict[tuple[str, bytes], list[_Entry]] = {}  # in the order of the queue
        self._last: dict[object, _Entry] = {}  # of those that are held
        self._count = 0
        self._bytes = 0

    @property
    def due(self) -> float:
        """When `release` has something to do (seconds, monotonic)."""
        if not self._queue:
            return math.inf
        first = self._queue[0]
        return first.since if self._complete(first) else first.since + self._window

    def expect(self, lane: Lane) -> None:
        """There is one more lane, of which a text may come."""
        self._lanes[lane.stream] = self._lanes.get(lane.stream, 0) + 1

    def is_alone(self, lane: Lane) -> bool:
        """Whether no other lane could say what one says."""
        return self._lanes.get(lane.stream, 0) <= 1

    def holds(self, lane: Lane) -> bool:
        """Whether a text is held that comes before what a lane says next."""
        return self._who(lane) in self._last

    def add_lines(self, lane: Lane, block: bytes) -> None:
        """Take whole lines of a lane."""
        self.release()
        for line in block.split(b"\n")[:-1]:
            self.add(lane, line)

    def add(self, lane: Lane, text: bytes, time: float | None = None) -> None:
        """Take a text of a lane, without its end, that came at a time; default: now."""
        written, text = text, unmarked(lane, text)
        equals = self._equals.setdefault((lane.stream, text), [])
        who = self._who(lane)
        last = self._last.get(who)
        # The first that came after the lane's last text: else its texts would change places.
        place = 0 if last is None else bisect_right(equals, last.number, key=_number)
        if place < len(equals):
            entry = equals[place]
            entry.lanes.append(lane)
        else:
            entry = _Entry(self._count, lane, text, written, self.clock() if time is None else time)
            self._count += 1
            self._bytes += len(text)
            equals.append(entry)
            self._queue.append(entry)
        self._last[who] = entry
        self._keep_few()

    def follow(self, lane: Lane, block: bytes) -> None:
        """Take whole lines that come after the text that is held of a lane, and with it."""
        entry = self._last.get(self._who(lane))
        if entry is None:  # it was too much to be held
            self._give_out([lane], self.clock(), block)
            return
        entry.after.setdefault(lane.rank, []).append((lane, self.clock(), block))
        self._bytes += len(block) + _PART
        self._keep_few()

    def release(self, *, everything: bool = False) -> None:
        """Give out what has waited long enough, in order."""
        while self._queue and (everything or self.due <= clock.now()):
            self._let_go()

    def pass_time(self) -> None:
        """The lines' time has gone on, which need not be ours: give out what has waited long enough by theirs."""
        now = self.clock()
        while self._queue and (self._complete(self._queue[0]) or self._queue[0].time + self._window <= now):
            self._let_go()

    def _keep_few(self) -> None:
        while len(self._queue) > _MOST or self._bytes > _MOST_BYTES:
            self._let_go()

    def _let_go(self) -> None:
        entry = self._queue.popleft()
        self._bytes -= len(entry.text)
        key = (entry.lanes[0].stream, entry.text)
        equals = self._equals[key]
        del equals[0]
        if not equals:
            del self._equals[key]
        for lane in entry.lanes:
            who = self._who(lane)
            if self._last.get(who) is entry:
                del self._last[who]
        self._give_out(entry.lanes, entry.time, (entry.text if len(entry.lanes) > 1 else entry.written) + b"\n")
        if entry.after:
            self._bytes -= sum(len(block) + _PART for parts in entry.after.values() for _lane, _time, block in parts)
            for lanes, time, text in joined(entry.after.values()):
                self._give_out(lanes, time, text)

    def _give_out(self, lanes: list[Lane], time: float, text: bytes) -> None:
        self.time = time
        self._emit(lanes, text)

    def _complete(self, entry: _Entry) -> bool:
        return len(entry.lanes) >= self._lanes.get(entry.lanes[0].stream, 0)


def joined(said: Iterable[list[Part]]) -> Iterator[tuple[list[Lane], float, bytes]]:
    """What ranks have said, each in its order. What several have said alike, from the beginning, comes once."""
    groups = _alike(list(map(_by_line, said)), 0)
    while groups:
        ranks, place = groups.pop()
        if len(ranks) == 1:
            for (lane, time), parts in groupby(ranks[0][place:], key=itemgetter(0, 1)):
                yield [lane], time, b"".join([block for _lane, _time, block in parts])
        else:
            lane, time, block = ranks[0][place]
            yield [parts[place][0] for parts in ranks], time, unmarked(lane, block)
            groups += _alike(ranks, place + 1)


def _alike(said: list[list[Part]], place: int) -> list[tuple[list[list[Part]], int]]:
    """The ranks that go on alike at a place, the last first. Who says no more is not among them."""
    groups: dict[object, list[list[Part]]] = {}
    for parts in said:
        if place < len(parts):
            lane, _time, block = parts[place]
            groups.setdefault((lane.stream, unmarked(lane, block)), []).append(parts)
    return [(ranks, place) for ranks in reversed(groups.values())]


def _by_line(parts: list[Part]) -> list[Part]:
    """The same in parts of a line each, as far as they are to be compared."""
    lines: list[Part] = []
    for number, (lane, time, block) in enumerate(parts):
        if len(lines) >= _COMPARED:
            return lines + parts[number:]
        *found, rest = block.split(b"\n", _COMPARED)
        lines += [(lane, time, line + b"\n") for line in found]
        if rest:
            lines.append((lane, time, rest))
    return lines


def _itself(lane: Lane) -> object:
    return lane
