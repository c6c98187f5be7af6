"""Merges equal texts (lines, tracebacks) of several ranks into one.

Owns the comparison, the order of held texts, and where a traceback begins and ends. Torch puts ``[rank3]: `` before
each line of an exception that ends a rank. Texts that differ in that alone are equal. Lines that a rank writes after a
held traceback are shown after it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import attrgetter, itemgetter

from phalanx._base import clock
from phalanx._logs.lines import Source

Part = tuple[Source, float, bytes]  # whole lines, and when they came
WINDOW = 0.2
"""Seconds for which a text is held, so that equal ones can join it."""

_MOST_HELD = 4096  # held texts
_MOST_BYTES = 1 << 20
_PART = 200  # bytes that each held `Part` takes beside its text
_COMPARED = 256  # lines after a held text that are compared one by one
_number = attrgetter("number")


def unmarked(source: Source, text: bytes) -> bytes:
    """Return a text without the ``[rank3]: `` that torch puts before its lines."""
    mark = b"[rank%d]: " % source.rank
    return (b"\n" + text).replace(b"\n" + mark, b"\n")[1:] if mark in text else text


class _Entry:
    """A held text, and the sources that wrote it."""

    __slots__ = ("after", "number", "since", "sources", "text", "time", "written")

    def __init__(self, number: int, source: Source, text: bytes, written: bytes, time: float) -> None:
        self.number = number
        self.text = text
        self.written = written  # as its first source wrote it, with torch's marks
        self.sources = [source]
        self.since = clock.now()
        self.time = time
        self.after: dict[int, list[Part]] = {}  # what each rank has written since


class Dedup:
    """Holds each text for a window, in which equal texts of other ranks join it. Each rank's texts keep their order.

    Args:
        emit: Is called with the sources that wrote a text, and the text with its line end.
        sources: The number of sources of each stream. A text that all of them have written is not held any longer.
        time: Returns the time that new lines get (seconds since the epoch).
        by_rank: Whether both streams of a rank keep one order. Otherwise each stream has its own.
    """

    def __init__(
        self,
        emit: Callable[[list[Source], bytes], None],
        sources: dict[str, int],
        time: Callable[[], float] = clock.wall,
        *,
        by_rank: bool = False,
    ) -> None:
        self._emit = emit
        self._sources = sources
        self._who: Callable[[Source], object] = attrgetter("rank") if by_rank else lambda source: source
        self.clock = time
        """Returns the time that new lines get."""
        self.time = 0.0
        """When the text came that is passed to ``emit`` (seconds since the epoch, by ``clock``)."""
        self._queue: deque[_Entry] = deque()
        self._equals: dict[tuple[str, bytes], list[_Entry]] = {}  # in the order of the queue
        self._last: dict[object, _Entry] = {}  # the last held text of each rank or source
        self._count = 0
        self._bytes = 0

    @property
    def due(self) -> float:
        """When `release` has something to do (seconds, monotonic)."""
        if not self._queue:
            return math.inf
        first = self._queue[0]
        return first.since if self._complete(first) else first.since + WINDOW

    def expect(self, source: Source) -> None:
        """Count one more source, which may write texts."""
        self._sources[source.stream] = self._sources.get(source.stream, 0) + 1

    def is_alone(self, source: Source) -> bool:
        """Whether no other source could write the same text."""
        return self._sources.get(source.stream, 0) <= 1

    def holds(self, source: Source) -> bool:
        """Whether a held text has to come before the next lines of a source."""
        return self._who(source) in self._last

    def add_lines(self, source: Source, block: bytes) -> None:
        """Take whole lines of a source."""
        self.release()
        for line in block.split(b"\n")[:-1]:
            self.add(source, line)

    def add(self, source: Source, text: bytes, time: float | None = None) -> None:
        """Take a text of a source, without its line end, that came at ``time`` (default: now)."""
        written, text = text, unmarked(source, text)
        equals = self._equals.setdefault((source.stream, text), [])
        who = self._who(source)
        last = self._last.get(who)
        # The first that came after the source's last text: else its texts would change their order.
        index = 0 if last is None else bisect_right(equals, last.number, key=_number)
        if index < len(equals):
            entry = equals[index]
            entry.sources.append(source)
        else:
            entry = _Entry(self._count, source, text, written, self.clock() if time is None else time)
            self._count += 1
            self._bytes += len(text)
            equals.append(entry)
            self._queue.append(entry)
        self._last[who] = entry
        self._bound_held()

    def follow(self, source: Source, block: bytes) -> None:
        """Take whole lines that a source wrote after its held text. They are written after it, too."""
        entry = self._last.get(self._who(source))
        if entry is None:  # too much was held: it is written already
            self._emit_text([source], self.clock(), block)
            return
        entry.after.setdefault(source.rank, []).append((source, self.clock(), block))
        self._bytes += len(block) + _PART
        self._bound_held()

    def release(self, *, everything: bool = False) -> None:
        """Emit the texts that have been held for the window, in order."""
        while self._queue and (everything or self.due <= clock.now()):
            self._emit_first()

    def pass_time(self) -> None:
        """Emit the texts whose window has passed by the lines' own time, which is not the clock's in a replay."""
        now = self.clock()
        while self._queue and (self._complete(self._queue[0]) or self._queue[0].time + WINDOW <= now):
            self._emit_first()

    def _bound_held(self) -> None:
        while len(self._queue) > _MOST_HELD or self._bytes > _MOST_BYTES:
            self._emit_first()

    def _emit_first(self) -> None:
        entry = self._queue.popleft()
        self._bytes -= len(entry.text)
        key = (entry.sources[0].stream, entry.text)
        equals = self._equals[key]
        del equals[0]
        if not equals:
            del self._equals[key]
        for source in entry.sources:
            who = self._who(source)
            if self._last.get(who) is entry:
                del self._last[who]
        self._emit_text(entry.sources, entry.time, (entry.text if len(entry.sources) > 1 else entry.written) + b"\n")
        if entry.after:
            self._bytes -= sum(len(block) + _PART for parts in entry.after.values() for _source, _time, block in parts)
            for sources, time, text in joined(entry.after.values()):
                self._emit_text(sources, time, text)

    def _emit_text(self, sources: list[Source], time: float, text: bytes) -> None:
        self.time = time
        self._emit(sources, text)

    def _complete(self, entry: _Entry) -> bool:
        return len(entry.sources) >= self._sources.get(entry.sources[0].stream, 0)


def joined(written: Iterable[list[Part]]) -> Iterator[tuple[list[Source], float, bytes]]:
    """Yield what ranks have written, each in its order. Lines that several share, from the first on, come once."""
    groups = _alike(list(map(_by_line, written)), 0)
    while groups:
        ranks, index = groups.pop()
        if len(ranks) == 1:
            for (source, time), parts in groupby(ranks[0][index:], key=itemgetter(0, 1)):
                yield [source], time, b"".join([block for _source, _time, block in parts])
        else:
            source, time, block = ranks[0][index]
            yield [parts[index][0] for parts in ranks], time, unmarked(source, block)
            groups += _alike(ranks, index + 1)


def _alike(written: list[list[Part]], index: int) -> list[tuple[list[list[Part]], int]]:
    """Group the ranks whose parts at ``index`` are equal, the last group first. Leaves out ranks without that part."""
    groups: dict[object, list[list[Part]]] = {}
    for parts in written:
        if index < len(parts):
            source, _time, block = parts[index]
            groups.setdefault((source.stream, unmarked(source, block)), []).append(parts)
    return [(ranks, index) for ranks in reversed(groups.values())]


def _by_line(parts: list[Part]) -> list[Part]:
    """Cut the first `_COMPARED` lines into parts of one line each."""
    lines: list[Part] = []
    for number, (source, time, block) in enumerate(parts):
        if len(lines) >= _COMPARED:
            return lines + parts[number:]
        *found, rest = block.split(b"\n", _COMPARED)
        lines += [(source, time, line + b"\n") for line in found]
        if rest:
            lines.append((source, time, rest))
    return lines


HEAD = b"Traceback (most recent call last):"
_CHAIN = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)

QUIET = 0.1
"""Seconds without a line after which a traceback counts as ended, though it has no end or may go on with another."""

_LONGEST = 64 * 1024  # bytes of a traceback
_FLOOD = 64  # tracebacks in one read, from which on they are not compared: the display has to keep up


class _Open:
    """A traceback that is being written."""

    __slots__ = ("changed", "end", "lines", "size", "source", "time")

    def __init__(self, source: Source, time: float) -> None:
        self.source = source
        self.time = time  # when it began (seconds since the epoch)
        self.lines: list[bytes] = []
        self.end = 0  # the number of lines up to that of the exception; 0 as long as it has not come
        self.size = 0
        self.changed = 0.0

    def take(self, line: bytes) -> bool:
        """Take the next line if it belongs to the traceback, or may. Returns whether it does."""
        plain = unmarked(self.source, line)
        if plain.endswith(HEAD):
            self.end = 0
        elif plain.strip() and plain not in _CHAIN:  # else one of the exception's message, or between two of a chain
            if self.end:
                return False
            if not plain[:1].isspace():
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
        # A search for one byte is memchr(3), which passes over most blocks in a tenth of the time.
        if not self.holds(source) and (self._dedup.is_alone(source) or b"(" not in block or HEAD not in block):
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
                if it.size > _LONGEST:
                    self._close(source.rank)
                continue
            head = block.find(HEAD + b"\n", offset)
            begin = len(block) if head < 0 else max(offset, block.rfind(b"\n", offset, head) + 1)
            if begin > offset:
                self._pass(source, block[offset:begin])
            if head >= 0:
                if source.rank in self._open:  # a traceback in its other stream
                    self._close(source.rank)
                self._open[source.rank] = _Open(source, self._dedup.clock())
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
